"""Values and laws of Gaussian flows that the theory states, along solved flows."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

import meanformer as mf
from gaussian_reference import (
    COVARIANCE,
    KEY,
    KINDS,
    MEAN,
    PRECISE,
    QUERY,
    SCORE,
    attention,
    gaussian,
)
from meanformer.gaussian import KNOWN_CASES, affine_velocity, limit_of
from meanformer.gaussian.stationary import certified

IDENTITY, TURN = np.eye(2), np.array([[0.0, -1.0], [1.0, 0.0]])
DIRECTION = np.array([[1.0, 2.0]]) / np.sqrt(5)
ACROSS = np.array([2.0, -1.0]) / np.sqrt(5)
CENTRED = gaussian(np.zeros(2))
HALF_TURNED = np.array([[0.6, -0.3], [-0.3, 1.0]])


def limit_on_the_kernel(score, spread):
    """The inverse of the inverse covariance on the kernel of the symmetric score."""
    sizes, vectors = np.linalg.eigh(score + score.T)
    kernel = vectors[:, np.abs(sizes) < 1e-12]
    return kernel @ np.linalg.inv(kernel.T @ np.linalg.solve(spread, kernel)) @ kernel.T


# How far the covariance is from its limit, to the digits given.
DEVIATIONS = {
    "softmax": (1e6, 3e-7, 5e-8),
    "l2": (1e6, 1.5e-7, 5e-9),
    "sinkhorn": (1e5, 1.5e-6, 5e-8),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DEVIATIONS)
def test_three_kinds_near_their_common_limit_at_the_tabulated_pace(kind):
    depth, deviation, digits = DEVIATIONS[kind]
    flow = mf.Flow(KINDS[kind](DIRECTION, -DIRECTION, IDENTITY))
    depths = np.array([0.0, 1.0, 1e3, depth])
    path = mf.solve(
        flow, CENTRED, depth, save=depths, solver=mf.LongDepth(), rtol=1e-11
    )
    limit = limit_on_the_kernel(-DIRECTION.T @ DIRECTION, COVARIANCE)
    expected = [[0.44347826, -0.22173913], [-0.22173913, 0.11086957]]
    np.testing.assert_allclose(limit, expected, atol=5e-9)
    gap = np.abs(np.asarray(path.covariances[-1]) - limit).max()
    assert gap == pytest.approx(deviation, abs=digits)
    # Values I keep z^T S^-1 z for every z in the kernel of the score.
    kept = [ACROSS @ np.linalg.solve(spread, ACROSS) for spread in path.covariances]
    np.testing.assert_allclose(kept, kept[0], rtol=1e-7)
    assert kept[0] == pytest.approx(ACROSS @ np.linalg.solve(COVARIANCE, ACROSS))


@pytest.mark.slow
@pytest.mark.parametrize(("dimension", "rank"), [(3, 1), (4, 2), (4, 3)])
def test_the_rank_of_the_limit_is_the_dimension_of_the_kernel(dimension, rank):
    random = np.random.default_rng(dimension + rank)
    query = random.standard_normal((dimension, dimension))
    query[rank:] = 0
    twist, factor = random.standard_normal((2, dimension, dimension))
    # Only the symmetric part of the score matters.
    score = -query.T @ query + twist - twist.T
    spread = factor @ factor.T
    gamma = mf.Softmax(score, np.eye(dimension), np.eye(dimension))
    run = limit_of(gamma, mf.Gaussian(np.zeros(dimension), spread), depth=1e7)
    assert run.rank == dimension - rank
    limit = limit_on_the_kernel(score, spread)
    assert np.linalg.matrix_rank(limit, tol=1e-8) == dimension - rank
    np.testing.assert_allclose(run.limit, limit, atol=1e-4 * np.abs(limit).max())
    # It is neared like 1/t.
    inverse = np.linalg.inv(spread) + 2 * run.depths[-1] * query.T @ query
    exact = np.linalg.inv(inverse)
    np.testing.assert_allclose(run.covariances[-1], exact, rtol=1e-5, atol=1e-8)


@pytest.mark.slow
def test_values_and_scores_that_change_with_depth_enter_through_their_integral():
    def gamma(depth):
        return mf.Softmax(QUERY * (1 + depth), KEY, jnp.cos(depth) * IDENTITY, beta=0.8)

    path = mf.solve(mf.Flow(gamma), gaussian(), 1.5, save=4, **PRECISE)
    for index, depth in enumerate(np.asarray(path.depths)):
        sine = np.sin(depth)
        # The integral of cos t (1 + t), and that of cos t.
        integral = sine + depth * sine + np.cos(depth) - 1
        inverse = np.linalg.inv(COVARIANCE) - 0.8 * integral * (SCORE + SCORE.T)
        spread = np.linalg.inv(inverse)
        np.testing.assert_allclose(path.covariances[index], spread, atol=1e-11)
        mean = np.exp(sine) * np.asarray(path.linear[index]) @ MEAN
        np.testing.assert_allclose(path.means[index], mean, atol=1e-11)


@pytest.mark.slow
def test_under_a_rotation_the_covariance_returns_to_rounding():
    period = 1.9634954084936207
    assert period == pytest.approx(np.pi / np.trace(COVARIANCE), rel=1e-15)
    flow = mf.Flow(mf.Softmax(IDENTITY, IDENTITY, TURN))
    path = mf.solve(flow, CENTRED, period, save=3, rtol=1e-14, atol=1e-16)
    np.testing.assert_allclose(path.covariances[1], HALF_TURNED, atol=2e-14)
    np.testing.assert_allclose(path.covariances[2], COVARIANCE, atol=2e-14)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["softmax", "l2", "sinkhorn"])
def test_under_a_rotation_trace_and_determinant_are_kept_up_to_depth_fifty(kind):
    flow = mf.Flow(KINDS[kind](IDENTITY, IDENTITY, TURN))
    path = mf.solve(flow, CENTRED, 50.0, save=101, **PRECISE)
    spreads = np.asarray(path.covariances)
    assert float(path.depths[-1]) == 50
    traces = np.trace(spreads, axis1=1, axis2=2)
    np.testing.assert_allclose(traces, 1.6, atol=1e-11)
    np.testing.assert_allclose(np.linalg.det(spreads), 0.51, atol=1e-11)
    assert np.abs(spreads - COVARIANCE).max() > 0.5


@pytest.mark.parametrize("kind", ["softmax", "l2", "sinkhorn"])
@pytest.mark.parametrize("dimension", [2, 4, 6])
def test_copies_of_the_rotation_have_centres_of_full_rank(kind, dimension):
    identity = np.eye(dimension)
    turn = np.kron(np.eye(dimension // 2), TURN)
    gamma = attention(kind, 1.0, (identity, identity, turn))
    point = certified(gamma, np.sqrt(0.8) * identity)
    assert point.residual < 1e-15
    assert point.smallest == pytest.approx(1)
    assert point.isotropy == pytest.approx(1)
    np.testing.assert_allclose(point.stability.real, 0, atol=1e-12)


@pytest.mark.slow
def test_copies_of_the_rotation_turn_with_the_period_of_one():
    turn, spread = np.kron(IDENTITY, TURN), np.kron(IDENTITY, COVARIANCE)
    flow = mf.Flow(mf.Softmax(np.eye(4), np.eye(4), turn))
    mu = mf.Gaussian(np.zeros(4), spread)
    path = mf.solve(flow, mu, np.pi / 1.6, save=3, **PRECISE)
    half = np.kron(IDENTITY, HALF_TURNED)
    np.testing.assert_allclose(path.covariances[1], half, atol=1e-11)
    np.testing.assert_allclose(path.covariances[2], spread, atol=1e-11)


@pytest.mark.parametrize("rate", [-0.1, 0.1])
def test_a_rotation_and_a_rate_change_the_trace_by_the_square(rate):
    gamma = mf.Softmax(IDENTITY, IDENTITY, TURN + rate * IDENTITY, beta=1.3)
    slope = np.asarray(affine_velocity(gamma, CENTRED)[0])
    change = 2 * np.trace(slope @ COVARIANCE)
    expected = 2 * rate * 1.3 * np.trace(COVARIANCE @ COVARIANCE)
    assert change == pytest.approx(expected, rel=1e-13)


@pytest.mark.slow
def test_an_expanding_rotation_reaches_a_million_where_it_should_and_with_rank_one():
    case = KNOWN_CASES["rotation, expanding"]
    path = mf.solve(
        mf.Flow(case.gamma()),
        case.gaussian(),
        10.0,
        save=2,
        rtol=1e-11,
        stop=mf.StopWhen(lambda depth, mu: jnp.trace(mu.covariance()) > 1e6),
    )
    assert bool(path.status == mf.Status.condition_met)
    assert 1e6 < float(path.statistics["trace"][-1]) < 1.1e6
    assert float(path.depths[-1]) == pytest.approx(4.3083, abs=5e-5)
    large, small = path.statistics["eigenvalues"][-1]
    assert float(small / large) < 1e-5


def self_similar(score, value, start):
    """The covariance X for which X / t solves the equation of softmax, by SciPy."""

    def left(entries):
        first, cross, second = entries
        spread = np.array([[first, cross], [cross, second]])
        moved = value @ spread @ score @ spread
        return (spread + moved + moved.T)[np.triu_indices(2)]

    found = scipy.optimize.root(left, start[np.triu_indices(2)], tol=1e-14).x
    return np.array([[found[0], found[1]], [found[1], found[2]]])


@pytest.mark.slow
def test_a_decay_of_full_rank_is_self_similar_with_the_tabulated_shape():
    case = KNOWN_CASES["full rank over t"]
    path = mf.solve(
        mf.Flow(case.gamma()),
        case.gaussian(),
        1e8,
        save=np.array([0.0, 1e4, 1e8]),
        solver=mf.LongDepth(),
        rtol=1e-11,
    )
    scaled = np.asarray(path.depths[-1] * path.covariances[-1])
    expected = np.array([[8.08767, -1.04124], [-1.04124, 13.23429]])
    np.testing.assert_allclose(scaled, expected, atol=1e-5)
    ((score, _, value),) = case.heads
    exact = self_similar(score, value, expected)
    np.testing.assert_allclose(exact, expected, atol=5e-6)
    np.testing.assert_allclose(scaled, exact, atol=1e-5)
    small, large = np.linalg.eigvalsh(scaled)
    assert small / large == pytest.approx(0.58681355, abs=5e-9)
    small, large = np.linalg.eigvalsh(exact)
    assert small / large == pytest.approx(0.58681355, abs=5e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_in_dimension_four_a_negative_score_of_rank_two_leaves_two_directions(seed):
    random = np.random.default_rng(seed)
    root, query = random.standard_normal((4, 4)), random.standard_normal((2, 4))
    factor = random.standard_normal((4, 4))
    value = root.T @ root
    path = mf.solve(
        mf.Flow(mf.Softmax(query, -query, value)),
        mf.Gaussian(np.zeros(4), factor=factor),
        1e6,
        save=np.array([0.0, 1e2, 1e4, 1e6]),
        solver=mf.LongDepth(),
        rtol=1e-6,
    )
    assert float(path.depths[-1]) == 1e6
    eigenvalues = np.asarray(path.statistics["eigenvalues"])
    assert np.all(eigenvalues > 0)
    assert np.all(eigenvalues[-1, 2:] < 2e-5)
    assert np.all(eigenvalues[-1, :2] > 0.1)
    seen = query.T @ query @ np.asarray(path.covariances[-1])
    assert np.linalg.norm(seen, 2) < 7e-5
    # The trace over the values never grows, by the theorem on definite values.
    weighted = np.trace(np.linalg.solve(value, path.covariances), axis1=1, axis2=2)
    assert np.all(np.diff(weighted) < 0)
