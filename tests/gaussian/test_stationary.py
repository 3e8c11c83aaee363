"""Stationary covariances: their rank, their certificate, their stability."""

import jax.numpy as jnp
import numpy as np
import pytest

import meanformer as mf
from gaussian_reference import attention, gaussian, slope_and_constant
from meanformer.errors import InvalidInput
from meanformer.gaussian import is_stationary, stationary_points
from meanformer.gaussian.stationary import (
    certified,
    covariance_velocity,
    linearised_flow,
)

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


def test_a_certificate_has_the_eigenvalues_and_the_isotropy_of_the_closed_form():
    score, spread = np.diag([3.0, -1.5]), np.diag([4.0, 1.0])
    found = certified(mf.Softmax(score, IDENTITY, IDENTITY), np.sqrt(spread))
    assert found.smallest == pytest.approx(1 / 4)
    # The range is everything, where the score is as large as it is.
    assert found.isotropy == pytest.approx(1)
    # dS = 2 S A S multiplies the entry i, j of a change by 2 (s_i a_i + s_j a_j).
    np.testing.assert_allclose(found.stability, [48, 21, -6], rtol=1e-12)


def test_a_gaussian_is_stationary_if_neither_covariance_nor_mean_move():
    turning = mf.Softmax(IDENTITY, IDENTITY, TURN)
    assert is_stationary(turning, gaussian(np.zeros(2), 0.8 * IDENTITY))
    assert not is_stationary(turning, gaussian(np.zeros(2), np.diag([1.0, 0.6])))
    assert not is_stationary(turning, gaussian(np.array([0.1, 0.0]), 0.8 * IDENTITY))
    near = np.diag([0.8, 0.8 * (1 + 1e-5)])
    assert not is_stationary(turning, gaussian(np.zeros(2), near))
    assert is_stationary(turning, gaussian(np.zeros(2), near), tolerance=1e-4)
    # The range lies in the kernel of the score, so that the slope is zero.
    inside = mf.Softmax(np.diag([0.0, -1.0]), IDENTITY, IDENTITY)
    assert is_stationary(inside, gaussian(np.zeros(2), np.diag([2.0, 0.0])))
    # dm = V (I + S A) m, where S A = -I on the mean.
    balanced = mf.Softmax(np.diag([0.0, -1.0]), IDENTITY, np.diag([1.0, 0.0]))
    assert is_stationary(balanced, gaussian(np.array([0.0, 3.0]), IDENTITY))
    assert is_stationary(
        mf.Softmax(*np.float32([IDENTITY, IDENTITY, TURN])),
        gaussian(np.zeros(2), 0.8 * IDENTITY, dtype=np.float32),
    )


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


def turned(random, matrix):
    """The matrix in a random orthonormal basis, and that basis."""
    basis = np.linalg.qr(random.standard_normal(matrix.shape))[0]
    return basis @ matrix @ basis.T, basis


def with_isotropic_range(random, dimension, rank):
    """A random score that vanishes on a range of this rank, and that range."""
    score = random.standard_normal((dimension, dimension))
    score[:rank, :rank] = 0
    score, basis = turned(random, score)
    return score, basis[:, :rank]


# The largest rank that the bound (d + dim ker A) / 2 allows. A random score that
# vanishes on a range of rank r has rank 2 (d - r) if that is less than d.
SHARP = [(2, 1), (3, 1), (3, 2), (4, 2), (4, 3), (5, 3)]


@pytest.mark.parametrize("kind", ["softmax", "l2", "sinkhorn"])
@pytest.mark.parametrize(
    ("dimension", "rank"),
    [*SHARP[:3], *(pytest.param(*one, marks=pytest.mark.slow) for one in SHARP[3:])],
)
def test_every_covariance_on_an_isotropic_range_rests_for_any_values(
    kind, dimension, rank
):
    random = np.random.default_rng(10 * dimension + rank)
    score, basis = with_isotropic_range(random, dimension, rank)
    kernel = dimension - np.linalg.matrix_rank(score)
    assert rank == (dimension + kernel) // 2
    value = random.standard_normal((dimension, dimension))
    mixing = random.standard_normal((rank, rank))
    identity = np.eye(dimension)
    gamma = attention(kind, 1.0, (score, identity, value))
    point = certified(gamma, basis @ mixing)
    spread = basis @ mixing @ mixing.T @ basis.T
    np.testing.assert_allclose(point.covariance, spread, atol=1e-13)
    assert point.residual < 1e-12
    assert point.isotropy < 1e-13
    change = covariance_velocity(
        gamma, jnp.asarray(spread), jnp.asarray(basis @ mixing)
    )
    np.testing.assert_allclose(change, 0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("dimension", "rank"), [(2, 1), (3, 2), (4, 3)])
def test_for_general_values_the_bound_by_the_kernel_is_sharp(dimension, rank, key):
    random = np.random.default_rng(dimension)
    score, _ = with_isotropic_range(random, dimension, rank)
    kernel = dimension - np.linalg.matrix_rank(score)
    assert rank == (dimension + kernel) / 2
    value = random.standard_normal((dimension, dimension))
    matrices = (score, np.eye(dimension), value)
    gamma = attention("softmax", 1.0, matrices)
    points = stationary_points(gamma, dimension, rank, key=key, starts=24)
    assert points
    for point in points:
        assert residual("softmax", matrices, point.covariance) < 1e-8
        assert point.isotropy < 1e-6
        vectors = np.linalg.eigh(point.covariance)[1][:, -rank:]
        np.testing.assert_allclose(vectors.T @ score @ vectors, 0, atol=1e-5)
    # A range above the bound is not isotropic.
    for point in stationary_points(gamma, dimension, rank + 1, key=key, starts=24):
        assert point.isotropy > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("dimension", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_random_values_and_scores_rest_on_isotropic_ranges_only(dimension, seed, key):
    random = np.random.default_rng(seed)
    score, value = random.standard_normal((2, dimension, dimension))
    gamma = attention("softmax", 1.0, (score, np.eye(dimension), value))
    signs = np.linalg.eigvalsh(score + score.T) > 0
    for rank in range(1, dimension + 1):
        points = stationary_points(gamma, dimension, rank, key=key, starts=24)
        # A line is isotropic where the quadratic form vanishes; a plane has to be
        # found by luck, and cannot be where it is more than half of the space.
        is_allowed = rank == 1 and signs.any() and not signs.all()
        assert bool(points) == is_allowed
        assert all(point.isotropy < 1e-6 for point in points)


def not_isotropic(random):
    """Values and score with a stationary covariance of rank two that is a plane's.

    On the plane the values are given and the score solves V D G D = K with K skew.
    """
    inner, skew = random.standard_normal((2, 2)), np.array([[0.0, 0.7], [-0.7, 0.0]])
    spread = np.diag([0.65, 0.35])
    score, value = random.standard_normal((2, 3, 3))
    value[:2, :2], value[2, :2] = inner, 0
    inverse = np.linalg.inv(spread)
    score[:2, :2] = inverse @ np.linalg.solve(inner, skew) @ inverse
    basis = np.linalg.qr(random.standard_normal((3, 3)))[0]
    factor = basis[:, :2] @ np.sqrt(spread)
    return basis @ score @ basis.T, basis @ value @ basis.T, factor


@pytest.mark.parametrize("seed", range(3))
def test_a_range_that_is_not_isotropic_may_rest_under_values_that_keep_it(seed):
    score, value, factor = not_isotropic(np.random.default_rng(seed))
    gamma = attention("softmax", 1.0, (score, np.eye(3), value))
    point = certified(gamma, factor)
    assert point.residual < 1e-13
    assert point.isotropy > 0.05


@pytest.mark.slow
def test_where_a_found_range_is_not_isotropic_the_values_keep_it(key):
    for seed in range(3):
        score, value, factor = not_isotropic(np.random.default_rng(seed))
        gamma = attention("softmax", 1.0, (score, np.eye(3), value))
        points = stationary_points(gamma, 3, 2, key=key, starts=24)
        assert points
        # An isotropic plane is more than half of the space, and the score invertible.
        assert np.linalg.matrix_rank(score) == 3
        for point in points:
            assert point.isotropy > 1e-3
            sizes, vectors = np.linalg.eigh(point.covariance)
            frame, spread = vectors[:, 1:], np.diag(sizes[1:])
            inside = spread @ frame.T @ score @ frame @ spread
            moved = value @ frame @ inside
            outside = moved - frame @ (frame.T @ moved)
            np.testing.assert_allclose(outside, 0, atol=1e-7)
            kept = frame.T @ value @ frame @ inside
            np.testing.assert_allclose(kept, -kept.T, atol=1e-7)
        gaps = [np.abs(p.covariance - factor @ factor.T).max() for p in points]
        assert min(gaps) < 1e-7


@pytest.mark.slow
@pytest.mark.parametrize("change", [0.0, 0.01])
def test_under_a_singular_score_full_rank_may_rest_also_for_random_values(change, key):
    # With A = a b^T of even rank r, S > 0 rests if and only if V S a = S b N with N
    # skew: d r - r (r - 1) / 2 equations, and no more of them than unknowns if r < d.
    random = np.random.default_rng(101)
    left, right = random.standard_normal((3, 2)), random.standard_normal((2, 3)).T
    value = random.standard_normal((3, 3))
    left, right, value = (
        matrix + change * random.standard_normal(matrix.shape)
        for matrix in (left, right, value)
    )
    matrices = (left @ right.T, np.eye(3), value)
    points = stationary_points(
        attention("softmax", 1.0, matrices), 3, 3, key=key, starts=24
    )
    assert points
    for point in points:
        assert residual("softmax", matrices, point.covariance) < 1e-12
        assert np.linalg.eigvalsh(point.covariance)[0] > 0.01
        assert point.isotropy > 0.1
        spread = point.covariance
        skew, rest, *_ = np.linalg.lstsq(spread @ right, value @ spread @ left)
        np.testing.assert_allclose(rest, 0, atol=1e-20)
        np.testing.assert_allclose(skew, -skew.T, atol=1e-10)
        # None attracts: a direction grows.
        assert point.stability.real.max() > 0.1


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


@pytest.mark.slow
def test_several_heads_have_no_isotropy(key):
    heads = mf.MultiHead([attention("softmax", 1.0, (IDENTITY, IDENTITY, TURN))] * 2)
    (point, *_) = stationary_points(heads, 2, 2, key=key, starts=2)
    assert point.isotropy is None
    np.testing.assert_allclose(point.covariance, IDENTITY / 2, atol=1e-8)


@pytest.mark.slow
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
