"""Merging, mixing, padding and batching."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from meanformer.errors import InvalidInput
from meanformer.measures import Gaussian, Mixture, TokenCloud, batch, merge, mix, pad
from reference import POINTS, WEIGHTS, reference_cloud


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
    with pytest.raises(InvalidInput, match=r"tolerance is -1\.0; it must not be neg"):
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
    ],
)
def test_operations_refuse(build, message):
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
