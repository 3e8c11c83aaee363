"""Agreement with dense formulas in numpy and scipy, on problems made by hypothesis."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import expit, logsumexp, softmax

from meanformer.attention import (
    L2,
    Hardmax,
    Linear,
    Masked,
    MultiHead,
    Sigmoid,
    Sinkhorn,
    Softmax,
    Unnormalised,
    attention_matrix,
)
from meanformer.measures import TokenCloud

COUNT, QUERIES, DIMENSION = 5, 4, 2
SETTINGS = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def matrices(*shape, size=2.0):
    numbers = st.floats(-size, size, allow_subnormal=False, width=32)
    return arrays(np.float64, shape, elements=numbers)


@st.composite
def problems(draw):
    """Draw tokens, weights (some of them zero), queries and parameters."""
    counts = draw(arrays(np.int64, COUNT, elements=st.integers(0, 4)))
    assume(counts.sum() > 0)
    options = {"beta": draw(st.floats(0, 3))}
    if draw(st.booleans()):
        options["query_bias"] = draw(matrices(DIMENSION))
        options["value_bias"] = draw(matrices(DIMENSION))
    return {
        "points": draw(matrices(COUNT, DIMENSION)),
        "weights": counts / counts.sum(),
        "queries": draw(matrices(QUERIES, DIMENSION)),
        "matrices": [draw(matrices(DIMENSION, DIMENSION)) for _ in range(3)],
        "options": options,
    }


def values_of(kind, problem, **options):
    attention = kind(*problem["matrices"], **problem["options"], **options)
    cloud = TokenCloud(problem["points"], problem["weights"])
    return np.asarray(attention(cloud, jnp.asarray(problem["queries"])))


def projections(problem):
    """Return queries, keys and values with their biases."""
    query, key, value = problem["matrices"]
    query_bias = problem["options"].get("query_bias", 0)
    value_bias = problem["options"].get("value_bias", 0)
    return (
        problem["queries"] @ query.T + query_bias,
        problem["points"] @ key.T,
        problem["points"] @ value.T + value_bias,
    )


def scores_of(problem):
    queries, keys, _ = projections(problem)
    return problem["options"]["beta"] * queries @ keys.T


def log_weights(problem):
    with np.errstate(divide="ignore"):
        return np.log(problem["weights"])


def agree(values, expected):
    scale = 1 + np.abs(expected).max()
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-12 * scale)


@SETTINGS
@given(problems())
def test_softmax_attention_is_the_softmax_of_the_scores(problem):
    shares = softmax(scores_of(problem) + log_weights(problem), axis=1)
    agree(values_of(Softmax, problem), shares @ projections(problem)[2])


@pytest.mark.slow
@SETTINGS
@given(problems(), st.booleans())
def test_l2_attention_is_the_softmax_of_squared_distances(problem, half):
    queries, keys, values = projections(problem)
    squares = np.sum((queries[:, None] - keys[None]) ** 2, axis=2)
    scores = -problem["options"]["beta"] * squares / (2 if half else 1)
    shares = softmax(scores + log_weights(problem), axis=1)
    agree(values_of(L2, problem, half=half), shares @ values)


@SETTINGS
@given(problems())
def test_linear_attention_weights_by_the_scores(problem):
    shares = problem["weights"] * scores_of(problem)
    agree(values_of(Linear, problem), shares @ projections(problem)[2])


@SETTINGS
@given(problems())
def test_linear_attention_with_features_weights_by_their_products(problem):
    queries, keys, values = projections(problem)
    features = np.exp(queries / 4) @ np.exp(keys / 4).T
    shares = problem["weights"] * problem["options"]["beta"] * features
    agree(values_of(Linear, problem, feature_map=_features), shares @ values)


def _features(rows):
    return jnp.exp(rows / 4)


@SETTINGS
@given(problems())
def test_unnormalised_attention_weights_by_exponentials(problem):
    shares = np.exp(scores_of(problem) + log_weights(problem))
    agree(values_of(Unnormalised, problem), shares @ projections(problem)[2])


@SETTINGS
@given(problems(), st.floats(-3, 3))
def test_sigmoid_attention_weights_by_sigmoids(problem, bias):
    shares = problem["weights"] * expit(scores_of(problem) + bias)
    agree(values_of(Sigmoid, problem, bias=bias), shares @ projections(problem)[2])


@SETTINGS
@given(problems())
def test_hardmax_attention_averages_the_best_tokens(problem):
    problem["options"]["beta"] = 1.0
    scores = np.where(problem["weights"] > 0, scores_of(problem), -np.inf)
    best = scores.max(axis=1, keepdims=True)
    # Ties are scores that differ by rounding; leave out what is neither.
    ties = best - scores <= 1e-15 * np.abs(best)
    assume((ties | (best - scores > 1e-6)).all())
    shares = problem["weights"] * ties
    shares /= shares.sum(axis=1, keepdims=True)
    agree(values_of(Hardmax, problem), shares @ projections(problem)[2])


def alternated(scores, log_weight, rounds):
    """Alternate plain log-domain steps of Sinkhorn's algorithm; return g."""
    g = np.zeros(len(scores))
    for _ in range(rounds):
        f = -logsumexp(scores + g[None] + log_weight[None], axis=1)
        g = -logsumexp(scores + f[:, None] + log_weight[:, None], axis=0)
    return g


@pytest.mark.slow
@SETTINGS
@given(problems())
def test_sinkhorn_attention_is_the_limit_of_plain_alternation(problem):
    query, key, _ = problem["matrices"]
    points, beta = problem["points"], problem["options"]["beta"]
    form = 2 * beta * key.T @ query
    present = points[problem["weights"] > 0]
    spread = np.ptp(present @ form.T @ present.T)
    assume(spread < 5)
    log_weight = log_weights(problem)
    g = alternated(points @ form.T @ points.T, log_weight, 300)
    shares = softmax(problem["queries"] @ form.T @ points.T + g + log_weight, axis=1)
    values = values_of(Sinkhorn, problem)
    np.testing.assert_allclose(values, shares @ projections(problem)[2], atol=1e-8)


@pytest.mark.slow
@SETTINGS
@given(problems(), arrays(np.float64, COUNT, elements=st.sampled_from([0.1, 0.5, 0.9])))
def test_causal_attention_is_the_softmax_of_the_past(problem, places):
    cloud = TokenCloud(problem["points"], problem["weights"], positions=places)
    attention = Softmax(*problem["matrices"], **problem["options"])
    queries = jnp.asarray(problem["queries"])
    at = np.array([0.1, 0.5, 0.7, 0.95])
    masked = Masked(attention, empty="zero")
    values = masked(cloud, queries, positions=jnp.asarray(at))
    seen = (places[None] <= at[:, None]) & (problem["weights"] > 0)
    scores = np.where(seen, scores_of(problem) + log_weights(problem), -np.inf)
    expected = np.zeros((QUERIES, DIMENSION))
    sighted = seen.any(axis=1)
    shares = softmax(scores[sighted], axis=1)
    expected[sighted] = shares @ projections(problem)[2]
    agree(np.asarray(values), expected)


@pytest.mark.slow
@SETTINGS
@given(problems(), problems())
def test_heads_are_independent(first, second):
    heads = [Softmax(*one["matrices"], **one["options"]) for one in (first, second)]
    outputs = [second["matrices"][0], first["matrices"][1]]
    cloud = TokenCloud(first["points"], first["weights"])
    queries = jnp.asarray(first["queries"])
    values = np.asarray(MultiHead(heads, outputs)(cloud, queries))
    parts = [np.asarray(head(cloud, queries)) for head in heads]
    agree(values, sum(p @ o.T for p, o in zip(parts, outputs, strict=True)))


@pytest.mark.slow
@SETTINGS
@given(problems())
def test_softmax_matrices_are_stochastic(problem):
    cloud = TokenCloud(problem["points"], problem["weights"])
    for kind in (Softmax, L2, Hardmax):
        attention = kind(*problem["matrices"], **problem["options"])
        matrix = np.asarray(attention_matrix(attention, cloud))
        assert (matrix >= 0).all()
        np.testing.assert_array_equal(matrix[:, problem["weights"] == 0], 0)
        np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-14)
