"""Sliced distances: averages over directions of distances on the line."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from meanformer.measures import TokenCloud, pairwise_wasserstein, wasserstein

X = jnp.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.5], [0.5, -1.0]])
Y = jnp.array([[0.2, 0.3], [1.5, -0.5], [-0.7, -0.7], [0.0, 2.0]])
W = jnp.array([0.4, 0.3, 0.2, 0.1])
V = jnp.array([0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize("order", [1, 2, 3])
def test_given_directions_give_the_mean_of_distances_on_their_lines(order):
    directions = jnp.array([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
    lines = [
        wasserstein(
            TokenCloud((X @ line)[:, None], W),
            TokenCloud((Y @ line)[:, None], V),
            order=order,
        )
        for line in directions
    ]
    expected = np.mean(np.array(lines) ** order) ** (1 / order)
    distance = wasserstein(
        TokenCloud(X, W),
        TokenCloud(Y, V),
        order=order,
        method="sliced",
        directions=5 * directions,  # their length does not matter
    )
    np.testing.assert_allclose(distance, expected, rtol=1e-13)


def test_on_the_line_slicing_changes_nothing(key):
    mu, nu = TokenCloud(X[:, :1], W), TokenCloud(Y[:, :1], V)
    sliced = wasserstein(mu, nu, method="sliced", directions=3, key=key)
    np.testing.assert_allclose(sliced, wasserstein(mu, nu), rtol=1e-13)


def test_a_sliced_distance_is_at_most_the_exact_one(key):
    for k in jr.split(key, 5):
        sliced = wasserstein(
            TokenCloud(X, W), TokenCloud(Y, V), method="sliced", directions=20, key=k
        )
        assert 0 < sliced <= wasserstein(TokenCloud(X, W), TokenCloud(Y, V))


def test_a_sliced_translation_costs_its_length_over_the_root_of_the_dimension(key):
    points = jr.normal(key, (20, 5))
    shift = jnp.array([[1.0, -1.0, 1.0, -1.0, 1.0]])
    distance = wasserstein(
        TokenCloud(points),
        TokenCloud(points + shift),
        method="sliced",
        directions=4000,
        key=key,
    )
    # |shift| / sqrt(5) = 1; the mean of 4000 squares has relative deviation 1/50.
    np.testing.assert_allclose(distance, 1.0, atol=0.03)


@pytest.mark.parametrize("shift", [[1.0, 0.0], [1.0, 1.0], [1.0, -1.0]])
def test_a_sliced_translation_costs_the_same_in_every_direction(shift, key):
    length = np.linalg.norm(shift)
    distance = wasserstein(
        TokenCloud(X, W),
        TokenCloud(X + jnp.array([shift]) / length, W),
        order=4,
        method="sliced",
        directions=20_000,
        key=key,
    )
    # The mean of cos^4 is 3/8; that of 20 000 has relative deviation 0.007.
    np.testing.assert_allclose(distance**4, 3 / 8, rtol=0.03)


def test_the_same_key_gives_the_same_distances_in_a_matrix(key):
    clouds = [TokenCloud(X, W), TokenCloud(Y, V), TokenCloud(X + 1.0)]
    table = pairwise_wasserstein(clouds, method="sliced", directions=10, key=key)
    again = wasserstein(clouds[0], clouds[2], method="sliced", directions=10, key=key)
    np.testing.assert_array_equal(table[0, 2], again)
    for middle in range(3):
        assert (
            table <= table[:, middle][:, None] + table[middle][None, :] + 1e-12
        ).all()
