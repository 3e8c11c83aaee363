"""Growth rates about the uniform measure: digits, limits, signs, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import meanformer as mf
from meanformer.mean_field import (
    fastest_degree,
    growth_rates,
    predicted_clusters,
)

SOFTMAX = [0.1786766274, 0.5141173961, 0.6826783336, 0.6000891395, 0.3961058557]
UNNORMALISED = [
    4.8671284285,
    14.0044919733,
    18.5960703045,
    16.3463512437,
    10.7898727366,
]


def attention(kind="softmax", beta=5.0, dimension=2):
    return mf.identity_attention(kind, dimension, beta)


@pytest.mark.parametrize(
    ("kind", "tabulated"), [("softmax", SOFTMAX), ("unnormalised", UNNORMALISED)]
)
def test_rates_on_the_circle_have_the_tabulated_digits(kind, tabulated):
    rates = growth_rates(attention(kind), range(1, 6))
    np.testing.assert_allclose(rates, tabulated, atol=1e-9)


def test_rates_on_the_ordinary_sphere_have_the_tabulated_factors():
    rates = growth_rates(attention("unnormalised", 4.0, 3), [1, 2, 3])
    factors = np.array([5.121438384, 2.981400511, 1.394687745])
    degrees = np.arange(1, 4)
    exact = degrees * (degrees + 1) * factors / 4
    np.testing.assert_allclose(rates, exact, atol=5e-9)
    relative = growth_rates(attention("softmax", 4.0, 3), [1, 2, 3])
    np.testing.assert_allclose(relative, exact / 6.822479299, atol=1e-9)


@pytest.mark.parametrize(
    ("dimension", "tabulated"),
    [
        (2, {1: 1, 5: 3, 9: 4, 25: 7, 81: 13}),
        (3, {1: 1, 5: 3, 9: 4, 25: 7}),
        (8, {1: 1, 5: 1, 9: 2, 25: 5}),
        (128, {1: 1, 5: 1, 9: 1, 25: 1}),
    ],
)
def test_the_fastest_degree_is_the_tabulated_one(dimension, tabulated):
    found = {
        beta: fastest_degree(attention("softmax", beta), dimension=dimension).degree
        for beta in tabulated
    }
    assert found == tabulated


def test_the_fastest_degree_is_the_same_with_and_without_a_denominator():
    for beta in (0.5, 7.0, 33.0):
        fastest = fastest_degree(attention("softmax", beta))
        other = fastest_degree(attention("unnormalised", beta))
        assert fastest.degree == other.degree
        factor = scipy.special.i0(beta)
        np.testing.assert_allclose(other.rate, factor * fastest.rate, rtol=1e-12)


@pytest.mark.parametrize(
    "dimension", [2, pytest.param(3, marks=pytest.mark.slow), 8, 500]
)
@pytest.mark.parametrize(
    "beta", [0.1, 4.0, pytest.param(63.0, marks=pytest.mark.slow), 2000.0, 1e5]
)
def test_no_degree_grows_faster_than_the_fastest(dimension, beta):
    layer = attention("softmax", beta)
    fastest = fastest_degree(layer, dimension=dimension)
    rates = growth_rates(
        layer, np.arange(1, int(4 * np.sqrt(beta)) + 40), dimension=dimension
    )
    assert fastest.degree == int(rates.argmax()) + 1
    np.testing.assert_allclose(fastest.rate, rates.max(), rtol=1e-12)


@pytest.mark.parametrize("dimension", [2, 3, 8])
def test_at_low_temperature_the_fastest_degree_solves_a_quadratic_equation(dimension):
    beta = 1e5
    half = (dimension - 2) / 2
    root = np.sqrt(half**2 + 2 * beta) - half
    fastest = fastest_degree(attention("softmax", beta), dimension=dimension)
    assert abs(fastest.degree - root) < 1
    # The rate there is that of x exp(-x/(2 beta))/beta at its top.
    np.testing.assert_allclose(fastest.rate, 2 / np.e, rtol=1e-4)


def test_where_two_degrees_change_places_they_are_tied():
    def gap(beta):
        rates = growth_rates(attention("softmax", beta), [2, 3])
        return float(rates[1] - rates[0])

    low, high = 1.0, 5.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if gap(middle) > 0 else (middle, high)
    fastest = fastest_degree(attention("softmax", low))
    assert (fastest.degree, fastest.is_tied) == (2, True)
    # The larger one is ahead by a rounding, and the smaller one is given.
    assert gap(high) > 0
    ahead = fastest_degree(attention("softmax", high))
    assert (ahead.degree, ahead.is_tied) == (2, True)
    assert not fastest_degree(attention("softmax", low - 1e-3)).is_tied
    after = fastest_degree(attention("softmax", low + 1e-3))
    assert (after.degree, after.is_tied) == (3, False)


@pytest.mark.parametrize("kind", ["softmax", "unnormalised"])
@pytest.mark.parametrize("dimension", [2, 3, 7])
def test_at_infinite_temperature_only_the_first_degree_grows(kind, dimension):
    rates = growth_rates(attention(kind, 0.0, dimension), range(4))
    first = (dimension - 1) / dimension
    np.testing.assert_allclose(rates, [0, first, 0, 0], rtol=1e-14)
    assert fastest_degree(attention(kind, 0.0, dimension)).degree == 1


def test_values_multiply_rates_and_scores_multiply_beta():
    layer = mf.Softmax(2 * jnp.eye(2), 1.5 * jnp.eye(2), -0.5 * jnp.eye(2), beta=2.0)
    plain = growth_rates(attention("softmax", 6.0), range(1, 5))
    # The formula has beta times a where the velocity is the gradient of log G.
    np.testing.assert_allclose(
        growth_rates(layer, range(1, 5)), -0.5 * plain, rtol=1e-13
    )


def test_repulsive_scores_let_only_odd_degrees_grow():
    layer = mf.Softmax(-jnp.eye(3), jnp.eye(3), jnp.eye(3), beta=6.0)
    rates = np.asarray(growth_rates(layer, range(1, 7)))
    assert (np.sign(rates) == [1, -1, 1, -1, 1, -1]).all()
    assert fastest_degree(layer).degree % 2 == 1


def test_repulsive_values_keep_the_uniform_measure_and_predict_no_clusters():
    layer = mf.Softmax(jnp.eye(2), jnp.eye(2), -jnp.eye(2), beta=6.0)
    fastest = fastest_degree(layer)
    assert (fastest.degree, fastest.rate) == (None, 0.0)
    with pytest.raises(mf.InvalidInput, match="no mode grows"):
        predicted_clusters(layer)


def test_noise_damps_each_degree_by_its_laplacian():
    layer = attention("unnormalised", 4.0, 3)
    degrees = np.arange(6)
    damped = growth_rates(layer, degrees, noise=0.7)
    free = growth_rates(layer, degrees)
    loss = 0.7**2 / 2 * degrees * (degrees + 1)
    np.testing.assert_allclose(damped, free - loss, rtol=1e-13)
    assert fastest_degree(layer, noise=20.0).degree is None
    assert fastest_degree(layer).degree > fastest_degree(layer, noise=1.4).degree


def test_the_uniform_measure_loses_stability_at_the_tabulated_noise():
    for beta, kappa in ((1.0, 1.7694132377), (5.0, 0.2054599575)):
        noise = np.sqrt(2 / kappa)
        rate = growth_rates(attention("unnormalised", beta), [1], noise=noise)
        np.testing.assert_allclose(rate, 0, atol=1e-8)


def test_a_shift_takes_its_factor_out_of_the_rates_at_any_beta():
    eye = jnp.eye(2)
    shifted = mf.Unnormalised(eye, eye, eye, beta=5.0, shift=5.0)
    np.testing.assert_allclose(
        growth_rates(shifted, range(1, 6)), np.exp(-5) * np.array(UNNORMALISED), 1e-10
    )
    cold = mf.Unnormalised(eye, eye, eye, beta=5000.0, shift=5000.0)
    degrees = np.array([1, 50, 100])
    exact = degrees**2 * scipy.special.ive(degrees, 5000.0) / 5000
    np.testing.assert_allclose(growth_rates(cold, degrees), exact, rtol=1e-10)
    with pytest.raises(mf.Overflow, match="shift=beta"):
        growth_rates(attention("unnormalised", 5000.0), [1])


def test_the_prediction_on_the_circle_is_the_fastest_mode_whatever_the_dimension():
    assert predicted_clusters(attention("softmax", 25.0)) == 7
    assert predicted_clusters(attention("softmax", 25.0, 8)) == 7


@pytest.mark.slow
def test_rates_are_differentiable_and_compile():
    def rates(beta):
        return growth_rates(attention("softmax", beta), [1, 3])

    slope = jax.jacfwd(rates)(jnp.asarray(5.0))
    near = (rates(jnp.asarray(5.0 + 1e-5)) - rates(jnp.asarray(5.0 - 1e-5))) / 2e-5
    np.testing.assert_allclose(slope, near, rtol=1e-7)
    np.testing.assert_allclose(jax.jit(rates)(5.0), rates(5.0), rtol=1e-14)
    many = jax.vmap(rates)(jnp.array([1.0, 5.0]))
    np.testing.assert_allclose(many[1], rates(5.0), rtol=1e-14)


def test_rates_of_single_precision_have_its_digits():
    single = jnp.eye(2, dtype=jnp.float32)
    rates = growth_rates(
        mf.Softmax(single, single, single, beta=jnp.float32(5)), range(1, 6)
    )
    assert rates.dtype == jnp.float32
    np.testing.assert_allclose(rates, SOFTMAX, rtol=1e-5)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (mf.identity_attention("l2", 2), "Softmax and Unnormalised"),
        (
            mf.Softmax(jnp.eye(2), jnp.eye(2), jnp.diag(jnp.array([1.0, 2.0]))),
            "value is not a multiple",
        ),
        (
            mf.Softmax(jnp.diag(jnp.array([1.0, 2.0])), jnp.eye(2), jnp.eye(2)),
            "score is not a multiple",
        ),
        (
            mf.Softmax(jnp.eye(2), jnp.eye(2), jnp.eye(2), value_bias=jnp.ones(2)),
            "without biases",
        ),
    ],
    ids=["kind", "value", "score", "bias"],
)
def test_attention_that_is_not_isotropic_is_refused(untyped, layer, message):
    with pytest.raises(mf.Unsupported, match=message):
        growth_rates(layer, [1])


@pytest.mark.parametrize(
    ("degrees", "message"),
    [([0.5], "integers"), ([-1], "0 or more"), ([], "integers"), (3, "integers")],
)
def test_degrees_that_are_none_are_refused(untyped, degrees, message):
    with pytest.raises(mf.InvalidInput, match=message):
        growth_rates(attention(), degrees)


def test_a_sphere_needs_two_dimensions(untyped):
    with pytest.raises(mf.InvalidInput, match="2 or more"):
        growth_rates(attention(), [1], dimension=1)
    with pytest.raises(mf.InvalidInput, match="shape"):
        growth_rates(attention(), [1], noise=jnp.ones(2))


def test_a_beta_whose_square_overflows_is_refused():
    with pytest.raises(mf.Overflow, match="need a smaller one"):
        growth_rates(attention("softmax", 1e160), [1])


def test_the_fastest_degree_needs_a_known_beta():
    with pytest.raises(mf.InvalidInput, match="outside of jit"):
        jax.jit(lambda beta: fastest_degree(attention("softmax", beta)).rate)(5.0)
