"""Entropic transport agrees with ott-jax on random problems."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meanformer.measures import TokenCloud, entropic_cost, sinkhorn_divergence

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from ott.geometry import pointcloud
    from ott.solvers import linear
    from ott.tools.sinkhorn_divergence import sinkdiv


@jax.jit
@jax.value_and_grad
def ott_cost(points, weights, targets, masses, epsilon):
    pairs = pointcloud.PointCloud(points, targets, epsilon=epsilon)
    return linear.solve(pairs, weights, masses, threshold=1e-12).reg_ot_cost


@jax.jit
def ott_divergence(points, weights, targets, masses, epsilon):
    options = {"threshold": 1e-12}
    return sinkdiv(
        points, targets, a=weights, b=masses, epsilon=epsilon, solve_kwargs=options
    )[0]


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.4, 4.0]))
def test_costs_gradients_and_divergences_agree(seed, epsilon):
    random = np.random.default_rng(seed)
    points, targets = jnp.asarray(random.normal(size=(2, 6, 2)))
    weights, masses = jnp.asarray(random.dirichlet(np.full(6, 5.0), 2))
    nu = TokenCloud(targets, masses)
    cost, gradient = jax.value_and_grad(
        lambda points: entropic_cost(TokenCloud(points, weights), nu, epsilon)
    )(points)
    divergence = sinkhorn_divergence(TokenCloud(points, weights), nu, epsilon)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        problem = points, weights, targets, masses, jnp.array(epsilon)
        expected, expected_gradient = ott_cost(*problem)
        expected_divergence = ott_divergence(*problem)
    np.testing.assert_allclose(cost, expected, rtol=1e-9)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-7)
    np.testing.assert_allclose(divergence, expected_divergence, rtol=1e-8)
