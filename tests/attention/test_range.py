"""The ends of the floating-point range, and no queries at all."""

import jax.numpy as jnp
import numpy as np
import pytest

import reference as ref
from map_zoo import MAPS, TOKENS, cloud_of, every_map
from meanformer.attention import (
    L2,
    Hardmax,
    Linear,
    Sigmoid,
    Sinkhorn,
    Softmax,
    Unnormalised,
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
