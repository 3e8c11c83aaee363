"""The uniform sphere: closed forms, samples, symmetry, limits, refusals."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.special

from meanformer.errors import InvalidInput, Unsupported
from meanformer.measures import UniformSphere


def directions(key, dimension, sizes):
    u = jr.normal(key, (len(sizes), dimension))
    return u / jnp.linalg.norm(u, axis=1, keepdims=True) * jnp.asarray(sizes)[:, None]


def test_circle_is_given_by_bessel_functions(key):
    sizes = np.array([0.1, 1.0, 5.0, 30.0])
    u = directions(key, 2, sizes)
    circle = UniformSphere(2)
    expected = np.log(scipy.special.i0e(sizes)) + sizes
    np.testing.assert_allclose(circle.log_laplace(u), expected, rtol=1e-12)
    ratio = scipy.special.i1e(sizes) / scipy.special.i0e(sizes)
    expected_mean = (ratio / sizes)[:, None] * np.asarray(u)
    np.testing.assert_allclose(circle.tilted_mean(u), expected_mean, rtol=1e-12)


def test_sphere_of_another_radius_is_a_scaled_one(key):
    u = directions(key, 3, [0.5, 4.0])
    unit, scaled = UniformSphere(3), UniformSphere(3, radius=2.5)
    np.testing.assert_allclose(
        scaled.log_laplace(u), unit.log_laplace(2.5 * u), rtol=1e-14
    )
    np.testing.assert_allclose(
        scaled.tilted_mean(u), 2.5 * unit.tilted_mean(2.5 * u), rtol=1e-14
    )
    np.testing.assert_allclose(scaled.covariance(), 6.25 * unit.covariance())


def test_two_points_are_the_sphere_in_dimension_one():
    u = jnp.array([[0.0], [0.3], [-2.0], [50.0]])
    np.testing.assert_allclose(
        UniformSphere(1).tilted_mean(u), np.tanh(u), rtol=1e-14, atol=0
    )


@pytest.mark.parametrize("dimension", [1, 2, 3, 20])
def test_moments_are_derivatives_of_the_log_laplace_transform(dimension):
    sphere = UniformSphere(dimension, radius=1.5)
    origin = jnp.zeros(dimension)

    def log_laplace(u):
        return sphere.log_laplace(u[None, :])[0]

    gradient, hessian = jax.jit(
        lambda u: (jax.grad(log_laplace)(u), jax.hessian(log_laplace)(u))
    )(origin)
    np.testing.assert_allclose(gradient, sphere.mean(), atol=0)
    np.testing.assert_allclose(hessian, sphere.covariance(), atol=1e-14)


@pytest.mark.parametrize("size", [0.0, 1e-4, 0.8, 40.0, 1e5])
def test_gradient_of_the_log_laplace_transform_is_the_tilted_mean(key, size):
    sphere = UniformSphere(4)
    u = directions(key, 4, [size])
    gradient = jax.jit(jax.grad(lambda u: sphere.log_laplace(u)[0]))(u)
    np.testing.assert_allclose(gradient, sphere.tilted_mean(u), rtol=1e-13, atol=0)


def test_jacobian_of_the_tilted_mean_agrees_with_finite_differences(key):
    sphere = UniformSphere(3)
    u, v = directions(key, 3, [2.0, 1.0])
    step = 1e-5

    def mean(u):
        return sphere.tilted_mean(u[None, :])[0]

    _, along = jax.jvp(mean, (u,), (v,))
    difference = (mean(u + step * v) - mean(u - step * v)) / (2 * step)
    np.testing.assert_allclose(along, difference, rtol=1e-8)


@pytest.mark.parametrize("dimension", [1, 2, 3, 6])
def test_samples_have_the_moments_of_the_measure(key, dimension):
    sphere, count = UniformSphere(dimension, radius=2.0), 40_000
    points = sphere.sample(count, key=key)
    assert points.shape == (count, dimension)
    np.testing.assert_allclose(jnp.linalg.norm(points, axis=1), 2.0, rtol=1e-14)
    deviation = 2.0 / np.sqrt(dimension * count)
    np.testing.assert_allclose(points.mean(0), 0, atol=5 * deviation)
    covariance = points.T @ points / count
    np.testing.assert_allclose(covariance, sphere.covariance(), atol=20 / count**0.5)


def test_log_laplace_transform_agrees_with_monte_carlo(key):
    key_u, key_x = jr.split(key)
    sphere, count = UniformSphere(5), 100_000
    u = directions(key_u, 5, [3.0])
    masses = jnp.exp(sphere.sample(count, key=key_x) @ u[0])
    deviation = float(masses.std() / masses.mean()) / count**0.5
    difference = float(jnp.log(masses.mean()) - sphere.log_laplace(u)[0])
    assert abs(difference) < 5 * deviation


def test_rotating_the_tilt_rotates_the_mean(key):
    key_u, key_q = jr.split(key)
    u = directions(key_u, 4, [0.2, 3.0, 80.0])
    rotation, _ = jnp.linalg.qr(jr.normal(key_q, (4, 4)))
    sphere = UniformSphere(4)
    np.testing.assert_allclose(
        sphere.tilted_mean(u @ rotation.T),
        sphere.tilted_mean(u) @ rotation.T,
        atol=1e-15,
    )


def test_large_tilts_tend_to_the_maximal_mean(key):
    u = directions(key, 3, [1.0])
    sphere = UniformSphere(3)
    best = sphere.maximal_mean(u, 0.0)
    for size in (1e2, 1e4, 1e6):
        np.testing.assert_allclose(
            sphere.tilted_mean(size * u), (1 - 1 / size) * best, atol=1e-15
        )


def test_maximal_mean_is_zero_where_all_scores_tie():
    u = jnp.array([[0.0, 0.0], [3e-9, 4e-9], [3e200, -4e200]])
    expected = [[0, 0], [0, 0], [1.2, -1.6]]
    best = UniformSphere(2, radius=2.0).maximal_mean(u, 1e-7)
    np.testing.assert_allclose(best, expected, rtol=1e-15)


def test_gradient_of_the_maximal_mean_is_finite_at_zero():
    sphere = UniformSphere(2)
    gradient = jax.jacobian(lambda u: sphere.maximal_mean(u, 0.0))(jnp.zeros((1, 2)))
    np.testing.assert_array_equal(gradient, 0)


def test_linear_mean_comes_from_the_second_moment(key):
    sphere = UniformSphere(3, radius=2.0)
    u = directions(key, 3, [1.0, 5.0])
    mass, moment = sphere.linear_mean(u)
    np.testing.assert_array_equal(mass, 0)
    np.testing.assert_allclose(moment, u @ sphere.second_moment(), rtol=1e-14)


def test_quadratic_tilt_by_a_multiple_of_the_identity_changes_only_the_mass():
    sphere = UniformSphere(3, radius=2.0)
    log_mass, tilted = sphere.quadratic_tilt(0.7 * jnp.eye(3))
    assert float(log_mass) == pytest.approx(-0.5 * 0.7 * 4)
    assert eqx.tree_equal(tilted, sphere)


def test_quadratic_tilt_forgives_rounding_of_a_rotation(key):
    rotation, _ = jnp.linalg.qr(jr.normal(key, (5, 5)))
    log_mass, _ = UniformSphere(5).quadratic_tilt(3 * rotation.T @ rotation)
    assert float(log_mass) == pytest.approx(-1.5)


def test_other_quadratic_tilts_are_refused_with_advice():
    with pytest.raises(Unsupported, match=r"multiple of I; use quadrature\(measure"):
        UniformSphere(2).quadratic_tilt(jnp.diag(jnp.array([1.0, 2.0])))


@pytest.mark.slow
def test_quadratic_tilt_is_checked_under_jit_too():
    u = jnp.ones((1, 2))

    @eqx.filter_jit
    def mean(precision):
        return UniformSphere(2).quadratic_tilt(precision)[1].tilted_mean(u)

    np.testing.assert_allclose(mean(2 * jnp.eye(2)), UniformSphere(2).tilted_mean(u))
    with pytest.raises(RuntimeError, match="multiple of I"):
        mean(jnp.diag(jnp.array([1.0, 2.0])))


def test_entropic_tilt_by_a_scaled_rotation_is_the_sphere_itself():
    # The plan with constant potentials has uniform marginals: its mean over x of
    # exp(<y, Bx>) does not depend on y, here checked by the average over a fine grid.
    angles = 2 * np.pi * np.arange(64) / 64
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    form = 1.7 * np.array([[0.6, -0.8], [0.8, 0.6]])
    marginal = np.exp(circle @ form @ circle.T).mean(axis=1)
    np.testing.assert_allclose(marginal, marginal[0], rtol=1e-14)
    sphere = UniformSphere(2)
    assert eqx.tree_equal(sphere.entropic_tilt(jnp.asarray(form), len), sphere)
    with pytest.raises(Unsupported, match="scaled rotation; use quadrature"):
        sphere.entropic_tilt(jnp.diag(jnp.array([1.0, 2.0])), len)


def test_single_precision_tilts_are_answered_in_single_precision(key):
    u = directions(key, 3, [0.5, 20.0])
    sphere = UniformSphere(3)
    single = sphere.tilted_mass_and_mean(u.astype(jnp.float32))
    for value, reference in zip(single, sphere.tilted_mass_and_mean(u), strict=True):
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(value, reference, rtol=1e-5)
    assert sphere.maximal_mean(u.astype(jnp.float32), 0.0).dtype == jnp.float32
    assert (
        UniformSphere(3, radius=np.float32(1)).sample(2, key=key).dtype == jnp.float32
    )


def test_jit_and_vmap_agree_with_the_plain_call(key):
    sphere = UniformSphere(3)
    u = directions(key, 3, [0.5, 2.0, 20.0])
    plain = sphere.tilted_mean(u)
    np.testing.assert_allclose(eqx.filter_jit(sphere.tilted_mean)(u), plain, rtol=1e-14)
    rows = jax.vmap(lambda row: sphere.tilted_mean(row[None, :])[0])(u)
    np.testing.assert_allclose(rows, plain, rtol=1e-14)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dimension": 2.5}, "dimension is 2.5; it must be an integer"),
        ({"dimension": 0}, "dimension is 0; it must be 1 or more"),
        ({"dimension": 2, "radius": -1.0}, "radius is -1.0; it must be positive"),
        ({"dimension": 2, "radius": np.nan}, "radius holds nan"),
        ({"dimension": 2, "radius": [1.0]}, "radius has shape"),
    ],
)
def test_bad_parameters_are_refused_in_one_sentence(untyped, arguments, message):
    with pytest.raises(InvalidInput, match=message):
        UniformSphere(**arguments)


def test_kinds_without_closed_form_are_refused_with_advice():
    sphere, u = UniformSphere(2), jnp.ones((1, 2))
    with pytest.raises(Unsupported, match=r"sigmoid attention; use quadrature"):
        sphere.kernel_mean(u, jax.nn.sigmoid)
    with pytest.raises(Unsupported, match="feature map"):
        sphere.linear_mean(u, jnp.exp)
