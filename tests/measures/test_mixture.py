"""Mixtures: moments, tilts, zero weights, sampling, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanformer.errors import InvalidInput, Unsupported
from meanformer.measures import Gaussian, Mixture, TokenCloud, mix
from reference import POINTS, WEIGHTS, reference_cloud

TILTS = jnp.array([[0.3, -0.7], [2.0, 1.0], [0.0, 0.0]])
OTHER = np.array([[3.0, 1.0], [-2.0, 0.5], [0.1, 0.1], [0.0, -4.0]])


def clouds():
    return [reference_cloud(), TokenCloud(OTHER, WEIGHTS[::-1])]


@pytest.mark.slow
def test_a_mixture_of_clouds_is_the_cloud_of_all_tokens():
    mixture, union = Mixture([0.3, 0.7], clouds()), mix(clouds(), [0.3, 0.7])
    np.testing.assert_allclose(mixture.mean(), union.mean(), atol=1e-15)
    np.testing.assert_allclose(mixture.covariance(), union.covariance(), atol=1e-14)
    np.testing.assert_allclose(
        mixture.log_laplace(TILTS), union.log_laplace(TILTS), atol=1e-14
    )
    np.testing.assert_allclose(
        mixture.tilted_mean(TILTS), union.tilted_mean(TILTS), atol=1e-14
    )
    for found, expected in zip(
        mixture.linear_mean(TILTS), union.linear_mean(TILTS), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-13)
    for found, expected in zip(
        mixture.kernel_mean(TILTS, jax.nn.sigmoid),
        union.kernel_mean(TILTS, jax.nn.sigmoid),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, atol=1e-14)


@pytest.mark.slow
def test_a_quadratic_tilt_shares_the_mass_anew():
    precision = jnp.array([[0.8, 0.2], [0.2, 1.5]])
    log_mass, tilted = Mixture([0.3, 0.7], clouds()).quadratic_tilt(precision)
    expected, union = mix(clouds(), [0.3, 0.7]).quadratic_tilt(precision)
    np.testing.assert_allclose(log_mass, expected, atol=1e-14)
    np.testing.assert_allclose(
        tilted.tilted_mean(TILTS), union.tilted_mean(TILTS), atol=1e-14
    )


def test_far_components_do_not_overflow():
    parts = [Gaussian([0.0, 0.0], np.eye(2)), Gaussian([1e4, 0.0], np.eye(2))]
    mixture = Mixture([0.5, 0.5], parts)
    log_mass, mean = mixture.tilted_mass_and_mean(jnp.array([[1.0, 0.0], [-1.0, 0.0]]))
    np.testing.assert_allclose(log_mass, [1e4 + 0.5 - np.log(2), 0.5 - np.log(2)])
    np.testing.assert_allclose(mean, [[1e4 + 1, 0.0], [-1.0, 0.0]], atol=1e-12)


def test_a_component_of_weight_zero_is_absent_in_value_and_gradient():
    def mean(location, weights):
        far = Gaussian(location, jnp.eye(2))
        mixture = Mixture(weights, [reference_cloud(), far])
        return mixture.tilted_mean(TILTS).sum()

    weights = jnp.array([1.0, 0.0])
    expected = reference_cloud().tilted_mean(TILTS).sum()
    for location in ([1e3, -1e3], [0.0, 0.0]):
        location = jnp.array(location)
        np.testing.assert_allclose(mean(location, weights), expected, atol=1e-14)
        gradients = jax.grad(mean, argnums=(0, 1))(location, weights)
        np.testing.assert_array_equal(gradients[0], 0)
        assert np.isfinite(gradients[1]).all()


@pytest.mark.slow
def test_mixtures_nest():
    inner = Mixture([0.5, 0.5], clouds())
    outer = Mixture([0.4, 0.6], [inner, Gaussian([0.0, 1.0], np.eye(2))])
    flat = Mixture([0.2, 0.2, 0.6], [*clouds(), Gaussian([0.0, 1.0], np.eye(2))])
    np.testing.assert_allclose(
        outer.tilted_mean(TILTS), flat.tilted_mean(TILTS), atol=1e-14
    )


def test_samples_come_from_the_components_in_their_shares(key):
    parts = [TokenCloud([[0.0]]), TokenCloud([[1.0]]), TokenCloud([[2.0]])]
    samples = Mixture([0.2, 0.0, 0.8], parts).sample(10_000, key=key)
    values, counts = np.unique(samples, return_counts=True)
    np.testing.assert_array_equal(values, [0.0, 2.0])
    np.testing.assert_allclose(counts / 10_000, [0.2, 0.8], atol=0.02)


def test_many_components_in_single_precision_keep_total_one():
    parts = [
        Gaussian(jnp.full(1, 0.01 * k, jnp.float32), jnp.eye(1, dtype=jnp.float32))
        for k in range(30)
    ]
    mixture = Mixture(jnp.full(30, 1 / 30, jnp.float32), parts)
    _, tilted = mixture.quadratic_tilt(jnp.full((1, 1), 0.7, jnp.float32))
    np.testing.assert_allclose(tilted.weights.sum(), 1, atol=1e-5)


BAD = {
    "no component": (
        lambda: Mixture([], []),
        "components is empty; it must hold at least one",
    ),
    "two dimensions": (
        lambda: Mixture([0.5, 0.5], [TokenCloud([[1.0]]), reference_cloud()]),
        r"components have dimensions \[1, 2\]; they must agree",
    ),
    "weights of total two": (
        lambda: Mixture([1.0, 1.0], clouds()),
        r"weights sum to 2\.0; they must sum to 1",
    ),
    "too few weights": (
        lambda: Mixture([1.0], clouds()),
        r"weights has shape \(1,\); it must be \(2,\)",
    ),
    "negative weight": (
        lambda: Mixture([1.5, -0.5], clouds()),
        r"weights holds -0\.5 at index 1",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mixture_refuses(case):
    build, message = BAD[case]
    with pytest.raises(InvalidInput, match=message):
        build()


def test_a_mixture_has_no_closed_form_for_the_largest_score():
    with pytest.raises(Unsupported, match="Mixture has no closed form for hardmax"):
        Mixture([0.5, 0.5], clouds()).maximal_mean(TILTS, 0.0)


def test_points_of_the_reference_are_those_mixed():
    union = mix(clouds())
    np.testing.assert_array_equal(union.points, np.concatenate([POINTS, OTHER]))
    np.testing.assert_allclose(union.weights[:4], WEIGHTS / 2)
