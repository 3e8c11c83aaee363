"""The distance that keeps the position of every token."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from meanformer.errors import InvalidInput
from meanformer.measures import TokenCloud, conditional_wasserstein, wasserstein

X = jnp.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.5], [0.5, -1.0]])
Y = jnp.array([[0.2, 0.3], [1.5, -0.5], [-0.7, -0.7], [0.0, 2.0]])
W = jnp.array([0.4, 0.3, 0.2, 0.1])
PLACES = jnp.array([0.25, 0.5, 0.75, 1.0])
TIES = jnp.array([0.25, 0.5, 0.5, 1.0])


@pytest.mark.parametrize("order", [1, 2, 3])
def test_distinct_positions_match_token_by_token(order):
    mu, nu = TokenCloud(X, W, positions=PLACES), TokenCloud(Y, W, positions=PLACES)
    moves = np.linalg.norm(X - Y, axis=1)
    expected = (W @ moves**order) ** (1 / order)
    distance = conditional_wasserstein(mu, nu, order=order)
    np.testing.assert_allclose(distance, expected, rtol=1e-14)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_equal_positions_give_the_plain_distance(order):
    place = jnp.full(4, 0.5)
    mu, nu = TokenCloud(X, W, positions=place), TokenCloud(Y, positions=place)
    distance = conditional_wasserstein(mu, nu, order=order)
    np.testing.assert_allclose(distance, wasserstein(mu, nu, order=order), rtol=1e-14)


@pytest.mark.parametrize("order", [1, 2])
def test_ties_are_averages_of_the_distances_at_each_position(order):
    masses = jnp.array([0.4, 0.1, 0.4, 0.1])
    mu, nu = TokenCloud(X, W, positions=TIES), TokenCloud(Y, masses, positions=TIES)
    middle = wasserstein(
        TokenCloud(X[1:3], W[1:3], normalize=True),
        TokenCloud(Y[1:3], masses[1:3], normalize=True),
        order=order,
    )
    ends = np.linalg.norm(X - Y, axis=1)[[0, 3]] ** order @ np.array([0.4, 0.1])
    expected = (ends + 0.5 * middle**order) ** (1 / order)
    distance = conditional_wasserstein(mu, nu, order=order)
    np.testing.assert_allclose(distance, expected, rtol=1e-13)


def test_it_does_not_depend_on_the_order_of_tokens_and_exceeds_the_plain_distance():
    mu, nu = TokenCloud(X, positions=TIES), TokenCloud(Y, positions=TIES)
    order = jnp.array([3, 1, 0, 2])
    shuffled = TokenCloud(Y[order], positions=TIES[order])
    distance = conditional_wasserstein(mu, nu)
    np.testing.assert_allclose(
        conditional_wasserstein(mu, shuffled), distance, rtol=1e-14
    )
    assert distance > wasserstein(mu, nu)


def test_tokens_on_the_line_are_grouped_too():
    mu, nu = (TokenCloud(points[:, :1], positions=TIES) for points in (X, Y))
    ends = (X[:, 0] - Y[:, 0])[np.array([0, 3])] ** 2
    middle = (jnp.sort(X[1:3, 0]) - jnp.sort(Y[1:3, 0])) ** 2
    expected = jnp.sqrt((ends.sum() + middle.sum()) / 4)
    np.testing.assert_allclose(conditional_wasserstein(mu, nu), expected, rtol=1e-14)


def test_absent_tokens_may_stand_anywhere():
    mu, nu = TokenCloud(X, W, positions=PLACES), TokenCloud(Y, W, positions=PLACES)
    padded = TokenCloud(
        jnp.concatenate([X, jnp.full((1, 2), 1e6)]),
        jnp.concatenate([W, jnp.zeros(1)]),
        positions=jnp.concatenate([PLACES, jnp.array([0.1])]),
    )
    distance, gradient = jax.value_and_grad(
        lambda points: conditional_wasserstein(padded.moved(points), nu)
    )(padded.points)
    np.testing.assert_allclose(distance, conditional_wasserstein(mu, nu), rtol=1e-14)
    assert (gradient[4] == 0).all()


def test_compiled_gradients_agree_with_finite_differences(key):
    nu = TokenCloud(Y, W, positions=TIES)

    def distance(points):
        return conditional_wasserstein(TokenCloud(points, W, positions=TIES), nu)

    direction = jr.normal(key, X.shape)
    slope = jnp.vdot(jax.jit(jax.grad(distance))(X), direction)
    ahead, behind = (distance(X + s * 1e-6 * direction) for s in (1, -1))
    np.testing.assert_allclose(slope, (ahead - behind) / 2e-6, rtol=1e-7)


def test_equal_clouds_have_distance_zero_and_gradient_zero():
    mu = TokenCloud(X, W, positions=TIES)
    value, gradient = jax.value_and_grad(
        lambda points: conditional_wasserstein(mu.moved(points), mu)
    )(X)
    assert value == 0
    assert (gradient == 0).all()


def test_different_position_marginals_are_refused_as_infinitely_far():
    mu = TokenCloud(X, W, positions=PLACES)
    with pytest.raises(
        InvalidInput, match="at position 0.25 mu has mass 0.4 and nu 0.25"
    ):
        conditional_wasserstein(mu, TokenCloud(Y, positions=PLACES))
    with pytest.raises(InvalidInput, match="infinite"):
        conditional_wasserstein(mu, TokenCloud(Y, W, positions=PLACES / 2))


def test_clouds_without_positions_are_refused():
    mu = TokenCloud(X, positions=PLACES)
    with pytest.raises(InvalidInput, match="nu has no positions"):
        conditional_wasserstein(mu, TokenCloud(Y))
