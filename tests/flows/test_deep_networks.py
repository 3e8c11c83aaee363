"""Many heads and layers: traced once for each kind, and the same numbers."""

import diffrax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import meanformer as mf
from map_zoo import Counted, cast, cloud_of

D = 2
STEPS = {"save": 2, "solver": mf.FixedStep(0.125)}


def softmax(seed):
    query, key, value = jr.normal(jr.key(seed), (3, D, D)) / 2
    return mf.Softmax(query, key, value, beta=0.5 + seed / 8)


def perceptron(seed):
    first, second = jr.normal(jr.key(seed), (2, 3, D)) / 2
    return mf.Perceptron(first, jnp.ones(3), second.T)


def layers_of(count):
    """Layers of two heads and layers of a perceptron, in turn."""
    heads = [mf.MultiHead([softmax(k), softmax(k + count)]) for k in range(count)]
    return [heads[k] if k % 2 == 0 else perceptron(k) for k in range(count)]


def held(maps, step, dtype=jnp.float64):
    """The schedule with one map for each layer."""
    return mf.Schedule(maps, jnp.asarray(step * np.arange(len(maps)), dtype))


def by_hand(maps, points, step):
    """Return the tokens after each residual layer, one map after the other."""
    found, cloud = [points], cloud_of(points, dtype=points.dtype)
    for gamma in maps:
        points = points + step * gamma(cloud, points, positions=cloud.positions)
        cloud = cloud.moved(points)
        found.append(points)
    return jnp.stack(found)


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32])
def test_layers_in_turn_equal_the_layers_one_by_one(dtype):
    maps = [cast(gamma, dtype) for gamma in layers_of(6)]
    cloud = cloud_of(dtype=dtype)
    path = mf.run_layers(mf.Flow(held(maps, 0.5, dtype)), cloud, 6, step=0.5)
    expected = by_hand(maps, cloud.points, jnp.asarray(0.5, dtype))
    tolerance = 100 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(path.points, expected, atol=tolerance)


def test_the_velocity_after_the_last_layer_is_that_of_the_last_map():
    maps, cloud = layers_of(3), cloud_of()
    path = mf.run_layers(mf.Flow(mf.Schedule(maps)), cloud, 3)
    last = cloud.moved(path.points[-1])
    np.testing.assert_allclose(
        path.velocities[-1], maps[-1](last, last.points), atol=1e-14
    )


@pytest.mark.parametrize(
    "interpolate", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_heads_and_layers_are_traced_once_however_many_they_are(interpolate):
    def traced(run, count):
        def head(k):
            return Counted(jnp.eye(D) / k)

        maps = [mf.MultiHead([head(k + 1)] * count) for k in range(count)]
        flow = mf.Flow(mf.Schedule(maps, interpolate=interpolate))
        Counted.calls.clear()
        run(flow, count)
        return len(Counted.calls)

    def network(flow, count):
        mf.run_layers(flow, cloud_of(), 8)

    def solved(flow, count):
        mf.solve(flow, cloud_of(), 1.0, **STEPS)

    assert traced(network, 8) == traced(network, 2)
    assert traced(solved, 8) == traced(solved, 2)


@pytest.mark.slow
def test_a_schedule_of_several_kinds_is_each_of_its_maps_in_turn():
    maps, cloud = layers_of(4), cloud_of()
    path = mf.solve(mf.Flow(mf.Schedule(maps)), cloud, 1.0, **{**STEPS, "save": 5})
    for gamma in maps:
        cloud = mf.solve(mf.Flow(gamma), cloud, 0.25, **STEPS).cloud(-1)
    np.testing.assert_allclose(path.points[-1], cloud.points, atol=1e-14)


@pytest.mark.slow
def test_a_depth_for_each_member_of_a_batch_takes_the_map_of_that_depth():
    maps, cloud = layers_of(4), cloud_of()
    flow = mf.Flow(mf.Schedule(maps))
    depths = jnp.array([0.1, 0.3, 0.6, 0.9])
    found = jax.vmap(lambda depth: flow.field(depth, cloud, cloud.points))(depths)
    expected = [gamma(cloud, cloud.points) for gamma in maps]
    np.testing.assert_allclose(found, jnp.stack(expected), atol=1e-14)


@pytest.mark.slow
def test_the_gradient_in_the_weights_of_a_deep_network_is_right():
    maps, cloud = layers_of(4), cloud_of()

    def loss(maps):
        path = mf.run_layers(mf.Flow(held(maps, 0.5)), cloud, 4, step=0.5)
        return jnp.sum(path.points[-1] ** 3)

    def plain(maps):
        return jnp.sum(by_hand(maps, cloud.points, 0.5)[-1] ** 3)

    found, expected = jax.grad(loss)(maps), jax.jit(jax.grad(plain))(maps)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-13)


def test_a_gaussian_goes_through_many_heads_and_layers():
    maps = [mf.MultiHead([softmax(2 * k), softmax(2 * k + 1)]) for k in range(3)]
    mu = mf.Gaussian(jnp.array([0.3, -0.2]), jnp.array([[0.5, 0.1], [0.1, 0.4]]))
    path = mf.run_layers(mf.Flow(held(maps, 0.2)), mu, 3, step=0.2)
    for gamma in maps:
        mu = mf.push_forward(mf.Residual(gamma, 0.2), mu)
    np.testing.assert_allclose(path.means[-1], mu.mean(), atol=1e-13)
    np.testing.assert_allclose(path.covariances[-1], mu.covariance(), atol=1e-13)


def test_maps_of_different_types_are_not_interpolated():
    maps = [softmax(0), cast(softmax(1), jnp.float32)]
    with pytest.raises(mf.InvalidInput, match="shapes or types"):
        mf.Schedule(maps, interpolate=True)


@pytest.mark.parametrize(
    ("velocity", "count"),
    [
        (mf.MultiHead([mf.identity_attention("softmax", 1, 1e9)] * 3), 3),
        pytest.param(
            mf.compose(*[mf.identity_attention("softmax", 1, 1e9)] * 3),
            5,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            mf.Schedule([mf.identity_attention("softmax", 1, 1e9)] * 2),
            1,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_sums_of_all_heads_and_layers_are_in_the_statistics(velocity, count):
    points = np.random.default_rng(0).standard_normal((64, 1)) / 2
    cloud = mf.TokenCloud(points, sums=mf.Fourier(1e-6))
    # Scores too large for any grid: every sum is exact, and told so.
    solver = mf.FixedStep(0.5, diffrax.Euler())
    path = mf.solve(mf.Flow(velocity), cloud, 0.5, save=2, solver=solver)
    assert path.statistics["exact_sums"].tolist() == [count, count]
