"""Layers without context: perceptrons and norms, at the origin as well."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from map_zoo import QUERIES, cloud_of, evaluate
from meanformer.attention import (
    LayerNorm,
    MultiHead,
    Perceptron,
    PointMap,
    RMSNorm,
    Softmax,
    UnitNorm,
    push_forward,
)
from meanformer.errors import InvalidInput
from meanformer.measures import Gaussian, TokenCloud

NORMS = [LayerNorm, RMSNorm, UnitNorm]
W_IN = np.array([[0.3, -0.4], [0.8, 0.1], [0.2, 0.5]])
W_OUT = np.array([[1.0, -1.0, 0.5], [0.2, 0.7, -0.3]])
B_IN, B_OUT = np.array([0.1, -0.2, 0.3]), np.array([0.5, -0.5])


def test_the_affine_perceptron_multiplies_and_shifts_and_keeps_gaussians():
    matrix, shift = W_IN, B_IN
    gamma, x = Perceptron.affine(matrix, shift), jnp.array([[0.3, -0.7], [2.0, 1.0]])
    context = TokenCloud(x)
    np.testing.assert_allclose(
        gamma(context, x), x @ matrix.T + shift[None], rtol=1e-14
    )
    linear = Perceptron.affine(matrix)
    np.testing.assert_allclose(linear(context, x), x @ matrix.T, rtol=1e-14)
    mean, covariance = np.array([1.0, -2.0]), np.array([[2.0, 0.5], [0.5, 1.0]])
    image = push_forward(gamma, Gaussian(mean, covariance))
    np.testing.assert_allclose(image.mean(), matrix @ mean + shift, rtol=1e-12)
    expected = matrix @ covariance @ matrix.T
    np.testing.assert_allclose(image.covariance(), expected, rtol=1e-12)
    with pytest.raises(
        InvalidInput, match=r"shift has shape \(2,\); it must be \(3,\)"
    ):
        Perceptron.affine(matrix, shift[:2])


@pytest.mark.parametrize(
    ("activation", "function"),
    [(jax.nn.relu, lambda z: np.maximum(z, 0)), (jnp.tanh, np.tanh)],
)
def test_a_perceptron_is_two_affine_maps_around_an_activation(activation, function):
    perceptron = Perceptron(W_IN, B_IN, W_OUT, B_OUT, activation=activation)
    expected = function(QUERIES @ W_IN.T + B_IN) @ W_OUT.T + B_OUT
    np.testing.assert_allclose(evaluate(perceptron, cloud_of()), expected, atol=1e-15)


def test_the_outer_bias_of_a_perceptron_is_optional():
    with_zero = Perceptron(W_IN, B_IN, W_OUT, np.zeros(2))
    without = Perceptron(W_IN, B_IN, W_OUT)
    np.testing.assert_array_equal(
        evaluate(with_zero, cloud_of()), evaluate(without, cloud_of())
    )


def test_pointwise_maps_ignore_the_context():
    perceptron = Perceptron(W_IN, B_IN, W_OUT, B_OUT)
    gaussian = Gaussian([5.0, 0.0], np.eye(2))
    values = perceptron(gaussian, jnp.asarray(QUERIES))
    np.testing.assert_array_equal(values, evaluate(perceptron, cloud_of()))


def test_a_point_map_applies_its_function():
    values = evaluate(PointMap(jnp.sin), cloud_of())
    np.testing.assert_allclose(values, np.sin(QUERIES), atol=1e-15)


def normalised(kind, x, epsilon):
    if kind is LayerNorm:
        x = x - x.mean(axis=1, keepdims=True)
    total = (x**2).sum(axis=1) if kind is UnitNorm else (x**2).mean(axis=1)
    return x / np.sqrt(total + epsilon)[:, None]


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_divides_scales_and_shifts(kind):
    scale, shift = np.array([2.0, -1.0]), np.array([0.3, 0.4])
    values = evaluate(kind(scale, shift, epsilon=1e-3), cloud_of())
    expected = scale * normalised(kind, QUERIES, 1e-3) + shift
    np.testing.assert_allclose(values, expected, atol=1e-15)


@pytest.mark.parametrize("kind", NORMS)
def test_one_number_scales_all_coordinates(kind):
    vector = kind(np.full(2, 2.0), np.full(2, 0.5))
    number = kind(2.0, 0.5)
    np.testing.assert_array_equal(
        evaluate(vector, cloud_of()), evaluate(number, cloud_of())
    )


def test_norms_have_the_length_of_their_name():
    large = 1e3 * QUERIES
    unit, rms = (evaluate(kind(), cloud_of(), large) for kind in (UnitNorm, RMSNorm))
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, rtol=1e-10)
    np.testing.assert_allclose(np.linalg.norm(rms, axis=1), np.sqrt(2), rtol=1e-10)


def test_a_layer_norm_ignores_a_common_offset():
    values = evaluate(LayerNorm(), cloud_of(), QUERIES + 1e3)
    np.testing.assert_allclose(values, evaluate(LayerNorm(), cloud_of()), atol=1e-10)


@pytest.mark.parametrize("kind", NORMS)
def test_the_origin_goes_to_the_shift_with_a_finite_derivative(kind):
    norm, origin, cloud = kind(1.0, 0.25), jnp.zeros((1, 2)), cloud_of()
    np.testing.assert_array_equal(norm(cloud, origin), 0.25)
    jacobian = jax.jacrev(lambda x: norm(cloud, x))(origin)[0, :, 0]
    projection = np.eye(2) - 0.5 if kind is LayerNorm else np.eye(2)
    np.testing.assert_allclose(jacobian, projection / np.sqrt(1e-5), rtol=1e-5)


@pytest.mark.parametrize("kind", NORMS)
def test_norms_of_integer_points_are_not_truncated(kind):
    integers = np.array([[1, 2], [0, -3]])
    values = kind().apply(jnp.asarray(integers, float))
    np.testing.assert_allclose(values, normalised(kind, integers, 1e-5), atol=1e-15)


@pytest.mark.parametrize("kind", NORMS)
def test_norms_of_large_points_do_not_overflow(kind):
    point = np.array([[300.0, -300.0, 200.0, 100.0]])
    norm = kind()
    expected = norm.apply(jnp.asarray(point))
    half = norm(cloud_of(), jnp.asarray(point, jnp.float16))
    assert half.dtype == jnp.float16
    np.testing.assert_allclose(half.astype(jnp.float64), expected, rtol=1e-3)
    for size in (1e20, 1e36):
        single = norm(cloud_of(), jnp.asarray(size * point, jnp.float32))
        np.testing.assert_allclose(single, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", NORMS)
def test_the_derivative_of_a_norm_does_not_know_how_it_was_scaled(kind):
    point, direction = np.array([5.0, -300.0, 200.0]), np.array([0.3, 2.0, -1.0])

    def value(amount):
        return kind()(cloud_of(), jnp.asarray(point + amount * direction)[None])[0]

    expected = (value(1e-3) - value(-1e-3)) / 2e-3
    np.testing.assert_allclose(jax.jacfwd(value)(0.0), expected, rtol=1e-7)


def test_results_have_the_type_of_the_points():
    matrices = [[1.0, 2.0], [0.5, 1.0]]
    point = jnp.ones((1, 2), jnp.float32)
    perceptron = Perceptron(matrices, [0.0, 1.0], matrices)
    single = jnp.eye(2, dtype=jnp.float32)
    heads = MultiHead([Softmax(single, single, single)], [matrices])
    with jax.numpy_dtype_promotion("standard"):
        assert perceptron(TokenCloud(point), point).dtype == jnp.float32
        assert heads(TokenCloud(point), point).dtype == jnp.float32
