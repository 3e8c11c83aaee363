"""The largest eigenvalues of symmetric operators, against dense decompositions."""

import jax.numpy as jnp
import numpy as np
import pytest

from meanformer.numerics.eigen import largest_eigenpairs, random_block


def find(matrix, *, dtype=np.float64, vectors=3, tolerance=1e-8, max_steps=500):
    operator = jnp.asarray(matrix, dtype)
    start = random_block(len(matrix), vectors, jnp.dtype(dtype))
    return largest_eigenpairs(
        lambda v: operator @ v, start, tolerance=tolerance, max_steps=max_steps
    )


def random_symmetric(size, seed=0):
    matrix = np.random.default_rng(seed).normal(size=(size, size))
    return (matrix + matrix.T) / 2


@pytest.mark.parametrize("size", [1, 2, 5, 8, 60])
def test_the_largest_eigenvalue_is_that_of_a_dense_decomposition(size):
    matrix = random_symmetric(size)
    found = find(matrix)
    exact = np.linalg.eigvalsh(matrix)
    assert found.converged
    np.testing.assert_allclose(found.values[0], exact[-1], rtol=1e-12)


def test_the_algebraically_largest_wins_even_if_all_are_negative():
    found = find(-np.diag(np.arange(1.0, 31.0)))
    np.testing.assert_allclose(found.values[0], -1, rtol=1e-12)


def test_clustered_eigenvalues_converge_in_few_steps():
    found = find(np.diag(1 - np.arange(300) / 30_000))
    assert found.converged
    assert found.iterations < 100
    np.testing.assert_allclose(found.values[0], 1, rtol=1e-10)


def test_the_vector_is_an_eigenvector_up_to_the_residual():
    matrix = random_symmetric(40, seed=3)
    found = find(matrix)
    vector = np.asarray(found.vectors[:, 0])
    np.testing.assert_allclose(np.linalg.norm(vector), 1, rtol=1e-12)
    gap = np.linalg.norm(matrix @ vector - float(found.values[0]) * vector)
    np.testing.assert_allclose(found.residual, gap, atol=1e-12)
    assert gap <= 1e-8 * np.linalg.norm(matrix, 2)


def test_the_zero_operator_has_the_value_zero():
    found = find(np.zeros((20, 20)))
    assert found.converged
    assert found.values[0] == 0


def test_single_precision_converges_to_its_own_accuracy():
    matrix = random_symmetric(60)
    found = find(matrix, dtype=np.float32)
    assert found.converged
    assert found.values.dtype == np.float32
    np.testing.assert_allclose(
        found.values[0], np.linalg.eigvalsh(matrix)[-1], rtol=1e-5
    )


def test_too_few_steps_are_reported():
    found = find(random_symmetric(100), max_steps=3)
    assert not found.converged
    assert found.iterations == 3
