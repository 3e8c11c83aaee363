"""Leaders, followers and the rank of attention matrices."""

import jax.numpy as jnp
import numpy as np
import pytest

from limit_cases import plain
from meanformer.errors import InvalidInput
from meanformer.observables import attention_rank, boolean_phase, find_leaders


def test_leaders_attend_to_themselves_and_others_follow():
    matrix = np.array([[1, 0, 0], [0.9, 0.1, 0], [0, 0, 1.0]])
    found = find_leaders(matrix)
    np.testing.assert_array_equal(found.leaders, [0, 2])
    np.testing.assert_array_equal(found.follows, [0, 0, 2])
    np.testing.assert_array_equal(found.is_boolean, [True, False, True])
    np.testing.assert_allclose(found.spread, [0, 0.1, 0], atol=1e-12)
    np.testing.assert_array_equal(found.chosen, [0, 2])


def test_the_rank_does_not_count_rounding():
    rng = np.random.default_rng(0)
    rows = rng.dirichlet(np.ones(9), size=2)
    matrix = rows[np.arange(9) % 2]
    noisy = matrix + 1e-13 * rng.normal(size=(9, 9))
    assert np.linalg.matrix_rank(noisy) > 2
    assert attention_rank(noisy) == 2
    assert attention_rank(noisy, tolerance=1e-15) == 9


def test_a_chain_of_followers_is_solved_exactly():
    # 0 leads, 1 follows 0, 2 follows 1: x0 = e^t a, x1' = V x0, x2' = V x1.
    value = np.array([[0.8, 0.3], [-0.2, 0.5]])
    points = np.array([[1.0, 0.5], [0.2, -0.4], [-0.7, 0.1]])
    follows = np.array([0, 0, 1])
    phase = boolean_phase(plain(value), 0.0, points, follows)
    assert phase.length == 2
    np.testing.assert_array_equal(phase.leaders, 0)
    step = 1e-5
    for depth in (0.0, 0.7, 3.0):
        z = phase.at(depth)
        rate = (phase.at(depth + step) - phase.at(max(depth - step, 0))) / (
            step + min(step, depth)
        )
        tolerance = 1e-4 if depth == 0 else 1e-8
        np.testing.assert_allclose(rate, (z[follows] - z) @ value.T, atol=tolerance)


def test_choices_that_go_round_in_a_circle_have_no_leader():
    with pytest.raises(InvalidInput, match="round in a circle"):
        boolean_phase(plain(np.eye(1)), 0.0, np.ones((2, 1)), np.array([1, 0]))


def test_a_choice_is_kept_or_not_by_the_sign_of_its_margin():
    layer = plain(np.eye(2))
    points = np.array([[1.0, 0.0], [-0.5, 0.8], [0.3, 0.1]])
    right = boolean_phase(layer, 2.0, points, np.array([0, 1, 0]))
    wrong = boolean_phase(layer, 2.0, points, np.array([0, 1, 1]))
    assert np.all(right.lasts(layer, accuracy=1e-8) > 1e-3)
    margins = wrong.lasts(layer, accuracy=1e-8)
    assert margins[2] < 0 < margins[:2].min()


def test_matrices_that_are_not_attention_are_refused():
    with pytest.raises(InvalidInput, match="must be square"):
        find_leaders(jnp.ones((2, 3)) / 3)
    with pytest.raises(InvalidInput, match="sums to 2"):
        find_leaders(2 * jnp.eye(2))
    with pytest.raises(InvalidInput, match="between 0 and one half"):
        find_leaders(jnp.eye(2), tolerance=1.0)
