"""The ends of the floating-point range, and no queries at all."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference as ref
from map_zoo import MAPS, MASSES, QUERIES, TOKENS, cast, cloud_of, every_map
from meanformer.attention import (
    L2,
    Hardmax,
    Linear,
    NearestOther,
    Sigmoid,
    Sinkhorn,
    Softmax,
    Unnormalised,
    identity_attention,
)
from meanformer.errors import Overflow
from meanformer.measures import TokenCloud
from reference import reference_attention

KINDS = [Softmax, L2, Sinkhorn, Linear, Unnormalised, Sigmoid, Hardmax]


@every_map()
def test_no_queries_have_no_values(name):
    values = MAPS[name](cloud_of(), jnp.zeros((0, 2)), positions=jnp.zeros(0))
    assert values.shape == (0, 2)


@pytest.mark.parametrize("count", [3, 400])
def test_an_absent_token_at_the_end_of_the_range_is_absent(count):
    random = np.random.default_rng(1)
    points = random.normal(size=(count, 2))
    queries = jnp.asarray(random.normal(size=(300, 2)), jnp.float32)
    attention = reference_attention(Softmax, jnp.float32, beta=5.0)
    weights = np.full(count, 1 / count)
    far = np.concatenate([points, [[3e38, -3e38]]])
    padded = cloud_of(far, np.append(weights, 0), None, jnp.float32)
    plain = cloud_of(points, weights, None, jnp.float32)
    expected = attention(plain, queries)
    np.testing.assert_allclose(attention(padded, queries), expected, atol=1e-5)


def test_far_tokens_without_a_score_are_averaged():
    points = 1e20 * np.random.default_rng(2).normal(size=(300, 2))
    cloud = TokenCloud(jnp.asarray(points, jnp.float32))
    flat = reference_attention(Softmax, jnp.float32, beta=0.0)
    values = flat(cloud, cloud.points)
    mean = points.mean(axis=0) @ ref.VALUE.T
    np.testing.assert_allclose(values, np.tile(mean, (300, 1)), atol=1e14)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_beyond_the_range_raise(kind):
    attention = reference_attention(kind, jnp.float32, beta=1e38)
    cloud = cloud_of(100 * TOKENS, dtype=jnp.float32)
    with pytest.raises(Overflow, match="overflows float32 at query 0; lower beta"):
        attention(cloud, cloud.points)


@pytest.mark.parametrize("count", [4, 300])
@pytest.mark.parametrize("dimension", [1, 2])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_scores_of_any_size_are_right_up_to_overflow(dtype, dimension, count):
    line = np.concatenate([[2.3, 3.1, 2.9, 2.2], np.full(count - 4, 2.5)])
    points = np.zeros((count, dimension))
    points[:, 0] = line
    cloud = TokenCloud(jnp.asarray(points, dtype))
    largest = np.log10(float(jnp.finfo(dtype).max))
    exponents = np.linspace(0.1, 1, count) * (largest - 1)
    heights = np.append(10 ** exponents[2:], [3e9, 1.1e10]).astype(dtype)
    queries = jnp.zeros((count, dimension), dtype).at[:, 0].set(heights)
    attention = identity_attention("softmax", dimension, 1.0)
    attention = jax.tree.map(lambda leaf: leaf.astype(dtype), attention)
    top = cloud.points[1]
    ends = np.concatenate([attention(cloud, queries), cloud.tilted_mean(queries)])
    np.testing.assert_array_equal(ends[:, 0], np.full(2 * count, top[0]))
    rounding = 4 * float(jnp.finfo(dtype).eps)
    log_mass = np.asarray(cloud.log_laplace(queries), np.float64)
    expected = np.float64(heights) * float(top[0]) - np.log(count)
    np.testing.assert_allclose(log_mass, expected, rtol=rounding)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_log_laplace_and_tilted_mean_beyond_the_range_raise(dtype, sign):
    cloud = TokenCloud(jnp.array([[-3.0, 2.0], [2.0, -3.0], [9.0, 9.0]], dtype))
    far = jnp.full((1, 2), sign * float(jnp.finfo(dtype).max) / 2, dtype)
    queries = jnp.concatenate([jnp.ones((1, 2), dtype), far])
    message = f"overflows {jnp.dtype(dtype).name} at query 1; lower u"
    with pytest.raises(Overflow, match=f"log_laplace {message}"):
        cloud.log_laplace(queries)
    with pytest.raises(Overflow, match=f"tilted_mean {message}"):
        cloud.tilted_mean(queries)


@pytest.mark.parametrize("size", [2e7, 1e15])
def test_a_large_query_matrix_of_l2_takes_no_digits_from_a_query_at_zero(size):
    points = np.array([[3.1, 0.2], [3.6, -0.3], [2.9, 0.4]], np.float32)
    query, eye = size * np.eye(2, dtype=np.float32), np.eye(2, dtype=np.float32)
    cloud = TokenCloud(jnp.asarray(points))
    found = L2(query, eye, eye, beta=0.5)(cloud, jnp.zeros((1, 2), jnp.float32))
    shares = np.exp(-0.5 * np.sum(points.astype(float) ** 2, axis=1))
    expected = shares @ points.astype(float) / shares.sum()
    np.testing.assert_allclose(found[0], expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("gamma", [Hardmax, NearestOther])
def test_gradients_by_tiny_weights_are_finite(gamma, dtype):
    points = jnp.array([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]], dtype)
    eye = jnp.eye(2, dtype=dtype)
    layer = gamma() if gamma is NearestOther else gamma(eye, eye, eye)

    def total(weights):
        return layer(TokenCloud(points, weights), points[1:2] / 2).sum()

    weights = jnp.array([1.0, 1e-30, 0.0], dtype)
    gradient = jax.grad(total)(weights)
    assert np.isfinite(gradient).all()
    # The query sees one token: in proportion, its weight does not matter.
    np.testing.assert_allclose(gradient * weights, 0, atol=1e-6)


@every_map(
    ["sinkhorn", "three half-steps", "network", "l2"],
    slow=["sinkhorn", "three half-steps"],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_an_absent_token_far_away_has_no_part_in_any_derivative(name, dtype):
    gamma = cast(MAPS[name], dtype)
    far = 1e12 if dtype == jnp.float32 else 1e80
    arrays, rest = eqx.partition(gamma, eqx.is_inexact_array)

    def gradient(cloud):
        def total(arrays):
            return eqx.combine(arrays, rest)(cloud, cast(QUERIES, dtype)).sum()

        return jax.grad(total)(arrays)

    plain = gradient(cloud_of(places=None, dtype=dtype))
    points, weights = np.append(TOKENS, [[far, -far]], axis=0), np.append(MASSES, 0)
    padded = gradient(cloud_of(points, weights, None, dtype))
    for found, expected in zip(*map(jax.tree.leaves, (padded, plain)), strict=True):
        tolerance = 1e3 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
