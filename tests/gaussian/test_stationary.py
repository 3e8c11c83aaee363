"""Stationary covariances: their rank, their certificate, their stability."""

import jax.numpy as jnp
import numpy as np
import pytest

import meanformer as mf
from gaussian_reference import attention, slope_and_constant
from meanformer.errors import InvalidInput
from meanformer.gaussian import stationary_points
from meanformer.gaussian.stationary import covariance_velocity, linearised_flow

IDENTITY, TURN = np.eye(2), np.array([[0.0, -1.0], [1.0, 0.0]])


def residual(kind, matrices, spread):
    """The velocity of a covariance relative to its size, from the table."""
    mean = np.zeros(len(spread))
    slope = slope_and_constant(kind, matrices, 1.0, mean, spread)[0]
    moved = slope @ spread
    size = np.linalg.norm(slope) * np.linalg.norm(spread)
    return np.linalg.norm(moved + moved.T) / size


def test_a_rotation_has_centres_of_full_rank(key):
    matrices = (IDENTITY, IDENTITY, TURN)
    points = stationary_points(
        attention("softmax", 1.0, matrices), 2, 2, key=key, starts=8
    )
    assert len(points) == 8
    for point in points:
        np.testing.assert_allclose(point.covariance, IDENTITY / 2, atol=1e-8)
        assert point.smallest == pytest.approx(1, abs=1e-8)
        # dZ = 4 beta a J Z for traceless Z, where S = a I and a = 1/2.
        np.testing.assert_allclose(point.stability.real, 0, atol=1e-7)
        np.testing.assert_allclose(np.sort(point.stability.imag), [-2, 0, 2], atol=1e-7)


@pytest.mark.parametrize(
    ("signs", "bound"), [((1.0, -1.0), 1), ((1.0, 2.0), 0), ((1.0, 0.0), 1)]
)
def test_with_values_i_the_rank_is_that_of_an_isotropic_range(signs, bound, key):
    matrices = (np.diag(signs), IDENTITY, IDENTITY)
    for rank in (1, 2):
        points = stationary_points(
            attention("softmax", 1.0, matrices), 2, rank, key=key, starts=8
        )
        assert bool(points) == (rank <= bound)
        for point in points:
            assert point.rank == rank
            assert point.isotropy < 1e-4
            assert np.trace(point.covariance) == pytest.approx(1, abs=1e-8)
            inner = point.covariance @ np.diag(signs) @ point.covariance
            np.testing.assert_allclose(inner, 0, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signs", "bound"),
    [((1.0, 1.0, -1.0), 1), ((1.0, -2.0, 0.0), 2), ((2.0, -1.0, -0.5), 1)],
)
def test_in_space_the_bound_is_sharp(signs, bound, key):
    zero = sum(sign == 0 for sign in signs)
    positive = sum(sign > 0 for sign in signs)
    assert bound == zero + min(positive, 3 - zero - positive)
    matrices = (np.diag(signs), np.eye(3), np.eye(3))
    for rank in (bound, bound + 1):
        points = stationary_points(
            attention("softmax", 1.0, matrices), 3, rank, key=key, starts=12
        )
        assert bool(points) == (rank == bound)


@pytest.mark.slow
def test_any_values_rest_on_an_isotropic_range(key):
    score, value = np.array([[1.0, 0.7], [-0.2, -0.8]]), np.array([[0.3, -1], [2, 0.5]])
    matrices = (score, IDENTITY, value)
    points = stationary_points(
        attention("softmax", 1.0, matrices), 2, 1, key=key, starts=16
    )
    assert points
    for point in points:
        assert residual("softmax", matrices, point.covariance) < 1e-8
        # A cone: the covariance itself is a direction in which nothing changes.
        assert np.abs(point.stability).min() < 1e-6
        spread = point.covariance
        assert residual("softmax", matrices, 3 * spread) < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["l2", "sinkhorn"])
def test_other_kinds_have_centres_of_full_rank_too(kind, key):
    matrices = (IDENTITY, IDENTITY, TURN)
    points = stationary_points(
        attention(kind, 1.0, matrices), 2, 2, key=key, starts=4, trace=1.6
    )
    assert points
    np.testing.assert_allclose(points[0].covariance, 0.8 * IDENTITY, atol=1e-7)
    assert residual(kind, matrices, points[0].covariance) < 1e-8


def test_several_heads_have_no_isotropy(key):
    heads = mf.MultiHead([attention("softmax", 1.0, (IDENTITY, IDENTITY, TURN))] * 2)
    (point, *_) = stationary_points(heads, 2, 2, key=key, starts=2)
    assert point.isotropy is None
    np.testing.assert_allclose(point.covariance, IDENTITY / 2, atol=1e-8)


@pytest.mark.parametrize("kind", ["softmax", "sinkhorn"])
def test_the_linearised_flow_is_the_derivative_of_the_velocity(kind):
    gamma = attention(kind)
    spread = np.array([[1.0, 0.3], [0.3, 0.6]])
    matrix = np.asarray(linearised_flow(gamma, jnp.asarray(spread)))
    direction = np.array([[0.4, -0.7], [-0.7, 0.2]])
    step = 1e-5
    ends = [
        np.asarray(covariance_velocity(gamma, jnp.asarray(spread + sign * direction)))
        for sign in (step, -step)
    ]
    change = (ends[0] - ends[1]) / (2 * step)
    # Coordinates in which the norm of a symmetric matrix is that of a vector.
    scale = np.array([1.0, np.sqrt(2), 1.0])
    corner = np.triu_indices(2)
    found = matrix @ (scale * direction[corner])
    np.testing.assert_allclose(found, scale * change[corner], atol=1e-8)


def test_a_rank_above_the_dimension_is_refused(key):
    with pytest.raises(InvalidInput, match="rank is 3; the dimension is 2"):
        stationary_points(attention("softmax"), 2, 3, key=key)
    with pytest.raises(InvalidInput, match="starts is 0"):
        stationary_points(attention("softmax"), 2, 1, key=key, starts=0)
