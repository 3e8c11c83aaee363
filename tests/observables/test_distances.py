"""Statistics of the distances between tokens, against all pairs at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.spatial.distance import cdist

from meanformer.errors import InvalidInput
from meanformer.measures import TokenCloud, pad
from meanformer.observables import distance_statistics
from meanformer.observables.order import BLOCK_AREA

RANDOM = np.random.default_rng(0)
LEVELS = np.array([0.0, 0.05, 0.3, 0.5, 0.9, 1.0])


def test_equal_weights_agree_with_numpy():
    points = RANDOM.normal(size=(60, 3))
    found = distance_statistics(TokenCloud(points), LEVELS)
    distances = cdist(points, points)
    np.testing.assert_allclose(found.mean, distances.mean(), rtol=1e-12)
    np.testing.assert_allclose(found.largest, distances.max(), rtol=1e-12)
    exact = np.quantile(distances, LEVELS, method="inverted_cdf")
    np.testing.assert_allclose(found.quantiles, exact, atol=1e-14)


def test_weights_padding_splitting_and_order_are_those_of_the_measure():
    points, weights = RANDOM.normal(size=(7, 2)), RANDOM.dirichlet(np.ones(7))
    cloud = TokenCloud(points, weights)
    expected = distance_statistics(cloud, LEVELS)
    distances = cdist(points, points)
    np.testing.assert_allclose(expected.mean, weights @ distances @ weights, rtol=1e-12)
    padded = pad(cloud, 9)
    far = padded.moved(padded.points.at[8].set(jnp.array([50.0, 50.0])))
    split = TokenCloud(
        np.concatenate([points, points[:1]])[::-1],
        np.concatenate([[weights[0] / 4], weights[1:], [weights[0] * 3 / 4]])[::-1],
    )
    for same in (far, split):
        found = distance_statistics(same, LEVELS)
        for name in ("mean", "largest", "quantiles"):
            np.testing.assert_allclose(
                getattr(found, name), getattr(expected, name), atol=1e-12
            )


def test_two_tokens_have_a_quantile_at_zero_and_one_at_their_distance():
    cloud = TokenCloud([[0.0], [3.0]], [0.4, 0.6])
    # The pair is at distance 0 with probability 0.52.
    found = distance_statistics(cloud, [0.5, 0.52, 0.53, 1.0])
    np.testing.assert_allclose(found.quantiles, [0, 0, 3, 3], atol=1e-14)
    np.testing.assert_allclose(found.mean, 3 * 0.48, rtol=1e-12)


def test_one_token_is_at_distance_zero_of_itself():
    found = distance_statistics(TokenCloud([[1.0, 2.0]]))
    assert found.largest == 0
    assert found.mean == 0
    np.testing.assert_array_equal(found.quantiles, 0)


@pytest.mark.slow
def test_many_tokens_are_visited_in_blocks():
    count = 3000
    points = RANDOM.normal(size=(count, 2))
    assert 2 * count**2 > BLOCK_AREA
    compiled = (
        jax.jit(lambda points: distance_statistics(TokenCloud(points)))
        .lower(points)
        .compile()
    )
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * count**2
    found = distance_statistics(TokenCloud(points), [0.5])
    np.testing.assert_allclose(found.mean, np.sqrt(np.pi), rtol=0.05)


def test_single_precision_keeps_its_type():
    found = distance_statistics(TokenCloud(np.float32(RANDOM.normal(size=(10, 2)))))
    assert found.mean.dtype == found.quantiles.dtype == jnp.float32


def test_wrong_levels_are_named():
    cloud = TokenCloud([[0.0], [1.0]])
    with pytest.raises(InvalidInput, match="levels"):
        distance_statistics(cloud, [1.5])
    with pytest.raises(InvalidInput, match="levels"):
        distance_statistics(cloud, 0.5)
