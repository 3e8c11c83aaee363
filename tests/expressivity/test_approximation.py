"""Perceptrons built to an accuracy."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import meanformer as mf
from meanformer.errors import NotPeriodic
from meanformer.expressivity import (
    fourier_series,
    random_features,
    ridge_fourier,
    spline,
)
from meanformer.expressivity.approximation import held_out


def wave(x):
    return jnp.sin(2 * jnp.pi * x[:, 0])


def periodic(x):
    return jnp.exp(jnp.cos(x[:, 0] - 0.3) + 0.5 * jnp.sin(x[:, 0] + 2 * x[:, 1]))


def bump(x):
    return jnp.exp(-2 * jnp.sum(x**2, axis=1)) * jnp.cos(3 * x[:, 0])


@pytest.mark.parametrize(
    ("count", "error"), [(8, 0.0703776), (32, 0.00479210), (128, 0.000301090)]
)
def test_a_spline_has_its_tabulated_error(count, error):
    fit = spline(wave, np.linspace(0, 1, count + 1))
    assert fit.neurons == count
    x = jnp.linspace(0, 1, 100_001)[:, None]
    found = jnp.abs(fit.perceptron.apply(x)[:, 0] - wave(x)).max()
    np.testing.assert_allclose(found, error, rtol=1e-5)
    np.testing.assert_allclose(fit.largest_error, error, rtol=2e-3)


def test_a_spline_interpolates_several_components_and_ends_as_said():
    knots = np.array([0.0, 0.3, 1.0])
    fit = spline(lambda x: jnp.concatenate([x**2, 1 - x], axis=1), knots).perceptron
    found = fit.apply(jnp.asarray(knots)[:, None])
    expected = np.stack([knots**2, 1 - knots], axis=1)
    np.testing.assert_allclose(found, expected, atol=1e-15)
    left, right = fit.apply(jnp.array([[-2.0], [2.0]]))
    np.testing.assert_allclose(left, [0.0, 1.0], atol=1e-15)
    np.testing.assert_allclose(right, [1 + 1.3, -1.0], atol=1e-14)


@pytest.mark.parametrize(
    ("degree", "error"), [(2, 0.326), (4, 0.0189), (6, 9.7e-4), (8, 4.6e-5)]
)
def test_a_fourier_series_has_its_tabulated_tail(degree, error):
    box = mf.UniformBox(jnp.zeros(2), jnp.full(2, 2 * jnp.pi))
    series, x = fourier_series(periodic, degree, box), held_out(box)
    found = jnp.abs(series(jnp.asarray(x)) - periodic(x)).max()
    np.testing.assert_allclose(found, error, rtol=0.03)


def test_the_sizes_of_fourier_coefficients_add_up():
    box = mf.UniformBox(jnp.zeros(2), jnp.full(2, 2 * jnp.pi))
    weight = fourier_series(periodic, 12, box).weight
    np.testing.assert_allclose(weight, np.exp(1.5), rtol=1e-7)


def test_waves_become_a_perceptron_to_the_accuracy_asked_for():
    box = mf.UniformBox(jnp.array([1.0, -2.0]), jnp.array([1.0, -2.0]) + 2 * jnp.pi)
    series = fourier_series(periodic, 4, box)
    x = jnp.asarray(held_out(box))
    error = jnp.abs(series.perceptron(1e-2).apply(x)[:, 0] - series(x)).max()
    assert 1e-4 < error <= 1e-2
    fit = ridge_fourier(periodic, 4, box, accuracy=1e-2)
    tail = float(jnp.abs(series(x) - periodic(x)).max())
    assert fit.largest_error <= tail + 1e-2


def test_listed_frequencies_are_fitted_in_many_dimensions():
    box = mf.UniformBox(jnp.zeros(5), jnp.ones(5))
    rows = np.zeros((3, 5))
    rows[1, 0], rows[2, 3] = 1, 2

    def function(x):
        turns = 2 * jnp.pi * x
        return 1 + 0.5 * jnp.cos(turns[:, 0] + 0.2) - jnp.sin(2 * turns[:, 3])

    series, x = fourier_series(function, 1, box, frequencies=rows), held_out(box)
    np.testing.assert_allclose(series(jnp.asarray(x)), function(x), atol=1e-11)


@pytest.mark.parametrize(("count", "median"), [(32, 0.095), (128, 0.017)])
def test_random_features_fit_as_well_as_tabulated(count, median):
    box = mf.UniformBox(-jnp.ones(2), jnp.ones(2))
    fits = [random_features(bump, count, box, key=jr.key(seed)) for seed in range(5)]
    assert np.median([fit.mean_error for fit in fits]) < 2 * median
    assert all(fit.rank <= count + 1 for fit in fits)


def test_refinement_lowers_the_error_of_random_features():
    box, key = mf.UniformBox(-jnp.ones(2), jnp.ones(2)), jr.key(0)
    plain = random_features(bump, 32, box, key=key)
    moved = random_features(bump, 32, box, key=key, refinements=200)
    assert moved.mean_error < 0.7 * plain.mean_error


def test_a_jump_across_the_border_is_told():
    box = mf.UniformBox(jnp.zeros(1), jnp.ones(1))
    with pytest.warns(NotPeriodic, match="jumps by 1"):
        fourier_series(lambda x: x[:, 0], 3, box)


def test_what_cannot_be_fitted_is_refused():
    box, key = mf.UniformBox(-jnp.ones(2), jnp.ones(2)), jr.key(0)
    with pytest.raises(mf.InvalidInput, match="they must increase"):
        spline(wave, [0.0, 0.5, 0.5])
    with pytest.raises(mf.InvalidInput, match=r"not finite at \[0"):
        spline(lambda x: 1 / x[:, 0], [0.0, 0.5])
    with pytest.raises(mf.InvalidInput, match="activation is a polynomial"):
        random_features(bump, 8, box, key=key, activation=jnp.square)
    with pytest.raises(mf.InvalidInput, match="list some"):
        fourier_series(bump, 10, mf.UniformBox(-jnp.ones(5), jnp.ones(5)))
    assert random_features(bump, 8, box, key=key, activation=jax.nn.gelu).neurons == 8
