"""Tests of the modes of a Poisson process: table, quadrature and counting agree."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from meanformer.errors import InvalidInput
from meanformer.observables import (
    poisson_mode_density,
    poisson_mode_integral,
    sample_poisson_modes,
)
from meanformer.observables.modes import poisson

# Counted by an independent program, each known to 4e-4.
COUNTED = {
    0.05: 0.0451,
    0.1: 0.0813,
    0.15: 0.1095,
    0.2: 0.1313,
    0.3: 0.1600,
    0.4: 0.1767,
    0.5: 0.1852,
    0.6: 0.1897,
    0.7: 0.1923,
    0.85: 0.1937,
    1.0: 0.1941,
    1.5: 0.1943,
    2.0: 0.194924,
}
LIMIT = np.sqrt(1.5) / (2 * np.pi)


def test_the_density_has_the_counted_values():
    found = poisson_mode_density(list(COUNTED))
    np.testing.assert_allclose(found, list(COUNTED.values()), rtol=0, atol=4.5e-4)


def test_the_density_is_one_mode_per_token_less_one_per_close_pair_at_first():
    rates = np.array([1e-4, 1e-3, 1e-2])
    found = np.asarray(poisson_mode_density(rates))
    # A monotone cubic bends a little less than the expansion does.
    np.testing.assert_allclose(found, rates - 2 * rates**2, rtol=2e-3)


def test_the_density_never_falls_and_tends_to_that_of_a_gaussian_process():
    rates = np.geomspace(1e-3, 1e6, 2000)
    found = np.asarray(poisson_mode_density(rates))
    assert (np.diff(found) >= 0).all()
    assert (found < LIMIT + 1e-12).all()
    np.testing.assert_allclose(found[-1], LIMIT, rtol=1e-8)
    np.testing.assert_allclose(LIMIT, 0.194924, atol=5e-7)
    np.testing.assert_allclose(poisson_mode_density(0.0), 0.0, atol=0)


@pytest.mark.parametrize("rate", [0.05, 0.3, 1.0, 2.0])
def test_counting_a_poisson_process_gives_the_density(rate):
    sample = sample_poisson_modes(rate, 30_000.0, key=jr.key(3))
    assert sample.is_certified
    difference = sample.mean - float(poisson_mode_density(rate))
    assert abs(difference) < 4 * sample.standard_error


def test_the_exponent_of_the_characteristic_function_is_its_expansion_at_small_radii():
    radius, angles = 1e-3, np.array([0.3, 1.1])
    found = poisson.resolved_exponents(radius, angles)
    # Second moments of the two derivatives, and the mean of neither.
    slope, bend = np.sqrt(np.pi) / 2, 3 * np.sqrt(np.pi) / 4
    every = np.append(0, angles)
    second = np.cos(every) ** 2 * slope + np.sin(every) ** 2 * bend
    np.testing.assert_allclose(found, radius**2 * second / 2, rtol=1e-3)


def test_smoothed_and_resolved_exponents_agree_up_to_the_oscillation():
    angles = np.array([0.4, 1.0])
    resolved = np.mean(
        [
            poisson.resolved_exponents(radius, angles)
            for radius in 400 + 1.3 * np.arange(40)
        ],
        axis=0,
    )
    smooth = poisson.smoothed_exponents(np.log(425.0), angles)
    np.testing.assert_allclose(smooth, resolved, rtol=0, atol=5e-2)


def test_quadrature_gives_the_gaussian_limit_for_many_tokens():
    # The bulk of the integral alone: for many tokens nothing is beyond the cutoff.
    rates = np.array([20.0, 50.0, 100.0])
    found = 1 / (2 * np.pi) + poisson.resolved_part(rates, 21.0) / np.pi**2
    # Richardson's step from two of them removes the term of order one over the rate.
    np.testing.assert_allclose(2 * found[2] - found[1], LIMIT, rtol=0, atol=1e-7)
    np.testing.assert_allclose(rates * (LIMIT - found), 3.92e-4, rtol=1e-2)
    np.testing.assert_allclose(found, poisson_mode_density(rates), rtol=0, atol=1e-7)


@pytest.mark.slow
def test_quadrature_gives_the_density_at_all_rates():
    rates = np.array([0.4, 0.5, 0.7, 1.0, 1.5, 3.0, 10.0])
    found = poisson_mode_integral(rates, cutoff=210.0)
    expected = np.asarray(poisson_mode_density(rates))
    errors = [2e-4, 1e-4, 4e-5, 1e-5, 2e-6, 1e-6, 1e-6]
    assert (np.abs(found - expected) < errors).all()


def test_the_density_has_a_derivative_everywhere():
    rates = jnp.array([0.0, 0.05, 0.7, 99.0, 1e5])
    slopes = jax.vmap(jax.grad(poisson_mode_density))(rates)
    assert np.isfinite(slopes).all()
    np.testing.assert_allclose(slopes[0], 1.0, rtol=1e-12)
    np.testing.assert_allclose(slopes[-1], 3.9e-4 / 1e10, rtol=2e-2)


def test_wrong_rates_are_refused_with_the_reason():
    with pytest.raises(InvalidInput, match="rate is -1.0; it must not be negative"):
        poisson_mode_density(-1.0)
    with pytest.raises(InvalidInput, match="rate is 0.0; it must be positive"):
        sample_poisson_modes(0.0, 10.0, key=jr.key(0))
    for length in (-5.0, np.nan):
        with pytest.raises(InvalidInput, match="it must be positive and finite"):
            sample_poisson_modes(1.0, length, key=jr.key(0))
    for rates in ([0.1], [], [np.nan]):
        with pytest.raises(InvalidInput, match="count with sample_poisson_modes"):
            poisson_mode_integral(rates)
    for cutoff in (100.0, np.inf):
        with pytest.raises(InvalidInput, match="it must be above 200 and finite"):
            poisson_mode_integral([1.0], cutoff=cutoff)
