import jax
import jax.numpy as jnp
import numpy as np

from meanformer.numerics.pair_sums.tilted_masses import exponent_scale, scaled_exp


def test_single_precision_powers_of_two_are_exact_to_one_unit_in_the_last_place():
    exponents = np.linspace(-126, 127, 1_000_003).astype(np.float32)
    power = np.asarray(scaled_exp(jnp.asarray(exponents)), np.float64)
    error = np.abs(power / np.exp2(exponents.astype(np.float64)) - 1)
    assert error.max() < np.finfo(np.float32).eps


def test_whole_exponents_give_exact_powers_of_two():
    exponents = np.arange(-126, 128)
    power = scaled_exp(jnp.asarray(exponents, jnp.float32))
    np.testing.assert_array_equal(power, np.exp2(exponents).astype(np.float32))


def test_tiny_powers_are_zero_and_huge_ones_stay_finite():
    for dtype in (jnp.float32, jnp.float64):
        power = scaled_exp(jnp.array([-jnp.inf, -1e9, 1e9, jnp.inf], dtype))
        np.testing.assert_array_equal(power[:2], 0)
        assert np.isfinite(power[2:]).all()
        assert (power[2:] > np.sqrt(jnp.finfo(dtype).max)).all()


def test_double_precision_is_the_exponential_itself():
    exponents = jnp.linspace(-700, 700, 1001)
    np.testing.assert_array_equal(scaled_exp(exponents), jnp.exp(exponents))
    assert exponent_scale(exponents.dtype) == 1.0


def test_the_derivative_is_the_exponential_over_its_scale():
    for dtype, tolerance in ((jnp.float32, 1e-6), (jnp.float64, 1e-14)):
        scale = exponent_scale(jnp.dtype(dtype))

        def exponential(x, scale=scale):
            return scaled_exp(scale * x)

        point = jnp.array(1.25, dtype)
        for derivative in (jax.grad(exponential), jax.jacfwd(jax.grad(exponential))):
            np.testing.assert_allclose(derivative(point), np.exp(1.25), rtol=tolerance)
