"""Alike maps are evaluated as one in compiled code, and nothing else changes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import meanformer as mf
from map_zoo import Counted, cast, cloud_of
from meanformer.attention.abstract import stack_maps
from meanformer.attention.stacking import Stacked, stacked

D = 2


def softmax(seed, rows=D, kind=mf.Softmax, **options):
    query, key, value = jr.normal(jr.key(seed), (3, rows, D))
    return kind(query, key, value[:D] if rows >= D else jnp.eye(D), **options)


def perceptron(seed):
    first, second = jr.normal(jr.key(seed), (2, 3, D)) / 2
    return mf.Perceptron(first, jnp.ones(3), second.T)


def narrow(seed):
    query, key, value = jr.normal(jr.key(seed), (3, 1, D))
    return mf.Softmax(query, key, value, beta=0.5 + seed)


HEADS = [softmax(seed) for seed in range(4)]
OUTPUTS = [jr.normal(jr.key(seed), (D, 1)) for seed in range(3)]
BLOCKS = [
    layer
    for seed in range(4)
    for layer in (
        mf.Residual(mf.Masked(softmax(seed)), 0.3),
        mf.Residual(mf.compose(perceptron(seed), mf.RMSNorm()), 0.2),
    )
]
MAPS = {
    "heads": mf.MultiHead(HEADS),
    "heads of several kinds": mf.MultiHead(
        [*HEADS, softmax(5, kind=mf.L2), softmax(6, rows=3), Counted(jnp.eye(D))]
    ),
    "heads with outputs": mf.MultiHead([narrow(s) for s in range(3)], OUTPUTS),
    "masked heads": mf.Masked(mf.MultiHead(HEADS), mf.Causal()),
    "masks on heads": mf.MultiHead([mf.Masked(head) for head in HEADS]),
    "a sum": mf.Sum([perceptron(0), mf.MultiHead(HEADS), perceptron(1)]),
    "a network": mf.compose(mf.LayerNorm(), *BLOCKS),
    "a network of one's own": mf.compose(*[Counted(k * jnp.eye(D)) for k in range(5)]),
}
every_map = pytest.mark.parametrize("name", MAPS)


def at_tokens(gamma, cloud):
    return gamma(cloud, cloud.points, positions=cloud.positions)


@every_map
@pytest.mark.parametrize(
    "dtype", [jnp.float64, pytest.param(jnp.float32, marks=pytest.mark.slow)]
)
def test_compiled_and_one_by_one_agree_to_rounding(name, dtype):
    gamma, cloud = cast(MAPS[name], dtype), cloud_of(dtype=dtype)
    plain = at_tokens(gamma, cloud)
    compiled = eqx.filter_jit(at_tokens)(gamma, cloud)
    together = eqx.filter_jit(at_tokens)(stack_maps(gamma), cloud)
    assert plain.dtype == compiled.dtype == dtype
    tolerance = 50 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(compiled, plain, atol=tolerance)
    np.testing.assert_allclose(together, plain, atol=tolerance)


@pytest.mark.parametrize("join", [mf.Sum, mf.attention.Composition])
def test_alike_maps_without_arrays_are_evaluated_as_often_as_they_are_listed(join):
    gamma, cloud = join([mf.PointMap(jnp.sin, takes=D)] * 4), cloud_of()
    compiled = eqx.filter_jit(at_tokens)(gamma, cloud)
    np.testing.assert_allclose(compiled, at_tokens(gamma, cloud), atol=1e-15)


@pytest.mark.parametrize("name", ["heads with outputs", "masked heads", "a network"])
def test_gradients_agree_with_those_of_maps_one_by_one(name):
    gamma, cloud = MAPS[name], cloud_of()

    def loss(gamma, points):
        return jnp.sum(jnp.sin(at_tokens(gamma, cloud.moved(points))))

    found = jax.grad(loss, argnums=(0, 1))(gamma, cloud.points)
    leaves = jax.tree.leaves(found)
    step, directions = (
        1e-6,
        [jr.normal(jr.key(k), a.shape) for k, a in enumerate(leaves)],
    )
    direction = jax.tree.unflatten(jax.tree.structure(found), directions)
    ends = [
        loss(
            *jax.tree.map(
                lambda a, b, s=s: a + s * step * b, (gamma, cloud.points), direction
            )
        )
        for s in (1, -1)
    ]
    slope = sum(jnp.vdot(a, b) for a, b in zip(leaves, directions, strict=True))
    np.testing.assert_allclose((ends[0] - ends[1]) / (2 * step), slope, rtol=1e-6)


@pytest.mark.parametrize("name", ["heads of several kinds", "a network"])
def test_a_batch_is_the_members_one_by_one(name):
    gamma, cloud = MAPS[name], cloud_of()
    batch = jnp.stack([cloud.points, 0.5 * cloud.points, cloud.points[::-1]])
    found = jax.vmap(lambda points: at_tokens(gamma, cloud.moved(points)))(batch)
    for points, image in zip(batch, found, strict=True):
        np.testing.assert_allclose(
            image, at_tokens(gamma, cloud.moved(points)), atol=1e-13
        )


def test_the_number_of_maps_does_not_change_how_many_are_traced():
    def traced(gamma):
        Counted.calls.clear()
        cloud = cloud_of()
        jax.jit(lambda points: at_tokens(gamma, cloud.moved(points)))(cloud.points)
        return len(Counted.calls)

    def maps(count):
        return [Counted(k * jnp.eye(D)) for k in range(count)]

    assert traced(mf.MultiHead(maps(12))) == traced(mf.MultiHead(maps(3)))
    assert traced(mf.Sum(maps(12))) == traced(mf.Sum(maps(3)))

    def blocks(count):
        return [layer for one in maps(count) for layer in (one, mf.LayerNorm())]

    assert traced(mf.compose(*blocks(12))) == traced(mf.compose(*blocks(3)))


def test_outside_of_compiled_code_an_overflow_is_still_told():
    huge = mf.Softmax(1e200 * jnp.eye(D), 1e200 * jnp.eye(D), jnp.eye(D))
    with pytest.raises(mf.Overflow, match="Softmax overflows"):
        at_tokens(mf.MultiHead([huge, huge]), cloud_of())


def test_a_gaussian_goes_through_a_network_of_alike_layers():
    layers = [mf.Residual(mf.MultiHead(HEADS[k:][:2]), 0.1) for k in range(3)]
    mu = mf.Gaussian(jnp.array([0.3, -0.2]), jnp.array([[0.5, 0.1], [0.1, 0.4]]))
    found = jax.jit(lambda mu: mf.push_forward(mf.compose(*layers[::-1]), mu))(mu)
    for layer in layers:
        mu = mf.push_forward(layer, mu)
    np.testing.assert_allclose(found.mean(), mu.mean(), atol=1e-13)
    np.testing.assert_allclose(found.covariance(), mu.covariance(), atol=1e-13)


def test_maps_with_functions_of_their_own_are_kept_apart():
    layers = [mf.PointMap(lambda x, k=k: jnp.sin(k * x)) for k in range(1, 4)]
    assert len(stacked(tuple(layers)).kinds) == 3
    cloud = cloud_of()
    compiled = jax.jit(lambda x: mf.Sum(layers)(cloud, x))(cloud.points)
    expected = sum(jnp.sin(k * cloud.points) for k in range(1, 4))
    np.testing.assert_allclose(compiled, expected, atol=1e-14)


def test_maps_that_change_the_dimension_are_no_loop():
    lift = mf.Perceptron(
        jnp.eye(D), jnp.zeros(D), jnp.ones((3, D)), activation=jnp.tanh
    )
    drop = mf.Perceptron(
        jnp.ones((D, 3)), jnp.zeros(D), jnp.eye(D), activation=jnp.tanh
    )
    network = mf.compose(*[drop, lift] * 3)
    cloud = cloud_of()
    compiled = eqx.filter_jit(at_tokens)(network, cloud)
    np.testing.assert_allclose(compiled, at_tokens(network, cloud), atol=1e-14)


def test_a_stack_is_still_a_sequence_of_maps():
    maps = (*HEADS[:2], perceptron(0), HEADS[2])
    kept = stacked(maps)
    assert isinstance(kept, Stacked)
    assert len(kept) == 4
    assert len(kept.kinds) == 2
    for one, same in zip(kept, maps, strict=True):
        assert eqx.tree_equal(one, same)
