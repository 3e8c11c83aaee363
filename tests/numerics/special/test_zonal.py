"""The exponential kernel on spherical harmonics, against other ways to compute it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from meanformer.numerics.special.quadrature import gauss_gegenbauer
from meanformer.numerics.special.zonal import (
    log_zonal_mass,
    zonal_polynomials,
    zonal_ratios,
    zonal_slopes,
)

SIZES = [(2, 0.3), (2, 5.0), (3, 4.0), (5, 12.0), (8, 25.0), (128, 25.0), (3, -4.0)]


def funk_hecke(dimension, beta, count):
    """The integrals of the kernel times each polynomial, over the height."""
    nodes, masses = gauss_gegenbauer(120, dimension)
    table = zonal_polynomials(dimension, jnp.asarray(nodes), count)
    return np.asarray(table) @ (masses * np.exp(beta * nodes))


@pytest.mark.parametrize(("dimension", "beta"), SIZES)
def test_ratios_are_the_integrals_of_funk_and_hecke(dimension, beta):
    integrals = funk_hecke(dimension, beta, 8)
    ratios = zonal_ratios(dimension, jnp.asarray(beta), 8)
    np.testing.assert_allclose(ratios, integrals / integrals[0], rtol=1e-9, atol=1e-13)
    mass = log_zonal_mass(dimension, jnp.asarray(beta))
    np.testing.assert_allclose(mass, np.log(integrals[0]), rtol=1e-12)


def test_factors_of_the_ordinary_sphere_have_the_tabulated_digits():
    beta = jnp.asarray(4.0)
    factors = jnp.exp(log_zonal_mass(3, beta)) * zonal_ratios(3, beta, 4)
    tabulated = [6.822479299, 5.121438384, 2.981400511, 1.394687745]
    np.testing.assert_allclose(factors, tabulated, atol=1e-9)


@pytest.mark.parametrize("beta", [1e-3, 1.0, 30.0, 600.0])
def test_ratios_on_the_circle_are_those_of_bessel_functions(beta):
    exact = scipy.special.ive(np.arange(30), beta) / scipy.special.ive(0, beta)
    ratios = zonal_ratios(2, jnp.asarray(beta), 30)
    np.testing.assert_allclose(ratios, exact, rtol=1e-12, atol=1e-300)


def test_ratios_in_thousands_of_dimensions_are_finite_and_fall():
    ratios = np.asarray(zonal_ratios(5000, jnp.asarray(1e4), 400))
    assert np.isfinite(ratios).all()
    assert (np.diff(ratios) < 0).all()
    # The recurrence of Bessel functions, which no ratio was computed from upward.
    orders = 5000 + 2 * np.arange(1, 399) - 2.0
    rest = ratios[:-2] - ratios[2:] - orders / 1e4 * ratios[1:-1]
    np.testing.assert_allclose(rest, 0, atol=1e-13)


def test_slopes_are_smooth_at_zero_temperature_of_infinity():
    slopes = zonal_slopes(3, jnp.zeros(()), 4)
    np.testing.assert_allclose(slopes, 1 / (3 + 2 * np.arange(4)), rtol=1e-14)
    slope = jax.grad(lambda square: zonal_slopes(3, square, 1)[0])(jnp.zeros(()))
    np.testing.assert_allclose(slope, -1 / (9 * 5), rtol=1e-12)


def test_polynomials_are_those_of_legendre_gegenbauer_and_chebyshev():
    heights = jnp.linspace(-1, 1, 21)
    degrees = np.arange(7)
    legendre = scipy.special.eval_legendre(degrees[:, None], np.asarray(heights))
    np.testing.assert_allclose(zonal_polynomials(3, heights, 7), legendre, atol=1e-13)
    cosines = np.cos(degrees[:, None] * np.arccos(np.asarray(heights)))
    np.testing.assert_allclose(zonal_polynomials(2, heights, 7), cosines, atol=1e-13)
    raw = scipy.special.eval_gegenbauer(degrees[:, None], 3.0, np.asarray(heights))
    ends = scipy.special.eval_gegenbauer(degrees, 3.0, 1.0)
    found = zonal_polynomials(8, heights, 7)
    np.testing.assert_allclose(found, raw / ends[:, None], atol=1e-13)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_polynomials_are_the_first_ones(count):
    heights = jnp.array([[0.3, -0.2]])
    table = zonal_polynomials(4, heights, count)
    assert table.shape == (count, 1, 2)
    np.testing.assert_array_equal(
        table, jnp.stack([jnp.ones_like(heights), heights])[:count]
    )
