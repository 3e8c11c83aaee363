"""Entropic transport cost and the debiased Sinkhorn divergence."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy.special import logsumexp

from meanformer.errors import InvalidInput, StoppedEarly, Unsupported
from meanformer.measures import (
    Gaussian,
    TokenCloud,
    entropic_cost,
    sinkhorn_divergence,
    wasserstein,
)
from meanformer.measures.transport.atoms import atoms_of
from meanformer.measures.transport.potentials import Problem, maximise

X = jnp.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.5], [0.5, -1.0]])
Y = jnp.array([[0.2, 0.3], [1.5, -0.5], [-0.7, -0.7], [0.0, 2.0]])
W = jnp.array([0.4, 0.3, 0.2, 0.1])
V = jnp.array([0.1, 0.2, 0.3, 0.4])
MU, NU = TokenCloud(X, W), TokenCloud(Y, V)


def squared_distances(points, targets):
    return ((points[:, None, :] - targets[None, :, :]) ** 2).sum(axis=2)


def reference_cost(points, weights, targets, masses, epsilon, rounds=20_000):
    """Return the primal cost of the plan of many plain Sinkhorn rounds."""
    costs = np.asarray(squared_distances(points, targets))
    a, b, g = np.asarray(weights), np.asarray(masses), np.zeros(len(masses))
    for _ in range(rounds):
        f = -epsilon * logsumexp((g[None, :] - costs) / epsilon, axis=1, b=b[None, :])
        g = -epsilon * logsumexp((f[:, None] - costs) / epsilon, axis=0, b=a[:, None])
    density = np.exp((f[:, None] + g[None, :] - costs) / epsilon)
    plan = a[:, None] * b[None, :] * density
    return (plan * costs).sum() + epsilon * (plan * np.log(density)).sum()


@pytest.mark.parametrize(
    ("epsilon", "cost", "divergence"),
    [(1.0, 2.055257279319, 0.976967650344), (0.1, 1.505211105449, 1.377225848994)],
)
def test_reference_costs_and_divergences(epsilon, cost, divergence):
    measured = entropic_cost(MU, NU, epsilon), sinkhorn_divergence(MU, NU, epsilon)
    np.testing.assert_allclose(measured[0], cost, rtol=0, atol=1e-11)
    np.testing.assert_allclose(measured[1], divergence, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("epsilon", "cost", "divergence"),
    [(1.0, 2.055257279319, 0.976967650344), (0.1, 1.505211105449, 1.377225848994)],
)
def test_reference_values_in_single_precision(epsilon, cost, divergence):
    mu, nu = (
        TokenCloud(points.astype(jnp.float32), weights.astype(jnp.float32))
        for points, weights in ((X, W), (Y, V))
    )
    measured = entropic_cost(mu, nu, epsilon), sinkhorn_divergence(mu, nu, epsilon)
    assert measured[0].dtype == measured[1].dtype == jnp.float32
    np.testing.assert_allclose(measured, [cost, divergence], rtol=0, atol=1e-5)


def test_the_cost_is_that_of_the_plan_found_by_plain_rounds():
    expected = reference_cost(X, W, Y, V, 0.5, rounds=500)
    np.testing.assert_allclose(entropic_cost(MU, NU, 0.5), expected, rtol=1e-11)


@pytest.mark.parametrize("epsilon", [1.0, 0.1, 0.01])
def test_the_self_cost_converges_where_alternation_stalls(epsilon):
    """For small epsilon the plan is the identity: the cost is the entropy."""
    cost = entropic_cost(MU, MU, epsilon)
    averaged = np.zeros(4)
    costs = np.asarray(squared_distances(X, X))
    for _ in range(200):
        scores = (averaged[None, :] - costs) / epsilon
        averaged = (averaged - epsilon * logsumexp(scores, axis=1, b=W[None, :])) / 2
    np.testing.assert_allclose(cost, 2 * W @ averaged, rtol=1e-10)


def test_the_divergence_tends_to_the_exact_distance():
    exact = wasserstein(MU, NU) ** 2
    gaps = [abs(sinkhorn_divergence(MU, NU, e) - exact) for e in (0.1, 0.01, 0.001)]
    assert gaps[0] > 5 * gaps[1] > 25 * gaps[2]


def test_the_divergence_tends_to_the_distance_of_the_means():
    shift = MU.mean() - NU.mean()
    divergence = sinkhorn_divergence(MU, NU, 1e6)
    np.testing.assert_allclose(divergence, shift @ shift, rtol=1e-4)


def test_divergences_are_nonnegative_and_vanish_on_equal_clouds(key):
    for k in jr.split(key, 5):
        targets = X + 1e-3 * jr.normal(k, X.shape)
        assert sinkhorn_divergence(MU, TokenCloud(targets, W), 0.2) > 0
    assert sinkhorn_divergence(MU, MU, 0.2) == 0


@pytest.mark.parametrize("epsilon", [0.5, 0.05, 0.005])
def test_divergences_of_close_clouds_keep_their_digits(key, epsilon):
    """The plan is nearly the identity: the hardest case for Sinkhorn's rounds."""
    shift = 1e-3 * jnp.array([[0.6, 0.8]])
    moved = sinkhorn_divergence(MU, TokenCloud(X + shift, W), epsilon)
    np.testing.assert_allclose(moved, 1e-6, rtol=1e-8)


@pytest.mark.parametrize("function", [entropic_cost, sinkhorn_divergence])
def test_gradients_agree_with_finite_differences(key, function):
    def value(points, weights, epsilon):
        return function(TokenCloud(points, weights), NU, epsilon)

    at = X, W, jnp.array(0.3)
    directions = (
        jr.normal(key, X.shape),
        jnp.array([1.0, -2.0, 0.5, 0.5]),
        jnp.array(1.0),
    )
    gradients = jax.grad(value, (0, 1, 2))(*at)
    for place in range(3):
        step = 1e-5 * directions[place]
        ahead, behind = (
            value(*at[:place], at[place] + s * step, *at[place + 1 :]) for s in (1, -1)
        )
        slope = jnp.vdot(gradients[place], directions[place])
        np.testing.assert_allclose(slope, (ahead - behind) / 2e-5, rtol=1e-6)


def test_the_default_temperature_follows_the_scale():
    distance = wasserstein(MU, NU, method="sinkhorn")
    scaled = wasserstein(
        TokenCloud(1e3 * X, W), TokenCloud(1e3 * Y, V), method="sinkhorn"
    )
    np.testing.assert_allclose(scaled, 1e3 * distance, rtol=1e-9)
    scale = W @ squared_distances(X, Y) @ V
    expected = jnp.sqrt(sinkhorn_divergence(MU, NU, 0.05 * scale))
    np.testing.assert_allclose(distance, expected, rtol=1e-10)


def test_the_gradient_of_the_default_distance_includes_its_temperature(key):
    def distance(points):
        return wasserstein(TokenCloud(points, W), NU, method="sinkhorn")

    direction = jr.normal(key, X.shape)
    ahead, behind = (distance(X + s * 1e-5 * direction) for s in (1, -1))
    slope = jnp.vdot(jax.grad(distance)(X), direction)
    np.testing.assert_allclose(slope, (ahead - behind) / 2e-5, rtol=1e-6)


def test_coinciding_points_have_distance_zero_and_no_gradient():
    point = jnp.ones((4, 2))

    def distance(points):
        return wasserstein(TokenCloud(points), TokenCloud(point), method="sinkhorn")

    value, gradient = jax.value_and_grad(distance)(point)
    assert value == 0
    assert (gradient == 0).all()


@pytest.mark.parametrize("epsilon", [1.0, 0.01, 1e-4])
def test_newton_finds_the_optimum_from_a_poor_start(key, epsilon):
    key_x, key_y, key_g = jr.split(key, 3)
    source = atoms_of(TokenCloud(jr.normal(key_x, (20, 2))))
    target = atoms_of(TokenCloud(2 + jr.normal(key_y, (15, 2))))
    problem = Problem(source, target, jnp.array(epsilon), jnp.array(1e-10))
    start = 5 * jr.normal(key_g, (15,))
    potential, error = jax.jit(maximise)(problem, start, jnp.array(10.0))
    assert error <= 1e-10
    costs = np.asarray(squared_distances(source.points, target.points))
    scores = (np.asarray(potential)[None, :] - costs) / epsilon
    rows = logsumexp(scores, axis=1, keepdims=True, b=1 / 15)
    marginal = np.exp(scores - rows).mean(axis=0)
    np.testing.assert_allclose(marginal, 1.0, atol=1e-8)


@pytest.mark.slow
def test_large_clouds_are_solved_without_storing_pairs(monkeypatch):
    expected = entropic_cost(MU, NU, 0.5)
    monkeypatch.setattr("meanformer.measures.transport.potentials.DENSE_LIMIT", 0)
    # Three more, absent, tokens: a shape not compiled before with the usual limit.
    points = jnp.concatenate([X, X[:3]])
    padded = TokenCloud(points, jnp.concatenate([W, jnp.zeros(3)]))
    np.testing.assert_allclose(entropic_cost(padded, NU, 0.5), expected, rtol=1e-10)


def test_a_solve_that_has_not_converged_warns():
    with pytest.warns(StoppedEarly, match="has not converged in 3 rounds"):
        entropic_cost(MU, NU, 0.5, rounds=3)


def test_a_cost_in_single_precision_agrees_with_double():
    single = entropic_cost(
        TokenCloud(X.astype(jnp.float32), W.astype(jnp.float32)),
        TokenCloud(Y.astype(jnp.float32), V.astype(jnp.float32)),
        0.1,
    )
    assert single.dtype == jnp.float32
    np.testing.assert_allclose(single, 1.505211105449, rtol=1e-5)


@pytest.mark.parametrize("function", [entropic_cost, sinkhorn_divergence])
@pytest.mark.parametrize("epsilon", [0.0, -0.1, float("nan"), float("inf")])
def test_a_temperature_that_is_not_positive_is_refused(function, epsilon):
    with pytest.raises(
        InvalidInput, match=f"epsilon is {epsilon}; it must be one positive"
    ):
        function(MU, NU, epsilon)


def test_other_measures_and_counts_are_refused():
    with pytest.raises(Unsupported, match="nu is a Gaussian"):
        entropic_cost(MU, Gaussian(jnp.zeros(2), jnp.eye(2)), 0.1)
    with pytest.raises(InvalidInput, match="rounds is 0; it must be 1 or more"):
        entropic_cost(MU, NU, 0.1, rounds=0)
