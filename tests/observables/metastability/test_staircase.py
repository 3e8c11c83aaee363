"""The greedy rule of merges, against tabulated values and closed forms."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate

import meanformer as mf
from meanformer.observables import greedy_staircase

SOFTMAX = mf.identity_attention("softmax", 2)
UNNORMALISED = mf.identity_attention("unnormalised", 2)
UNIT = 0.5 * np.log(2000) / np.sqrt(2000)


def on_circle(angles, weights=None):
    angles = np.asarray(angles)
    return mf.TokenCloud(np.stack([np.cos(angles), np.sin(angles)], 1), weights)


@pytest.mark.parametrize(
    ("layer", "lengths"),
    [
        (UNNORMALISED, [0.03004521, 0.15147146, 0.33174269, 0.76617045]),
        (SOFTMAX, [0.03004521, 0.15623507, 0.33650630, 0.80068215]),
    ],
    ids=["unnormalised", "softmax"],
)
def test_the_staircase_of_five_tokens_is_tabulated(layer, lengths):
    steps = greedy_staircase(layer, on_circle(UNIT * np.array([0, 0.5, 2, 4, 7])))
    np.testing.assert_allclose(steps.arc_lengths, lengths, atol=2e-8)
    np.testing.assert_allclose(steps.levels, [0.2, 0.28, 0.44, 0.52, 1], atol=1e-12)
    np.testing.assert_array_equal(steps.is_tied, False)


def test_two_groups_meet_at_barycentre_or_squared_masses():
    cloud = on_circle([0.0, np.pi / 2], [0.7, 0.3])
    for layer, angle in ((UNNORMALISED, 0.4712389), (SOFTMAX, 0.2437443)):
        point = greedy_staircase(layer, cloud).points[0]
        np.testing.assert_allclose(np.arctan2(point[1], point[0]), angle, atol=1e-7)


def test_ties_are_reported():
    steps = greedy_staircase(SOFTMAX, on_circle([0.0, 0.4, 0.8, 2.5]))
    np.testing.assert_array_equal(steps.is_tied, [True, False, False])
    lines = str(steps).splitlines()
    assert lines[1].split()[:4] == ["0", "+", "1", "0.4"]
    assert [line.endswith("; tied (0 + 1, 1 + 2)") for line in lines] == [
        False,
        True,
        False,
        False,
    ]


def merges_first(layer, angles, masses):
    steps = greedy_staircase(layer, on_circle(angles, masses))
    assert not bool(steps.is_tied[0])
    assert steps.ties[0] == ()
    return int(steps.leaders[0]), int(steps.tokens[0])


@pytest.mark.parametrize("turn", [0.0, 0.3, 1.1, 2.9])
def test_of_equal_gaps_the_one_with_the_larger_factor_of_masses_closes_first(turn):
    angles = np.array([0.0, 0.4, 1.5, 1.9]) + turn
    # m1 + m2 is 0.4 and 0.6; m1/m2 + m2/m1 is 3.33 and 2.17.
    masses = [0.1, 0.3, 0.24, 0.36]
    assert merges_first(UNNORMALISED, angles, masses) == (2, 3)
    assert merges_first(SOFTMAX, angles, masses) == (0, 1)


def first_gap_closed(masses, beta, is_softmax):
    """Which gap of three tokens 0.4 apart closes first, without the library."""
    masses = np.array(masses)

    def velocity(_, angles):
        gaps = angles[None, :] - angles[:, None]
        kernel = masses * np.exp(beta * (np.cos(gaps) - 1))
        unit = np.exp(beta * (np.cos(np.diff(angles).min()) - 1))
        return (kernel * np.sin(gaps)).sum(1) / unit / (kernel.sum(1) ** is_softmax)

    def closed(_, angles):
        return np.diff(angles).min() - 0.02

    closed.terminal = True
    end = scipy.integrate.solve_ivp(
        velocity, (0, 50), [0.0, 0.4, 0.8], "LSODA", events=closed, rtol=1e-9, atol=1e-9
    ).y[:, -1]
    return int(np.diff(end).argmin())


@pytest.mark.parametrize(("layer", "is_softmax"), [(UNNORMALISED, 0), (SOFTMAX, 1)])
@pytest.mark.parametrize(
    "masses", [(0.6, 0.3, 0.1), (0.25, 0.35, 0.4), (0.2, 0.3, 0.5), (0.3, 0.6, 0.1)]
)
def test_a_group_between_two_others_goes_where_the_flow_takes_it(
    layer, is_softmax, masses
):
    first = first_gap_closed(masses, 400.0, is_softmax)
    found = merges_first(layer, [0.3, 0.7, 1.1], list(masses))
    assert found == (first, first + 1)


def test_pairs_of_equal_gaps_and_rates_are_listed_as_tied():
    angles = np.array([0.0, 0.4, 1.5, 1.9, 3.3, 3.7])
    steps = greedy_staircase(
        UNNORMALISED, on_circle(angles, [0.15, 0.25, 0.1, 0.3, 0.1, 0.1])
    )
    assert steps.ties[0] == ((0, 1), (2, 3))
    assert steps.ties[1] == ()
    np.testing.assert_array_equal(steps.is_tied[:3], [True, False, False])


def test_tied_pairs_are_named_by_their_tokens_where_absent_ones_come_first():
    angles, weights = [2.0, 0.0, 0.4, 1.5, 1.9], [0.0, 0.25, 0.25, 0.25, 0.25]
    steps = greedy_staircase(UNNORMALISED, on_circle(angles, weights))
    assert steps.ties[0] == ((1, 2), (3, 4))


def test_what_pulls_a_group_back_counts_along_the_sphere_and_not_along_chords():
    # In units of 0.2: a chain closes at the rate 1 + 1 - 1 at its ends, or at 1.5 by
    # chords, and the pair at the rate 1.2.
    angles = np.radians([0, 60, 120, 200, 260])
    masses = np.array([0.2, 0.2, 0.2, 0.12, 0.12]) / 0.84
    assert merges_first(UNNORMALISED, angles, masses) == (3, 4)


def test_ties_of_tokens_close_together_are_found_although_directions_are_rounded():
    turns = np.radians([0, 60, 120, 180])
    # Half a regular hexagon: its outer sides close alike.
    plane = 1e-3 * np.stack([np.cos(turns), np.sin(turns), 0 * turns], 1)
    points = plane + [0.0, 0.0, 1.0]
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    axes = np.linalg.qr([[1.0, 2.0, 3.0], [0.0, 1.0, 4.0], [5.0, 6.0, 1.0]])[0]
    cloud = mf.TokenCloud((points @ axes).astype(np.float32))
    steps = greedy_staircase(mf.identity_attention("unnormalised", 3), cloud)
    assert steps.ties[0] == ((0, 1), (2, 3))


def test_a_regular_polygon_is_at_rest_and_all_its_sides_are_tied():
    angles = 0.7 + np.arange(5) * 2 * np.pi / 5
    assert len(greedy_staircase(SOFTMAX, on_circle(angles)).ties[0]) == 5


def test_copies_of_a_token_are_no_tie():
    steps = greedy_staircase(SOFTMAX, on_circle([0.0, 0.0, 0.0, 1.0, 1.0]))
    np.testing.assert_array_equal(steps.is_tied, False)


def test_ties_in_single_precision_are_reported():
    cloud = on_circle(np.array([0.0, 0.4, 0.8, 2.5]) + 0.3)
    single = mf.TokenCloud(cloud.points.astype(jnp.float32))
    steps = greedy_staircase(SOFTMAX, single)
    np.testing.assert_array_equal(steps.is_tied, [True, False, False])


def test_where_opposite_tokens_meet_is_arbitrary_and_said_to_be():
    steps = greedy_staircase(SOFTMAX, on_circle([0.0, np.pi]))
    np.testing.assert_array_equal(steps.is_tied, [True])
    np.testing.assert_allclose(np.linalg.norm(steps.points, axis=1), 1)


@pytest.mark.parametrize(("layer", "power"), [(UNNORMALISED, 1), (SOFTMAX, 2)])
def test_on_an_arc_the_rule_is_that_of_numbers_on_a_line(layer, power):
    rng = np.random.default_rng(0)
    angles, masses = rng.uniform(0, 1.5, 40), rng.dirichlet(np.ones(40))
    steps = greedy_staircase(layer, on_circle(angles, masses))
    order = np.argsort(angles)
    places, masses, counts = list(angles[order]), list(masses[order]), [1] * 40
    length, lengths = 0.0, []
    while len(places) > 1:
        k = int(np.argmin(np.diff(places)))
        first, second = (masses[j] ** power for j in (k, k + 1))
        place = (first * places[k] + second * places[k + 1]) / (first + second)
        ways = [place - places[k], places[k + 1] - place]
        length += np.hypot(*(np.sqrt(counts[k : k + 2]) * ways))
        lengths.append(length)
        places[k : k + 2] = [place]
        masses[k : k + 2] = [masses[k] + masses[k + 1]]
        counts[k : k + 2] = [counts[k] + counts[k + 1]]
    np.testing.assert_allclose(steps.arc_lengths, lengths, rtol=1e-11)
    end = np.arctan2(*np.asarray(steps.points)[-1, ::-1])
    np.testing.assert_allclose(end, places[0], rtol=1e-11)
    np.testing.assert_allclose(steps.levels[-1], 1, rtol=1e-12)


def test_padding_and_the_splitting_of_a_token_change_no_gap_and_no_level():
    whole = greedy_staircase(SOFTMAX, on_circle([0.0, 0.5, 2.0], [0.5, 0.2, 0.3]))
    split = greedy_staircase(
        SOFTMAX, on_circle([0.0, 0.5, 2.0, 0.0, 1.0], [0.2, 0.2, 0.3, 0.3, 0.0])
    )
    np.testing.assert_allclose(split.gaps[1:], whole.gaps, atol=1e-12)
    np.testing.assert_allclose(split.levels[1:], whole.levels, atol=1e-12)
    assert float(split.gaps[0]) == 0


def test_a_lone_token_has_one_level():
    steps = greedy_staircase(SOFTMAX, on_circle([0.3]))
    np.testing.assert_array_equal(steps.levels, [1.0])
    assert steps.points.shape == (0, 2)


def test_what_the_rule_is_not_for_is_refused():
    with pytest.raises(mf.Unsupported, match="Softmax and Unnormalised"):
        greedy_staircase(mf.identity_attention("l2", 2), on_circle([0.0]))
    with pytest.raises(mf.InvalidInput, match="norm"):
        greedy_staircase(SOFTMAX, mf.TokenCloud(jnp.ones((2, 2))))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (mf.Softmax(jnp.eye(2), jnp.eye(2), -jnp.eye(2)), "value is not a positive"),
        (
            mf.Softmax(jnp.eye(2), jnp.eye(2), jnp.diag(jnp.array([1.0, 2.0]))),
            "value is not a positive",
        ),
        (mf.Unnormalised(-jnp.eye(2), jnp.eye(2), jnp.eye(2)), "score is not a pos"),
        (
            mf.Softmax(jnp.eye(2), jnp.eye(2), jnp.eye(2), query_bias=jnp.ones(2)),
            "without biases",
        ),
    ],
    ids=["repulsive", "unequal", "score", "bias"],
)
def test_matrices_that_do_not_attract_are_refused(layer, message):
    with pytest.raises(mf.Unsupported, match=message):
        greedy_staircase(layer, on_circle([0.0, 1.0]))


def test_rotated_queries_and_keys_have_the_same_score_and_are_accepted():
    turn = jnp.array([[0.6, -0.8], [0.8, 0.6]])
    layer = mf.Softmax(turn, turn, 0.5 * jnp.eye(2), beta=3.0)
    cloud = on_circle([0.0, 0.5, 2.0])
    np.testing.assert_array_equal(
        greedy_staircase(layer, cloud).points, greedy_staircase(SOFTMAX, cloud).points
    )
