"""The nearest counterexamples to the low-rank conjecture."""

import numpy as np
import pytest

from gaussian_reference import integrated, slope_and_constant
from meanformer.errors import InvalidInput
from meanformer.gaussian import KNOWN_CASES, Ensemble
from meanformer.gaussian.conjecture.search import nearest_cycle, nearest_stationary

ROTATION = KNOWN_CASES["rotation, periodic"]


def distance_of(case, other):
    """How far the matrices Q and V of two cases are apart, over their size."""
    ((query, _, value),), ((other_query, _, other_value),) = case.heads, other.heads
    change = np.hypot(
        np.linalg.norm(query - other_query), np.linalg.norm(value - other_value)
    )
    return change / np.hypot(np.linalg.norm(query), np.linalg.norm(value))


def unrest_of(case):
    """The velocity of the covariance of a case, relative to its size, by NumPy."""
    ((query, key, value),) = case.heads
    spread, score = case.covariance, key.T @ query
    moved = value @ spread @ score @ spread
    sizes = [np.linalg.norm(matrix) for matrix in (value, spread, score, spread)]
    return np.linalg.norm(moved + moved.T) / np.prod(sizes)


@pytest.mark.slow
def test_the_rotation_is_itself_a_counterexample(key):
    found = nearest_stationary(ROTATION, 2, key=key)
    assert found.distance < 1e-10
    assert unrest_of(found.case) < 1e-10
    # Only multiples of the identity rest there; the trace is that of the case.
    np.testing.assert_allclose(found.case.covariance, 0.8 * np.eye(2), atol=1e-8)
    assert found.smallest == pytest.approx(1, abs=1e-8)
    assert found.period is None


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_a_random_draw_is_some_way_from_a_counterexample(index, key):
    case = Ensemble().draw(index)
    found = nearest_stationary(case, 2, key=key)
    assert found.distance > 1e-3
    assert found.distance == pytest.approx(distance_of(case, found.case), rel=1e-10)
    assert found.residual <= 1e-8
    assert unrest_of(found.case) < 1e-8
    values = np.linalg.eigvalsh(found.case.covariance)
    assert values.sum() == pytest.approx(np.trace(case.covariance), rel=1e-6)
    assert values[0] / values[1] == pytest.approx(found.smallest, rel=1e-6)
    assert found.smallest > 0.05


@pytest.mark.slow
def test_the_rotation_is_itself_a_cycle(key):
    found = nearest_cycle(ROTATION, key=key, starts=2)
    assert found.distance < 1e-6
    (matrices,) = found.case.heads

    def closure(_, mean, spread):
        return slope_and_constant("softmax", matrices, 1.0, mean, spread)

    depths = [0.0, found.period / 2, found.period]
    spread = found.case.covariance
    path = integrated(closure, np.zeros(2), spread, depths)
    np.testing.assert_allclose(path[-1][1], spread, atol=1e-7)
    # The trace is kept, and a turn takes pi over it.
    turns = found.period * np.trace(spread) / np.pi
    assert turns == pytest.approx(round(turns), abs=1e-6)
    # In one family of cycles after the other no direction is attracted.
    np.testing.assert_allclose(np.abs(found.multipliers), 1, atol=1e-4)


def test_two_heads_are_not_searched(key):
    case = Ensemble(heads=2).draw(0)
    with pytest.raises(InvalidInput, match="for a single head without perceptron"):
        nearest_stationary(case, 2, key=key)
    with pytest.raises(InvalidInput, match="for a single head without perceptron"):
        nearest_cycle(case, key=key)


def test_a_rank_above_the_dimension_is_not_searched(key):
    with pytest.raises(InvalidInput, match="rank is 3; the dimension is 2"):
        nearest_stationary(ROTATION, 3, key=key)
