"""Masks: who sees whom, ties, empty sight, division by the visible mass."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference as ref
from map_zoo import (
    MASSES,
    PLACES,
    QUERIES,
    QUERY_PLACES,
    TOKENS,
    cloud_of,
    evaluate,
    exponential_features,
)
from meanformer.attention import (
    L2,
    Blocks,
    Causal,
    Hardmax,
    Linear,
    Masked,
    MultiHead,
    Prefix,
    Sigmoid,
    Sinkhorn,
    Softmax,
    StrictCausal,
    Unnormalised,
    Window,
    attention_matrix,
    in_order,
    push_forward,
)
from meanformer.errors import InvalidInput, Unsupported
from meanformer.measures import Gaussian, TokenCloud
from reference import reference_attention, reference_cloud

QUERY_AT, TOKEN_AT = QUERY_PLACES[:, None], PLACES[None, :]
EDGES = np.array([0.0, 0.3, 0.7, 1.0])
SAME_BLOCK = (
    np.searchsorted([0.3, 0.7], QUERY_PLACES)[:, None]
    == np.searchsorted([0.3, 0.7], PLACES)[None, :]
)
MASKS = {
    "causal": (Causal(), TOKEN_AT <= QUERY_AT),
    "causal with tolerance": (Causal(0.25), TOKEN_AT <= QUERY_AT + 0.25),
    "strict": (StrictCausal(), TOKEN_AT < QUERY_AT),
    "strict with tolerance": (StrictCausal(0.25), TOKEN_AT < QUERY_AT - 0.25),
    "window": (
        Window(0.35),
        (TOKEN_AT <= QUERY_AT) & (TOKEN_AT >= QUERY_AT - 0.35),
    ),
    "prefix": (Prefix(0.5), np.maximum(QUERY_AT, 0.5) >= TOKEN_AT),
    "isolated blocks": (Blocks([0.3, 0.7], isolated=True), SAME_BLOCK),
    "blocks": (Blocks([0.3, 0.7]), SAME_BLOCK | (TOKEN_AT <= QUERY_AT)),
}
KINDS = {
    "softmax": (Softmax, {}),
    "l2": (L2, {}),
    "hardmax": (Hardmax, {}),
    "linear": (Linear, {}),
    "linear with features": (Linear, {"feature_map": exponential_features}),
    "unnormalised": (Unnormalised, {}),
    "sigmoid": (Sigmoid, {"bias": 0.3}),
}
NOT_NORMALISED = ["linear", "linear with features", "unnormalised", "sigmoid"]


def restricted(attention, seen, *, divide=False):
    """Evaluate query by query on the cloud that its mask leaves."""
    values = []
    for query, row in zip(QUERIES, seen, strict=True):
        mass = MASSES[row].sum()
        if mass == 0:
            values.append(np.zeros(2))
            continue
        cloud = cloud_of(TOKENS, np.where(row, MASSES, 0) / mass)
        value = attention(cloud, jnp.asarray(np.tile(query, (4, 1))))[0]
        values.append(value if divide else mass * value)
    return np.array(values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", MASKS)
def test_masked_attention_is_attention_to_what_the_mask_leaves(mask, kind):
    (rule, seen), (variant, options) = MASKS[mask], KINDS[kind]
    attention = reference_attention(variant, value_bias=[0.1, -0.2], **options)
    values = evaluate(Masked(attention, rule, empty="zero"), cloud_of())
    expected = restricted(attention, seen, divide=kind not in NOT_NORMALISED)
    np.testing.assert_allclose(values, expected, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_divided_masked_attention_sees_a_probability(kind):
    variant, options = KINDS[kind]
    attention = reference_attention(variant, value_bias=[0.1, -0.2], **options)
    divided = Masked(attention, StrictCausal(), divide=True)
    expected = restricted(attention, TOKEN_AT < QUERY_AT, divide=True)
    np.testing.assert_allclose(evaluate(divided, cloud_of()), expected, atol=1e-14)


def test_division_touches_only_the_heads_without_normalisation():
    soft, linear = reference_attention(), reference_attention(Linear)
    together = Masked(MultiHead([soft, linear]), divide=True)
    apart = MultiHead([Masked(soft), Masked(linear, divide=True)])
    np.testing.assert_allclose(
        evaluate(together, cloud_of()), evaluate(apart, cloud_of()), atol=1e-15
    )


def test_masked_heads_and_heads_of_masks_agree():
    heads = [reference_attention(kind) for kind in (Softmax, L2, Sigmoid)]
    outputs = [np.eye(2), -ref.KEY, ref.QUERY]
    inside = MultiHead([Masked(head) for head in heads], outputs)
    outside = Masked(MultiHead(heads, outputs))
    np.testing.assert_allclose(
        evaluate(inside, cloud_of()), evaluate(outside, cloud_of()), atol=1e-15
    )


def test_only_the_order_of_the_places_matters_to_a_causal_mask():
    causal = Masked(reference_attention())
    relabelled = cloud_of(places=PLACES**3)
    values = evaluate(causal, relabelled, places=QUERY_PLACES**3)
    np.testing.assert_array_equal(values, evaluate(causal, cloud_of()))


def test_equal_places_give_unmasked_attention():
    tied = cloud_of(places=np.full(5, 0.5))
    values = push_forward(Masked(reference_attention()), tied).points
    plain = push_forward(reference_attention(), tied).points
    np.testing.assert_allclose(values, plain, atol=1e-15)


def test_a_query_without_a_place_stands_at_the_end():
    causal = Masked(reference_attention())
    values = causal(cloud_of(), jnp.asarray(QUERIES))
    np.testing.assert_array_equal(
        values, evaluate(causal, cloud_of(), places=np.ones(4))
    )


@pytest.mark.parametrize("kind", ["softmax", "l2", "sigmoid", "linear"])
def test_dropping_the_last_token_leaves_the_prefix_alone(kind):
    variant, options = KINDS[kind]
    causal = Masked(reference_attention(variant, **options))
    cloud = in_order(reference_cloud())
    full = push_forward(causal, push_forward(causal, cloud)).points
    # The same masses, so the total is below one: built without the check of totals.
    shorter = jax.tree.map(lambda leaf: leaf[:3], cloud)
    prefix = push_forward(causal, push_forward(causal, shorter)).points
    np.testing.assert_allclose(prefix, full[:3], rtol=0, atol=1e-15)


@pytest.mark.parametrize("kind", ["softmax", "l2", "sigmoid"])
def test_later_tokens_have_no_influence_on_earlier_ones(kind):
    variant, options = KINDS[kind]
    causal = Masked(reference_attention(variant, **options))
    cloud = in_order(reference_cloud())

    def early(points):
        return push_forward(causal, cloud.moved(points)).points[:2].sum()

    gradient = np.asarray(jax.grad(early)(cloud.points))
    np.testing.assert_array_equal(gradient[2:], 0)
    assert (np.abs(gradient[:2]) > 1e-3).all()


def test_a_strict_mask_leaves_the_first_block_still():
    cloud = reference_cloud(positions=ref.TIED_PLACES)
    strict = Masked(reference_attention(value_bias=[1.0, 1.0]), StrictCausal())
    values = push_forward(strict, cloud).points
    np.testing.assert_array_equal(values[0], 0)
    np.testing.assert_allclose(values[1], ref.VALUE @ ref.POINTS[0] + 1, atol=1e-15)
    np.testing.assert_allclose(values[2], values[1], atol=1e-15)


def test_the_gradient_through_an_empty_row_is_zero():
    strict = Masked(reference_attention(Unnormalised), StrictCausal())
    cloud = in_order(reference_cloud())

    def first(points):
        return push_forward(strict, cloud.moved(points)).points[0].sum()

    np.testing.assert_array_equal(jax.grad(first)(cloud.points), 0)


def test_normalised_linear_attention_accepts_an_empty_row():
    attention = reference_attention(
        Linear, feature_map=exponential_features, normalized=True
    )
    cloud = in_order(reference_cloud())
    values = push_forward(Masked(attention, StrictCausal()), cloud).points
    np.testing.assert_array_equal(values[0], 0)
    np.testing.assert_allclose(values[1], ref.VALUE @ ref.POINTS[0], atol=1e-15)


def test_an_empty_row_is_an_error_by_default():
    cloud = cloud_of(places=np.array([0.2, 0.8, 0.4, 0.4, 1.0]))
    early = jnp.array([0.2, 0.1, 0.5, 0.5])
    message = 'query 1 sees no token through Causal; pass empty="zero"'
    with pytest.raises(InvalidInput, match=message):
        Masked(reference_attention())(cloud, jnp.asarray(QUERIES), positions=early)


def test_an_empty_row_can_be_zero():
    cloud = cloud_of()
    early = jnp.array([0.2, 0.1, 0.5, 0.5])
    masked = Masked(reference_attention(), empty="zero")
    values = masked(cloud, jnp.asarray(QUERIES), positions=early)
    np.testing.assert_array_equal(values[1], 0)
    assert np.abs(np.asarray(values)[[0, 2, 3]]).min() > 0


def test_a_window_over_weightless_tokens_is_empty():
    cloud = cloud_of(weights=np.array([0.5, 0.5, 0.0, 0.0, 0.0]))
    window = Masked(reference_attention(), Window(0.0), empty="zero")
    values = evaluate(window, cloud, places=np.array([0.2, 0.4, 0.8, 1.0]))
    np.testing.assert_array_equal(values[[1, 3]], 0)
    np.testing.assert_allclose(values[[0, 2]], TOKENS[:2] @ ref.VALUE.T, atol=1e-15)


def test_a_window_sees_tokens_of_tiny_weight():
    weights = np.array([1 - 1e-20, 1e-20, 0.0, 0.0, 0.0])
    window = Masked(reference_attention(Sigmoid), Window(0.0), divide=True)
    values = evaluate(window, cloud_of(weights=weights), places=[0.2, 0.8, 0.8, 0.8])
    alone = reference_attention(Sigmoid)(TokenCloud(TOKENS[1:2]), jnp.asarray(QUERIES))
    np.testing.assert_allclose(values[1:], alone[1:], rtol=1e-12)


def test_division_by_a_small_visible_mass_keeps_all_digits_in_single_precision():
    count = 1000
    points = jnp.ones((count, 1), jnp.float32)
    cloud = in_order(TokenCloud(points))
    one = jnp.ones((1, 1), jnp.float32)
    window = Masked(Linear(one, one, one), Window(0.0), divide=True)
    values = push_forward(window, cloud).points
    np.testing.assert_allclose(values, 1, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32])
def test_a_window_has_its_length_whatever_the_rounding(dtype):
    count, length = 50, 7
    cloud = in_order(TokenCloud(jnp.zeros((count, 1), dtype)))
    places = cloud.positions.astype(dtype)
    first, last = Window(length / count).stretch(places, places)
    expected = np.minimum(np.arange(1, count + 1), length + 1)
    np.testing.assert_array_equal(last - first, expected)


def test_many_tokens_in_half_precision_keep_their_order():
    cloud = in_order(TokenCloud(jnp.zeros((1000, 1), jnp.bfloat16)))
    assert len(np.unique(cloud.positions)) == 1000


def test_masked_sinkhorn_is_refused_with_the_reason():
    for options in ({}, {"half_steps": 3}, {"half_steps": 2, "end_on": "column"}):
        attention = reference_attention(Sinkhorn, **options)
        for inner in (attention, MultiHead([reference_attention(), attention])):
            with pytest.raises(Unsupported, match="cannot be masked: with distinct"):
                Masked(inner)


def test_masks_need_a_cloud_with_positions():
    masked = Masked(reference_attention())
    with pytest.raises(InvalidInput, match=r"needs positions; build the cloud as"):
        masked(reference_cloud(), jnp.asarray(QUERIES))


def test_masks_need_a_cloud():
    gaussian = Gaussian(np.zeros(2), np.eye(2))
    with pytest.raises(Unsupported, match="needs a TokenCloud with positions"):
        Masked(reference_attention()).view(gaussian, jnp.asarray(QUERIES))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("divide", [False, True])
def test_the_matrix_of_a_masked_attention_gives_its_values(kind, divide):
    variant, options = KINDS[kind]
    masked = Masked(reference_attention(variant, **options), divide=divide)
    cloud = cloud_of()
    matrix = np.asarray(attention_matrix(masked, cloud))
    np.testing.assert_array_equal(matrix[PLACES[:, None] < PLACES[None, :]], 0)
    values = push_forward(masked, cloud).points
    np.testing.assert_allclose(matrix @ TOKENS @ ref.VALUE.T, values, atol=1e-14)


def test_masks_work_under_jit_and_vmap():
    masked = Masked(reference_attention(), Blocks([0.3, 0.7]))
    shifts = jnp.array([0.0, 0.5, -1.0])

    @eqx.filter_jit
    @eqx.filter_vmap(in_axes=(None, 0))
    def run(gamma, shift):
        cloud = cloud_of()
        return push_forward(gamma, cloud.moved(cloud.points + shift)).points

    for shift, values in zip(shifts, run(masked, shifts), strict=True):
        cloud = cloud_of(TOKENS + float(shift))
        np.testing.assert_allclose(
            values, push_forward(masked, cloud).points, atol=1e-14
        )
