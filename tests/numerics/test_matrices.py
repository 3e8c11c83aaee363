"""Symmetric square roots, their derivatives, and the check of covariances."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.linalg

from meanformer.errors import InvalidInput, PrecisionWarning
from meanformer.numerics.matrices import (
    checked_covariance,
    solve_sylvester,
    sqrt_psd,
)


def random_psd(key, dimension, rank=None):
    factor = jr.normal(key, (dimension, rank or dimension))
    return factor @ factor.T


def symmetric(key, dimension):
    matrix = jr.normal(key, (dimension, dimension))
    return (matrix + matrix.T) / 2


@pytest.mark.parametrize("dimension", [1, 2, 5, 12])
def test_the_root_agrees_with_scipy(key, dimension):
    matrix = random_psd(key, dimension)
    expected = scipy.linalg.sqrtm(np.asarray(matrix))
    np.testing.assert_allclose(sqrt_psd(matrix), expected, atol=1e-10)


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_the_root_of_a_singular_matrix_squares_to_it(key, rank):
    matrix = random_psd(key, 5, rank)
    root = sqrt_psd(matrix)
    np.testing.assert_allclose(root @ root, matrix, atol=1e-12)
    np.testing.assert_allclose(root, root.T, atol=1e-14)


def test_the_root_of_zero_is_zero_with_zero_derivative():
    gradient = jax.grad(lambda matrix: sqrt_psd(matrix).sum())(jnp.zeros((3, 3)))
    assert (sqrt_psd(jnp.zeros((3, 3))) == 0).all()
    assert (gradient == 0).all()


@pytest.mark.parametrize("matrix", [jnp.eye(3), jnp.diag(jnp.array([2.0, 2.0, 0.5]))])
def test_the_derivative_is_right_where_eigenvalues_coincide(key, matrix):
    direction, step = symmetric(key, 3), 1e-6
    _, derivative = jax.jvp(sqrt_psd, (matrix,), (direction,))
    ahead, behind = (
        sqrt_psd(matrix + step * direction),
        sqrt_psd(matrix - step * direction),
    )
    np.testing.assert_allclose(derivative, (ahead - behind) / (2 * step), atol=1e-8)


def test_reverse_mode_agrees_with_finite_differences(key):
    key_s, key_l, key_d = jr.split(key, 3)
    matrix, direction = random_psd(key_s, 4) + jnp.eye(4), symmetric(key_d, 4)
    slope = jr.normal(key_l, (4, 4))

    def objective(matrix):
        return jnp.vdot(slope, sqrt_psd(matrix))

    step = 1e-6
    ahead, behind = (objective(matrix + s * step * direction) for s in (1, -1))
    measured = jnp.vdot(jax.grad(objective)(matrix), direction)
    np.testing.assert_allclose(measured, (ahead - behind) / (2 * step), rtol=1e-7)


def test_the_second_derivative_at_the_identity_is_that_of_the_scalar_root():
    second = jax.jacfwd(jax.jacfwd(lambda s: sqrt_psd(s * jnp.eye(2))))(jnp.array(1.0))
    np.testing.assert_allclose(second, -0.25 * np.eye(2), atol=1e-12)


def test_the_derivative_along_the_range_of_a_singular_matrix_is_exact():
    matrix = jnp.diag(jnp.array([4.0, 0.0]))
    _, derivative = jax.jvp(sqrt_psd, (matrix,), (jnp.diag(jnp.array([1.0, 0.0])),))
    np.testing.assert_allclose(derivative, np.diag([0.25, 0.0]), atol=1e-12)


def test_the_derivative_into_the_kernel_is_finite():
    matrix = jnp.diag(jnp.array([4.0, 0.0]))
    gradient = jax.grad(lambda matrix: jnp.trace(sqrt_psd(matrix)))(matrix)
    np.testing.assert_allclose(gradient, np.diag([0.25, 0.0]), atol=1e-12)


def test_sylvester_solutions_satisfy_their_equation(key):
    key_r, key_c = jr.split(key)
    root, right = random_psd(key_r, 4) + jnp.eye(4), jr.normal(key_c, (4, 4))
    solution = solve_sylvester(root, right)
    np.testing.assert_allclose(root @ solution + solution @ root, right, atol=1e-12)
    expected = scipy.linalg.solve_sylvester(*map(np.asarray, (root, root, right)))
    np.testing.assert_allclose(solution, expected, atol=1e-12)


def test_roots_batch_and_compile(key):
    matrices = jnp.stack([random_psd(k, 3) for k in jr.split(key, 4)])
    expected = jnp.stack([sqrt_psd(matrix) for matrix in matrices])
    batched = jax.jit(jax.vmap(sqrt_psd))(matrices)
    np.testing.assert_allclose(batched, expected, atol=1e-12)


def test_roots_keep_single_precision(key):
    matrix = random_psd(key, 4).astype(jnp.float32)
    root, gradient = jax.value_and_grad(lambda s: sqrt_psd(s).sum())(matrix)
    assert root.dtype == gradient.dtype == jnp.float32
    np.testing.assert_allclose(sqrt_psd(matrix) @ sqrt_psd(matrix), matrix, rtol=2e-5)


def test_a_valid_covariance_is_returned_as_it_is(key):
    matrix = random_psd(key, 4, rank=2)
    matrix = (matrix + matrix.T) / 2
    assert checked_covariance("covariance", matrix) is matrix


def test_a_slightly_asymmetric_covariance_is_averaged():
    matrix = jnp.array([[1.0, 0.5], [0.5 + 1e-12, 1.0]])
    checked = checked_covariance("covariance", matrix)
    assert (checked == checked.T).all()


def test_a_small_negative_eigenvalue_is_clipped_with_a_warning():
    matrix = jnp.diag(jnp.array([1.0, -1e-10]))
    with pytest.warns(PrecisionWarning, match=r"covariance has the eigenvalue -1e-10"):
        checked = checked_covariance("covariance", matrix)
    np.testing.assert_array_equal(checked, np.diag([1.0, 0.0]))


@pytest.mark.parametrize("lowest", [-2e-8, -0.5])
def test_a_negative_eigenvalue_is_refused(lowest):
    with pytest.raises(InvalidInput, match="it must be positive semi-definite"):
        checked_covariance("covariance", jnp.diag(jnp.array([1.0, lowest])))


def test_an_asymmetric_covariance_is_refused():
    with pytest.raises(InvalidInput, match="differs from its transpose by 0.3"):
        checked_covariance("covariance", jnp.array([[1.0, 0.3], [0.0, 1.0]]))


def test_the_check_lets_traced_matrices_pass():
    negative = jnp.diag(jnp.array([1.0, -1.0]))
    checked = jax.jit(lambda matrix: checked_covariance("covariance", matrix))(negative)
    np.testing.assert_array_equal(checked, negative)
