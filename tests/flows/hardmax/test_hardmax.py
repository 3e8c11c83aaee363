"""Steps of hardmax attention: leaders, ties, limits, and the flow they tend to."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import meanformer as mf
from meanformer.experiments.limits.hardmax_leaders import EMERGING, exact_run

SQUARE = [(1.0, 1.0), (1.0, -1.0), (-1.0, -1.0), (-1.0, 1.0)]
EXTRA = [(0.2, 0.1), (-0.3, 0.25), (0.05, -0.4), (-0.2, -0.1)]
EIGHT = np.array(EMERGING, float)
THIRD = Fraction(1, 3)


def run(points, count=60, *, weights=None, **options):
    options = options or {"alpha": 0.5}
    return mf.flows.run_hardmax(
        mf.TokenCloud(np.array(points, float), weights), count, **options
    )


def unchanged(x):
    return x


def hardmax_flow(dimension):
    eye = jnp.eye(dimension)
    back = mf.Perceptron(eye, jnp.zeros(dimension), -eye, activation=unchanged)
    return mf.Flow(mf.identity_attention("hardmax", dimension) + back)


# ---- reference values -------------------------------------------------------


def test_a_leader_emerges_at_the_first_step():
    path = run(EIGHT, 100)
    assert path.leaders[0] == [0, 2]
    assert all(leaders == [0, 1, 2] for leaders in path.leaders[1:])
    near, far = (1, 1 / 3), (-1, -1)
    limits = [near, (-1 / 18, 5 / 36), far, near, far, far, near, near]
    np.testing.assert_allclose(path.limits, limits, atol=1e-15)
    assert path.leader_of.tolist() == [0, 1, 2, 0, 2, 2, 0, 0]
    assert path.is_settled.all()
    assert not path.is_tied.any()


def test_tokens_in_a_square_go_to_its_corners():
    path = run(SQUARE + EXTRA)
    assert path.leaders[0] == path.leaders[-1] == [0, 1, 2, 3]
    np.testing.assert_array_equal(path.limits[4:], [(1, 1), (-1, 1), (1, -1), (-1, -1)])


def test_a_negative_form_contracts_a_symmetric_cloud_by_the_same_factor_for_ever():
    path = run(SQUARE + EXTRA, 40, step=0.3, score=-np.eye(2))
    norms = np.linalg.norm(path.points, axis=2).max(axis=1)
    assert norms[1] == pytest.approx(0.5656854249, abs=1e-10)
    np.testing.assert_allclose(norms[2:] / norms[1:-1], 0.4, rtol=1e-13)
    assert norms[40] == pytest.approx(1.7e-16, rel=1e-2)


def test_contraction_goes_on_where_squares_underflow():
    path = run(SQUARE + EXTRA, 700, step=0.3, score=-np.eye(2))
    sizes = np.abs(path.points).max(axis=(1, 2))
    np.testing.assert_allclose(sizes[1:], 0.4 ** np.arange(1, 701), rtol=1e-12)
    assert sizes[-1] < 1e-278


def test_a_negative_form_on_the_line_does_not_lead_to_zero():
    path = run([(-1,), (2,)], 100, step=0.3, score=-np.eye(1))
    np.testing.assert_allclose(path.points[-1], 0.26, atol=1e-13)
    np.testing.assert_allclose(path.points[2, :, 0], [0.26, 0.74], rtol=1e-14)
    np.testing.assert_allclose(path.limits, 0.26, atol=1e-15)


def test_a_vertex_outside_its_cell_goes_to_another_one():
    path = run([(2, 0.9), (-2, 0.9), (0, -3), (0.2, 0.95)], step=0.3)
    assert path.leaders[0] == [0, 1, 2]
    assert path.leader_of.tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("step", [0.2, 1 / 3, 0.5, 0.7, 1.0])
def test_a_tied_token_tends_to_the_middle_of_the_edge(step):
    path = run([*SQUARE, (0.5, 0), (0.2, 0.1), (0.9, 0)], 200, step=step)
    np.testing.assert_allclose(path.limits[[4, 6]], [(1, 0), (1, 0)], atol=1e-14)
    np.testing.assert_allclose(path.points[-1, 4], (1, 0), atol=1e-9)
    assert path.is_tied[:, 4].all()
    assert path.is_settled.all()
    assert path.leader_of[4] == -1
    assert path.leaders[-1] == [0, 1, 2, 3]


def test_floating_point_ties_draw_a_tied_token_to_a_corner():
    path = run([*SQUARE, (0.2, 0.1), (0.5, 0)], 200, step=0.5, ties="exact")
    np.testing.assert_allclose(path.points[40, 5], (1, 0), atol=1e-9)
    np.testing.assert_allclose(path.points[-1, 5], (1, 1), atol=1e-12)
    # The follower that sits on the corner hides it, too.
    assert path.leaders[-1] == [1, 2, 3]


def test_an_absolute_tolerance_would_stall_the_contraction():
    # What the relative tolerance is for: a width is absolute.
    path = run(SQUARE + EXTRA, 60, step=0.3, score=-np.eye(2), width=1e-12)
    largest = np.linalg.norm(path.points[-1], axis=1).max()
    assert 1e-9 < largest < 1e-6


def test_the_leader_emerges_from_the_critical_step_on():
    critical = (7 - np.sqrt(13)) / 18
    for factor, leaders in ((1 - 1e-6, [0, 2]), (1 + 1e-6, [0, 1, 2])):
        assert run(EIGHT, step=factor * critical).leaders[-1] == leaders


# ---- rational arithmetic ----------------------------------------------------

TIED = [*SQUARE, (0.5, 0.0), (-0.25, 0.0), (0.0, 0.75), (0.25, 0.125)]


@pytest.mark.parametrize(
    ("points", "weights"),
    [
        (EMERGING, None),
        (TIED, None),
        (TIED, [Fraction(k, 36) for k in range(1, 9)]),
        ([(1, 0), (-1, 0), (0, 1), (0, 0)], None),
    ],
)
def test_steps_are_those_of_rational_arithmetic(points, weights):
    masses = None if weights is None else np.array(weights, float)
    path = run(points, 40, weights=masses, alpha=0.5)
    exact = exact_run(points, 40, THIRD, weights)
    tokens = np.array([np.array(state, float) for state, _ in exact])
    np.testing.assert_allclose(path.points, tokens, atol=1e-13)
    np.testing.assert_array_equal(path.is_leader, [leads for _, leads in exact])


def test_a_token_at_the_origin_is_tied_between_all():
    path = run([(1, 0), (-1, 0), (0, 1), (0, 0)], 3, weights=[0.5, 0.25, 0.125, 0.125])
    np.testing.assert_allclose(path.targets[0, 3], (0.25, 0.125), atol=1e-16)
    assert path.sets(0)[3].all()


# ---- invariances ------------------------------------------------------------


def random_cloud(count=30, dimension=3, seed=0):
    generator = np.random.default_rng(seed)
    weights = generator.uniform(0.5, 1.5, count)
    return generator.normal(size=(count, dimension)), weights / weights.sum()


def test_the_order_of_tokens_does_not_matter():
    order = np.random.default_rng(1).permutation(8)
    whole, shuffled = run(TIED), run(np.array(TIED)[order])
    np.testing.assert_allclose(shuffled.points, whole.points[:, order], atol=1e-15)
    np.testing.assert_array_equal(shuffled.is_leader, whole.is_leader[:, order])


def test_the_lowest_index_depends_on_the_order():
    first = run([*SQUARE, (0.5, 0)], ties="lowest", step=0.5).limits[4]
    second = run([*SQUARE[::-1], (0.5, 0)], ties="lowest", step=0.5).limits[4]
    np.testing.assert_array_equal([first, second], [(1, 1), (1, -1)])


@pytest.mark.parametrize(
    ("ties", "noise"), [("merged", 0.0), ("merged", 1e-14), ("exact", 0.0)]
)
def test_splitting_a_token_changes_nothing(ties, noise):
    weights = np.array([0.4, 0.1, 0.1, 0.1, 0.3])
    whole = run([*SQUARE, (0.5, 0)], 5, weights=weights, ties=ties, alpha=0.5)
    twin = (1.0 - noise, 1.0)
    split = run(
        [*SQUARE, (0.5, 0), twin],
        5,
        weights=[0.15, *weights[1:], 0.25],
        ties=ties,
        alpha=0.5,
    )
    np.testing.assert_allclose(split.points[:, :5], whole.points, atol=1e-13)
    assert split.is_leader[:, [0, 5]].all()
    assert split.sets(0)[4].tolist() == [True, True, False, False, False, True]


def test_weights_decide_ties():
    path = run([*SQUARE, (0.5, 0)], 1, weights=[0.4, 0.1, 0.1, 0.1, 0.3], step=1.0)
    np.testing.assert_allclose(path.points[1, 4], (1, 0.6), atol=1e-15)


def test_tokens_of_weight_zero_are_followed_by_nobody_but_move():
    points, weights = random_cloud()
    padded = np.concatenate([points, 9 * np.ones((2, 3))])
    path = run(padded, weights=np.append(weights, [0, 0]), alpha=0.5)
    np.testing.assert_array_equal(
        path.points[:, :30], run(points, weights=weights, alpha=0.5).points
    )
    assert not path.is_leader[:, 30:].any()
    assert path.is_settled[30:].all()
    assert not np.allclose(path.points[1, 30], padded[30])
    assert not path.sets(3)[:, 30:].any()


def test_rotation_turns_all_steps():
    points, weights = random_cloud()
    turn = scipy.linalg.expm(np.array([[0, 1, 2], [-1, 0, 3], [-2, -3, 0.0]]))
    whole = run(points, weights=weights, alpha=0.5)
    turned = run(points @ turn.T, weights=weights, alpha=0.5)
    np.testing.assert_allclose(turned.points, whole.points @ turn.T, atol=1e-13)
    np.testing.assert_array_equal(turned.followed, whole.followed)


@pytest.mark.parametrize("scale", [1e-200, 1e-3, 1e200])
def test_the_size_of_the_cloud_does_not_matter(scale):
    whole, scaled = run(EIGHT), run(scale * EIGHT, score=np.eye(2), alpha=0.5)
    np.testing.assert_allclose(scaled.points / scale, whole.points, atol=1e-14)
    np.testing.assert_array_equal(scaled.is_leader, whole.is_leader)


def test_blocks_of_pairs_change_nothing(monkeypatch):
    points, weights = random_cloud()
    whole = run(points, weights=weights, alpha=0.5)
    monkeypatch.setattr("meanformer.flows.hardmax.rule.PAIRS_AT_ONCE", 70)
    parts = run(points, weights=weights, alpha=0.5)
    np.testing.assert_allclose(parts.points, whole.points, atol=1e-15)
    np.testing.assert_array_equal(parts.followed, whole.followed)
    np.testing.assert_array_equal(parts.sets(2), whole.sets(2))


# ---- laws along the way -----------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_leaders_stay_and_everybody_finds_one(seed):
    points, weights = random_cloud(60, 2, seed)
    form = np.array([[2.0, 0.6], [0.6, 0.5]])
    path = run(points, 80, weights=weights, score=form, alpha=0.5)
    assert (np.diff(path.is_leader.astype(int), axis=0) >= 0).all()
    assert path.is_settled.all()
    assert path.is_leader[-1, path.leader_of].all()
    later = run(points, 300, weights=weights, score=form, alpha=0.5)
    np.testing.assert_allclose(later.points[-1], path.limits, atol=1e-12)


def test_the_sets_are_the_tokens_of_largest_score():
    points, weights = random_cloud()
    form = np.random.default_rng(5).normal(size=(3, 3))
    path = run(points, 6, weights=weights, score=form, step=0.4)
    now = path.points[4]
    scores = now @ form.T @ now.T
    is_best = scores == scores.max(axis=1, keepdims=True)
    np.testing.assert_array_equal(path.sets(4), is_best)
    np.testing.assert_array_equal(path.targets[4], now[path.followed[4]])


def test_a_width_takes_in_all_tokens_of_nearly_the_largest_score():
    path = run([*SQUARE, (0.5, 0.1), (0.3, 0.3)], 1, width=0.2, step=0.5)
    assert np.flatnonzero(path.sets(0)[4]).tolist() == [0, 1]
    np.testing.assert_allclose(path.targets[0, 4], (1, 0), atol=1e-16)
    assert path.is_tied[0, 4]
    wide = run(EIGHT, 1, width=100.0, step=1.0)
    np.testing.assert_allclose(
        wide.points[1], np.broadcast_to(EIGHT.mean(0), (8, 2)), atol=1e-15
    )


def test_a_step_of_one_jumps_to_the_target():
    path = run(SQUARE + EXTRA, 3, step=1.0)
    np.testing.assert_array_equal(path.points[1, 4:], path.limits[4:])
    assert path.leaders[-1] == [0, 1, 2, 3]


def test_one_token_leads():
    path = run([(0.3, 0.4)], 2)
    assert path.leaders == [[0]] * 3
    np.testing.assert_array_equal(path.limits, [(0.3, 0.4)])


def test_no_step_tells_the_leaders_of_the_start():
    path = run(EIGHT, 0)
    assert len(path) == 1
    assert path.leaders == [[0, 2]]
    assert not path.is_settled[1]
    np.testing.assert_array_equal(path.limits[1], EIGHT[1])


def test_a_hull_that_is_one_point_is_at_rest():
    path = run([(0.0, 0.0), (0.0, 0.0)], 2)
    np.testing.assert_array_equal(path.points, 0)
    assert path.is_leader.all()


# ---- as a trajectory --------------------------------------------------------


def test_clouds_and_trajectories_keep_type_weights_and_positions():
    cloud = mf.TokenCloud(
        jnp.asarray(EIGHT, jnp.float32), positions=jnp.linspace(0.0, 1.0, 8)
    )
    path = mf.flows.run_hardmax(cloud, 3, alpha=0.5)
    assert path.points.dtype == np.float64
    assert path.cloud(2).points.dtype == jnp.float32
    np.testing.assert_array_equal(path.cloud(1).positions, cloud.positions)
    trajectory = path.to_trajectory()
    assert trajectory.points.dtype == jnp.float32
    np.testing.assert_allclose(trajectory.depths, [0, 1 / 3, 2 / 3, 1], rtol=1e-6)


def test_steps_are_layers_of_the_hardmax_flow():
    cloud = mf.TokenCloud(SQUARE + EXTRA)
    layers = mf.run_layers(hardmax_flow(2), cloud, 12, step=0.3)
    ours = mf.flows.run_hardmax(cloud, 12, step=0.3).to_trajectory()
    np.testing.assert_allclose(ours.points, layers.points, atol=1e-14)
    np.testing.assert_allclose(ours.velocities, layers.velocities, atol=1e-14)
    np.testing.assert_allclose(ours.depths, layers.depths, atol=1e-14)


# ---- continuous depth -------------------------------------------------------


def flow_end(points, depth):
    # Eight tokens and the same options each time: one program serves all.
    cloud = mf.TokenCloud(np.array(points, float))
    path = mf.solve(hardmax_flow(2), cloud, depth, rtol=1e-9, atol=1e-12)
    return np.asarray(path.points[-1])


@pytest.mark.slow
def test_the_flow_in_a_square_is_known_in_closed_form():
    start = np.array(SQUARE + EXTRA)
    goals = run(start).limits
    exact = goals + np.exp(-3.0) * (start - goals)
    np.testing.assert_allclose(flow_end(start, 3.0), exact, atol=1e-8)


def test_the_flow_of_a_chain_is_a_matrix_exponential_until_the_chain_changes():
    # Token 2 follows 4, which follows 1: no leader emerges in continuous depth.
    chain = run(EIGHT, 0).followed[0]
    assert chain.tolist() == [0, 3, 2, 0, 2, 2, 0, 0]
    exact = scipy.linalg.expm(0.3 * (np.eye(8)[chain] - np.eye(8))) @ EIGHT
    np.testing.assert_allclose(flow_end(EIGHT, 0.3), exact, atol=1e-9)
    assert run(exact, 0).followed[0].tolist() == chain.tolist()
    np.testing.assert_allclose(flow_end(EIGHT, 25.0)[1], (1, 1 / 3), atol=1e-6)


def test_small_steps_tend_to_the_flow_with_order_one():
    exact = flow_end(EIGHT, 0.3)
    errors = [
        np.abs(run(EIGHT, count, step=0.3 / count).points[-1] - exact).max()
        for count in (20, 40, 80)
    ]
    assert np.log2(np.divide(errors[:-1], errors[1:])) == pytest.approx(1.0, abs=0.05)


def test_softmax_at_low_temperature_takes_the_same_step():
    points, weights = random_cloud(20, 2, 3)
    soft = mf.identity_attention("softmax", 2, 1e6)
    output = soft(mf.TokenCloud(points, weights), jnp.asarray(points))
    targets = run(points, 0, weights=weights, step=1.0).targets[0]
    np.testing.assert_allclose(output, targets, atol=1e-9)


# ---- wrong input ------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "step is None and alpha is None; give one of them"),
        ({"step": 0.3, "alpha": 1.0}, "give one of them"),
        ({"step": 0.0}, "step is 0.0; it must be above 0 and at most 1"),
        ({"step": 1.5}, "at most 1, to stay in the hull"),
        ({"alpha": -1.0}, "alpha is -1.0; it must be positive and finite"),
        ({"alpha": 1.0, "ties": "first"}, "it must be one of merged, exact, lowest"),
        ({"alpha": 1.0, "width": -0.1}, "width is -0.1; it must be zero or more"),
        ({"alpha": 1.0, "width": 0.1, "ties": "lowest"}, "follows one token only"),
        ({"alpha": 1.0, "tolerance": 0.1}, "and below 1e-3"),
        ({"alpha": 1.0, "score": np.eye(3)}, r"score has shape \(3, 3\)"),
        ({"alpha": 1.0, "score": [[1, np.nan], [0, 1]]}, "score holds nan"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(mf.InvalidInput, match=message):
        mf.flows.run_hardmax(mf.TokenCloud(EIGHT), 2, **options)


def test_wrong_clouds_are_refused(untyped):
    with pytest.raises(mf.InvalidInput, match="it must be a TokenCloud"):
        mf.flows.run_hardmax(EIGHT, 2, alpha=0.5)
    with pytest.raises(mf.InvalidInput, match="count is -1; it must be 0 or more"):
        mf.flows.run_hardmax(mf.TokenCloud(EIGHT), -1, alpha=0.5)

    def last(points):
        return (
            mf.flows.run_hardmax(mf.TokenCloud(points), 1, alpha=0.5).points[-1].sum()
        )

    with pytest.raises(mf.InvalidInput, match="cannot run under jit or grad"):
        jax.grad(last)(jnp.asarray(EIGHT))
