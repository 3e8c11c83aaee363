"""The derivative in the last depth is the velocity there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanformer as mf
from gaussian_reference import COVARIANCE
from meanformer.gaussian import centred

IDENTITY = np.eye(2)
VALUE = np.array([[-0.3, -1.0], [1.0, -0.3]])
FLOW = mf.Flow(mf.Softmax(COVARIANCE, IDENTITY, VALUE))


@pytest.mark.slow
def test_the_derivative_of_a_trace_in_depth_is_that_of_the_equation():
    def trace(depth):
        path = mf.solve(FLOW, centred(COVARIANCE), depth, save=2, rtol=1e-9)
        return jnp.trace(path.covariances[-1]), path.covariances[-1]

    (_, spread), derivative = jax.value_and_grad(trace, has_aux=True)(1.0)
    moved = VALUE @ spread @ COVARIANCE @ spread
    assert float(derivative) == pytest.approx(2 * np.trace(moved), rel=1e-7)


@pytest.mark.slow
def test_the_derivative_of_tokens_in_depth_is_their_velocity():
    first = np.random.default_rng(0).normal(size=(5, 2))
    weights = jnp.array([1.0, -2.0])

    def mean(depth):
        path = mf.solve(FLOW, mf.TokenCloud(first), depth, save=2, rtol=1e-9)
        return path.points[-1].mean(axis=0) @ weights, path.points[-1]

    (_, points), derivative = jax.value_and_grad(mean, has_aux=True)(1.0)
    masses = np.exp(points @ COVARIANCE @ points.T)
    masses /= masses.sum(axis=1, keepdims=True)
    velocities = masses @ points @ VALUE.T
    expected = velocities.mean(axis=0) @ weights
    assert float(derivative) == pytest.approx(float(expected), rel=1e-7)


def test_a_gaussian_at_long_depth_says_that_it_has_no_derivative():
    def trace(scale):
        start = mf.gaussian.centred(scale * jnp.eye(2))
        flow = mf.Flow(mf.Softmax(-jnp.eye(2), jnp.eye(2), jnp.eye(2)))
        path = mf.solve(flow, start, 1.0, save=2, solver=mf.LongDepth())
        return jnp.trace(path.covariances[-1])

    with pytest.raises(mf.errors.Unsupported, match="no derivative"):
        jax.grad(trace)(1.0)
