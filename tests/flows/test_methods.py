"""Single steps, against what they are made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import meanformer as mf
from meanformer.experiments import reference_cloud
from meanformer.geometry import AbstractSpace

MATRICES = (
    np.array([[0.0, 1.0], [0.0, 0.0]]),
    np.array([[0.5, 0.0], [1.0, -0.5]]),
    np.array([[0.0, 0.0], [2.0, 1.0]]),
)


def linear(matrix):
    return mf.PointMap(lambda x: x @ matrix.T)


@pytest.mark.parametrize("order", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_step_of_the_splitting_is_the_product_of_its_partial_flows(order):
    step = 0.02
    first, second, third = MATRICES
    stages = [(first, 1), (second, 1), (third, 1)]
    if order == 2:
        halves = [(first, 0.5), (second, 0.5)]
        stages = [*halves, (third, 1), *reversed(halves)]
    whole = np.eye(2)
    for matrix, share in stages:
        whole = scipy.linalg.expm(step * share * matrix) @ whole
    path = mf.solve(
        mf.Flow(mf.Sum([linear(matrix) for matrix in MATRICES])),
        reference_cloud(),
        step,
        save=2,
        solver=mf.flows.Splitting(step, order=order),
    )
    expected = reference_cloud().points @ whole.T
    # The order of two of the stages makes a difference of 1e-4.
    np.testing.assert_allclose(path.points[-1], expected, atol=1e-9)


class LooseSphere(AbstractSpace):
    """The sphere as far as velocities go, without anything that puts points back."""

    def project(self, x, velocity):
        return mf.Sphere().project(x, velocity)

    def retract(self, x):
        return x

    def distance(self, x, y):
        return mf.Sphere().distance(x, y)

    def chord(self, distance):
        return mf.Sphere().chord(distance)

    def check(self, points, name="token"):
        return


def test_noise_on_the_sphere_is_tangent(key):
    points = jax.random.normal(key, (50, 3))
    points /= jnp.linalg.norm(points, axis=1, keepdims=True)
    still = mf.PointMap(jnp.zeros_like)
    path = mf.solve(
        mf.Flow(still, space=LooseSphere(), noise=1.0),
        mf.TokenCloud(points),
        1e-6,
        save=2,
        solver=mf.FixedStep(1e-6),
        key=key,
    )
    moved = path.points[-1] - points
    # Steps are of the size of the root of the depth; their radial part is smaller.
    assert np.abs(moved).max() > 1e-4
    radii = jnp.linalg.norm(path.points[-1], axis=1)
    np.testing.assert_allclose(radii, 1, atol=1e-5)
