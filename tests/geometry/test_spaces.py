"""Euclidean space and the sphere: projection, retraction, distance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanformer.errors import InvalidInput
from meanformer.geometry import Euclidean, Sphere

POINTS = jnp.array([[3.0, 4.0, 0.0], [1.0, -2.0, 2.0], [0.0, 0.0, 5.0]])
VELOCITIES = jnp.array([[1.0, 2.0, 3.0], [0.5, 0.5, 0.5], [0.0, 1.0, -7.0]])
UNIT = POINTS / jnp.linalg.norm(POINTS, axis=1, keepdims=True)


def test_euclidean_space_changes_nothing():
    space = Euclidean()
    np.testing.assert_array_equal(space.project(POINTS, VELOCITIES), VELOCITIES)
    np.testing.assert_array_equal(space.retract(POINTS), POINTS)
    expected = np.linalg.norm(POINTS - VELOCITIES, axis=1)
    np.testing.assert_allclose(space.distance(POINTS, VELOCITIES), expected)
    assert space.check(POINTS) is None


def test_projected_velocities_are_tangent():
    tangent = Sphere().project(UNIT, VELOCITIES)
    np.testing.assert_allclose(jnp.sum(tangent * UNIT, axis=1), 0, atol=1e-15)
    expected = [v - x * (x @ v) for x, v in zip(UNIT, VELOCITIES, strict=True)]
    np.testing.assert_allclose(tangent, expected, atol=1e-15)


def test_projection_is_idempotent():
    once = Sphere().project(UNIT, VELOCITIES)
    np.testing.assert_allclose(Sphere().project(UNIT, once), once, atol=1e-15)


def test_projection_sees_only_the_direction_of_a_point():
    np.testing.assert_allclose(
        Sphere().project(POINTS, VELOCITIES),
        Sphere().project(UNIT, VELOCITIES),
        atol=1e-15,
    )


def test_retraction_gives_unit_vectors():
    np.testing.assert_allclose(Sphere().retract(POINTS), UNIT, atol=1e-16)
    norms = jnp.linalg.norm(Sphere().retract(1e150 * POINTS), axis=1)
    np.testing.assert_allclose(norms, 1, atol=1e-15)


def test_the_derivative_of_retraction_is_the_projection():
    _, tangent = jax.jvp(Sphere().retract, (UNIT,), (VELOCITIES,))
    np.testing.assert_allclose(tangent, Sphere().project(UNIT, VELOCITIES), atol=1e-15)


@pytest.mark.parametrize("angle", [0.0, 1e-12, 1e-5, 1.0, np.pi - 1e-9, np.pi])
def test_distance_on_the_sphere_is_the_angle_at_any_size(angle):
    x = jnp.array([[1.0, 0.0]])
    y = jnp.array([[np.cos(angle), np.sin(angle)]])
    np.testing.assert_allclose(Sphere().distance(x, y), angle, rtol=1e-9, atol=1e-15)


def test_distance_is_symmetric_and_satisfies_the_triangle_inequality():
    space, (a, b, c) = Sphere(), UNIT[:, None]
    np.testing.assert_array_equal(space.distance(a, b), space.distance(b, a))
    assert space.distance(a, c) <= space.distance(a, b) + space.distance(b, c)


@pytest.mark.parametrize("space", [Euclidean(), Sphere()])
def test_the_distance_of_a_point_to_itself_has_a_finite_derivative(space):
    gradient = jax.grad(lambda x: space.distance(x, UNIT).sum())(UNIT)
    assert np.isfinite(gradient).all()


def test_the_distance_of_opposite_points_has_a_finite_derivative():
    gradient = jax.grad(lambda x: Sphere().distance(x, -UNIT).sum())(UNIT)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_distances_and_directions_survive_squares_out_of_range(scale):
    x = (scale * UNIT).astype(jnp.float32)
    np.testing.assert_allclose(Euclidean().distance(x, -x), 2 * scale, rtol=1e-6)
    np.testing.assert_allclose(Sphere().retract(x), UNIT, atol=1e-6)


def test_the_origin_cannot_be_brought_back_to_the_sphere():
    points = UNIT.at[1].set(0.0)
    for step in (Sphere().retract, lambda x: Sphere().project(x, VELOCITIES)):
        with pytest.raises(InvalidInput, match="row 1 of x is zero; a point must be"):
            step(points)


def test_a_traced_origin_stays_where_it_is_with_a_finite_derivative():
    points = UNIT.at[1].set(0.0)
    np.testing.assert_allclose(jax.jit(Sphere().retract)(points), points, atol=1e-15)
    gradient = jax.jit(jax.grad(lambda x: Sphere().retract(x).sum()))(points)
    assert np.isfinite(gradient).all()


def test_points_off_the_sphere_are_refused_with_advice():
    points = UNIT.at[1].multiply(1.2)
    message = r"token 1 has norm 1\.2; on the sphere every token must have norm 1"
    with pytest.raises(InvalidInput, match=message):
        Sphere().check(points)
    assert Sphere().check(UNIT) is None


def test_traced_points_are_not_checked():
    jax.jit(lambda x: (Sphere().check(x), x)[1])(2 * POINTS)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_spaces_keep_the_precision(dtype):
    x, v = POINTS.astype(dtype), VELOCITIES.astype(dtype)
    for space in (Euclidean(), Sphere()):
        assert space.project(x, v).dtype == space.retract(x).dtype == dtype
        assert space.distance(x, v).dtype == dtype
