"""Densities on the circle: closed forms, moments, samples, attention, refusals."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.integrate
import scipy.special

from meanformer.attention import Linear, Sigmoid, Softmax, identity_attention
from meanformer.errors import InvalidInput, Unsupported
from meanformer.measures import (
    FourierDensity,
    Gaussian,
    RingOfTilts,
    TokenCloud,
    UniformSphere,
    circle_moments,
    quadrature,
)


def bumpy(angles):
    """A smooth density without symmetry, not normalised."""
    return jnp.exp(2 * jnp.cos(angles - 1) + jnp.sin(3 * angles))


@pytest.fixture(scope="module")
def density():
    return FourierDensity.from_function(bumpy, 48, normalize=True)


def integral(function):
    return scipy.integrate.quad(function, 0, 2 * np.pi, epsabs=1e-12, limit=200)[0]


def test_moments_are_integrals_of_cosines_and_sines(density):
    mass = integral(lambda t: float(bumpy(t)))
    for degree in (1, 2, 5):
        cosine = integral(lambda t, k=degree: float(bumpy(t)) * np.cos(k * t)) / mass
        sine = integral(lambda t, k=degree: float(bumpy(t)) * np.sin(k * t)) / mass
        np.testing.assert_allclose(density.moments[degree - 1], [cosine, sine], 1e-11)


def test_the_density_is_the_function_it_was_made_of(density):
    angles = jnp.array([0.0, 0.4, 2.0, 6.0])
    mass = integral(lambda t: float(bumpy(t)))
    np.testing.assert_allclose(density.density(angles), bumpy(angles) / mass, 1e-11)
    grid = 2 * np.pi / 200 * np.arange(200)
    np.testing.assert_allclose(density.on_grid(200), density.density(grid), 1e-11)


@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 30.0])
def test_transform_and_mean_are_integrals(density, size):
    u = size * jnp.array([[0.6, -0.8]])

    def weight(t):
        tilt = 0.6 * np.cos(t) - 0.8 * np.sin(t)
        return float(bumpy(t)) * np.exp(size * (tilt - 1))

    mass = integral(lambda t: float(bumpy(t)))
    tilted = integral(weight)
    mean = [
        integral(lambda t, f=f: weight(t) * f(t)) / tilted for f in (np.cos, np.sin)
    ]
    log_laplace = size + np.log(tilted / mass)
    np.testing.assert_allclose(density.log_laplace(u), [log_laplace], atol=1e-10)
    np.testing.assert_allclose(density.tilted_mean(u), [mean], atol=1e-9)


def test_the_mean_is_the_gradient_of_the_transform(density):
    for tilt in ([0.0, 0.0], [1.5, -0.3]):
        u = jnp.array([tilt])
        slope = jax.grad(lambda u: density.log_laplace(u)[0])(u)
        np.testing.assert_allclose(slope, density.tilted_mean(u), atol=1e-13)


def test_zero_moments_are_the_uniform_measure():
    u = jnp.array([[0.0, 0.0], [3.0, 4.0], [-20.0, 1.0]])
    flat, sphere = FourierDensity(np.zeros((5, 2))), UniformSphere(2)
    np.testing.assert_allclose(flat.log_laplace(u), sphere.log_laplace(u), rtol=1e-13)
    np.testing.assert_allclose(flat.tilted_mean(u), sphere.tilted_mean(u), rtol=1e-13)
    np.testing.assert_allclose(flat.covariance(), np.eye(2) / 2)


def test_one_mode_is_enough():
    density = FourierDensity([[0.2, 0.1]])
    u = jnp.array([[1.0, 0.5]])
    nodes = quadrature(density, 64)
    np.testing.assert_allclose(density.log_laplace(u), nodes.log_laplace(u), rtol=1e-13)
    np.testing.assert_allclose(density.tilted_mean(u), nodes.tilted_mean(u), rtol=1e-13)
    np.testing.assert_allclose(density.second_moment(), np.eye(2) / 2)


def test_moments_of_the_plane_come_from_two_modes(density):
    nodes = quadrature(density, 400)
    np.testing.assert_allclose(density.mean(), nodes.mean(), atol=1e-13)
    np.testing.assert_allclose(density.covariance(), nodes.covariance(), atol=1e-13)
    np.testing.assert_allclose(circle_moments(nodes, 48), density.moments, atol=1e-13)


def test_equispaced_tilts_of_one_length_are_answered_by_transforms(density):
    angles = 2 * np.pi / 128 * np.arange(128) + 0.3
    u = 7 * jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1)
    ring = RingOfTilts(density, 128).tilted_mass_and_mean(u)
    for fast, slow in zip(ring, density.tilted_mass_and_mean(u), strict=True):
        np.testing.assert_allclose(fast, slow, atol=1e-12)
    with pytest.raises(Unsupported, match="128 tilts, not 2"):
        RingOfTilts(density, 128).tilted_mass_and_mean(u[:2])


@pytest.mark.parametrize("kind", ["softmax", "unnormalised", "linear", "l2"])
def test_attention_to_a_density_is_attention_to_its_nodes(density, kind):
    x = jnp.array([[1.0, 0.0], [0.6, 0.8], [-0.3, 2.0]])
    layer = identity_attention(kind, 2, 1.5)
    if kind == "l2":
        with pytest.raises(Unsupported, match="no closed form for L2"):
            layer(density, x)
        return
    nodes = quadrature(density, 400)
    np.testing.assert_allclose(layer(density, x), layer(nodes, x), rtol=1e-11)


def test_what_has_no_closed_form_is_refused(density):
    x = jnp.array([[1.0, 0.0]])
    eye = jnp.eye(2)
    with pytest.raises(Unsupported, match="sigmoid"):
        Sigmoid(eye, eye, eye)(density, x)
    with pytest.raises(Unsupported, match="feature map"):
        Linear(eye, eye, eye, feature_map=jnp.exp)(density, x)


def test_samples_have_the_moments(density, key):
    sample = TokenCloud(density.sample(40_000, key=key))
    np.testing.assert_allclose(
        circle_moments(sample, 5), density.moments[:5], atol=5 * 40_000**-0.5
    )
    np.testing.assert_allclose(np.linalg.norm(sample.points, axis=1), 1, rtol=1e-12)


def test_samples_invert_the_distribution_function(density, key):
    shares = jr.uniform(key, (50,))
    points = density.sample(50, key=key)
    angles = np.arctan2(points[:, 1], points[:, 0]) % (2 * np.pi)
    mass = integral(lambda t: float(bumpy(t)))
    for angle, share in zip(angles[:5], shares[:5], strict=True):
        below = scipy.integrate.quad(lambda t: float(bumpy(t)), 0, angle)[0] / mass
        assert below == pytest.approx(float(share), abs=1e-10)


@pytest.mark.slow
def test_a_density_of_positive_mass_where_the_series_is_zero_can_be_sampled(key):
    touching = FourierDensity([[0.5, 0.0]])  # zero at the angle pi
    angles = np.arctan2(*touching.sample(1000, key=key).T[::-1])
    assert np.isfinite(angles).all()


def test_resizing_adds_zeros_or_leaves_out(density):
    assert density.resized(60).modes == 60
    np.testing.assert_array_equal(density.resized(60).moments[48:], 0)
    np.testing.assert_array_equal(density.resized(10).moments, density.moments[:10])
    assert float(density.tail()) < 1e-10 < float(density.resized(6).tail())


def test_a_far_tilt_keeps_the_mean_in_the_disc():
    """Where rounding has spoiled the sum no mean outside of the hull is returned."""
    sharp = FourierDensity.from_function(
        lambda t: jnp.exp(60 * (jnp.cos(t) - 1)), 96, normalize=True
    )
    log_mass, mean = sharp.tilted_mass_and_mean(jnp.array([[-400.0, 0.0]]))
    assert np.isfinite(log_mass).all()
    assert np.linalg.norm(mean) <= 1 + 1e-15


def test_a_huge_tilt_gives_finite_numbers(density):
    """Its square would overflow; the transform grows with slope one."""
    u = jnp.array([[1e160, 0.0], [0.0, -1e300]])
    log_mass, mean = density.tilted_mass_and_mean(u)
    np.testing.assert_allclose(log_mass, [1e160, 1e300], rtol=1e-12)
    np.testing.assert_allclose(mean, [[1, 0], [0, -1]], atol=1e-12)


def test_single_precision_stays_single(density):
    single = FourierDensity(np.asarray(density.moments, np.float32))
    u = jnp.array([[1.0, 2.0]], jnp.float32)
    log_mass, mean = single.tilted_mass_and_mean(u)
    assert log_mass.dtype == mean.dtype == jnp.float32
    exact = density.tilted_mean(jnp.array([[1.0, 2.0]]))
    np.testing.assert_allclose(mean, exact, rtol=1e-5)


def test_the_density_can_be_differentiated():
    u = jnp.array([[1.0, 0.5]])

    def transform(size):
        moments = jnp.array([[0.1, 0.0], [0.0, 0.05]])
        return FourierDensity(size * moments).log_laplace(u)[0]

    slope = jax.grad(transform)(1.0)
    step = 1e-6
    difference = (transform(1 + step) - transform(1 - step)) / (2 * step)
    assert float(slope) == pytest.approx(float(difference), rel=1e-8)


def test_what_is_no_density_is_refused(untyped):
    with pytest.raises(InvalidInput, match="belong to no density"):
        FourierDensity([[0.9, 0.0]])
    with pytest.raises(InvalidInput, match="at least the first"):
        FourierDensity(np.zeros((0, 2)))
    with pytest.raises(InvalidInput, match="mass 6.28"):
        FourierDensity.from_function(jnp.ones_like)
    with pytest.raises(InvalidInput, match="a function of angles"):
        FourierDensity.from_function(1.0)
    with pytest.raises(InvalidInput, match="angles holds nan"):
        FourierDensity([[0.1, 0.0]]).density([np.nan])
    with pytest.raises(InvalidInput, match="no positive mass"):
        FourierDensity.from_function(jnp.zeros_like, normalize=True)


def test_moments_on_the_circle_are_for_measures_on_it(density):
    with pytest.raises(Unsupported, match="Gaussian"):
        circle_moments(Gaussian(jnp.zeros(2), jnp.eye(2)), 3)
    with pytest.raises(Unsupported, match="in the plane"):
        circle_moments(TokenCloud(jnp.ones((1, 3))), 3)
    with pytest.raises(InvalidInput, match="norm 3"):
        circle_moments(TokenCloud([[3.0, 0.0]]), 3)
    absent = TokenCloud([[1.0, 0.0], [3.0, 0.0]], [1.0, 0.0])
    np.testing.assert_allclose(circle_moments(absent, 2), [[1, 0], [1, 0]])


@pytest.mark.slow
def test_softmax_at_one_token_of_the_circle_agrees_with_many_tokens(density, key):
    layer = Softmax(jnp.eye(2), jnp.eye(2), jnp.eye(2), beta=3.0)
    x = jnp.array([[0.0, 1.0]])
    sample = TokenCloud(density.sample(100_000, key=key))
    np.testing.assert_allclose(layer(density, x), layer(sample, x), atol=0.02)


def test_a_constant_function_is_the_uniform_density():
    uniform = FourierDensity.from_function(lambda angle: 1 / (2 * np.pi), 3)
    np.testing.assert_allclose(uniform.moments, 0, atol=1e-15)


def test_a_function_that_is_negative_somewhere_is_told_so():
    with pytest.raises(InvalidInput, match="the function is -0.318"):
        FourierDensity.from_function(lambda t: (1 + 3 * jnp.cos(t)) / (2 * jnp.pi))
