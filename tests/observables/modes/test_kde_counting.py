"""Tests of the exact counter of modes on the line and on the circle."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanformer as mf
from meanformer.errors import InvalidInput
from meanformer.observables import convex_angle, count_modes

CIRCLE = mf.Sphere()


def line(*places, weights=None):
    return mf.TokenCloud(np.array(places, float)[:, None], weights, normalize=True)


def circle(angles, weights=None):
    angles = np.asarray(angles, float)
    points = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return mf.TokenCloud(points, weights, normalize=True)


def grid_count(places, beta, is_circle, weights=1.0):
    """Signs of the derivative on a fine grid, all pairs, without any window."""
    step = 0.004 / np.sqrt(beta)
    low, high = places.min() - 0.1, places.max() + 0.1
    grid = np.arange(0.1234, 0.1234 + 2 * np.pi, step)
    grid = grid if is_circle else np.arange(low, high, step)
    gaps = places[None, :] - grid[:, None]
    logs = beta * np.cos(gaps) if is_circle else -0.5 * beta * gaps**2
    logs = logs + np.log(weights)
    slopes = np.sin(gaps) if is_circle else gaps
    masses = np.exp(logs - logs.max(axis=1, keepdims=True))
    signs = np.sign((masses * slopes).sum(axis=1))
    after = np.roll(signs, -1)
    return int(((signs > 0) & (after < 0)).sum())


@pytest.mark.parametrize(("gap", "expected"), [(1.99, 1), (2.01, 2)])
@pytest.mark.parametrize("beta", [1.0, 7.3, 1e6])
def test_two_tokens_are_two_modes_beyond_two_bandwidths(gap, expected, beta):
    found = count_modes(line(0.3, 0.3 + gap / np.sqrt(beta)), beta)
    assert found.count == expected == len(found.positions)
    assert len(found.valleys) == expected - 1
    assert found.is_certified
    np.testing.assert_allclose(
        found.positions.mean(), 0.3 + gap / 2 / np.sqrt(beta), rtol=1e-9
    )


def test_two_tokens_exactly_two_bandwidths_apart_are_one_flat_mode():
    found = count_modes(line(0.0, 2.0), 1.0)
    assert found.count == 1
    assert not found.is_certified
    assert found.undecided.shape == (1, 2)
    assert found.undecided[0, 0] < 1 < found.undecided[0, 1]
    np.testing.assert_allclose(found.positions, [1.0], atol=1e-4)
    assert float(jnp.diff(found.undecided[0])[0]) < 1e-3


def test_the_angle_of_two_tokens_on_the_circle_is_that_of_the_table():
    np.testing.assert_allclose(convex_angle(5.0), 0.4394458419, rtol=0, atol=1e-10)


@pytest.mark.parametrize("beta", [0.3, 5.0, 400.0, 1e8])
def test_two_tokens_on_the_circle_are_two_modes_beyond_the_angle(beta):
    angle = convex_angle(beta)
    np.testing.assert_allclose(beta * np.sin(angle) ** 2, np.cos(angle), rtol=1e-12)
    for factor, expected in ((0.999, 1), (1.001, 2)):
        half = factor * angle
        found = count_modes(circle([1 - half, 1 + half]), beta, space=CIRCLE)
        assert (found.count, found.is_certified) == (expected, True)
        assert len(found.valleys) == expected


def test_two_tokens_on_the_circle_at_the_angle_are_one_flat_mode():
    angle = convex_angle(5.0)
    found = count_modes(circle([-angle, angle]), 5.0, space=CIRCLE)
    assert (found.count, found.is_certified) == (1, False)


@pytest.mark.parametrize("beta", [1.0, 30.0, 900.0])
@pytest.mark.parametrize("is_circle", [False, True])
def test_counts_are_those_of_a_fine_grid_with_all_pairs(beta, is_circle):
    generator = np.random.default_rng(int(beta))
    for _ in range(5):
        places = generator.normal(size=40)
        cloud = circle(places) if is_circle else line(*places)
        found = count_modes(cloud, beta, space=CIRCLE if is_circle else None)
        assert found.is_certified
        assert found.count == grid_count(places, beta, is_circle)


@pytest.mark.parametrize("is_circle", [False, True])
def test_counts_are_certified_whatever_the_weights(is_circle):
    # Heavy tokens far away outweigh light ones close by.
    generator = np.random.default_rng(9)
    for beta in (5.0, 80.0, 800.0):
        places = generator.normal(size=30)
        weights = 10 ** generator.uniform(-280, 0, 30)
        cloud = circle(places, weights) if is_circle else line(*places, weights=weights)
        found = count_modes(cloud, beta, space=CIRCLE if is_circle else None)
        assert found.is_certified
        assert found.count == grid_count(places, beta, is_circle, weights)
        assert len(found.valleys) == found.count - (not is_circle)


def test_a_light_token_is_a_mode_where_it_outweighs_the_tail_of_a_heavy_one():
    cloud = line(0.0, 10.0, 40.0, weights=[1.0, 1e-300, 1e-300])
    found = count_modes(cloud, 1.0)
    assert (found.count, found.is_certified) == (2, True)
    np.testing.assert_allclose(found.positions, [0, 40], atol=1e-12)
    # There the slopes of the two bumps that are modes cancel.
    tilt = np.log(1e-300) + 40 * found.valleys - 800
    np.testing.assert_allclose(tilt, np.log(found.valleys / (40 - found.valleys)))


@pytest.mark.parametrize("beta", [1e-20, 1e-300])
def test_tokens_within_a_tiny_part_of_the_bandwidth_have_their_mean_as_mode(beta):
    found = count_modes(line(0.0, 1.0, 3.0), beta)
    assert (found.count, found.is_certified) == (1, True)
    np.testing.assert_allclose(found.positions, [4 / 3], rtol=1e-12)
    angles = np.array([0.0, 1.0, 3.0])
    around = count_modes(circle(angles), beta, space=CIRCLE)
    assert (around.count, around.is_certified) == (1, True)
    mean = np.arctan2(np.sin(angles).sum(), np.cos(angles).sum())
    np.testing.assert_allclose(around.positions, [mean], rtol=1e-12)


def test_modes_and_valleys_are_zeros_of_the_derivative_and_take_turns():
    generator = np.random.default_rng(4)
    places, weights = generator.normal(size=50), generator.uniform(0.1, 1, 50)
    found = count_modes(line(*places, weights=weights), 60.0)
    zeros = np.sort(np.concatenate([found.positions, found.valleys]))
    np.testing.assert_array_equal(zeros[::2], found.positions)
    gaps = places[None, :] - zeros[:, None]
    masses = weights * np.exp(-30 * gaps**2)
    slopes = (masses * gaps).sum(1) / masses.sum(1)
    np.testing.assert_allclose(slopes, 0, atol=1e-13)
    bends = (masses * (60 * gaps**2 - 1)).sum(1)
    assert (np.sign(bends) == np.where(np.arange(len(zeros)) % 2, 1, -1)).all()


def test_order_splitting_and_absent_tokens_change_nothing():
    places = np.random.default_rng(1).normal(size=30)
    whole = count_modes(line(*places), 50.0)
    backwards = count_modes(line(*places[::-1]), 50.0)
    weights = np.append(np.ones(30), [0.4, 0.0])
    weights[0] = 0.6
    split = count_modes(line(*places, places[0], 0.123, weights=weights), 50.0)
    for other in (backwards, split):
        assert other.count == whole.count
        np.testing.assert_allclose(other.positions, whole.positions, atol=1e-12)
        np.testing.assert_allclose(other.valleys, whole.valleys, atol=1e-12)


@pytest.mark.slow
def test_a_rotation_turns_the_modes():
    angles = np.random.default_rng(2).uniform(0, 2 * np.pi, 40)
    one = count_modes(circle(angles), 40.0, space=CIRCLE)
    other = count_modes(circle(angles + 2.0), 40.0, space=CIRCLE)
    assert one.count == other.count == len(one.valleys)
    turned = np.sort((np.asarray(one.positions) + 2) % (2 * np.pi))
    np.testing.assert_allclose(other.positions, turned, atol=1e-12)


def test_the_count_on_the_line_never_falls_with_beta_nor_exceeds_the_tokens():
    places = np.random.default_rng(3).normal(size=25)
    cloud = line(*places)
    counts = [count_modes(cloud, beta).count for beta in np.geomspace(1, 1e9, 40)]
    assert all(first <= second for first, second in itertools.pairwise(counts))
    assert counts[0] == 1
    assert counts[-1] == 25


def test_empty_space_costs_nothing_and_the_valley_lies_where_two_bumps_cross():
    found = count_modes(line(0.0, 1e9, weights=[0.75, 0.25]), 1.0)
    assert (found.count, found.is_certified) == (2, True)
    np.testing.assert_allclose(found.positions, [0, 1e9], atol=1e-6)
    # The larger exponent wins: the valley is the middle, up to log(3)/gap.
    np.testing.assert_allclose(found.valleys, [5e8], rtol=1e-12)


def test_light_tokens_are_modes_as_far_as_they_stand_out_of_heavy_ones():
    for gap, expected in ((5.0, 1), (8.0, 2)):
        cloud = line(0.0, gap, weights=[1.0, 1e-9])
        found = count_modes(cloud, 1.0)
        assert (found.count, found.is_certified) == (expected, True)


def test_one_token_and_equal_tokens_are_one_mode():
    for cloud in (line(3.0), line(3.0, 3.0, 3.0)):
        found = count_modes(cloud, 2.0)
        assert found.count == 1
        np.testing.assert_allclose(found.positions, [3.0], atol=1e-12)
        assert found.valleys.shape == (0,)
    found = count_modes(circle([1.0]), 2.0, space=CIRCLE)
    assert (found.count, found.is_certified) == (1, True)
    np.testing.assert_allclose(found.valleys, [1 + np.pi], atol=1e-12)


def test_a_density_that_is_flat_up_to_rounding_is_not_certified():
    angles = 2 * np.pi * np.arange(100) / 100
    found = count_modes(circle(angles), 5.0, space=CIRCLE)
    assert found.count == 1
    assert not found.is_certified
    assert found.undecided.shape == (1, 2)
    assert 0 <= found.undecided[0, 0] < 2 * np.pi
    np.testing.assert_allclose(np.diff(found.undecided[0]), 2 * np.pi)
    regular = count_modes(circle(angles[::10]), 60.0, space=CIRCLE)
    assert (regular.count, regular.is_certified) == (10, True)


def test_single_precision_tokens_keep_their_type():
    cloud = mf.TokenCloud(jnp.array([[0.0], [3.0]], jnp.float32))
    found = count_modes(cloud, 1.0)
    assert found.count == 2
    assert found.positions.dtype == jnp.float32


def test_wrong_input_is_refused_with_the_reason():
    cloud = line(0.0, 1.0)
    with pytest.raises(InvalidInput, match="beta is 0.0; it must be positive"):
        count_modes(cloud, 0.0)
    with pytest.raises(InvalidInput, match="cloud has dimension 1; modes are counted"):
        count_modes(cloud, 1.0, space=CIRCLE)
    with pytest.raises(InvalidInput, match="every token must have norm 1"):
        count_modes(mf.TokenCloud(jnp.ones((2, 2))), 1.0, space=CIRCLE)
    with pytest.raises(InvalidInput, match="double precision does not resolve it"):
        count_modes(cloud, 1e40)
    with pytest.raises(InvalidInput, match="take a smaller beta or tokens closer to"):
        count_modes(line(0.0, 1e300), 1.0)
    with pytest.raises(InvalidInput, match="beta is -1.0; it must be positive"):
        convex_angle(-1.0)
    with pytest.raises(InvalidInput, match="cannot run under jit or grad"):
        jax.jit(lambda x: count_modes(mf.TokenCloud(x), 1.0).count)(jnp.ones((2, 1)))
