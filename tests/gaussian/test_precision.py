"""Numbers that were once lost: small eigenvalues, large scales, single precision."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
import scipy.integrate

import meanformer as mf
from gaussian_reference import COVARIANCE, perceptron
from meanformer.errors import Overflow, StoppedEarly
from meanformer.gaussian import (
    centred,
    classify,
    compare_with_particles,
    energy,
    explicit_solution,
    gradient_structure,
    limit_of,
    matched_tokens,
    stationary_points,
)
from meanformer.measures import entropic_factor

IDENTITY, TURN = np.eye(2), np.array([[0.0, -1.0], [1.0, 0.0]])
START = centred(COVARIANCE)
FORM = np.array([[1.0, 0.3], [0.3, -0.6]])


def single(*matrices):
    return [np.asarray(matrix, np.float32) for matrix in matrices]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("score", "spread", "limit"),
    [
        ((-1, 0), (1, 1e-8), (0, 1e-8)),
        ((0, 0, -1), (1, 1e-6, 1), (1, 1e-6, 0)),
        ((0, 0, -1), (1, 1e-11, 1), (1, 1e-11, 0)),
    ],
    ids=str,
)
def test_a_small_limit_is_told_from_a_decay_that_it_is_crossed_by(score, spread, limit):
    identity = np.eye(len(score))
    gamma = mf.Softmax(np.diag(np.asarray(score, float)), identity, identity)
    found = classify(gamma, centred(np.diag(spread)))
    assert (found.kind, found.rank) == ("converges", np.count_nonzero(limit))
    np.testing.assert_allclose(found.limit, np.diag(limit), rtol=1e-8, atol=1e-16)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e5, 1e8, 1e12])
def test_the_period_of_a_large_covariance_is_as_much_shorter(scale):
    gamma = mf.Softmax(IDENTITY, IDENTITY, TURN)
    found = classify(gamma, centred(scale * COVARIANCE))
    assert found.kind == "periodic"
    assert found.period == pytest.approx(np.pi / (1.6 * scale), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1e-6, -1e-6])
def test_a_slow_spiral_is_no_cycle(rate):
    # The trace changes by 2 rate tr(S^2) over a unit of depth, and never back.
    gamma = mf.Softmax(IDENTITY, IDENTITY, TURN + rate * IDENTITY)
    assert classify(gamma, START).kind != "periodic"


def pole_of(seed, dtype=np.float64):
    """A random score, a covariance, and when they blow up with values I."""
    score, factor = np.random.default_rng(seed).normal(size=(2, 2, 2))
    highest = np.linalg.eigvalsh(factor.T @ (score + score.T) @ factor)[-1]
    assert highest > 0
    gamma = mf.Softmax(*(x.astype(dtype) for x in (score, IDENTITY, IDENTITY)))
    return gamma, centred((factor @ factor.T).astype(dtype)), 1 / highest


@pytest.mark.parametrize(
    ("dtype", "options", "error"),
    [
        (np.float64, {"rtol": 1e-2}, 2e-3),
        pytest.param(np.float64, {"rtol": 1e-3}, 1e-4, marks=pytest.mark.slow),
        pytest.param(np.float64, {}, 1e-6, marks=pytest.mark.slow),
        pytest.param(np.float32, {}, 2e-3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_no_step_is_taken_over_a_pole(dtype, options, error):
    for seed in range(6):
        gamma, start, exact = pole_of(seed, dtype)
        with pytest.warns(StoppedEarly):
            path = mf.solve(mf.Flow(gamma), start, 1.5 * exact, save=2, **options)
        assert path.blow_up is not None
        assert float(path.blow_up) == pytest.approx(exact, rel=error)


@pytest.mark.parametrize(
    ("scale", "depths"), [(1.0, (2e9, 2e9 + 1)), (1e10, (1.0, 2.0))]
)
def test_a_contraction_that_begins_late_reaches_the_end(scale, depths):
    spread = scale * COVARIANCE
    gamma = mf.Softmax(IDENTITY, IDENTITY, -IDENTITY)
    path = mf.solve(mf.Flow(gamma), centred(spread), depths, save=2)
    assert bool(path.status == mf.flows.Status.reached)
    assert float(path.depths[-1]) == depths[-1]
    exact = np.linalg.inv(np.linalg.inv(spread) + 2 * IDENTITY)
    np.testing.assert_allclose(path.covariances[-1], exact, rtol=1e-8, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "promotion",
    ["standard", "strict"],
)
def test_long_depth_in_single_precision_agrees_with_double(promotion):
    def solved(dtype):
        matrices = (x.astype(dtype) for x in (COVARIANCE, IDENTITY, -IDENTITY))
        return mf.solve(
            mf.Flow(mf.Softmax(*matrices)),
            centred(COVARIANCE.astype(dtype)),
            100.0,
            save=2,
            solver=mf.LongDepth(),
        )

    with jax.numpy_dtype_promotion(promotion):
        narrow, wide = solved(np.float32), solved(np.float64)
    assert narrow.covariances.dtype == narrow.log_volumes.dtype == np.float32
    np.testing.assert_allclose(narrow.covariances, wide.covariances, rtol=1e-5)
    inverse = np.linalg.inv(COVARIANCE) + 200 * COVARIANCE
    np.testing.assert_allclose(wide.covariances[-1], np.linalg.inv(inverse), rtol=1e-5)


def test_matched_tokens_keep_single_precision():
    tokens = matched_tokens(centred(*single(COVARIANCE)), 64)
    assert tokens.points.dtype == np.float32
    np.testing.assert_allclose(tokens.covariance(), COVARIANCE, rtol=1e-5)
    np.testing.assert_allclose(tokens.mean(), 0, atol=1e-6)


@pytest.mark.slow
def test_a_comparison_with_tokens_keeps_single_precision():
    flow = mf.Flow(mf.Softmax(*single(COVARIANCE, IDENTITY, -IDENTITY)))
    start = centred(*single(COVARIANCE))
    found = compare_with_particles(flow, start, 0.5, 64, save=3)
    for array in (
        found.tokens.points,
        found.gaussians.covariances,
        found.mean_errors,
        found.covariance_errors,
        found.distances,
    ):
        assert array.dtype == np.float32
    inverse = np.linalg.inv(COVARIANCE) + COVARIANCE
    np.testing.assert_allclose(
        found.gaussians.covariances[-1], np.linalg.inv(inverse), rtol=1e-5
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_gradient_flow_in_single_precision_is_recognised(seed):
    key = np.random.default_rng(seed).normal(size=(2, 2)).astype(np.float32)
    form, identity, gram = *single(FORM, IDENTITY), key.T @ key
    found = gradient_structure(mf.Softmax(form, identity, np.float32(0.7) * form))
    assert found.holds
    assert found.factor == pytest.approx(0.7, rel=1e-6)
    assert gradient_structure(mf.L2(np.float32(1.3) * key, key, gram)).holds
    assert not gradient_structure(mf.L2(key @ key, key, gram))


def test_a_closed_form_beyond_single_precision_says_so():
    # The mean is 1e30 exp(30) = 1e43: too large for single precision only.
    one, zero, mean = single([[1.0]], [[0.0]], [1e30])
    gamma = mf.Softmax(one, one, one)
    with pytest.raises(Overflow, match="at depth 30 is too large"):
        explicit_solution(gamma, mf.Gaussian(mean, zero), 30.0)
    wide = mf.Gaussian(mean.astype(float), np.zeros((1, 1)))
    unit = np.eye(1)
    found = explicit_solution(mf.Softmax(unit, unit, unit), wide, 30.0)
    assert float(found.mean()[0]) == pytest.approx(1e30 * np.exp(30), rel=1e-6)


SCALES = [1e-12, 1e-8, 1e-3, 0.03, 1.0, 1e3]


@pytest.mark.parametrize("scale", SCALES)
def test_the_energy_of_l2_has_all_its_digits_at_every_scale(scale):
    gram, beta = np.array([[1.2, 0.3], [0.3, 0.8]]), 0.9
    key = np.linalg.cholesky(gram).T
    gamma = mf.L2(1.3 * key, key, 0.7 * gram, beta=beta)
    found = energy(gamma, centred(scale * COVARIANCE))
    with mpmath.workdps(60):
        inner = mpmath.matrix(scale * COVARIANCE) * mpmath.matrix(gram)
        volume = mpmath.log(mpmath.det(mpmath.eye(2) + 2 * beta * inner))
        exact = 0.65 * (inner[0, 0] + inner[1, 1] - volume / (2 * beta))
    assert float(found) == pytest.approx(float(exact), rel=1e-12, abs=0)


@pytest.mark.parametrize("scale", SCALES)
def test_the_energy_of_sinkhorn_has_all_its_digits_at_every_scale(scale):
    gamma = mf.Sinkhorn(FORM / 2, IDENTITY, 0.7 * FORM)
    found = energy(gamma, centred(scale * COVARIANCE))
    with mpmath.workdps(60):
        half = mpmath.matrix(scale * COVARIANCE) * mpmath.matrix(FORM)
        inner = half * half
        trace, volume = inner[0, 0] + inner[1, 1], mpmath.det(inner)
        gap = mpmath.sqrt(trace**2 / 4 - volume)
        roots = [mpmath.sqrt(1 + 4 * (trace / 2 + sign * gap)) for sign in (1, -1)]
        exact = sum((s - 1) / 2 + mpmath.log(2 / (1 + s)) / 2 for s in roots)
    assert float(found) == pytest.approx(float(exact), rel=1e-12, abs=0)


@pytest.mark.slow
def test_every_range_is_isotropic_for_a_score_that_is_zero(key):
    gamma = mf.Softmax(np.zeros((2, 2)), IDENTITY, TURN)
    points = stationary_points(gamma, 2, 1, key=key, starts=3)
    assert [(point.isotropy, point.residual) for point in points] == 3 * [(0.0, 0.0)]


def contraction():
    """Softmax beside the perceptron -x: every eigenvalue has a closed form."""
    attention = mf.Softmax(COVARIANCE, IDENTITY, -IDENTITY)
    return mf.Sum([attention, perceptron(-IDENTITY, np.zeros(2))])


def contracted_logs(depths):
    """Logarithms of the eigenvalues under that: 1/s = (1/a + a) exp(2 t) - a."""
    first, depths = np.linalg.eigvalsh(COVARIANCE)[::-1], np.asarray(depths)[:, None]
    return -2 * depths - np.log(1 / first + first - first * np.exp(-2 * depths))


@pytest.mark.slow
@pytest.mark.parametrize("solver", [None, mf.LongDepth()], ids=["default", "long"])
def test_volumes_are_right_where_they_are_too_small_for_numbers(solver):
    path = mf.solve(mf.Flow(contraction()), START, 300.0, save=4, solver=solver)
    assert bool(path.status == mf.flows.Status.reached)
    logs = contracted_logs(path.depths)
    expected = (logs - logs[0]).sum(axis=1) / 2
    np.testing.assert_allclose(path.log_volumes, expected, rtol=1e-6)
    assert expected[-1] < -600
    eigenvalues = path.statistics["eigenvalues"]
    np.testing.assert_allclose(np.log(eigenvalues), logs, rtol=1e-6)


@pytest.mark.slow
def test_an_exponential_decay_of_both_eigenvalues_keeps_their_ratio():
    found = classify(contraction(), START)
    assert (found.kind, found.rank, found.normalised_rank) == ("converges", 0, 2)
    run = limit_of(contraction(), START)
    np.testing.assert_allclose(
        run.log_eigenvalues[1:], contracted_logs(run.depths[1:]), rtol=1e-6, atol=1e-5
    )


@pytest.mark.slow
def test_a_direction_that_is_lost_leaves_the_other_and_the_volume_right():
    random = np.random.default_rng(0)
    query, key, value = [random.normal(size=(3, 2, 2)) for _ in range(6)][-1]
    path = mf.solve(mf.Flow(mf.Softmax(query, key, value)), START, 100.0, save=5)

    def field(_, state):
        spread = state[:4].reshape(2, 2)
        slope = value @ spread @ key.T @ query
        moved = slope @ spread
        return np.array([*(moved + moved.T).ravel(), np.trace(slope)])

    first = np.array([*COVARIANCE.ravel(), 0.0])
    options = {"method": "LSODA", "rtol": 1e-11, "atol": 1e-13}
    ends, depths = (0.0, 100.0), np.asarray(path.depths)
    found = scipy.integrate.solve_ivp(field, ends, first, t_eval=depths, **options)
    np.testing.assert_allclose(path.log_volumes, found.y[4], rtol=1e-6)
    largest = np.linalg.eigvalsh(found.y[:4].T.reshape(-1, 2, 2))[:, -1]
    np.testing.assert_allclose(path.statistics["eigenvalues"][:, 0], largest, rtol=1e-6)
    # The determinant leaves 1e-481 to the other one.
    log_det = np.log(0.51) + 2 * found.y[4, -1]
    assert (log_det - np.log(largest[-1])) / np.log(10) == pytest.approx(-481, abs=0.5)


@pytest.mark.parametrize("size", [1.0, 1e4, 1e8])
@pytest.mark.parametrize("angle", [0.0, 0.4, 1.1])
def test_the_entropic_plan_of_a_sharp_singular_form_is_accurate(size, angle):
    cosine, sine = np.cos(angle), np.sin(angle)
    turn = np.array([[cosine, -sine], [sine, cosine]])
    form = turn @ np.diag([size, 0.0]) @ turn.T
    half = entropic_factor(jnp.asarray(turn @ COVARIANCE), jnp.asarray(form))
    back = turn.T @ np.asarray(half)
    # M + k M e e^T M = S with k = size^2 S_11: M e = S e / (1 + k m), and m = M_11
    # is the positive root of m (1 + k m) = S_11.
    spread = COVARIANCE @ COVARIANCE
    pull = size**2 * spread[0, 0]
    first = 2 * spread[0, 0] / (1 + np.sqrt(1 + 4 * pull * spread[0, 0]))
    column = spread[:, 0] / (1 + pull * first)
    exact = spread - pull * np.outer(column, column)
    exact[0, :] = exact[:, 0] = column
    np.testing.assert_allclose(back @ back.T, exact, rtol=1e-6)
