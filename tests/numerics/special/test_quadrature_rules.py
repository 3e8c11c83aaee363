"""Gauss rules: exact on polynomials up to their degree, and not beyond."""

import numpy as np
import pytest

from meanformer.errors import InvalidInput
from meanformer.numerics.special.quadrature import (
    gauss_gegenbauer,
    gauss_hermite,
    gauss_legendre,
    sphere_rule,
    tensor_rule,
)


def double_factorial(n):
    return float(np.prod(np.arange(n, 0, -2))) if n > 0 else 1.0


def normal_moment(power):
    return 0.0 if power % 2 else double_factorial(power - 1)


def uniform_moment(power):
    return 0.0 if power % 2 else 1 / (power + 1)


def sphere_moment(powers):
    """Average of a monomial over the unit sphere (Folland 2001)."""
    if any(power % 2 for power in powers):
        return 0.0
    numerator = np.prod([double_factorial(power - 1) for power in powers])
    dimension, degree = len(powers), sum(powers)
    return numerator / np.prod([dimension + 2 * k for k in range(degree // 2)])


@pytest.mark.parametrize("order", [1, 2, 5, 10])
@pytest.mark.parametrize(
    ("rule", "moment"),
    [(gauss_hermite, normal_moment), (gauss_legendre, uniform_moment)],
)
def test_rules_on_the_line_are_exact_to_their_degree_only(order, rule, moment):
    nodes, masses = rule(order)
    for power in range(2 * order):
        scale = masses @ np.abs(nodes) ** power
        np.testing.assert_allclose(
            masses @ nodes**power, moment(power), rtol=1e-12, atol=1e-14 * scale
        )
    beyond = masses @ nodes ** (2 * order)
    assert beyond < (1 - 1e-6) * moment(2 * order)


@pytest.mark.parametrize("dimension", [3, 4, 5, 12])
def test_gegenbauer_rule_is_a_coordinate_of_the_sphere(dimension):
    nodes, masses = gauss_gegenbauer(6, dimension)
    for power in range(12):
        expected = sphere_moment((power,) + (0,) * (dimension - 1))
        np.testing.assert_allclose(masses @ nodes**power, expected, atol=1e-15)
    assert masses.sum() == pytest.approx(1, abs=1e-15)


def test_high_order_rules_stay_accurate():
    nodes, masses = gauss_hermite(200)
    np.testing.assert_allclose(masses @ np.cos(3 * nodes), np.exp(-4.5), rtol=1e-10)
    nodes, masses = gauss_legendre(200)
    np.testing.assert_allclose(masses @ np.cos(99 * nodes), np.sin(99) / 99, rtol=1e-10)


def test_tensor_rule_is_the_product():
    nodes, masses = gauss_legendre(3)
    points, weights = tensor_rule(nodes, masses, 2)
    assert points.shape == (9, 2)
    expected = uniform_moment(4) * uniform_moment(2)
    assert weights @ (points[:, 0] ** 4 * points[:, 1] ** 2) == pytest.approx(expected)


def test_tensor_rule_in_dimension_zero_is_one_point():
    points, weights = tensor_rule(*gauss_legendre(4), 0)
    assert points.shape == (1, 0)
    np.testing.assert_array_equal(weights, [1.0])


@pytest.mark.parametrize(
    ("dimension", "order", "degree"),
    [(1, 1, 9), (2, 7, 6), (2, 8, 7), (3, 4, 7), (4, 3, 5), (5, 3, 5), (6, 2, 3)],
)
def test_sphere_rule_is_exact_to_its_degree(dimension, order, degree):
    points, weights = sphere_rule(dimension, order)
    np.testing.assert_allclose(np.linalg.norm(points, axis=1), 1, rtol=1e-15)
    for powers in np.ndindex(*(degree + 1,) * dimension):
        if sum(powers) <= degree:
            average = weights @ np.prod(points ** np.array(powers), axis=1)
            assert average == pytest.approx(sphere_moment(powers), abs=1e-15)


@pytest.mark.parametrize(("dimension", "order"), [(2, 8), (3, 4), (4, 3)])
def test_sphere_rule_is_not_exact_beyond_its_degree(dimension, order):
    points, weights = sphere_rule(dimension, order)
    degree = order if dimension == 2 else 2 * order
    powers = (0,) * (dimension - 1) + (degree,)
    average = weights @ points[:, -1] ** degree
    assert abs(average - sphere_moment(powers)) > 1e-4


@pytest.mark.parametrize(
    ("dimension", "order", "count"), [(1, 9, 2), (2, 9, 9), (3, 5, 50), (4, 3, 54)]
)
def test_sphere_rule_has_the_stated_number_of_nodes(dimension, order, count):
    assert len(sphere_rule(dimension, order)[1]) == count


def test_absurd_sizes_are_refused_before_anything_is_built():
    with pytest.raises(InvalidInput, match=r"order 10 in dimension 12 .* 1e12.0 nodes"):
        tensor_rule(*gauss_legendre(10), 12)
    with pytest.raises(InvalidInput, match="at most 5e"):
        sphere_rule(100, 20)
    with pytest.raises(InvalidInput, match="lower the order"):
        sphere_rule(2, 6_000_000)
