"""Tests of distances between networks."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from meanformer import L2, TokenCloud, wasserstein
from meanformer.errors import InvalidInput, Unsupported
from meanformer.flows import Adaptive
from meanformer.training.data import Dataset
from meanformer.training.distance import (
    balanced,
    common_grid,
    cot_distance,
    cot_geodesic,
    cot_plans,
    function_distance,
)
from meanformer.training.gradients import outputs
from meanformer.training.limits import refined
from meanformer.training.transformer import MeanFieldTransformer

LAYERS, HEADS = 5, 12


def drawn(seed, layers=LAYERS, heads=HEADS, **options):
    return MeanFieldTransformer.draw(layers, heads, 2, key=jr.key(seed), **options)


def changed(model, function):
    return model.with_parameters(jax.tree.map(function, model.parameters))


def rows(model, layer):
    heads = jax.tree.map(lambda leaf: leaf[layer], model.parameters.heads)
    leaves = jax.tree.leaves(heads)
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


@pytest.fixture(scope="module")
def nu():
    return drawn(0)


@pytest.fixture(scope="module")
def nu_prime():
    return drawn(1)


@pytest.fixture(scope="module")
def questions():
    tokens = jr.normal(jr.key(5), (3, 4, 2))
    return Dataset(tokens, jr.normal(jr.key(6), (3, 2)))


def test_a_shift_of_all_coordinates_is_as_far_as_it_moves_each_head(nu):
    shifted = changed(nu, lambda leaf: leaf + 0.3)
    np.testing.assert_allclose(
        cot_distance(nu, shifted), 1.0392304845413263, rtol=1e-14
    )


def test_heads_may_be_permuted_within_a_layer(nu):
    order = jr.permutation(jr.key(3), HEADS)
    assert cot_distance(nu, changed(nu, lambda leaf: leaf[:, order])) == 0


def test_layers_may_not_be_reversed_though_the_heads_are_the_same(nu):
    reversed_ = changed(nu, lambda leaf: leaf[::-1])
    assert cot_distance(nu, reversed_) > 3
    assert wasserstein(nu.measure(), reversed_.measure()) == 0


def test_the_distance_is_that_of_assignments_layer_by_layer(nu, nu_prime):
    squares = []
    for layer in range(LAYERS):
        costs = cdist(rows(nu, layer), rows(nu_prime, layer)) ** 2
        squares.append(costs[linear_sum_assignment(costs)].mean())
    found = cot_distance(nu, nu_prime)
    np.testing.assert_allclose(found, np.sqrt(np.mean(squares)), rtol=1e-13)
    np.testing.assert_allclose(cot_distance(nu_prime, nu), found, rtol=1e-13)


def test_it_lies_between_that_of_pooled_heads_and_that_of_heads_in_order(nu, nu_prime):
    pooled = wasserstein(nu.measure(), nu_prime.measure())
    squares = sum(
        np.sum((one - other) ** 2)
        for one, other in zip(
            jax.tree.leaves(nu.parameters),
            jax.tree.leaves(nu_prime.parameters),
            strict=True,
        )
    )
    in_order = np.sqrt(squares / (LAYERS * HEADS))
    assert pooled < cot_distance(nu, nu_prime) < in_order


def test_the_triangle_inequality_holds(nu, nu_prime):
    third = drawn(2)
    way = cot_distance(nu, third) + cot_distance(third, nu_prime)
    assert cot_distance(nu, nu_prime) <= way


def test_cutting_layers_and_repeating_heads_change_nothing(nu, nu_prime):
    repeated = changed(refined(nu, 2), lambda leaf: leaf.repeat(2, axis=1))
    np.testing.assert_allclose(
        cot_distance(repeated, nu_prime), cot_distance(nu, nu_prime), rtol=1e-12
    )
    assert cot_distance(repeated, nu) == 0


def test_depth_grids_are_joined_exactly():
    one, other = drawn(0, 2, 1), drawn(1, 3, 1)
    gaps = [
        (1 / 3, rows(one, 0) - rows(other, 0)),
        (1 / 6, rows(one, 0) - rows(other, 1)),
        (1 / 6, rows(one, 1) - rows(other, 1)),
        (1 / 3, rows(one, 1) - rows(other, 2)),
    ]
    exact = np.sqrt(sum(share * np.sum(gap**2) for share, gap in gaps))
    np.testing.assert_allclose(cot_distance(one, other), exact, rtol=1e-13)
    first, second = common_grid(one, other)
    np.testing.assert_allclose(first.depths, [0, 1 / 3, 1 / 2, 2 / 3, 1], atol=1e-15)
    assert first.layers == second.layers == 4


def test_depths_that_differ_by_rounding_are_one():
    third = np.cumsum([0, 0.1, 0.1, 0.1, 0.7])
    one = drawn(0, 4, 1, depths=third)
    other = drawn(0, 4, 1, depths=[0, 0.1, 0.2, 0.3, 1])
    assert common_grid(one, other)[0].layers == 4
    assert cot_distance(one, other) < 1e-15


def test_the_length_of_depth_counts():
    one, other = (drawn(seed, 2, 3, depths=[0, 1, 4]) for seed in (0, 1))
    squares = [
        wasserstein(TokenCloud(rows(one, k)), TokenCloud(rows(other, k))) ** 2
        for k in (0, 1)
    ]
    exact = np.sqrt(squares[0] + 3 * squares[1])
    np.testing.assert_allclose(cot_distance(one, other), exact, rtol=1e-13)


def test_neurons_add_their_squared_distance(nu):
    one = drawn(0, neurons=4)
    moved = eqx.tree_at(
        lambda model: model.parameters.neurons.bias_in,
        one,
        replace_fn=lambda b: b + 0.4,
    )
    np.testing.assert_allclose(cot_distance(one, moved), 0.4, rtol=1e-13)
    both = changed(one, lambda leaf: leaf + 0.3)
    np.testing.assert_allclose(
        cot_distance(one, both), 0.3 * np.sqrt(12 + 5), rtol=1e-13
    )


def test_plans_match_heads_with_those_they_came_from(nu):
    order = jnp.array([jr.permutation(jr.key(k), HEADS) for k in range(LAYERS)])
    layers = jnp.arange(LAYERS)[:, None]
    mixed = changed(nu, lambda leaf: leaf[layers, order])
    plans = cot_plans(nu, mixed)
    assert len(plans) == LAYERS
    for plan, one in zip(plans, order, strict=True):
        matrix = np.zeros((HEADS, HEADS))
        matrix[one, np.arange(HEADS)] = 1 / HEADS
        np.testing.assert_allclose(plan.matrix(), matrix, rtol=1e-14)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_geodesics_have_constant_speed(share, nu, nu_prime):
    whole, between = cot_distance(nu, nu_prime), cot_geodesic(nu, nu_prime, share)
    np.testing.assert_allclose(cot_distance(nu, between), share * whole, rtol=1e-12)
    rest = (1 - share) * float(whole)
    np.testing.assert_allclose(
        cot_distance(between, nu_prime), rest, rtol=1e-12, atol=1e-13
    )


@pytest.mark.slow
def test_geodesics_join_networks_of_different_sizes():
    one, other = drawn(0, 2, 3, neurons=2), drawn(1, 3, 2, neurons=4)
    between = cot_geodesic(one, other, 0.25)
    assert (between.layers, between.heads) == (4, 6)
    assert between.parameters.neurons.bias_in.shape == (4, 4)
    np.testing.assert_allclose(
        cot_distance(one, between), cot_distance(one, other) / 4, rtol=1e-12
    )


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_balanced_heads_are_the_same_function(rank, questions):
    model = drawn(4, 3, 2, key_dimension=rank)
    gauged = balanced(model)
    query, key = gauged.parameters.heads[:2]
    assert query.shape == model.parameters.heads.query.shape
    np.testing.assert_allclose(query @ query.mT, key @ key.mT, atol=1e-13)
    ends = outputs(model, questions)
    np.testing.assert_allclose(outputs(gauged, questions), ends, rtol=1e-11)


def test_the_gauge_is_forgotten_when_asked(nu):
    turn = jr.normal(jr.key(8), (LAYERS, HEADS, 2, 2)) + 2 * jnp.eye(2)[None, None]
    heads = nu.parameters.heads
    turned = eqx.tree_at(
        lambda model: (model.parameters.heads.query, model.parameters.heads.key),
        nu,
        (turn @ heads.query, jnp.linalg.inv(turn).mT @ heads.key),
    )
    assert cot_distance(nu, turned) > 1
    assert cot_distance(nu, turned, gauge=True) < 1e-10


def end_by_hand(model, tokens, x):
    """The query after all layers, in NumPy."""
    points = np.concatenate([tokens, x[None]])
    for query, key, value in zip(
        *map(np.asarray, model.parameters.heads[:3]), strict=True
    ):
        tokens = points[:-1]
        scores = np.einsum("rd,hkd,hke,ne->hrn", points, query, key, tokens)
        shares = np.exp(scores) / np.exp(scores).sum(axis=2, keepdims=True)
        moves = np.einsum("hrn,ne,hde->rd", shares, tokens, value)
        points = points + moves / (model.layers * model.heads)
    return points[-1]


def test_functions_are_as_far_as_their_outputs(nu, nu_prime, questions):
    ends = [
        [end_by_hand(one, tokens, x) for tokens, (x,) in zip(*pairs, strict=True)]
        for one in (nu, nu_prime)
        for pairs in [(np.asarray(questions.tokens), np.asarray(questions.queries))]
    ]
    exact = np.sqrt(np.mean(np.sum(np.subtract(*ends) ** 2, axis=1)))
    found = function_distance(nu, nu_prime, questions)
    np.testing.assert_allclose(found, exact, rtol=1e-12)
    assert function_distance(nu, nu, questions) == 0


def test_without_queries_tokens_are_compared(nu, nu_prime):
    tokens, weights = jnp.eye(2), jnp.array([0.25, 0.75])
    clouds = [TokenCloud(tokens, weights)]
    # A query that starts at a token goes where the token goes.
    followed = Dataset(clouds, tokens[None])
    gaps = outputs(nu, followed)[0] - outputs(nu_prime, followed)[0]
    exact = jnp.sqrt(weights @ jnp.sum(gaps**2, axis=1))
    found = function_distance(nu, nu_prime, Dataset(clouds))
    np.testing.assert_allclose(found, exact, rtol=1e-12)


@pytest.mark.slow
def test_adaptive_steps_are_close_to_thin_layers(questions):
    flow = drawn(3, 2, 3, method=Adaptive())
    fine = eqx.tree_at(lambda m: m.method, refined(flow, 64), diffrax.Midpoint())
    assert function_distance(flow, fine, questions) < 1e-4


def test_the_distance_has_a_derivative(nu, nu_prime):
    def distance(model):
        return cot_distance(model, nu_prime)

    slopes = eqx.filter_grad(lambda shift: distance(changed(nu, lambda a: a + shift)))
    step = 1e-5
    ends = [
        distance(changed(nu, lambda a, move=move: a + move)) for move in (-step, step)
    ]
    np.testing.assert_allclose(
        slopes(jnp.zeros(())), (ends[1] - ends[0]) / (2 * step), rtol=1e-6
    )


@pytest.mark.slow
def test_it_is_the_same_under_jit():
    pair = drawn(0, 2, 4), drawn(1, 3, 2)
    np.testing.assert_allclose(
        eqx.filter_jit(cot_distance)(*pair), cot_distance(*pair), rtol=1e-12
    )
    with pytest.raises(InvalidInput, match="call this outside of jit"):
        eqx.filter_jit(cot_plans)(*pair)


def test_networks_that_have_no_distance_are_refused(nu, untyped):
    hats = MeanFieldTransformer(*nu.parameters.heads[:3], interpolate=True)
    cases = [
        (hats, Unsupported, "nu_prime interpolates its heads"),
        ("nu", InvalidInput, "nu_prime is a str"),
        (drawn(1, key_dimension=1), InvalidInput, "heads and neurons of nu have"),
        (drawn(1, neurons=2), InvalidInput, "biases and neurons included"),
        (
            drawn(1, beta=2.0),
            InvalidInput,
            "beta of nu is 1.0, that of nu_prime is 2.0|"
            "beta of nu is 1.0, that of nu_prime 2.0",
        ),
        (drawn(1, kind=L2), InvalidInput, "differ in kind"),
        (drawn(1, 1, depths=[0, 2]), InvalidInput, "the last depth of nu is 1.0"),
    ]
    for other, error, message in cases:
        with pytest.raises(error, match=message):
            cot_distance(nu, other)


def test_other_bad_input_is_refused_with_advice(nu):
    with pytest.raises(InvalidInput, match="share is 1.5; it must be a number from 0"):
        cot_geodesic(nu, nu, 1.5)
    with pytest.raises(InvalidInput, match="31 and 37 heads or neurons.*resample"):
        cot_geodesic(drawn(0, 1, 31), drawn(0, 1, 37), 0.5)
    with pytest.raises(
        InvalidInput, match="neurons is True; this transformer has none"
    ):
        cot_plans(nu, nu, neurons=True)
    with pytest.raises(Unsupported, match="kind is L2; the balanced gauge"):
        balanced(drawn(0, kind=L2))
