"""The second look confirms what is so, and nothing else."""

import dataclasses

import numpy as np
import pytest

from meanformer.gaussian import KNOWN_CASES, Classification, Ensemble, classify
from meanformer.gaussian.conjecture.explorer import is_confirmed

REST, CYCLE, DECAY = (
    f"rotation, {name}" for name in ("stationary", "periodic", "contracting")
)
# What is known of the first two without a computation, for a trace of 1.6.
KNOWN = {
    REST: Classification(
        "converges", "", 0.0, np.full(2, 0.8), 2, 2, 0.8 * np.eye(2), np.zeros(2)
    ),
    CYCLE: Classification(
        "periodic",
        "",
        10.0,
        np.array([1.16055513, 0.43944487]),
        period=np.pi / 1.6,
    ),
}


def confirmed(name, **claims):
    case = KNOWN_CASES[name]
    found = dataclasses.replace(KNOWN[name], **claims)
    return is_confirmed(case.gamma(), case.gaussian(), found)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_known_period_is_confirmed_and_so_is_its_double(factor):
    assert confirmed(CYCLE, period=factor * np.pi / 1.6)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.5, 1.01, 1 + 1e-4])
def test_a_wrong_period_is_rejected(factor):
    assert not confirmed(CYCLE, period=factor * np.pi / 1.6)


@pytest.mark.slow
def test_a_known_centre_is_confirmed():
    assert confirmed(REST)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "rank"), [(np.diag([1.0, 0.6]), 2), (np.diag([1.6, 0.0]), 1)]
)
def test_a_limit_that_does_not_rest_is_rejected(limit, rank):
    # Under the rotation only multiples of the identity rest.
    assert not confirmed(REST, limit=limit, rank=rank)


def test_what_is_undecided_is_not_confirmed():
    assert not confirmed(REST, kind="undecided")
    assert not confirmed(REST, kind="grows", rank=None, limit=None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rotation, periodic, L2", DECAY, "full rank over t"])
def test_known_counterexamples_are_confirmed(name):
    case = KNOWN_CASES[name]
    found = classify(case.gamma(), case.gaussian())
    assert is_confirmed(case.gamma(), case.gaussian(), found)


@pytest.mark.slow
def test_a_decay_of_one_direction_is_not_confirmed_as_one_of_full_rank():
    case = Ensemble("near-rotation", 2, seed=3).draw(0)
    found = classify(case.gamma(), case.gaussian(), depth=1e5)
    assert (found.kind, found.rank, found.normalised_rank) == ("converges", 0, 1)
    claimed = dataclasses.replace(found, normalised_rank=2)
    assert not is_confirmed(case.gamma(), case.gaussian(), claimed)
