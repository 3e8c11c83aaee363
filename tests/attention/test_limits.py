"""Limits: beta to zero and to infinity, one token, equal tokens, huge scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference as ref
from map_zoo import MASSES, QUERIES, TOKENS, cloud_of, evaluate
from meanformer.attention import (
    L2,
    Hardmax,
    Linear,
    Masked,
    Sigmoid,
    Sinkhorn,
    Softmax,
    Unnormalised,
    attention_matrix,
    in_order,
)
from meanformer.errors import Overflow, PrecisionWarning
from meanformer.measures import TokenCloud
from reference import reference_attention, reference_cloud

MEAN = MASSES @ TOKENS
COVARIANCE = (TOKENS - MEAN).T @ (MASSES[:, None] * (TOKENS - MEAN))


@pytest.mark.parametrize("kind", [Softmax, L2, Sinkhorn, Unnormalised])
def test_without_temperature_every_query_gets_the_value_of_the_mean(kind):
    values = evaluate(reference_attention(kind, beta=0.0), cloud_of())
    np.testing.assert_allclose(values, np.tile(ref.VALUE @ MEAN, (4, 1)), atol=1e-14)


def test_without_temperature_linear_attention_vanishes():
    values = evaluate(reference_attention(Linear, beta=0.0), cloud_of())
    np.testing.assert_array_equal(values, 0)


@pytest.mark.parametrize("bias", [0.0, -1.5])
def test_without_temperature_sigmoid_attention_gates_all_tokens_alike(bias):
    values = evaluate(reference_attention(Sigmoid, beta=0.0, bias=bias), cloud_of())
    expected = ref.VALUE @ MEAN / (1 + np.exp(-bias))
    np.testing.assert_allclose(values, np.tile(expected, (4, 1)), atol=1e-14)


@pytest.mark.parametrize("kind", [Softmax, Sinkhorn])
def test_at_small_beta_the_covariance_answers_to_first_order(kind):
    # Sinkhorn's score is twice as steep and its marginals remove the mean.
    slopes, origin = (1, 0) if kind is Softmax else (2, MEAN)
    linear = slopes * (QUERIES - origin) @ (ref.VALUE @ COVARIANCE @ ref.SCORE).T

    def remainder(beta):
        values = evaluate(reference_attention(kind, beta=beta), cloud_of())
        return np.abs(values - ref.VALUE @ MEAN - beta * linear).max()

    assert remainder(1e-3) < 1e-5
    np.testing.assert_allclose(remainder(2e-2) / remainder(1e-2), 4, rtol=0.05)


def test_at_large_beta_softmax_is_hardmax():
    soft = evaluate(reference_attention(beta=1e4), cloud_of())
    hard = evaluate(reference_attention(Hardmax), cloud_of())
    np.testing.assert_allclose(soft, hard, atol=1e-12)


def test_the_gap_to_hardmax_closes_exponentially():
    hard = evaluate(reference_attention(Hardmax), cloud_of())
    scores = QUERIES @ ref.SCORE.T @ TOKENS.T
    best = np.sort(scores, axis=1)
    for beta in (40.0, 80.0):
        soft = evaluate(reference_attention(beta=beta), cloud_of())
        gaps = np.abs(soft - hard).max(axis=1)
        bound = np.exp(-beta * (best[:, -1] - best[:, -2])) * 4 * len(TOKENS) / 0.05
        assert (gaps <= bound + 1e-15).all()


def test_at_large_beta_l2_finds_the_nearest_key():
    values = evaluate(reference_attention(L2, beta=1e4), cloud_of())
    differences = (QUERIES @ ref.QUERY.T)[:, None] - (TOKENS @ ref.KEY.T)[None]
    squares = np.sum(differences**2, axis=2)
    nearest = TOKENS[squares.argmin(axis=1)]
    np.testing.assert_allclose(values, nearest @ ref.VALUE.T, atol=1e-12)


def test_at_large_beta_sinkhorn_with_identities_leaves_each_token_to_itself():
    cloud, eye = reference_cloud(), np.eye(2)
    attention = Sinkhorn(eye, eye, ref.VALUE, beta=100.0)
    with pytest.warns(PrecisionWarning, match="oscillates by up to 1.6e"):
        values = attention(cloud, cloud.points)
    np.testing.assert_allclose(values, ref.POINTS @ ref.VALUE.T, atol=1e-10)
    with pytest.warns(PrecisionWarning, match="more than 200"):
        matrix = attention_matrix(attention, cloud)
    np.testing.assert_allclose(matrix, np.eye(4), atol=1e-9)


def test_hardmax_ties_are_averaged_with_their_weights():
    points = np.array([[1.0, 0.0], [1.0, 2.0], [0.0, 0.0], [-1.0, 5.0]])
    cloud = TokenCloud(points, ref.WEIGHTS)
    attention = Hardmax(np.eye(2), np.eye(2), np.eye(2))
    query = jnp.array([[2.0, 0.0], [-1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    expected = [[1.0, 2.0 * 0.3 / 0.7], [-1.0, 5.0], ref.WEIGHTS @ points, [-1.0, 5.0]]
    np.testing.assert_allclose(attention(cloud, query), expected, atol=1e-15)


def test_hardmax_tolerance_widens_the_ties():
    cloud = reference_cloud()
    attention = reference_attention(Hardmax, tolerance=10.0)
    values = attention(cloud, cloud.points)
    np.testing.assert_allclose(values, np.tile(ref.VALUE_OF_MEAN, (4, 1)), atol=1e-15)


def test_hardmax_gradient_holds_the_chosen_tokens_fixed():
    cloud, attention = reference_cloud(), reference_attention(Hardmax)

    def total(points):
        return attention(cloud.moved(points), cloud.points).sum()

    # Row sums of the value matrix, times how often a token is chosen: see HARDMAX.
    chosen = np.array([0, 1, 2, 1])
    expected = chosen[:, None] * ref.VALUE.sum(axis=0)
    np.testing.assert_allclose(jax.grad(total)(cloud.points), expected, atol=1e-15)


AVERAGES = [Softmax, L2, Sinkhorn, Hardmax]


@pytest.mark.parametrize("kind", AVERAGES)
def test_one_token_gives_every_query_its_value(kind):
    token = np.array([[0.7, -1.2]])
    cloud = TokenCloud(token)
    values = reference_attention(kind)(cloud, jnp.asarray(QUERIES))
    np.testing.assert_allclose(values, np.tile(token @ ref.VALUE.T, (4, 1)), atol=1e-14)


@pytest.mark.parametrize("kind", AVERAGES)
def test_equal_tokens_give_every_query_their_value(kind):
    cloud = cloud_of(np.tile([0.7, -1.2], (5, 1)))
    values = evaluate(reference_attention(kind), cloud)
    expected = np.tile(ref.VALUE @ [0.7, -1.2], (4, 1))
    np.testing.assert_allclose(values, expected, atol=1e-14)


def test_one_token_under_the_kinds_without_normalisation():
    token, weight = np.array([0.7, -1.2]), QUERIES @ ref.SCORE.T @ [0.7, -1.2]
    for kind, factor in (
        (Linear, weight),
        (Unnormalised, np.exp(weight)),
        (Sigmoid, 1 / (1 + np.exp(-weight))),
    ):
        values = reference_attention(kind)(TokenCloud([token]), jnp.asarray(QUERIES))
        np.testing.assert_allclose(
            values, factor[:, None] * (ref.VALUE @ token), atol=1e-14
        )


def test_the_first_token_of_a_sequence_gets_its_own_value():
    cloud = in_order(reference_cloud())
    values = Masked(reference_attention())(
        cloud, cloud.points, positions=cloud.positions
    )
    np.testing.assert_allclose(values[0], ref.VALUE @ ref.POINTS[0], atol=1e-15)


@pytest.mark.parametrize("kind", AVERAGES)
@pytest.mark.parametrize("beta", [1e8, 1e200])
@pytest.mark.filterwarnings("ignore:the score of Sinkhorn attention oscillates")
def test_huge_scores_stay_finite(kind, beta):
    values = evaluate(reference_attention(kind, beta=beta), cloud_of())
    assert np.isfinite(values).all()
    assert np.abs(values).max() <= np.abs(TOKENS).max() * np.abs(ref.VALUE).sum()


def test_unnormalised_attention_raises_on_overflow_with_the_row():
    cloud = reference_cloud()
    queries = jnp.array([[1.0, 0.0], [0.0, 9000.0], [0.0, 1.0], [0.0, 0.0]])
    with pytest.raises(Overflow, match="overflows float64 at query 1: its log"):
        reference_attention(Unnormalised)(cloud, queries)


def test_unnormalised_attention_saturates_under_jit():
    cloud, attention = reference_cloud(), reference_attention(Unnormalised)
    values = jax.jit(lambda x: attention(cloud, x))(9000 * cloud.points)
    assert np.isfinite(values).all()
    assert np.abs(values).max() > 1e100


def test_normalised_linear_attention_raises_where_the_total_vanishes():
    attention = reference_attention(Linear, normalized=True)
    cloud = TokenCloud([[1.0, 0.0], [-1.0, 0.0]])
    with pytest.raises(ValueError, match="total weight seen by query 0 is 0.0"):
        attention(cloud, jnp.array([[1.0, 0.0]]))


def test_normalised_linear_attention_is_zero_there_under_jit():
    attention = reference_attention(Linear, normalized=True)
    cloud = TokenCloud([[1.0, 0.0], [-1.0, 0.0]])
    compiled = jax.jit(lambda x: attention(cloud, x))
    np.testing.assert_array_equal(compiled(jnp.array([[1.0, 0.0]])), 0)
