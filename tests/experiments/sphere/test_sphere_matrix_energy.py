"""What the experiment `sphere-matrix-energy` makes of its runs."""

import numpy as np
import pytest

from meanformer.experiments.sphere import sphere_matrix_energy as experiment


@pytest.mark.parametrize(
    ("diagonal", "gap"),
    [
        ((1.0, 1.0, 1.0), np.inf),
        ((1.0, 1.0), np.inf),
        ((1.25, 1.25, 1.0), 0.25),
        ((0.25, 0.25, 1.0), 0.75),
        ((0.5, 1.0), 0.5),
    ],
)
def test_the_gap_is_to_the_next_other_eigenvalue(diagonal, gap):
    axis = np.eye(len(diagonal))[np.argmax(diagonal)]
    run = experiment.run_of(np.diag(diagonal), np.tile(axis, (3, 1)))
    assert (run.count, run.gap) == (1, gap)
    assert abs(run.excess) < 1e-14


def test_published_shares_are_like_themselves_and_unlike_shifted_ones():
    for repeats in (8, 100):
        ours = np.round(experiment.PUBLISHED * repeats / 100).astype(int)
        assert experiment.same_shares(ours, repeats, seed=0) > 0.5
        for shift in (-1, 1):
            moved = np.roll(ours, shift)
            assert experiment.same_shares(moved, repeats, seed=0) < 1e-3


def test_samples_of_the_published_shares_pass_as_often_as_they_should():
    generator = np.random.default_rng(1)
    ours = generator.binomial(8, experiment.PUBLISHED / 100, size=(15, 20))
    found = [experiment.same_shares(counts, 8, seed=0) for counts in ours]
    assert min(found) > 1e-3
    assert 0.2 < np.median(found) < 0.9
