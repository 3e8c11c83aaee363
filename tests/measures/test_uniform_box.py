"""The uniform box and the truncated normal law it becomes under L2 attention."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.integrate
import scipy.stats

from meanformer.errors import InvalidInput, Unsupported
from meanformer.measures import UniformBox
from meanformer.measures.box import TruncatedNormalBox

BOX = UniformBox([-1.0, 0.0, 2.0], [1.0, 3.0, 2.5])
BELL = TruncatedNormalBox([-1.0, 0.5, 2.0], [1.0, 3.0, 2.5], [2.0, -1.0, 0.0])


def test_box_is_given_by_the_langevin_function(key):
    u = 3 * jr.normal(key, (6, 3))
    centre, half = np.array([0.0, 1.5, 2.25]), np.array([1.0, 1.5, 0.25])
    z = np.asarray(u) * half
    expected = np.asarray(u) @ centre + np.log(np.sinh(z) / z).sum(axis=1)
    np.testing.assert_allclose(BOX.log_laplace(u), expected, rtol=1e-12)
    expected = centre + half * (1 / np.tanh(z) - 1 / z)
    np.testing.assert_allclose(BOX.tilted_mean(u), expected, rtol=1e-12)


def test_moments_of_the_box():
    np.testing.assert_allclose(BOX.mean(), [0, 1.5, 2.25])
    np.testing.assert_allclose(BOX.covariance(), np.diag([4, 9, 0.25]) / 12)


@pytest.mark.parametrize("measure", [BOX, BELL])
def test_moments_are_derivatives_of_the_log_laplace_transform(measure):
    def log_laplace(u):
        return measure.log_laplace(u[None, :])[0]

    gradient, hessian = jax.jit(
        lambda u: (jax.grad(log_laplace)(u), jax.hessian(log_laplace)(u))
    )(jnp.zeros(3))
    np.testing.assert_allclose(gradient, measure.mean(), rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(hessian, measure.covariance(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("measure", [BOX, BELL])
@pytest.mark.parametrize("size", [1e-6, 1.0, 30.0, 1e5])
def test_gradient_of_the_log_laplace_transform_is_the_tilted_mean(key, measure, size):
    u = size * jr.normal(key, (4, 3))
    gradient = jax.jit(jax.grad(lambda u: measure.log_laplace(u).sum()))(u)
    np.testing.assert_allclose(gradient, measure.tilted_mean(u), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("measure", [BOX, BELL])
def test_gradient_in_the_corners_agrees_with_finite_differences(measure):
    u = jnp.array([[0.4, -3.0, 12.0]])

    def log_laplace(low):
        return eqx.tree_at(lambda box: box.low, measure, low).log_laplace(u)[0]

    gradient = jax.grad(log_laplace)(measure.low)
    for i in range(3):
        step = jnp.zeros(3).at[i].set(1e-5)
        above, below = (log_laplace(measure.low + sign * step) for sign in (1, -1))
        np.testing.assert_allclose(gradient[i], (above - below) / 2e-5, rtol=1e-7)


@pytest.mark.parametrize("measure", [BOX, BELL])
def test_samples_have_the_moments_of_the_measure(key, measure):
    count = 40_000
    points = measure.sample(count, key=key)
    assert points.shape == (count, 3)
    assert (points.min(0) >= measure.low).all()
    assert (points.max(0) <= measure.high).all()
    deviations = 5 * np.sqrt(np.diag(measure.covariance()) / count)
    assert (np.abs(points.mean(0) - measure.mean()) < deviations).all()
    scales = np.sqrt(np.diag(measure.covariance()))
    error = np.cov(points.T) - measure.covariance()
    assert (np.abs(error) < 5 * np.sqrt(2 / count) * np.outer(scales, scales)).all()


@pytest.mark.parametrize(
    ("low", "high", "precision"),
    [
        (-1.0, 2.0, 3.0),
        (4.0, 50.0, 1.0),
        (-3.0, 2.0, -2.0),
        (-1e3, 1e5, 1.0),
        (0, 1, 0),
    ],
)
def test_samples_follow_the_distribution_function(key, low, high, precision):
    law = TruncatedNormalBox([low], [high], [precision])
    points = np.asarray(law.sample(20_000, key=key)[:, 0])

    def share_below(end):
        part = TruncatedNormalBox([low], [end], [precision])
        log_ratio = (
            part.log_mass() - law.log_mass() + np.log((end - low) / (high - low))
        )
        return float(jnp.exp(log_ratio))

    for level in (0.01, 0.2, 0.5, 0.9, 0.999):
        error = share_below(float(np.quantile(points, level))) - level
        assert abs(error) < 5 * np.sqrt(level * (1 - level) / len(points)) + 1e-4


def test_truncated_normal_agrees_with_scipy():
    law = TruncatedNormalBox([-0.5, 3.0], [2.0, 9.0], [4.0, 1.0])
    expected = [
        scipy.stats.truncnorm(-1.0, 4.0, scale=0.5),
        scipy.stats.truncnorm(3.0, 9.0),
    ]
    np.testing.assert_allclose(law.mean(), [e.mean() for e in expected], rtol=1e-12)
    variances = np.diag(law.covariance())
    np.testing.assert_allclose(variances, [e.var() for e in expected], rtol=1e-9)


@pytest.mark.parametrize("precision", [0.0, 2.0, -3.0])
def test_quadratic_tilt_agrees_with_adaptive_integration(precision):
    box = UniformBox([-0.3], [1.2])
    log_mass, tilted = box.quadratic_tilt(jnp.array([[precision]]))

    def integral(power, u):
        return scipy.integrate.quad(
            lambda y: y**power * np.exp(u * y - precision * y**2 / 2) / 1.5,
            -0.3,
            1.2,
            epsabs=1e-14,
        )[0]

    assert float(log_mass) == pytest.approx(np.log(integral(0, 0)), abs=1e-13)
    for u in (-4.0, 0.5, 9.0):
        log_laplace, mean = tilted.tilted_mass_and_mean(jnp.array([[u]]))
        expected = np.log(integral(0, u) / integral(0, 0))
        np.testing.assert_allclose(log_laplace, expected, rtol=1e-12)
        np.testing.assert_allclose(
            mean[0, 0], integral(1, u) / integral(0, u), rtol=1e-12
        )


def test_quadratic_tilts_add_up(key):
    first, second = (jnp.diag(jr.normal(k, (3,))) for k in jr.split(key))
    mass_one, once = BOX.quadratic_tilt(first)
    mass_two, twice = once.quadratic_tilt(second)
    mass, tilted = BOX.quadratic_tilt(first + second)
    np.testing.assert_allclose(mass_one + mass_two, mass, rtol=1e-12)
    np.testing.assert_allclose(twice.mean(), tilted.mean(), rtol=1e-12)


def test_log_laplace_transform_keeps_its_digits_far_from_the_origin():
    # The law is nearly exponential with rate 1e6 near 1e6, and so is its transform.
    law = TruncatedNormalBox([1e6], [1e6 + 1], [1.0])
    u = jnp.array([[1e5]])
    expected = 1e11 - np.log1p(-0.1)
    np.testing.assert_allclose(law.log_laplace(u), expected, rtol=1e-15)
    np.testing.assert_allclose(law.tilted_mean(u) - 1e6, 1 / 9e5, rtol=1e-3)
    without_shift = law.log_laplace(u) - 1e6 * u[:, 0]
    np.testing.assert_allclose(without_shift, -np.log1p(-0.1), atol=1e-4)


def test_quadratic_tilts_that_are_not_diagonal_are_refused_with_advice():
    with pytest.raises(
        Unsupported, match=r"diagonal; use quadrature\(measure, order\)"
    ):
        BOX.quadratic_tilt(jnp.ones((3, 3)))


def test_quadratic_tilt_is_checked_under_jit_too():
    @eqx.filter_jit
    def mean(precision):
        return BOX.quadratic_tilt(precision)[1].mean()

    expected = BOX.quadratic_tilt(2 * jnp.eye(3))[1].mean()
    np.testing.assert_allclose(mean(2 * jnp.eye(3)), expected, rtol=1e-14)
    with pytest.raises(RuntimeError, match="diagonal"):
        mean(jnp.ones((3, 3)))


def test_maximal_mean_is_a_corner_or_the_mean_of_the_face_that_ties():
    u = jnp.array([[1.0, -1.0, 2.0], [0.0, 3.0, -1.0], [1e-9, 0.0, 0.0]])
    expected = [[1.0, 0.0, 2.5], [0.0, 3.0, 2.0], [0.0, 1.5, 2.25]]
    np.testing.assert_allclose(BOX.maximal_mean(u, 1e-7), expected)
    bell = BELL.maximal_mean(jnp.array([[0.0, 0.0, 1.0]]), 0.0)
    np.testing.assert_allclose(bell[0, :2], BELL.mean()[:2])


def test_large_tilts_tend_to_the_maximal_mean():
    u = jnp.array([[1.0, -2.0, 0.5]])
    for measure in (BOX, BELL):
        best = measure.maximal_mean(u, 0.0)
        gap = measure.tilted_mean(1e6 * u) - best
        np.testing.assert_allclose(gap, -1e-6 / u, rtol=2e-5)


def test_linear_mean_comes_from_the_second_moment(key):
    u = jr.normal(key, (4, 3))
    mass, moment = BOX.linear_mean(u)
    np.testing.assert_allclose(mass, u @ BOX.mean(), rtol=1e-14)
    second = np.diag(BOX.covariance()) * np.eye(3) + np.outer(BOX.mean(), BOX.mean())
    np.testing.assert_allclose(moment, np.asarray(u) @ second, rtol=1e-13)


@pytest.mark.parametrize("measure", [BOX, BELL])
def test_single_precision_has_five_digits(key, measure):
    u = 4 * jr.normal(key, (5, 3))
    single = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), measure)
    values = single.tilted_mass_and_mean(u.astype(jnp.float32))
    for value, reference in zip(values, measure.tilted_mass_and_mean(u), strict=True):
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(value, reference, rtol=1e-5, atol=1e-5)
    assert single.sample(3, key=key).dtype == jnp.float32
    assert single.covariance().dtype == jnp.float32


@pytest.mark.parametrize("measure", [BOX, BELL])
def test_jit_and_vmap_agree_with_the_plain_call(key, measure):
    u = 4 * jr.normal(key, (5, 3))
    plain = measure.tilted_mean(u)
    np.testing.assert_allclose(
        eqx.filter_jit(measure.tilted_mean)(u), plain, rtol=1e-13
    )
    rows = jax.vmap(lambda row: measure.tilted_mean(row[None, :])[0])(u)
    np.testing.assert_allclose(rows, plain, rtol=1e-13)


@pytest.mark.parametrize("measure", [BOX, BELL])
@pytest.mark.parametrize("size", [0.0, 1e150, -1e150])
def test_extreme_tilts_give_finite_values_and_gradients(measure, size):
    u = jnp.full((1, 3), size)
    log_laplace, mean = measure.tilted_mass_and_mean(u)
    jacobian = jax.jit(jax.jacfwd(measure.tilted_mean))(u)
    for values in (log_laplace, mean, jacobian):
        assert np.isfinite(values).all()


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        (
            [0.0, 1.0],
            [1.0, 1.0],
            "low is 1.0 and high 1.0 at index 1; low must",
        ),
        ([0.0], [1.0, 2.0], r"low has shape \(1,\) and high \(2,\)"),
        (0.0, 1.0, r"low has shape \(\); it must be \(any,\)"),
        ([0.0], [np.inf], "high holds inf"),
        ([np.nan], [1.0], "low holds nan"),
    ],
)
def test_bad_corners_are_refused_in_one_sentence(untyped, low, high, message):
    with pytest.raises(InvalidInput, match=message):
        UniformBox(low, high)


def test_bad_precisions_are_refused_in_one_sentence():
    with pytest.raises(InvalidInput, match=r"precision has shape \(2,\)"):
        TruncatedNormalBox([0.0], [1.0], [1.0, 2.0])
    with pytest.raises(InvalidInput, match="precision holds inf"):
        TruncatedNormalBox([0.0], [1.0], [np.inf])


def test_integer_corners_become_floating_point():
    assert UniformBox([0, 1], [2, 3]).low.dtype == jnp.float64
