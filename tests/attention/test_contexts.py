"""Every measure as context of every variant: closed forms against quadrature."""

import jax.numpy as jnp
import numpy as np
import pytest

import reference as ref
from map_zoo import MASSES, QUERIES, TOKENS, cloud_of, evaluate
from meanformer.attention import (
    L2,
    Hardmax,
    Linear,
    Sigmoid,
    Sinkhorn,
    Softmax,
    Unnormalised,
)
from meanformer.errors import Unsupported
from meanformer.measures import (
    Gaussian,
    Mixture,
    TokenCloud,
    UniformBox,
    UniformSphere,
    mix,
    pad,
)
from reference import reference_attention

MEAN, SPREAD = np.array([0.3, -0.4]), np.array([[1.0, 0.3], [0.3, 0.6]])
OTHER_MEAN, OTHER_SPREAD = np.array([-0.5, 0.2]), np.array([[0.4, -0.1], [-0.1, 0.2]])
BIASES = {"query_bias": np.array([0.4, -0.7]), "value_bias": np.array([0.2, 0.3])}


def hermite_cloud(mean, spread, order):
    """Tensor Gauss-Hermite nodes of a Gaussian in the plane, by numpy alone."""
    nodes, masses = np.polynomial.hermite_e.hermegauss(order)
    masses = masses / masses.sum()
    grid = np.stack(np.meshgrid(nodes, nodes), axis=-1).reshape(-1, 2)
    values, vectors = np.linalg.eigh(spread)
    root = vectors * np.sqrt(np.maximum(values, 0))
    return TokenCloud(mean + grid @ root.T, np.outer(masses, masses).ravel())


def values_of(attention, context):
    return np.asarray(attention(context, jnp.asarray(QUERIES)))


@pytest.mark.parametrize("kind", [Softmax, L2, Linear, Unnormalised])
@pytest.mark.parametrize("options", [{}, BIASES], ids=["plain", "biased"])
def test_attention_to_a_gaussian_is_attention_to_its_quadrature(kind, options):
    attention = reference_attention(kind, **options)
    exact = values_of(attention, Gaussian(MEAN, SPREAD))
    cloud = hermite_cloud(MEAN, SPREAD, 30)
    np.testing.assert_allclose(exact, values_of(attention, cloud), atol=1e-10)


@pytest.mark.parametrize("matrices", ["general", "tied", "half"])
def test_sinkhorn_attention_to_a_gaussian_is_that_to_its_quadrature(matrices):
    options = {"half": matrices == "half", **BIASES}
    query = ref.KEY if matrices == "tied" else ref.QUERY
    attention = Sinkhorn(query, ref.KEY, ref.VALUE, beta=0.5, **options)
    exact = values_of(attention, Gaussian(MEAN, SPREAD))
    cloud = hermite_cloud(MEAN, SPREAD, 14)
    np.testing.assert_allclose(exact, values_of(attention, cloud), atol=1e-8)


def test_sinkhorn_attention_to_a_gaussian_keeps_the_mean():
    attention = reference_attention(Sinkhorn)
    gaussian = Gaussian(MEAN, SPREAD)
    at_mean = attention(gaussian, jnp.asarray(MEAN)[None])
    np.testing.assert_allclose(at_mean[0], ref.VALUE @ MEAN, atol=1e-14)


def test_softmax_attention_to_a_gaussian_is_affine():
    attention = reference_attention(beta=1.7)
    slope = 1.7 * ref.VALUE @ SPREAD @ ref.SCORE
    expected = ref.VALUE @ MEAN + QUERIES @ slope.T
    values = values_of(attention, Gaussian(MEAN, SPREAD))
    np.testing.assert_allclose(values, expected, atol=1e-14)


@pytest.mark.parametrize("kind", [Softmax, L2, Sinkhorn, Linear, Unnormalised])
def test_a_gaussian_on_a_line_is_the_quadrature_of_that_line(kind):
    direction = np.array([0.8, -0.6])
    attention = reference_attention(kind, beta=0.5)
    line = np.outer(direction, direction)
    exact = values_of(attention, Gaussian(MEAN, line))
    # Only the nodes along the line differ; the others repeat them.
    cloud = hermite_cloud(MEAN, line, 14)
    np.testing.assert_allclose(exact, values_of(attention, cloud), atol=1e-8)


@pytest.mark.parametrize("kind", [Softmax, L2, Sinkhorn, Linear, Unnormalised])
def test_a_gaussian_without_spread_is_one_token(kind):
    attention = reference_attention(kind, **BIASES)
    values = values_of(attention, Gaussian(MEAN, np.zeros((2, 2))))
    token = values_of(attention, TokenCloud(MEAN[None]))
    np.testing.assert_allclose(values, token, atol=1e-14)


@pytest.mark.parametrize("beta", [1e6, 1e12])
def test_steep_kernels_on_a_singular_gaussian_stay_finite(beta):
    gaussian = Gaussian(MEAN, np.outer([0.8, -0.6], [0.8, -0.6]))
    for kind in (L2, Sinkhorn):
        values = values_of(reference_attention(kind, beta=beta), gaussian)
        assert np.isfinite(values).all()


def test_steep_l2_on_a_gaussian_finds_the_nearest_key():
    # With tied invertible keys the nearest point of the plane is the query itself.
    attention = L2(ref.KEY, ref.KEY, ref.VALUE, beta=1e8)
    values = values_of(attention, Gaussian(MEAN, SPREAD))
    np.testing.assert_allclose(values, QUERIES @ ref.VALUE.T, atol=1e-6)


def test_a_repulsive_l2_kernel_beyond_the_gaussian_is_refused():
    gaussian = Gaussian(MEAN, SPREAD)
    for beta in (-2.0, -50.0):
        attention = reference_attention(L2, beta=beta, allow_negative_beta=True)
        with pytest.raises(Unsupported, match="not integrable against this Gaussian"):
            values_of(attention, gaussian)


def test_a_weakly_repulsive_l2_kernel_is_that_of_the_quadrature():
    attention = reference_attention(L2, beta=-0.1, allow_negative_beta=True)
    exact = values_of(attention, Gaussian(MEAN, SPREAD))
    cloud = hermite_cloud(MEAN, SPREAD, 60)
    np.testing.assert_allclose(exact, values_of(attention, cloud), atol=1e-9)


# Mixtures


def gaussian_mixture():
    parts = [Gaussian(MEAN, SPREAD), Gaussian(OTHER_MEAN, OTHER_SPREAD)]
    return Mixture([0.3, 0.7], parts)


def mixture_cloud(order=30):
    parts = [hermite_cloud(MEAN, SPREAD, order)]
    parts.append(hermite_cloud(OTHER_MEAN, OTHER_SPREAD, order))
    return mix(parts, [0.3, 0.7])


@pytest.mark.parametrize("kind", [Softmax, L2, Linear, Unnormalised])
def test_attention_to_a_mixture_of_gaussians_is_that_to_its_quadrature(kind):
    attention = reference_attention(kind, **BIASES)
    exact = values_of(attention, gaussian_mixture())
    np.testing.assert_allclose(exact, values_of(attention, mixture_cloud()), atol=1e-10)


@pytest.mark.parametrize("kind", [Softmax, L2, Linear, Unnormalised, Sigmoid])
def test_attention_to_a_mixture_of_clouds_is_that_to_their_union(kind):
    attention = reference_attention(kind, **BIASES)
    first, second = TokenCloud(ref.POINTS, ref.WEIGHTS), cloud_of(places=None)
    first = pad(first, 5)
    together = mix([first, second], [0.25, 0.75])
    apart = Mixture([0.25, 0.75], [first, second])
    np.testing.assert_allclose(
        values_of(attention, apart), values_of(attention, together), atol=1e-14
    )


@pytest.mark.parametrize("kind", [Softmax, L2, Linear, Unnormalised])
def test_a_component_of_weight_zero_is_absent(kind):
    attention = reference_attention(kind)
    far = Gaussian([1e8, -1e8], 1e4 * np.eye(2))
    mixture = Mixture([1.0, 0.0], [Gaussian(MEAN, SPREAD), far])
    alone = values_of(attention, Gaussian(MEAN, SPREAD))
    np.testing.assert_allclose(values_of(attention, mixture), alone, atol=1e-14)


def test_a_mixture_of_kinds_of_measures_is_a_context():
    cloud = cloud_of(places=None)
    mixture = Mixture([0.5, 0.5], [cloud, Gaussian(MEAN, SPREAD)])
    union = mix([cloud, hermite_cloud(MEAN, SPREAD, 30)])
    for kind in (Softmax, L2):
        attention = reference_attention(kind)
        np.testing.assert_allclose(
            values_of(attention, mixture), values_of(attention, union), atol=1e-10
        )


# Uniform laws


LOW, HIGH = np.array([-1.0, 0.2]), np.array([0.5, 1.4])
TURN = np.array([[0.6, -0.8], [0.8, 0.6]])


def legendre_cloud(order=24):
    nodes, masses = np.polynomial.legendre.leggauss(order)
    grid = np.stack(np.meshgrid(nodes, nodes), axis=-1).reshape(-1, 2)
    points = (LOW + HIGH) / 2 + grid * (HIGH - LOW) / 2
    return TokenCloud(points, np.outer(masses, masses).ravel() / 4)


def circle_cloud(count=576):
    angles = 2 * np.pi * np.arange(count) / count
    return TokenCloud(np.stack([np.cos(angles), np.sin(angles)], axis=1))


@pytest.mark.parametrize("kind", [Softmax, L2, Linear, Unnormalised])
def test_attention_to_a_box_is_attention_to_its_quadrature(kind):
    # The box keeps its shape under L2 if the keys do not mix the axes.
    attention = kind(ref.QUERY, np.diag([0.7, -1.2]), ref.VALUE, **BIASES)
    exact = values_of(attention, UniformBox(LOW, HIGH))
    np.testing.assert_allclose(
        exact, values_of(attention, legendre_cloud()), atol=1e-12
    )


@pytest.mark.parametrize("kind", [Softmax, L2, Linear, Unnormalised, Sinkhorn])
def test_attention_to_a_circle_is_attention_to_its_quadrature(kind):
    # The circle keeps its shape if query and key are scaled rotations.
    attention = kind(0.7 * TURN, 1.2 * TURN.T, ref.VALUE, value_bias=[0.2, 0.3])
    exact = values_of(attention, UniformSphere(2))
    if kind is Sinkhorn:
        # Constant potentials: softmax at twice the temperature.
        attention = Softmax(
            attention.query, attention.key, ref.VALUE, beta=2.0, value_bias=[0.2, 0.3]
        )
    np.testing.assert_allclose(exact, values_of(attention, circle_cloud()), atol=1e-12)


def test_hardmax_finds_the_extreme_points_of_box_and_circle():
    attention = reference_attention(Hardmax)
    tilts = QUERIES @ ref.SCORE.T
    corners = np.where(tilts > 0, HIGH, LOW)
    directions = tilts / np.linalg.norm(tilts, axis=1, keepdims=True)
    for context, expected in (
        (UniformBox(LOW, HIGH), corners),
        (UniformSphere(2), directions),
    ):
        values = values_of(attention, context)
        np.testing.assert_allclose(values, expected @ ref.VALUE.T, atol=1e-14)


# Refusals


REFUSED = {
    "sigmoid on gaussian": (Sigmoid, Gaussian(MEAN, SPREAD), "sigmoid attention"),
    "hardmax on gaussian": (Hardmax, Gaussian(MEAN, SPREAD), "support is unbounded"),
    "sinkhorn on mixture": (Sinkhorn, gaussian_mixture(), "Sinkhorn attention"),
    "hardmax on mixture": (Hardmax, gaussian_mixture(), "hardmax attention"),
    "sigmoid on mixture": (Sigmoid, gaussian_mixture(), "sigmoid attention"),
    "sigmoid on circle": (Sigmoid, UniformSphere(2), "sigmoid attention"),
    "sinkhorn on box": (Sinkhorn, UniformBox(LOW, HIGH), "Sinkhorn attention"),
    "l2 on circle": (L2, UniformSphere(2), "needs K.T K to be a multiple of I"),
    "l2 on box": (L2, UniformBox(LOW, HIGH), "needs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_contexts_without_closed_form_are_refused_with_advice(name):
    kind, context, message = REFUSED[name]
    with pytest.raises(Unsupported, match=message) as raised:
        values_of(reference_attention(kind), context)
    assert "use " in str(raised.value)


def test_feature_maps_need_a_cloud():
    attention = reference_attention(Linear, feature_map=jnp.exp)
    with pytest.raises(Unsupported, match="linear attention with a feature map"):
        values_of(attention, Gaussian(MEAN, SPREAD))


@pytest.mark.parametrize("options", [{"half_steps": 3}, {"half_steps": 4}])
def test_half_steps_need_a_cloud(options):
    end_on = "row" if options["half_steps"] % 2 else "column"
    attention = reference_attention(Sinkhorn, end_on=end_on, **options)
    with pytest.raises(Unsupported, match="only the limit has a closed form"):
        values_of(attention, Gaussian(MEAN, SPREAD))


# Weighted clouds that are answers themselves


def test_every_kind_sees_the_density_of_a_tilted_cloud():
    cloud = cloud_of(places=None)
    _, tilted = cloud.quadratic_tilt(jnp.asarray(SPREAD))
    factors = np.exp(-0.5 * np.sum(TOKENS @ SPREAD * TOKENS, axis=1))
    weighted = TokenCloud(TOKENS, MASSES * factors, normalize=True)
    for kind in (Softmax, Linear, Unnormalised, Sigmoid, Hardmax):
        attention = reference_attention(kind, **BIASES)
        np.testing.assert_allclose(
            values_of(attention, tilted), evaluate(attention, weighted), atol=1e-14
        )
