"""Token clouds: moments, log-Laplace transform, tilts, sampling, bad input."""

import warnings

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy.spatial.distance import pdist
from scipy.special import logsumexp

from meanformer.errors import InvalidInput, PrecisionWarning
from meanformer.measures import (
    Gaussian,
    Mixture,
    TokenCloud,
    UniformBox,
    UniformSphere,
    tilt,
)
from meanformer.numerics.pair_sums.sums import Blocked
from reference import POINTS, RADIUS, WEIGHTS, reference_cloud

TILTS = np.array([[0.3, -0.7], [2.0, 1.0], [0.0, 0.0], [-5.0, 4.0]])


def test_moments_are_weighted_sums():
    cloud = reference_cloud()
    np.testing.assert_allclose(cloud.mean(), WEIGHTS @ POINTS, atol=1e-15)
    np.testing.assert_allclose(
        cloud.covariance(), np.cov(POINTS.T, aweights=WEIGHTS, ddof=0), atol=1e-15
    )
    np.testing.assert_allclose(
        cloud.second_moment(), POINTS.T @ (WEIGHTS[:, None] * POINTS), atol=1e-15
    )
    np.testing.assert_allclose(cloud.radius(), RADIUS, atol=1e-15)
    assert (cloud.dimension, cloud.count) == (2, 4)


def test_equal_weights_are_the_default():
    np.testing.assert_array_equal(TokenCloud(POINTS).weights, 0.25)
    assert TokenCloud(jnp.ones((3, 1), jnp.float32)).weights.dtype == jnp.float32


def test_tokens_from_angles_lie_on_the_unit_circle_where_they_are_told():
    angles, weights = [0.0, np.pi / 2, -2.0], [0.5, 0.25, 0.25]
    cloud = TokenCloud.from_angles(angles, weights, positions=[0.1, 0.2, 0.3])
    expected = [[1, 0], [0, 1], [np.cos(2.0), -np.sin(2.0)]]
    np.testing.assert_allclose(cloud.points, expected, atol=1e-15)
    np.testing.assert_array_equal(cloud.weights, weights)
    np.testing.assert_array_equal(cloud.positions, [0.1, 0.2, 0.3])
    assert TokenCloud.from_angles(np.float32([0.5])).points.dtype == np.float32
    with pytest.raises(InvalidInput, match=r"angles has shape \(1, 2\); it must be"):
        TokenCloud.from_angles([[0.0, 1.0]])


def test_the_log_laplace_transform_is_a_log_sum_of_exponentials():
    cloud = reference_cloud()
    expected = logsumexp(TILTS @ POINTS.T, b=WEIGHTS, axis=1)
    np.testing.assert_allclose(
        cloud.log_laplace(jnp.asarray(TILTS)), expected, atol=1e-14
    )


def test_the_tilted_mean_is_the_gradient_of_the_log_laplace_transform():
    cloud, tilts = reference_cloud(), jnp.asarray(TILTS)
    gradients = jax.grad(lambda u: cloud.log_laplace(u).sum())(tilts)
    np.testing.assert_allclose(cloud.tilted_mean(tilts), gradients, atol=1e-14)
    log_mass, mean = cloud.tilted_mass_and_mean(tilts)
    np.testing.assert_array_equal(log_mass, cloud.log_laplace(tilts))
    np.testing.assert_array_equal(mean, cloud.tilted_mean(tilts))


def test_the_hessian_of_the_log_laplace_transform_is_the_tilted_covariance():
    cloud, at = reference_cloud(), jnp.asarray(TILTS[0])
    hessian = jax.hessian(lambda u: cloud.log_laplace(u[None])[0])(at)
    masses = WEIGHTS * np.exp(POINTS @ TILTS[0])
    expected = np.cov(POINTS.T, aweights=masses / masses.sum(), ddof=0)
    np.testing.assert_allclose(hessian, expected, atol=1e-13)


def test_huge_tilts_do_not_overflow():
    cloud = reference_cloud()
    log_mass, mean = cloud.tilted_mass_and_mean(
        jnp.array([[1e300, 0.0], [0.0, -1e300]])
    )
    np.testing.assert_allclose(log_mass, [1e300, 1e300])
    np.testing.assert_allclose(mean, [[1.0, 0.0], [0.5, -1.0]])


def test_block_size_does_not_matter():
    rough = TokenCloud(POINTS, WEIGHTS, sums=Blocked(block_size=2))
    tilts = jnp.asarray(TILTS)
    np.testing.assert_allclose(
        rough.tilted_mean(tilts), reference_cloud().tilted_mean(tilts), atol=1e-15
    )


def test_a_quadratic_tilt_reweights_by_a_gaussian_factor():
    precision = np.array([[0.8, 0.2], [0.2, 1.5]])
    factors = np.exp(-0.5 * np.sum(POINTS @ precision * POINTS, axis=1))
    log_mass, tilted = reference_cloud().quadratic_tilt(jnp.asarray(precision))
    total = WEIGHTS @ factors
    np.testing.assert_allclose(log_mass, np.log(total), atol=1e-15)
    np.testing.assert_allclose(tilted.weights, WEIGHTS * factors / total, atol=1e-15)
    np.testing.assert_allclose(tilted.mean(), tilted.weights @ POINTS, atol=1e-15)


def test_a_tilted_cloud_keeps_tokens_that_underflow():
    factors = jnp.array([0.0, -2000.0, 0.0, 0.0])
    _, tilted = tilt(reference_cloud(), factors)
    assert tilted.weights[1] == 0
    # Far out in its direction the second token still dominates.
    mean = tilted.tilted_mean(jnp.array([[0.0, 1e5]]))
    np.testing.assert_allclose(mean[0], POINTS[1], atol=1e-12)


def test_moments_far_from_the_origin_keep_their_digits():
    far = TokenCloud(POINTS + 1e8, WEIGHTS)
    exact = TokenCloud((POINTS + 1e8) - 1e8, WEIGHTS)
    np.testing.assert_allclose(far.covariance(), exact.covariance(), atol=1e-7)


def test_the_centred_cloud_has_mean_zero():
    cloud = TokenCloud(POINTS + 1e6, WEIGHTS)
    origin, near = cloud.centred()
    np.testing.assert_allclose(near.mean(), 0, atol=1e-9)
    np.testing.assert_allclose(near.points + origin[None], cloud.points, rtol=1e-15)


@pytest.mark.parametrize("points", [np.zeros((2, 2)), [[0.0, 0.0], [3.0, 4.0]]])
def test_the_radius_has_a_finite_derivative(points):
    gradient = jax.grad(lambda x: TokenCloud(x).radius())(jnp.asarray(points))
    assert np.isfinite(gradient).all()


def test_the_radius_ignores_absent_tokens():
    cloud = TokenCloud([[3.0, 4.0], [1e9, 0.0]], [1.0, 0.0])
    assert cloud.radius() == 5.0


def test_samples_have_the_weights_as_frequencies(key):
    samples = reference_cloud().sample(20_000, key=key)
    found, counts = np.unique(samples, axis=0, return_counts=True)
    order = np.lexsort(POINTS.T[::-1])
    np.testing.assert_array_equal(found, POINTS[order])
    np.testing.assert_allclose(counts / 20_000, WEIGHTS[order], atol=0.015)


def test_samples_never_contain_absent_tokens():
    cloud = TokenCloud(POINTS, [0.5, 0.0, 0.5, 0.0])
    samples = np.unique(cloud.sample(500, key=jr.key(0)), axis=0)
    np.testing.assert_array_equal(samples, POINTS[[2, 0]])


def test_the_linear_mean_needs_no_pairs():
    cloud, tilts = reference_cloud(), jnp.asarray(TILTS)
    mass, moment = cloud.linear_mean(tilts)
    scores = TILTS @ POINTS.T * WEIGHTS
    np.testing.assert_allclose(mass, scores.sum(axis=1), atol=1e-14)
    np.testing.assert_allclose(moment, scores @ POINTS, atol=1e-14)


def test_moved_clouds_keep_weights_and_places():
    cloud = reference_cloud(positions=[0.1, 0.2, 0.3, 0.4])
    moved = cloud.moved(cloud.points[:, :1])
    assert moved.dimension == 1
    np.testing.assert_array_equal(moved.weights, cloud.weights)
    np.testing.assert_array_equal(moved.positions, cloud.positions)


def test_clouds_pass_through_jit_and_vmap():
    clouds = jax.vmap(lambda shift: reference_cloud().moved(POINTS + shift))(
        jnp.arange(3.0)
    )
    means = jax.jit(jax.vmap(lambda cloud: cloud.mean()))(clouds)
    expected = (WEIGHTS @ POINTS)[None] + np.arange(3.0)[:, None]
    np.testing.assert_allclose(means, expected, atol=1e-15)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_weights_rounded_to_a_short_type_are_accepted(dtype):
    weights = jnp.full(3, 1 / 3, dtype)
    cloud = TokenCloud(jnp.zeros((3, 1), dtype), weights)
    assert cloud.weights.dtype == dtype


def test_normalised_weights_do_not_overflow_in_a_shorter_type():
    points = jnp.zeros((2, 1), jnp.float32)
    cloud = TokenCloud(points, np.array([1e60, 3e60]), normalize=True)
    np.testing.assert_allclose(cloud.weights, [0.25, 0.75])


def test_places_keep_their_own_precision():
    places = np.arange(1000) / 1000
    cloud = TokenCloud(jnp.zeros((1000, 1), jnp.bfloat16), positions=places)
    np.testing.assert_array_equal(cloud.positions, places)


TWO = [[1.0, 2.0], [3.0, 4.0]]
BAD = {
    "one axis": (
        lambda: TokenCloud(np.ones(3)),
        r"points has shape \(3,\); it must be \(n, d\), one row for each of at least",
    ),
    "no token": (lambda: TokenCloud(np.ones((0, 3))), r"points has shape \(0, 3\)"),
    "no dimension": (lambda: TokenCloud(np.ones((3, 0))), r"points has shape \(3, 0\)"),
    "holes": (
        lambda: TokenCloud([[np.nan, 1.0]]),
        r"points holds nan at index \(0, 0\); all its entries must be finite",
    ),
    "infinite": (
        lambda: TokenCloud([[1.0], [np.inf]]),
        r"points holds inf at index \(1,",
    ),
    "ragged": (
        lambda: TokenCloud([[1.0], [1.0, 2.0]]),
        "points is not an array .*it must hold numbers only, with rows of one length",
    ),
    "words": (lambda: TokenCloud("abc"), "points is 'abc'; it must be an array of"),
    "complex": (lambda: TokenCloud([[1j]]), r"points is complex \(complex128\)"),
    "negative weight": (
        lambda: TokenCloud(TWO, [1.5, -0.5]),
        r"weights holds -0\.5 at index 1; none may be negative",
    ),
    "weights of total two": (
        lambda: TokenCloud(TWO, [1.0, 1.0]),
        r"weights sum to 2\.0; they must sum to 1 within 1e-06, or pass normalize=True",
    ),
    "weights all zero": (
        lambda: TokenCloud(TWO, [0.0, 0.0]),
        "weights are all zero; at least one must be positive",
    ),
    "normalised weights all zero": (
        lambda: TokenCloud(TWO, [0, 0], normalize=True),
        "weights are all zero",
    ),
    "too few weights": (
        lambda: TokenCloud(TWO, [1.0]),
        r"weights has shape \(1,\); it must be \(2,\)",
    ),
    "weights with holes": (
        lambda: TokenCloud(TWO, [np.nan, 1.0]),
        r"weights holds nan at index \(0,\)",
    ),
    "places outside": (
        lambda: TokenCloud(TWO, positions=[0.0, 2.0]),
        r"positions range over \[0\.0, 2\.0\]; they must lie in \[0, 1\]",
    ),
    "places with holes": (
        lambda: TokenCloud(TWO, positions=[0.0, np.nan]),
        r"positions holds nan at index \(1,\)",
    ),
    "too few places": (
        lambda: TokenCloud(TWO, positions=[0.0]),
        r"positions has shape \(1,\); it must be \(2,\)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_cloud_refuses(case):
    build, message = BAD[case]
    with pytest.raises(InvalidInput, match=message) as raised:
        build()
    assert ". " not in str(raised.value)


def test_weights_within_the_tolerance_are_accepted():
    assert TokenCloud(TWO, [0.5, 0.5 + 9e-7]).count == 2


def test_weights_are_normalised_on_request():
    weights = TokenCloud(TWO, [1, 3], normalize=True).weights
    np.testing.assert_allclose(weights, [0.25, 0.75])


def test_integers_are_promoted_to_floating_point():
    cloud = TokenCloud([[1, 2], [3, 4]], positions=[0, 1])
    assert cloud.points.dtype == cloud.positions.dtype == jnp.float64


def test_double_precision_input_in_single_precision_mode_warns_how_to_keep_it():
    with jax.enable_x64(False):
        with pytest.warns(
            PrecisionWarning, match=r"points is float64 .*jax_enable_x64"
        ):
            cloud = TokenCloud(POINTS)
        assert cloud.points.dtype == jnp.float32
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert TokenCloud(POINTS.astype(np.float32)).count == 4
            assert TokenCloud([[1.0, 2.0]]).count == 1
        with pytest.warns(PrecisionWarning, match="points is float64"):
            assert TokenCloud(list(POINTS)).points.dtype == jnp.float32


@pytest.mark.parametrize("count", [1, 2, 300])
def test_the_diameter_is_the_largest_distance_of_all_pairs(key, count):
    points = 100 + jr.normal(key, (count, 3))
    expected = pdist(points).max(initial=0.0)
    np.testing.assert_allclose(TokenCloud(points).diameter(), expected, rtol=1e-15)


def test_absent_tokens_do_not_widen_the_diameter():
    points = jnp.concatenate([jnp.asarray(POINTS), jnp.full((1, 2), 1e6)])
    weights = jnp.asarray([*WEIGHTS, 0.0])
    diameter, slope = jax.value_and_grad(
        lambda points: TokenCloud(points, weights).diameter()
    )(points)
    np.testing.assert_allclose(diameter, pdist(POINTS).max(), rtol=1e-15)
    assert (slope[-1] == 0).all()
    # Moving one of the farthest pair straight away from the other widens it.
    np.testing.assert_allclose(jnp.linalg.norm(slope, axis=1).max(), 1.0)


def test_a_diameter_in_blocks_is_that_of_all_pairs(key, monkeypatch):
    import meanformer.numerics.nearest as nearest

    monkeypatch.setattr(nearest, "PAIRS_AT_ONCE", 1000)
    points = jr.normal(key, (137, 2))
    diameter = TokenCloud(points).diameter()
    np.testing.assert_allclose(diameter, pdist(points).max(), rtol=1e-15)


def test_other_measures_know_their_diameter_or_say_why_not():
    np.testing.assert_allclose(UniformSphere(3, radius=1.5).diameter(), 3.0)
    np.testing.assert_allclose(UniformBox([0.0, 1.0], [3.0, 5.0]).diameter(), 5.0)
    gaussian = Gaussian([0.0], [[1.0]])
    with pytest.raises(InvalidInput, match="a Gaussian has no diameter"):
        gaussian.diameter()
    with pytest.raises(InvalidInput, match="Mixture has no closed form for its diam"):
        Mixture([1.0], [gaussian]).diameter()


MEASURES = {
    "cloud": reference_cloud(),
    "Gaussian": Gaussian([0.0, 0.0], np.eye(2)),
    "mixture": Mixture([1.0], [Gaussian([0.0, 0.0], np.eye(2))]),
    "sphere": UniformSphere(2),
    "box": UniformBox([0.0, 0.0], [1.0, 1.0]),
    "truncated": UniformBox([0.0, 0.0], [1.0, 1.0]).quadratic_tilt(jnp.eye(2))[1],
}


@pytest.mark.parametrize("name", MEASURES)
def test_every_measure_takes_lists_of_tilts_and_refuses_others(untyped, name):
    measure = MEASURES[name]
    for question in (measure.log_laplace, measure.tilted_mean):
        expected = question(jnp.array([[0.3, -0.2]]))
        np.testing.assert_array_equal(question([[0.3, -0.2]]), expected)
        with pytest.raises(InvalidInput, match=r"u has shape \(2,\); it must be \(any"):
            question(jnp.ones(2))
        with pytest.raises(InvalidInput, match=r"u has shape \(1, 3\); it must be"):
            question(jnp.ones((1, 3)))
        with pytest.raises(InvalidInput, match=r"u has shape \(\); it must be"):
            question(np.nan)
        with pytest.raises(InvalidInput, match="u holds nan at index"):
            question(jnp.full((1, 2), jnp.nan))


@pytest.mark.parametrize("name", MEASURES)
def test_every_measure_refuses_an_impossible_number_of_samples(untyped, key, name):
    with pytest.raises(InvalidInput, match="count is -1; it must be 0 or more"):
        MEASURES[name].sample(-1, key=key)
    with pytest.raises(InvalidInput, match="count is 2.5; it must be an integer"):
        MEASURES[name].sample(2.5, key=key)
