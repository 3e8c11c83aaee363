"""What must not matter, for every map: order, splitting, padding, coordinates."""

import dataclasses
from functools import singledispatch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference as ref
from map_zoo import (
    AVERAGING,
    MAPS,
    MASSES,
    NOT_DIFFERENTIABLE,
    PLACES,
    POINTWISE,
    QUERIES,
    QUERY_PLACES,
    SINKHORNS,
    TALL,
    TOKENS,
    cloud_of,
    evaluate,
    every_map,
)
from meanformer.attention import (
    L2,
    AbstractAttention,
    Hardmax,
    Linear,
    Masked,
    MultiHead,
    Perceptron,
    Residual,
    RMSNorm,
    Sigmoid,
    Sinkhorn,
    Softmax,
    Sum,
    UnitNorm,
    Unnormalised,
    push_forward,
)
from meanformer.measures import TokenCloud
from reference import reference_attention, reference_cloud

KINDS = [Softmax, L2, Sinkhorn, Linear, Unnormalised, Sigmoid, Hardmax]
IN_CONTEXT = [name for name in MAPS if name not in POINTWISE]
ANGLE = 0.7
ROTATION = np.array([[np.cos(ANGLE), -np.sin(ANGLE)], [np.sin(ANGLE), np.cos(ANGLE)]])
GAUGE = np.array([[1.2, 0.5], [-0.3, 0.9]])


def close(values, expected):
    # The limit of Sinkhorn's algorithm is found to 4e-11 in the marginals.
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-11)


@every_map()
def test_the_order_of_the_tokens_does_not_matter(name):
    order = np.array([3, 0, 4, 2, 1])
    shuffled = cloud_of(TOKENS[order], MASSES[order], PLACES[order])
    close(evaluate(MAPS[name], shuffled), evaluate(MAPS[name], cloud_of()))


@every_map()
def test_a_query_does_not_see_the_other_queries(name):
    others = QUERIES.copy()
    others[1:] = [[2.0, -1.0], [0.1, 0.1], [-3.0, 1.0]]
    first = evaluate(MAPS[name], cloud_of(), others)[0]
    close(first, evaluate(MAPS[name], cloud_of())[0])


@every_map()
def test_permuted_queries_have_permuted_values(name):
    order = np.array([2, 0, 3, 1])
    values = evaluate(MAPS[name], cloud_of(), QUERIES[order], QUERY_PLACES[order])
    close(values, evaluate(MAPS[name], cloud_of())[order])


@every_map()
def test_how_the_mass_of_an_atom_is_split_does_not_matter(name):
    points, places = TOKENS.copy(), PLACES.copy()
    points[4], places[4] = points[0], places[0]
    halves, whole = MASSES.copy(), MASSES.copy()
    halves[[0, 4]], whole[[0, 4]] = [0.1, 0.4], [0.5, 0.0]
    split = evaluate(MAPS[name], cloud_of(points, halves, places))
    close(split, evaluate(MAPS[name], cloud_of(points, whole, places)))


@every_map()
def test_a_token_on_the_support_gets_the_value_of_the_same_point_as_query(name):
    cloud = cloud_of()
    moved = push_forward(MAPS[name], cloud)
    values = evaluate(MAPS[name], cloud, TOKENS[:4], PLACES[:4])
    close(np.asarray(moved.points)[:4], values)
    np.testing.assert_array_equal(moved.weights, cloud.weights)
    np.testing.assert_array_equal(moved.positions, cloud.positions)


# Padding


def padded(last_point):
    masses = np.array([0.3, 0.35, 0.1, 0.25, 0.0])
    points = np.concatenate([TOKENS[:4], [last_point]])
    return cloud_of(points, masses)


def unpadded():
    return cloud_of(TOKENS[:4], np.array([0.3, 0.35, 0.1, 0.25]), PLACES[:4])


@every_map()
@pytest.mark.parametrize("place", [(0.0, 0.0), (-40.0, 70.0), (1e90, -1e90)])
def test_a_token_of_weight_zero_is_absent(name, place):
    expected = evaluate(MAPS[name], unpadded())
    close(evaluate(MAPS[name], padded(place)), expected)


def gradients(gamma, cloud):
    """Gradient of one number in the points, the weights and the queries."""
    probe = jnp.asarray(np.sin(np.arange(1.0, 9.0)).reshape(4, 2))

    def loss(points, weights, queries):
        context = TokenCloud(points, weights, positions=cloud.positions)
        values = gamma(context, queries, positions=jnp.asarray(QUERY_PLACES))
        return jnp.sum(probe * values)

    differentiate = jax.grad(loss, argnums=(0, 1, 2))
    found = differentiate(cloud.points, cloud.weights, jnp.asarray(QUERIES))
    return [np.asarray(gradient) for gradient in found]


@every_map(name for name in IN_CONTEXT if name not in NOT_DIFFERENTIABLE)
def test_a_token_of_weight_zero_is_absent_from_gradients(name):
    points, weights, queries = gradients(MAPS[name], padded((-4.0, 7.0)))
    np.testing.assert_array_equal(points[4], 0)
    far = gradients(MAPS[name], padded((-4e5, 7e5)))
    np.testing.assert_array_equal(far[0][4], 0)
    assert np.isfinite(far[1]).all()
    np.testing.assert_allclose(far[0][:4], points[:4], atol=1e-10)
    np.testing.assert_allclose(far[1][:4], weights[:4], atol=1e-10)
    np.testing.assert_allclose(far[2], queries, atol=1e-10)


@every_map(
    (name for name in MAPS if name not in NOT_DIFFERENTIABLE),
    slow=SINKHORNS - {"tied sinkhorn"},
)
def test_gradients_are_those_of_the_cloud_without_the_token(name):
    points, weights, queries = gradients(MAPS[name], padded((-4.0, 7.0)))
    expected = gradients(MAPS[name], unpadded())
    close(points[:4], expected[0])
    close(weights[:4], expected[1])
    close(queries, expected[2])


# Coordinates


@singledispatch
def rotated(gamma):
    """Return the map in rotated coordinates."""
    raise NotImplementedError(type(gamma))


@rotated.register
def _(gamma: AbstractAttention):
    bias = None if gamma.value_bias is None else ROTATION @ gamma.value_bias
    return dataclasses.replace(
        gamma,
        query=gamma.query @ ROTATION.T,
        key=gamma.key @ ROTATION.T,
        value=ROTATION @ gamma.value @ ROTATION.T,
        value_bias=bias,
    )


@rotated.register
def _(gamma: MultiHead):
    if gamma.outputs is None:
        return MultiHead([rotated(head) for head in gamma.heads])
    heads = [
        dataclasses.replace(
            head,
            query=head.query @ ROTATION.T,
            key=head.key @ ROTATION.T,
            value=head.value @ ROTATION.T,
        )
        for head in gamma.heads
    ]
    return MultiHead(heads, [ROTATION @ output for output in gamma.outputs])


@rotated.register
def _(gamma: Masked):
    return dataclasses.replace(gamma, attention=rotated(gamma.attention))


@rotated.register
def _(gamma: Residual):
    return Residual(rotated(gamma.gamma), gamma.step)


@rotated.register
def _(gamma: Sum):
    return Sum([rotated(term) for term in gamma.maps])


@rotated.register
def _(gamma: Perceptron):
    return dataclasses.replace(
        gamma,
        weights_in=gamma.weights_in @ ROTATION.T,
        weights_out=ROTATION @ gamma.weights_out,
        bias_out=ROTATION @ gamma.bias_out,
    )


@rotated.register(RMSNorm)
@rotated.register(UnitNorm)
def _(gamma):
    return gamma


@every_map(name for name in MAPS if name not in {"layer norm", "network"})
def test_rotated_coordinates_give_rotated_values(name):
    cloud = cloud_of(TOKENS @ ROTATION.T)
    values = evaluate(rotated(MAPS[name]), cloud, QUERIES @ ROTATION.T)
    close(values, evaluate(MAPS[name], cloud_of()) @ ROTATION.T)


TRANSLATED = {
    "tied l2": L2(ref.KEY, ref.KEY, ref.VALUE),
    "windowed l2": MAPS["windowed l2"],
    "sinkhorn": MAPS["sinkhorn"],
    "sinkhorn with query bias": reference_attention(Sinkhorn, query_bias=[0.3, 2.0]),
    "tied half-steps": Sinkhorn(ref.KEY, ref.KEY, ref.VALUE, half_steps=3),
}


@pytest.mark.parametrize("name", TRANSLATED)
@pytest.mark.parametrize("size", [1.0, 1e3, 1e8])
def test_translation_moves_the_values_at_any_distance(name, size):
    gamma, shift = TRANSLATED[name], size * np.array([1.0, -2.0])
    # What the far tokens are after rounding, seen from the origin.
    tokens, queries = (TOKENS + shift) - shift, (QUERIES + shift) - shift
    values = evaluate(gamma, cloud_of(TOKENS + shift), QUERIES + shift)
    expected = evaluate(gamma, cloud_of(tokens), queries) + ref.VALUE @ shift
    np.testing.assert_allclose(values, expected, rtol=1e-14, atol=1e-11)


def test_softmax_is_not_translation_equivariant():
    shift = np.array([1.0, -2.0])
    values = evaluate(MAPS["softmax"], cloud_of(TOKENS + shift), QUERIES + shift)
    moved = values - evaluate(MAPS["softmax"], cloud_of())
    assert np.abs(moved - ref.VALUE @ shift).max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_scaling_tokens_and_temperature_scales_the_values(kind):
    scale = 1.7
    scaled = reference_attention(kind, beta=0.8 / scale**2)
    values = evaluate(scaled, cloud_of(scale * TOKENS), scale * QUERIES)
    plain = evaluate(reference_attention(kind, beta=0.8), cloud_of())
    close(values, scale * plain)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_product_of_query_and_key_matters(kind):
    # L2 and a start from it also see the length of the keys.
    gauge = ROTATION if kind is L2 else GAUGE
    bias = np.array([0.4, -0.7])
    changed = kind(
        gauge @ ref.QUERY,
        np.linalg.inv(gauge).T @ ref.KEY,
        ref.VALUE,
        query_bias=gauge @ bias,
    )
    plain = reference_attention(kind, query_bias=bias)
    close(evaluate(changed, cloud_of()), evaluate(plain, cloud_of()))


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_product_of_output_and_value_matters(kind):
    head = kind(ref.QUERY, ref.KEY, TALL)
    gauge = np.array([[1.0, 0.3, 0.0], [-0.2, 0.8, 0.5], [0.1, 0.0, 1.5]])
    changed = kind(ref.QUERY, ref.KEY, gauge @ TALL)
    plain = evaluate(MultiHead([head], [TALL.T]), cloud_of())
    rebuilt = MultiHead([changed], [TALL.T @ np.linalg.inv(gauge)])
    close(evaluate(rebuilt, cloud_of()), plain)
    product = kind(ref.QUERY, ref.KEY, TALL.T @ TALL)
    close(evaluate(product, cloud_of()), plain)


# Biases are matrices that act on a constant coordinate.


def lifted(points):
    return np.column_stack([points, np.ones(len(points))])


def with_constant(matrix, bias):
    return np.column_stack([matrix, bias])


@pytest.mark.parametrize("kind", KINDS)
def test_biases_act_like_a_constant_coordinate(kind):
    query_bias, value_bias = np.array([0.4, -0.7]), np.array([0.2, 0.3])
    biased = reference_attention(kind, query_bias=query_bias, value_bias=value_bias)
    plain = kind(
        with_constant(ref.QUERY, query_bias),
        with_constant(ref.KEY, np.zeros(2)),
        with_constant(ref.VALUE, value_bias),
    )
    values = evaluate(plain, cloud_of(lifted(TOKENS)), lifted(QUERIES))
    close(evaluate(biased, cloud_of()), values)


@pytest.mark.parametrize("kind", [Softmax, Hardmax, Sinkhorn])
def test_a_bias_of_the_keys_changes_nothing(kind):
    keyed = kind(
        with_constant(ref.QUERY, np.zeros(2)),
        with_constant(ref.KEY, np.array([0.9, -0.4])),
        with_constant(ref.VALUE, np.zeros(2)),
    )
    values = evaluate(keyed, cloud_of(lifted(TOKENS)), lifted(QUERIES))
    close(values, evaluate(reference_attention(kind), cloud_of()))


@pytest.mark.parametrize("kind", [Softmax, Hardmax, L2])
def test_a_bias_of_the_queries_changes_the_values(kind):
    biased = reference_attention(kind, query_bias=np.array([2.0, -3.0]))
    plain = evaluate(reference_attention(kind), cloud_of())
    assert np.abs(evaluate(biased, cloud_of()) - plain).max() > 0.05


@every_map(AVERAGING)
def test_averages_stay_in_the_image_of_the_convex_hull(name):
    values = evaluate(MAPS[name], cloud_of())
    angles = np.linspace(0, 2 * np.pi, 60)
    directions = np.stack([np.cos(angles), np.sin(angles)])
    reach = (TOKENS @ AVERAGING[name].T @ directions).max(axis=0)
    assert (values @ directions <= reach + 1e-14).all()


def test_linear_attention_leaves_the_convex_hull():
    far = evaluate(reference_attention(Linear), cloud_of(), 50 * QUERIES)
    assert np.abs(far).max() > np.abs(TOKENS @ ref.VALUE.T).max()


def test_the_mean_of_sinkhorn_values_is_the_value_of_the_mean():
    cloud = reference_cloud()
    values = MAPS["sinkhorn"](cloud, cloud.points)
    np.testing.assert_allclose(cloud.weights @ values, ref.VALUE_OF_MEAN, atol=1e-10)
