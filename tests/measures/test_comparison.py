"""Tests of atoms that are the same up to order and rounding."""

import numpy as np
import pytest

from meanformer.measures.comparison import Atoms, is_convolution, lines_through_zero

RNG = np.random.default_rng(5)
POINTS = RNG.standard_normal((4, 2))
MASSES = np.array([0.4, 0.3, 0.2, 0.1])
X, Y = np.array([1.0, 0.5]), np.array([-0.4, 1.0])


def test_atoms_are_the_same_in_any_order():
    order = [2, 0, 3, 1]
    shuffled = Atoms(POINTS[order], MASSES[order], 1e-12)
    assert Atoms(POINTS, MASSES, 1e-12).is_same(shuffled)


@pytest.mark.parametrize("slack", [1e-9, 1e-3])
def test_the_larger_slack_decides_what_is_the_same(slack):
    moved = Atoms(POINTS + np.array([1e-6, 0]), MASSES, slack)
    assert Atoms(POINTS, MASSES, 1e-9).is_same(moved) == (slack > 1e-6)


def test_other_masses_are_other_atoms():
    other = Atoms(POINTS, MASSES[::-1], 1e-9)
    assert not Atoms(POINTS, MASSES, 1e-9).is_same(other)


def test_atoms_that_have_met_are_one():
    twice = Atoms(np.repeat(POINTS, 2, axis=0), np.repeat(MASSES / 2, 2), 1e-9)
    assert twice.joined.is_same(Atoms(POINTS, MASSES, 1e-9))
    assert len(twice.joined.points) == 4


def test_the_radius_is_a_root_mean_square():
    assert Atoms(np.array([[3.0, 4.0], [0, 0]]), np.array([0.5, 0.5]), 0).radius == (
        pytest.approx(np.sqrt(12.5))
    )


def test_sums_of_independent_atoms_are_their_convolution():
    first, second = Atoms(POINTS[:2], np.array([0.3, 0.7]), 1e-12), np.array([0.6, 0.4])
    second = Atoms(POINTS[2:], second, 1e-12)
    sums = (first.points[:, None] + second.points[None]).reshape(-1, 2)
    masses = np.outer(first.masses, second.masses).ravel()
    assert is_convolution([first, second], Atoms(sums, masses, 1e-12))
    assert not is_convolution([first, first], Atoms(sums, masses, 1e-12))
    assert not is_convolution([first, second], Atoms(sums, masses[::-1], 1e-12))


def test_lines_join_opposite_queries_with_opposite_factors():
    queries = np.array([X, -2 * X, Y, 0 * X, X + 1e-14])
    groups, factors = lines_through_zero(queries)
    assert groups[0] == groups[1] == groups[4] != groups[2]
    assert groups[3] == -1
    np.testing.assert_allclose(factors[:2] / factors[0], (1, -2))
