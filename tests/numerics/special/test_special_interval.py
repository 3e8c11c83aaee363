"""Exponentials on an interval against mpmath, at every steepness."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

from meanformer.numerics.special.interval import quadratic_moments, uniform_transform

TILTS = np.array(
    [0.0, 1e-9, 1e-3, -0.3, 1.0, -1.5, 2.0, 4.0, -17.0, 80.0, 1e3, -1e6, 1e12]
)
BOXES = [(-1.0, 1.0), (0.0, 1.0), (2.0, 5.0), (-3.0, 0.5)]


def exact_uniform(tilt, low, high):
    """Log-Laplace transform and mean of a uniform law, with 60 digits."""
    with mpmath.workdps(60):
        u, a, b = (mpmath.mpf(float(x)) for x in (tilt, low, high))
        if u == 0:
            return 0.0, float((a + b) / 2)
        end, steepness = (b if u > 0 else a), (b - a) * abs(u)
        decay = mpmath.exp(-steepness)
        log_laplace = end * u + mpmath.log((1 - decay) / steepness)
        mean = end - 1 / u + mpmath.sign(u) * (b - a) * decay / (1 - decay)
        return float(log_laplace), float(mean)


def exact_quadratic(precision, tilt, low, high):
    """Log-mass and mean of the exponential of a quadratic, by the error function."""
    with mpmath.workdps(400):
        p, u, a, b = (mpmath.mpf(float(x)) for x in (precision, tilt, low, high))
        root, vertex = mpmath.sqrt(p / 2), u / p
        span = mpmath.erf(root * (b - vertex)) - mpmath.erf(root * (a - vertex))
        integral = mpmath.exp(u * vertex / 2) * span * mpmath.sqrt(mpmath.pi) / 2 / root
        mass = mpmath.re(integral) / (b - a)
        ends = [mpmath.exp(u * end - p * end**2 / 2) for end in (a, b)]
        mean = (u - (ends[1] - ends[0]) / (b - a) / mass) / p
        return float(mpmath.log(mass)), float(mean)


@pytest.mark.parametrize(("low", "high"), BOXES)
def test_uniform_transform_is_exact_to_rounding(low, high):
    expected = np.array([exact_uniform(tilt, low, high) for tilt in TILTS])
    ends = jnp.array([low]), jnp.array([high])
    log_laplace, mean = uniform_transform(jnp.asarray(TILTS), *ends)
    np.testing.assert_allclose(log_laplace, expected[:, 0], rtol=1e-14, atol=0)
    np.testing.assert_allclose(mean, expected[:, 1], rtol=1e-14, atol=1e-16)


def test_uniform_transform_runs_in_single_precision():
    tilts = TILTS.astype(np.float32)
    expected = np.array([exact_uniform(tilt, 0, 1) for tilt in tilts])
    ends = jnp.zeros(1, jnp.float32), jnp.ones(1, jnp.float32)
    log_laplace, mean = uniform_transform(jnp.asarray(tilts), *ends)
    assert log_laplace.dtype == mean.dtype == jnp.float32
    np.testing.assert_allclose(log_laplace, expected[:, 0], rtol=1e-6)
    np.testing.assert_allclose(mean, expected[:, 1], rtol=1e-6)


def test_gradient_of_the_uniform_transform_is_its_mean():
    low, high = jnp.array(-0.5), jnp.array(2.0)
    slopes = jax.jit(jax.vmap(jax.grad(lambda u: uniform_transform(u, low, high)[0])))
    means = uniform_transform(jnp.asarray(TILTS), low[None], high[None])[1]
    np.testing.assert_allclose(slopes(jnp.asarray(TILTS)), means, rtol=1e-13)


def test_third_derivatives_of_the_uniform_transform_are_finite():
    def log_laplace(u):
        return uniform_transform(u, jnp.array(0.0), jnp.array(1.0))[0]

    second = jax.jit(jax.grad(jax.grad(log_laplace)))
    third = jax.jit(jax.vmap(jax.grad(second)))(jnp.asarray(TILTS))
    assert np.isfinite(third).all()
    np.testing.assert_allclose(second(jnp.array(0.0)), 1 / 12, rtol=1e-14)
    np.testing.assert_allclose(second(jnp.array(1e3)), 1e-6, rtol=1e-12)


def moments(precision, tilt, low, high, origin=0.0):
    arguments = (precision, tilt, low, high, origin)
    return quadratic_moments(*(jnp.array(float(value)) for value in arguments))


PRECISIONS_AND_TILTS = [
    (precision, tilt)
    for precision in (1e-3, 1.0, -1.0, 20.0, -20.0, 80.0, -80.0)
    for tilt in (0.0, 0.7, -3.0, 10.0, 20.0, -60.0)
    if tilt**2 / abs(precision) < 700  # the digits of the reference
]


@pytest.mark.parametrize(("precision", "tilt"), PRECISIONS_AND_TILTS)
@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (0.5, 3.0)])
def test_quadratic_moments_are_exact_to_rounding(precision, tilt, low, high):
    log_mass, mean, _ = moments(precision, tilt, low, high)
    expected = exact_quadratic(precision, tilt, low, high)
    np.testing.assert_allclose(log_mass, expected[0], rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(mean, expected[1], rtol=1e-13, atol=1e-14)


def test_without_curvature_the_quadratic_moments_are_the_uniform_ones():
    for tilt in TILTS:
        log_mass, mean, _ = moments(0.0, tilt, -2.0, 1.0)
        expected = exact_uniform(tilt, -2.0, 1.0)
        np.testing.assert_allclose(log_mass, expected[0], rtol=1e-13, atol=1e-15)
        np.testing.assert_allclose(mean, expected[1], rtol=1e-13, atol=1e-15)


def test_far_tail_of_a_normal_law_keeps_its_digits():
    # On [30, 40] the mean is given by the inverse Mills ratio.
    log_mass, mean, variance = moments(1.0, 0.0, 30.0, 40.0, origin=30.0)
    with mpmath.workdps(500):
        mass = mpmath.ncdf(-30) - mpmath.ncdf(-40)
        expected_mean = (mpmath.npdf(30) - mpmath.npdf(40)) / mass
        expected_mass = mass * mpmath.sqrt(2 * mpmath.pi) * mpmath.exp(450) / 10
        square = 1 + (30 * mpmath.npdf(30) - 40 * mpmath.npdf(40)) / mass
        expected_variance = square - expected_mean**2
    np.testing.assert_allclose(log_mass, float(mpmath.log(expected_mass)), rtol=1e-13)
    np.testing.assert_allclose(mean, float(expected_mean), rtol=1e-15)
    np.testing.assert_allclose(variance, float(expected_variance), rtol=1e-11)


def test_a_narrow_peak_in_a_wide_interval_is_seen():
    log_mass, mean, variance = moments(1e6, 2e6, -1e3, 1e6)
    np.testing.assert_allclose(mean, 2.0, rtol=1e-14)
    np.testing.assert_allclose(variance, 1e-6, rtol=1e-11)
    expected = 2e6 + 0.5 * np.log(2 * np.pi / 1e6) - np.log(1e6 + 1e3)
    np.testing.assert_allclose(log_mass, expected, rtol=1e-14)


def log_mass_of(parameters):
    return quadratic_moments(*parameters)[0]


log_mass_gradient = jax.jit(jax.grad(log_mass_of))


@pytest.mark.parametrize("precision", [2.0, -2.0, 0.0, 900.0])
def test_gradient_of_the_log_mass_is_right_in_every_parameter(precision):
    arguments = jnp.array([precision, 0.7, -0.4, 1.3, 0.0])
    gradient = log_mass_gradient(arguments)
    for i, size in enumerate(arguments[:4]):
        step = 1e-5 * max(1.0, abs(float(size)))
        shift = jnp.zeros(5).at[i].set(step)
        difference = log_mass_of(arguments + shift) - log_mass_of(arguments - shift)
        np.testing.assert_allclose(gradient[i], difference / (2 * step), rtol=1e-7)


def test_quadratic_moments_run_in_single_precision():
    arguments = (jnp.array(value, jnp.float32) for value in (3.0, 0.5, 0.2, 9.0, 0.0))
    log_mass, mean, variance = quadratic_moments(*arguments)
    assert log_mass.dtype == mean.dtype == variance.dtype == jnp.float32
    expected = exact_quadratic(3.0, 0.5, np.float32(0.2), 9.0)
    np.testing.assert_allclose([log_mass, mean], expected, rtol=2e-6)
