"""Sinkhorn's algorithm on a token cloud: values, limit, invariances, bad input."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sinkhorn_cases import (
    FORM,
    L2_START,
    POINTS,
    VALUE,
    WEIGHTS,
    attention,
    dense_rounds,
    random_transport,
    transport,
)

from meanformer.errors import InvalidInput
from meanformer.numerics.pair_sums.sums import Blocked
from meanformer.numerics.sinkhorn.algorithm import (
    alternate,
    balance,
    default_tolerance,
    entropic_energy,
)
from meanformer.numerics.sinkhorn.self_transport import (
    SelfTransport,
    is_positive_form,
    oscillation,
    oscillation_bound,
)

L2_VALUES = [
    [0.26122530560942525, 0.26924031873547427],
    [0.08194029608934747, 0.45263422467097336],
    [0.09481223803500141, 0.27030307703291623],
    [0.34969028427597787, -0.017430289258360286],
]
VALUES_AFTER_THREE = [
    [0.26233499866630977, 0.20235764221178512],
    [0.08644584669011683, 0.4002619706434833],
    [0.09941977762992919, 0.15958225153217542],
    [0.32411543565983036, -0.11894416468484914],
]
LIMIT_VALUES = [
    [0.2641857801929325, 0.1962212334437161],
    [0.08845206479802727, 0.3951577283088587],
    [0.10176143121616284, 0.15192697025661064],
    [0.32437782240186236, -0.12421205921466201],
]


def rounds_from_l2(half_steps, **options):
    start = jnp.asarray(L2_START)
    return alternate(transport(), start, half_steps=half_steps, **options)


@pytest.mark.parametrize(
    ("half_steps", "expected"),
    [(1, L2_VALUES), (3, VALUES_AFTER_THREE), (2001, LIMIT_VALUES)],
)
def test_reference_values_after_half_steps(half_steps, expected):
    values = attention(transport(), rounds_from_l2(half_steps))
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-10)


def test_the_limit_has_the_reference_values():
    potentials = balance(transport())
    assert potentials.converged
    values = attention(transport(), potentials)
    np.testing.assert_allclose(values, LIMIT_VALUES, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("half_steps", "expected", "digit"), [(5, 1.545e-3, 1e-6), (21, 1.755e-11, 1e-14)]
)
def test_reference_column_errors(half_steps, expected, digit):
    error = rounds_from_l2(half_steps).marginal_error
    np.testing.assert_allclose(error, expected, rtol=0, atol=digit)


def test_dot_start_and_l2_start_share_the_limit_but_not_the_iterates():
    problem = transport()
    dot = attention(problem, alternate(problem, jnp.zeros(4), half_steps=3))
    assert np.abs(dot - np.array(VALUES_AFTER_THREE)).max() > 1e-3
    dot = attention(problem, alternate(problem, jnp.zeros(4), half_steps=61))
    np.testing.assert_allclose(dot, LIMIT_VALUES, rtol=0, atol=1e-12)


@pytest.mark.parametrize("half_steps", [2, 4, 12])
def test_ended_on_a_column_step_the_columns_sum_to_one(half_steps):
    problem = transport()
    potentials = rounds_from_l2(half_steps, end_on="column")
    density = problem.density(potentials.f, potentials.g)
    np.testing.assert_allclose(WEIGHTS @ density, np.ones(4), rtol=1e-13)
    row_error = np.abs(density @ WEIGHTS - 1).max()
    np.testing.assert_allclose(potentials.marginal_error, row_error, atol=1e-14)
    np.testing.assert_allclose(
        potentials.f, problem.row_step(potentials.previous), rtol=1e-14
    )


def test_a_column_end_continues_the_row_end_before_it():
    row, column = rounds_from_l2(5), rounds_from_l2(6, end_on="column")
    np.testing.assert_allclose(column.f, row.f, rtol=1e-14)
    np.testing.assert_allclose(column.previous, row.g, rtol=1e-14)
    np.testing.assert_allclose(column.g, rounds_from_l2(7).g, rtol=1e-14)


@pytest.mark.parametrize("seed", range(3))
def test_both_marginals_of_the_limit_are_one(seed):
    problem = random_transport(seed)
    potentials = balance(problem)
    density, weights = problem.density(potentials.f, potentials.g), problem.weights
    np.testing.assert_allclose(density @ weights, np.ones(8), rtol=1e-12)
    column_error = np.abs(weights @ density - 1).max()
    assert column_error <= default_tolerance(weights.dtype)
    np.testing.assert_allclose(potentials.marginal_error, column_error, atol=1e-13)
    np.testing.assert_allclose(weights @ potentials.f, weights @ potentials.g)


@pytest.mark.parametrize("seed", range(3))
def test_the_limit_agrees_with_dense_alternation(seed):
    problem = random_transport(seed, beta=0.5)
    arrays = (np.asarray(a) for a in (problem.points, problem.weights, problem.form))
    f, g = dense_rounds(*arrays, np.zeros(8), 3000)
    potentials = balance(problem, tolerance=1e-13)
    shift = problem.weights @ (f - g) / 2
    np.testing.assert_allclose(potentials.g, g + shift, atol=1e-11)
    np.testing.assert_allclose(potentials.f, f - shift, atol=1e-11)


@pytest.mark.slow
def test_the_plan_agrees_with_pot():
    import ot

    problem = random_transport(5, beta=0.5)
    potentials = balance(problem)
    weights = np.asarray(problem.weights)
    scores = np.asarray(problem.points @ problem.form.T @ problem.points.T)
    expected = ot.bregman.sinkhorn_log(
        weights, weights, -scores, reg=1.0, numItermax=5000, stopThr=1e-13
    )
    density = problem.density(potentials.f, potentials.g)
    plan = weights[:, None] * density * weights[None, :]
    np.testing.assert_allclose(plan, expected, atol=1e-11)


def test_reference_oscillation_and_contraction():
    eta = oscillation(transport())
    np.testing.assert_allclose(eta, 3.18, rtol=0, atol=1e-10)
    np.testing.assert_allclose(np.tanh(eta / 4) ** 2, 0.4372, rtol=0, atol=5e-5)


def test_the_observed_ratio_obeys_the_contraction():
    f_limit = balance(transport(), tolerance=1e-14).f
    distances = np.array(
        [np.ptp(rounds_from_l2(2 * k + 1).f - f_limit) for k in range(1, 7)]
    )
    ratios = distances[1:] / distances[:-1]
    assert ((ratios > 0.090) & (ratios < 0.102)).all()
    assert ratios.max() <= np.tanh(oscillation(transport()) / 4) ** 2


@pytest.mark.parametrize("seed", range(3))
def test_oscillation_is_the_maximum_over_all_quadruples(seed):
    problem = random_transport(seed, count=6, dimension=3)
    differences = problem.points[:, None, :] - problem.points[None, :, :]
    differences = np.asarray(differences).reshape(-1, 3)
    expected = (differences @ np.asarray(problem.form) @ differences.T).max()
    np.testing.assert_allclose(oscillation(problem), expected, rtol=1e-12)
    assert oscillation_bound(problem) >= expected


def test_absent_tokens_do_not_count_in_the_oscillation():
    points = np.concatenate([POINTS, [[100.0, 100.0]]])
    problem = transport(points, np.append(WEIGHTS, 0.0))
    np.testing.assert_allclose(oscillation(problem), 3.18, atol=1e-10)
    bound = oscillation_bound(transport())
    np.testing.assert_allclose(oscillation_bound(problem), bound, rtol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_the_limit_keeps_the_mean(seed):
    problem = random_transport(seed)
    outputs = attention(problem, balance(problem))
    mean = VALUE @ (problem.weights @ problem.points)
    np.testing.assert_allclose(problem.weights @ outputs, mean, atol=1e-9)


def test_the_reference_mean_is_kept_to_rounding():
    outputs = attention(transport(), balance(transport(), tolerance=1e-15))
    np.testing.assert_allclose(WEIGHTS @ outputs, [0.185, 0.215], atol=1e-14)


def test_translating_the_cloud_translates_the_limit():
    shift = np.array([3.0, -2.0])
    moved = transport(POINTS + shift)
    values = attention(moved, balance(moved))
    expected = np.array(LIMIT_VALUES) + VALUE @ shift
    np.testing.assert_allclose(values, expected, atol=1e-10)


def test_permuting_the_tokens_permutes_the_result():
    order = np.array([2, 0, 3, 1])
    permuted = transport(POINTS[order], WEIGHTS[order])
    values = attention(permuted, balance(permuted, tolerance=1e-14))
    np.testing.assert_allclose(values, np.array(LIMIT_VALUES)[order], atol=1e-12)


def split_and_padded():
    points = np.concatenate([POINTS, POINTS[:1], [[7.0, -5.0]]])
    return points, np.array([0.1, 0.3, 0.2, 0.1, 0.3, 0.0])


@pytest.mark.parametrize("half_steps", [1, 3, 5])
def test_splitting_and_padding_change_no_iterate(half_steps):
    problem = transport(*split_and_padded())
    start = -jnp.sum(problem.points**2, axis=1)
    whole = alternate(transport(), start[:4], half_steps=half_steps)
    both = alternate(problem, start, half_steps=half_steps)
    np.testing.assert_allclose(both.g[:5], whole.g[jnp.array([0, 1, 2, 3, 0])])
    assert np.isfinite(both.g[5])


@pytest.mark.parametrize("form", [FORM, np.eye(2)])
def test_splitting_and_padding_change_no_limit(form):
    problem = transport(*split_and_padded(), form)
    whole, both = balance(transport(form=form)), balance(problem)
    assert both.iterations == whole.iterations
    np.testing.assert_allclose(both.g[:4], whole.g, atol=1e-12)
    np.testing.assert_allclose(both.g[4], whole.g[0], atol=1e-12)
    extension = problem.column_step(both.f)[5]
    np.testing.assert_allclose(both.g[5], extension, atol=1e-9)


def test_a_single_token_sees_itself():
    problem = transport([[3.0, -1.0]], [1.0])
    potentials = balance(problem)
    np.testing.assert_allclose(attention(problem, potentials), [VALUE @ [3.0, -1.0]])


@pytest.mark.parametrize(("dtype", "digit"), [(np.float64, 1e-12), (np.float32, 1e-5)])
def test_reference_energy(dtype, digit):
    problem = transport(form=[[0.8, 0.3], [0.3, -0.4]], dtype=dtype)
    energy = entropic_energy(problem.weights, balance(problem))
    assert energy.dtype == dtype
    np.testing.assert_allclose(energy, 0.13647165486171767, rtol=0, atol=digit)


def test_the_energy_is_score_minus_entropy_of_the_plan():
    problem = random_transport(4)
    potentials = balance(problem)
    weights = np.asarray(problem.weights)
    density = np.asarray(problem.density(potentials.f, potentials.g))
    plan = weights[:, None] * density * weights[None, :]
    scores = np.asarray(problem.points @ problem.form.T @ problem.points.T)
    expected = np.sum(plan * (scores - np.log(density)))
    np.testing.assert_allclose(entropic_energy(problem.weights, potentials), expected)


def test_positive_forms_are_told_from_others():
    factor = np.random.default_rng(0).normal(size=(2, 5))
    assert is_positive_form(jnp.asarray(factor.T @ factor))
    assert is_positive_form(jnp.zeros((3, 3)))
    assert not is_positive_form(jnp.asarray(FORM))
    assert not is_positive_form(jnp.diag(jnp.array([1.0, -1e-6])))


def test_jit_and_vmap_agree_with_the_plain_call():
    seeds = range(3)
    problems = [random_transport(seed, beta=1 + 2 * seed) for seed in seeds]
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *problems)
    together = eqx.filter_jit(eqx.filter_vmap(balance))(stacked)
    for seed in seeds:
        alone = balance(problems[seed])
        assert together.iterations[seed] == alone.iterations
        np.testing.assert_allclose(together.g[seed], alone.g, atol=1e-9)


def test_single_precision_stays_single():
    problem = transport(dtype=np.float32)
    potentials = balance(problem)
    assert potentials.converged
    assert potentials.g.dtype == potentials.marginal_error.dtype == jnp.float32
    values = problem.row_average(potentials.g, problem.points)
    expected = np.array(LIMIT_VALUES) @ np.linalg.inv(VALUE).T
    np.testing.assert_allclose(values, expected, atol=1e-5)
    start = jnp.asarray(L2_START, jnp.float32)
    assert alternate(problem, start, half_steps=5).g.dtype == jnp.float32


@pytest.mark.parametrize(
    ("half_steps", "end_on", "word"), [(2, "row", "odd"), (3, "column", "even")]
)
def test_a_wrong_number_of_half_steps_is_refused(half_steps, end_on, word):
    with pytest.raises(InvalidInput, match=f"half_steps is {half_steps}.*{word}"):
        rounds_from_l2(half_steps, end_on=end_on)


def test_no_half_step_is_refused():
    with pytest.raises(InvalidInput, match="half_steps is 0"):
        rounds_from_l2(0, end_on="column")


def test_the_bound_on_the_oscillation_is_exact_for_a_form_of_rank_one():
    random = np.random.default_rng(3)
    points = random.normal(size=(9, 3))
    left, right = random.normal(size=(2, 3))
    weights = np.append(np.full(8, 0.125), 0.0)
    problem = SelfTransport(
        jnp.asarray(points), jnp.asarray(weights), jnp.outer(left, right), Blocked()
    )
    widths = [np.ptp(points[:8] @ side) for side in (left, right)]
    np.testing.assert_allclose(oscillation_bound(problem), np.prod(widths), rtol=1e-12)
    np.testing.assert_allclose(oscillation(problem), np.prod(widths), rtol=1e-12)
