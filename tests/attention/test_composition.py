"""Maps made from maps: diamond composition, push-forward, sums, heads, residuals."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate

import reference as ref
from map_zoo import MAPS, QUERIES, cloud_of, evaluate
from meanformer.attention import (
    L2,
    AbstractInContextMap,
    Composition,
    Masked,
    MultiHead,
    Perceptron,
    PointMap,
    Residual,
    Sigmoid,
    Softmax,
    Sum,
    compose,
    in_order,
    push_forward,
)
from meanformer.errors import InvalidInput, Unsupported
from meanformer.measures import Gaussian, TokenCloud
from reference import reference_attention, reference_cloud

FIRST, SECOND, THIRD = (
    Residual(reference_attention(Softmax), 0.5),
    MAPS["perceptron"],
    Residual(reference_attention(L2), 0.3),
)
IDENTITY = PointMap(lambda x: x)
TALL = np.array([[0.3, -0.4], [0.8, 0.1], [0.2, 0.5]])


def lift():
    """A perceptron from the plane to space."""
    return Perceptron(np.eye(2), np.zeros(2), TALL)


def test_composition_is_associative():
    left = compose(compose(THIRD, SECOND), FIRST)
    right = compose(THIRD, compose(SECOND, FIRST))
    np.testing.assert_allclose(
        evaluate(left, cloud_of()), evaluate(right, cloud_of()), atol=1e-12
    )
    assert isinstance(left, Composition)
    assert len(left.layers) == len(right.layers) == 3


def test_the_at_sign_composes():
    by_sign, by_name = THIRD @ SECOND @ FIRST, compose(THIRD, SECOND, FIRST)
    np.testing.assert_array_equal(
        evaluate(by_sign, cloud_of()), evaluate(by_name, cloud_of())
    )


@pytest.mark.parametrize("name", ["softmax", "causal softmax", "residual"])
def test_the_identity_is_the_unit_of_composition(name):
    gamma = MAPS[name]
    plain = evaluate(gamma, cloud_of())
    for composed in (compose(IDENTITY, gamma), compose(gamma, IDENTITY)):
        np.testing.assert_array_equal(evaluate(composed, cloud_of()), plain)


def test_a_composition_sees_the_moved_context():
    cloud = cloud_of()
    moved = push_forward(FIRST, cloud)
    expected = THIRD(moved, FIRST(cloud, jnp.asarray(QUERIES)))
    values = evaluate(compose(THIRD, FIRST), cloud)
    np.testing.assert_allclose(values, expected, atol=1e-15)
    wrong = THIRD(cloud, FIRST(cloud, jnp.asarray(QUERIES)))
    assert np.abs(values - wrong).max() > 1e-2


def test_push_forward_of_a_composition_is_the_composition_of_push_forwards():
    cloud = cloud_of()
    at_once = push_forward(compose(THIRD, SECOND, FIRST), cloud)
    in_turn = push_forward(THIRD, push_forward(SECOND, push_forward(FIRST, cloud)))
    np.testing.assert_allclose(at_once.points, in_turn.points, atol=1e-14)
    np.testing.assert_array_equal(at_once.weights, cloud.weights)


def test_a_probe_at_a_token_goes_where_the_token_goes():
    network, cloud = compose(THIRD, SECOND, FIRST), reference_cloud()
    moved = push_forward(network, cloud).points
    probes = network(cloud, cloud.points[1:3])
    np.testing.assert_allclose(probes, moved[1:3], atol=1e-13)


def test_probes_never_join_the_context():
    network, cloud = compose(THIRD, FIRST), reference_cloud()
    far = jnp.array([[5.0, 5.0], [0.3, -0.2], [0.0, 0.0], [-9.0, 2.0]])
    alone = network(cloud, far.at[0].set(0.1))
    np.testing.assert_allclose(network(cloud, far)[1:], alone[1:], atol=1e-15)


class Counting(AbstractInContextMap):
    """A residual attention that counts how often its points are asked for."""

    calls: list = eqx.field(static=True)

    @property
    def input_dimension(self):
        return 2

    @property
    def output_dimension(self):
        return 2

    def __call__(self, mu, x, *, positions=None):
        self.calls.append(len(x))
        return FIRST(mu, x)


def test_the_context_is_carried_along_once_per_layer():
    layers = [Counting([]) for _ in range(4)]
    compose(*layers)(cloud_of(), jnp.asarray(QUERIES))
    calls = [layer.calls for layer in reversed(layers)]
    # The last layer has no context to move.
    assert [sorted(call) for call in calls] == [[4, 5], [4, 5], [4, 5], [4]]


def test_equal_tokens_stay_equal():
    cloud = cloud_of(np.array([[1.0, 2.0], [0.5, 0.1], [1.0, 2.0], [0, 0], [0, 0]]))
    moved = np.asarray(push_forward(compose(THIRD, SECOND, FIRST), cloud).points)
    np.testing.assert_array_equal(moved[0], moved[2])
    np.testing.assert_array_equal(moved[3], moved[4])
    assert len(np.unique(moved, axis=0)) == 3


@pytest.mark.slow
def test_a_transported_density_integrates_to_one():
    cloud = TokenCloud(np.array([[-1.0], [0.4], [1.3]]), [0.5, 0.3, 0.2])
    one = np.ones((1, 1))
    layer = Residual(Softmax(one, one, one, beta=0.8), 0.7)

    def transport(x):
        return layer(cloud, x[None, None])[0, 0]

    grid = jnp.linspace(-9, 9, 4001)
    images, slopes = jax.vmap(jax.value_and_grad(transport))(grid)
    assert (slopes > 0).all()
    density = jnp.exp(-(grid**2) / 2) / jnp.sqrt(2 * jnp.pi) / jnp.abs(slopes)
    total = scipy.integrate.trapezoid(density, images)
    np.testing.assert_allclose(total, 1, atol=1e-6)


def test_push_forward_by_a_plain_function_moves_atoms_and_keeps_weights():
    cloud = reference_cloud(positions=ref.PLACES)
    moved = push_forward(lambda points: 2 * points, cloud)
    np.testing.assert_array_equal(moved.points, 2 * ref.POINTS)
    np.testing.assert_array_equal(moved.weights, cloud.weights)
    np.testing.assert_array_equal(moved.positions, ref.PLACES)


def test_push_forward_into_another_dimension_changes_the_dimension():
    assert push_forward(lift(), reference_cloud()).dimension == 3


def test_push_forward_of_a_gaussian_by_a_sigmoid_is_refused_with_advice():
    gaussian = Gaussian([0.0, 0.0], np.eye(2))
    with pytest.raises(Unsupported, match="such as quadrature"):
        push_forward(reference_attention(Sigmoid), gaussian)


def test_push_forward_supplies_the_places_to_a_mask():
    cloud = in_order(reference_cloud())
    moved = push_forward(Masked(reference_attention()), cloud)
    np.testing.assert_allclose(moved.points, ref.CAUSAL, atol=1e-14)


def test_a_sum_adds_and_the_plus_sign_makes_one():
    terms = reference_attention(), MAPS["perceptron"]
    expected = sum(evaluate(term, cloud_of()) for term in terms)
    np.testing.assert_allclose(evaluate(Sum(terms), cloud_of()), expected, atol=1e-15)
    by_sign = terms[0] + terms[1]
    np.testing.assert_allclose(evaluate(by_sign, cloud_of()), expected, atol=1e-15)


def test_a_residual_adds_its_step_times_the_velocity():
    velocity = evaluate(reference_attention(), cloud_of())
    values = evaluate(Residual(reference_attention(), 0.25), cloud_of())
    np.testing.assert_allclose(values, QUERIES + 0.25 * velocity, atol=1e-15)


def test_heads_of_all_kinds_add_their_outputs():
    heads = [Softmax(ref.QUERY, ref.KEY, TALL), L2(TALL, TALL, TALL)]
    outputs = [TALL.T, -2 * TALL.T]
    values = evaluate(MultiHead(heads, outputs), cloud_of())
    expected = sum(
        evaluate(head, cloud_of()) @ output.T
        for head, output in zip(heads, outputs, strict=True)
    )
    np.testing.assert_allclose(values, expected, atol=1e-15)


def test_dimensions_are_known_before_any_call():
    network = compose(Softmax(np.eye(3), np.eye(3), TALL.T), lift(), FIRST)
    assert (network.input_dimension, network.output_dimension) == (2, 2)
    assert compose(IDENTITY, lift()).output_dimension == 3
    assert compose(lift(), IDENTITY).input_dimension == 2
    assert (
        compose(FIRST, PointMap(lambda x: x[:, :2], returns=2)).input_dimension is None
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: compose(reference_attention(), lift()),
            "layer 1 takes points of dimension 2, but the layer before it returns "
            "dimension 3",
        ),
        (
            lambda: compose(reference_attention(), IDENTITY, lift()),
            "layer 2 takes points of dimension 2",
        ),
        (lambda: Residual(lift()), r"the residual dimensions are \[2, 3\]"),
        (
            lambda: Sum([lift(), reference_attention()]),
            r"output dimensions are \[3, 2\]",
        ),
        (lambda: Sum([lift(), IDENTITY]), r"output dimensions are \[3, 2\]"),
        (
            lambda: MultiHead([reference_attention(), lift()]),
            r"output dimensions are \[2, 3\]",
        ),
    ],
)
def test_incompatible_dimensions_fail_at_construction(build, message):
    with pytest.raises(InvalidInput, match=message):
        build()
