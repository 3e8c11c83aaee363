"""Long runs that were once misread: growth, slow limits, ratios of eigenvalues."""

import numpy as np
import pytest
import scipy.integrate

import meanformer as mf
from gaussian_reference import COVARIANCE
from meanformer.errors import InvalidInput
from meanformer.gaussian import (
    Ensemble,
    centred,
    classify,
    examine,
    growth_along,
    limit_of,
)

IDENTITY = np.eye(2)
# Rates of the logarithm of the trace, by another program, with thirty digits.
RATES = {0: 10.17, 7: 0.1953, 9: 0.1246, 10: 1.8755, 17: 69.83}


def followed_by_scipy(case, depths):
    """The covariances of softmax at these depths, from the equations in NumPy."""
    ((query, key, value),) = case.heads
    upper = np.triu_indices(case.dimension)

    def whole(entries):
        spread = np.zeros_like(case.covariance)
        spread[upper] = spread.T[upper] = entries
        return spread

    def field(_, entries):
        spread = whole(entries)
        moved = value @ spread @ key.T @ query @ spread
        return (moved + moved.T)[upper]

    ends, first = (0.0, depths[-1]), case.covariance[upper]
    options = {"method": "LSODA", "rtol": 1e-9, "atol": 1e-12}
    found = scipy.integrate.solve_ivp(field, ends, first, t_eval=depths, **options)
    assert found.success
    return np.stack([whole(entries) for entries in found.y.T])


@pytest.mark.slow
@pytest.mark.parametrize("index", RATES)
def test_exponential_growth_of_random_draws_has_the_tabulated_rate(index):
    case = Ensemble("normal", 3).draw(index)
    outcome = classify(case.gamma(), case.gaussian(), depth=1e5)
    assert outcome.kind == "grows"
    run = limit_of(case.gamma(), case.gaussian(), depth=1e5)
    # Towards a blow-up the second would be ten times the first.
    np.testing.assert_allclose(run.growth_rates, RATES[index], rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1e6, 1e8, 1e10])
def test_a_slow_limit_has_the_same_rank_however_far_it_is_followed(depth):
    case = Ensemble("normal", 3).draw(1)
    outcome = classify(case.gamma(), case.gaussian(), depth=depth)
    assert (outcome.kind, outcome.rank) == ("converges", 1)


@pytest.mark.slow
def test_a_slow_limit_is_approached_as_scipy_approaches_it():
    case = Ensemble("normal", 3).draw(1)
    run = limit_of(case.gamma(), case.gaussian(), depth=1e10)
    places = np.searchsorted(run.depths, [1e2, 1e4, 1e6])
    largest = np.linalg.eigvalsh(followed_by_scipy(case, run.depths[places]))[:, -1]
    found = np.exp(run.log_eigenvalues[places, 0])
    np.testing.assert_allclose(found[:2], largest[:2], rtol=2e-6)
    np.testing.assert_allclose(found[2], largest[2], rtol=1e-4)
    shorter = limit_of(case.gamma(), case.gaussian(), depth=1e8)
    (spread,) = followed_by_scipy(case, shorter.depths[-1:])
    expected = np.linalg.eigvalsh(spread)[-1]
    assert shorter.eigenvalues[0] == pytest.approx(expected, rel=1e-4)
    # What is left to the limit is less than 1e-2.
    assert run.eigenvalues[0] == pytest.approx(expected, rel=1e-2)


@pytest.mark.slow
def test_a_case_near_the_rotation_loses_one_direction():
    draw = examine(Ensemble("near-rotation", 2, seed=3).draw(0))
    assert (draw.kind, draw.rank, draw.normalised_rank) == ("converges", 0, 1)
    assert draw.exception == ""


@pytest.mark.slow
def test_the_ratio_of_eigenvalues_near_the_rotation_has_the_tabulated_values():
    case = Ensemble("near-rotation", 2, seed=3).draw(0)
    path = mf.solve(
        mf.Flow(case.gamma()), case.gaussian(), 100.0, save=np.array([0.0, 10.0, 100.0])
    )
    largest, smallest = path.statistics["eigenvalues"].T
    np.testing.assert_allclose(largest[1:] / smallest[1:], [9.5e4, 4.9e7], rtol=5e-3)


@pytest.mark.slow
def test_exponents_are_read_off_a_flow_with_a_closed_form():
    # The inverse grows by 2 t in its first entry: one eigenvalue goes like 1 / t.
    gamma = mf.Softmax(np.diag([1.0, 0.0]), IDENTITY, -IDENTITY)
    depths = np.concatenate([[0.0], np.geomspace(1e-3, 1e5, 60)])
    path = mf.solve(
        mf.Flow(gamma), centred(COVARIANCE), 1e5, save=depths, solver=mf.LongDepth()
    )
    run = growth_along(path)
    inverse = np.linalg.inv(COVARIANCE)
    exact = [np.linalg.inv(inverse + np.diag([2 * t, 0])) for t in run.depths[1:]]
    logs = np.log(np.linalg.eigvalsh(exact)[:, ::-1])
    np.testing.assert_allclose(run.log_eigenvalues[1:], logs, atol=1e-5)
    decade = np.searchsorted(run.depths, 1e4, side="right") - 1
    slopes = (logs[-1] - logs[decade - 1]) / np.log(1e5 / run.depths[decade])
    np.testing.assert_allclose(run.exponents, slopes, atol=1e-6)
    np.testing.assert_allclose(run.limit, np.diag([0.0, 0.51]), atol=1e-5)
    assert (run.ending, run.rank, run.is_settled) == ("reached", 1, True)


def test_exponents_are_not_read_off_two_depths():
    gamma = mf.Softmax(IDENTITY, IDENTITY, -IDENTITY)
    path = mf.run_layers(mf.Flow(gamma), centred(COVARIANCE), 1, step=0.1)
    with pytest.raises(InvalidInput, match="at least three are saved"):
        growth_along(path)
