"""What becomes of covariances: limits, ranks, cycles, growth, blow-up."""

import numpy as np
import pytest

import meanformer as mf
from gaussian_reference import (
    COVARIANCE,
    attention,
    gaussian,
    integrated,
    slope_and_constant,
)
from meanformer.errors import InvalidInput
from meanformer.gaussian import KNOWN_CASES, centred, classify, limit_of
from meanformer.gaussian.explicit import explicit_limit
from meanformer.gaussian.exponents import LongRun

IDENTITY, TURN = np.eye(2), np.array([[0.0, -1.0], [1.0, 0.0]])
DIRECTION = np.array([1.0, 2.0]) / np.sqrt(5)
LIMIT = np.array([[0.44347826, -0.22173913], [-0.22173913, 0.11086957]])
CENTRED = gaussian(np.zeros(2))
# A turn inside the kernel of the symmetric part, which cancels in the covariance.
HELD = np.array([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, -1.0]])
SPREAD = np.array([[1.0, 0.3, -0.2], [0.3, 0.6, 0.1], [-0.2, 0.1, 0.8]])
PERIODIC = ["rotation, periodic, L2", "rotation, periodic, Sinkhorn"]


def one_direction():
    """Values I and minus the square of one direction as the score."""
    query = np.stack([DIRECTION, np.zeros(2)])
    return query, -query, IDENTITY


def classified(name, **options):
    case = KNOWN_CASES[name]
    return classify(case.gamma(), case.gaussian(), **options)


def moved_by_scipy(case, depths):
    (matrices,) = case.heads

    def closure(_, mean, spread):
        return slope_and_constant(case.kind, matrices, case.beta, mean, spread)

    found = integrated(closure, np.zeros(2), case.covariance, depths)
    return np.stack([spread for _, spread, _ in found])


@pytest.mark.slow
def test_a_multiple_of_the_identity_rests_under_a_rotation():
    found = classified("rotation, stationary")
    assert (found.kind, found.rank, found.normalised_rank) == ("converges", 2, 2)
    np.testing.assert_allclose(found.limit, 0.8 * IDENTITY, atol=1e-9)


@pytest.mark.slow
def test_other_covariances_turn_under_a_rotation_with_the_known_period():
    found = classified("rotation, periodic")
    assert found.kind == "periodic"
    assert found.period == pytest.approx(1.9634954084936207, rel=1e-9)
    assert found.period == pytest.approx(np.pi / np.trace(COVARIANCE), rel=1e-9)
    assert found.rank is found.limit is None
    half = moved_by_scipy(
        KNOWN_CASES["rotation, periodic"], [0.0, found.period / 2, found.period]
    )
    np.testing.assert_allclose(half[1], [[0.6, -0.3], [-0.3, 1.0]], atol=1e-8)
    np.testing.assert_allclose(half[2], COVARIANCE, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("name", PERIODIC)
def test_l2_and_sinkhorn_turn_too_and_keep_trace_and_determinant(name):
    found = classified(name)
    assert found.kind == "periodic"
    depths = np.array([0.0, found.period / 3, found.period, 10.0])
    spreads = moved_by_scipy(KNOWN_CASES[name], depths)
    np.testing.assert_allclose(np.trace(spreads, axis1=1, axis2=2), 1.6, atol=1e-9)
    np.testing.assert_allclose(np.linalg.det(spreads), 0.51, atol=1e-9)
    np.testing.assert_allclose(spreads[2], COVARIANCE, atol=1e-8)
    assert np.abs(spreads[1] - COVARIANCE).max() > 0.1


@pytest.mark.slow
def test_a_contracting_rotation_tends_to_zero_with_full_normalised_rank():
    found = classified("rotation, contracting")
    assert (found.kind, found.rank, found.normalised_rank) == ("converges", 0, 2)
    np.testing.assert_allclose(found.exponents, -1, atol=1e-3)
    assert not np.any(found.limit)


@pytest.mark.slow
def test_an_expanding_rotation_blows_up():
    found = classified("rotation, expanding")
    assert found.kind == "blow-up"
    assert found.depth == pytest.approx(4.3083, abs=1e-4)
    case = KNOWN_CASES["rotation, expanding"]
    spreads = moved_by_scipy(case, [0.0, found.depth * (1 - 1e-4)])
    # One over the trace falls to zero linearly, at the rate 2 eps beta = 0.2.
    values = np.linalg.eigvalsh(spreads[-1])
    assert values.sum() == pytest.approx(1 / (0.2 * 1e-4 * found.depth), rel=0.01)
    assert values[0] / values[1] < 1e-3
    (matrices,) = case.heads
    bound = 1 / (2 * np.linalg.norm(matrices[2], 2) * np.linalg.norm(COVARIANCE, 2))
    assert found.lower == pytest.approx(bound, rel=1e-12)
    assert found.lower < found.depth


@pytest.mark.slow
def test_the_full_rank_case_tends_to_zero_like_one_over_depth():
    case = KNOWN_CASES["full rank over t"]
    found = classified("full rank over t")
    assert (found.kind, found.rank, found.normalised_rank) == ("converges", 0, 2)
    run = limit_of(case.gamma(), case.gaussian())
    values = run.eigenvalues
    assert values[1] / values[0] == pytest.approx(0.58681355, abs=1e-7)
    scaled = run.depths[-1] * run.covariances[-1]
    expected = [[8.08767, -1.04124], [-1.04124, 13.23429]]
    np.testing.assert_allclose(scaled, expected, rtol=1e-3)
    ((score, _, value),) = case.heads
    moved = value @ scaled @ score @ scaled
    np.testing.assert_allclose(moved + moved.T, -scaled, rtol=2e-3, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "depths", "expected"),
    [
        (
            "full rank over t",
            [0.0, 1e2, 1e4],
            [[0.12130944, 0.07118602], [0.00134225, 0.00078765]],
        ),
        ("rotation, contracting", [0.0, 200.0, 300.0], [[0.024473, 0.023654]]),
    ],
)
def test_eigenvalues_of_decays_have_the_tabulated_values(name, depths, expected):
    case = KNOWN_CASES[name]
    path = mf.solve(
        mf.Flow(case.gamma()),
        case.gaussian(),
        depths[-1],
        save=np.array(depths),
        solver=mf.LongDepth(),
        rtol=1e-11,
    )
    found = path.statistics["eigenvalues"][1 : 1 + len(expected)]
    digits = 5e-9 if name == "full rank over t" else 5e-7
    np.testing.assert_allclose(found, expected, atol=digits)


@pytest.mark.parametrize(
    "kind",
    [
        "softmax",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("l2", "sinkhorn")),
    ],
)
def test_three_kinds_have_the_same_limit_of_rank_one(kind):
    run = limit_of(attention(kind, 1.0, one_direction()), gaussian())
    assert run.ending == "reached"
    assert run.is_settled
    assert (run.rank, run.normalised_rank) == (1, 1)
    np.testing.assert_allclose(run.limit, LIMIT, atol=1e-6)
    np.testing.assert_allclose(run.exponents, [0, -1], atol=1e-3)
    np.testing.assert_allclose(DIRECTION @ run.limit, 0, atol=1e-6)


def test_the_long_run_passes_through_the_closed_form():
    run = limit_of(attention("softmax", 1.0, one_direction()), gaussian())
    squared = np.outer(DIRECTION, DIRECTION)
    for index in (len(run.depths) // 3, -1):
        inverse = np.linalg.inv(COVARIANCE) + 2 * run.depths[index] * squared
        exact = np.linalg.inv(inverse)
        np.testing.assert_allclose(run.covariances[index], exact, atol=1e-7)


def test_definite_values_lead_into_the_kernel_of_a_negative_score_in_few_steps():
    # The velocity is a small difference here, with few digits: steps must not shrink.
    value = np.array([[1.4, 0.5], [0.5, 0.9]])
    query, key, _ = one_direction()
    run = limit_of(attention("softmax", 1.0, (query, key, value)), gaussian())
    assert run.is_settled
    assert (run.rank, run.normalised_rank) == (1, 1)
    assert len(run.depths) < 400
    np.testing.assert_allclose(DIRECTION @ run.covariances[-1], 0, atol=1e-5)
    # The trace of S over V never grows, by the theorem on definite values.
    weighted = np.trace(np.linalg.solve(value, run.covariances), axis1=1, axis2=2)
    assert np.all(np.diff(weighted) < 1e-8)


def test_a_limit_is_classified_with_its_rank():
    found = classify(attention("softmax", 1.0, one_direction()), gaussian())
    assert (found.kind, found.rank, found.normalised_rank) == ("converges", 1, 1)
    np.testing.assert_allclose(found.limit, LIMIT, atol=1e-6)
    assert "powers" in found.reason


def test_an_exact_blow_up_is_classified_with_its_depth():
    gamma = attention(
        "softmax", 1.0, (np.array([[1.0, 0.3], [0.0, -0.5]]), IDENTITY, IDENTITY)
    )
    found = classify(gamma, CENTRED)
    assert found.kind == "blow-up"
    assert found.depth == pytest.approx(0.47846889952153115, rel=1e-12)
    assert found.upper == pytest.approx(found.depth, rel=1e-12)
    run = limit_of(gamma, CENTRED)
    assert run.ending == "blew up"
    assert run.depths[-1] == pytest.approx(found.depth, rel=1e-6)


@pytest.mark.slow
def test_exponential_growth_is_no_blow_up():
    gamma = attention("sinkhorn", 1.0, (IDENTITY, IDENTITY, 0.3 * IDENTITY))
    found = classify(gamma, CENTRED)
    assert found.kind == "grows"
    assert "without a blow-up" in found.reason
    run = limit_of(gamma, CENTRED)
    assert run.ending == "escaped"
    logs = np.log(np.trace(run.covariances, axis1=1, axis2=2))
    # Sharp Sinkhorn with a positive form is the identity: growth exp(2 v t).
    rate = (logs[-1] - logs[-2]) / (run.depths[-1] - run.depths[-2])
    assert rate == pytest.approx(0.6, rel=1e-3)


def test_growth_like_a_power_is_seen():
    # A shear under which the second coordinate rests and the first grows with depth.
    value = np.array([[0.0, 1.0], [0.0, 0.0]])
    gamma = attention("softmax", 1.0, (np.diag([0.0, 1.0]), IDENTITY, value))
    found = classify(gamma, gaussian(np.zeros(2), IDENTITY))
    assert found.kind == "grows"
    # S11 = 1 + t^2, S12 = t, S22 = 1.
    assert found.exponents[0] == pytest.approx(2, abs=1e-3)


def test_a_resting_covariance_needs_no_run():
    gamma = attention("softmax", 1.0, (np.zeros((2, 2)), IDENTITY, IDENTITY))
    found = classify(gamma, gaussian(np.zeros(2), np.diag([2.0, 0.0])))
    assert (found.kind, found.rank, found.depth) == ("converges", 1, 0.0)
    np.testing.assert_array_equal(found.limit, np.diag([2.0, 0.0]))


@pytest.mark.slow
def test_too_few_steps_leave_it_undecided():
    # The kernel of distances turns this covariance for ever, while it decays.
    gamma = mf.L2(HELD, np.eye(3), np.eye(3))
    found = classify(gamma, gaussian(np.zeros(3), SPREAD), max_steps=16)
    assert found.kind == "undecided"
    assert "steps were used up" in found.reason


@pytest.mark.slow
def test_single_precision_is_followed_in_double():
    gamma = attention("softmax", 1.0, one_direction(), dtype=np.float32)
    run = limit_of(gamma, gaussian(dtype=np.float32))
    np.testing.assert_allclose(run.limit, LIMIT, atol=1e-6)


def test_what_cannot_be_followed_is_refused(untyped):
    gamma = attention("softmax")
    with pytest.raises(InvalidInput, match="depth is 10"):
        limit_of(gamma, CENTRED, depth=10.0)
    with pytest.raises(InvalidInput, match="covariance is zero"):
        limit_of(gamma, gaussian(np.zeros(2), np.zeros((2, 2))))
    with pytest.raises(InvalidInput, match="it must be a Gaussian"):
        classify(gamma, mf.TokenCloud(np.zeros((2, 2))))


@pytest.mark.parametrize("depth", [1e7, 1e12])
def test_a_turn_that_moves_nothing_is_followed_as_far_as_asked_for(depth):
    gamma = mf.Softmax(HELD, np.eye(3), 1e3 * np.eye(3))
    run = limit_of(gamma, gaussian(np.zeros(3), SPREAD), depth=depth)
    assert run.ending in ("reached", "unresolved")
    assert len(run.depths) < 200
    assert run.is_settled
    np.testing.assert_allclose(run.exponents, [0, 0, -1], atol=1e-4)
    np.testing.assert_allclose(run.covariances[-1], run.limit, atol=1e-5)


@pytest.mark.slow
def test_with_values_i_the_limit_is_that_of_the_closed_form():
    found = classify(mf.Softmax(HELD, np.eye(3), np.eye(3)),
                     gaussian(np.zeros(3), SPREAD), depth=1e7)  # fmt: skip
    # (Pi S^-1 Pi)^+ for the projection Pi onto the first two coordinates.
    exact = np.zeros((3, 3))
    exact[:2, :2] = np.linalg.inv(np.linalg.inv(SPREAD)[:2, :2])
    assert (found.kind, found.rank, found.normalised_rank) == ("converges", 2, 2)
    assert "closed form" in found.reason
    np.testing.assert_allclose(found.limit, exact, atol=1e-14)


@pytest.mark.parametrize("seed", range(6))
def test_rounding_of_a_singular_covariance_is_no_rank_of_its_limit(seed):
    random = np.random.default_rng(seed)
    factor, score = random.normal(size=(2, 3, 2))
    eye = np.eye(3)
    layer = mf.Softmax(-score @ score.T, eye, eye)
    for start in (centred(factor @ factor.T), centred(factor=factor)):
        # The kernel of the score meets the range of the covariance in zero.
        assert explicit_limit(layer, start).shape == (3, 0)


def test_a_limit_that_is_not_known_has_an_error_that_covers_it():
    # Positive definite values, for which the run's own limit at ten times the depth
    # is ten times closer.
    query, key, _ = one_direction()
    gamma = attention("softmax", 1.0, (query, key, np.array([[1.4, 0.5], [0.5, 0.9]])))
    early, late = (limit_of(gamma, gaussian(), depth=depth) for depth in (1e4, 1e6))
    away = np.linalg.norm(early.limit - late.limit)
    assert early.limit_factor is None
    assert 0 < away < early.limit_error < 100 * away
    known = limit_of(attention("softmax", 1.0, one_direction()), gaussian())
    assert known.limit_error == 0
    np.testing.assert_allclose(known.limit, LIMIT, atol=5e-9)


def test_a_long_run_is_shown_by_the_shapes_of_its_arrays():
    many, none = np.zeros((500, 2)), np.zeros(0)
    shown = repr(LongRun(many[:, 0], many, many[:, :, None], "reached", none, none))
    assert "log_eigenvalues=f64[500,2]" in shown
    assert "ending='reached'" in shown
