"""Contexts told apart by one block; moments read off attention."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import meanformer as mf
from meanformer.expressivity import (
    block,
    moments_from_attention,
    seen_along,
    separate,
)


@pytest.fixture
def cloud():
    points = jnp.array([-0.9, -0.2, 0.1, 0.7, 1.0])[:, None]
    return mf.TokenCloud(points, jnp.array([0.1, 0.3, 0.2, 0.25, 0.15]))


def three_points():
    """Three points with the moments of the uniform law up to the fifth."""
    nodes, weights = np.polynomial.legendre.leggauss(3)
    return mf.TokenCloud(nodes[:, None], weights / 2)


CROSS = mf.TokenCloud([[1.0, 1], [-1, -1]]), mf.TokenCloud([[1.0, -1], [-1, 1]])


def test_moments_are_recovered_from_tilted_means_alone(cloud):
    found = moments_from_attention(
        lambda t: cloud.tilted_mean(jnp.asarray(t)[:, None])[:, 0]
    )
    expected = [0.195, 0.3675, 0.16065, 0.276135, 0.1328745]
    np.testing.assert_allclose(found, expected, atol=1e-10)


@pytest.mark.parametrize(
    ("strength", "gap"),
    [(1.0, 1.60082e-4), (2.0, 3.2719e-3), (4.0, 0.031068), (8.0, 0.102925)],
)
def test_equal_moments_are_told_apart_by_strong_scores(strength, gap):
    pair = mf.UniformBox(-jnp.ones(1), jnp.ones(1)), three_points()
    seen = [seen_along(mu, [[1.0]], [strength])[0, 0] for mu in pair]
    np.testing.assert_allclose(abs(seen[0] - seen[1]), gap, rtol=1e-4)


def test_equal_marginals_are_told_apart_along_other_directions():
    axis, other = [[1.0, 0.0]], [[0.6, 0.8]]
    same = [seen_along(mu, axis, [1.0])[0, 0] for mu in CROSS]
    np.testing.assert_allclose(same, np.tanh(1), rtol=1e-12)
    seen = [seen_along(mu, other, [1.0])[0, 0] for mu in CROSS]
    expected = [1.4 * np.tanh(1.4), 0.2 * np.tanh(0.2)]
    np.testing.assert_allclose(seen, expected, rtol=1e-12)


def test_the_best_block_for_the_cross_looks_along_a_diagonal(key):
    found = separate(*CROSS, key=key)
    assert found.is_separated
    # Along a diagonal one context is a point, and the other tends to its hull.
    strength = 8 / np.sqrt(2)
    assert found.difference == pytest.approx(
        np.sqrt(2) * np.tanh(np.sqrt(2) * strength), rel=1e-9
    )
    np.testing.assert_allclose(np.abs(found.direction), np.sqrt(0.5), rtol=1e-4)
    values = [found.block(mu, jnp.zeros((1, 2)))[0, 0] for mu in CROSS]
    np.testing.assert_allclose(values, found.values, rtol=1e-12)


def test_equal_contexts_are_not_told_apart(cloud, key):
    order = jnp.array([3, 1, 4, 0, 2])
    same = mf.TokenCloud(cloud.points[order], cloud.weights[order])
    found = separate(cloud, same, key=key)
    assert not found.is_separated
    assert "not separated" in str(found)


def test_unequal_queries_are_told_apart_in_equal_contexts(cloud, key):
    found = separate(cloud, cloud, ([0.5], [-3.0]), key=key)
    assert found.is_separated
    assert found.difference == pytest.approx(3.5)
    assert "separated by 3.5" in str(found)


def test_the_search_beats_random_blocks(key):
    keys = jr.split(key, 3)
    pair = [mf.TokenCloud(jr.normal(one, (5, 3))) for one in keys[:2]]
    found = separate(*pair, key=keys[2], most=2.0)
    tries = jr.normal(keys[2], (200, 3))
    tries /= jnp.linalg.norm(tries, axis=1, keepdims=True)
    seen = [seen_along(mu, tries, jnp.linspace(-2, 2, 21)) for mu in pair]
    assert found.difference >= float(jnp.abs(seen[0] - seen[1]).max()) - 1e-9
    gamma = block(3, shift=found.strength * found.direction, value=found.direction)
    values = [float(gamma(mu, jnp.zeros((1, 3)))[0, 0]) for mu in pair]
    np.testing.assert_allclose(values, found.values, rtol=1e-10)


def test_too_many_moments_and_other_dimensions_are_refused(cloud, key):
    with pytest.raises(mf.InvalidInput, match="have no digits left"):
        moments_from_attention(lambda t: t, 11)
    with pytest.raises(mf.InvalidInput, match="dimensions 1 and 2"):
        separate(cloud, CROSS[0], key=key)
