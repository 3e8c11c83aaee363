"""How fast and how far the limit of Sinkhorn's algorithm is reached."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sinkhorn_cases import POINTS, WEIGHTS, dense_rounds, random_transport, transport

from meanformer.numerics.sinkhorn.algorithm import alternate, balance
from meanformer.numerics.sinkhorn.contraction import round_ratio
from meanformer.numerics.sinkhorn.limit import ALTERNATING_ROUNDS
from meanformer.numerics.sinkhorn.self_transport import oscillation


@pytest.mark.parametrize(("beta", "steps"), [(1, 17), (3, 6), (10, 1)])
def test_steps_of_the_averaged_iteration(beta, steps):
    potentials = balance(transport(form=2 * beta * np.eye(2)), tolerance=1e-10)
    assert potentials.converged
    assert potentials.iterations == steps


@pytest.mark.parametrize(("beta", "rounds"), [(1, 60), (3, 2274)])
def test_rounds_of_plain_alternation(beta, rounds):
    problem = transport(form=2 * beta * np.eye(2))
    start = problem.resting_potential()
    before = alternate(problem, start, half_steps=2 * rounds - 1)
    after = alternate(problem, start, half_steps=2 * rounds + 1)
    assert after.marginal_error <= 1e-10 < before.marginal_error


def test_plain_alternation_stalls_near_the_identity():
    problem = transport(form=20 * np.eye(2))
    left = alternate(problem, problem.resting_potential(), half_steps=40_001)
    assert left.marginal_error > 1e-10
    assert not left.converged
    potentials = balance(problem, tolerance=1e-10)
    assert potentials.iterations == 1
    assert round_ratio(problem, potentials) > 1 - 1e-4


@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_the_ratio_of_a_round_is_the_one_observed(beta):
    problem = transport(form=2 * beta * np.eye(2))
    start, limit = problem.resting_potential(), balance(problem, tolerance=1e-14)
    before, after = (
        np.ptp(alternate(problem, start, half_steps=count).g - limit.g)
        for count in (41, 43)
    )
    ratio = round_ratio(problem, limit)
    np.testing.assert_allclose(ratio, after / before, rtol=1e-4)
    assert ratio <= np.tanh(oscillation(problem) / 4) ** 2


def test_the_averaged_iteration_finds_the_limit_of_alternation():
    form = 2 * np.eye(2)
    f, g = dense_rounds(POINTS, WEIGHTS, form, np.zeros(4), 5000)
    potentials = balance(transport(form=form))
    np.testing.assert_allclose(potentials.g, g + WEIGHTS @ (f - g) / 2, atol=1e-10)
    np.testing.assert_allclose(potentials.f, potentials.g, atol=1e-10)


@pytest.mark.parametrize("beta", [1e2, 1e4, 1e8])
def test_of_a_plan_close_to_the_identity_the_potentials_are_known(beta):
    potentials = balance(transport(form=2 * beta * np.eye(2)))
    expected = -beta * np.sum(POINTS**2, axis=1) - np.log(WEIGHTS) / 2
    np.testing.assert_allclose(potentials.g, expected, rtol=1e-15, atol=1e-13)


@pytest.mark.parametrize("beta", [2.0, 5.0, 10.0])
@pytest.mark.parametrize("seed", range(3))
def test_newton_finishes_what_alternation_leaves(seed, beta):
    problem = random_transport(seed, beta=beta)
    start = problem.resting_potential()
    left = alternate(problem, start, half_steps=2 * ALTERNATING_ROUNDS + 1)
    assert left.marginal_error > 1e-12
    potentials = balance(problem, start=start, tolerance=1e-12)
    assert potentials.converged
    assert 1 <= potentials.iterations - ALTERNATING_ROUNDS <= 29
    density = np.asarray(problem.density(potentials.f, potentials.g))
    sums = np.asarray(problem.weights) @ density
    np.testing.assert_allclose(sums, np.ones(8), atol=1e-11)


@pytest.mark.parametrize("seed", range(3))
def test_newton_takes_few_steps_from_a_warm_start(seed):
    problem = random_transport(seed, beta=3.0)
    limit = balance(problem)
    moved = eqx.tree_at(lambda p: p.points, problem, problem.points * 1.001)
    cold, warm = balance(moved), balance(moved, start=limit.g)
    assert warm.iterations <= cold.iterations
    np.testing.assert_allclose(warm.g, cold.g, atol=1e-8)
    assert balance(problem, start=limit.g).iterations == 0


@pytest.mark.parametrize("dimension", [2, 3])
def test_many_tokens_are_balanced_without_a_dense_solve(dimension):
    problem = random_transport(1, count=300, dimension=dimension, beta=3.0)
    potentials = balance(problem)
    assert potentials.converged
    density = np.asarray(problem.density(potentials.f, potentials.g))
    sums = np.asarray(problem.weights) @ density
    np.testing.assert_allclose(sums, np.ones(300), atol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("beta", [30.0, 1e3, 1e6])
def test_huge_scores_never_give_nan_and_report_their_error(beta, dtype):
    problem = random_transport(2, beta=beta, dtype=dtype)
    potentials = balance(problem)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(potentials))
    density = problem.density(potentials.f, potentials.g)
    error = np.abs(problem.weights @ density - 1).max()
    rounding = 50 * np.finfo(dtype).eps * np.abs(potentials.g).max()
    assert abs(error - potentials.marginal_error) <= rounding
    assert error <= max(1e-2, rounding)


@pytest.mark.parametrize("scale", [-1e5, -30.0])
def test_repulsive_forms_are_balanced(scale):
    potentials = balance(transport(form=scale * np.eye(2)))
    assert np.isfinite(potentials.g).all()
    assert potentials.marginal_error < 1e-8


def test_too_few_steps_are_reported():
    potentials = balance(random_transport(0, beta=10.0), max_steps=5)
    assert not potentials.converged
    assert potentials.iterations == 5
    assert potentials.marginal_error > 1e-3
    assert np.isfinite(potentials.g).all()


@pytest.mark.slow
@pytest.mark.parametrize("is_gradient", [False, True])
def test_memory_grows_with_the_tokens_and_not_with_the_pairs(is_gradient):
    count = 20_000

    def spread(points):
        problem = transport(POINTS)
        problem = eqx.tree_at(
            lambda p: (p.points, p.weights), problem, (points, points[:, 0] ** 2)
        )
        return balance(problem).g.sum()

    function = jax.grad(spread) if is_gradient else spread
    points = jax.ShapeDtypeStruct((count, 2), jnp.float64)
    memory = jax.jit(function).lower(points).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 150e6 < 8 * count**2 / 20
