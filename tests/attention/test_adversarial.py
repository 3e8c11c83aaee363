"""Clouds on which attention is steep: by theory and by ascent."""

import jax.random as jr
import numpy as np
import pytest

from meanformer.attention import L2, Masked, Softmax
from meanformer.attention.adversarial import adversarial_cloud, maximise_lipschitz
from meanformer.attention.bounds import lipschitz_bounds
from meanformer.attention.lipschitz import local_lipschitz
from meanformer.errors import InvalidInput, Unsupported
from meanformer.measures import TokenCloud
from reference import KEY, QUERY, VALUE

ON_THE_LINE = [
    (-1.0, 1.5, 2, 1.1736182497, 0.9890),
    (-1.0, 1.5, 10, 3.9783985098, 2.7273),
    (-1.0, 1.5, 100, 16.1590197578, 4.7385),
    (1.0, 3.0, 2, 1.5289230570, None),
    (1.0, 3.0, 10, 3.5668916335, None),
    (1.0, 3.0, 100, 3.4910825908, None),
]


@pytest.mark.parametrize(("score", "radius", "count", "constant", "lower"), ON_THE_LINE)
def test_the_constants_on_the_line_are_reproduced(
    score, radius, count, constant, lower
):
    gamma = Softmax([[score]], [[1.0]], [[1.0]])
    cloud = adversarial_cloud(gamma, count, radius)
    places = np.full(count, radius if score < 0 else radius / 2)
    places[0] = -radius if score < 0 else radius
    # The direction of an eigenvector has no sign.
    np.testing.assert_allclose(np.abs(cloud.points[:, 0]), np.abs(places), rtol=1e-12)
    assert np.sign(cloud.points[0, 0] * cloud.points[1, 0]) == np.sign(score)
    measured = local_lipschitz(gamma, cloud)
    np.testing.assert_allclose(measured, constant, atol=1e-10)
    bounds = lipschitz_bounds(gamma, radius, count)
    assert bounds.lower <= measured <= bounds.upper
    if lower is not None:
        np.testing.assert_allclose(bounds.lower, lower, atol=5e-5)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("sign", [1, -1])
def test_the_lower_bound_holds_on_random_symmetric_scores(seed, sign):
    random = np.random.default_rng(seed)
    matrix = random.normal(size=(3, 3))
    score = sign * (matrix @ matrix.T) + 0.1 * (matrix + matrix.T)
    gamma = Softmax(score, np.eye(3), -2 * np.eye(3), beta=0.7)
    bounds = lipschitz_bounds(gamma, 1.2, 12)
    measured = local_lipschitz(gamma, bounds.lower_cloud, method="svd")
    assert bounds.lower <= measured <= bounds.upper
    eigenvalues = np.linalg.eigvalsh(score)
    strength = max(-eigenvalues[0], eigenvalues[-1] / 8)
    expected = 2 * np.sqrt(11) / (1 + 11 * np.exp(-2 * 0.7 * 1.2**2 * strength))
    np.testing.assert_allclose(bounds.lower, expected, rtol=1e-10)


def test_a_score_that_is_not_symmetric_needs_real_eigenvalues_only():
    shear = np.array([[-1.0, 5.0], [0.0, -0.5]])
    gamma = Softmax(shear, np.eye(2), np.eye(2))
    bounds = lipschitz_bounds(gamma, 1.0, 20)
    assert local_lipschitz(gamma, bounds.lower_cloud, method="svd") >= bounds.lower
    rotation = Softmax([[0.0, -1.0], [1.0, 0.0]], np.eye(2), np.eye(2))
    assert lipschitz_bounds(rotation, 1.0, 20).lower is None
    with pytest.raises(Unsupported, match="maximise_lipschitz"):
        adversarial_cloud(rotation, 20, 1.0)


def test_adversarial_clouds_are_for_softmax_and_two_tokens_or_more():
    with pytest.raises(Unsupported, match="L2"):
        adversarial_cloud(L2(QUERY, KEY, VALUE), 5, 1.0)
    with pytest.raises(InvalidInput, match="count is 1"):
        adversarial_cloud(Softmax([[1.0]], [[1.0]], [[1.0]]), 1, 1.0)
    with pytest.raises(InvalidInput, match="radius is 0"):
        adversarial_cloud(Softmax([[1.0]], [[1.0]], [[1.0]]), 5, 0.0)


@pytest.mark.parametrize("space", ["ball", "sphere"])
def test_ascent_climbs_and_stays_in_its_space(key, space):
    gamma = Softmax(QUERY, KEY, VALUE)
    found = maximise_lipschitz(gamma, 5, 1.3, key=key, steps=12, space=space)
    assert (np.diff(found.history) >= 0).all()
    assert found.value > found.history[0] * 1.01
    norms = np.linalg.norm(found.cloud.points, axis=1)
    assert norms.max() <= 1.3 * (1 + 1e-12)
    if space == "sphere":
        np.testing.assert_allclose(norms, 1.3, rtol=1e-12)
    measured = local_lipschitz(gamma, found.cloud, method="svd")
    np.testing.assert_allclose(found.value, measured, rtol=1e-10)
    assert found.value <= lipschitz_bounds(gamma, 1.3, 5).upper


def test_ascent_from_the_adversarial_cloud_does_not_lose_it(key):
    gamma = Softmax([[-1.0]], [[1.0]], [[1.0]])
    start = adversarial_cloud(gamma, 10, 1.5)
    found = maximise_lipschitz(gamma, 10, 1.5, key=key, steps=5, start=start)
    assert found.value >= 3.9783985098 - 1e-9


@pytest.mark.slow
def test_masked_maps_see_the_tokens_in_order(key):
    gamma = Masked(Softmax(QUERY, KEY, VALUE))
    found = maximise_lipschitz(gamma, 4, 1.0, key=key, steps=2)
    np.testing.assert_allclose(found.cloud.positions, [0.25, 0.5, 0.75, 1.0])


@pytest.mark.slow
def test_the_same_key_finds_the_same_cloud():
    gamma = Softmax(QUERY, KEY, VALUE)
    first, again, other = (
        maximise_lipschitz(gamma, 4, 1.0, key=jr.key(seed), steps=1)
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first.cloud.points, again.cloud.points)
    assert not np.array_equal(first.cloud.points, other.cloud.points)


@pytest.mark.slow
def test_single_precision_keeps_its_type(key):
    narrow = Softmax(*(np.float32([[matrix]]) for matrix in (-1.0, 1.0, 1.0)))
    bounds = lipschitz_bounds(narrow, 1.5, 10)
    assert bounds.lower_cloud.points.dtype == bounds.lower.dtype == np.float32
    np.testing.assert_allclose(bounds.lower, 2.7273, atol=5e-5)
    found = maximise_lipschitz(narrow, 10, np.float64(1.5), key=key, steps=1)
    assert found.cloud.points.dtype == found.value.dtype == np.float32


def test_wrong_options_of_the_ascent_are_named(key):
    gamma = Softmax(QUERY, KEY, VALUE)
    with pytest.raises(InvalidInput, match="space is 'torus'"):
        maximise_lipschitz(gamma, 4, 1.0, key=key, space="torus")
    with pytest.raises(InvalidInput, match="steps is 0"):
        maximise_lipschitz(gamma, 4, 1.0, key=key, steps=0)
    with pytest.raises(InvalidInput, match="count is 1"):
        maximise_lipschitz(gamma, 1, 1.0, key=key, start=TokenCloud([[1.0, 0.0]]))
