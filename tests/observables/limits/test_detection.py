"""Limits found in trajectories: tabulated values, and never a wrong verdict."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
from hypothesis import given, settings
from hypothesis import strategies as st

import meanformer as mf
from limit_cases import KINDS, THIRD, TOKENS, VALUE, plain, random_case
from meanformer.errors import InvalidInput, Overflow, Unsupported
from meanformer.observables import detect_limit, find_limit
from meanformer.observables.limits import finding
from meanformer.observables.limits.detection import contradiction_of

LEADERS = np.array(
    [
        [0.6894063404, 0.2438104845],
        [-0.2505749778, 0.5482364297],
        [0.2876146812, -0.7921953869],
    ]
)
LINES = (
    (
        [-1, -0.3, 0.1, 0.4, 1.2],
        [0, 0, 4, 4, 4],
        [-0.7020423162, -0.7014797633, 0.9828397078, 0.9831251823, 0.9835792313],
    ),
    ([0.2, 0.5, 0.9], [2, 2, 2], None),
    ([-0.8, -0.5, 0.05, 0.07], [0, 0, 0, 0], None),
)


def limit_of(value, tokens, **options):
    return find_limit(plain(value), mf.TokenCloud(np.asarray(tokens)), **options)


def padded(starts):
    """Tokens of the line; padded, so that one program serves all."""
    missing = 5 - len(starts)
    weights = np.append(np.full(len(starts), 1 / len(starts)), np.zeros(missing))
    return mf.TokenCloud(np.append(starts, np.zeros(missing))[:, None], weights)


def by_scipy(value, tokens, depth):
    """Rescaled tokens of a dense program of its own."""
    count, dimension = tokens.shape
    values, vectors = np.linalg.eig(value)

    def velocity(t, flat):
        z = flat.reshape(count, dimension)
        growth = (vectors * np.exp(t * values)) @ np.linalg.inv(vectors)
        x = z @ growth.real.T
        scores = x @ x.T
        shares = np.exp(scores - scores.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        return ((shares @ z - z) @ value.T).ravel()

    return (
        scipy.integrate.solve_ivp(
            velocity, (0, depth), tokens.ravel(), method="LSODA", rtol=1e-11, atol=1e-12
        )
        .y[:, -1]
        .reshape(count, dimension)
    )


def test_three_leaders_of_the_identity_are_tabulated():
    report = limit_of(np.eye(2), TOKENS)
    found = report.detection
    assert report.agrees
    assert (found.geometry, found.verdict) == ("polytope", "reached")
    np.testing.assert_array_equal(found.leaders, [0, 1, 2])
    np.testing.assert_array_equal(found.follows, [0, 1, 2, 0, 2, 0])
    np.testing.assert_allclose(found.vertices, LEADERS, atol=1e-8)
    assert found.following.rank == 3


def test_followers_come_closer_to_their_leader_by_e_per_unit_of_depth():
    phase = limit_of(np.eye(2), TOKENS).detection.phase
    early, late = (np.abs(phase.at(t)[3] - LEADERS[0]).max() for t in (5.2, 10.2))
    assert np.log(early / late) == pytest.approx(5.0, abs=1e-4)
    np.testing.assert_allclose(
        np.abs(phase.at(10.0) - LEADERS[[0, 1, 2, 0, 2, 0]]).max(), 9.3e-5, rtol=1e-2
    )


def test_two_hyperplanes_of_the_plane_example_are_tabulated():
    report = limit_of(VALUE, TOKENS)
    found = report.detection
    assert report.agrees
    np.testing.assert_allclose(found.offsets, [-0.2391782389, 0.6517280994], atol=1e-9)
    np.testing.assert_array_equal(found.leaders, [2, 5])
    assert found.following.rank == 2
    late = found.phase.at(8.0) @ found.prediction.functionals[0]
    upper = np.delete(late, 2)
    assert upper.min() == pytest.approx(0.65165, abs=5e-6)
    assert upper.max() == pytest.approx(0.65173, abs=5e-6)


def test_the_closed_form_goes_on_as_an_implicit_solver_of_another_library_does():
    phase = limit_of(VALUE, TOKENS).detection.phase
    np.testing.assert_allclose(phase.at(7.0), by_scipy(VALUE, TOKENS, 7.0), atol=1e-7)


@pytest.mark.parametrize(("starts", "follows", "ends"), LINES)
def test_on_the_line_rows_become_boolean(starts, follows, ends):
    found = find_limit(plain(1.0), padded(starts)).detection
    assert (found.geometry, found.verdict) == ("boolean-1d", "reached")
    np.testing.assert_array_equal(found.follows[: len(starts)], follows)
    assert found.following.rank == len(set(follows))
    if ends is not None:
        np.testing.assert_allclose(found.phase.at(8.0)[:, 0], ends, atol=1e-9)


@pytest.mark.slow
def test_on_a_part_of_the_space_tokens_settle_and_the_rest_is_free():
    tokens = np.column_stack([TOKENS, THIRD])
    found = limit_of(np.diag([1, 1, -0.5]), tokens).detection
    assert (found.geometry, found.free_dimension) == ("polytope x subspace", 1)
    expected = [
        [0.7050803714, 0.2364623656, 0.3935763653],
        [-0.2711699970, 0.5589052422, -0.2475000816],
        [0.2953193951, -0.8403148713, 0.5542206269],
    ]
    np.testing.assert_allclose(found.vertices, expected, atol=1e-8)
    third = [found.phase.at(depth)[3, 2] for depth in (6.0, 8.0)]
    np.testing.assert_allclose(third, [-11.678, -32.421], atol=1e-3)


@pytest.mark.slow
def test_the_variance_of_tokens_drawn_inwards_falls_like_one_over_depth():
    report = limit_of(-np.eye(2), TOKENS)
    found = report.detection
    assert (found.geometry, found.verdict) == ("origin", "reached")
    assert found.exponent == pytest.approx(-1, abs=0.01)
    last = report.trajectory.cloud(-1)
    np.testing.assert_allclose(
        1000 * np.asarray(last.covariance()),
        [[0.49899, -5e-5], [-5e-5, 0.49897]],
        atol=1e-5,
    )
    assert float(jnp.linalg.norm(last.mean())) == pytest.approx(6e-10, abs=1e-10)


@pytest.mark.slow
def test_two_opposite_tokens_drawn_inwards_follow_a_scalar_law():
    depths = [0.0, 10.0, 100.0, 1000.0]
    path = mf.solve(
        mf.Flow(plain(-1.0)),
        mf.TokenCloud(np.array([[1.0], [-1.0]])),
        1000.0,
        save=depths,
        rtol=1e-11,
        atol=1e-13,
    )
    expected = [1, 0.2198477216, 0.0705915953, 0.0223569138]
    np.testing.assert_allclose(path.points[:, 0, 0], expected, atol=1e-9)


@pytest.mark.slow
def test_a_run_that_is_too_short_has_not_reached_its_limit():
    path = mf.solve(mf.Flow(mf.Rescaled(plain(VALUE))), mf.TokenCloud(TOKENS), 2.0)
    found = detect_limit(path)
    assert found.verdict == "not reached"
    assert found.agrees is None
    short = mf.solve(mf.Flow(plain(-np.eye(2))), mf.TokenCloud(TOKENS), 1.0, save=21)
    assert detect_limit(short).verdict == "not reached"
    sparse = mf.solve(mf.Flow(plain(-np.eye(2))), mf.TokenCloud(TOKENS), 9.0, save=2)
    assert detect_limit(sparse).verdict == "undecided"


@pytest.mark.slow
def test_original_coordinates_give_the_same_answer():
    path = mf.solve(
        mf.Flow(plain(VALUE)), mf.TokenCloud(TOKENS), 8.0, rtol=1e-10, atol=1e-12
    )
    found = detect_limit(path)
    assert (found.geometry, found.verdict) == ("hyperplanes", "reached")
    np.testing.assert_allclose(found.offsets, [-0.2391782389, 0.6517280994], atol=1e-7)
    turned = mf.solve(mf.Flow(plain(-np.eye(2))), mf.TokenCloud(TOKENS), 200.0, save=41)
    scaled = mf.solve(
        mf.Flow(mf.Rescaled(plain(-np.eye(2)))), mf.TokenCloud(TOKENS), 100.0, save=41
    )
    for decay in (turned, scaled):
        assert detect_limit(decay).exponent == pytest.approx(-1, abs=0.06)


@pytest.mark.slow
def test_an_exceptional_row_is_undecided_and_not_guessed():
    tokens = np.array([-1.0, -0.05837211652778, 1.2])[:, None]
    path = mf.solve(
        mf.Flow(mf.Rescaled(plain(1.0))),
        mf.TokenCloud(tokens),
        2.0,
        rtol=1e-12,
        atol=1e-14,
    )
    layer = mf.Rescaled(plain(1.0)).attention_at(2.0)
    row = mf.attention_matrix(layer, path.cloud(-1))[1]
    np.testing.assert_allclose(row, [0.375, 0.335, 0.290], atol=1e-3)
    found = detect_limit(path)
    assert found.verdict == "undecided"
    assert "exceptional" in found.reason


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_a_tie_that_rounding_breaks_is_undecided_in_every_order(order):
    cloud = padded(np.array([-1.0, 0.0, 1.0])[order])
    found = find_limit(plain(1.0), cloud).detection
    assert (found.geometry, found.verdict) == ("unknown", "undecided")
    assert "second look" in found.reason
    guessed = find_limit(plain(1.0), cloud, second_look=False).detection
    assert guessed.verdict == "reached"


@pytest.mark.slow
def test_errors_of_a_solve_in_original_coordinates_do_not_pass_for_a_limit():
    path = mf.solve(mf.Flow(plain(VALUE)), mf.TokenCloud(TOKENS), 30.0)
    assert detect_limit(path, second_look=False).verdict == "reached"
    assert detect_limit(path).verdict == "undecided"


@pytest.mark.slow
def test_a_gap_too_small_to_have_shown_is_not_a_limit():
    found = limit_of(np.diag([1, 1 - 1e-5]), TOKENS).detection
    assert found.verdict != "reached"


def test_two_hyperplanes_on_one_side_contradict_the_theorem():
    reached = limit_of(VALUE, TOKENS).detection
    offsets = np.array([0.2, 0.5])
    told = contradiction_of(reached.prediction, offsets, reached.phase)
    assert "more than one" in told
    assert contradiction_of(reached.prediction, offsets - 0.3, reached.phase) == ""
    other = dataclasses.replace(reached, geometry="unknown")
    assert other.agrees is False


@pytest.mark.slow
def test_hyperplanes_are_reached_whoever_attends_to_whom():
    tokens = np.array([[1, 0.5], [1, -0.5], [-1, 0]])
    found = limit_of(np.diag([1, -0.5]), tokens).detection
    assert found.verdict == "reached"
    assert len(found.offsets) == 2


@pytest.mark.slow
def test_tokens_of_one_place_fall_to_the_origin():
    found = limit_of(-np.eye(2), np.array([[1.0, 2.0], [1.0, 2.0]])).detection
    assert (found.geometry, found.verdict) == ("origin", "reached")


def test_the_depth_of_a_decay_follows_its_rate():
    found = limit_of(-1e-4 * np.eye(2), TOKENS).detection
    assert (found.verdict, found.depth) == ("reached", pytest.approx(1e7))


@pytest.mark.slow
def test_wrong_questions_are_refused():
    layer, cloud = plain(np.eye(2)), mf.TokenCloud(TOKENS)
    with pytest.raises(InvalidInput, match="must be positive"):
        find_limit(layer, cloud, depth=-1.0)
    with pytest.raises(InvalidInput, match="3 or more"):
        find_limit(layer, cloud, save=2)
    path = mf.solve(mf.Flow(mf.Rescaled(layer)), cloud, (8.0, 7.9), save=2)
    with pytest.raises(InvalidInput, match="backward"):
        detect_limit(path)
    with pytest.raises(InvalidInput, match="between 0 and 1"):
        detect_limit(path, tolerance=-1.0)
    report = find_limit(layer, cloud)
    with pytest.raises(InvalidInput, match="increasing"):
        report.continued(np.array([5.0, 1.0]))


@pytest.mark.slow
def test_copies_of_a_token_and_padding_change_nothing():
    whole = limit_of(np.eye(2), TOKENS).detection
    points = np.concatenate([TOKENS, TOKENS[:1], [[5.0, 5.0]]])
    weights = np.append(np.full(6, 1 / 6), [1 / 12, 0.0])
    weights[0] = 1 / 12
    found = find_limit(plain(np.eye(2)), mf.TokenCloud(points, weights)).detection
    assert found.verdict == "reached"
    np.testing.assert_allclose(found.vertices, whole.vertices, atol=1e-8)
    np.testing.assert_array_equal(found.follows, [0, 1, 2, 0, 2, 0, 0, -1])


@pytest.mark.slow
def test_two_stretches_of_a_path_are_one_path():
    flow = mf.Flow(mf.Rescaled(plain(np.eye(2))))
    first = mf.solve(flow, mf.TokenCloud(TOKENS), 0.5, save=3)
    second = mf.solve(flow, first.cloud(-1), (0.5, 1.0), save=3)
    whole = finding._joined(first, second)
    np.testing.assert_allclose(whole.depths, np.linspace(0, 1, 5), atol=1e-12)
    np.testing.assert_array_equal(whole.points[-1], second.points[-1])
    steps = first.accepted_steps[-1] + second.accepted_steps[-1]
    assert whole.accepted_steps[-1] == steps
    assert whole.status == second.status


@pytest.mark.slow
def test_a_choice_that_will_not_last_is_passed_through():
    layer, tokens, geometry = random_case("simple leading", 112)
    first = find_limit(layer, tokens)
    assert first.detection.geometry == geometry
    assert np.all(np.diff(first.trajectory.depths) > 0)
    assert np.all(np.diff(first.trajectory.accepted_steps) >= 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_verdict_on_a_random_layer_is_wrong(kind):
    for seed in range(4):
        assert_not_wrong(kind, seed, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_verdict_in_five_hundred_is_wrong(kind):
    reached = []

    @settings(max_examples=63, deadline=None, derandomize=True, database=None)
    @given(seed=st.integers(0, 2**32 - 1), scale=st.floats(0.3, 3))
    def look(seed, scale):
        reached.append(assert_not_wrong(kind, seed, scale))

    look()
    assert len(reached) == 63
    assert sum(reached) >= (50 if KINDS[kind][1] != "unknown" else 0)


def assert_not_wrong(kind, seed, scale) -> bool:
    layer, tokens, geometry = random_case(kind, seed)
    cloud = tokens.moved(scale * tokens.points)
    report = find_limit(layer, cloud, depth=None if geometry != "unknown" else 6.0)
    assert report.prediction.geometry in (geometry, "unknown")
    if report.detection.verdict != "reached":
        assert report.detection.geometry == "unknown"
        return False
    assert report.detection.geometry == geometry
    assert report.agrees
    return True


@pytest.mark.slow
def test_what_is_not_a_flow_of_tokens_in_space_is_refused(untyped):
    layer = mf.identity_attention("softmax", 2)
    angles = np.array([0.0, 1.0])
    circle = mf.TokenCloud(np.stack([np.cos(angles), np.sin(angles)], 1))
    path = mf.solve(mf.Flow(layer, space=mf.Sphere()), circle, 1.0)
    with pytest.raises(Unsupported, match="count_clusters"):
        detect_limit(path)
    forgotten = dataclasses.replace(path, flow=None)
    with pytest.raises(InvalidInput, match="pass it: detect_limit"):
        detect_limit(forgotten)
    with pytest.raises(InvalidInput, match="does not tell the coordinates"):
        detect_limit(forgotten, layer)
    with pytest.raises(Unsupported, match="count_clusters"):
        detect_limit(forgotten, mf.Flow(layer, space=mf.Sphere()))
    flat = mf.solve(mf.Flow(layer), circle, 1.0)
    with pytest.raises(InvalidInput, match="made by another flow"):
        detect_limit(flat, mf.Flow(mf.Rescaled(layer)))
    with pytest.raises(InvalidInput, match="of dimension 3"):
        detect_limit(
            dataclasses.replace(flat, flow=None),
            mf.Flow(mf.identity_attention("softmax", 3)),
        )
    again = detect_limit(dataclasses.replace(flat, flow=None), mf.Flow(layer))
    assert again.verdict == detect_limit(flat, mf.Flow(layer)).verdict == "not reached"


@pytest.mark.slow
def test_followers_that_drift_beyond_numbers_are_told():
    tokens = np.column_stack([TOKENS, THIRD])
    phase = limit_of(np.diag([1, 1, -0.5]), tokens).detection.phase
    with pytest.raises(Overflow, match="drifted"):
        phase.at(1e4)
    with pytest.raises(InvalidInput, match="begins at"):
        phase.at(0.0)
