"""How far flows spread and part: bounds against computed paths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanformer.attention import (
    L2,
    Hardmax,
    Linear,
    Masked,
    Perceptron,
    Sigmoid,
    Sinkhorn,
    Softmax,
    Unnormalised,
    identity_attention,
    in_order,
)
from meanformer.attention.lipschitz import local_lipschitz
from meanformer.errors import InvalidInput, Overflow, Unsupported
from meanformer.flows import Flow, Schedule, run_layers, solve
from meanformer.flows.bounds.a_priori import radius_bound, stability_bound
from meanformer.flows.bounds.stability import (
    growth_factor,
    lipschitz_profile,
    observed_growth,
)
from meanformer.geometry import Sphere
from meanformer.measures import TokenCloud
from reference import (
    KEY,
    POINTS,
    QUERY,
    RADIUS,
    SCORE_NORM,
    VALUE,
    VALUE_NORM,
    WEIGHTS,
)

SOFTMAX = Softmax(QUERY, KEY, VALUE)
PERTURBATION = 0.05 * np.array([[1, -1], [0.5, 0.3], [-0.2, 0.8], [0, 1]])
ACCURATE = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(scope="module")
def paths():
    """The reference flow and its neighbour, with equal weights."""
    return tuple(
        solve(Flow(SOFTMAX), TokenCloud(points), 1.0, **ACCURATE)
        for points in (POINTS, POINTS + PERTURBATION)
    )


@pytest.mark.slow
def test_the_radius_at_depth_one_stays_below_its_bound():
    path = solve(Flow(SOFTMAX), TokenCloud(POINTS, WEIGHTS), 1.0, **ACCURATE)
    bounds = radius_bound(Flow(SOFTMAX), RADIUS, path.depths)
    radii = path.statistics["radius"]
    np.testing.assert_allclose(radii[-1], 1.5681, atol=5e-5)
    np.testing.assert_allclose(bounds[-1], 2.5517, atol=5e-5)
    np.testing.assert_allclose(bounds[-1], RADIUS * np.exp(VALUE_NORM), rtol=1e-11)
    assert (radii <= bounds * (1 + 1e-12)).all()


@pytest.mark.parametrize("kind", [Softmax, L2, Sigmoid, Sinkhorn])
def test_all_averaging_kinds_have_the_exponential_radius_bound(kind):
    bound = radius_bound(kind(QUERY, KEY, VALUE), 2.0, 0.7)
    np.testing.assert_allclose(bound, 2 * np.exp(0.7 * VALUE_NORM), rtol=1e-11)


@pytest.mark.parametrize(
    "interpolate", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_a_schedule_integrates_the_norm_of_its_values(interpolate):
    maps = [Softmax(QUERY, KEY, factor * VALUE) for factor in (1.0, -3.0, 2.0)]
    if interpolate:
        schedule = Schedule(maps, np.array([0.0, 0.4, 1.0]), interpolate=True)
        # The norm of (1 - s) a + s b is |(1 - s) a + s b| for multiples of one matrix.
        integral = 0.4 * (1 / 8 + 9 / 8) + 0.6 * (9 / 10 + 4 / 10)
    else:
        schedule = Schedule(maps, np.array([0.0, 0.4, 0.7]))
        integral = 0.4 * 1 + 0.3 * 3 + 0.3 * 2
    bound = radius_bound(Flow(schedule), 1.0, 1.0)
    np.testing.assert_allclose(np.log(bound), VALUE_NORM * integral, rtol=1e-9)


def test_a_function_of_depth_is_integrated_forward_and_backward():
    flow = Flow(lambda depth: Softmax(QUERY, KEY, VALUE * (1 + depth)))
    forward, backward = (radius_bound(flow, 1.0, depth) for depth in (1.0, -1.0))
    np.testing.assert_allclose(np.log(forward), 1.5 * VALUE_NORM, rtol=1e-10)
    np.testing.assert_allclose(np.log(backward), 0.5 * VALUE_NORM, rtol=1e-10)


def test_linear_attention_has_a_bound_until_it_blows_up():
    gamma = Linear(QUERY, KEY, VALUE, beta=2.0)
    rate = 2 * 2.0 * VALUE_NORM * SCORE_NORM * 1.1**2
    depths = np.array([0.1, 0.3, 0.5])
    bounds = radius_bound(gamma, 1.1, depths)
    np.testing.assert_allclose(bounds, 1.1 / np.sqrt(1 - rate * depths), rtol=1e-10)
    with pytest.raises(Unsupported, match=f"near depth {1 / rate:.6g}"):
        radius_bound(gamma, 1.1, 1.01 / rate)


@pytest.mark.slow
def test_unnormalised_attention_keeps_its_bound_and_tells_of_the_blow_up():
    gamma = Unnormalised(QUERY, KEY, VALUE)
    path = solve(Flow(gamma), TokenCloud(POINTS), 0.3)
    bounds = radius_bound(gamma, RADIUS, path.depths)
    assert (path.statistics["radius"] <= bounds * (1 + 1e-9)).all()
    with pytest.raises(Unsupported, match="blows up"):
        radius_bound(gamma, RADIUS, 50.0)


def test_the_a_priori_growth_is_enormous():
    radius = np.linalg.norm(POINTS + PERTURBATION, axis=1).max()
    np.testing.assert_allclose(radius, 1.145294721894762, atol=1e-12)
    logarithm = stability_bound(Flow(SOFTMAX), float(radius), 1.0)
    np.testing.assert_allclose(logarithm, 242.17, atol=0.005)


def test_the_observed_growth_is_the_tabulated_one(paths):
    ratios = observed_growth(*paths)
    np.testing.assert_allclose(ratios[0], 1, rtol=1e-12)
    np.testing.assert_allclose(ratios[-1], 1.488, atol=5e-4)


@pytest.mark.slow
def test_the_three_growth_factors_are_in_order(paths):
    growth = growth_factor(Flow(SOFTMAX), *paths)
    assert growth.observed[-1] <= growth.factor
    assert growth.log_factors[-1] <= stability_bound(Flow(SOFTMAX), 1.1453, 1.0)
    at_saved_depths = jnp.exp(growth.log_factors[::4])
    assert (growth.observed <= at_saved_depths * (1 + 1e-9)).all()


@pytest.mark.slow
def test_the_rate_is_the_largest_eigenvalue_of_the_symmetric_part():
    cloud = TokenCloud(POINTS, WEIGHTS)
    path = solve(Flow(SOFTMAX), cloud, 0.5, save=2)
    growth = growth_factor(Flow(SOFTMAX), path, refine=1)

    def field(points):
        return SOFTMAX(cloud.moved(points), points)

    for index in (0, 1):
        jacobian = np.asarray(jax.jacfwd(field)(path.points[index])).reshape(8, 8)
        roots = np.repeat(np.sqrt(WEIGHTS), 2)
        scaled = roots[:, None] * jacobian / roots[None, :]
        largest = np.linalg.eigvalsh((scaled + scaled.T) / 2)[-1]
        np.testing.assert_allclose(growth.rates[index], largest, rtol=1e-10)


@pytest.mark.slow
def test_small_perturbations_of_a_flow_stay_below_the_factor():
    cloud = TokenCloud(POINTS, WEIGHTS)
    flow = Flow(SOFTMAX)
    path = solve(flow, cloud, 1.0, **ACCURATE)
    bound = growth_factor(flow, path).factor

    def end(points):
        return solve(flow, cloud.moved(points), 1.0, save=2, **ACCURATE).points[-1]

    derivative = np.asarray(jax.jacrev(end)(cloud.points)).reshape(8, 8)
    roots = np.repeat(np.sqrt(WEIGHTS), 2)
    growth = np.linalg.norm(roots[:, None] * derivative / roots[None, :], 2)
    assert growth <= bound
    # The bound is not far off either, as the rates change slowly along this path.
    assert growth >= 0.9 * bound


@pytest.mark.slow
def test_the_factor_of_a_constant_expansion_is_exact():
    flow = Flow(Softmax([[0.0]], [[0.0]], [[0.5]]))
    path = solve(flow, TokenCloud([[1.0], [-2.0]]), 2.0, save=3)
    growth = growth_factor(flow, path)
    np.testing.assert_allclose(growth.log_factors[-1], 0.5 * 2.0, rtol=1e-10)


@pytest.mark.slow
def test_a_path_backward_has_the_rates_of_the_reversed_field():
    flow = Flow(Softmax([[0.0]], [[0.0]], [[0.5]]))
    path = solve(flow, TokenCloud([[1.0], [-2.0]]), -2.0, save=3)
    # Of the eigenvalues 0.5 and 0 of the mean, the reversed field keeps 0 on top.
    np.testing.assert_allclose(growth_factor(flow, path).log_factors, 0, atol=1e-12)


@pytest.mark.slow
def test_on_the_sphere_only_tangent_perturbations_count():
    # Two tokens a small angle apart attract each other and nothing else moves.
    flow = Flow(identity_attention("softmax", 2), space=Sphere())
    angle = 0.3
    points = np.array([[1.0, 0.0], [np.cos(angle), np.sin(angle)]])
    path = solve(flow, TokenCloud(points), 0.4, save=2)
    growth = growth_factor(flow, path, refine=1)

    def velocity(angles):
        tokens = jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1)
        field = flow.field(jnp.zeros(()), TokenCloud(tokens), tokens)
        normals = jnp.stack([-jnp.sin(angles), jnp.cos(angles)], axis=1)
        return jnp.sum(field * normals, axis=1)

    jacobian = np.asarray(jax.jacfwd(velocity)(jnp.array([0.0, angle])))
    largest = np.linalg.eigvalsh((jacobian + jacobian.T) / 2)[-1]
    np.testing.assert_allclose(growth.rates[0], largest, atol=1e-9)


@pytest.mark.slow
def test_contraction_on_the_sphere_has_a_negative_rate():
    # All tokens are drawn to a pole that does not depend on them.
    pull = Perceptron(np.zeros((1, 2)), np.ones(1), np.array([[1.0], [0.0]]))
    flow = Flow(pull, space=Sphere())
    angles = np.array([0.1, -0.2, 0.3])
    points = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    path = solve(flow, TokenCloud(points), 0.5, save=2)
    growth = growth_factor(flow, path, refine=1)
    # The angle obeys da/dt = -c sin a, whose slope is -c cos a.
    strength = float(pull.apply(jnp.zeros((1, 2)))[0, 0])
    np.testing.assert_allclose(growth.rates[0], -strength * np.cos(0.3), rtol=1e-8)


@pytest.mark.slow
def test_masked_flows_are_compared_position_by_position():
    flow = Flow(Masked(SOFTMAX))
    first, second = (
        solve(flow, in_order(TokenCloud(points)), 0.5, save=3)
        for points in (POINTS, POINTS + PERTURBATION)
    )
    growth = growth_factor(flow, first, second, refine=2, between=3)
    assert (growth.observed <= jnp.exp(growth.log_factors[::2]) * (1 + 1e-9)).all()


@pytest.mark.slow
def test_the_profile_along_a_path_is_the_local_constant_at_each_depth():
    flow, cloud = Flow(SOFTMAX), TokenCloud(POINTS, WEIGHTS)
    path = run_layers(flow, cloud, 2)
    profile = lipschitz_profile(flow, path)
    assert profile.shape == (3,)
    for index in range(3):
        expected = local_lipschitz(SOFTMAX, path.cloud(index), method="svd")
        np.testing.assert_allclose(profile[index], expected, rtol=1e-10)


def test_what_has_no_bound_is_refused(paths):
    with pytest.raises(Unsupported, match="Sinkhorn"):
        stability_bound(Sinkhorn(QUERY, KEY, VALUE), 1.0, 1.0)
    with pytest.raises(InvalidInput, match="noise"):
        radius_bound(Flow(SOFTMAX, noise=0.1), 1.0, 1.0)
    with pytest.raises(InvalidInput, match="going away from 0"):
        radius_bound(SOFTMAX, 1.0, [1.0, 0.5])
    with pytest.raises(InvalidInput, match="radius is -1"):
        radius_bound(SOFTMAX, -1.0, 1.0)
    with pytest.raises(Overflow, match="too large"):
        stability_bound(SOFTMAX, 10.0, 5.0)
    with pytest.raises(InvalidInput, match="same measure"):
        observed_growth(paths[0], paths[0])
    with pytest.raises(Unsupported, match="hardmax"):
        growth_factor(Flow(Hardmax(QUERY, KEY, VALUE)), paths[0])
    with pytest.raises(InvalidInput, match="norm is 'other'"):
        lipschitz_profile(Flow(SOFTMAX), paths[0], norm="other")
    with pytest.raises(InvalidInput, match="refine is 0"):
        growth_factor(Flow(SOFTMAX), paths[0], refine=0)


def test_on_the_sphere_the_radius_stays_and_the_projection_counts():
    gamma = identity_attention("softmax", 2)
    flow = Flow(gamma, space=Sphere())
    assert radius_bound(flow, 1.0, 3.0) == 1
    # L(1) = 1 + 3 e^2 for beta = a = R = |V| = 1, and the projection adds |V| R.
    expected = 0.5 * (1 + 3 * np.exp(2) + 1)
    np.testing.assert_allclose(stability_bound(flow, 1.0, 0.5), expected, rtol=1e-10)
