"""Merging, mixing, padding, resampling and batching."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from meanformer.attention import in_order
from meanformer.errors import InvalidInput
from meanformer.measures import (
    Gaussian,
    Mixture,
    TokenCloud,
    batch,
    merge,
    mix,
    pad,
    resample,
)
from reference import POINTS, WEIGHTS, reference_cloud

GAUSSIAN = Gaussian([0.3, -0.2], [[1.0, 0.2], [0.2, 0.5]])


def test_equal_tokens_merge_and_their_weights_add():
    cloud = TokenCloud(POINTS[[0, 1, 0, 2, 1]], [0.1, 0.2, 0.3, 0.25, 0.15])
    merged = merge(cloud)
    np.testing.assert_array_equal(merged.points, POINTS[:3])
    np.testing.assert_allclose(merged.weights, [0.4, 0.35, 0.25], atol=1e-15)


def test_merging_keeps_the_coordinates_of_equal_tokens_exactly():
    point = np.array([[0.1, 1 / 3]]) * 1e7
    merged = merge(TokenCloud(np.repeat(point, 7, axis=0)))
    np.testing.assert_array_equal(merged.points, point)


def test_merging_drops_absent_tokens():
    merged = merge(TokenCloud(POINTS, [0.5, 0.0, 0.5, 0.0]))
    np.testing.assert_array_equal(merged.points, POINTS[[0, 2]])


def test_signed_zeros_are_one_point():
    assert merge(TokenCloud([[0.0, 1.0], [-0.0, 1.0]])).count == 1


def test_near_tokens_merge_at_their_weighted_mean():
    cloud = TokenCloud([[0.0], [5.0], [0.1], [0.2]], [0.1, 0.3, 0.2, 0.4])
    merged = merge(cloud, 0.11)
    np.testing.assert_allclose(merged.weights, [0.7, 0.3], atol=1e-15)
    np.testing.assert_allclose(merged.points, [[0.1 / 0.7], [5.0]], atol=1e-15)
    np.testing.assert_allclose(merged.mean(), cloud.mean(), atol=1e-15)


@pytest.mark.parametrize("tolerance", [0.0, 0.5])
def test_tokens_at_different_places_never_merge(tolerance):
    cloud = TokenCloud([[0.0], [0.0], [0.0]], positions=[0.1, 0.2, 0.1])
    merged = merge(cloud, tolerance)
    np.testing.assert_array_equal(merged.positions, [0.1, 0.2])
    np.testing.assert_allclose(merged.weights, [2 / 3, 1 / 3])


def test_a_token_elsewhere_in_the_sequence_is_no_link_of_a_chain():
    cloud = TokenCloud([[0.0], [1.0], [2.0]], positions=[0.1, 0.9, 0.1])
    assert merge(cloud, 1.2).count == 3


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True)
@given(arrays(np.int64, (6, 2), elements=st.integers(-2, 2)))
def test_merging_does_not_change_the_measure(grid):
    cloud = TokenCloud(grid, [0.1, 0.2, 0.05, 0.25, 0.3, 0.1])
    merged = merge(cloud)
    expected = np.unique(grid, axis=0)
    assert merged.count == len(expected)
    for point, weight in zip(merged.points, merged.weights, strict=True):
        mass = cloud.weights[(grid == np.asarray(point)).all(axis=1)].sum()
        np.testing.assert_allclose(weight, mass, atol=1e-15)


def test_merging_refuses_a_negative_tolerance():
    with pytest.raises(
        InvalidInput, match=r"tolerance is -1\.0; it must be a number, zero or more"
    ):
        merge(reference_cloud(), -1.0)


def test_mixing_clouds_concatenates_them():
    mixed = mix([reference_cloud(), TokenCloud([[7.0, 8.0]])], [0.25, 0.75])
    np.testing.assert_array_equal(mixed.points, [*POINTS, [7.0, 8.0]])
    np.testing.assert_allclose(mixed.weights, [*(0.25 * WEIGHTS), 0.75])


def test_mixing_keeps_places():
    first, second = (
        TokenCloud([[0.0]], positions=[0.1]),
        TokenCloud([[1.0]], positions=[0.2]),
    )
    np.testing.assert_array_equal(mix([first, second]).positions, [0.1, 0.2])


def test_mixing_other_measures_makes_a_mixture():
    mixed = mix([reference_cloud(), Gaussian([0.0, 0.0], np.eye(2))])
    assert isinstance(mixed, Mixture)
    np.testing.assert_array_equal(mixed.weights, 0.5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: mix([]), "measures is empty"),
        (
            lambda: mix([TokenCloud([[0.0]]), TokenCloud([[0.0]], positions=[0.5])]),
            "some clouds have positions and some have none",
        ),
        (lambda: batch([]), "clouds is empty"),
        (
            lambda: batch([TokenCloud([[0.0]]), TokenCloud([[0.0]], positions=[0.5])]),
            "some clouds have positions and some have none",
        ),
        (
            lambda: batch([TokenCloud([[0.0]]), reference_cloud()]),
            r"clouds have dimensions \[1, 2\]; they must agree",
        ),
        (
            lambda: pad(reference_cloud(), 3),
            "count is 3; the cloud already has 4 tokens",
        ),
        (lambda: pad(reference_cloud(), 5.5), "count is 5.5; it must be an integer"),
        (lambda: pad(GAUSSIAN, 5), "cloud is a Gaussian; it must be a TokenCloud"),
        (lambda: merge(GAUSSIAN), "cloud is a Gaussian; it must be a TokenCloud"),
        (lambda: merge(np.eye(2)), "cloud is an array; it must be a TokenCloud"),
        (lambda: batch([GAUSSIAN]), "clouds is a Gaussian; it must be a TokenCloud"),
        (lambda: in_order(GAUSSIAN), "cloud is a Gaussian; it must be a TokenCloud"),
        (
            lambda: merge(reference_cloud(), "x"),
            "tolerance is 'x'; it must be a number, zero or more",
        ),
        (
            lambda: jax.jit(lambda x: merge(TokenCloud(x)).points)(POINTS),
            "merge cannot run under jit or grad, where values are not known",
        ),
        (lambda: mix(3), "measures is 3; it must be a list of measures"),
        (lambda: mix([1, 2]), "measures holds a int; it must hold measures"),
        (
            lambda: mix([TokenCloud([[0.0]]), reference_cloud()]),
            r"measures have dimensions \[1, 2\]; they must agree",
        ),
        (
            lambda: resample(3, 4, key=jr.key(0)),
            "measure is 3; it must be a measure",
        ),
        (
            lambda: resample(GAUSSIAN, 0, key=jr.key(0)),
            "count is 0; it must be 1 or more",
        ),
        (
            lambda: resample(GAUSSIAN, 4, key=jr.key(0), method="sorted"),
            'method is \'sorted\'; it must be "independent" or "systematic"',
        ),
        (
            lambda: resample(GAUSSIAN, 4, key=jr.key(0), method="systematic"),
            "measure is a Gaussian; systematic resampling is for clouds",
        ),
    ],
)
def test_operations_refuse(untyped, build, message):
    with pytest.raises(InvalidInput, match=message):
        build()


def test_padding_adds_tokens_of_weight_zero():
    padded = pad(reference_cloud(positions=[0.1, 0.2, 0.3, 0.4]), 6)
    assert padded.count == 6
    np.testing.assert_array_equal(padded.weights, [*WEIGHTS, 0.0, 0.0])
    np.testing.assert_array_equal(padded.points[:4], POINTS)
    np.testing.assert_array_equal(padded.positions[4:], 0.1)
    np.testing.assert_allclose(padded.mean(), reference_cloud().mean(), atol=1e-15)
    np.testing.assert_allclose(
        padded.covariance(), reference_cloud().covariance(), atol=1e-15
    )


def test_padding_to_the_same_count_changes_nothing():
    np.testing.assert_array_equal(pad(reference_cloud(), 4).points, POINTS)


def test_a_batch_has_one_padded_cloud_per_row():
    clouds = batch([reference_cloud(), TokenCloud([[7.0, 8.0]])])
    assert clouds.points.shape == (2, 4, 2)
    means = jax.vmap(lambda cloud: cloud.mean())(clouds)
    np.testing.assert_allclose(means, [[0.25, 0.3], [7.0, 8.0]], atol=1e-15)
    radii = jax.vmap(lambda cloud: cloud.radius())(clouds)
    assert jnp.isfinite(radii).all()


def test_a_large_group_in_single_precision_keeps_its_mass():
    cloud = merge(TokenCloud(np.zeros((200_000, 2), np.float32)))
    assert cloud.weights.dtype == cloud.points.dtype == jnp.float32
    np.testing.assert_array_equal(cloud.weights, [1.0])


def test_the_place_of_a_large_group_in_single_precision_is_its_mean():
    points = np.linspace(0, 1, 100_001, dtype=np.float32)[:, None]
    cloud = merge(TokenCloud(points), 1e-4)
    np.testing.assert_allclose(cloud.points, [[0.5]], atol=1e-7)


def test_a_systematic_sample_has_each_token_as_often_as_its_weight_asks():
    weights = np.array([0.0, 0.55, 0.25, 0.13, 0.07, 0.0])
    cloud = TokenCloud(np.arange(6.0)[:, None], weights, positions=np.arange(6) / 6)
    for seed in range(20):
        drawn = resample(cloud, 10, key=jr.key(seed), method="systematic")
        counts = np.bincount(np.asarray(drawn.points[:, 0], int), minlength=6)
        assert (np.abs(counts - 10 * weights) < 1).all()
        np.testing.assert_allclose(drawn.positions, drawn.points[:, 0] / 6)
        np.testing.assert_allclose(drawn.weights, 0.1)


@pytest.mark.parametrize("method", ["independent", "systematic"])
def test_a_large_sample_has_the_moments_of_the_cloud(key, method):
    cloud = reference_cloud()
    drawn = resample(cloud, 40_000, key=key, method=method)
    np.testing.assert_allclose(drawn.mean(), cloud.mean(), atol=0.02)
    np.testing.assert_allclose(drawn.covariance(), cloud.covariance(), atol=0.02)


def test_absent_tokens_are_never_drawn(key):
    cloud = TokenCloud([[0.0], [1.0], [2.0]], [0.0, 1.0, 0.0])
    for method in ("independent", "systematic"):
        drawn = resample(cloud, 1000, key=key, method=method)
        assert (drawn.points == 1).all()


def test_every_measure_can_be_resampled(key):
    drawn = resample(GAUSSIAN, np.int64(7), key=key)
    assert drawn.points.shape == (7, 2)
    np.testing.assert_array_equal(drawn.points, GAUSSIAN.sample(7, key=key))
