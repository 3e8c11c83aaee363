"""Depths of blow-up that were once wrong: scales, single precision, bounds, means."""

import numpy as np
import pytest
import scipy.integrate
import scipy.linalg

import meanformer as mf
from gaussian_reference import COVARIANCE
from meanformer.errors import InvalidInput
from meanformer.gaussian import blowup_time, centred, classify

IDENTITY = np.eye(2)
VALUE = np.array([[2.0, 0.5], [0.5, 1.0]])
SCORE = np.array([[1.0, 0.4], [-0.6, 0.5]])
CENTRED = centred(COVARIANCE)


def blow_up_of_second_moment(score, value, moment):
    """When dM = V M A M and its transpose blows up, by SciPy, in the clock tr M dt."""

    def field(_, state):
        shape, over_trace = state[:4].reshape(2, 2), state[4]
        moved = value @ shape @ score @ shape
        moved = moved + moved.T
        growth = np.trace(moved)
        change = (moved - growth * shape).ravel()
        return np.array([*change, -growth * over_trace, over_trace])

    trace = np.trace(moment)
    first = np.array([*(moment / trace).ravel(), 1 / trace, 0.0])
    found = scipy.integrate.solve_ivp(
        field, (0.0, 40.0), first, method="DOP853", rtol=1e-12, atol=1e-15
    )
    assert found.y[4, -1] < 1e-12
    return found.y[5, -1]


def test_a_small_score_on_a_large_variance_blows_up_exactly_where_it_should():
    gamma = mf.Softmax(np.diag([-1.0, 1e-14]), IDENTITY, IDENTITY)
    found = blowup_time(gamma, centred(np.diag([1.0, 1e14])))
    # Score times variance is 1 along the second axis.
    assert found.certainty == "exact"
    assert found.depth == pytest.approx(0.5, rel=1e-12)
    assert found.lower <= found.depth <= found.upper * (1 + 1e-12)


@pytest.mark.slow
def test_a_late_blow_up_is_not_denied():
    gamma = mf.Softmax(np.diag([-1.0, 1e-4]), IDENTITY, IDENTITY)
    start = centred(np.diag([1e6, 1e-6]))
    early = blowup_time(gamma, start)
    assert (early.certainty, early.depth) == ("not seen", None)
    late = blowup_time(gamma, start, horizon=1e10)
    assert late.certainty == "numerical"
    assert late.depth == pytest.approx(1 / (2 * 1e-4 * 1e-6), rel=1e-8)


@pytest.mark.parametrize("seed", range(4))
def test_a_negative_score_in_single_precision_never_blows_up(seed):
    query = np.random.default_rng(seed).normal(size=(2, 4)).astype(np.float32)
    four = np.eye(4, dtype=np.float32)
    found = blowup_time(mf.Softmax(query, -query, four), centred(four))
    assert (found.certainty, found.depth) == ("never", None)


@pytest.mark.slow
def test_the_lower_bound_counts_the_score_in_the_values_of_kim():
    distances = mf.L2(
        10 * IDENTITY, 10 * IDENTITY, IDENTITY, beta=1e-4, value_map="kim"
    )
    gamma = mf.Sum([distances, mf.Softmax(0.02 * IDENTITY, IDENTITY, IDENTITY)])
    found = blowup_time(gamma, centred(IDENTITY))
    # S = s I: A = 100 I, V = A / sqrt(2), N = 1 / (1 + 2 beta 100 s).
    first = 2 * 1e-4 * 100 * 100 / np.sqrt(2)

    def over_speed(log_size):
        size = np.exp(log_size)
        return 1 / (2 * size * (first / (1 + 2e-2 * size) + 0.02))

    exact, _ = scipy.integrate.quad(over_speed, 0, 40, epsabs=0, epsrel=1e-12)
    assert found.depth == pytest.approx(exact, rel=1e-8)
    assert found.lower <= exact
    bound = 1 / (2 * (first + 0.02))
    assert found.lower == pytest.approx(bound, rel=1e-12)


@pytest.mark.slow
def test_values_that_do_not_see_the_covariance_prove_no_blow_up():
    value = np.array([1.0, 2.0]) / np.sqrt(5)
    spread = np.array([2.0, -1.0]) / np.sqrt(5)
    gamma = mf.Softmax(IDENTITY, IDENTITY, np.outer(value, value))
    found = blowup_time(gamma, centred(np.outer(spread, spread)), horizon=10.0)
    assert found.depth is found.upper is None


@pytest.mark.slow
def test_both_signs_changed_have_the_same_bounds_and_blow_up():
    found, turned = (
        blowup_time(mf.Softmax(sign * SCORE, IDENTITY, sign * VALUE), CENTRED)
        for sign in (1, -1)
    )
    lowest = np.linalg.eigvalsh((SCORE + SCORE.T) / 2)[0]
    values = np.linalg.eigvalsh(VALUE)[0]
    weighted = np.trace(np.linalg.solve(VALUE, COVARIANCE))
    assert turned.upper == pytest.approx(1 / (lowest * values**2 * weighted), rel=1e-12)
    assert turned.upper == pytest.approx(found.upper, rel=1e-14)
    assert turned.depth == pytest.approx(found.depth, rel=1e-12)
    exact = blow_up_of_second_moment(SCORE, VALUE, COVARIANCE)
    assert turned.depth == pytest.approx(exact, rel=1e-8)


@pytest.mark.slow
def test_single_precision_blows_up_where_double_does():
    def at(dtype):
        matrices = (matrix.astype(dtype) for matrix in (SCORE, IDENTITY, VALUE))
        return blowup_time(mf.Softmax(*matrices), centred(COVARIANCE.astype(dtype)))

    single, double = at(np.float32), at(np.float64)
    assert single.certainty == double.certainty == "numerical"
    assert single.depth == pytest.approx(double.depth, rel=1e-6)
    exact = blow_up_of_second_moment(SCORE, VALUE, COVARIANCE)
    assert single.depth == pytest.approx(exact, rel=1e-6)


def test_a_point_never_blows_up_under_softmax():
    point = mf.Gaussian([3.0, -1.0], np.zeros((2, 2)))
    found = blowup_time(mf.Softmax(SCORE, IDENTITY, VALUE), point)
    assert (found.certainty, found.depth) == ("never", None)
    assert "at most exponentially" in found.reason


@pytest.mark.slow
def test_a_point_blows_up_under_linear_attention_with_its_square():
    found = blowup_time(
        mf.Linear(IDENTITY, IDENTITY, VALUE), mf.Gaussian([1.0, 0.0], np.zeros((2, 2)))
    )
    # m' = |m|^2 V m, so that m = exp(V s) m_0 in the clock ds = |m|^2 dt.

    def over_square(clock):
        return 1 / np.sum(scipy.linalg.expm(VALUE * clock)[:, 0] ** 2)

    exact, _ = scipy.integrate.quad(over_square, 0, 20, epsabs=0, epsrel=1e-11)
    assert found.certainty == "numerical"
    assert found.depth == pytest.approx(exact, rel=1e-8)


def test_other_dimensions_are_refused():
    three = np.eye(3)
    with pytest.raises(InvalidInput, match="dimension 2; Softmax takes 3"):
        blowup_time(mf.Softmax(three, three, three), CENTRED)


@pytest.mark.slow
def test_linear_attention_blows_up_by_its_mean():
    gamma = mf.Linear(np.diag([1.0, -1.0]), IDENTITY, IDENTITY)
    start = mf.Gaussian([3.0, 0.0], np.diag([1e-12, 1.0]))
    found = classify(gamma, start)
    # The second moment M = diag(9, 1) obeys M' = 2 M A M: (1/9 - 2 t) is its inverse.
    assert found.kind == "blow-up"
    assert found.depth == pytest.approx(1 / 18, rel=1e-10)
    other = classify(gamma, mf.Gaussian([0.0, 3.0], np.diag([1.0, 1e-12])))
    assert other.depth == pytest.approx(1 / 2, rel=1e-10)


@pytest.mark.slow
def test_linear_attention_with_other_values_blows_up_where_scipy_does():
    score, value = np.diag([1.0, -1.0]), np.array([[1.0, 0.1], [0.0, 1.0]])
    mean, spread = np.array([3.0, 0.0]), np.diag([0.01, 1.0])
    found = classify(mf.Linear(score, IDENTITY, value), mf.Gaussian(mean, spread))
    moment = spread + np.outer(mean, mean)
    assert found.kind == "blow-up"
    exact = blow_up_of_second_moment(score, value, moment)
    assert found.depth == pytest.approx(exact, rel=1e-8)
    assert found.lower <= exact


@pytest.mark.slow
def test_a_point_under_linear_attention_is_classified_by_its_mean():
    # With A = V = I the mean obeys dm = |m|^2 m, infinite at 1/(2 |m|^2).
    point = mf.Gaussian([2.0, 0.0], np.zeros((2, 2)))
    found = mf.gaussian.classify(mf.Linear(np.eye(2), np.eye(2), np.eye(2)), point)
    assert found.kind == "blow-up"
    assert found.depth == pytest.approx(1 / 8, rel=1e-8)
