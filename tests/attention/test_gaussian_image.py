"""Gaussians pushed forward by maps that are affine on them."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from meanformer.attention import (
    L2,
    Hardmax,
    Linear,
    Masked,
    MultiHead,
    Perceptron,
    Residual,
    Sigmoid,
    Sinkhorn,
    Softmax,
    Sum,
    UnitNorm,
    Unnormalised,
    compose,
    push_forward,
)
from meanformer.errors import InvalidInput, Unsupported
from meanformer.measures import Gaussian, TokenCloud, quadrature, transport_map
from reference import reference_attention

GAUSSIAN = Gaussian([0.3, -0.4], [[0.5, 0.1], [0.1, 0.3]])
SOFTMAX, DISTANCE = reference_attention(Softmax), reference_attention(L2)
AFFINE = {
    "softmax": SOFTMAX,
    "l2": DISTANCE,
    "linear": reference_attention(Linear),
    "residual": Residual(SOFTMAX, 0.5),
    "sum": Sum([SOFTMAX, DISTANCE]),
    "heads": MultiHead([SOFTMAX, DISTANCE], [np.eye(2), 2 * np.eye(2)]),
    "network": compose(DISTANCE, Residual(SOFTMAX), Residual(DISTANCE)),
}


@pytest.mark.parametrize("name", AFFINE)
def test_the_image_of_a_gaussian_has_the_moments_of_the_image_of_its_nodes(name):
    image = push_forward(AFFINE[name], GAUSSIAN)
    nodes = push_forward(AFFINE[name], quadrature(GAUSSIAN, 16))
    assert isinstance(image, Gaussian)
    np.testing.assert_allclose(image.mean(), nodes.mean(), atol=1e-12)
    np.testing.assert_allclose(image.covariance(), nodes.covariance(), atol=1e-12)


@pytest.mark.slow
def test_sinkhorn_attention_keeps_a_gaussian_one():
    attention = reference_attention(Sinkhorn)
    image = push_forward(attention, GAUSSIAN)
    nodes = push_forward(attention, quadrature(GAUSSIAN, 12))
    np.testing.assert_allclose(image.mean(), nodes.mean(), atol=1e-10)
    np.testing.assert_allclose(image.covariance(), nodes.covariance(), atol=1e-10)


def test_compositions_carry_a_gaussian_context_along():
    x = jnp.array([[0.5, 1.0], [-1.0, 0.2]])
    network = compose(DISTANCE, Residual(SOFTMAX))
    moved = push_forward(Residual(SOFTMAX), GAUSSIAN)
    expected = DISTANCE(moved, Residual(SOFTMAX)(GAUSSIAN, x))
    np.testing.assert_allclose(network(GAUSSIAN, x), expected, atol=1e-14)


def test_values_in_another_dimension_give_a_gaussian_there():
    tall = Softmax(np.eye(2), np.eye(2), np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 2.0]]))
    image = push_forward(tall, GAUSSIAN)
    nodes = push_forward(tall, quadrature(GAUSSIAN, 16))
    assert image.dimension == 3
    np.testing.assert_allclose(image.covariance(), nodes.covariance(), atol=1e-12)


def test_the_optimal_map_pushes_one_gaussian_to_the_other():
    other = Gaussian([1.0, 2.0], [[1.0, -0.3], [-0.3, 0.4]])
    image = push_forward(transport_map(GAUSSIAN, other), GAUSSIAN)
    np.testing.assert_allclose(image.mean(), other.mean(), atol=1e-13)
    np.testing.assert_allclose(image.covariance(), other.covariance(), atol=1e-13)


def test_compiled_images_are_those_of_the_plain_call():
    image = push_forward(SOFTMAX, GAUSSIAN)
    compiled = eqx.filter_jit(push_forward)(SOFTMAX, GAUSSIAN)
    np.testing.assert_allclose(compiled.mean(), image.mean(), atol=1e-14)
    np.testing.assert_allclose(compiled.covariance(), image.covariance(), atol=1e-14)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_the_image_has_the_precision_of_the_gaussian(dtype):
    gaussian = Gaussian(
        GAUSSIAN.mean().astype(dtype), GAUSSIAN.covariance().astype(dtype)
    )
    parameters = (parameter.astype(dtype) for parameter in (SOFTMAX.query, SOFTMAX.key))
    attention = Softmax(*parameters, SOFTMAX.value.astype(dtype))
    image = push_forward(attention, gaussian)
    assert image.mean().dtype == image.covariance().dtype == dtype
    expected = push_forward(SOFTMAX, GAUSSIAN).covariance()
    resolution = 10 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(image.covariance(), expected, atol=resolution)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_bends_a_gaussian_is_refused(compiled):
    perceptron = Perceptron(np.eye(2), np.full(2, 50.0), np.eye(2))
    image = eqx.filter_jit(push_forward) if compiled else push_forward
    for gamma in (UnitNorm(), perceptron, compose(perceptron, SOFTMAX)):
        with pytest.raises(Unsupported, match="its derivative changes with the query"):
            image(gamma, GAUSSIAN)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Unnormalised, "mass is lost at infinity"),
        (Sigmoid, "stays bounded"),
        (Hardmax, "scores highest"),
        (lambda *matrices: Masked(Softmax(*matrices)), "mixture of Gaussians"),
    ],
)
def test_kinds_that_bend_gaussians_say_why(kind, reason):
    bending = reference_attention(kind)
    for gamma in (bending, Sum([SOFTMAX, bending]), Residual(bending)):
        with pytest.raises(
            Unsupported, match=f"is not affine on a Gaussian: .*{reason}"
        ):
            push_forward(gamma, GAUSSIAN)


def test_behind_a_mask_linear_attention_keeps_the_gaussian_of_each_position():
    masked = Masked(reference_attention(Linear))
    with pytest.raises(
        Unsupported, match="linear attention a Gaussian at each position"
    ):
        push_forward(masked, GAUSSIAN)
    later = Gaussian([0.5, 0.2], [[0.4, -0.1], [-0.1, 0.9]])
    nodes = [quadrature(mu, 3) for mu in (GAUSSIAN, later)]
    points = jnp.concatenate([one.points for one in nodes])
    weights = jnp.concatenate([0.3 * nodes[0].weights, 0.7 * nodes[1].weights])
    places = jnp.repeat(jnp.array([0.4, 0.8]), len(nodes[0].points))
    found = masked(
        TokenCloud(points, weights, positions=places), points, positions=places
    )
    linear = masked.attention
    seen = 0.3 * GAUSSIAN.second_moment()
    for place, moment in [(0.4, seen), (0.8, seen + 0.7 * later.second_moment())]:
        slope = linear.temperature * linear.value @ moment @ linear.score
        here = places == place
        np.testing.assert_allclose(found[here], points[here] @ slope.T, atol=1e-14)


def test_a_perceptron_without_activation_is_affine():
    perceptron = Perceptron(
        SOFTMAX.query, [0.1, 0.2], SOFTMAX.value, [1.0, 0.0], activation=lambda x: 2 * x
    )
    image = push_forward(Sum([SOFTMAX, perceptron]), GAUSSIAN)
    nodes = push_forward(Sum([SOFTMAX, perceptron]), quadrature(GAUSSIAN, 16))
    np.testing.assert_allclose(image.mean(), nodes.mean(), atol=1e-12)
    np.testing.assert_allclose(image.covariance(), nodes.covariance(), atol=1e-12)


def test_an_image_that_is_not_finite_is_refused():
    cloud = TokenCloud([[1.0, 2.0]])
    with pytest.raises(InvalidInput, match="the image of the points holds nan"):
        push_forward(lambda points: points * jnp.nan, cloud)
