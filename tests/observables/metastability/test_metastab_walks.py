"""Clocks, plateaus, predictions and saddles along walks of five tokens.

All walks have five tokens in the plane and the same number of saved depths, so that one
compiled program for each kind of attention serves them all.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import quad

import meanformer as mf
from meanformer.observables import (
    TwoGroups,
    clocks,
    greedy_staircase,
    plateaus,
    predicted_staircase,
    saddles,
)

FIVE = (0.0621971438, 0.2143229734, 1.8191226208, 2.9110710095, 3.1879369617)
SPACED = 0.5 * np.log(2000) / np.sqrt(2000) * np.array([0, 0.5, 2, 4, 7])
AROUND = 2 * np.pi * np.arange(5) / 5 + np.array([0.10, -0.14, 0.05, 0.10, -0.02])
SAVED = 41


def on_circle(angles):
    angles = np.asarray(angles)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def flow_of(kind, beta):
    eye = jnp.eye(2)
    layer = mf.Softmax(eye, eye, eye, beta=beta)
    if kind == "unnormalised":
        layer = mf.Unnormalised(eye, eye, eye, beta=beta, shift=beta)
    return mf.Flow(layer, space=mf.Sphere())


def walked(angles, beta, depths, *, kind="softmax", weights=None, merge=1e-9):
    missing = 5 - len(angles)
    masses = np.full(len(angles), 1 / len(angles)) if weights is None else weights
    cloud = mf.TokenCloud(
        on_circle(np.append(angles, np.full(missing, 5.5))),
        np.append(masses, np.zeros(missing)),
    )
    return mf.solve(
        flow_of(kind, beta),
        cloud,
        depths[-1],
        save=depths,
        solver=mf.LongDepth(),
        merge=merge,
        rtol=1e-11,
    )


def log_depths(last):
    return np.append(0.0, np.geomspace(1e-2, last, SAVED - 1))


@pytest.fixture(scope="module")
def soft():
    """The published setting under softmax."""
    return walked(SPACED, 4000.0, log_depths(1e300))


@pytest.fixture(scope="module")
def plain():
    """The published setting under unnormalised attention."""
    return walked(SPACED, 4000.0, log_depths(1e300), kind="unnormalised")


@pytest.fixture(scope="module", autouse=True)
def compiled(soft, plain):
    """Compile both programs before the first test is timed."""


def test_unnormalised_staircases_have_the_tabulated_abscissas(plain):
    scaled = np.asarray(plain.merges.arc_lengths) / np.log(4000)
    rule = [0.0036225, 0.0182627, 0.0399977, 0.0923759]
    np.testing.assert_allclose(scaled, rule, atol=6e-8)
    measured = [0.003622, 0.018261, 0.039995, 0.092372]
    np.testing.assert_allclose(scaled, measured, rtol=2e-4)


@pytest.mark.parametrize(
    ("beta", "measured", "rule"),
    [(1000.0, 0.110888, 0.110915), (500.0, 0.12236, 0.123285)],
)
def test_the_last_jump_at_higher_temperature_is_tabulated(beta, measured, rule):
    path = walked(SPACED, beta, log_depths(1e300), kind="unnormalised")
    end = float(path.merges.arc_lengths[-1]) / np.log(beta)
    np.testing.assert_allclose(end, measured, rtol=2e-4)
    predicted = greedy_staircase(path.flow.velocity.gamma, path.cloud(0))
    np.testing.assert_allclose(
        predicted.arc_lengths[-1] / np.log(beta), rule, atol=6e-7
    )


def test_softmax_staircases_have_the_tabulated_arc_lengths(soft):
    lengths = np.asarray(soft.merges.arc_lengths)
    np.testing.assert_allclose(lengths, [0.030, 0.155, 0.336, 0.796], atol=6e-4)


@pytest.mark.parametrize("kind", ["softmax", "unnormalised"])
def test_plateaus_are_at_rational_levels(kind, soft, plain):
    path = soft if kind == "softmax" else plain
    steps = plateaus(path)
    assert steps.is_located
    assert [step.count for step in steps] == [5, 4, 3, 2, 1]
    np.testing.assert_allclose(
        [step.level for step in steps], [0.2, 0.28, 0.44, 0.52, 1], atol=1e-12
    )
    np.testing.assert_allclose(
        [step.energy for step in list(steps)[1:]], [0.28, 0.44, 0.52, 1], atol=1e-9
    )
    np.testing.assert_allclose(steps[3].masses, [0.6, 0.4], rtol=1e-12)


def test_plateaus_begin_and_end_at_joins(soft):
    steps, depths = plateaus(soft), np.asarray(soft.merges.depths)
    np.testing.assert_array_equal([step.start for step in steps][1:], depths)
    np.testing.assert_array_equal([step.end for step in steps][:-1], depths)
    assert [step.is_open for step in steps] == [False] * 4 + [True]
    assert steps.longest is steps[3]
    np.testing.assert_allclose(
        steps[2].log_duration, np.log(depths[2] - depths[1]), rtol=1e-14
    )
    np.testing.assert_array_equal(steps[1].arc_end, soft.merges.arc_lengths[1])


def test_the_energies_of_the_five_tokens_are_tabulated():
    times = np.sort(np.append([0, 5, 20, 200, 300, 350], np.linspace(7, 19, 35)))
    path = walked(FIVE, 4.0, times)
    exact = {0: 0.3597121382, 5: 0.5193066515, 20: 0.5203299883, 200: 0.5206017439}
    exact |= {300: 0.5223793884, 350: 1.0}
    points = np.asarray(path.points)
    gram = np.einsum("tid,tjd->tij", points, points)
    energies = np.exp(4 * (gram - 1)).mean(axis=(1, 2))
    for depth, value in exact.items():
        found = energies[int(np.argmin(np.abs(times - depth)))]
        np.testing.assert_allclose(found, value, atol=2e-9, err_msg=str(depth))
    final = np.arctan2(*np.asarray(path.points)[-1, 0, ::-1])
    np.testing.assert_allclose(final, 1.8378870993, atol=2e-8)


def test_plateaus_are_found_by_counting_where_a_threshold_is_given():
    times = np.sort(np.append([0, 2, 5, 326.5, 326.7, 350], np.linspace(7, 300, 35)))
    steps = plateaus(walked(FIVE, 4.0, times), threshold=0.25)
    assert not steps.is_located
    assert "between which they change" in steps.verdict
    assert [step.count for step in steps] == [4, 3, 2, 1]
    # Two groups at the saved depths from 5 on, until they are 0.25 apart.
    assert (steps[1].start, steps[1].end) == (2.0, 2.0)
    assert (steps[2].start, steps[2].end) == (5.0, 326.5)
    assert steps[3].start == 326.7
    np.testing.assert_allclose(steps[2].level, 0.52, rtol=1e-12)
    assert steps[3].is_open


def test_undecided_counts_are_reported():
    times = np.linspace(0, 1, SAVED)
    steps = plateaus(walked([0.0, 0.2, 0.41, 0.64], 4.0, times), threshold="auto")
    assert steps[0].count is None
    assert steps[0].level is None
    assert "undecided at" in steps.verdict


def test_several_joins_at_once_are_a_tie():
    steps = plateaus(walked([-1.5, -1.0, 1.0, 1.5], 4.0, log_depths(1e6)))
    assert [step.count for step in steps] == [4, 2, 1]
    assert [step.is_tied for step in steps] == [True, False, False]


@pytest.mark.parametrize("turn", [0.0, 0.3])
def test_a_tie_that_only_rounding_breaks_is_a_tie(turn, soft):
    # Two equal gaps close at depth 1e14, apart by some 1e-15 of it.
    pairs = np.array([0.0, 1.5, np.pi, np.pi + 1.5]) + turn
    path = walked(pairs, 40.0, log_depths(1e15))
    steps = plateaus(path)
    assert [step.count for step in steps] == [4, 2]
    assert [step.is_tied for step in steps] == [True, False]
    # Joins one after another are none, even where depths are the same in numbers.
    assert not any(step.is_tied for step in plateaus(soft))


def test_tokens_at_one_point_are_one_from_the_first():
    steps = plateaus(walked([0.3, 0.3, 1.0], 4.0, log_depths(1e3)))
    assert [step.count for step in steps] == [2, 1]
    whole = walked([0.3, 1.0], 4.0, log_depths(1e3), weights=[2 / 3, 1 / 3])
    for split, single in zip(steps, plateaus(whole), strict=True):
        np.testing.assert_allclose(split.end, single.end, rtol=1e-9)
        np.testing.assert_allclose(split.level, single.level, rtol=1e-12)


def test_a_trajectory_without_a_flow_needs_one(soft):
    bare = eqx.tree_at(lambda p: p.flow, soft, None, is_leaf=lambda x: x is None)
    with pytest.raises(mf.InvalidInput, match="pass flow"):
        plateaus(bare)
    flow = flow_of("softmax", 4000.0)
    assert len(plateaus(bare, flow)) == 5


def test_flows_that_do_not_attract_are_refused(soft):
    flow = mf.Flow(mf.identity_attention("softmax", 2, 1.0))
    with pytest.raises(mf.Unsupported, match=r"plateaus are for Sphere\(\)"):
        plateaus(soft, flow)
    repulsive = mf.Softmax(jnp.eye(2), jnp.eye(2), -jnp.eye(2))
    with pytest.raises(mf.Unsupported, match="positive multiple"):
        clocks(soft, mf.Flow(repulsive, space=mf.Sphere()))


@pytest.mark.parametrize(
    ("beta", "tabulated"), [(10.0, 0.2156), (20.0, 0.0631), (40.0, 0.0263)]
)
def test_clocks_of_two_groups_are_integrals(beta, tabulated):
    law = TwoGroups(flow_of("softmax", beta).velocity.gamma)
    depths = np.array([law.dwell_time(0.8, end) for end in np.linspace(0.79, 0.1, 40)])
    path = walked([0.0, 0.8], beta, np.append(0.0, depths))
    found = clocks(path)
    np.testing.assert_allclose(found.initial_exponential[-1], tabulated, atol=5e-5)
    exact = quad(
        lambda angle: 1 / pulls(beta, (0.5, 0.5), angle).sum() / np.sin(angle), 0.1, 0.8
    )[0]
    np.testing.assert_allclose(found.exponential[-1], exact, rtol=1e-5)
    np.testing.assert_allclose(found.arc_lengths[-1], 0.7 / np.sqrt(2), rtol=1e-5)
    np.testing.assert_allclose(
        found.published, found.arc_lengths / np.log(beta), rtol=1e-12
    )
    np.testing.assert_allclose(found.log_depths, np.log(depths), rtol=1e-12)
    assert bool(found.is_smooth.all())


def test_clocks_say_where_tokens_were_joined(soft):
    found = clocks(soft)
    assert int(np.sum(~np.asarray(found.is_smooth))) == 4
    for name in ("arc_lengths", "published", "exponential", "initial_exponential"):
        assert np.isfinite(getattr(found, name)).all()
        assert (np.diff(getattr(found, name)) >= 0).all()


@pytest.fixture(scope="module")
def adaptive():
    """Two groups from 0.8 to 0.1 apart, by an ordinary solver."""
    cloud = mf.TokenCloud(on_circle([0.0, 0.8]), np.array([0.7, 0.3]))
    flow = flow_of("softmax", 10.0)
    depth = TwoGroups(flow.velocity.gamma, (0.7, 0.3)).dwell_time(0.8, 0.1)
    return mf.solve(flow, cloud, depth, save=81, rtol=1e-10)


def test_clocks_without_long_depth_are_integrated_in_depth(adaptive):
    found = clocks(adaptive)
    assert bool(found.is_smooth.all())

    def slowness(angle):
        return 1 / pulls(10.0, (0.7, 0.3), angle).sum() / np.sin(angle)

    exact = quad(slowness, 0.1, 0.8)[0]
    np.testing.assert_allclose(found.exponential[-1], exact, rtol=1e-5)

    def speed(angle):
        both = pulls(10.0, (0.7, 0.3), angle)
        return np.linalg.norm(both) / both.sum()

    exact = quad(speed, 0.1, 0.8)[0]
    np.testing.assert_allclose(found.arc_lengths[-1], exact, rtol=1e-6)


def test_saved_depths_that_are_too_far_apart_for_a_clock_are_marked(adaptive):
    # Two depths out of all: a cubic between them says nothing.
    sparse = jax.tree.map(
        lambda leaf: leaf[::80] if np.shape(leaf)[:1] == (81,) else leaf, adaptive
    )
    np.testing.assert_array_equal(clocks(sparse).is_smooth, [True, False])


def pulls(beta, masses, angle):
    """What two groups feel of each other under softmax, over the exponential clock."""
    first, second = masses
    fall = np.exp(beta * (np.cos(angle) - 1))
    return np.array([second / (first + second * fall), first / (second + first * fall)])


def test_a_walk_that_ended_early_is_continued_by_the_greedy_rule(plain):
    short = walked(SPACED, 4000.0, log_depths(1e15), kind="unnormalised")
    rest = predicted_staircase(short)
    assert "3 merges predicted by the greedy rule" in rest.verdict
    np.testing.assert_array_equal(rest.is_predicted, [False, True, True, True])
    np.testing.assert_array_equal(rest.tokens, plain.merges.tokens)
    np.testing.assert_array_equal(rest.leaders, plain.merges.leaders)
    np.testing.assert_allclose(rest.levels, [0.2, 0.28, 0.44, 0.52, 1], atol=1e-12)
    np.testing.assert_allclose(rest.arc_lengths, plain.merges.arc_lengths, rtol=1e-6)
    np.testing.assert_allclose(rest.points, plain.merges.points, atol=1e-6)
    logs = np.log(np.asarray(plain.merges.depths))
    np.testing.assert_allclose(rest.log_depths, logs, atol=1e-3)


def test_a_walk_that_reached_its_end_has_nothing_predicted(soft):
    rest = predicted_staircase(soft)
    assert rest.verdict == "all merges were reached by the trajectory"
    np.testing.assert_array_equal(rest.is_predicted, False)
    np.testing.assert_allclose(rest.log_depths, np.log(soft.merges.depths), rtol=1e-12)


def test_a_tie_in_a_prediction_is_said():
    short = walked([0.0, 1.0, 2.0], 40.0, log_depths(10.0))
    rest = predicted_staircase(short)
    assert "1 of them tied" in rest.verdict
    np.testing.assert_array_equal(rest.is_tied, [True, False])


def test_a_trajectory_without_joins_cannot_be_continued(adaptive):
    with pytest.raises(mf.Unsupported, match="no record of merges"):
        predicted_staircase(adaptive)


def test_plateaus_and_predictions_are_printed_as_tables(plain):
    steps = str(plateaus(plain)).splitlines()
    assert len(steps) == len(plateaus(plain)) + 2
    assert steps[-1] == "from joins, located by the solver"
    assert steps[-2].endswith("1  1; open")
    short = walked(SPACED, 4000.0, log_depths(1e15), kind="unnormalised")
    merges = str(predicted_staircase(short)).splitlines()
    assert merges[1].split()[:3] == ["0", "+", "1"]
    assert not merges[1].endswith("predicted")
    assert merges[4].split()[-3:] == ["132.05", "1", "predicted"]
    assert merges[-1].startswith("3 merges predicted")


@pytest.mark.slow
def test_the_saddles_of_a_pentagon_are_a_ladder():
    found = saddles(walked(AROUND, 20.0, log_depths(1e22)))
    assert [step.plateau.count for step in found] == [5, 4, 3, 2, 1]
    assert [step.index for step in found] == [4, 3, 2, 1, 0]
    for step in found:
        np.testing.assert_allclose(step.energy, step.plateau.level, atol=1e-4)
        assert step.distance <= 0.5
    # The first critical point is the regular pentagon.
    angles = np.sort(np.arctan2(*np.asarray(found[0].point.cloud.points).T[::-1]))
    np.testing.assert_allclose(np.diff(angles), 2 * np.pi / 5, rtol=1e-9)
    gram = np.cos(angles[:, None] - angles[None, :])
    exact = np.exp(20 * (gram - 1)).mean()
    np.testing.assert_allclose(found[0].energy, exact, rtol=1e-10)
    assert found[0].direction.shape == (5, 2)


@pytest.mark.slow
def test_on_an_arc_below_a_half_circle_only_the_collapse_is_critical(soft):
    found = saddles(soft)
    for step in list(found)[:-1]:
        assert step.point is None
        assert "only the collapse is critical" in step.verdict
    assert found[-1].verdict == "maximum, 0 away"
    lines = str(found).splitlines()
    assert len(lines) == len(found) + 1
    assert lines[-1].split()[2:] == ["1", "1", "maximum,", "0", "away"]


def test_saddles_take_the_groups_of_the_plateaus_that_are_given():
    # At this threshold the five tokens are two groups from the start on.
    path = walked(FIVE, 4.0, np.linspace(0, 2, SAVED))
    steps = plateaus(path, threshold=1.2)
    assert [step.count for step in steps] == [2]
    assert saddles(path, found=steps)[0].state.count == 2


def test_a_plateau_without_a_saved_depth_has_no_saddle():
    path = walked(SPACED, 20.0, np.append(0, np.geomspace(1e3, 1e4, SAVED - 1)))
    found = saddles(path)
    assert found[1].state is None
    assert "no saved depth" in found[1].verdict
    assert found[1].plateau.energy is None


def test_euler_steps_with_renormalisation_run_on_a_slow_clock():
    points, step, found = on_circle(FIVE), 0.1, {}
    for count in range(1, 4000):
        masses = np.exp(4 * points @ points.T)
        points = points + step * masses @ points / masses.sum(axis=1, keepdims=True)
        points /= np.linalg.norm(points, axis=1, keepdims=True)
        gaps = np.diff(np.arctan2(points[:, 1], points[:, 0]))
        for pair in np.flatnonzero(np.abs(gaps) < 0.01):
            found.setdefault(int(pair), step * count)
    times = sorted(found.values())
    np.testing.assert_allclose(times, [3.0, 4.4, 7.3, 365.7], atol=1e-9)
    # The exact flow takes 329.87: the clock is slow by about one plus the step.
    np.testing.assert_allclose(times[-1] / 329.87, 1.109, atol=1e-3)
