"""Parameters that change with depth."""

import jax.numpy as jnp
import numpy as np
import pytest

import meanformer as mf
from meanformer.experiments import reference_attention, reference_cloud

PRECISE = {"save": 2, "rtol": 1e-10, "atol": 1e-12}


def turned(angle):
    """The reference attention with its values turned by an angle."""
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    rotation = jnp.stack([jnp.stack([cosine, -sine]), jnp.stack([sine, cosine])])
    base = reference_attention()
    return mf.Softmax(base.query, base.key, base.value @ rotation)


def final(velocity, **options):
    path = mf.solve(mf.Flow(velocity), reference_cloud(), 1.0, **PRECISE | options)
    return np.asarray(path.points[-1])


@pytest.mark.slow
def test_a_schedule_of_equal_maps_is_the_constant_flow():
    same = mf.Schedule([reference_attention(), reference_attention()])
    np.testing.assert_allclose(final(same), final(reference_attention()), atol=1e-9)


@pytest.mark.slow
def test_a_held_schedule_is_one_flow_after_the_other():
    first, second = turned(jnp.array(0.3)), turned(jnp.array(1.1))
    halfway = mf.solve(mf.Flow(first), reference_cloud(), 0.5, **PRECISE).cloud(-1)
    after = mf.solve(mf.Flow(second), halfway, 0.5, **PRECISE).points[-1]
    np.testing.assert_allclose(final(mf.Schedule([first, second])), after, atol=1e-9)


@pytest.mark.slow
def test_held_maps_may_be_of_different_kinds():
    first, second = turned(jnp.array(0.3)), reference_attention(mf.L2)
    halfway = mf.solve(mf.Flow(first), reference_cloud(), 0.5, **PRECISE).cloud(-1)
    after = mf.solve(mf.Flow(second), halfway, 0.5, **PRECISE).points[-1]
    np.testing.assert_allclose(final(mf.Schedule([first, second])), after, atol=1e-9)


@pytest.mark.slow
def test_an_interpolated_schedule_equals_the_function_it_interpolates():
    base = reference_attention()

    def scaled(depth):
        return mf.Softmax(base.query, base.key, (1 + 2 * depth) * base.value)

    listed = [scaled(jnp.array(depth)) for depth in (0.0, 0.25, 1.0)]
    schedule = mf.Schedule(listed, [0.0, 0.25, 1.0], interpolate=True)
    np.testing.assert_allclose(final(schedule), final(scaled), atol=1e-9)


def test_outside_of_its_depths_an_interpolated_schedule_holds_the_nearest_map():
    maps = [turned(jnp.array(angle)) for angle in (0.2, 0.9)]
    schedule = mf.Schedule(maps, [0.0, 1.0], interpolate=True)
    for depth, nearest in ((-0.5, maps[0]), (1.5, maps[1])):
        found = schedule.at(jnp.array(depth))
        np.testing.assert_allclose(found.value, nearest.value, rtol=1e-14)


def test_layers_take_the_map_of_their_own_depth():
    maps = [turned(jnp.array(angle)) for angle in (0.2, 0.9)]
    path = mf.run_layers(mf.Flow(mf.Schedule(maps)), reference_cloud(), 2)
    network = mf.compose(mf.Residual(maps[1], 0.5), mf.Residual(maps[0], 0.5))
    expected = mf.push_forward(network, reference_cloud()).points
    np.testing.assert_allclose(path.points[-1], expected, atol=1e-14)


@pytest.mark.slow
def test_a_scheduled_sum_can_be_split():
    pull = mf.PointMap(lambda x: -0.5 * x)
    schedule = mf.Schedule([turned(jnp.array(a)) + pull for a in (0.2, 0.9)])
    halves = {"save": jnp.array([0.0, 0.5, 1.0])}
    split = final(schedule, solver=mf.flows.Splitting(0.01), **halves)
    np.testing.assert_allclose(split, final(schedule), atol=1e-5)
    function = final(
        lambda depth: turned(depth) + pull, solver=mf.flows.Splitting(0.01)
    )
    np.testing.assert_allclose(
        function, final(lambda depth: turned(depth) + pull), atol=1e-5
    )


@pytest.mark.slow
def test_fixed_steps_keep_their_order_across_a_saved_jump():
    maps = [turned(jnp.array(angle)) for angle in (0.2, 1.9)]
    options = {"save": jnp.array([0.0, 0.5, 1.0]), "solver": mf.FixedStep(0.05)}
    steps = final(mf.Schedule(maps), **options)
    np.testing.assert_allclose(steps, final(mf.Schedule(maps)), atol=1e-7)


def test_a_schedule_needs_a_map():
    with pytest.raises(mf.InvalidInput, match="maps is empty"):
        mf.Schedule([])


def test_a_schedule_refuses_depths_out_of_order():
    maps = [reference_attention(), reference_attention()]
    with pytest.raises(mf.InvalidInput, match="increase strictly"):
        mf.Schedule(maps, [1.0, 0.5])


def test_only_alike_maps_can_be_interpolated():
    maps = [reference_attention(), reference_attention(mf.L2)]
    with pytest.raises(mf.InvalidInput, match="only alike maps"):
        mf.Schedule(maps, interpolate=True)
