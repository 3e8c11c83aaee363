"""Multiples of matrices: with a known factor, off by more than rounding, degenerate."""

import numpy as np
import pytest

from meanformer.numerics.multiples import (
    agree,
    definite_quotient,
    multiple_of,
    multiple_of_identity,
)

BASE = np.array([[1.0, 2.0], [3.0, -1.0]])


def test_a_multiple_is_told_with_its_factor():
    assert multiple_of(BASE, -2.5 * BASE, 1e-12) == pytest.approx(-2.5, rel=1e-15)


@pytest.mark.parametrize("size", [1.0, 1e-200, 1e100])
def test_what_is_off_by_more_than_the_tolerance_is_no_multiple(size):
    other = size * BASE
    other[0, 0] *= 1 + 1e-9
    assert multiple_of(BASE, other, 1e-12) is None
    assert multiple_of(BASE, other, 1e-8) == pytest.approx(size)


def test_zero_is_a_multiple_of_all_and_nothing_else_of_zero():
    zero = np.zeros((2, 2))
    assert multiple_of(BASE, zero, 1e-12) == 0
    assert multiple_of(zero, zero, 1e-12) == 0
    assert multiple_of(zero, BASE, 1e-12) is None


def test_shapes_that_differ_are_no_multiples():
    assert multiple_of(BASE, np.ones((1, 2)), 1.0) is None
    assert multiple_of_identity(np.eye(2, 3)) is None


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_multiples_of_the_identity_are_those_up_to_rounding(dtype):
    eps = float(np.finfo(dtype).eps)
    near = np.eye(3, dtype=dtype) * dtype(0.3)
    near[0, 2] = 4 * eps
    far = near.copy()
    far[0, 2] = 1e3 * eps
    assert multiple_of_identity(near) == pytest.approx(0.3, rel=10 * eps)
    assert multiple_of_identity(far) is None


def test_a_definite_quotient_is_found_and_symmetric():
    definite = np.array([[2.0, 0.5], [0.5, 1.0]])
    for sign in (1, -1):
        found = definite_quotient(BASE, sign * definite @ BASE, 1e-12)
        np.testing.assert_allclose(found, sign * definite, rtol=1e-13)


@pytest.mark.parametrize(
    "quotient", [np.diag([1.0, -1.0]), np.array([[1.0, 0.1], [0.0, 1.0]])]
)
def test_indefinite_or_asymmetric_quotients_are_none(quotient):
    assert definite_quotient(BASE, quotient @ BASE, 1e-12) is None


def test_a_singular_base_has_no_quotient():
    assert definite_quotient(np.ones((2, 2)), np.ones((2, 2)), 1e-12) is None


def test_agreement_is_relative_to_the_first():
    assert agree(1e-30 * BASE, 1e-30 * BASE * (1 + 1e-14), 1e-12)
    assert not agree(1e-30 * BASE, 2e-30 * BASE, 1e-12)
