"""Noise along great circles: the weak order on harmonics, and flows that use it."""

import diffrax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from numpy.polynomial.hermite_e import hermegauss
from scipy.special import eval_gegenbauer, roots_genlaguerre

import meanformer as mf
from meanformer.errors import InvalidInput
from meanformer.flows import GeodesicStep
from meanformer.flows.geodesic import along_great_circles


def zonal(degree, dimension, height):
    if dimension == 2:
        return np.cos(degree * np.arccos(np.clip(height, -1, 1)))
    order = dimension / 2 - 1
    return eval_gegenbauer(degree, order, height) / eval_gegenbauer(degree, order, 1.0)


def kept_share(dimension, degree, step):
    """What one step of unit noise leaves of a harmonic, by a rule for the length."""
    squares, masses = roots_genlaguerre(60, (dimension - 3) / 2)
    lengths = np.sqrt(2 * step * squares)
    points = np.zeros((60, dimension))
    points[:, 0] = 1
    increments = np.zeros((60, dimension))
    increments[:, 1] = lengths
    moved = along_great_circles(jnp.asarray(points), jnp.asarray(increments))
    heights = np.asarray(moved)[:, 0]
    return masses @ zonal(degree, dimension, heights) / masses.sum()


def decay(dimension, degree, step):
    return np.exp(-degree * (degree + dimension - 2) * step / 2)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_noise_on_the_circle_is_exact(degree):
    found = kept_share(2, degree, 0.1)
    np.testing.assert_allclose(found, decay(2, degree, 0.1), rtol=1e-12)


@pytest.mark.parametrize("dimension", [3, 8])
@pytest.mark.parametrize("degree", [1, 2])
def test_noise_has_weak_order_two_on_the_sphere(dimension, degree):
    """The error of all steps to depth one, which is exact: harmonics are invariant."""
    errors = [
        abs(kept_share(dimension, degree, h) ** (1 / h) - decay(dimension, degree, 1))
        for h in (0.02, 0.01, 0.005)
    ]
    slopes = np.diff(np.log(errors)) / np.log(0.5)
    np.testing.assert_allclose(slopes, 2, atol=0.25)


def heun_share(step):
    """What a retracted Heun step leaves of the height on the circle."""
    nodes, masses = hermegauss(40)
    grid = np.stack(np.meshgrid(nodes, nodes, indexing="ij"), -1).reshape(-1, 2)
    weights = np.outer(masses, masses).ravel() / masses.sum() ** 2
    increments = np.sqrt(step) * grid
    start = np.array([1.0, 0.0])

    def project(x, v):
        return v - (x * v).sum(-1, keepdims=True) * x

    first = project(start, increments)
    unit = start + first
    unit = unit / np.linalg.norm(unit, axis=1, keepdims=True)
    end = start + (first + project(unit, increments)) / 2
    return weights @ (end[:, 0] / np.linalg.norm(end, axis=1))


def test_the_retracted_heun_method_has_weak_order_one():
    errors = [abs(heun_share(h) ** (1 / h) - np.exp(-0.5)) for h in (0.02, 0.01, 0.005)]
    slopes = np.diff(np.log(errors)) / np.log(0.5)
    np.testing.assert_allclose(slopes, 1, atol=0.1)


def still(dimension):
    eye = jnp.eye(dimension)
    return mf.Softmax(eye, eye, 0 * eye)


def brownian(dimension, method, step, count=2000, seed=3):
    """Brownian motion on a sphere from one point, by `solve`, at depth one."""
    points = jnp.tile(jnp.eye(dimension)[:1], (count, 1))
    flow = mf.Flow(still(dimension), space=mf.Sphere(), noise=1.0)
    solver = mf.FixedStep(step, method=method)
    path = mf.solve(
        flow,
        mf.TokenCloud(points),
        1.0,
        save=np.array([0.0, 1.0]),
        solver=solver,
        key=jr.key(seed),
    )
    return np.asarray(path.points[-1])


@pytest.mark.slow
@pytest.mark.parametrize("dimension", [2, 3])
def test_solve_walks_a_brownian_motion_of_the_right_speed(dimension):
    points = brownian(dimension, GeodesicStep(), 0.1)
    np.testing.assert_allclose(np.linalg.norm(points, axis=1), 1, rtol=1e-14)
    for degree in (1, 2):
        found = zonal(degree, dimension, points[:, 0])
        error = found.std() / np.sqrt(len(found))
        expected = decay(dimension, degree, 1)
        np.testing.assert_allclose(found.mean(), expected, atol=5 * error)


@pytest.mark.slow
def test_the_default_step_has_the_weak_error_of_its_map():
    """Heun's method with retraction, whose mean is known exactly."""
    heights = brownian(2, None, 0.1)[:, 0]
    error = heights.std() / np.sqrt(len(heights))
    np.testing.assert_allclose(heights.mean(), heun_share(0.1) ** 10, atol=5 * error)


@pytest.mark.slow
def test_both_methods_follow_the_same_brownian_path():
    """Strong convergence of order one half at least, to one and the same limit."""
    finest = brownian(3, GeodesicStep(), 1 / 256, count=100)
    errors = {
        method: [
            np.sqrt(np.mean((brownian(3, method, h, count=100) - finest) ** 2))
            for h in (1 / 4, 1 / 32)
        ]
        for method in (None, GeodesicStep())
    }
    for coarse, fine in errors.values():
        assert fine < 0.6 * coarse


def test_great_circles_leave_still_points_alone():
    points = jnp.eye(3)
    moved = along_great_circles(points, jnp.zeros((3, 3)))
    np.testing.assert_array_equal(moved, points)


def test_great_circles_are_refused_off_the_sphere_and_without_noise():
    cloud = mf.TokenCloud(jnp.eye(2))
    solver = mf.FixedStep(0.1, method=GeodesicStep())
    with pytest.raises(InvalidInput, match="on Sphere\\(\\) with noise"):
        mf.solve(mf.Flow(still(2), noise=1.0), cloud, 1.0, solver=solver, key=jr.key(0))
    with pytest.raises(InvalidInput, match="leave method out"):
        mf.solve(mf.Flow(still(2), space=mf.Sphere()), cloud, 1.0, solver=solver)


def test_the_method_is_known_to_solve_in_the_sense_of_stratonovich():
    assert isinstance(GeodesicStep(), diffrax.AbstractStratonovichSolver)
