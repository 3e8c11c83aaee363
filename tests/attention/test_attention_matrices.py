"""Attention matrices: they are the maps, in one dense array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference as ref
from map_zoo import MAPS, cast, cloud_of
from meanformer.attention import (
    L2,
    Hardmax,
    Linear,
    Residual,
    Sigmoid,
    Sinkhorn,
    Softmax,
    Unnormalised,
    attention_matrix,
    push_forward,
)
from meanformer.errors import Overflow, Unsupported
from meanformer.measures import TokenCloud
from reference import reference_attention, reference_cloud

MATRIX_MAPS = [
    "softmax",
    "l2",
    "sinkhorn",
    "two half-steps",
    "linear with features",
    "normalised linear",
    "unnormalised",
    "sigmoid",
    "hardmax",
]
NOT_STOCHASTIC = {"two half-steps", "linear with features", "unnormalised", "sigmoid"}


@pytest.mark.parametrize("name", MATRIX_MAPS)
def test_the_attention_matrix_gives_the_values(name):
    gamma, cloud = MAPS[name], cloud_of()
    matrix = np.asarray(attention_matrix(gamma, cloud))
    bias = 0 if gamma.value_bias is None else np.asarray(gamma.value_bias)
    values = np.asarray(cloud.points) @ ref.VALUE.T + bias
    moved = push_forward(gamma, cloud).points
    np.testing.assert_allclose(matrix @ values, moved, atol=1e-13)
    if name not in NOT_STOCHASTIC:
        np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-14)


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32])
def test_the_matrix_and_the_map_agree_on_ties_by_cancellation(dtype):
    eye = jnp.eye(3, dtype=dtype)
    points = jnp.array([[1, 1, 1], [0, 0, 0], [-1, -1, -1], [0.1, 0.2, -0.3]], dtype)
    cloud = TokenCloud(points, jnp.array([0.25, 0.5, 0.25, 0], dtype))
    # The last token is a query alone: it is orthogonal to the first three.
    attention = Hardmax(eye, eye, eye)
    matrix = attention_matrix(attention, cloud)
    np.testing.assert_allclose(matrix[3], [0.25, 0.5, 0.25, 0], rtol=1e-6)
    moved = push_forward(attention, cloud).points
    np.testing.assert_allclose(matrix @ points, moved, atol=1e-7)


def test_a_far_token_does_not_widen_the_ties_of_others():
    eye = np.eye(1)
    cloud = TokenCloud([[1.0], [1.0 + 1e-9], [-1e9]])
    matrix = attention_matrix(Hardmax(eye, eye, eye), cloud)
    np.testing.assert_array_equal(matrix[0], [0, 1, 0])
    moved = push_forward(Hardmax(eye, eye, eye), cloud).points
    np.testing.assert_array_equal(moved[0], cloud.points[1])


@pytest.mark.parametrize("kind", [Softmax, L2, Sinkhorn, Hardmax, Sigmoid])
def test_matrices_in_half_precision_are_computed_in_single(kind):
    half = reference_attention(kind, jnp.bfloat16)
    cloud = TokenCloud(jnp.asarray(ref.POINTS, jnp.bfloat16))
    matrix = attention_matrix(half, cloud)
    assert matrix.dtype == jnp.bfloat16
    single = attention_matrix(cast(half, jnp.float32), cast(cloud, jnp.float32))
    np.testing.assert_allclose(matrix.astype(jnp.float32), single, rtol=2**-8)


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32])
def test_a_matrix_too_large_for_the_type_raises(dtype):
    attention = reference_attention(Unnormalised, dtype, beta=1e4)
    with pytest.raises(Overflow, match="overflows float"):
        attention_matrix(attention, reference_cloud(dtype))


@pytest.mark.parametrize("kind", [Unnormalised, Sigmoid, Softmax, Linear])
def test_an_absent_token_is_absent_from_the_gradient_of_the_matrix(kind):
    def total(points, weights):
        cloud = TokenCloud(points, weights)
        matrix = attention_matrix(reference_attention(kind), cloud)
        return jnp.sum(jnp.sin(matrix[:3, :3]))

    points, weights = jnp.asarray(ref.POINTS[:3]), jnp.array([0.5, 0.3, 0.2])
    expected = jax.grad(total)(points, weights)
    far = jnp.concatenate([points, jnp.array([[1e5, -1e5]])])
    found = jax.grad(total)(far, jnp.append(weights, 0))
    np.testing.assert_allclose(found[:3], expected, atol=1e-13)
    np.testing.assert_array_equal(found[3], 0)


def test_heads_have_one_matrix_each():
    heads, cloud = MAPS["two heads"], cloud_of()
    matrices = attention_matrix(Residual(heads), cloud)
    assert matrices.shape == (2, 5, 5)
    for head, matrix in zip(heads.heads, matrices, strict=True):
        np.testing.assert_array_equal(matrix, attention_matrix(head, cloud))


def test_a_perceptron_has_no_attention_matrix():
    with pytest.raises(Unsupported, match="Perceptron has no attention matrix"):
        attention_matrix(MAPS["perceptron"], cloud_of())
