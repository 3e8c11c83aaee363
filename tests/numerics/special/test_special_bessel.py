"""The functions of the sphere against mpmath, scipy and their own derivatives."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
import scipy.special
from numpy.polynomial.polynomial import polyval

from meanformer.numerics.special.bessel import (
    debye_polynomials,
    sphere_functions,
    sphere_transform,
)

DIMENSIONS = [1, 2, 3, 4, 9, 36, 37, 38, 39, 40, 100, 511, 512]
RADII = np.array(
    [1e-6, 1e-3, 0.1, 1.0, 3.0, 7.0, 10.0, 13.0, 40.0, 250.0, 1e3, 1e4, 123456.0, 1e6]
)


def exact(dimension, radius):
    """Log-Laplace transform and ratio of Bessel functions with 60 digits."""
    order, r = mpmath.mpf(dimension) / 2 - 1, mpmath.mpf(float(radius))
    with mpmath.workdps(60):
        lower, upper = mpmath.besseli(order, r), mpmath.besseli(order + 1, r)
        factor = mpmath.gamma(order + 1) * (2 / r) ** order
        return float(mpmath.log(factor * lower)), float(upper / lower)


def along_one_axis(radii, dimension):
    log_laplace, means = sphere_transform(radii[:, None], dimension)
    return log_laplace, means[:, 0]


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_sphere_transform_is_exact_to_rounding_at_every_radius(dimension):
    expected = np.array([exact(dimension, radius) for radius in RADII])
    log_laplace, ratio = along_one_axis(jnp.asarray(RADII), dimension)
    np.testing.assert_allclose(log_laplace, expected[:, 0], rtol=1e-14, atol=0)
    np.testing.assert_allclose(ratio, expected[:, 1], rtol=1e-14, atol=0)


@pytest.mark.parametrize("dimension", [1, 2, 3, 38, 512])
def test_sphere_transform_in_single_precision_has_five_digits(dimension):
    radii = RADII.astype(np.float32)
    expected = np.array([exact(dimension, radius) for radius in radii])
    log_laplace, ratio = along_one_axis(jnp.asarray(radii), dimension)
    assert log_laplace.dtype == ratio.dtype == jnp.float32
    np.testing.assert_allclose(log_laplace, expected[:, 0], rtol=1e-5)
    np.testing.assert_allclose(ratio, expected[:, 1], rtol=1e-5)


def test_ratio_on_the_circle_agrees_with_scipy():
    radii = np.geomspace(1e-3, 1e6, 400)
    _, ratio = along_one_axis(jnp.asarray(radii), 2)
    expected = scipy.special.i1e(radii) / scipy.special.i0e(radii)
    np.testing.assert_allclose(ratio, expected, rtol=2e-15)


def test_log_laplace_agrees_with_scipy_where_scipy_does_not_underflow():
    radii = np.geomspace(1, 1e4, 50)
    for dimension in (2, 5, 20, 41):
        order = dimension / 2 - 1
        expected = (
            scipy.special.gammaln(order + 1)
            + order * np.log(2 / radii)
            + np.log(scipy.special.ive(order, radii))
            + radii
        )
        log_laplace, _ = along_one_axis(jnp.asarray(radii), dimension)
        np.testing.assert_allclose(log_laplace, expected, rtol=1e-11)


def test_dimension_three_is_the_langevin_function():
    radii = np.geomspace(0.5, 500, 60)
    log_laplace, ratio = along_one_axis(jnp.asarray(radii), 3)
    np.testing.assert_allclose(ratio, 1 / np.tanh(radii) - 1 / radii, rtol=1e-14)
    expected = radii + np.log1p(-np.exp(-2 * radii)) - np.log(2 * radii)
    np.testing.assert_allclose(log_laplace, expected, rtol=1e-13)


def test_dimension_one_is_the_hyperbolic_cosine():
    radii = np.geomspace(1e-3, 300, 60)
    log_laplace, ratio = along_one_axis(jnp.asarray(radii), 1)
    np.testing.assert_allclose(ratio, np.tanh(radii), rtol=1e-14)
    np.testing.assert_allclose(log_laplace, np.log(np.cosh(radii)), rtol=1e-9)


@pytest.mark.parametrize("dimension", [1, 2, 3, 40])
def test_derivatives_follow_the_differential_equation_of_the_ratio(dimension):
    radii = jnp.array([0.01, 0.3, 2.0, 9.0, 60.0])

    def log_laplace(r):
        return sphere_transform(r[None], dimension)[0]

    def ratio(r):
        return sphere_transform(r[None], dimension)[1][0]

    a = jax.vmap(ratio)(radii)
    gradient = jax.jit(jax.vmap(jax.grad(log_laplace)))(radii)
    np.testing.assert_allclose(gradient, a, rtol=1e-14)
    slope = 1 - a**2 - (dimension - 1) * a / radii
    for curvature in (jax.grad(ratio), jax.grad(jax.grad(log_laplace))):
        computed = jax.jit(jax.vmap(curvature))(radii)
        np.testing.assert_allclose(computed, slope, atol=2e-14)


@pytest.mark.parametrize("dimension", [2, 3, 38, 512])
def test_slope_of_the_ratio_loses_no_more_digits_than_the_radius_has(dimension):
    slope = jax.jit(jax.grad(lambda r: sphere_transform(r[None], dimension)[1][0]))
    for radius in (1e-3, 1.0, 12.0, 1e3, 1e6):
        with mpmath.workdps(60):
            order, r = mpmath.mpf(dimension) / 2 - 1, mpmath.mpf(radius)
            a = mpmath.besseli(order + 1, r) / mpmath.besseli(order, r)
            expected = float(1 - a**2 - (dimension - 1) * a / r)
        computed = slope(jnp.array(radius))
        np.testing.assert_allclose(computed, expected, rtol=1e-15 * (100 + radius))


@pytest.mark.parametrize("dimension", [1, 2, 3, 7])
def test_derivatives_agree_with_finite_differences(dimension):
    squares = jnp.array([0.0, 0.04, 1.0, 30.0, 500.0])
    step = 1e-4 * (1 + squares)
    above, below = (sphere_functions(dimension, s) for s in (squares + step, squares))
    middle = (squares + step / 2,)
    _, slopes = jax.jvp(lambda s: sphere_functions(dimension, s), middle, (step,))
    for value_above, value_below, slope in zip(above, below, slopes, strict=True):
        np.testing.assert_allclose(value_above - value_below, slope, rtol=1e-6)


@pytest.mark.parametrize("dimension", [1, 2, 3, 512])
def test_derivatives_of_every_order_are_finite_at_zero(dimension):
    origin = jnp.zeros(dimension)

    def log_laplace(u):
        return sphere_transform(u, dimension)[0]

    np.testing.assert_array_equal(jax.jit(jax.grad(log_laplace))(origin), 0)
    hessian = jax.jit(jax.hessian(log_laplace))(origin)
    np.testing.assert_allclose(hessian, np.eye(dimension) / dimension, atol=1e-15)
    mean = sphere_transform(origin, dimension)[1]
    np.testing.assert_array_equal(mean, 0)


def test_fourth_derivative_at_zero_is_the_fourth_cumulant():
    def log_laplace(r):
        return sphere_transform(r[None], 3)[0]

    fourth = jax.jit(jax.grad(jax.grad(jax.grad(jax.grad(log_laplace)))))
    # One coordinate is uniform on [-1, 1]: 1/5 - 3/9 = -2/15.
    np.testing.assert_allclose(fourth(jnp.array(0.0)), -2 / 15, rtol=1e-13)


@pytest.mark.parametrize(
    ("dtype", "radius"), [(jnp.float64, 1e300), (jnp.float32, 1e37)]
)
def test_huge_tilts_do_not_overflow_in_value_or_gradient(dtype, radius):
    u = jnp.array([0.6, 0.0, -0.8], dtype) * radius
    log_laplace, mean = sphere_transform(u, 3)
    rounding = 10 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(log_laplace, radius, rtol=rounding)
    np.testing.assert_allclose(mean, [0.6, 0, -0.8], atol=rounding)
    gradient = jax.jit(jax.grad(lambda u: sphere_transform(u, 3)[0]))(u)
    np.testing.assert_allclose(gradient, mean, atol=rounding)
    jacobian = jax.jit(jax.jacfwd(lambda u: sphere_transform(u, 3)[1]))(u)
    np.testing.assert_allclose(jacobian, 0, atol=rounding)


def test_jit_and_vmap_agree_with_the_plain_call(key):
    u = 5 * jax.random.normal(key, (7, 4))
    plain = sphere_transform(u, 4)
    for other in (
        jax.jit(sphere_transform, static_argnums=1)(u, 4),
        jax.vmap(lambda row: sphere_transform(row, 4))(u),
    ):
        for a, b in zip(plain, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-14)


def test_debye_polynomials_sum_to_stirlings_series_at_one():
    # At p = 1, D_k = -B_{k+1} / (k (k + 1)), with the Bernoulli numbers.
    for k, polynomial in enumerate(debye_polynomials(12), start=1):
        expected = -mpmath.bernoulli(k + 1) / (k * (k + 1))
        assert float(sum(polynomial)) == pytest.approx(float(expected), abs=1e-15)


def test_debye_expansion_has_the_order_of_its_first_omitted_term():
    z, errors = 0.7, []
    orders = (20.0, 40.0)
    for mu in orders:
        root = np.sqrt(1 + z**2)
        eta = root + np.log(z / (1 + root))
        leading = mu * eta - 0.5 * np.log(2 * np.pi * mu * root)
        terms = [
            polyval(1 / root, polynomial.astype(float)) / mu**k
            for k, polynomial in enumerate(debye_polynomials(3), start=1)
        ]
        with mpmath.workdps(40):
            exact_log = mpmath.log(mpmath.besseli(mu, mu * z))
            errors.append(float(exact_log - mpmath.mpf(leading) - sum(terms)))
    rate = np.log2(abs(errors[0] / errors[1]))
    assert rate == pytest.approx(4, abs=0.3)
