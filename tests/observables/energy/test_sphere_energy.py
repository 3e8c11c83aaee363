"""Energies on the sphere: values, gradients, Hessians, stationary clouds."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import iv

from meanformer.attention import (
    Linear,
    Softmax,
    Unnormalised,
    identity_attention,
)
from meanformer.errors import InvalidInput, Overflow, Unsupported
from meanformer.flows import Flow, Schedule, solve
from meanformer.geometry import Euclidean, Sphere
from meanformer.measures import TokenCloud, UniformSphere, pad
from meanformer.observables import (
    dissipation,
    energy,
    energy_gradient,
    energy_hessian,
    first_variation,
    is_gradient_flow,
    matrix_energy_flow,
    optimal_circle_density,
    perturbed,
    stationary_report,
)
from meanformer.observables.linearised.rates import linearised
from meanformer.observables.linearised.velocity_terms import tangent_basis

TOKENS = TokenCloud([[1, 0, 0], [0, 1, 0], [0, 0, 1], [0.6, 0.8, 0]])
ZERO = jnp.zeros(())
SOFTMAX = [
    [0, 0.287673598586, 0.078683325681],
    [0.276934523740, 0, 0.069724852024],
    [0.154008216412, 0.173259243463, 0],
    [-0.015158901622, 0.011369176216, 0.060016064694],
]
UNNORMALISED = [
    [0, 0.914023384547, 0.25],
    [0.992954863659, 0, 0.25],
    [0.4, 0.45, 0],
    [-0.063145183290, 0.047358887467, 0.25],
]


def sphere_flow(kind, dimension, beta, **options):
    identity = np.eye(dimension)
    layer = kind(identity, identity, identity, beta=beta, **options)
    return Flow(layer, space=Sphere())


def on_circle(angles, weights=None):
    angles = jnp.asarray(angles)
    return TokenCloud(jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1), weights)


def antipodal(dimension, first, second=None):
    """Tokens at the last axis and opposite to it."""
    second = first if second is None else second
    axis = jnp.eye(dimension)[-1:]
    return TokenCloud(
        jnp.concatenate([jnp.repeat(axis, first, 0), -jnp.repeat(axis, second, 0)])
    )


def weighted(key, dimension=3):
    keys = jr.split(key)
    points = UniformSphere(dimension).sample(5, key=keys[0])
    return TokenCloud(points, jr.uniform(keys[1], (5,)) + 0.1, normalize=True)


@pytest.mark.parametrize(
    ("kind", "rows"), [(Softmax, SOFTMAX), (Unnormalised, UNNORMALISED)]
)
def test_velocities_have_the_tabulated_values(kind, rows):
    velocity = sphere_flow(kind, 3, 2.0).field(ZERO, TOKENS, TOKENS.points)
    np.testing.assert_allclose(velocity, rows, atol=1e-11)


def test_energies_have_the_tabulated_values():
    layer = identity_attention("unnormalised", 3, 2.0)
    np.testing.assert_allclose(energy(layer, TOKENS), 0.8453519232810301, rtol=1e-14)
    cluster = TokenCloud(jnp.tile(TOKENS.points[:1], (4, 1)))
    np.testing.assert_allclose(energy(layer, cluster), 1.8472640247326626, rtol=1e-14)
    np.testing.assert_allclose(energy(layer, cluster), np.exp(2) / 4, rtol=1e-14)


@pytest.mark.parametrize("kind", [Softmax, Unnormalised])
def test_the_dissipation_identity_holds(kind, key):
    flow, cloud = sphere_flow(kind, 3, 2.0), weighted(key)
    layer = flow.velocity.gamma
    velocity = flow.field(ZERO, cloud, cloud.points)
    _, rate = jax.jvp(
        lambda x: energy(layer, cloud.moved(x)), (cloud.points,), (velocity,)
    )
    squares = jnp.sum(velocity**2, axis=1)
    if kind is Softmax:
        squares = squares * jnp.exp(cloud.log_laplace(2.0 * cloud.points))
    exact = cloud.weights @ squares
    np.testing.assert_allclose(rate, exact, rtol=1e-10)
    np.testing.assert_allclose(dissipation(flow, cloud), exact, rtol=1e-12)


def test_on_the_circle_velocities_are_those_of_the_angles(key):
    angles, beta = jr.uniform(key, (6,)) * 6, 3.0
    cloud = on_circle(angles)
    gaps = angles[:, None] - angles[None, :]
    pulls = -jnp.mean(jnp.exp(beta * jnp.cos(gaps)) * jnp.sin(gaps), axis=1)
    turn = jnp.stack([-jnp.sin(angles), jnp.cos(angles)], axis=1)
    velocity = sphere_flow(Unnormalised, 2, beta).field(ZERO, cloud, cloud.points)
    np.testing.assert_allclose(velocity, pulls[:, None] * turn, atol=1e-13)
    masses = jnp.mean(jnp.exp(beta * jnp.cos(gaps)), axis=1)
    velocity = sphere_flow(Softmax, 2, beta).field(ZERO, cloud, cloud.points)
    np.testing.assert_allclose(velocity, (pulls / masses)[:, None] * turn, atol=1e-14)


def test_softmax_is_blurring_mean_shift_with_the_factor_of_beta(key):
    cloud, beta = weighted(key), 4.0
    slope = jax.vmap(
        jax.grad(lambda x: cloud.log_laplace(beta * x[None, :])[0] / beta)
    )(cloud.points)
    velocity = sphere_flow(Softmax, 3, beta).field(ZERO, cloud, cloud.points)
    projected = Sphere().project(cloud.points, slope)
    np.testing.assert_allclose(velocity, projected, atol=1e-13)


def test_the_energy_is_half_the_mean_of_its_first_variation(key):
    cloud, layer = weighted(key), identity_attention("softmax", 3, 2.5)
    variation = first_variation(layer, cloud, cloud.points)
    np.testing.assert_allclose(
        energy(layer, cloud), cloud.weights @ variation / 2, rtol=1e-13
    )


def test_the_first_variation_is_the_derivative_in_mass_added_anywhere(key):
    cloud, layer = weighted(key), identity_attention("unnormalised", 3, 1.5)
    point = UniformSphere(3).sample(1, key=key)

    def mixed(share):
        points = jnp.concatenate([cloud.points, point])
        weights = jnp.append((1 - share) * cloud.weights, share)
        return float(energy(layer, TokenCloud(points, weights)))

    # The energy is quadratic in the share, so that this difference is exact.
    slope = (4 * mixed(0.1) - 3 * mixed(0.0) - mixed(0.2)) / 0.2
    at_point = first_variation(layer, cloud, point)[0]
    np.testing.assert_allclose(slope, at_point - 2 * mixed(0.0), rtol=1e-10)


@pytest.mark.parametrize("space", [Sphere(), Euclidean()])
def test_the_gradient_is_that_of_automatic_differentiation(space, key):
    form = jnp.array([[0.9, 0.2, 0.0], [0.2, -0.4, 0.3], [0.0, 0.3, 0.5]])
    layer = Unnormalised(form, jnp.eye(3), jnp.eye(3), beta=1.7, shift=0.4)
    cloud = weighted(key)
    slopes = jax.grad(lambda x: energy(layer, cloud.moved(x)))(cloud.points)
    expected = space.project(cloud.points, slopes / cloud.weights[:, None])
    found = energy_gradient(layer, cloud, space=space)
    np.testing.assert_allclose(found, expected, atol=1e-13)


def test_a_token_of_weight_zero_feels_the_gradient_as_a_probe():
    layer = identity_attention("softmax", 3, 2.0)
    padded = pad(TOKENS, 5)
    found = energy_gradient(layer, padded)
    np.testing.assert_allclose(found[4], found[0], rtol=1e-13)


@pytest.mark.slow
def test_the_hessian_is_the_second_derivative_along_great_circles(key):
    form = jnp.array([[0.9, 0.2, 0.0], [0.2, -0.4, 0.3], [0.0, 0.3, 0.5]])
    layer = Unnormalised(form, jnp.eye(3), form, beta=1.3)
    cloud = weighted(key)

    def curvature(tangent):
        speed = jnp.linalg.norm(tangent, axis=1, keepdims=True)

        def moved(t):
            points = jnp.cos(t * speed) * cloud.points
            return points + jnp.sin(t * speed) * tangent / speed

        return jax.grad(jax.grad(lambda t: energy(layer, cloud.moved(moved(t)))))(0.0)

    # Unit tangent vectors of the metric, in a basis of our own.
    columns = jr.normal(key, (30, 15)) / jnp.sqrt(jnp.repeat(cloud.weights, 3))[None]
    tangents = jax.vmap(lambda c: Sphere().project(cloud.points, c.reshape(5, 3)))(
        columns
    )
    squares = jnp.einsum("bnd,n->b", tangents**2, cloud.weights)
    quotients = np.asarray(jax.jit(jax.vmap(curvature))(tangents) / squares)
    basis = np.stack([np.linalg.svd(x[None])[2][1:] for x in np.asarray(cloud.points)])
    scaled = np.asarray(tangents) * np.asarray(cloud.weights)[None, :, None]
    hessian = hessian_in(basis, layer, cloud)
    coordinates = np.einsum(
        "nad,bnd->bna", basis, scaled / np.sqrt(cloud.weights)[:, None]
    )
    flat = coordinates.reshape(30, 10)
    forms = np.einsum("bi,ij,bj->b", flat, hessian, flat) / np.asarray(squares)
    np.testing.assert_allclose(quotients, forms, rtol=1e-9)


def hessian_in(basis, layer, cloud):
    """The Hessian, turned from the basis of the library to another one."""
    theirs = np.linalg.qr(np.asarray(cloud.points)[:, :, None], mode="complete")[0]
    turns = np.einsum("nad,ndb->nab", basis, theirs[:, :, 1:])
    blocks = np.asarray(energy_hessian(layer, cloud)).reshape(5, 2, 5, 2)
    return np.einsum("nab,nbmc,mdc->namd", turns, blocks, turns).reshape(10, 10)


def test_the_hessian_in_space_is_that_of_jax(key):
    layer, cloud = identity_attention("softmax", 2, 0.8), weighted(key, 2)
    flat = jax.hessian(lambda x: energy(layer, cloud.moved(x)))(cloud.points)
    roots = jnp.sqrt(cloud.weights)[:, None, None, None]
    scaled = flat / roots / jnp.sqrt(cloud.weights)[None, None, :, None]
    found = energy_hessian(layer, cloud, space=Euclidean())
    np.testing.assert_allclose(found, scaled.reshape(10, 10), atol=1e-12)


@pytest.mark.parametrize("kind", [Softmax, Unnormalised])
@pytest.mark.parametrize("dimension", [2, 3, 4])
def test_two_opposite_tokens_are_a_saddle_of_known_rates(kind, dimension):
    beta = 1.5
    flow = sphere_flow(kind, dimension, beta)
    report = stationary_report(flow, antipodal(dimension, 1))
    assert report.verdict == f"stationary, index {dimension - 1}"
    assert (report.index, report.nullity) == (dimension - 1, dimension - 1)
    # The angle left to pi grows at this rate; turning both tokens costs nothing.
    rate = np.exp(-beta)
    if kind is Softmax:
        rate = rate / np.cosh(beta)
    exact = np.repeat([rate, 0.0], dimension - 1)
    np.testing.assert_allclose(report.eigenvalues, exact, atol=1e-14)
    lengths = np.linalg.norm(report.direction, axis=1)
    np.testing.assert_allclose(lengths, 1, rtol=1e-12)


@pytest.mark.parametrize("kind", [Softmax, Unnormalised])
def test_a_single_cluster_attracts_at_the_rate_of_its_kind(kind):
    beta = 1.2
    cloud = TokenCloud(jnp.tile(TOKENS.points[:1], (4, 1)))
    report = stationary_report(sphere_flow(kind, 3, beta), cloud)
    rate = 1.0 if kind is Softmax else np.exp(beta)
    exact = [0, 0, *[-rate] * 6]
    np.testing.assert_allclose(report.eigenvalues, exact, atol=1e-12)
    assert report.verdict == "stationary, index 0"


@pytest.mark.parametrize("kind", [Softmax, Unnormalised])
@pytest.mark.parametrize(("beta", "index"), [(-0.7, 0), (-0.6, 2), (0.0, 2), (2.0, 2)])
def test_the_triangle_is_stable_below_minus_two_thirds(kind, beta, index):
    flow = sphere_flow(kind, 2, beta, allow_negative_beta=True)
    triangle = on_circle(2 * np.pi * np.arange(3) / 3)
    assert stationary_report(flow, triangle).index == index


def test_growth_rates_of_the_uniform_circle_are_bessel_functions():
    beta, count = 5.0, 48
    report = stationary_report(
        sphere_flow(Unnormalised, 2, beta),
        on_circle(2 * np.pi * np.arange(count) / count),
    )
    modes = np.arange(1, 7)
    rates = np.repeat(modes**2 * iv(modes, beta) / beta, 2)
    np.testing.assert_allclose(
        report.eigenvalues[:10], np.sort(rates)[:1:-1], rtol=1e-8
    )
    report = stationary_report(
        sphere_flow(Softmax, 2, beta), on_circle(2 * np.pi * np.arange(count) / count)
    )
    tabulated = [0.6826783336, 0.6000891395, 0.5141173961, 0.3961058557]
    np.testing.assert_allclose(report.eigenvalues[:8:2], tabulated, rtol=1e-8)


def test_moving_tokens_are_reported_as_moving():
    report = stationary_report(sphere_flow(Softmax, 3, 2.0), TOKENS)
    assert not report.is_stationary
    assert report.verdict.startswith("not stationary: a token moves with speed 0.29")
    assert report.index is None
    assert report.eigenvalues.shape == (0,)


def test_absent_tokens_do_not_count_in_a_report():
    cloud = antipodal(3, 1)
    points = jnp.concatenate([cloud.points, TOKENS.points[3:]])
    padded = TokenCloud(points, jnp.array([0.5, 0.5, 0.0]))
    flow = sphere_flow(Softmax, 3, 1.0)
    first, second = (stationary_report(flow, c) for c in (cloud, padded))
    np.testing.assert_allclose(first.eigenvalues, second.eigenvalues, atol=1e-15)
    np.testing.assert_array_equal(second.direction[2], 0)


def test_splitting_a_token_adds_rates_and_changes_none():
    flow = sphere_flow(Unnormalised, 3, 1.0)
    whole = stationary_report(flow, antipodal(3, 1)).eigenvalues
    split = stationary_report(flow, antipodal(3, 2)).eigenvalues
    inner = 0.5 * (np.exp(-1) - np.exp(1))
    exact = np.sort([*np.asarray(whole), *[inner] * 4])[::-1]
    np.testing.assert_allclose(split, exact, atol=1e-13)


def test_a_flow_that_is_no_gradient_is_reported_by_its_real_parts():
    turn = np.array([[0.0, 1.0], [-1.0, 0.0]])
    layer = Unnormalised(np.eye(2), np.eye(2), np.eye(2) + 0.5 * turn)
    assert not is_gradient_flow(layer)
    flow = Flow(layer)
    report = stationary_report(flow, TokenCloud([[0.0, 0.0]]))
    np.testing.assert_allclose(report.eigenvalues, [1.0, 1.0], rtol=1e-12)
    assert report.index == 2


def test_a_perturbed_saddle_is_left_along_the_unstable_direction(key):
    cloud = perturbed(antipodal(3, 1), 1e-4, key=key)
    np.testing.assert_allclose(np.linalg.norm(cloud.points, axis=1), 1, rtol=1e-14)
    moved = np.linalg.norm(np.asarray(cloud.points - antipodal(3, 1).points), axis=1)
    assert (moved > 1e-6).all()
    assert (moved < 1e-3).all()
    same = perturbed(antipodal(3, 1), 0.0, key=key)
    np.testing.assert_array_equal(same.points, antipodal(3, 1).points)
    with pytest.raises(InvalidInput, match="size is -1"):
        perturbed(cloud, -1.0, key=key)


@pytest.mark.slow
def test_after_a_push_all_tokens_merge(key):
    flow = sphere_flow(Softmax, 3, 1.0)
    cloud = perturbed(antipodal(3, 2), 1e-3, key=key)
    path = solve(flow, cloud, 60.0, save=2)
    gram = np.asarray(path.points[-1] @ path.points[-1].T)
    assert gram.min() > 1 - 1e-9


def test_functions_of_the_energy_refuse_what_has_none():
    odd = np.array([[1.0, 0.5], [-0.5, 1.0]])
    with pytest.raises(InvalidInput, match="not symmetric"):
        energy_gradient(Unnormalised(odd, np.eye(2), np.eye(2)), on_circle([0.0, 1.0]))
    linear = Linear(np.eye(3), np.eye(3), np.eye(3))
    with pytest.raises(Unsupported, match="layer is Linear"):
        energy_hessian(linear, TOKENS)
    with pytest.raises(InvalidInput, match="beta is 0"):
        first_variation(identity_attention("softmax", 3, 0.0), TOKENS, TOKENS.points)
    with pytest.raises(Overflow, match="shift"):
        first_variation(identity_attention("softmax", 3, 800.0), TOKENS, TOKENS.points)
    with pytest.raises(InvalidInput, match="has norm 2"):
        energy_gradient(identity_attention("softmax", 1, 1.0), TokenCloud([[2.0]]))
    changing = Flow(Schedule([linear, linear], [0.0, 1.0]), space=Sphere())
    with pytest.raises(Unsupported, match="does not change"):
        stationary_report(changing, TOKENS)


@pytest.mark.parametrize("kind", [Softmax, Unnormalised])
@pytest.mark.parametrize("beta", [12.0, 20.0, 300.0])
def test_rates_of_opposite_tokens_survive_the_pull_on_themselves(kind, beta):
    axis = np.array([0.36, 0.48, 0.8])
    cloud = TokenCloud(np.stack([axis, -axis]))
    report = stationary_report(sphere_flow(kind, 3, beta), cloud)
    rate = np.exp(-beta)
    if kind is Softmax:
        rate = rate / np.cosh(beta)
    assert report.verdict == "stationary, index 2"
    np.testing.assert_allclose(report.eigenvalues[:2], rate, rtol=1e-12)
    np.testing.assert_allclose(report.eigenvalues[2:], 0, atol=1e-14 * rate)


def test_rates_that_rounding_hides_leave_the_index_open():
    flow = sphere_flow(Softmax, 3, 20.0)
    report = stationary_report(flow, antipodal(3, 2))
    assert report.verdict == "undecided: 2 rates below resolution, 0 positive"
    assert report.is_stationary
    assert report.index is None
    assert report.nullity == 4
    assert stationary_report(sphere_flow(Softmax, 3, 12.0), antipodal(3, 2)).index == 2


def test_directions_that_are_no_rotation_leave_the_index_open():
    # At beta zero all clouds of mean zero rest: the square can become a rectangle.
    square = on_circle(np.arange(4) * np.pi / 2)
    report = stationary_report(sphere_flow(Softmax, 2, 0.0), square)
    assert report.verdict == "undecided: 1 rate below resolution, 2 positive"


@pytest.mark.parametrize("count", [3, 4, 7, 12])
@pytest.mark.parametrize("kind", [Softmax, Unnormalised])
def test_polygons_are_stationary_in_single_precision(kind, count):
    identity = jnp.eye(2, dtype=jnp.float32)
    flow = Flow(kind(identity, identity, identity, beta=2.0), space=Sphere())
    double = on_circle(2 * np.pi * np.arange(count) / count)
    cloud = TokenCloud(double.points.astype(jnp.float32))
    report = stationary_report(flow, cloud)
    exact = stationary_report(sphere_flow(kind, 2, 2.0), double)
    assert report.verdict == exact.verdict == f"stationary, index {count - 1}"
    np.testing.assert_allclose(report.eigenvalues, exact.eigenvalues, atol=1e-5)


@pytest.mark.parametrize("kind", [Softmax, Unnormalised])
def test_the_linearised_flow_is_that_of_automatic_differentiation(kind, key):
    form = jnp.array([[0.9, 0.2, 0.0], [0.2, -0.4, 0.3], [0.0, 0.3, 0.5]])
    odd = jnp.array([[0.1, 0.7, 0.2], [-0.3, 0.4, 0.0], [0.5, 0.1, -0.6]])
    flow = Flow(kind(form + odd, jnp.eye(3), odd, beta=1.3), space=Sphere())
    cloud = weighted(key)
    found = linearised(flow, flow.velocity.gamma, cloud, np.zeros(5))
    field = flow.field(ZERO, cloud, cloud.points)
    basis = tangent_basis(Sphere(), np.asarray(cloud.points))
    np.testing.assert_allclose(
        np.einsum("nda,na->nd", basis, found.velocity), field, atol=1e-14
    )
    slopes = jax.jacfwd(lambda x: flow.field(ZERO, cloud.moved(x), x))(cloud.points)
    if kind is Softmax:
        # The derivative of the masses, which vanishes where the tokens rest.
        logs = jax.jacfwd(lambda x: log_masses(flow, cloud.moved(x)))(cloud.points)
        slopes = slopes + field[:, :, None, None] * logs[:, None]
    expected = np.einsum("ida,idje,jeb->iajb", basis, slopes, basis).reshape(10, 10)
    np.testing.assert_allclose(found.matrix, expected, atol=1e-13)


def log_masses(flow, cloud):
    return cloud.log_laplace(flow.velocity.gamma.tilts(Sphere().retract(cloud.points)))


def test_masses_of_very_different_size_are_no_obstacle():
    form = np.diag([800.0, -800.0, 1.0])
    flow = Flow(Softmax(form, np.eye(3), form, beta=1.0), space=Sphere())
    report = stationary_report(flow, TokenCloud(np.eye(3)))
    assert report.verdict.startswith("not stationary: a token moves with speed 400")
    # Alone, the third and the first rest; the third is pulled to the first.
    report = stationary_report(flow, TokenCloud(np.eye(3)[:1]))
    assert report.verdict == "stationary, index 0"
    np.testing.assert_allclose(report.eigenvalues, [-799.0, -1600.0], rtol=1e-12)
    light = TokenCloud(np.array([[1.0, 0], [-1.0, 0]]), np.array([1.0, 1e-300]))
    report = stationary_report(sphere_flow(Softmax, 2, 1.0), light)
    assert report.index == 1
    assert np.isfinite(report.direction).all()


def test_nothing_infinite_is_returned(key):
    layer = identity_attention("softmax", 3, 1e-3)
    with pytest.raises(Overflow, match="first variation overflows"):
        first_variation(layer, TokenCloud([[1e3, 0, 0]]), [[709.5, 0, 0]])
    negative = Softmax(
        np.eye(3), np.eye(3), np.eye(3), beta=-2.0, allow_negative_beta=True
    )
    at_axis = first_variation(negative, TOKENS, [[0.0, 0.0, -1.0]])
    np.testing.assert_allclose(at_axis, [-(3 + np.exp(2)) / 8], rtol=1e-13)
    for size in (np.inf, 1e308):
        with pytest.raises(InvalidInput, match="it must be at most"):
            perturbed(TOKENS, size, key=key)
    far = perturbed(TOKENS, 1e100, key=key)
    np.testing.assert_allclose(np.linalg.norm(far.points, axis=1), 1, rtol=1e-14)
    steep = matrix_energy_flow(np.diag([800.0, 1.0]))
    with pytest.raises(Overflow, match="give Unnormalised a shift"):
        stationary_report(steep, TokenCloud([[1.0, 0.0]]))
    single = jnp.eye(2, dtype=jnp.float32)
    steep = Flow(Unnormalised(single, single, single, beta=100.0), space=Sphere())
    with pytest.raises(Overflow, match="give Unnormalised a shift"):
        stationary_report(steep, TokenCloud(jnp.stack([single[0], single[0]])))


def test_points_of_another_shape_are_refused():
    layer = identity_attention("softmax", 3, 1.0)
    for x in ([[1.0, 0.0]], [1.0, 0.0, 0.0]):
        with pytest.raises(InvalidInput, match="x has shape"):
            first_variation(layer, TOKENS, x)


# Energies with a matrix.


def test_the_matrix_flow_climbs_half_its_energy(key):
    form = jnp.diag(jnp.array([0.3, 1.0, 0.7]))
    cloud = weighted(key)
    scores = np.asarray(cloud.points @ form @ cloud.points.T)
    masses = np.asarray(cloud.weights)
    exact = masses @ np.exp(scores) @ masses
    for ascending, sign in ((True, 1), (False, -1)):
        flow = matrix_energy_flow(form, ascending=ascending)
        layer = flow.velocity.gamma
        np.testing.assert_allclose(energy(layer, cloud), exact / 2, rtol=1e-13)
        assert float(is_gradient_flow(layer).factor) == sign
        velocity = flow.field(ZERO, cloud, cloud.points)
        pulls = (masses[None, :] * np.exp(scores)) @ np.asarray(cloud.points @ form)
        expected = sign * Sphere().project(cloud.points, jnp.asarray(pulls))
        np.testing.assert_allclose(velocity, expected, atol=1e-13)


def test_a_single_point_at_the_leading_eigenvector_has_the_largest_energy(key):
    form = jnp.diag(jnp.array([0.3, 1.0, 0.7]))
    layer = matrix_energy_flow(form).velocity.gamma
    for sign in (1.0, -1.0):
        best = TokenCloud(sign * jnp.eye(3)[1:2])
        np.testing.assert_allclose(2 * energy(layer, best), np.e, rtol=1e-14)
        report = stationary_report(matrix_energy_flow(form), best)
        assert (report.index, report.nullity) == (0, 0)
    both = TokenCloud(jnp.stack([jnp.eye(3)[1], -jnp.eye(3)[1]]))
    np.testing.assert_allclose(2 * energy(layer, both), np.cosh(1), rtol=1e-14)
    for _ in range(3):
        assert 2 * float(energy(layer, weighted(key))) < np.e


@pytest.mark.parametrize(
    ("diagonal", "threshold"),
    [
        (lambda d: [d, 1.0], np.tanh(1.0)),
        (lambda d: [1.0, d], brentq(lambda d: d * np.tanh(d) - 1, 1.0, 2.0)),
        (lambda d: [d, d, 1.0], np.tanh(1.0)),
    ],
)
def test_two_opposite_clusters_are_stable_beyond_the_derived_threshold(
    diagonal, threshold
):
    indices = []
    for entry in (threshold - 0.01, threshold + 0.01):
        form = jnp.diag(jnp.array(diagonal(entry)))
        cloud = antipodal(len(form), 2)
        indices.append(stationary_report(matrix_energy_flow(form), cloud).index)
    assert sorted(i > 0 for i in indices) == [False, True]


def test_four_descending_tokens_rest_where_the_closed_form_says():
    for entry in (0.5, 2.0):
        square = brentq(
            lambda u, b=entry: np.tanh(u) - b * np.tanh(b * (1 - u)), 0.0, 1.0
        )
        angle = np.arccos(np.sqrt(square))
        cloud = on_circle([angle, np.pi - angle, np.pi + angle, -angle])
        form = jnp.diag(jnp.array([1.0, entry]))
        flow = matrix_energy_flow(form, ascending=False)
        report = stationary_report(flow, cloud)
        assert report.verdict == "stationary, index 0"


def test_the_optimal_density_of_the_identity_is_uniform():
    found = optimal_circle_density(np.eye(2), count=200)
    assert int(found.steps) == 0
    np.testing.assert_allclose(found.density, 1 / (2 * np.pi), rtol=1e-12)
    np.testing.assert_allclose(found.energy, iv(0, 1), rtol=1e-12)
    assert float(found.gap) < 1e-12


def test_the_optimal_density_has_the_first_order_of_perturbation_theory():
    moments = []
    for step in (-0.02, 0.02):
        found = optimal_circle_density(
            np.diag([1.0, 1.0 + step]), count=200, tolerance=1e-10
        )
        assert float(found.gap) <= 1e-10 * float(found.energy)
        moments.append(2 * float(found.cloud.weights @ jnp.cos(2 * found.angles)))
    slope = (moments[1] - moments[0]) / 0.04
    np.testing.assert_allclose(slope, iv(1, 1) / (2 * iv(2, 1)), rtol=1e-3)


def test_the_certificate_bounds_the_distance_to_the_minimum():
    form = np.diag([1.0, 1.3])
    rough, fine = (
        optimal_circle_density(form, count=120, tolerance=tolerance)
        for tolerance in (1e-4, 1e-12)
    )
    above = float(rough.energy - fine.energy)
    assert 0 < above <= float(rough.gap)
    assert int(fine.steps) > int(rough.steps)
    layer = matrix_energy_flow(form).velocity.gamma
    np.testing.assert_allclose(2 * energy(layer, fine.cloud), fine.energy, rtol=1e-12)
    few = optimal_circle_density(form, count=120, tolerance=0.0, most_steps=3)
    assert int(few.steps) == 3


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (np.ones((2, 3)), "square"),
        (np.array([[1.0, 0.5], [0.0, 1.0]]), "not symmetric"),
        (np.diag([1.0, np.nan]), "finite"),
    ],
)
def test_a_wrong_matrix_is_refused(form, message):
    with pytest.raises(InvalidInput, match=message):
        matrix_energy_flow(form)


def test_densities_are_refused_where_the_energy_is_not_convex():
    with pytest.raises(Unsupported, match="eigenvalue -0.5"):
        optimal_circle_density(np.diag([1.0, -0.5]))
    with pytest.raises(InvalidInput, match="shape"):
        optimal_circle_density(np.eye(3))


def test_densities_of_steep_forms_are_finite_or_refused():
    found = optimal_circle_density(np.diag([300.0, 1.0]), count=40, most_steps=50)
    layer = matrix_energy_flow(np.diag([300.0, 1.0])).velocity.gamma
    np.testing.assert_allclose(2 * energy(layer, found.cloud), found.energy, rtol=1e-10)
    with pytest.raises(Overflow, match="energy overflows float64"):
        optimal_circle_density(np.diag([800.0, 1.0]), count=40, most_steps=50)


def test_ascending_must_be_a_truth_value(untyped):
    with pytest.raises(InvalidInput, match="ascending is 'descending'"):
        matrix_energy_flow(np.eye(2), ascending="descending")
