"""Many tokens: rate and constant of the mean-field limit."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from meanformer.attention import L2, Linear, Sigmoid, Softmax, Unnormalised
from meanformer.errors import InvalidInput, Unsupported
from meanformer.flows import Flow
from meanformer.measures import Gaussian, Mixture, TokenCloud, quadrature
from meanformer.observables import asymptotic_covariance, token_convergence
from meanformer.observables.convergence import fitted_slope
from reference import KEY, POINTS, QUERY, SCORE, VALUE, WEIGHTS

LAW = Gaussian([0.3, -0.4], [[1.0, 0.3], [0.3, 0.6]])
PROBE = np.array([[1.0, -0.5]])
SOFTMAX = Softmax(QUERY, KEY, VALUE)
COVARIANCE = [[0.401052047, 0.1920585076], [0.1920585076, 0.3877374997]]


def test_the_gaussian_covariance_tabulated_is_reproduced():
    found = asymptotic_covariance(SOFTMAX, LAW, PROBE)[0]
    np.testing.assert_allclose(found, COVARIANCE, atol=1e-9)
    spread = np.asarray(LAW.covariance())
    tilt = SCORE @ PROBE[0]
    strength = tilt @ spread @ tilt
    np.testing.assert_allclose(strength, 0.093535, atol=5e-7)
    shift = spread @ tilt
    formula = np.exp(strength) * VALUE @ (spread + np.outer(shift, shift)) @ VALUE.T
    np.testing.assert_allclose(found, formula, rtol=1e-12)


def test_on_a_cloud_it_is_the_weighted_sum_over_tokens():
    cloud = TokenCloud(POINTS, WEIGHTS)
    scores = PROBE @ SCORE.T @ POINTS.T
    density = np.exp(scores[0])
    density /= WEIGHTS @ density
    mean = (WEIGHTS * density) @ POINTS
    moved = (POINTS - mean) @ VALUE.T
    expected = (WEIGHTS * density**2 * moved.T) @ moved
    found = asymptotic_covariance(SOFTMAX, cloud, PROBE)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.slow
def test_the_influence_of_tokens_gives_the_same_as_the_laplace_transform():
    # With orthogonal keys on a sphere L2 attention is softmax at twice the beta.
    angles = np.array([0.1, 1.3, 2.9, 4.0])
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    cloud = TokenCloud(circle, WEIGHTS)
    by_influence = asymptotic_covariance(L2(QUERY, np.eye(2), VALUE), cloud, PROBE)
    softmax = Softmax(QUERY, np.eye(2), VALUE, beta=2.0)
    exact = asymptotic_covariance(softmax, cloud, PROBE)
    np.testing.assert_allclose(by_influence, exact, rtol=1e-10)


@pytest.mark.parametrize("kind", [Linear, Unnormalised, Sigmoid])
def test_a_map_linear_in_the_measure_has_the_covariance_of_its_integrand(kind):
    cloud = TokenCloud(POINTS, WEIGHTS)
    layer = kind(QUERY, KEY, VALUE)
    values = np.stack(
        [layer(TokenCloud(point[None]), jnp.asarray(PROBE))[0] for point in POINTS]
    )
    expected = np.cov(values.T, aweights=WEIGHTS, ddof=0)
    found = asymptotic_covariance(layer, cloud, PROBE)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_quadrature_of_a_gaussian_has_its_covariance():
    exact = asymptotic_covariance(SOFTMAX, LAW, PROBE)
    nodes = asymptotic_covariance(SOFTMAX, quadrature(LAW, 12), PROBE)
    np.testing.assert_allclose(nodes, exact, rtol=1e-8)


@pytest.mark.slow
def test_mixtures_are_exact_too():
    mixture = Mixture([0.3, 0.7], [LAW, Gaussian([-1.0, 0.5], 0.2 * np.eye(2))])
    exact = asymptotic_covariance(SOFTMAX, mixture, PROBE)
    nodes = quadrature(mixture, 14)
    np.testing.assert_allclose(
        asymptotic_covariance(SOFTMAX, nodes, PROBE), exact, rtol=1e-7
    )


@pytest.mark.slow
def test_the_error_decreases_like_one_over_the_root_of_the_count():
    counts = [128, 256, 512, 1024, 2048, 4096]
    found = token_convergence(LAW, SOFTMAX, counts, PROBE, 64, key=jr.key(3))
    assert -0.6 <= found.slope <= -0.4
    low, high = found.slope_interval
    assert low <= found.slope <= high
    assert high - low < 0.2
    assert found.errors.shape == (6, 64)
    predicted = np.sqrt(COVARIANCE[0][0] + COVARIANCE[1][1])
    np.testing.assert_allclose(found.predicted_constant, predicted, atol=1e-9)
    # 384 samples of a mean square: its root is known to about 4 percent.
    np.testing.assert_allclose(found.fitted_constant, predicted, rtol=0.15)
    assert found.count_for(0.01) == np.ceil((predicted / 0.01) ** 2)
    assert (np.diff(found.table) < 0).all()


@pytest.mark.slow
def test_sampled_covariances_approach_the_predicted_one():
    count, repeats, probe = 500, 1500, jnp.asarray(PROBE)

    def deviation(key):
        cloud = TokenCloud(LAW.sample(count, key=key))
        return (SOFTMAX(cloud, probe) - SOFTMAX(LAW, probe))[0]

    deviations = np.asarray(jax.vmap(deviation)(jr.split(jr.key(5), repeats)))
    sampled = count * deviations.T @ deviations / repeats
    np.testing.assert_allclose(sampled, COVARIANCE, atol=0.06)


def test_a_sampler_is_compared_with_a_reference():
    def sampler(count, key):
        return LAW.sample(count, key=key)

    options = {"counts": [64, 512], "probes": PROBE, "repeats": 16, "key": jr.key(0)}
    by_sampler = token_convergence(sampler, SOFTMAX, reference=LAW, **options)
    by_measure = token_convergence(LAW, SOFTMAX, **options)
    np.testing.assert_allclose(by_sampler.errors, by_measure.errors, rtol=1e-12)
    with pytest.raises(InvalidInput, match="reference"):
        token_convergence(sampler, SOFTMAX, **options)


@pytest.mark.slow
def test_probes_carried_by_a_flow_converge_at_the_same_rate():
    found = token_convergence(
        LAW,
        Flow(SOFTMAX),
        [64, 512],
        PROBE,
        24,
        key=jr.key(1),
        reference=quadrature(LAW, 14),
    )
    assert found.predicted_constant is None
    assert -0.65 <= found.slope <= -0.35


def test_wrong_input_is_named():
    options = {"probes": PROBE, "repeats": 4, "key": jr.key(0)}
    with pytest.raises(InvalidInput, match="counts"):
        token_convergence(LAW, SOFTMAX, [64, 64], **options)
    with pytest.raises(InvalidInput, match="repeats is 1"):
        token_convergence(LAW, SOFTMAX, [8, 16], PROBE, 1, key=jr.key(0))
    with pytest.raises(InvalidInput, match="probes has shape"):
        token_convergence(LAW, SOFTMAX, [8, 16], PROBE[0], 4, key=jr.key(0))
    with pytest.raises(InvalidInput, match="no error"):
        token_convergence(LAW, Softmax(QUERY, KEY, 0 * VALUE), [8, 16], **options)
    with pytest.raises(Unsupported, match="Sigmoid"):
        asymptotic_covariance(Sigmoid(QUERY, KEY, VALUE), LAW, PROBE)


def test_the_interval_of_the_slope_is_as_wide_as_slopes_scatter():
    rng = np.random.default_rng(0)
    counts = np.array([10, 40, 160])
    fits = [
        fitted_slope(counts, rng.gamma(4.0, 1 / np.sqrt(counts)[:, None], (3, 100)))
        for _ in range(400)
    ]
    slopes = np.array([slope for slope, _ in fits])
    margins = np.array([(high - low) / 2 for _, (low, high) in fits])
    np.testing.assert_allclose(margins.mean(), 1.96 * slopes.std(), rtol=0.1)
    np.testing.assert_allclose(slopes.mean(), -0.5, atol=0.01)
