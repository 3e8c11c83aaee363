"""Gaussians next to tokens with their moments."""

import numpy as np
import pytest
import scipy.linalg

import meanformer as mf
from gaussian_reference import COVARIANCE, MEAN, PRECISE, VALUE, attention, gaussian
from meanformer.errors import InvalidInput
from meanformer.gaussian import compare_with_particles, matched_tokens

SOFTMAX = mf.Flow(attention("softmax"))


@pytest.mark.parametrize("count", [64, 100])
def test_matched_tokens_have_the_moments_of_the_gaussian(count):
    tokens = matched_tokens(gaussian(), count)
    points = np.asarray(tokens.points)
    assert points.shape == (count, 2)
    np.testing.assert_allclose(points.mean(axis=0), MEAN, atol=1e-13)
    spread = np.cov(points.T, bias=True)
    np.testing.assert_allclose(spread, COVARIANCE, atol=1e-12)


def test_matched_tokens_depend_on_the_seed_alone():
    first, again, other = (
        np.asarray(matched_tokens(gaussian(), 32, seed=seed).points)
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1


def test_matched_tokens_of_a_singular_gaussian_stay_in_its_range():
    column = np.array([[1.0], [2.0]])
    points = matched_tokens(mf.Gaussian([0.0, 1.0], factor=column), 64).points
    np.testing.assert_allclose(points[:, 1] - 1, 2 * points[:, 0], atol=1e-13)


def test_too_few_tokens_are_refused():
    with pytest.raises(InvalidInput, match="count is 3; it must be 4 or more"):
        matched_tokens(gaussian(), 3)


@pytest.mark.slow
def test_one_layer_of_tokens_is_close_to_that_of_their_gaussian():
    errors = []
    for count in (64, 1024):
        found = compare_with_particles(SOFTMAX, gaussian(), 0.5, count, layers=2)
        np.testing.assert_allclose(found.depths, [0.0, 0.25, 0.5])
        assert len(found.covariance_errors) == 3
        np.testing.assert_allclose(found.covariance_errors[0], 0, atol=1e-12)
        errors.append(np.asarray(found.covariance_errors)[-1])
        last = found.tokens.points[-1]
        spread = np.cov(np.asarray(last).T, bias=True)
        exact = np.asarray(found.gaussians.covariances[-1])
        wrong = np.linalg.norm(spread - exact) / np.linalg.norm(exact)
        assert errors[-1] == pytest.approx(wrong, rel=1e-9)
        drift = np.linalg.norm(np.mean(last, axis=0) - found.gaussians.means[-1])
        assert float(found.mean_errors[-1]) == pytest.approx(drift, rel=1e-9)
    assert errors[1] < errors[0] / 2
    assert errors[1] < 5e-3


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "depth"), [("softmax", 0.5), ("l2", 0.5)])
def test_a_thousand_tokens_follow_the_gaussian_to_a_few_thousandths(kind, depth):
    found = compare_with_particles(
        mf.Flow(attention(kind)), gaussian(), depth, 1024, save=3
    )
    gaps = np.abs(found.tokens.cloud(-1).covariance() - found.gaussians.covariances[-1])
    assert gaps.max() < 2.6e-3
    assert np.all(np.asarray(found.distances) < 5e-3)


@pytest.mark.slow
def test_the_mean_under_sinkhorn_is_exact():
    found = compare_with_particles(
        mf.Flow(attention("sinkhorn")), gaussian(), 0.2, 256, save=2, rtol=1e-8
    )
    assert float(found.mean_errors[-1]) < 1e-7
    assert float(found.covariance_errors[-1]) < 1e-3


@pytest.mark.slow
def test_a_thousand_tokens_under_sinkhorn_follow_the_gaussian_more_closely_still():
    flow = mf.Flow(attention("sinkhorn"))
    path = mf.solve(flow, gaussian(), 0.2, save=2, **PRECISE)
    tokens = matched_tokens(gaussian(), 1024)
    moved = mf.solve(flow, tokens, 0.2, save=2, solver=mf.FixedStep(0.05)).cloud(-1)
    np.testing.assert_allclose(moved.covariance(), path.covariances[-1], atol=4e-5)
    np.testing.assert_allclose(moved.mean(), path.means[-1], atol=3e-8)
    exact = scipy.linalg.expm(0.2 * VALUE) @ MEAN
    np.testing.assert_allclose(moved.mean(), exact, atol=3e-8)


def test_tokens_of_ones_own_are_compared_with_the_gaussian_of_their_moments():
    # Two points are far from Gaussian, and the prediction is soon wrong.
    pair = mf.TokenCloud(np.array([[1.0, 0.0], [-1.0, 0.0]]))
    flow = mf.Flow(attention("softmax", 1.0, (3 * np.eye(2), np.eye(2), np.eye(2))))
    found = compare_with_particles(flow, pair, 0.2, layers=2)
    np.testing.assert_allclose(found.gaussians.means[0], 0, atol=1e-15)
    np.testing.assert_allclose(found.gaussians.covariances[0], np.diag([1.0, 0.0]))
    # The token at 1 moves by tanh 3, the Gaussian's points by 3.
    moved = 1 + 0.1 * np.tanh(3.0)
    np.testing.assert_allclose(found.tokens.points[1], [[moved, 0], [-moved, 0]])
    assert float(found.gaussians.covariances[1][0, 0]) == pytest.approx(1.3**2)
    expected = (1.3**2 - moved**2) / 1.3**2
    assert float(found.covariance_errors[1]) == pytest.approx(expected)
    assert float(found.distances[1]) == pytest.approx((1.3 - moved) / 1.3)


def test_another_measure_is_refused(untyped):
    with pytest.raises(InvalidInput, match="must be a Gaussian or a TokenCloud"):
        compare_with_particles(SOFTMAX, mf.UniformBox([0.0, 0.0], [1.0, 1.0]), 0.5)
