"""The flow in rescaled coordinates, against the flow in original ones."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import meanformer as mf
from limit_cases import THIRD, TOKENS, VALUE, plain, random_case
from meanformer.errors import InvalidInput, Unsupported
from meanformer.numerics.growth import ScaledExponential

TIGHT = {"rtol": 1e-11, "atol": 1e-13}
JORDAN = np.array([[0.5, 1.0], [0.0, 0.5]])


def rescaled_by_hand(value, path):
    growths = [scipy.linalg.expm(-float(t) * value) for t in path.depths]
    return np.einsum("tde,tne->tnd", growths, np.asarray(path.points))


@pytest.mark.parametrize(
    "value", [np.eye(2), VALUE, JORDAN, np.array([[0.1, -0.9], [0.7, 0.3]])]
)
def test_rescaling_before_or_after_solving_is_the_same(value):
    cloud, layer = mf.TokenCloud(TOKENS), plain(value)
    original = mf.solve(mf.Flow(layer), cloud, 1.0, save=3, **TIGHT)
    scaled = mf.solve(mf.Flow(mf.Rescaled(layer)), cloud, 1.0, save=3, **TIGHT)
    np.testing.assert_allclose(
        scaled.points, rescaled_by_hand(value, original), atol=3e-10
    )


def test_the_first_token_is_tabulated_at_depth_one():
    path = mf.solve(
        mf.Flow(mf.Rescaled(plain(np.eye(2)))), mf.TokenCloud(TOKENS), 1.0, **TIGHT
    )
    np.testing.assert_allclose(
        path.points[-1, 0], [0.7305360992, 0.2003820495], atol=1e-9
    )


def test_the_hull_of_rescaled_tokens_shrinks_for_the_identity():
    path = mf.solve(mf.Flow(mf.Rescaled(plain(np.eye(2)))), mf.TokenCloud(TOKENS), 4.0)
    angles = np.linspace(0, 2 * np.pi, 64)
    directions = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    support = (np.asarray(path.points) @ directions.T).max(axis=1)
    assert np.diff(support, axis=0).max() <= 1e-7


@pytest.mark.slow
def test_original_tokens_come_back_with_their_scale():
    cloud, layer = mf.TokenCloud(TOKENS), plain(VALUE)
    original = mf.solve(mf.Flow(layer), cloud, 2.0, save=2, **TIGHT)
    schedule = mf.Rescaled(layer)
    scaled = mf.solve(mf.Flow(schedule), cloud, 2.0, save=2, **TIGHT)
    log_scale, points = schedule.original(2.0, scaled.points[-1])
    np.testing.assert_allclose(
        np.exp(log_scale) * points, original.points[-1], rtol=1e-8
    )


def test_nothing_overflows_at_any_depth():
    schedule = mf.Rescaled(plain(VALUE))
    for depth in (1e2, 1e4, 1e8):
        log_scale, points = schedule.original(depth, jnp.asarray(TOKENS))
        assert np.all(np.isfinite(points))
        assert float(log_scale) == pytest.approx(1.3479896139 * depth, rel=1e-9)
        velocity = schedule.velocity(
            jnp.asarray(depth), mf.TokenCloud(TOKENS), jnp.asarray(TOKENS), None
        )
        assert np.all(np.isfinite(velocity))


def test_attention_beyond_the_range_of_numbers_is_hardmax():
    schedule, cloud = mf.Rescaled(plain(np.eye(2))), mf.TokenCloud(TOKENS)
    hard = mf.Rescaled(mf.Hardmax(np.eye(2), np.eye(2), np.eye(2)))
    far, near = (jnp.asarray(depth) for depth in (1e3, 1.0))
    np.testing.assert_allclose(
        schedule.velocity(far, cloud, cloud.points, None),
        hard.velocity(near, cloud, cloud.points, None),
        atol=1e-12,
    )


@pytest.mark.slow
def test_layers_that_change_along_depth_are_rescaled_by_their_product():
    second = np.array([[0.2, -0.5], [0.4, 0.3]])
    layers = mf.Schedule([plain(VALUE), plain(second, beta=0.5)], [0.0, 0.7])
    cloud = mf.TokenCloud(TOKENS)
    depths = np.array([0.0, 0.5, 1.5])
    options = {"save": depths, **TIGHT}
    original = mf.solve(mf.Flow(layers), cloud, 1.5, **options)
    schedule = mf.Rescaled(layers)
    scaled = mf.solve(mf.Flow(schedule), cloud, 1.5, **options)
    growth = scipy.linalg.expm(0.8 * second) @ scipy.linalg.expm(0.7 * VALUE)
    by_hand = np.asarray(original.points[-1]) @ np.linalg.inv(growth).T
    np.testing.assert_allclose(scaled.points[-1], by_hand, atol=1e-9)
    log_scale, points = schedule.original(1.5, scaled.points[-1])
    np.testing.assert_allclose(
        np.exp(log_scale) * points, original.points[-1], atol=1e-9
    )
    with pytest.raises(InvalidInput, match="no single attention"):
        _ = schedule.attention


@pytest.mark.slow
def test_a_bias_of_the_queries_is_rescaled_too():
    layer = plain(VALUE, query_bias=np.array([0.4, -0.3]))
    cloud = mf.TokenCloud(TOKENS)
    original = mf.solve(mf.Flow(layer), cloud, 1.0, save=2, **TIGHT)
    scaled = mf.solve(mf.Flow(mf.Rescaled(layer)), cloud, 1.0, save=2, **TIGHT)
    np.testing.assert_allclose(
        scaled.points, rescaled_by_hand(VALUE, original), atol=3e-10
    )


def test_the_map_at_a_depth_is_the_velocity_there():
    schedule, cloud = mf.Rescaled(plain(VALUE)), mf.TokenCloud(TOKENS)
    depth = jnp.asarray(0.8)
    np.testing.assert_allclose(
        schedule.at(depth)(cloud, cloud.points),
        schedule.velocity(depth, cloud, cloud.points, None),
        atol=1e-12,
    )


@pytest.mark.slow
def test_the_solve_is_differentiable_in_the_value_matrix():
    cloud = mf.TokenCloud(TOKENS)

    def spread(value):
        layer = mf.Softmax(jnp.eye(2), jnp.eye(2), value)
        path = mf.solve(
            mf.Flow(mf.Rescaled(layer)),
            cloud,
            0.5,
            save=2,
            solver=mf.FixedStep(0.05),
        )
        return jnp.sum(path.points[-1] ** 2)

    value, direction = jnp.asarray(VALUE), jnp.array([[0.3, -0.2], [0.5, 0.1]])
    slope = jnp.sum(jax.grad(spread)(value) * direction)
    step = 1e-5
    difference = spread(value + step * direction) - spread(value - step * direction)
    np.testing.assert_allclose(slope, difference / (2 * step), rtol=1e-6)


@pytest.mark.parametrize("value", [VALUE, JORDAN, np.array([[0.0, 1], [-1, 0]])])
@pytest.mark.parametrize("depth", [0.0, 1.0, 20.0])
def test_exponentials_keep_their_scale_apart(value, depth):
    exponential = ScaledExponential(jnp.asarray(value))
    place = jnp.asarray(depth)
    found = np.exp(exponential.log_scale(place)) * exponential.at(place)
    expected = scipy.linalg.expm(depth * value)
    np.testing.assert_allclose(found, expected, atol=1e-12 * np.abs(expected).max())


@pytest.mark.slow
def test_attention_that_becomes_boolean_ends_the_solve():
    flow = mf.Flow(mf.Rescaled(plain(np.eye(2))))
    path = mf.solve(
        flow,
        mf.TokenCloud(TOKENS),
        15.0,
        save=31,
        stop=mf.flows.BooleanAttention(flow.velocity),
    )
    assert bool(path.status == mf.Status.condition_met)
    assert 4 < float(path.depths[-1]) < 7
    plain_path = mf.solve(
        mf.Flow(plain(np.eye(2))),
        mf.TokenCloud(TOKENS),
        15.0,
        save=31,
        stop=mf.flows.BooleanAttention(plain(np.eye(2))),
    )
    np.testing.assert_allclose(plain_path.depths[-1], path.depths[-1], atol=0.3)


@pytest.mark.slow
def test_implicit_steps_take_over_where_explicit_ones_are_too_many():
    decay = mf.PointMap(lambda x: -1e4 * (x - jnp.cos(x)))
    cloud = mf.TokenCloud(np.array([[0.3], [1.2]]))
    path = mf.solve(
        mf.Flow(decay), cloud, 2.0, save=3, solver=mf.flows.Switching(budget=64)
    )
    assert bool(path.status == mf.Status.reached)
    np.testing.assert_allclose(path.points[-1], 0.7390851332151607, atol=1e-6)
    assert int(path.accepted_steps[-1]) < 1000
    with pytest.warns(mf.errors.StoppedEarly, match="step budget"):
        mf.solve(mf.Flow(decay), cloud, 2.0, save=3, stop=mf.flows.StepBudget(1000))


@pytest.mark.slow
def test_without_stiffness_switching_is_the_explicit_solver():
    flow, cloud = mf.Flow(plain(VALUE)), mf.TokenCloud(TOKENS)
    plainly = mf.solve(flow, cloud, 1.0, save=3)
    switching = mf.solve(flow, cloud, 1.0, save=3, solver=mf.flows.Switching())
    np.testing.assert_array_equal(plainly.points, switching.points)


@pytest.mark.slow
def test_switching_merges_too():
    flow, cloud = mf.Flow(plain(VALUE)), mf.TokenCloud(TOKENS)
    plainly = mf.solve(flow, cloud, 1.0, save=3)
    merging = mf.solve(
        flow, cloud, 1.0, save=3, solver=mf.flows.Switching(), merge=1e-6
    )
    np.testing.assert_allclose(merging.points, plainly.points, atol=1e-6)


def test_a_gaussian_does_not_switch():
    gaussian = mf.Gaussian(jnp.zeros(2), jnp.eye(2))
    with pytest.raises(Unsupported, match="for tokens"):
        mf.solve(mf.Flow(plain(-np.eye(2))), gaussian, 1.0, solver=mf.flows.Switching())


@pytest.mark.slow
def test_a_trajectory_knows_its_flow_where_numbers_are_known():
    flow, cloud = mf.Flow(plain(VALUE)), mf.TokenCloud(TOKENS)
    assert eqx.tree_equal(mf.solve(flow, cloud, 0.1, save=2).flow, flow)
    assert eqx.tree_equal(mf.run_layers(flow, cloud, 2).flow, flow)
    assert jax.jit(lambda c: mf.solve(flow, c, 0.1, save=2))(cloud).flow is None


def test_what_does_not_rescale_is_refused():
    identity = np.eye(2)
    with pytest.raises(Unsupported, match="must sum to one"):
        mf.Rescaled(mf.Linear(identity, identity, identity))
    with pytest.raises(InvalidInput, match="square"):
        mf.Rescaled(mf.Softmax(identity, identity, np.ones((1, 2))))
    with pytest.raises(InvalidInput, match="value_bias"):
        mf.Rescaled(plain(identity, value_bias=np.ones(2)))
    layers = [plain(identity), plain(VALUE)]
    with pytest.raises(InvalidInput, match="holds each"):
        mf.Rescaled(mf.Schedule(layers, [0.0, 1.0], interpolate=True))
    with pytest.raises(InvalidInput, match="budget"):
        mf.flows.Switching(budget=0)


@pytest.mark.slow
def test_free_coordinates_grow_while_leaders_rest():
    tokens = np.column_stack([TOKENS, THIRD])
    flow = mf.Flow(mf.Rescaled(plain(np.diag([1, 1, -0.5]))))
    path = mf.solve(flow, mf.TokenCloud(tokens), 8.0, save=[0, 6.0, 8.0], **TIGHT)
    np.testing.assert_allclose(path.points[1:, 3, 2], [-11.678, -32.421], atol=1e-3)


@pytest.mark.slow
def test_single_precision_stays_single():
    layer, tokens, _ = random_case("simple leading", 1)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), layer)
    cloud = dataclasses.replace(
        tokens,
        points=tokens.points.astype(jnp.float32),
        weights=tokens.weights.astype(jnp.float32),
    )
    path = mf.solve(mf.Flow(mf.Rescaled(narrow)), cloud, 1.0, save=2)
    wide = mf.solve(mf.Flow(mf.Rescaled(layer)), tokens, 1.0, save=2)
    assert path.points.dtype == jnp.float32
    np.testing.assert_allclose(path.points, wide.points, atol=1e-4)
