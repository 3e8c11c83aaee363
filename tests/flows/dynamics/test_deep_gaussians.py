"""Gaussians in many dimensions, over many layers, over depths of a million."""

import numpy as np
import pytest
import scipy.integrate

import meanformer as mf
from gaussian_reference import KINDS, slope_and_constant

DECAYING = ["softmax", "l2", "sinkhorn"]
DEPTHS = np.array([0.0, 1e2, 1e4, 1e6])


def in_numpy(kind, matrices, mean, spread, count, step):
    """Residual layers on mean and covariance, from the table of closures."""
    identity = np.eye(len(mean))
    for _ in range(count):
        slope, constant = slope_and_constant(kind, matrices, 1.0, mean, spread)
        mean = mean + step * (slope @ mean + constant)
        layer = identity + step * slope
        spread = layer @ spread @ layer.T
    return mean, spread


@pytest.mark.parametrize("kind", DECAYING)
@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_layers_in_dimension_sixty_four_are_those_of_numpy(kind, count):
    random = np.random.default_rng(count)
    matrices = random.standard_normal((3, 64, 64)) / 12
    factor, mean = random.standard_normal((64, 64)) / 8, random.standard_normal(64)
    flow = mf.Flow(KINDS[kind](*matrices))
    path = mf.run_layers(flow, mf.Gaussian(mean, factor=factor), count, step=1 / count)
    assert len(path) == count + 1
    expected = in_numpy(kind, matrices, mean, factor @ factor.T, count, 1 / count)
    np.testing.assert_allclose(path.means[-1], expected[0], atol=1e-11)
    np.testing.assert_allclose(path.covariances[-1], expected[1], atol=1e-11)
    moved = np.linalg.norm(expected[1] - factor @ factor.T)
    assert moved > 0.1 * np.linalg.norm(factor @ factor.T)


def factors_by_scipy(kind, matrices, factor):
    """Factors at the depths above, by SciPy in the logarithm of depth."""
    mean = np.zeros(len(factor))

    def field(clock, state):
        root = state.reshape(factor.shape)
        slope, _ = slope_and_constant(kind, matrices, 1.0, mean, root @ root.T)
        return np.exp(clock) * (slope @ root).ravel()

    clocks = np.log1p(DEPTHS)
    ends, options = (0.0, clocks[-1]), {"rtol": 1e-12, "atol": 1e-14}
    found = scipy.integrate.solve_ivp(
        field, ends, factor.ravel(), "DOP853", clocks, **options
    )
    assert found.success
    return found.y.T.reshape(len(DEPTHS), *factor.shape)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DECAYING)
@pytest.mark.parametrize(("dimension", "rank"), [(3, 2), (4, 3), (4, 2)])
@pytest.mark.parametrize("values", ["identity", "definite"])
def test_rank_and_positivity_are_exact_over_a_million(kind, dimension, rank, values):
    random = np.random.default_rng(dimension + rank)
    query = random.standard_normal((2, dimension))
    factor = random.standard_normal((dimension, rank))
    value = np.eye(dimension)
    if values == "definite":
        root = random.standard_normal((dimension, dimension))
        value = value + 0.2 * root @ root.T
    matrices = (query, -query, value)
    flow, mu = (
        mf.Flow(KINDS[kind](*matrices)),
        mf.Gaussian(np.zeros(dimension), factor=factor),
    )
    path = mf.solve(flow, mu, 1e6, save=DEPTHS, solver=mf.LongDepth(), rtol=1e-8)
    np.testing.assert_array_equal(path.depths, DEPTHS)
    assert path.factors.shape == (4, dimension, rank)
    singular = np.linalg.svd(path.factors, compute_uv=False)
    assert np.all(singular > 0)
    eigenvalues = np.asarray(path.statistics["eigenvalues"])
    assert eigenvalues.shape == (4, rank)
    assert np.all(eigenvalues > 0)
    roots = factors_by_scipy(kind, matrices, factor)
    expected = np.linalg.svd(roots, compute_uv=False) ** 2
    np.testing.assert_allclose(eigenvalues, expected, rtol=1e-5)
    if values == "identity":
        # The range rests, and that to rounding.
        basis = np.linalg.qr(factor)[0]
        outside = path.factors - basis @ (basis.T @ path.factors)
        np.testing.assert_allclose(outside, 0, atol=1e-13)
