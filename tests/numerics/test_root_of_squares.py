"""The root of one plus a square, through singular values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from meanformer.numerics.matrices import sqrt_one_plus_square


@pytest.mark.parametrize(("dimension", "rank"), [(1, 1), (3, 3), (4, 2), (2, 0)])
def test_the_root_of_one_plus_a_square_agrees_with_scipy(dimension, rank):
    left, right = np.random.default_rng(0).normal(size=(2, dimension, rank))
    matrix = left @ right.T
    expected = scipy.linalg.sqrtm(np.eye(dimension) + matrix @ matrix.T)
    found = sqrt_one_plus_square(jnp.asarray(matrix))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_small_singular_values_do_not_drown_beside_large_ones():
    angle = 0.3
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    found = sqrt_one_plus_square(jnp.asarray(turn * [1e9, 1.0]))
    small = turn[:, 1] @ np.asarray(found) @ turn[:, 1]
    # In the square, 1e18, one plus one would be rounding.
    assert small == pytest.approx(np.sqrt(2), rel=1e-6)


def test_its_derivative_agrees_with_finite_differences():
    matrix, moving = np.random.default_rng(1).normal(size=(2, 3, 3))
    _, found = jax.jvp(
        sqrt_one_plus_square, (jnp.asarray(matrix),), (jnp.asarray(moving),)
    )
    ahead, behind = (
        scipy.linalg.sqrtm(np.eye(3) + moved @ moved.T)
        for moved in (matrix + 1e-5 * moving, matrix - 1e-5 * moving)
    )
    np.testing.assert_allclose(found, (ahead - behind) / 2e-5, atol=1e-8)


def test_its_derivative_is_right_where_singular_values_coincide():
    moving = np.array([[0.3, -1.0], [0.4, 0.2]])
    _, found = jax.jvp(sqrt_one_plus_square, (2 * jnp.eye(2),), (jnp.asarray(moving),))
    # At a multiple c of the identity it is c (X + X^T) / (2 sqrt(1 + c^2)).
    expected = (moving + moving.T) / np.sqrt(5)
    np.testing.assert_allclose(found, expected, atol=1e-14)
