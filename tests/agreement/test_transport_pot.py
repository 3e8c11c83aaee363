"""Transport agrees with POT, scipy and a linear programme on random problems."""

import jax.numpy as jnp
import numpy as np
import ot
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment, linprog
from scipy.spatial.distance import cdist
from scipy.stats import wasserstein_distance

from meanformer.measures import (
    Gaussian,
    TokenCloud,
    entropic_cost,
    sinkhorn_divergence,
    transport_map,
    transport_plan,
    wasserstein,
)

COUNTS = st.sampled_from([1, 2, 5, 8])
SEEDS = st.integers(0, 2**32 - 1)
few = settings(max_examples=15, deadline=None)


def random_atoms(random, count, dimension):
    """Return points, some of them equal, and weights, some of them zero."""
    points = random.normal(size=(count, dimension)) * 10 ** random.uniform(-1, 1)
    points[-1] = points[0]
    weights = random.dirichlet(np.ones(count))
    if count > 2:
        weights[1] = 0.0
    return points, weights / weights.sum()


@few
@given(SEEDS, COUNTS, COUNTS, st.sampled_from([1, 2, 3]))
def test_weighted_distances_solve_the_linear_programme(seed, count, other, order):
    random = np.random.default_rng(seed)
    points, weights = random_atoms(random, count, 2)
    targets, masses = random_atoms(random, other, 2)
    cost = cdist(points, targets) ** order
    marginals = np.concatenate(
        [np.kron(np.eye(count), np.ones(other)), np.kron(np.ones(count), np.eye(other))]
    )
    programme = linprog(
        cost.ravel(), A_eq=marginals, b_eq=np.concatenate([weights, masses])
    )
    distance = wasserstein(
        TokenCloud(points, weights), TokenCloud(targets, masses), order=order
    )
    scale = cost.max() ** (1 / order)
    np.testing.assert_allclose(
        distance, programme.fun ** (1 / order), rtol=1e-8, atol=1e-6 * scale
    )


@pytest.mark.slow
@few
@given(SEEDS, st.sampled_from([2, 6, 20]), st.sampled_from([2, 5]))
def test_equal_weights_solve_the_assignment_problem(seed, count, dimension):
    random = np.random.default_rng(seed)
    points, targets = random.normal(size=(2, count, dimension))
    cost = cdist(points, targets, "sqeuclidean")
    expected = np.sqrt(cost[linear_sum_assignment(cost)].mean())
    mu, nu = TokenCloud(points), TokenCloud(targets)
    np.testing.assert_allclose(wasserstein(mu, nu), expected, rtol=1e-12)
    plan = count * np.asarray(transport_plan(mu, nu).matrix())
    np.testing.assert_allclose((plan > 0.5).sum(axis=0), 1)


@pytest.mark.slow
@few
@given(SEEDS, COUNTS, COUNTS, st.sampled_from([1, 2, 3]))
def test_distances_on_the_line_agree(seed, count, other, order):
    random = np.random.default_rng(seed)
    points, weights = random_atoms(random, count, 1)
    targets, masses = random_atoms(random, other, 1)
    distance = wasserstein(
        TokenCloud(points, weights), TokenCloud(targets, masses), order=order
    )
    powered = ot.wasserstein_1d(points[:, 0], targets[:, 0], weights, masses, p=order)
    np.testing.assert_allclose(distance, powered ** (1 / order), rtol=1e-8, atol=1e-12)
    if order == 1:
        expected = wasserstein_distance(points[:, 0], targets[:, 0], weights, masses)
        np.testing.assert_allclose(distance, expected, rtol=1e-10, atol=1e-14)


@few
@given(SEEDS, st.sampled_from([2, 6, 20]))
def test_on_the_line_the_closed_form_is_the_assignment(seed, count):
    points, targets = np.random.default_rng(seed).normal(size=(2, count, 1))
    flat = wasserstein(TokenCloud(points), TokenCloud(targets), order=1.5)
    # The same cloud in the plane goes through the general solver.
    plane = wasserstein(
        TokenCloud(np.pad(points, ((0, 0), (0, 1)))),
        TokenCloud(np.pad(targets, ((0, 0), (0, 1)))),
        order=1.5,
    )
    np.testing.assert_allclose(flat, plane, rtol=1e-12)


@few
@given(SEEDS, st.sampled_from([1, 2]))
def test_sliced_distances_agree(seed, order):
    random = np.random.default_rng(seed)
    points, weights = random_atoms(random, 8, 3)
    targets, masses = random_atoms(random, 5, 3)
    directions = random.normal(size=(10, 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    expected = ot.sliced_wasserstein_distance(
        points, targets, weights, masses, p=order, projections=directions.T
    )
    distance = wasserstein(
        TokenCloud(points, weights),
        TokenCloud(targets, masses),
        order=order,
        method="sliced",
        directions=directions,
    )
    np.testing.assert_allclose(distance, expected, rtol=1e-8)


@pytest.mark.slow
@few
@given(SEEDS, st.sampled_from([0.2, 1.0]))
def test_entropic_costs_agree(seed, relative):
    random = np.random.default_rng(seed)
    points, targets = random.normal(size=(2, 6, 2))
    weights, masses = random.dirichlet(np.ones(6), 2)
    cost = cdist(points, targets, "sqeuclidean")
    epsilon = relative * cost.mean()
    plan = ot.sinkhorn(
        weights, masses, cost, epsilon, method="sinkhorn_log", numItermax=20_000,
        stopThr=1e-12, warn=False,
    )  # fmt: skip
    independent = np.outer(weights, masses)
    expected = (plan * cost).sum() + epsilon * (plan * np.log(plan / independent)).sum()
    mu, nu = TokenCloud(points, weights), TokenCloud(targets, masses)
    np.testing.assert_allclose(entropic_cost(mu, nu, epsilon), expected, rtol=1e-8)
    assert sinkhorn_divergence(mu, nu, epsilon) > 0


@few
@given(SEEDS, st.sampled_from([1, 2, 4]))
def test_gaussian_distances_and_maps_agree(seed, dimension):
    random = np.random.default_rng(seed)
    means = random.normal(size=(2, dimension))
    factors = random.normal(size=(2, dimension, dimension + 2))
    spreads = factors @ factors.transpose(0, 2, 1)
    mu, nu = (Gaussian(*pair) for pair in zip(means, spreads, strict=True))
    expected = ot.gaussian.bures_wasserstein_distance(*means, *spreads)
    np.testing.assert_allclose(wasserstein(mu, nu), expected, rtol=1e-7)
    matrix, shift = ot.gaussian.bures_wasserstein_mapping(*means, *spreads)
    optimal = transport_map(mu, nu)
    np.testing.assert_allclose(optimal.matrix, matrix, atol=1e-6)
    np.testing.assert_allclose(optimal.shift, np.ravel(shift), atol=1e-6)


@pytest.mark.parametrize("order", [1, 2])
def test_three_hundred_weighted_tokens_agree(order):
    random = np.random.default_rng(3)
    points, targets = random.normal(size=(2, 300, 3))
    weights, masses = random.dirichlet(np.ones(300), 2)
    expected = ot.emd2(weights, masses, cdist(points, targets) ** order)
    mu = TokenCloud(jnp.asarray(points), weights)
    distance = wasserstein(mu, TokenCloud(targets, masses), order=order)
    np.testing.assert_allclose(distance, expected ** (1 / order), rtol=1e-10)
