"""Energies and gradient structure, checked by automatic differentiation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanformer.attention import (
    L2,
    Linear,
    Masked,
    Sigmoid,
    Sinkhorn,
    Softmax,
    Unnormalised,
    identity_attention,
)
from meanformer.errors import InvalidInput, Overflow, Unsupported
from meanformer.flows import Flow, Schedule, solve
from meanformer.geometry import Sphere
from meanformer.measures import Gaussian, TokenCloud, pad
from meanformer.observables import (
    dissipation,
    energy,
    energy_profile,
    is_gradient_flow,
)
from reference import KEY, POINTS, QUERY, VALUE, WEIGHTS

FORM = np.array([[0.8, 0.3], [0.3, -0.4]])
ODD = np.array([[0.0, 0.7], [-0.7, 0.0]])
POSITIVE = np.array([[2.0, 0.5], [0.5, 1.0]])
IDENTITY = np.eye(2)
CLOUD = TokenCloud(POINTS, WEIGHTS)


def tight_sinkhorn(query, value, **options):
    return Sinkhorn(query, IDENTITY, value, kernel="dot", tolerance=1e-14, **options)


def gradient_of_energy(layer, cloud=CLOUD):
    slopes = jax.grad(lambda points: energy(layer, cloud.moved(points)))(cloud.points)
    return slopes / cloud.weights[:, None]


GRADIENTS = {
    "unnormalised": (Unnormalised(FORM, IDENTITY, 2 * FORM), 2.0, None),
    "unnormalised, hot": (Unnormalised(FORM, IDENTITY, FORM, beta=3.0), 1.0, None),
    "repulsive": (Unnormalised(FORM, IDENTITY, -FORM), -1.0, None),
    "linear": (Linear(FORM, IDENTITY, -1.5 * FORM, beta=2.0), -1.5, None),
    "odd linear": (Linear(ODD, IDENTITY, 3 * ODD.T), 3.0, None),
    "sigmoid": (Sigmoid(FORM, IDENTITY, FORM, bias=0.3, beta=2.0), 1.0, None),
    "softmax": (Softmax(FORM, IDENTITY, 0.7 * FORM, beta=2.0), 0.7, None),
    "twisted": (Unnormalised(FORM, IDENTITY, -POSITIVE @ FORM), -1.0, POSITIVE),
    "twisted softmax": (Softmax(FORM, IDENTITY, POSITIVE @ FORM), 1.0, POSITIVE),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_velocity_is_the_gradient_of_the_energy(name):
    layer, factor, mobility = GRADIENTS[name]
    structure = is_gradient_flow(layer)
    assert structure
    np.testing.assert_allclose(structure.factor, factor, rtol=1e-12)
    predicted = factor * gradient_of_energy(layer)
    if mobility is not None:
        np.testing.assert_allclose(structure.mobility, mobility, rtol=1e-12)
        predicted = predicted @ mobility.T
    if isinstance(layer, Softmax):
        masses = np.exp(CLOUD.log_laplace(layer.tilts(CLOUD.points)))
        predicted = predicted / masses[:, None]
    np.testing.assert_allclose(layer(CLOUD, CLOUD.points), predicted, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, -0.6])
def test_sinkhorn_is_the_gradient_of_half_its_energy(factor):
    layer = tight_sinkhorn(FORM, factor * FORM)
    structure = is_gradient_flow(layer)
    assert structure.is_wasserstein
    np.testing.assert_allclose(structure.factor, factor / 2, rtol=1e-12)
    predicted = factor / 2 * gradient_of_energy(layer)
    np.testing.assert_allclose(layer(CLOUD, CLOUD.points), predicted, atol=1e-13)


@pytest.mark.slow
def test_a_form_that_is_not_symmetric_gives_two_half_flows():
    form = np.array([[0.8, 0.6], [-0.2, -0.4]])
    layer = tight_sinkhorn(form, IDENTITY)
    plan = layer.potentials(CLOUD)
    density = np.exp(POINTS @ form.T @ POINTS.T + plan.f[:, None] + plan.g[None, :])
    seen, seeing = density * WEIGHTS[None, :], density.T * WEIGHTS[None, :]
    np.testing.assert_allclose(seen.sum(1), 1, atol=1e-13)
    np.testing.assert_allclose(seeing.sum(1), 1, atol=1e-13)
    halves = seen @ POINTS @ form + seeing @ POINTS @ form.T
    np.testing.assert_allclose(gradient_of_energy(layer), halves, atol=1e-13)
    assert "B is not symmetric" in is_gradient_flow(layer).failure


@pytest.mark.parametrize("options", [{"kernel": "dot"}, {"beta": 0.5}, {"half": True}])
def test_the_energy_tabulated_is_reproduced_for_each_kernel(options):
    layer = Sinkhorn(FORM, IDENTITY, FORM, **options)
    np.testing.assert_allclose(layer.form, FORM, rtol=1e-12)
    np.testing.assert_allclose(energy(layer, CLOUD), 0.13647165486171767, atol=1e-10)


def test_the_energy_of_sinkhorn_is_its_primal_value():
    layer = tight_sinkhorn(FORM, FORM)
    plan = layer.potentials(CLOUD)
    scores = POINTS @ FORM.T @ POINTS.T
    logarithms = scores + plan.f[:, None] + plan.g[None, :]
    joint = WEIGHTS[:, None] * np.exp(logarithms) * WEIGHTS[None, :]
    primal = np.sum(joint * scores) - np.sum(joint * logarithms)
    np.testing.assert_allclose(energy(layer, CLOUD), primal, atol=1e-13)


def test_interaction_energies_are_double_sums():
    pairs = WEIGHTS[:, None] * WEIGHTS[None, :]
    scores = POINTS @ FORM.T @ POINTS.T
    softplus = np.logaddexp(0, 2 * scores + 0.5)
    cases = [
        (Unnormalised(FORM, IDENTITY, FORM, beta=2.0), np.exp(2 * scores) / 4),
        (Linear(FORM, IDENTITY, FORM, beta=2.0), scores**2 / 2),
        (Sigmoid(FORM, IDENTITY, FORM, beta=2.0, bias=0.5), softplus / 4),
    ]
    for layer, density in cases:
        total = np.sum(pairs * density)
        np.testing.assert_allclose(energy(layer, CLOUD), total, rtol=1e-12)


def test_on_the_uniform_circle_the_energy_is_a_bessel_function():
    from scipy.special import i0

    angles = np.linspace(0, 2 * np.pi, 64, endpoint=False)
    circle = TokenCloud(np.stack([np.cos(angles), np.sin(angles)], axis=1))
    for kind in ("softmax", "unnormalised"):
        found = energy(identity_attention(kind, 2, 3.0), circle)
        np.testing.assert_allclose(found, i0(3.0) / 6, rtol=1e-12)


def test_the_linear_energy_needs_only_second_moments():
    layer = Linear(FORM, IDENTITY, FORM)
    gaussian = Gaussian(CLOUD.mean(), CLOUD.covariance())
    np.testing.assert_allclose(
        energy(layer, gaussian), energy(layer, CLOUD), rtol=1e-12
    )


def test_padding_splitting_and_order_change_no_energy():
    split = TokenCloud(
        np.concatenate([POINTS, POINTS[:1]])[::-1],
        np.array([0.1, 0.3, 0.2, 0.1, 0.3])[::-1],
    )
    padded = pad(CLOUD, 6)
    far = padded.moved(padded.points.at[5].set(jnp.array([60.0, -40.0])))
    for kind in (Unnormalised, Softmax, Linear, Sigmoid):
        layer = kind(FORM, IDENTITY, FORM)
        expected = energy(layer, CLOUD)
        for same in (split, padded, far):
            np.testing.assert_allclose(energy(layer, same), expected, rtol=1e-12)


def test_softmax_is_not_a_gradient_in_plain_wasserstein_space():
    layer = Softmax(FORM, IDENTITY, FORM)
    structure = is_gradient_flow(layer)
    assert structure
    assert not structure.is_wasserstein
    assert structure.metric == "Wasserstein with mobility 1/Z(x)"

    def field(points):
        return layer(CLOUD.moved(points), points)

    jacobian = np.asarray(jax.jacfwd(field)(CLOUD.points)).reshape(8, 8)
    weighted = np.repeat(WEIGHTS, 2)[:, None] * jacobian
    np.testing.assert_allclose(np.abs(weighted - weighted.T).max(), 0.0757, atol=5e-5)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Softmax(QUERY, KEY, VALUE), "A is not symmetric"),
        (Unnormalised(ODD, IDENTITY, ODD), "A is not symmetric"),
        (Linear(QUERY, KEY, VALUE), "nor antisymmetric"),
        (Unnormalised(FORM, IDENTITY, VALUE), "V is not c A"),
        (Unnormalised(FORM, IDENTITY, FORM[:1]), "not square"),
        (Unnormalised(FORM, IDENTITY, FORM, beta=0.0), "beta is 0"),
        (Sigmoid(FORM, IDENTITY, FORM, query_bias=[1.0, 0.0]), "query_bias"),
        (Softmax(FORM, IDENTITY, FORM, value_bias=[1.0, 0.0]), "value_bias"),
        (Sinkhorn(FORM, IDENTITY, FORM, half_steps=3), "half_steps"),
        (Linear(FORM, IDENTITY, FORM, normalized=True), "normalised"),
        (L2(KEY, KEY, VALUE), "L2"),
        (Masked(Softmax(FORM, IDENTITY, FORM)), "Masked"),
    ],
)
def test_the_condition_that_fails_is_named(layer, reason):
    structure = is_gradient_flow(layer)
    assert not structure
    assert reason in structure.failure
    assert structure.direction == "none"
    with pytest.raises(InvalidInput, match="not a gradient flow"):
        dissipation(layer, CLOUD)


def test_the_sign_of_the_multiple_decides_between_ascent_and_descent():
    for factor, direction in ((0.5, "ascent"), (-2.0, "descent"), (0.0, "none")):
        layer = Softmax(FORM, IDENTITY, factor * FORM)
        assert is_gradient_flow(layer).direction == direction
    assert dissipation(Softmax(FORM, IDENTITY, 0 * FORM), CLOUD) == 0


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_dissipation_is_the_derivative_of_the_energy(name):
    layer = GRADIENTS[name][0]
    velocity = layer(CLOUD, CLOUD.points)
    _, rate = jax.jvp(
        lambda points: energy(layer, CLOUD.moved(points)), (CLOUD.points,), (velocity,)
    )
    np.testing.assert_allclose(dissipation(layer, CLOUD), rate, rtol=1e-12)


@pytest.mark.parametrize("kind", ["softmax", "unnormalised"])
def test_on_the_sphere_the_energy_climbs_at_the_rate_of_the_tangent_field(kind, key):
    points = jax.random.normal(key, (6, 3))
    points = points / jnp.linalg.norm(points, axis=1, keepdims=True)
    layer = identity_attention(kind, 3, 2.0)
    flow = Flow(layer, space=Sphere())
    path = solve(flow, TokenCloud(points), 0.5, save=101, rtol=1e-9, atol=1e-11)
    profile = energy_profile(flow, path)
    assert profile.worst_violation == 0
    gained = profile.energies[-1] - profile.energies[0]
    predicted = np.trapezoid(profile.rates, profile.depths)
    np.testing.assert_allclose(gained, predicted, rtol=1e-5)


@pytest.mark.slow
def test_repulsion_lowers_the_energy_all_along_the_path():
    flow = Flow(Softmax(FORM, IDENTITY, -FORM))
    path = solve(flow, CLOUD, 1.0, save=21)
    profile = energy_profile(flow, path)
    assert profile.worst_violation == 0
    assert (np.diff(profile.energies) < 0).all()
    assert (profile.rates < 0).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_path_that_is_solved_backward_is_monotone_too(sign):
    flow = Flow(Softmax(FORM, IDENTITY, sign * FORM))
    path = solve(flow, CLOUD, 0.4, save=5)
    back = dataclasses.replace(path, depths=path.depths[::-1], points=path.points[::-1])
    forward, backward = (energy_profile(flow, one) for one in (path, back))
    assert backward.worst_violation == forward.worst_violation == 0
    np.testing.assert_allclose(backward.energies[::-1], forward.energies, rtol=1e-14)


def test_a_path_of_another_flow_violates_monotonicity():
    path = solve(Flow(Softmax(FORM, IDENTITY, FORM)), CLOUD, 0.5, save=6)
    opposite = energy_profile(Flow(Softmax(FORM, IDENTITY, -FORM)), path)
    assert opposite.worst_violation > 1e-4


def test_the_energy_of_a_flow_is_that_of_its_map():
    layer = Softmax(FORM, IDENTITY, FORM)
    np.testing.assert_array_equal(energy(Flow(layer), CLOUD), energy(layer, CLOUD))


def test_what_has_no_energy_is_refused():
    with pytest.raises(Unsupported, match="L2 has no known energy"):
        energy(L2(KEY, KEY, VALUE), CLOUD)
    with pytest.raises(Unsupported, match="quadrature"):
        energy(Softmax(FORM, IDENTITY, FORM), Gaussian([0.0, 0.0], np.eye(2)))
    with pytest.raises(InvalidInput, match="half_steps"):
        energy(Sinkhorn(FORM, IDENTITY, FORM, half_steps=1), CLOUD)
    with pytest.raises(InvalidInput, match="beta is 0"):
        energy(Softmax(FORM, IDENTITY, FORM, beta=0.0), CLOUD)
    with pytest.raises(InvalidInput, match="query_bias"):
        energy(Softmax(FORM, IDENTITY, FORM, query_bias=[1.0, 0.0]), CLOUD)
    with pytest.raises(Overflow, match="overflows"):
        energy(Softmax(FORM, IDENTITY, FORM, beta=5000.0), CLOUD)
    changing = Flow(Schedule([Softmax(FORM, IDENTITY, FORM)] * 2))
    with pytest.raises(Unsupported, match="does not change"):
        dissipation(changing, CLOUD)
    twisted = Flow(Softmax(FORM, IDENTITY, POSITIVE @ FORM), space=Sphere())
    with pytest.raises(Unsupported, match="twisted"):
        dissipation(twisted, CLOUD)


def test_single_precision_keeps_its_type():
    narrow = [np.float32(matrix) for matrix in (FORM, IDENTITY, FORM)]
    cloud = TokenCloud(np.float32(POINTS), np.float32(WEIGHTS))
    for kind in (Unnormalised, Linear, Sigmoid):
        value = energy(kind(*narrow), cloud)
        assert value.dtype == jnp.float32
        wide = energy(kind(FORM, IDENTITY, FORM), CLOUD)
        np.testing.assert_allclose(value, wide, rtol=1e-5)
        assert is_gradient_flow(kind(*narrow))
