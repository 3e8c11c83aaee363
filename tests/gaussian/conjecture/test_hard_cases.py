"""Cases in which long runs and comparisons once went astray."""

import jax.numpy as jnp
import numpy as np
import pytest

import meanformer as mf
from meanformer.gaussian import Ensemble, classify, compare_with_particles, examine


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["l2", "sinkhorn"])
def test_exponential_growth_is_told_from_what_is_undecided(kind):
    # V A has the eigenvalues 2.19 and 0.53: the covariance grows exponentially.
    case = Ensemble("normal", 2, kind).draw(2)
    outcome = classify(case.gamma(), case.gaussian(), depth=1e5)
    assert outcome.kind == "grows"
    assert outcome.exponents[0] > 10


@pytest.mark.slow
def test_a_slope_that_cancels_does_not_stop_a_long_run():
    # Here S A tends to zero like 1/t, so that few digits of the slope are left.
    case = Ensemble("negative", 2).draw(0)
    outcome = classify(case.gamma(), case.gaussian(), depth=1e7, rtol=1e-12)
    assert (outcome.kind, outcome.rank) == ("converges", 1)


@pytest.mark.slow
def test_slow_growth_at_a_first_look_is_a_limit_at_the_second():
    case = Ensemble("normal", 3).draw(5)
    first = classify(case.gamma(), case.gaussian(), depth=1e5)
    draw = examine(case)
    assert first.kind == "grows"
    assert (draw.kind, draw.rank, draw.exception) == ("converges", 1, "")


@pytest.mark.slow
def test_moments_are_compared_only_at_depths_that_both_reached():
    # The Gaussian of these moments blows up at depth 1/4, the tokens do not.
    tokens = mf.TokenCloud(np.array([[-1.0], [1.0]]))
    flow = mf.Flow(mf.identity_attention("softmax", 1, 2.0))
    with pytest.warns(mf.errors.StoppedEarly):
        found = compare_with_particles(flow, tokens, 1.0, save=11)
    assert len(found.gaussians) > len(found.depths)
    np.testing.assert_array_equal(
        found.depths, found.tokens.depths[: len(found.depths)]
    )
    assert bool(jnp.all(found.depths < 0.25))
