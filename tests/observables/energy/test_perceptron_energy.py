"""Perceptrons and sums as gradients: energies, structure, first variation, Hessian."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from meanformer.attention import (
    Perceptron,
    Softmax,
    Sum,
    Unnormalised,
    identity_attention,
)
from meanformer.errors import InvalidInput, Unsupported
from meanformer.flows import Flow, solve
from meanformer.geometry import Sphere
from meanformer.measures import TokenCloud, pad
from meanformer.observables import (
    IntegratedActivation,
    dissipation,
    energy,
    energy_gradient,
    energy_hessian,
    energy_profile,
    first_variation,
    is_gradient_flow,
    perceptron_flow,
    stationary_report,
)
from meanformer.observables.linearised.rates import linearised
from meanformer.observables.linearised.velocity_terms import tangent_basis

ROWS = np.array([[1.0, 0.2, -0.3], [0.1, -0.8, 0.5], [0.4, 0.4, 1.1]])
BIASES = np.array([0.1, -0.2, 0.3])
STRENGTHS = np.array([2.0, -1.0, 0.7])
ZERO = jnp.zeros(())
EXACT_GELU = functools.partial(jax.nn.gelu, approximate=False)
KNOWN = (
    jax.nn.relu,
    jax.nn.leaky_relu,
    jax.nn.elu,
    jnp.tanh,
    jax.nn.hard_tanh,
    jax.nn.sigmoid,
    jax.nn.soft_sign,
    jax.nn.identity,
    jnp.sin,
    jnp.exp,
    EXACT_GELU,
)


def block(activation=jax.nn.relu):
    return Perceptron(
        ROWS, BIASES, STRENGTHS[None] * ROWS.T, [0.1, 0.2, -0.4], activation=activation
    )


def both(beta=1.5, activation=jax.nn.relu):
    return Sum([identity_attention("unnormalised", 3, beta), block(activation)])


def cloud_of(key, count=5):
    points = jr.normal(key, (count, 3))
    points = points / jnp.linalg.norm(points, axis=1, keepdims=True)
    weights = jnp.arange(1.0, count + 1)
    return TokenCloud(points, weights / weights.sum())


@pytest.mark.parametrize("activation", KNOWN, ids=lambda a: getattr(a, "__name__", "g"))
def test_the_perceptron_is_the_gradient_of_its_energy(activation, key):
    layer, cloud = block(activation), cloud_of(key)
    assert is_gradient_flow(layer).is_wasserstein
    slopes = jax.grad(lambda x: energy(layer, cloud.moved(x)))(cloud.points)
    np.testing.assert_allclose(
        slopes / cloud.weights[:, None], layer(cloud, cloud.points), atol=1e-13
    )


@pytest.mark.parametrize("activation", KNOWN, ids=lambda a: getattr(a, "__name__", "g"))
def test_antiderivatives_are_finite_far_out(activation):
    far = np.array([[-80.0], [80.0], [0.0]])
    layer = Perceptron([[1.0]], [0.0], [[1.0]], activation=activation)
    values = [float(energy(layer, TokenCloud(point[None]))) for point in far]
    assert np.isfinite(values).all()


def test_the_sum_is_the_gradient_of_the_sum_of_energies(key):
    layer, cloud = both(), cloud_of(key)
    structure = is_gradient_flow(layer)
    assert structure.is_wasserstein
    assert structure.direction == "ascent"
    attention, perceptron = layer.maps
    np.testing.assert_allclose(
        energy(layer, cloud),
        energy(attention, cloud) + energy(perceptron, cloud),
        rtol=1e-14,
    )
    slopes = jax.grad(lambda x: energy(layer, cloud.moved(x)))(cloud.points)
    tangent = Sphere().project(cloud.points, slopes / cloud.weights[:, None])
    np.testing.assert_allclose(energy_gradient(layer, cloud), tangent, atol=1e-12)


def test_factors_of_the_terms_enter_their_energies(key):
    cloud = cloud_of(key)
    identity = np.eye(3)
    attention = Unnormalised(identity, identity, -0.5 * identity, beta=1.5)
    layer = Sum([attention, Sum([block()])])
    assert is_gradient_flow(layer).direction == "ascent"
    expected = -0.5 * energy(attention, cloud) + energy(block(), cloud)
    np.testing.assert_allclose(energy(layer, cloud), expected, rtol=1e-14)
    velocity = Flow(layer, space=Sphere()).field(ZERO, cloud, cloud.points)
    np.testing.assert_allclose(energy_gradient(layer, cloud), velocity, atol=1e-14)


def test_the_gradient_of_the_reference_agrees_with_finite_differences():
    flow = reference_flow(2.0)
    layer, cloud = flow.velocity.gamma, on_circle([0.3, 1.1, 2.9], [0.2, 0.5, 0.3])
    angles = np.array([0.3, 1.1, 2.9])

    def height(turned):
        return float(energy(layer, on_circle(turned, cloud.weights)))

    step, slopes = 1e-5, []
    for token in range(3):
        shift = step * np.eye(3)[token]
        slopes.append((height(angles + shift) - height(angles - shift)) / (2 * step))
    tangents = np.stack([-np.sin(angles), np.cos(angles)], axis=1)
    gradient = np.asarray(energy_gradient(layer, cloud))
    along = np.sum(tangents * gradient, axis=1) * np.asarray(cloud.weights)
    np.testing.assert_allclose(along, slopes, atol=4e-10)


def test_softmax_with_a_perceptron_has_no_known_energy(key):
    layer = Sum([identity_attention("softmax", 3, 1.0), block()])
    structure = is_gradient_flow(layer)
    assert not structure
    assert "another metric (Wasserstein with mobility 1/Z(x))" in structure.failure
    with pytest.raises(Unsupported, match="no known energy here"):
        energy(layer, cloud_of(key))
    with pytest.raises(InvalidInput, match="not a gradient flow"):
        dissipation(Flow(layer, space=Sphere()), cloud_of(key))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Perceptron(ROWS, BIASES, ROWS, activation=jnp.tanh), "is not parallel to row"),
        (Perceptron(ROWS, BIASES, ROWS.T), "antiderivative of gelu is not known"),
        (Perceptron(ROWS, BIASES, ROWS.T, activation=jax.nn.silu), "silu"),
        (
            Perceptron(ROWS, BIASES, ROWS.T[:2], activation=jnp.tanh),
            "vectors of 2 coordinates",
        ),
        (
            Perceptron(np.eye(3), BIASES, ROWS, activation=jax.nn.identity),
            "product of its weights is not symmetric",
        ),
    ],
)
def test_a_perceptron_that_is_no_gradient_says_why(layer, reason, key):
    assert reason in is_gradient_flow(layer).failure
    with pytest.raises(Unsupported, match="no known energy"):
        energy(layer, cloud_of(key))


def test_equal_units_count_together_and_constant_units_are_linear(key):
    rows = np.array([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    columns = np.array([[1.0, 0.5, 0.2], [2.0, -0.5, 0.3], [0.4, 0.1, 0.0]]).T
    columns[1:, 1] = -columns[1:, 0]
    layer = Perceptron(rows, [0.1, 0.1, 0.5], columns, activation=jnp.tanh)
    assert is_gradient_flow(layer)
    cloud = cloud_of(key)
    slopes = jax.grad(lambda x: energy(layer, cloud.moved(x)))(cloud.points)
    np.testing.assert_allclose(
        slopes / cloud.weights[:, None], layer(cloud, cloud.points), atol=1e-14
    )


def test_an_activation_may_bring_its_antiderivative(key):
    activation = IntegratedActivation(lambda x: x**3, lambda x: x**4 / 4)
    cloud, layer = cloud_of(key), block(activation)
    slopes = jax.grad(lambda x: energy(layer, cloud.moved(x)))(cloud.points)
    np.testing.assert_allclose(
        slopes / cloud.weights[:, None], layer(cloud, cloud.points), atol=1e-13
    )


def test_padding_splitting_and_order_change_no_energy(key):
    layer, cloud = both(), cloud_of(key)

    @jax.jit
    def height_and_slopes(other):
        return jax.value_and_grad(lambda x: energy(layer, other.moved(x)))(other.points)

    expected, _ = height_and_slopes(cloud)
    split = TokenCloud(
        jnp.concatenate([cloud.points, cloud.points[-1:]]),
        jnp.append(cloud.weights, 0.1).at[4].add(-0.1),
    )
    order = jnp.array([3, 0, 4, 1, 2])
    mixed = TokenCloud(cloud.points[order], cloud.weights[order])
    for other in (split, mixed, pad(cloud, 6)):
        height, slopes = height_and_slopes(other)
        np.testing.assert_allclose(height, expected, rtol=1e-14)
    assert (np.asarray(slopes[5:]) == 0).all()


@pytest.mark.slow
def test_the_energy_works_under_jit_and_vmap(key):
    layer, cloud = both(), cloud_of(key)
    value = jax.jit(lambda one, x: energy(one, cloud.moved(x)))(layer, cloud.points)
    np.testing.assert_allclose(value, energy(layer, cloud), rtol=1e-14)
    # The map may also be known when the function is compiled.
    value = jax.jit(lambda x: energy(layer, cloud.moved(x)))(cloud.points)
    np.testing.assert_allclose(value, energy(layer, cloud), rtol=1e-14)
    rate = jax.jit(lambda x: dissipation(layer, cloud.moved(x)))(cloud.points)
    np.testing.assert_allclose(rate, dissipation(layer, cloud), rtol=1e-13)
    many = jnp.stack([cloud.points, -cloud.points])
    values = jax.vmap(lambda x: energy(layer, cloud.moved(x)))(many)
    np.testing.assert_allclose(values[0], value, rtol=1e-14)


def test_the_first_variation_is_the_derivative_in_mass(key):
    layer, cloud = both(), cloud_of(key)
    points = cloud_of(jr.fold_in(key, 1), 3).points

    @jax.jit
    def height(share):
        mixed = TokenCloud(
            jnp.concatenate([cloud.points, points[:1]]),
            jnp.append((1 - share) * cloud.weights, share),
        )
        return energy(layer, mixed)

    slope = jax.grad(height)(0.3)
    at = TokenCloud(
        jnp.concatenate([cloud.points, points[:1]]),
        jnp.append(0.7 * cloud.weights, 0.3),
    )
    inside = jnp.dot(cloud.weights, first_variation(layer, at, cloud.points))
    expected = first_variation(layer, at, points)[0] - inside
    np.testing.assert_allclose(slope, expected, rtol=1e-11)
    one = first_variation(block(), cloud, points)
    np.testing.assert_allclose(
        one, [energy(block(), TokenCloud(p[None])) for p in points], rtol=1e-13
    )


@pytest.mark.parametrize("kind", ["softmax", "unnormalised"])
def test_the_linearised_sum_is_that_of_automatic_differentiation(kind, key):
    layer = Sum([identity_attention(kind, 3, 1.3), block(jnp.tanh)])
    flow, cloud = Flow(layer, space=Sphere()), cloud_of(key)
    found = linearised(flow, layer, cloud, np.zeros(5))
    basis = tangent_basis(Sphere(), np.asarray(cloud.points))
    field = flow.field(ZERO, cloud, cloud.points)
    np.testing.assert_allclose(
        np.einsum("nda,na->nd", basis, found.velocity), field, atol=1e-14
    )
    slopes = jax.jacfwd(lambda x: flow.field(ZERO, cloud.moved(x), x))(cloud.points)
    expected = np.einsum("ida,idje,jeb->iajb", basis, slopes, basis).reshape(10, 10)
    np.testing.assert_allclose(found.matrix, expected, atol=1e-13)


def test_the_hessian_of_the_sum_is_symmetric_and_adds_up(key):
    cloud = cloud_of(key)
    attention, perceptron = both(activation=jnp.tanh).maps
    whole = energy_hessian(Sum([attention, perceptron]), cloud)
    parts = energy_hessian(attention, cloud) + energy_hessian(perceptron, cloud)
    np.testing.assert_allclose(whole, parts, atol=1e-13)


@pytest.mark.slow
def test_the_energy_climbs_at_the_rate_of_the_dissipation_identity(key):
    flow = Flow(both(activation=jnp.tanh), space=Sphere())
    cloud = cloud_of(key)
    path = solve(flow, cloud, 1.0, save=65)
    profile = energy_profile(flow, path)
    assert profile.worst_violation == 0
    gained = profile.energies[-1] - profile.energies[0]
    predicted = np.trapezoid(profile.rates, profile.depths)
    np.testing.assert_allclose(gained, predicted, rtol=1e-3)
    velocity = flow.field(ZERO, cloud, cloud.points)
    squares = jnp.sum(velocity**2, axis=1)
    np.testing.assert_allclose(
        dissipation(flow, cloud), jnp.dot(cloud.weights, squares), rtol=1e-13
    )


def test_a_sum_of_one_map_is_that_map(key):
    cloud, layer = cloud_of(key), identity_attention("softmax", 3, 2.0)
    np.testing.assert_allclose(energy(Sum([layer]), cloud), energy(layer, cloud))
    assert is_gradient_flow(Sum([layer])).divides_by_mass
    np.testing.assert_allclose(
        dissipation(Flow(Sum([layer]), space=Sphere()), cloud),
        dissipation(Flow(layer, space=Sphere()), cloud),
    )


def test_a_perceptron_fixes_its_directions_and_leaves_other_rotations_free():
    attention = identity_attention("unnormalised", 3, 1.0)
    flow = perceptron_flow(attention, [[0.0, 0.0, 1.0]], 4.0, activation="tanh")
    # Two opposite atoms, held up by the unit, may still turn around its axis.
    top = TokenCloud([[0.0, 0.0, 1.0]])
    report = stationary_report(flow, top)
    assert report.verdict == "stationary, index 0"
    ring = np.array([[0.6, 0.0, 0.8], [-0.6, 0.0, 0.8]])
    moving = stationary_report(flow, TokenCloud(ring))
    assert not moving.is_stationary
    alone = perceptron_flow(None, [[0.0, 0.0, 1.0]], 4.0, [0.0], activation="relu")
    assert stationary_report(alone, top).verdict == "stationary, index 0"


def test_single_precision_keeps_its_type():
    rows = jnp.asarray(ROWS, jnp.float32)
    layer = Perceptron(
        rows, jnp.zeros(3, jnp.float32), rows.T, activation=jax.nn.sigmoid
    )
    cloud = TokenCloud(jnp.eye(3, dtype=jnp.float32))
    assert energy(layer, cloud).dtype == jnp.float32
    assert energy_hessian(layer, cloud).dtype == jnp.float32
    narrow = jnp.eye(3, dtype=jnp.float32)
    total = Sum([Unnormalised(narrow, narrow, narrow), layer])
    assert energy(total, cloud).dtype == jnp.float32


def test_the_front_door_checks_what_it_is_given():
    attention = identity_attention("unnormalised", 2, 1.0)
    with pytest.raises(InvalidInput, match="one vector per row"):
        perceptron_flow(attention, [1.0, 0.0], 1.0)
    with pytest.raises(InvalidInput, match="strengths has shape"):
        perceptron_flow(attention, np.eye(2), [1.0, 2.0, 3.0])
    with pytest.raises(InvalidInput, match="'swish'; .* an IntegratedActivation"):
        perceptron_flow(attention, np.eye(2), 1.0, activation="swish")
    softmax = perceptron_flow(Softmax(np.eye(2), np.eye(2), np.eye(2)), np.eye(2), 1.0)
    assert not is_gradient_flow(softmax.velocity.gamma)


def on_circle(angles, weights=None):
    angles = np.asarray(angles)
    return TokenCloud(np.stack([np.cos(angles), np.sin(angles)], axis=1), weights)


def reference_flow(beta):
    directions = on_circle([0.0, 2 * np.pi / 3]).points
    return perceptron_flow(identity_attention("unnormalised", 2, beta), directions, 4.0)
