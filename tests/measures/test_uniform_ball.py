"""The uniform ball: closed forms, moments, samples, quadrature, refusals."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.integrate
import scipy.special

from meanformer.attention import L2, Hardmax, Linear, Softmax
from meanformer.errors import InvalidInput, Unsupported
from meanformer.measures import UniformBall, UniformBox, quadrature


def transform_by_integration(size, dimension):
    """Return transform and tilted mean from the density of one coordinate."""

    def integral(power):
        def integrand(s):
            density = (1 - s**2) ** ((dimension - 1) / 2)
            return s**power * np.exp(size * (s - 1)) * density

        return scipy.integrate.quad(integrand, -1, 1, epsabs=1e-13, epsrel=1e-10)[0]

    volume = scipy.special.beta(0.5, (dimension + 1) / 2)
    return size + np.log(integral(0) / volume), integral(1) / integral(0)


@pytest.mark.parametrize("dimension", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [0.01, 1.0, 20.0])
def test_transform_and_mean_are_integrals_over_one_coordinate(dimension, size):
    u = size * jnp.eye(dimension)[:1]
    log_laplace, mean = transform_by_integration(size, dimension)
    ball = UniformBall(dimension)
    # The integration leaves an absolute error of some 1e-13.
    np.testing.assert_allclose(ball.log_laplace(u), [log_laplace], 1e-10, atol=1e-12)
    expected = mean * np.eye(dimension)[:1]
    np.testing.assert_allclose(ball.tilted_mean(u), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dimension", [1, 2, 5])
def test_the_transform_is_a_hypergeometric_function(key, dimension):
    u = jr.normal(key, (4, dimension))
    squares = np.sum(np.asarray(1.5 * u) ** 2, axis=1)
    expected = np.log(scipy.special.hyp0f1(dimension / 2 + 1, squares / 4))
    transform = UniformBall(dimension, 1.5).log_laplace(u)
    np.testing.assert_allclose(transform, expected, rtol=1e-12, atol=1e-15)


def test_the_ball_in_dimension_one_is_an_interval():
    u = jnp.array([[0.0], [0.3], [-2.0], [50.0]])
    ball, box = UniformBall(1, 1.5), UniformBox([-1.5], [1.5])
    np.testing.assert_allclose(ball.log_laplace(u), box.log_laplace(u), atol=1e-13)
    np.testing.assert_allclose(ball.tilted_mean(u), box.tilted_mean(u), atol=1e-13)
    np.testing.assert_allclose(ball.covariance(), box.covariance(), rtol=1e-14)
    np.testing.assert_allclose(ball.diameter(), box.diameter())


@pytest.mark.parametrize("dimension", [1, 4])
def test_the_covariance_is_the_derivative_of_the_tilted_mean_at_zero(dimension):
    ball = UniformBall(dimension, 1.5)

    def tilted_mean(u):
        return ball.tilted_mean(u[None, :])[0]

    origin = jnp.zeros(dimension)
    np.testing.assert_array_equal(tilted_mean(origin), ball.mean())
    derivative = jax.jit(jax.jacfwd(tilted_mean))(origin)
    np.testing.assert_allclose(derivative, ball.covariance(), atol=1e-14)


def test_the_tilted_mean_is_the_gradient_of_the_transform(key):
    ball, u = UniformBall(3, 2.0), jr.normal(key, (5, 3))
    gradient = jax.jit(jax.grad(lambda u: ball.log_laplace(u).sum()))(u)
    np.testing.assert_allclose(gradient, ball.tilted_mean(u), rtol=1e-12)


@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_samples_fill_the_ball_evenly(key, dimension):
    points = np.asarray(UniformBall(dimension, 2.0).sample(20_000, key=key))
    norms = np.linalg.norm(points, axis=1)
    assert norms.max() <= 2
    # The share of the mass within radius r is (r/2)^d.
    shares = np.sort((norms / 2) ** dimension)
    np.testing.assert_allclose(shares, (np.arange(20_000) + 0.5) / 20_000, atol=0.02)
    np.testing.assert_allclose(points.mean(axis=0), 0, atol=0.05)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_quadrature_is_exact_up_to_its_degree(dimension, order):
    cloud = quadrature(UniformBall(dimension), order)
    assert cloud.count <= (order + 1) * order ** (dimension - 1) + 1
    for degree in range(2 * order):
        # E<x, e>^k of the ball is a ratio of gamma functions, for every unit vector e.
        expected = 0.0
        if degree % 2 == 0:
            expected = scipy.special.beta((degree + 1) / 2, (dimension + 1) / 2)
            expected /= scipy.special.beta(0.5, (dimension + 1) / 2)
        axis = np.ones(dimension) / np.sqrt(dimension)
        heights = np.asarray(cloud.points) @ axis
        measured = np.asarray(cloud.weights) @ heights**degree
        np.testing.assert_allclose(measured, expected, atol=1e-14)


@pytest.mark.slow
def test_attention_on_the_ball_is_that_of_its_quadrature(key):
    identity, x = jnp.eye(3), jr.normal(key, (4, 3))
    ball = UniformBall(3, 1.5)
    for kind in (Softmax, Linear):
        attention = kind(identity, identity, identity)
        expected = attention(quadrature(ball, 12), x)
        np.testing.assert_allclose(attention(ball, x), expected, atol=1e-12)
    nearest = Hardmax(identity, identity, identity)(ball, x)
    directions = np.asarray(x) / np.linalg.norm(x, axis=1, keepdims=True)
    np.testing.assert_allclose(nearest, 1.5 * directions, rtol=1e-14)
    with pytest.raises(Unsupported, match="UniformBall has no closed form for L2"):
        L2(identity, identity, identity)(ball, x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_the_ball_keeps_the_precision(key, dtype):
    ball = UniformBall(3, jnp.asarray(1.5, dtype))
    u = jnp.ones((2, 3), dtype)
    assert ball.mean().dtype == ball.covariance().dtype == dtype
    assert ball.sample(3, key=key).dtype == ball.log_laplace(u).dtype == dtype


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2.5,), "dimension is 2.5; it must be an integer, 1 or more"),
        ((0,), "dimension is 0; it must be 1 or more"),
        ((2, -1.0), "radius is -1.0; it must be positive"),
        ((2, np.nan), "radius holds nan"),
    ],
)
def test_a_ball_refuses(untyped, arguments, message):
    with pytest.raises(InvalidInput, match=message):
        UniformBall(*arguments)
