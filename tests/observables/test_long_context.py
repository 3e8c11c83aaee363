"""One layer on a long context: tabulated values, the layer itself, limits."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import meanformer as mf
from meanformer.observables import (
    context_similarity,
    long_context_critical,
    long_context_gamma,
    long_context_limit,
    long_context_scan,
    long_context_similarity,
    mean_cosine,
)

POSITIONS = np.array([0.8, 1.0, 1.2])


def equiangular_tokens(count, rho):
    """Unit vectors with one inner product, as rows of a root of their Gram matrix."""
    gram = np.full((count, count), rho) + (1 - rho) * np.eye(count)
    values, vectors = np.linalg.eigh(gram)
    return vectors * np.sqrt(np.maximum(values, 0))


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1e3, [0.91471458, 0.63221856, 0.40175298]),
        (1e6, [0.99184802, 0.63157959, 0.32630889]),
        (1e12, [0.99996331, 0.63157895, 0.30167138]),
    ],
)
def test_output_cosines_are_tabulated(count, expected):
    found = long_context_similarity(count, POSITIONS / 0.7, 0.3)
    np.testing.assert_allclose(found, expected, atol=6e-9)


@pytest.mark.parametrize("rho", [-0.1, 0.0, 0.3, 0.9])
@pytest.mark.parametrize("gamma", [0.0, 0.7, 1.4, 4.0])
def test_the_closed_form_is_the_layer_itself(rho, gamma):
    points = equiangular_tokens(9, rho)
    scores = gamma * np.log(9) * points @ points.T
    masses = np.exp(scores)
    outputs = masses @ points / masses.sum(1, keepdims=True)
    outputs /= np.linalg.norm(outputs, axis=1, keepdims=True)
    expected = long_context_similarity(9, gamma, rho)
    np.testing.assert_allclose(outputs[0] @ outputs[5], expected, atol=1e-13)
    found = context_similarity(mf.TokenCloud(points), gamma)
    np.testing.assert_allclose(found.after, expected, atol=1e-13)
    np.testing.assert_allclose(found.before, rho, atol=1e-13)
    np.testing.assert_allclose(found.predicted, expected, atol=1e-12)
    np.testing.assert_allclose(found.beta, gamma * np.log(9))
    np.testing.assert_allclose(found.critical, 1 / (1 - rho))


def test_the_formula_of_two_shares_gives_the_same():
    n, rho, beta = 40, 0.2, 1.3 * np.log(40)
    other = 1 / (np.exp(beta * (1 - rho)) + n - 1)
    own = np.exp(beta * (1 - rho)) * other
    inner = rho * own**2 + 2 * own * other * (1 + (n - 2) * rho)
    inner += other**2 * ((n - 2) + ((n - 1) ** 2 - (n - 2)) * rho)
    square = own**2 + 2 * own * (n - 1) * other * rho
    square += other**2 * ((n - 1) + (n - 1) * (n - 2) * rho)
    np.testing.assert_allclose(
        long_context_similarity(n, 1.3, rho), inner / square, rtol=1e-14
    )


def test_the_limit_has_three_values():
    np.testing.assert_allclose(
        long_context_limit(POSITIONS / 0.7, 0.3), [1, 0.631578947368421, 0.3]
    )
    np.testing.assert_allclose(long_context_critical([0.0, 0.5]), [1.0, 2.0])
    rho = np.array([0.1, 0.5, 0.9])
    critical = long_context_critical(rho)
    np.testing.assert_allclose(
        long_context_limit(critical, rho), 4 * rho / (1 + 3 * rho)
    )


@pytest.mark.parametrize("rho", [0.1, 0.5, 0.9])
def test_very_long_contexts_are_at_the_limit(rho):
    gammas = POSITIONS / (1 - rho)
    found = long_context_similarity(1e300, gammas, rho)
    np.testing.assert_allclose(found, long_context_limit(gammas, rho), atol=1e-12)
    extremes = long_context_similarity(1e300, [0.0, 1e-300, 1e300], 0.5)
    np.testing.assert_allclose(extremes, [1.0, 1.0, 0.5], atol=1e-12)


def test_the_inverse_is_exact_and_the_transition_sharpens_like_one_over_the_logarithm():
    counts = np.array([10.0, 1e4, 1e8])
    middle = long_context_gamma(counts, 0.6, 0.3)
    np.testing.assert_allclose(
        long_context_similarity(counts, middle, 0.3), 0.6, rtol=1e-12
    )
    widths = [
        float(long_context_gamma(count, 0.4, 0.3) - long_context_gamma(count, 0.9, 0.3))
        for count in (1e20, 1e40)
    ]
    np.testing.assert_allclose(widths[0] / widths[1], 2.0, rtol=1e-6)


def test_cosines_fall_as_gamma_grows_and_stay_above_those_of_the_input():
    scan = long_context_scan([10, 1e5], np.linspace(0, 5, 40), [0.05, 0.5])
    assert scan.shape == (2, 40, 2)
    assert (np.diff(scan, axis=1) < 1e-14).all()
    assert (scan >= np.array([0.05, 0.5])).all()
    np.testing.assert_allclose(
        scan[1, 3, 1], long_context_similarity(1e5, 15 / 39, 0.5)
    )


def test_a_simplex_keeps_its_cosines():
    np.testing.assert_allclose(long_context_similarity(5, 1.0, -0.25), -0.25)


def test_the_mean_cosine_is_the_average_over_pairs(key):
    points = jr.normal(key, (6, 3))
    points = points / jnp.linalg.norm(points, axis=1, keepdims=True)
    weights = jnp.array([0.3, 0.2, 0.2, 0.1, 0.2, 0.0])
    pairs = np.outer(weights, weights) * (1 - np.eye(6))
    expected = (pairs * np.asarray(points @ points.T)).sum() / pairs.sum()
    np.testing.assert_allclose(mean_cosine(points, weights), expected, rtol=1e-12)


def test_padding_and_order_do_not_matter(key):
    points = jr.normal(key, (6, 3))
    points = points / jnp.linalg.norm(points, axis=1, keepdims=True)
    plain = context_similarity(mf.TokenCloud(points[:5]), 1.5)
    weights = jnp.array([0.2, 0.2, 0.2, 0.2, 0.2, 0.0])
    padded = context_similarity(mf.TokenCloud(points, weights), 1.5)
    turned = context_similarity(mf.TokenCloud(points[:5][::-1]), 1.5)
    for other in (padded, turned):
        np.testing.assert_allclose(other.after, plain.after, rtol=1e-12)
        np.testing.assert_allclose(other.beta, plain.beta)


def test_random_tokens_in_high_dimension_nearly_follow_the_prediction(key):
    points = jr.normal(key, (200, 400)) + 0.04
    points = points / jnp.linalg.norm(points, axis=1, keepdims=True)
    for gamma in (0.3, 4.0):
        found = context_similarity(mf.TokenCloud(points), gamma)
        np.testing.assert_allclose(found.after, found.predicted, atol=0.03)


def test_a_layer_of_your_own_is_run_at_the_temperature_asked_for(key):
    points = equiangular_tokens(5, 0.2)
    layer = mf.Softmax(2 * jnp.eye(5), jnp.eye(5), 3 * jnp.eye(5), beta=100.0)
    found = context_similarity(mf.TokenCloud(points), 0.5, attention=layer)
    # Twice the score is twice the temperature; a factor of the values is no matter.
    expected = long_context_similarity(5, 1.0, 0.2)
    np.testing.assert_allclose(found.after, expected, rtol=1e-12)


def test_single_precision_stays_single():
    points = jnp.asarray(equiangular_tokens(5, 0.2), jnp.float32)
    found = context_similarity(mf.TokenCloud(points), 1.0)
    assert found.outputs.dtype == found.after.dtype == jnp.float32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: long_context_similarity(1, 1.0, 0.3), "count is 1"),
        (lambda: long_context_similarity(5, -1.0, 0.3), "gamma is -1.0"),
        (lambda: long_context_similarity(5, 1.0, -0.3), "between"),
        (lambda: long_context_similarity(5, np.nan, 0.3), "finite"),
        (lambda: long_context_similarity(5, 0.0, -0.25), "no cosines"),
        (lambda: long_context_limit(1.0, 0.0), "rho must be positive"),
        (lambda: long_context_critical(1.0), "below 1"),
        (lambda: long_context_gamma(5, 0.2, 0.3), "similarity must lie above rho"),
        (lambda: context_similarity(mf.TokenCloud(jnp.eye(3)), -1.0), "gamma is -1"),
        (
            lambda: context_similarity(mf.TokenCloud(jnp.eye(3)[:1]), 1.0),
            "needs two",
        ),
        (lambda: context_similarity(mf.TokenCloud(2 * jnp.eye(3)), 1.0), "norm 2"),
        (
            lambda: context_similarity(
                mf.TokenCloud(jnp.array([[1.0, 0.0], [-1.0, 0.0]])), 0.0
            ),
            "zero",
        ),
        (
            lambda: context_similarity(mf.TokenCloud(jnp.eye(3)), 1.0, attention=3),
            "attention is 3",
        ),
    ],
)
def test_mistakes_are_told(make, message, untyped):
    with pytest.raises(mf.InvalidInput, match=message):
        make()


@pytest.mark.parametrize("small", [1e-13, 1e-17])
def test_very_unequal_weights_have_the_cosine_of_their_pair(small):
    points = jnp.array([[1.0, 0.0], [0.6, 0.8]])
    for weights in ([1.0, small], [small, 1.0]):
        cloud = mf.TokenCloud(points, jnp.array(weights))
        np.testing.assert_allclose(mean_cosine(points, cloud.weights), 0.6)
        found = context_similarity(cloud, 1.0)
        assert np.isfinite([found.before, found.after, found.predicted]).all()


def test_obtuse_tokens_have_an_inverse_too():
    gamma = long_context_gamma(3, -0.1, -0.3)
    np.testing.assert_allclose(long_context_similarity(3, gamma, -0.3), -0.1)


def test_a_count_that_is_no_number_is_refused(untyped):
    with pytest.raises(mf.InvalidInput, match="count is 'a'"):
        long_context_similarity("a", 1.0, 0.2)
