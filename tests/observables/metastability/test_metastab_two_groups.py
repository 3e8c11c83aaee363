"""Two groups: dwell times, meeting points and clocks, tabulated and in closed form."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from scipy.integrate import solve_ivp

import meanformer as mf
from meanformer.observables import TwoGroups

RIGHT = np.pi / 2


def softmax(beta, masses=(0.5, 0.5)):
    return TwoGroups(mf.identity_attention("softmax", 2, beta), masses)


def unnormalised(beta, masses=(0.5, 0.5), *, shift=None, speed=1.0):
    eye = jnp.eye(3)
    layer = mf.Unnormalised(eye, eye, speed * eye, beta=beta, shift=shift)
    return TwoGroups(layer, masses)


@pytest.mark.parametrize(
    ("beta", "time", "rtol"),
    [
        (4.0, 10.021878351631, 1e-12),
        (10.0, 1129.33847345, 1e-11),
        (20.0, 12191759.4252, 1e-11),
        (40.0, 2.94602185e15, 2e-9),
    ],
)
def test_dwell_times_of_equal_groups_are_tabulated(beta, time, rtol):
    groups = softmax(beta)
    np.testing.assert_allclose(groups.dwell_time(RIGHT, 0.1), time, rtol=rtol)
    np.testing.assert_allclose(
        groups.log_dwell_time(RIGHT, 0.1), np.log(time), rtol=rtol
    )


def test_the_dwell_time_of_unequal_groups_is_tabulated():
    time = softmax(10.0, (0.7, 0.3)).dwell_time(RIGHT, 0.1)
    np.testing.assert_allclose(time, 818.7785778, rtol=1e-10)

    def velocity(_, angle):
        fall = np.exp(10 * (np.cos(angle) - 1))
        pulls = 0.3 / (0.7 + 0.3 * fall) + 0.7 / (0.3 + 0.7 * fall)
        return -fall * pulls * np.sin(angle)

    def meets(_, angle):
        return angle[0] - 0.1

    path = solve_ivp(
        velocity, (0, 900), [RIGHT], "DOP853", events=meets, rtol=1e-12, atol=1e-13
    )
    np.testing.assert_allclose(path.t_events[0], time, rtol=3e-10)


def test_the_asymptotic_formula_is_tabulated_and_the_leading_term():
    asymptotic = np.exp(softmax(40.0).asymptotic_log_dwell_time(RIGHT))
    np.testing.assert_allclose(asymptotic, 2.942e15, rtol=2e-4)
    np.testing.assert_allclose(asymptotic, np.exp(40.0) / 80, rtol=1e-13)
    # The next term of Laplace's method at a right angle is of relative size beta^-2.
    for groups in (softmax(1e4, (0.8, 0.2)), unnormalised(1e4, (0.6, 0.1), shift=1e4)):
        error = groups.log_dwell_time(RIGHT, 0.1)
        error -= groups.asymptotic_log_dwell_time(RIGHT)
        assert 0 < error < 2e-8


@pytest.mark.parametrize("beta", [600.0, 1e5])
def test_the_logarithm_goes_on_where_times_are_beyond_all_numbers(beta):
    groups = softmax(beta)
    log_time = groups.log_dwell_time(2.5, 0.1)
    expected = groups.asymptotic_log_dwell_time(2.5)
    np.testing.assert_allclose(log_time, expected, rtol=1e-4 / beta, atol=0.02)
    with pytest.raises(mf.errors.Overflow, match="use log_dwell_time"):
        groups.dwell_time(2.5, 0.1)


@pytest.mark.parametrize(
    ("beta", "first", "start", "end"),
    [
        (10.0, 0.7, 1.5, 0.1),
        (3.0, 0.99, 3.1, 1e-3),
        (50.0, 0.9, 2.5, 0.1),
        (1e8, 0.5, 1e-3, 1e-4),
    ],
)
def test_dwell_times_are_integrals_to_rounding(beta, first, start, end):
    second = 1 - first

    def slowness(angle):
        fall = mpmath.exp(beta * (mpmath.cos(angle) - 1))
        pulls = second / (first + second * fall) + first / (second + first * fall)
        return 1 / (fall * pulls * mpmath.sin(angle))

    with mpmath.workdps(30):
        exact = mpmath.log(mpmath.quad(slowness, mpmath.linspace(end, start, 21)))
    found = softmax(beta, (first, second)).log_dwell_time(start, end)
    np.testing.assert_allclose(found, float(exact), rtol=1e-13)


def test_an_end_close_to_the_meeting_takes_its_logarithm_in_time():
    # There two equal groups close in like exp(-t), whatever beta.
    near, nearer = (softmax(4.0).dwell_time(1.5, end) for end in (1e-100, 1e-200))
    np.testing.assert_allclose(nearer - near, 100 * np.log(10), rtol=1e-12)


def test_unnormalised_groups_obey_their_own_law():
    groups = unnormalised(10.0, (0.5, 0.2), speed=2.0)
    angles = np.array([0.3, 1.0, 2.0])
    expected = -2 * 0.7 * np.exp(10 * np.cos(angles)) * np.sin(angles)
    np.testing.assert_allclose(groups.velocity(angles), expected, rtol=1e-12)
    velocity = jax.jit(groups.velocity)
    path = solve_ivp(
        lambda _, angle: np.asarray(velocity(angle)),
        (0, groups.dwell_time(1.5, 0.5)),
        [1.5],
        rtol=1e-11,
        atol=1e-13,
    )
    np.testing.assert_allclose(path.y[0, -1], 0.5, rtol=1e-8)


@pytest.mark.parametrize("kind", ["softmax", "unnormalised"])
def test_velocities_are_those_of_the_flow(kind):
    layer = mf.identity_attention(kind, 3, 2.5)
    groups = TwoGroups(layer, (0.7, 0.3))
    points = jnp.array([[1.0, 0, 0], [np.cos(1.1), np.sin(1.1), 0]])
    flow = mf.Flow(layer, space=mf.Sphere())
    cloud = mf.TokenCloud(points, jnp.array([0.7, 0.3]))
    speeds = np.linalg.norm(flow.field(jnp.zeros(()), cloud, points, None), axis=1)
    np.testing.assert_allclose(groups.velocities(1.1), speeds, rtol=1e-12)
    np.testing.assert_allclose(groups.velocity(1.1), -speeds.sum(), rtol=1e-12)


def test_a_shift_and_a_speed_only_change_the_unit_of_time():
    plain, moved = unnormalised(5.0), unnormalised(5.0, shift=5.0, speed=3.0)
    difference = moved.log_dwell_time(2.0, 0.2) - plain.log_dwell_time(2.0, 0.2)
    np.testing.assert_allclose(difference, 5 - np.log(3), rtol=1e-12)


@pytest.mark.parametrize(
    ("beta", "point"),
    [(10.0, 0.3116278), (40.0, 0.2772760), (160.0, 0.2604620), (640.0, 0.2520972)],
)
def test_meeting_points_are_tabulated(beta, point):
    groups = softmax(beta, (0.7, 0.3))
    np.testing.assert_allclose(groups.meeting_point(RIGHT), point, atol=6e-8)
    np.testing.assert_allclose(groups.limit_meeting_point(RIGHT), 0.2437443, atol=6e-8)


def test_meeting_points_tend_to_their_limit_like_the_root_of_the_temperature():
    limit = softmax(1.0, (0.7, 0.3)).limit_meeting_point(RIGHT)
    errors = [
        softmax(beta, (0.7, 0.3)).meeting_point(RIGHT) - limit for beta in (1e4, 1e8)
    ]
    np.testing.assert_allclose(errors[0] / errors[1], 100, rtol=1e-3)


def test_unnormalised_groups_meet_at_the_barycentre():
    groups = unnormalised(7.0, (0.7, 0.3))
    np.testing.assert_allclose(groups.meeting_point(RIGHT), 0.4712389, atol=1e-7)
    assert groups.meeting_point(RIGHT) == groups.limit_meeting_point(RIGHT)


def test_both_groups_together_close_the_whole_angle():
    one, other = softmax(13.0, (0.9, 0.1)), softmax(13.0, (0.1, 0.9))
    total = one.meeting_point(2.0, 0.3) + other.meeting_point(2.0, 0.3)
    np.testing.assert_allclose(total, 1.7, rtol=1e-13)


@pytest.mark.parametrize(
    ("beta", "time"), [(10.0, 0.2156), (20.0, 0.0631), (40.0, 0.0263)]
)
def test_in_the_initial_exponential_clock_groups_meet_after_one_over_beta(beta, time):
    log_time = softmax(beta).log_dwell_time(0.8, 0.1) - beta * (1 - np.cos(0.8))
    np.testing.assert_allclose(np.exp(log_time), time, atol=5e-5)


def test_velocities_in_the_exponential_clock_are_tabulated():
    found = softmax(40.0, (0.5, 0.2)).exponential_velocities(0.8)
    np.testing.assert_allclose(found, [0.286942, 1.793366], atol=5e-7)
    limit = softmax(400.0, (0.5, 0.2)).exponential_velocities(0.8)
    np.testing.assert_allclose(limit, [0.286942, 1.793390], atol=5e-7)


def test_velocities_have_derivatives_and_go_through_jit():
    groups = softmax(3.0, (0.7, 0.3))
    slope = jax.jit(jax.grad(groups.velocity))(1.2)
    step = groups.velocity(1.2 + 1e-6) - groups.velocity(1.2 - 1e-6)
    np.testing.assert_allclose(slope, step / 2e-6, rtol=1e-8)


def test_single_precision_stays_single():
    angle = jnp.asarray(0.8, jnp.float32)
    assert softmax(40.0).velocities(angle).dtype == jnp.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: softmax(1.0, (0.5, 0.0)),
            "each of masses is 0.0; it must be positive",
        ),
        (lambda: softmax(1.0, (0.5,)), "two positive numbers"),
        (lambda: softmax(1.0, ("half", 0.5)), "each of masses is 'half'"),
        (lambda: softmax(1.0).velocity(4.0), r"angle holds 4\.0"),
        (lambda: softmax(1.0).velocities([0.1, np.nan]), "from 0 to pi"),
        (lambda: unnormalised(0.0, speed=0.0), "positive multiple"),
        (lambda: softmax(1.0).log_dwell_time(np.pi, 0.1), "opposite ones do not"),
        (lambda: softmax(1.0).dwell_time(0.1, 0.5), "must be below the start"),
        (lambda: softmax(1.0).meeting_point(0.5, 0.7), "between 0 and 0.5"),
        (lambda: TwoGroups(mf.identity_attention("l2", 2)), "laws of two groups"),
    ],
)
def test_what_has_no_meaning_is_refused(call, message):
    with pytest.raises(mf.InvalidInput, match=message):
        call()


def test_speeds_beyond_all_numbers_are_refused_with_advice():
    with pytest.raises(mf.errors.Overflow, match="the shift beta"):
        unnormalised(800.0).velocity(0.1)
    assert np.isfinite(unnormalised(800.0, shift=800.0).velocity(0.1))


@pytest.mark.parametrize("masses", [(0.5, 0.5), (0.7, 0.2)])
def test_without_scores_the_angle_falls_like_that_of_a_pendulum_at_its_limit(masses):
    """Both move at a speed proportional to the sine of the angle."""
    start, end = 2.5, 0.1
    length = np.log(np.tan(start / 2) / np.tan(end / 2))
    soft, plain = softmax(0.0, masses), unnormalised(0.0, masses)
    total = sum(masses)
    np.testing.assert_allclose(soft.dwell_time(start, end), length, rtol=1e-12)
    np.testing.assert_allclose(plain.dwell_time(start, end), length / total, rtol=1e-12)
    share = masses[1] / total
    for groups in (soft, plain):
        found = groups.meeting_point(start)
        np.testing.assert_allclose(found, share * start, rtol=1e-12)
    np.testing.assert_allclose(soft.velocity(1.1), -np.sin(1.1), rtol=1e-12)
    # It is the limit of small scores.
    near = softmax(1e-9, masses).dwell_time(start, end)
    np.testing.assert_allclose(near, length, rtol=1e-8)
    with pytest.raises(mf.InvalidInput, match="take log_dwell_time"):
        soft.asymptotic_log_dwell_time(start)
