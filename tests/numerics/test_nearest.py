"""Pairs by their distance, against k-d trees and graphs of SciPy."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy.sparse.csgraph import connected_components
from scipy.spatial import KDTree
from scipy.spatial.distance import cdist

from meanformer.numerics import nearest


@pytest.fixture(params=[10, 2_000_000], ids=["in blocks", "at once"])
def pairs_at_once(request, monkeypatch):
    monkeypatch.setattr(nearest, "PAIRS_AT_ONCE", request.param)


@pytest.fixture
def problem(key):
    points = jr.normal(key, (25, 3))
    present = jnp.arange(25) % 6 != 2
    return points, present


@pytest.mark.parametrize("dimension", [3, 20])
def test_the_closest_pair_is_that_of_a_tree(dimension, key, pairs_at_once):
    points = jr.normal(key, (25, dimension))
    present = jnp.arange(25) % 6 != 2
    gap, *pair = nearest.closest_pair(points, present)
    rows = np.flatnonzero(present)
    expected, index = KDTree(np.asarray(points)[rows]).query(points[rows], k=2)
    best = expected[:, 1].argmin()
    np.testing.assert_allclose(gap, expected[best, 1], rtol=1e-14)
    assert {int(i) for i in pair} == {int(i) for i in rows[index[best]]}


def test_chains_are_the_components_of_the_graph_of_close_points(problem, pairs_at_once):
    points, present = problem
    labels = nearest.chain_labels(points, present, 0.9)
    close = (cdist(points, points) <= 0.9) & np.outer(present, present)
    _, groups = connected_components(close | np.eye(25, dtype=bool))
    first = np.array([np.flatnonzero(groups == group)[0] for group in groups])
    np.testing.assert_array_equal(labels, first)
    assert 1 < len(np.unique(groups)) < 25


def test_a_long_chain_is_followed_to_its_end():
    line = jnp.arange(12.0)[::-1, None]
    labels = nearest.chain_labels(line, jnp.ones(12, bool), 1.0)
    np.testing.assert_array_equal(labels, 0)


def test_a_change_that_neighbours_share_does_not_count(problem, pairs_at_once):
    points, present = problem
    change = 0.1 * points[::-1]
    ratio, shifted = (
        nearest.largest_relative_change(
            points, moved, present, relative=0.5, absolute=0.01
        )
        for moved in (change, change + 7)
    )
    rows = np.flatnonzero(present)
    allowed = 0.5 * cdist(points[rows], points[rows]) + 0.01
    expected = (cdist(change[rows], change[rows]) / allowed).max()
    np.testing.assert_allclose([ratio, shifted], expected, rtol=1e-12)


@pytest.mark.slow
def test_a_point_alone_has_no_neighbour():
    gap, *_ = nearest.closest_pair(jnp.ones((2, 2)), jnp.array([True, False]))
    assert np.isinf(gap)


def test_points_that_nearly_meet_are_told_apart():
    points = jnp.array([[1.0, 1.0], [1.0, 1.0 + 2e-9], [1.0, 1.0 - 1e-9]])
    gap, *pair = nearest.closest_pair(points, jnp.ones(3, bool))
    np.testing.assert_allclose(gap, 1e-9, rtol=1e-6)
    assert {int(i) for i in pair} == {0, 2}
