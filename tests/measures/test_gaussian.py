"""Gaussian measures: moments, tilts, the entropic self-plan, sampling, bad input."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from meanformer.errors import InvalidInput, PrecisionWarning, Unsupported
from meanformer.measures import Gaussian, entropic_factor, quadrature

MEAN, SPREAD = np.array([0.3, -0.4]), np.array([[1.0, 0.3], [0.3, 0.6]])
LINE = np.outer([0.8, -0.6], [0.8, -0.6])
FORM = np.array([[0.3, -0.46], [0.54, 0.66]])
TILTS = jnp.array([[0.3, -0.7], [2.0, 1.0], [0.0, 0.0]])
PRECISION = np.array([[0.8, 0.2], [0.2, 1.5]])


def not_needed(cloud):
    raise AssertionError("a Gaussian knows its potentials in closed form")


def nodes_of(spread, order=40):
    nodes, masses = np.polynomial.hermite_e.hermegauss(order)
    grid = np.stack(np.meshgrid(nodes, nodes), axis=-1).reshape(-1, 2)
    values, vectors = np.linalg.eigh(spread)
    points = MEAN + grid @ (vectors * np.sqrt(np.maximum(values, 0))).T
    weights = np.outer(masses, masses).ravel()
    return points, weights / weights.sum()


@pytest.mark.parametrize("spread", [SPREAD, LINE], ids=["regular", "singular"])
def test_log_laplace_transform_and_tilted_mean_are_integrals(spread):
    gaussian = Gaussian(MEAN, spread)
    points, weights = nodes_of(spread)
    masses = weights * np.exp(np.asarray(TILTS) @ points.T)
    log_mass, mean = gaussian.tilted_mass_and_mean(TILTS)
    np.testing.assert_allclose(log_mass, np.log(masses.sum(axis=1)), atol=1e-12)
    expected = masses @ points / masses.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(mean, expected, atol=1e-12)


def test_moments_are_the_parameters():
    gaussian = Gaussian(MEAN, SPREAD)
    np.testing.assert_array_equal(gaussian.mean(), MEAN)
    np.testing.assert_array_equal(gaussian.covariance(), SPREAD)
    expected = SPREAD + np.outer(MEAN, MEAN)
    np.testing.assert_allclose(gaussian.second_moment(), expected, atol=1e-15)
    assert gaussian.dimension == 2


@pytest.mark.parametrize("spread", [SPREAD, LINE], ids=["regular", "singular"])
def test_a_quadratic_tilt_is_the_gaussian_of_the_product(spread):
    log_mass, tilted = Gaussian(MEAN, spread).quadratic_tilt(jnp.asarray(PRECISION))
    points, weights = nodes_of(spread)
    masses = weights * np.exp(-0.5 * np.sum(points @ PRECISION * points, axis=1))
    shares = masses / masses.sum()
    np.testing.assert_allclose(log_mass, np.log(masses.sum()), atol=1e-10)
    np.testing.assert_allclose(tilted.mean(), shares @ points, atol=1e-10)
    covariance = np.cov(points.T, aweights=shares, ddof=0)
    np.testing.assert_allclose(tilted.covariance(), covariance, atol=1e-9)


def test_a_steep_quadratic_tilt_keeps_a_symmetric_covariance():
    steep = jnp.diag(jnp.array([1e14, 1e-3]))
    _, tilted = Gaussian(MEAN, SPREAD).quadratic_tilt(steep)
    covariance = np.asarray(tilted.covariance())
    np.testing.assert_array_equal(covariance, covariance.T)
    assert np.isfinite(covariance).all()


@pytest.mark.parametrize("spread", [SPREAD, LINE], ids=["regular", "singular"])
@pytest.mark.parametrize("form", [FORM, FORM @ FORM.T, -3 * np.eye(2)])
def test_the_entropic_covariance_solves_its_equation(spread, form):
    root = Gaussian(MEAN, spread).root()
    factor = np.asarray(entropic_factor(root, jnp.asarray(form)))
    found = factor @ factor.T
    rebuilt = found + found @ form @ spread @ form.T @ found
    np.testing.assert_allclose(rebuilt, spread, atol=1e-13)
    assert np.linalg.eigvalsh((found + found.T) / 2).min() > -1e-14


def test_a_factor_stands_for_the_covariance():
    factor = np.array([[1.0, 0.0, 0.5], [0.3, -0.2, 0.1]])
    one, other = Gaussian(MEAN, factor=factor), Gaussian(MEAN, factor @ factor.T)
    np.testing.assert_allclose(one.covariance(), other.covariance(), atol=1e-15)
    for answer in (
        lambda mu: mu.entropic_tilt(jnp.asarray(FORM), not_needed).covariance(),
        lambda mu: mu.quadratic_tilt(jnp.asarray(PRECISION))[0],
        lambda mu: mu.quadratic_tilt(jnp.asarray(PRECISION))[1].mean(),
        lambda mu: mu.quadratic_tilt(jnp.asarray(PRECISION))[1].covariance(),
        lambda mu: mu.log_laplace(TILTS),
        lambda mu: mu.tilted_mean(TILTS),
    ):
        np.testing.assert_allclose(answer(one), answer(other), atol=1e-14)
    points = one.sample(20_000, key=jr.key(0))
    np.testing.assert_allclose(np.cov(points.T), other.covariance(), atol=0.03)


def test_a_gaussian_has_a_covariance_or_a_factor():
    for arguments in ({}, {"covariance": SPREAD, "factor": np.eye(2)}):
        with pytest.raises(InvalidInput, match="either its covariance or a factor"):
            Gaussian(MEAN, **arguments)
    with pytest.raises(InvalidInput, match="factor has shape"):
        Gaussian(MEAN, factor=np.ones((3, 1)))


def test_the_entropic_tilt_has_a_plan_with_equal_marginals():
    # The mean of y given x is m + MB(x - m): its law and the residual make up S.
    tilted = Gaussian(MEAN, SPREAD).entropic_tilt(jnp.asarray(FORM), not_needed)
    conditional = np.asarray(tilted.covariance())
    slope = conditional @ FORM
    np.testing.assert_allclose(
        slope @ SPREAD @ slope.T + conditional, SPREAD, atol=1e-14
    )
    at_mean = tilted.tilted_mean(jnp.asarray(FORM @ MEAN)[None])
    np.testing.assert_allclose(at_mean[0], MEAN, atol=1e-15)


def test_a_huge_form_leaves_a_finite_plan():
    tilted = Gaussian(MEAN, SPREAD).entropic_tilt(jnp.asarray(1e9 * FORM), not_needed)
    assert np.isfinite(tilted.covariance()).all()


def test_samples_have_the_moments(key):
    samples = np.asarray(Gaussian(MEAN, SPREAD).sample(40_000, key=key))
    np.testing.assert_allclose(samples.mean(axis=0), MEAN, atol=0.02)
    np.testing.assert_allclose(np.cov(samples.T), SPREAD, atol=0.02)


def test_samples_of_a_singular_gaussian_lie_on_its_line(key):
    samples = np.asarray(Gaussian(MEAN, LINE).sample(100, key=key)) - MEAN
    np.testing.assert_allclose(samples @ [0.6, 0.8], 0, atol=1e-7)


def test_gaussians_work_under_jit_vmap_and_grad():
    def total(scale):
        gaussian = Gaussian(jnp.asarray(MEAN), scale * jnp.asarray(SPREAD))
        return gaussian.quadratic_tilt(jnp.asarray(PRECISION))[0]

    scales = jnp.array([0.5, 2.0])
    slopes = jax.jit(jax.vmap(jax.grad(total)))(scales)
    differences = [(total(s + 1e-6) - total(s - 1e-6)) / 2e-6 for s in scales]
    np.testing.assert_allclose(slopes, differences, rtol=1e-7)


def test_single_precision_stays_single():
    gaussian = Gaussian(
        jnp.asarray(MEAN, jnp.float32), jnp.asarray(SPREAD, jnp.float32)
    )
    tilts = TILTS.astype(jnp.float32)
    assert gaussian.log_laplace(tilts).dtype == jnp.float32
    assert gaussian.tilted_mean(tilts).dtype == jnp.float32
    precision = jnp.asarray(PRECISION, jnp.float32)
    log_mass, tilted = gaussian.quadratic_tilt(precision)
    assert log_mass.dtype == tilted.covariance().dtype == jnp.float32


BAD = {
    "mean a matrix": (
        lambda: Gaussian(np.eye(2), np.eye(2)),
        r"mean has shape \(2, 2\); it must be \(any,\)",
    ),
    "mean with holes": (
        lambda: Gaussian([0.0, np.nan], np.eye(2)),
        r"mean holds nan at index \(1,\)",
    ),
    "covariance too large": (
        lambda: Gaussian([0.0, 0.0], np.eye(3)),
        r"covariance has shape \(3, 3\); it must be \(2, 2\)",
    ),
    "covariance infinite": (
        lambda: Gaussian([0.0, 0.0], np.full((2, 2), np.inf)),
        "covariance holds inf",
    ),
    "covariance indefinite": (
        lambda: Gaussian([0.0, 0.0], [[1.0, 2.0], [2.0, 1.0]]),
        "covariance has the eigenvalue -1; it must be positive semi-definite",
    ),
    "covariance asymmetric": (
        lambda: Gaussian([0.0, 0.0], [[1.0, 2.0], [0.0, 1.0]]),
        r"covariance differs from its transpose by 2; it must be symmetric",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_gaussian_refuses(case):
    build, message = BAD[case]
    with pytest.raises(InvalidInput, match=message):
        build()


def test_a_small_negative_eigenvalue_is_clipped_with_a_warning():
    spread = np.diag([1.0, -1e-10])
    with pytest.warns(PrecisionWarning, match="which is taken as zero"):
        gaussian = Gaussian([0.0, 0.0], spread)
    np.testing.assert_allclose(gaussian.covariance(), np.diag([1.0, 0.0]), atol=1e-15)


def test_a_gaussian_has_no_largest_score():
    with pytest.raises(Unsupported, match="support is unbounded; use a TokenCloud"):
        Gaussian(MEAN, SPREAD).maximal_mean(TILTS, 0.0)


def test_a_kernel_mean_needs_a_cloud():
    with pytest.raises(Unsupported, match="Gaussian has no closed form .* sigmoid"):
        Gaussian(MEAN, SPREAD).kernel_mean(TILTS, jax.nn.sigmoid)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_computed_in_single(key, dtype):
    half = Gaussian(jnp.asarray(MEAN, dtype), jnp.asarray(SPREAD, dtype))
    single = Gaussian(
        half.mean().astype(jnp.float32), half.covariance().astype(jnp.float32)
    )
    for read in (lambda g: g.sample(5, key=key), lambda g: quadrature(g, 3).points):
        assert read(half).dtype == dtype
        np.testing.assert_array_equal(read(half), read(single).astype(dtype))


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_a_compiled_factor_is_that_of_the_plain_call(scale):
    gaussian, precision = Gaussian(MEAN, SPREAD), scale * jnp.asarray(PRECISION)
    log_mass, rest = gaussian.quadratic_tilt(precision)
    compiled = eqx.filter_jit(Gaussian.quadratic_tilt)(gaussian, precision)
    np.testing.assert_allclose(compiled[0], log_mass, rtol=1e-12)
    np.testing.assert_allclose(compiled[1].mean(), rest.mean(), rtol=1e-12)


def test_a_factor_that_is_not_integrable_fails_also_when_compiled():
    gaussian, precision = Gaussian(MEAN, SPREAD), -2 * jnp.asarray(PRECISION)
    message = "not integrable against this Gaussian"
    with pytest.raises(Unsupported, match=message):
        gaussian.quadratic_tilt(precision)
    with pytest.raises(RuntimeError, match=message):
        eqx.filter_jit(Gaussian.quadratic_tilt)(gaussian, precision)


def test_the_check_of_a_compiled_factor_can_be_batched_and_differentiated():
    gaussian = Gaussian(MEAN, SPREAD)

    def mass(scale):
        return gaussian.quadratic_tilt(scale * jnp.asarray(PRECISION))[0]

    scales = jnp.array([-0.3, 0.5])
    slopes = jax.jit(jax.vmap(jax.grad(mass)))(scales)
    expected = (jax.vmap(mass)(scales + 1e-6) - jax.vmap(mass)(scales - 1e-6)) / 2e-6
    np.testing.assert_allclose(slopes, expected, rtol=1e-8)
