"""Hardmax attention in continuous depth: closed forms, changes of leaders, ties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from scipy.spatial import ConvexHull

import meanformer as mf
from meanformer.errors import InvalidInput, Overflow, Unsupported
from meanformer.experiments.limits.hardmax_leaders import EMERGING
from meanformer.flows import hardmax_flow

SQUARE = [(1.0, 1.0), (1.0, -1.0), (-1.0, -1.0), (-1.0, 1.0)]
EXTRA = [(0.2, 0.1), (-0.3, 0.25), (0.05, -0.4), (-0.2, -0.1)]
EIGHT = np.array(EMERGING, float)


def layer(score=None, value=None, dimension=2):
    eye = np.eye(dimension)
    return mf.Softmax(
        np.array(eye if score is None else score, float),
        eye,
        np.array(eye if value is None else value, float),
    )


def run(points, depth=3.0, *, weights=None, **matrices):
    points = np.array(points, float)
    attention = layer(dimension=points.shape[1], **matrices)
    return hardmax_flow(attention, mf.TokenCloud(points, weights), depth)


def uniform(seed, count=30, dimension=2):
    return np.random.default_rng(seed).uniform(-1, 1, (count, dimension))


# ---- closed forms -----------------------------------------------------------


def test_tokens_of_a_square_go_straight_to_its_corners():
    path = run(SQUARE + EXTRA)
    depths = np.array([0.0, 0.3, 1.0, 3.0])
    start = np.array(SQUARE + EXTRA)
    corners = np.array([*SQUARE, (1, 1), (-1, 1), (1, -1), (-1, -1)])
    exact = corners + np.exp(-depths)[:, None, None] * (start - corners)
    np.testing.assert_allclose(path.points(depths), exact, atol=1e-15)
    np.testing.assert_array_equal(path.points(depths)[:, :4], np.array([SQUARE] * 4))
    assert path.changes == ()
    assert path.followed([1.0]).tolist() == [[0, 1, 2, 3, 0, 3, 1, 2]]


def test_a_follower_of_a_follower_moves_by_a_polynomial_times_an_exponential():
    path = run(EIGHT, 2.0)
    first, second, fourth = EIGHT[0], EIGHT[1], EIGHT[3]
    depth = 0.1
    exact = first + np.exp(-depth) * (second - first + depth * (fourth - first))
    np.testing.assert_allclose(path.points([depth])[0, 1], exact, atol=1e-15)


def test_the_depth_of_a_change_is_a_root_of_the_margin():
    path = run(EIGHT, 6.0)
    first, second, fourth = EIGHT[0], EIGHT[1], EIGHT[3]

    def margin(t):
        follower = first + np.exp(-t) * (second - first + t * (fourth - first))
        followed = first + np.exp(-t) * (fourth - first)
        return follower @ (followed - first)

    change = next(change for change in path.changes if change.token == 1)
    assert change.before == 3
    assert change.after == 0
    exact = scipy.optimize.brentq(margin, 0, 1, xtol=1e-15)
    assert change.depth == pytest.approx(exact, abs=1e-14)
    settled = path.settled()
    assert settled.is_settled.all()
    near, far = (1, 1 / 3), (-1, -1)
    limits = [near, near, far, near, far, far, near, near]
    np.testing.assert_allclose(settled.limits, limits, atol=1e-15)


def test_coordinates_of_a_diagonal_value_decay_at_their_own_rates():
    path = run([(2, 0), (1, 0.1)], 2.0, value=np.diag([1.0, 0.25]))
    exact = [2 - np.exp(-2.0), 0.1 * np.exp(-0.5)]
    np.testing.assert_allclose(path.points([2.0])[0, 1], exact, rtol=1e-14)


def test_tokens_that_follow_each_other_meet_in_the_middle():
    path = run([(1.0,), (-1.0,)], 5.0, score=[[-1.0]])
    depths = np.linspace(0, 5, 23)
    exact = np.exp(-2 * depths)[:, None] * np.array([1.0, -1.0])
    np.testing.assert_allclose(path.points(depths)[:, :, 0], exact, atol=1e-15)


def test_a_negative_form_on_the_line_leads_to_zero_in_continuous_depth():
    # With steps of 0.3 both tokens tend to 0.26 instead.
    path = run([(-1.0,), (2.0,)], 30.0, score=[[-1.0]])
    assert [change[1:] for change in path.changes] == [(0, 1, 0)]
    assert path.changes[0].depth == pytest.approx(np.log(3) / 2, abs=1e-14)
    np.testing.assert_allclose(path.points([30.0])[0], 0, atol=1e-12)


# ---- the equation -----------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 3, 5])
@pytest.mark.parametrize("second", [1.0, 0.4])
def test_everybody_goes_to_whom_it_scores_highest_at_all_depths(seed, second):
    value = np.diag([1.0, second])
    path = run(uniform(seed), 4.0, value=value)
    depths = np.sort(np.random.default_rng(1).uniform(0, 4, 40))
    trajectory, followed = path.to_trajectory(depths), path.followed(depths)
    for points, goals, velocity in zip(
        np.asarray(trajectory.points), followed, trajectory.velocities, strict=True
    ):
        scores = points @ points.T
        chosen = np.take_along_axis(scores, goals[:, None], axis=1)[:, 0]
        np.testing.assert_allclose(chosen, scores.max(axis=1), atol=1e-14)
        exact = (points[goals] - points) @ value.T
        np.testing.assert_allclose(velocity, exact, atol=1e-14)


@pytest.mark.parametrize("seed", [0, 5])
def test_tokens_do_not_jump_where_a_leader_changes(seed):
    path = run(uniform(seed), 4.0)
    assert len(path.phases) > 2
    for before, after in zip(path.phases, path.phases[1:], strict=False):
        assert before.end == after.start
        seam = np.array([before.end])
        np.testing.assert_allclose(before.at(seam), after.at(seam), atol=1e-15)


def test_a_token_stops_where_it_begins_to_prefer_itself():
    # The value draws it along the first axis much faster than along the second.
    path = run([(1.0, 0.0), (0.2, 0.4)], 3.0, value=np.diag([1.0, 0.05]))

    def place(t):
        return np.array([1 - 0.8 * np.exp(-t), 0.4 * np.exp(-0.05 * t)])

    def margin(t):
        return place(t) @ (np.array([1.0, 0.0]) - place(t))

    (change,) = path.changes
    assert change[1:] == (1, 0, 1)
    assert change.depth == pytest.approx(scipy.optimize.brentq(margin, 1, 2), abs=1e-12)
    stopped = path.points([2.0, 3.0])[:, 1]
    np.testing.assert_allclose(stopped, [place(change.depth)] * 2, atol=1e-14)


def test_the_velocity_of_a_path_is_its_derivative():
    path = run(uniform(0), 4.0)
    slopes = (path.points([1.5 + 1e-5]) - path.points([1.5 - 1e-5])) / 2e-5
    velocities = path.to_trajectory([1.5]).velocities
    np.testing.assert_allclose(slopes, velocities, atol=1e-9)


def test_old_and_new_leader_tie_where_a_token_changes():
    changes = 0
    for seed in (0, 5, 8, 11):
        path = run(uniform(seed), 4.0)
        for depth, token, before, after in path.changes:
            points = path.points([depth])[0]
            scores = points @ points[token]
            assert scores[before] == pytest.approx(scores[after], abs=1e-13)
            assert scores.max() == pytest.approx(scores[after], abs=1e-13)
            changes += 1
    assert changes > 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 198])
def test_a_solver_with_small_steps_agrees(seed):
    points = uniform(seed)
    path = run(points, 2.0)
    flow = mf.observables.low_temperature_flow(mf.Hardmax(*[np.eye(2)] * 3))
    solved = mf.solve(flow, mf.TokenCloud(points), 2.0, solver=mf.FixedStep(2e-3))
    assert len(path.changes) > 0
    # A step over a change is wrong by up to one step times the jump.
    np.testing.assert_allclose(solved.points[-1], path.points([2.0])[0], atol=4e-3)


# ---- laws -------------------------------------------------------------------


def test_the_hull_shrinks_and_leaders_stay():
    path = run(uniform(5), 4.0)
    clouds = path.points(np.linspace(0, 4, 30))
    areas = [ConvexHull(points).volume for points in clouds]
    assert np.diff(areas).max() <= 1e-14
    leads = path.followed(np.linspace(0, 4, 30)) == np.arange(30)[None, :]
    assert np.diff(leads.astype(int), axis=0).min() >= 0
    assert leads[0].sum() >= 3


def test_the_order_of_tokens_does_not_matter():
    points, order = uniform(0), np.random.default_rng(7).permutation(30)
    path, other = run(points), run(points[order])
    moved = other.points([0.5, 3.0])
    np.testing.assert_allclose(moved, path.points([0.5, 3.0])[:, order], atol=1e-14)
    known = [(c.token, c.before, c.after) for c in path.changes]
    ours = [tuple(order[list(change[1:])]) for change in other.changes]
    assert ours == known


def test_splitting_a_token_changes_nothing():
    points, weights = uniform(0, 8), np.arange(1.0, 9) / 36
    split = np.append(weights, weights[2] / 3)
    split[2] *= 2 / 3
    whole = run(points, weights=weights)
    parted = run(np.append(points, points[2:3], axis=0), weights=split)
    np.testing.assert_allclose(
        parted.points([3.0])[0, :8], whole.points([3.0])[0], atol=1e-15
    )
    np.testing.assert_allclose(
        parted.points([3.0])[0, 8], whole.points([3.0])[0, 2], atol=1e-15
    )


def test_a_token_of_weight_zero_moves_but_is_not_followed():
    points = uniform(0)
    padded = np.append(points, [(3.0, 3.0)], axis=0)
    path = run(padded, weights=np.append(np.full(30, 1 / 30), 0.0))
    alone = run(points)
    moved = path.points([3.0])[0]
    np.testing.assert_allclose(moved[:30], alone.points([3.0])[0], atol=1e-15)
    assert path.changes == alone.changes
    assert np.abs(moved[30]).max() < 3


def test_rotating_and_scaling_the_tokens_rotates_and_scales_the_path():
    angle = 0.7
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    points = uniform(5)
    path = run(points).points([1.0, 3.0])
    np.testing.assert_allclose(
        run(points @ turn.T).points([1.0, 3.0]), path @ turn.T, atol=1e-13
    )
    for scale in (2.0**-600, 2.0**600):
        scaled = run(scale * points).points([1.0, 3.0])
        np.testing.assert_array_equal(scaled, scale * path)


def test_a_weighted_tie_goes_to_the_weighted_mean():
    weights = np.array([0.3, 0.1, 0.2, 0.3, 0.1])
    path = run([*SQUARE, (0.5, 0.0)], 2.0, weights=weights, score=np.diag([1.0, 0.0]))
    goal = np.array([1.0, 0.5])
    exact = goal + np.exp(-2.0) * (np.array([0.5, 0.0]) - goal)
    np.testing.assert_allclose(path.points([2.0])[0, 4], exact, atol=1e-15)
    assert path.is_tied


def test_a_tie_that_symmetry_preserves_is_kept():
    path = run([*SQUARE, (0.5, 0), (0.2, 0.1)], 60.0)
    np.testing.assert_allclose(path.points([60.0])[0, 4], (1, 0), atol=1e-14)
    assert path.is_tied
    assert path.changes == ()
    np.testing.assert_allclose(path.settled().limits[4], (1, 0), atol=1e-14)


def test_a_tie_by_accident_is_left_at_once():
    # The last token is tied between the first two; the first one moves away to the
    # third.
    points = np.array([(1.0, 0.9), (1.0, -0.9), (0.8, 1.5), (0.5, 0.0)])
    scores = points @ points[3]
    assert scores[0] == scores[1] == scores.max()
    path = run(points, 1.0)
    assert path.followed([0.0]).tolist() == [[2, 1, 2, 1]]
    assert not path.is_tied


# ---- degenerate input -------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_sliding_along_a_tie_is_told(seed):
    with pytest.raises(Unsupported, match="at depth 0.* slide along a tie"):
        run(uniform(seed, 6), 5.0, score=-np.eye(2))


def test_followers_that_drift_beyond_numbers_are_told():
    with pytest.raises(Overflow, match="drift beyond what numbers hold"):
        run(
            [(2, 0), (1, 0.1)],
            3000.0,
            score=np.diag([1.0, 0.0]),
            value=np.diag([1.0, -1.0]),
        )


def test_one_token_equal_tokens_and_depth_zero_rest():
    for points in ([(1.0, 2.0)], [(1.0, 2.0)] * 3, [(0.0, 0.0)]):
        path = run(points, 5.0)
        np.testing.assert_array_equal(path.points([0.0, 5.0])[1], np.array(points))
        assert path.changes == ()
    path = run(EXTRA, 0.0)
    np.testing.assert_array_equal(path.points([0.0])[0], EXTRA)
    assert run(EXTRA, 2.0, value=np.zeros((2, 2))).points([2.0])[0].tolist() == [
        list(point) for point in EXTRA
    ]


def test_a_cloud_in_single_precision_keeps_its_type():
    cloud = mf.TokenCloud(jnp.asarray(uniform(0), jnp.float32))
    path = hardmax_flow(layer(), cloud, 1.0)
    assert path.at(1.0).points.dtype == jnp.float32
    assert path.to_trajectory([0.0, 1.0]).points.dtype == jnp.float32


def test_limits_are_told_for_multiples_of_the_identity_only():
    path = run(SQUARE + EXTRA, value=np.diag([1.0, 0.5]))
    with pytest.raises(Unsupported, match="positive multiple of the identity"):
        path.settled()


@pytest.mark.parametrize(
    ("attention", "depth", "message"),
    [
        (layer(), -1.0, "depth is -1.0; it must be zero or more"),
        (layer(), np.inf, "depth is inf"),
        (mf.Linear(*[np.eye(2)] * 3), 1.0, "attention is Linear"),
        (layer(value=np.ones((1, 2))), 1.0, r"value has shape \(1, 2\)"),
        (mf.Softmax(*[np.eye(2)] * 3, value_bias=np.ones(2)), 1.0, "has a bias"),
        (mf.Softmax(*[np.eye(2)] * 3, beta=0.0), 1.0, "beta is 0.0; it must be pos"),
        (mf.Softmax(*[np.eye(3)] * 3), 1.0, "tokens have dimension 2"),
    ],
)
def test_bad_input_is_told(attention, depth, message):
    with pytest.raises(InvalidInput, match=message):
        hardmax_flow(attention, mf.TokenCloud(EIGHT), depth)


def test_other_bad_input_is_told():
    with pytest.raises(InvalidInput, match="tolerance is 1"):
        hardmax_flow(layer(), mf.TokenCloud(EIGHT), 1.0, tolerance=1.0)
    path = run(EIGHT, 1.0)
    with pytest.raises(InvalidInput, match="between 0 and 1.0"):
        path.points([0.5, 1.5])
    with pytest.raises(InvalidInput, match="must be a list of depths"):
        path.points(0.5)
    with pytest.raises(InvalidInput, match="must increase"):
        path.to_trajectory([0.5, 0.5])

    @jax.jit
    def traced(points):
        return hardmax_flow(layer(), mf.TokenCloud(points), 1.0).points([1.0])

    with pytest.raises(InvalidInput, match="under jit or grad"):
        traced(EIGHT)
