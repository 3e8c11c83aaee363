"""Softmax at low temperature beside hardmax: distances, changes, first-order shift."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from scipy.special import expi

import meanformer as mf
from meanformer.errors import InvalidInput, Unsupported
from meanformer.observables import (
    fit_low_temperature_bound,
    low_temperature_comparison,
    low_temperature_flow,
    low_temperature_shift,
)

SQUARE = [(1.0, 1.0), (1.0, -1.0), (-1.0, -1.0), (-1.0, 1.0)]
# Far from the boundaries of the corners' cells.
INSIDE = [(0.5, 0.4), (0.7, -0.5), (-0.4, -0.6), (-0.5, 0.45), (0.35, 0.6)]
CLOUD = mf.TokenCloud(np.array(SQUARE + INSIDE))
SHARP = {"rtol": 1e-10, "atol": 1e-13}


def softmax(value=None):
    eye = np.eye(2)
    return mf.Softmax(eye, eye, np.array(eye if value is None else value, float))


def uniform(seed, count=30):
    points = np.random.default_rng(seed).uniform(-1, 1, (count, 2))
    return mf.TokenCloud(points)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_distances_to_the_limit_are_those_to_a_very_low_temperature(seed):
    betas = [10, 100, 1000]
    run = low_temperature_comparison(softmax(), uniform(seed), [2.0], [*betas, 3e6])
    last = mf.TokenCloud(run.points[-1, 0])
    distances = [mf.wasserstein(mf.TokenCloud(p), last) for p in run.points[:-1, 0]]
    assert run.distances[-1, 0] < 1e-5
    np.testing.assert_allclose(run.distances[:-1, 0], distances, atol=1e-5)


@pytest.mark.parametrize("beta", [0.5, 1.0, 1.5, 2.0])
def test_two_opposite_tokens_follow_an_exponential_integral(beta):
    # z = +-a: a' = -2a / (1 + exp(2 beta a^2)), so with s = a^2
    # 4t = log(s0/s) + Ei(2 beta s0) - Ei(2 beta s).
    depths = np.array([1.0, 5.0, 12.0])
    pair = mf.TokenCloud(np.array([(0.6, 0.8), (-0.6, -0.8)]))
    run = low_temperature_comparison(softmax(), pair, depths, [beta], **SHARP)
    squares = (run.points[0, :, 0] ** 2).sum(axis=1)
    needed = (expi(2 * beta) - np.log(squares) - expi(2 * beta * squares)) / 4
    np.testing.assert_allclose(needed, depths, rtol=1e-8)
    np.testing.assert_array_equal(run.limit_points[2], np.asarray(pair.points))
    np.testing.assert_allclose(run.coupled[0], 1 - np.sqrt(squares), rtol=1e-9)


def test_without_followers_the_distance_falls_exponentially_in_beta():
    # Two opposite tokens leave their places at the speed 2/(1 + exp(2 beta)).
    betas = np.array([4.0, 6.0, 8.0])
    pair = mf.TokenCloud(np.array([(1.0, 0.0), (-1.0, 0.0)]))
    depths = [0.5, 1.0, 2.0]
    run = low_temperature_comparison(softmax(), pair, depths, betas, **SHARP)
    exact = 2 / (1 + np.exp(2 * betas))[:, None] * np.array(depths)
    np.testing.assert_allclose(run.coupled, exact, rtol=0.02)


def test_a_follower_draws_its_leader_by_the_logarithm_of_its_weight_over_beta():
    weights = np.array([0.2, 0.8])
    pair = mf.TokenCloud(np.array([(1.0, 0.0), (0.2, 0.0)]), weights)
    betas, depths = np.array([100.0, 200.0, 400.0]), [20.0, 22.0, 25.0]
    run = low_temperature_comparison(softmax(), pair, depths, betas, **SHARP)
    shifts = run.points[:, 2, 0, 0] - 1
    errors = np.abs(betas * shifts / np.log(0.2) - 1)
    assert errors[-1] < 0.01
    np.testing.assert_allclose(errors[1:] / errors[:-1], 0.5, rtol=0.1)
    predicted = low_temperature_shift(softmax(), pair, [25.0], betas)
    np.testing.assert_allclose(predicted[:, 0, :, 0] * betas[:, None], np.log(0.2))


def test_the_component_of_the_shift_along_the_leader_is_a_log_laplace_transform():
    beta, leader = 7.0, np.array([1.0, 1.0])
    members = np.array([(1.0, 1.0), (0.5, 0.4), (0.35, 0.6)])
    shift = low_temperature_shift(softmax(), CLOUD, [60.0], [beta])[0, 0]
    group = mf.TokenCloud(members)
    tilt = jnp.asarray(beta * leader)[None]
    exact = group.log_laplace(tilt)[0] / beta - leader @ leader
    np.testing.assert_allclose(shift[[0, 4, 8]] @ leader, float(exact), rtol=1e-13)


@pytest.mark.slow
def test_the_first_order_shift_has_an_error_of_second_order():
    betas, depths = np.array([40.0, 80.0, 160.0]), [4.0, 8.0, 16.0]
    run = low_temperature_comparison(softmax(), CLOUD, depths, betas, **SHARP)
    shift = low_temperature_shift(softmax(), CLOUD, depths, betas)
    errors = np.abs(run.points - run.limit_points[None] - shift).max(axis=(2, 3))
    sizes = np.abs(shift).max(axis=(2, 3))
    assert run.changed.max() == 0
    assert (errors < 0.04 * sizes)[:, 1:].all()
    np.testing.assert_allclose(errors[1:, 2] / errors[:-1, 2], 0.25, atol=0.03)
    np.testing.assert_allclose(sizes[1:, 2] / sizes[:-1, 2], 0.5, atol=0.01)


def test_the_first_order_shift_scales_with_the_value():
    single = low_temperature_shift(softmax(), CLOUD, [2.0, 6.0], [50.0])
    double = low_temperature_shift(softmax(2 * np.eye(2)), CLOUD, [1.0, 3.0], [50.0])
    np.testing.assert_allclose(double, single, rtol=1e-12)


def test_the_shift_is_exponentially_small_before_log_beta_and_algebraic_beyond():
    betas = np.array([200.0, 400.0, 800.0])
    shift = low_temperature_shift(softmax(), CLOUD, [1.0, 12.0], betas)
    sizes = np.abs(shift).max(axis=(2, 3))
    logs = np.log(sizes)
    # Early: log of the size falls linearly in beta, at the smallest margin / e.
    points = np.asarray(CLOUD.points)
    margins = np.einsum("nd,nd->n", np.sign(points), np.sign(points) - points)
    smallest = margins[margins > 0].min()
    slopes = np.diff(logs[:, 0] + np.log(betas)) / np.diff(betas)
    np.testing.assert_allclose(slopes, -smallest * np.exp(-1.0), rtol=0.02)
    np.testing.assert_allclose(np.diff(logs[:, 1]), -np.log(2), atol=0.01)


def test_distances_are_those_of_an_assignment_and_never_exceed_the_coupled_ones():
    run = low_temperature_comparison(softmax(), uniform(0), [0.5, 4.0], [3.0, 30.0])
    distances = run.distances
    assert (distances <= run.coupled + 1e-15).all()
    assert (run.end_distances <= run.end_coupled + 1e-15).all()
    for b in range(2):
        costs = ((run.points[b, 1][:, None] - run.limit_points[1][None]) ** 2).sum(2)
        pairs = scipy.optimize.linear_sum_assignment(costs)
        exact = np.sqrt(costs[pairs].mean())
        assert distances[b, 1] == pytest.approx(exact, rel=1e-12)
    np.testing.assert_allclose(run.reach, np.log([3.0, 30.0]))


def test_the_distance_falls_in_beta_where_no_leader_differs():
    betas = 10.0 ** np.arange(1, 4.1, 0.5)
    for seed in (3, 5):
        run = low_temperature_comparison(softmax(), uniform(seed), [2.0], betas)
        coupled, same = run.coupled[:, 0], run.changed[:, 0] == 0
        both = same[1:] & same[:-1]
        assert both.sum() >= 3
        # It falls until the errors of the solves are left.
        falls = (coupled[1:] < coupled[:-1]) | (coupled[:-1] < 1e-8)
        assert falls[both].all()
        # A changed leader costs a distance that does not fall with beta.
        assert coupled[same].max() < 0.5 * coupled[~same].min()
        assert coupled[same & (betas >= 100)].max() < 0.05


@pytest.mark.slow
def test_the_order_of_tokens_and_splitting_change_nothing():
    points, weights = np.asarray(uniform(0, 8).points), np.arange(1.0, 9) / 36
    order = np.random.default_rng(3).permutation(8)
    split = np.append(weights, weights[2] / 3)
    split[2] *= 2 / 3
    padded = np.append(weights, 0.0)
    clouds = [
        mf.TokenCloud(points, weights),
        mf.TokenCloud(points[order], weights[order]),
        mf.TokenCloud(np.append(points, points[2:3], axis=0), split),
        mf.TokenCloud(np.append(points, [(0.9, -3.0)], axis=0), padded),
    ]
    runs = [
        low_temperature_comparison(softmax(), cloud, [1.0, 3.0], [5.0, 80.0])
        for cloud in clouds
    ]
    for run in runs[1:]:
        np.testing.assert_allclose(run.distances, runs[0].distances, atol=1e-8)
        np.testing.assert_allclose(run.coupled, runs[0].coupled, atol=1e-8)
        np.testing.assert_allclose(run.end_distances, runs[0].end_distances, atol=1e-8)
    for run in (runs[1], runs[3]):
        np.testing.assert_array_equal(run.changed, runs[0].changed)


def test_absent_tokens_need_no_leader():
    points = np.append(np.asarray(CLOUD.points), [(0.5, 0.0), (3.0, 0.0)], axis=0)
    padded = mf.TokenCloud(points, np.append(np.full(9, 1 / 9), [0.0, 0.0]))
    shift = low_temperature_shift(softmax(), padded, [1.0, 4.0], [50.0])
    whole = low_temperature_shift(softmax(), CLOUD, [1.0, 4.0], [50.0])
    np.testing.assert_allclose(shift[:, :, :9], whole, rtol=1e-13)
    assert (shift[:, :, 9:] == 0).all()


def test_in_a_collapsed_cloud_every_token_has_changed_its_leader():
    run = low_temperature_comparison(softmax(), CLOUD, [1.0, 2.0, 40.0], [0.1])
    assert np.ptp(run.points[0, 2], axis=0).max() < 1e-8
    assert run.changed[0, 2] == 9


@pytest.mark.slow
def test_the_last_phase_has_the_rates_of_the_spectrum_of_the_value():
    value = np.diag([1.0, 0.3])
    depths = [8.0, 30.0, 40.0]
    run = low_temperature_comparison(softmax(value), CLOUD, depths, [0.5], **SHARP)
    assert run.ends is None
    with pytest.raises(Unsupported, match="limits at infinite depth are not known"):
        assert run.end_coupled
    spreads = np.ptp(run.points[0], axis=1)[:, 1]
    assert np.log(spreads[1] / spreads[2]) / 10 == pytest.approx(0.3, rel=1e-4)
    depths = [1.0, 8.0, 12.0]
    early = low_temperature_comparison(softmax(value), CLOUD, depths, [0.01], **SHARP)
    spreads = np.ptp(early.points[0], axis=1)
    found = np.log(spreads[1] / spreads[2]) / 4
    np.testing.assert_allclose(found, [1.0, 0.3], rtol=1e-2)
    late = low_temperature_comparison(softmax(value), CLOUD, [19, 24], [1.0], **SHARP)
    spreads = np.ptp(late.points[0], axis=1)
    found = np.log(spreads[0] / spreads[1]) / 5
    np.testing.assert_allclose(found, [1.0, 0.3], atol=1e-3)


def test_the_flow_has_the_velocity_of_attention_minus_the_value_of_the_token():
    value = np.array([[1.0, 0.5], [-0.2, 0.7]])
    attention = mf.Softmax(np.eye(2), np.eye(2), value, beta=3.0)
    velocity = low_temperature_flow(attention).velocity.at(jnp.array(0.0))
    shares = mf.attention_matrix(attention, CLOUD)
    gaps = CLOUD.points[None] - CLOUD.points[:, None]
    exact = jnp.einsum("ij,ijd,ed->ie", shares, gaps, jnp.asarray(value))
    np.testing.assert_allclose(velocity(CLOUD, CLOUD.points), exact, atol=1e-14)


def test_the_fit_finds_the_constants_of_its_own_form():
    betas, depths = np.array([10.0, 100.0, 1e4]), np.linspace(0, 8, 12)
    rough = np.sqrt(np.log1p(betas) / betas)[:, None]
    form = 0.3 * rough * np.exp(0.2 * depths) + 1.5 * np.exp(-0.9 * depths)
    fit = fit_low_temperature_bound(betas, depths, form)
    found = [fit.growth, fit.decay, fit.rough, fit.far, fit.excess]
    np.testing.assert_allclose(found, [0.2, 0.9, 0.3, 1.5, 1.0], rtol=1e-6)
    np.testing.assert_allclose(fit(betas, depths), form, rtol=1e-6)
    again = fit_low_temperature_bound(list(betas), list(depths), form.tolist())
    assert again == fit


def test_the_start_alone_has_distance_zero():
    run = low_temperature_comparison(softmax(), CLOUD, 0.0, 10.0)
    assert run.distances.max() < 1e-15
    assert run.changed.tolist() == [[0]]
    with pytest.raises(InvalidInput, match="index is 1; there are 1 depths"):
        run.at(1)
    np.testing.assert_array_equal(np.asarray(run.ends)[:4], SQUARE)


@pytest.mark.slow
def test_single_precision_works():
    cloud = mf.TokenCloud(jnp.asarray(CLOUD.points, jnp.float32))
    eye = jnp.eye(2, dtype=jnp.float32)
    run = low_temperature_comparison(
        mf.Softmax(eye, eye, eye, beta=jnp.float32(1)),
        cloud,
        [1.0, 2.0],
        [20.0],
        rtol=1e-5,
        atol=1e-7,
    )
    double = low_temperature_comparison(softmax(), CLOUD, [1.0, 2.0], [20.0])
    np.testing.assert_allclose(run.coupled, double.coupled, rtol=1e-2)


@pytest.mark.parametrize(
    ("depths", "betas", "message"),
    [
        ([1.0, 1.0], [10.0], "depths are .* increase"),
        ([-1.0], [10.0], "not negative"),
        ([1.0], [0.0], "betas are .* must be positive"),
        ([1.0], [np.nan], "must be positive and finite"),
    ],
)
def test_bad_numbers_are_told(depths, betas, message):
    with pytest.raises(InvalidInput, match=message):
        low_temperature_comparison(softmax(), CLOUD, depths, betas)
    with pytest.raises(InvalidInput, match=message):
        low_temperature_shift(softmax(), CLOUD, depths, betas)


def test_bad_input_is_told(untyped):
    with pytest.raises(
        InvalidInput, match="attention is a Hardmax; it must be Softmax"
    ):
        low_temperature_comparison(mf.Hardmax(*[np.eye(2)] * 3), CLOUD, [1.0], [10.0])
    with pytest.raises(InvalidInput, match="must be square"):
        low_temperature_flow(mf.Softmax(np.eye(2), np.eye(2), np.ones((1, 2))))
    with pytest.raises(InvalidInput, match="attention is Linear; it must be Softmax"):
        low_temperature_flow(mf.identity_attention("linear", 2))
    with pytest.raises(InvalidInput, match="tokens do not follow a single leader"):
        low_temperature_shift(
            softmax(), mf.TokenCloud(np.array([*SQUARE, (0.5, 0)])), [1.0], [10.0]
        )
    with pytest.raises(Unsupported, match="multiple of the identity"):
        low_temperature_shift(softmax(np.diag([1.0, 2.0])), CLOUD, [1.0], [10.0])
    with pytest.raises(InvalidInput, match="1 temperatures and 1 depths"):
        fit_low_temperature_bound(np.ones(1), np.ones(1), np.ones((1, 1)))
    with pytest.raises(InvalidInput, match="not positive and finite"):
        fit_low_temperature_bound(np.ones(2), np.arange(3.0), np.zeros((2, 3)))
    with pytest.raises(InvalidInput, match="distances has shape"):
        fit_low_temperature_bound(np.ones(2), np.arange(3.0), np.ones((3, 3)))
