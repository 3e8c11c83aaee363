"""Tests of the expected number of modes, against closed forms and counting."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.special
import scipy.stats

import meanformer as mf
from meanformer.errors import InvalidInput
from meanformer.observables import (
    expected_circle_modes,
    expected_modes,
    mode_constant,
    mode_rate,
    mode_window,
    sample_modes,
)
from meanformer.observables.modes.kac_rice import derivative_moments

FORMULA = {
    (100, 10): 1.6244,
    (1000, 10): 1.0985,
    (100, 100): 9.886,
    (400, 100): 10.091,
    (1000, 100): 8.702,
    (1000, 1000): 37.311,
    (4000, 400): 22.650,
}
# Means of 200 clouds (60 of 4000 tokens) and their standard errors.
COUNTED = {
    (100, 10): (1.73, 0.05),
    (1000, 10): (1.16, 0.03),
    (100, 100): (9.88, 0.11),
    (400, 100): (10.12, 0.12),
    (1000, 100): (8.84, 0.13),
    (1000, 1000): (37.61, 0.21),
    (4000, 400): (22.38, 0.33),
}
CIRCLE = {
    1.0: 1.2844030287,
    5.0: 2.7214683192,
    10.0: 3.8587324640,
    25.0: 6.1139791101,
    81.0: 11.0171115505,
    100.0: 12.2424022695,
}


@pytest.mark.parametrize(("setting", "expected"), FORMULA.items())
def test_the_corrected_formula_has_the_tabulated_values(setting, expected):
    np.testing.assert_allclose(expected_modes(*setting), expected, rtol=1e-3)


@pytest.mark.parametrize("beta", [0.7, 40.0])
@pytest.mark.parametrize("place", [0.0, 0.8, 2.5])
def test_moments_of_the_derivatives_are_those_of_quadrature(beta, place):
    # In bandwidths, with a multiple of the first derivative added to the second.
    shear = np.sqrt(beta) * place / (1 + 2 * beta)

    def kernel(token):
        gap = np.sqrt(beta) * (place - token)
        bump = np.exp(-(gap**2) / 2)
        return -gap * bump, (gap**2 - 1 - shear * gap) * bump, bump

    tokens = np.linspace(-14, 14, 40_001)

    def mean(function):
        values = function(*kernel(tokens)) * scipy.stats.norm.pdf(tokens)
        return np.trapezoid(values, tokens)

    size = np.sqrt(mean(lambda slope, bend, bump: bump**2))
    slope_mean = mean(lambda slope, bend, bump: slope) / size
    bend_mean = mean(lambda slope, bend, bump: bend) / size
    expected = [
        mean(lambda slope, bend, bump: slope**2) / size**2 - slope_mean**2,
        mean(lambda slope, bend, bump: bend**2) / size**2 - bend_mean**2,
        mean(lambda slope, bend, bump: slope * bend) / size**2 - slope_mean * bend_mean,
    ]
    means, *covariances = derivative_moments(
        jnp.array([place]), jnp.array(9.0), jnp.array(float(beta))
    )
    found = [float(part[0]) for part in (*means, *covariances)]
    wanted = [3 * slope_mean, 3 * bend_mean, *expected]
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-10 * max(expected))


def test_the_uncorrected_formula_diverges_in_the_tails_as_tabulated():
    for end, expected in ((8.0, 29.6), (10.0, 36.6)):
        places = np.linspace(-end, end, 20_001)
        rates = mode_rate(places, 100, 100, corrected=False)
        np.testing.assert_allclose(
            np.trapezoid(rates, places), expected, rtol=0, atol=0.05
        )


def test_the_uncorrected_rate_has_the_limits_of_the_tails():
    beta = 1e8
    middle, far = mode_rate([60.0, 1e7], 100, beta, corrected=False)
    np.testing.assert_allclose(middle / np.sqrt(beta), 0.194924, atol=1e-5)
    np.testing.assert_allclose(
        far / np.sqrt(beta), 1 / np.sqrt(2) / (2 * np.pi), rtol=1e-3
    )


def test_the_uncorrected_rate_keeps_its_digits_far_out():
    found = mode_rate([1e8, 1e200], 100, 100, corrected=False)
    np.testing.assert_allclose(found, 100 / np.sqrt(201) / (2 * np.pi), rtol=1e-12)
    np.testing.assert_array_equal(mode_rate([1e8, 1e200], 100, 100), 0)


def test_the_rate_in_the_middle_is_that_of_a_stationary_process():
    # Without a mean that bends: many more bandwidths than tokens would fill.
    np.testing.assert_allclose(
        mode_rate([0.0], 1e4, 1e6, corrected=False)[0] / 1e3,
        np.sqrt(1.5) / (2 * np.pi),
        rtol=2e-2,
    )


def test_the_integral_of_the_rate_is_the_expected_number():
    places = np.linspace(-9, 9, 20_001)
    total = np.trapezoid(mode_rate(places, 400, 100), places)
    np.testing.assert_allclose(expected_modes(400, 100), total, rtol=1e-5)


@pytest.mark.parametrize(
    ("count", "beta", "expected"), [(1e8, 10.0, 1.00223), (1e12, 1e3, 6.97609)]
)
def test_the_peak_in_the_middle_of_very_many_tokens_is_integrated(
    count, beta, expected
):
    half = np.concatenate([np.geomspace(1e-12, 0.01, 20_000), np.arange(1, 1200) / 100])
    places = np.unique(np.concatenate([-half, half]))
    total = np.trapezoid(mode_rate(places, count, beta), places)
    found = expected_modes(count, beta)
    np.testing.assert_allclose(found, total, rtol=1e-4)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("count", "beta", "expected"),
    [(100, 1e-300, 1.0), (1e300, 10.0, 1.0), (1e4, 1.0, 1.0), (100, 1e300, 100.0)],
)
def test_all_tokens_are_one_mode_or_each_is_one_at_the_ends_of_the_range(
    count, beta, expected
):
    np.testing.assert_allclose(expected_modes(count, beta), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("exponent", "constant", "ratios"),
    [
        (1.0, 0.3898, (0.4392, 0.4251, 0.4169)),
        (1.5, 0.2251, (0.2800, 0.2636, 0.2548)),
        (0.5, 0.2854, (0.1915, 0.1864, 0.1944)),
    ],
)
def test_the_constant_and_the_ratios_on_the_way_are_tabulated(
    exponent, constant, ratios
):
    np.testing.assert_allclose(mode_constant(exponent), constant, rtol=0, atol=5e-5)
    counts = 10.0 ** np.array([4, 6, 8])
    found = [expected_modes(n, n**exponent) / mode_window(n**exponent) for n in counts]
    np.testing.assert_allclose(found, ratios, rtol=1e-3)


def test_the_constant_keeps_its_digits_at_small_exponents():
    np.testing.assert_allclose(
        mode_constant(1e-20), np.sqrt(3) / (2 * np.pi) * 1e-10, rtol=1e-12
    )


def test_the_ratio_comes_near_the_constant_very_slowly():
    gaps = []
    for n in (1e4, 1e8, 1e16, 1e32):
        ratio = float(expected_modes(n, n) / mode_window(n))
        gaps.append(ratio - mode_constant(1.0))
    assert all(later < earlier for earlier, later in zip(gaps, gaps[1:], strict=False))
    assert 0 < gaps[-1] < 0.01


@pytest.mark.parametrize(("beta", "expected"), CIRCLE.items())
def test_the_formula_on_the_circle_has_the_tabulated_values(beta, expected):
    np.testing.assert_allclose(expected_circle_modes(beta), expected, rtol=1e-10)


def test_the_formula_on_the_circle_is_that_of_bessel_functions_and_its_limit():
    degrees = np.arange(400)
    squares = scipy.special.ive(degrees, 333.0) ** 2
    expected = np.sqrt((degrees**4 * squares).sum() / (degrees**2 * squares).sum())
    np.testing.assert_allclose(expected_circle_modes(333.0), expected, rtol=1e-11)
    large = expected_circle_modes(1e6) / np.sqrt(1.5e6)
    np.testing.assert_allclose(large, 1.0, rtol=1e-5)
    for beta in (1e-4, 1e-300):
        np.testing.assert_allclose(expected_circle_modes(beta), 1.0, rtol=1e-6)


def test_the_expectation_has_a_derivative_and_runs_compiled():
    both = jax.value_and_grad(lambda beta: expected_modes(1000.0, beta))
    values, slopes = jax.jit(jax.vmap(both))(jnp.array([10.0, 100.0]))
    np.testing.assert_allclose(values, [1.0985, 8.702], rtol=1e-3)
    wanted = (expected_modes(1000, 100.5) - expected_modes(1000, 99.5)).item()
    np.testing.assert_allclose(slopes[1], wanted, rtol=1e-3)


def test_single_precision_gives_the_same_number():
    found = expected_modes(jnp.float32(400), jnp.float32(100))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, 10.091, rtol=1e-3)


@pytest.mark.parametrize("setting", [(100, 10), (100, 100), (400, 100)])
def test_counted_modes_of_normal_tokens_are_those_tabulated(setting):
    sample = sample_modes(*setting, 100, key=jr.key(5))
    assert sample.is_certified
    mean, error = COUNTED[setting]
    assert abs(sample.mean - mean) < 4 * np.hypot(error, sample.standard_error)


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "counted"), COUNTED.items())
def test_two_hundred_clouds_have_the_tabulated_mean(setting, counted):
    sample = sample_modes(*setting, 60 if setting[0] == 4000 else 200, key=jr.key(6))
    mean, error = counted
    assert abs(sample.mean - mean) < 4 * np.hypot(error, sample.standard_error)


@pytest.mark.parametrize(
    ("count", "beta", "mean", "error"),
    [(1000, 5.0, 2.678, 0.027), (1000, 25.0, 6.145, 0.038), (200, 25.0, 6.107, 0.040)],
)
def test_counted_modes_on_the_circle_are_those_tabulated(count, beta, mean, error):
    samples = 30 if count == 1000 else 100
    sample = sample_modes(count, beta, samples, space=mf.Sphere(), key=jr.key(7))
    assert sample.is_certified
    assert abs(sample.mean - mean) < 4 * np.hypot(error, sample.standard_error)
    formula = float(expected_circle_modes(beta))
    assert abs(sample.mean - formula) < 4 * sample.standard_error


def test_the_sample_has_the_mean_and_error_of_its_counts():
    sample = sample_modes(20, 30.0, 16, key=jr.key(8))
    assert sample.counts.shape == (16,)
    np.testing.assert_allclose(sample.mean, np.mean(sample.counts))
    np.testing.assert_allclose(
        sample.standard_error, np.std(sample.counts, ddof=1) / 4, rtol=1e-12
    )


def test_wrong_numbers_are_refused_with_the_reason():
    with pytest.raises(InvalidInput, match="beta is -1.0; it must be positive"):
        expected_modes(10, -1.0)
    with pytest.raises(InvalidInput, match="count is 0.0; it must be positive"):
        expected_modes(0, 1.0)
    with pytest.raises(InvalidInput, match="exponent is 2.0; it must be between"):
        mode_constant(2.0)
    for beta in (1.0, np.inf):
        with pytest.raises(InvalidInput, match="it must be above 1 and finite"):
            mode_window(beta)
    with pytest.raises(InvalidInput, match="t holds nan at index"):
        mode_rate([0.0, np.nan], 10, 1.0)
    with pytest.raises(InvalidInput, match="it must be a list of places"):
        mode_rate(np.zeros((2, 2)), 10, 1.0)
    with pytest.raises(InvalidInput, match="samples is 1; it must be 2 or more"):
        sample_modes(10, 1.0, 1, key=jr.key(0))
