r"""Trigonometric series of densities on the circle, by their moments.

A probability density on the circle is given by its moments
$(\int\cos k\theta, \int\sin k\theta)$, $k = 1, \dots, K$:
$$\varrho(\theta) = \frac{1}{2\pi}\sum_{|k|\le K} c_k e^{ik\theta}, \qquad
  c_k = \int e^{-ik\theta}\,\mathrm{d}\mu, \qquad c_0 = 1.$$
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Complex, Float

from meanformer.numerics.special.zonal import zonal_slopes


class TiltSums(NamedTuple):
    r"""Integrals of $e^{\langle u, y\rangle}$ and of $y$ times it, over $I_0(|u|)$.

    Attributes:
        mass: the first.
        moment: the second, as a number of the complex plane.
    """

    mass: Float[Array, " m"]
    moment: Complex[Array, " m"]


def coefficients_of(moments: Float[Array, "k 2"]) -> Complex[Array, " k"]:
    r"""Return $c_1, \dots, c_K$."""
    return jax.lax.complex(moments[:, 0], -moments[:, 1])


def moments_of(coefficients: Complex[Array, " k"]) -> Float[Array, "k 2"]:
    r"""Return the moments from $c_1, \dots, c_K$."""
    return jnp.stack([coefficients.real, -coefficients.imag], axis=1)


def grid_angles(count: int, dtype: jnp.dtype) -> Float[Array, " n"]:
    """Return equispaced angles, from zero on."""
    return jnp.asarray(2 * np.pi / count * np.arange(count), dtype)


@functools.partial(jax.jit, static_argnums=1)
def on_grid(moments: Float[Array, "k 2"], count: int) -> Float[Array, " n"]:
    """Return the density at equispaced angles, more than two for each mode."""
    waves = coefficients_of(moments)
    series = jnp.concatenate([jnp.ones((1,), waves.dtype), waves])
    return jnp.fft.irfft(series, n=count, norm="forward") / (2 * np.pi)


@functools.partial(jax.jit, static_argnums=1)
def from_grid(values: Float[Array, " n"], modes: int) -> Complex[Array, " k"]:
    r"""Return $\int e^{-ik\theta}f\,\mathrm{d}\theta$ for $k = 0, \dots, K$.

    They are the trapezoidal sums of the values at equispaced angles, at least two for
    each mode.
    """
    return 2 * np.pi * jnp.fft.rfft(values, norm="forward")[: modes + 1]


@jax.jit
def at_angles(
    moments: Float[Array, "k 2"], angles: Float[Array, " m"]
) -> Float[Array, " m"]:
    """Return the density at any angles."""
    degrees = jnp.arange(1, len(moments) + 1, dtype=angles.dtype)
    turns = angles[:, None] * degrees[None, :]
    waves = jnp.cos(turns) @ moments[:, 0] + jnp.sin(turns) @ moments[:, 1]
    return (1 + 2 * waves) / (2 * np.pi)


@jax.jit
def share_below(
    moments: Float[Array, "k 2"], angles: Float[Array, " m"]
) -> Float[Array, " m"]:
    r"""Return the mass of $[0, \theta]$ for each angle, one more for each turn."""
    degrees = jnp.arange(1, len(moments) + 1, dtype=angles.dtype)
    turns = angles[:, None] * degrees[None, :]
    scaled = moments / degrees[:, None]
    waves = jnp.sin(turns) @ scaled[:, 0] + (1 - jnp.cos(turns)) @ scaled[:, 1]
    return (angles + 2 * waves) / (2 * np.pi)


def tilt_sums(moments: Float[Array, "k 2"], tilts: Complex[Array, " m"]) -> TiltSums:
    r"""Integrate tilts $e^{\langle u, y\rangle}$ against a density.

    With $u = re^{i\varphi}$ and $R_k = e^{ik\varphi}I_k(r)/I_0(r)$,
    $$\frac{1}{I_0}\int e^{\langle u,y\rangle} = \sum_k R_k c_k, \qquad
      \frac{1}{I_0}\int e^{\langle u,y\rangle}\,y = \sum_k R_k c_{k-1}.$$

    Args:
        moments: those of the density.
        tilts: the tilts, as numbers of the complex plane.

    Returns:
        The sums; $O(mK)$ time and memory.
    """
    series = coefficients_of(moments)
    ratios = _ratios(len(moments), tilts)
    mass = 1 + 2 * (series @ ratios[:-1]).real
    moment = (
        ratios[0] + series @ ratios[1:] + jnp.conj(series[0] + series[1:] @ ratios[:-2])
    )
    return TiltSums(mass, moment)


def ring_tilt_sums(
    moments: Float[Array, "k 2"], first: Complex[Array, ""], count: int
) -> TiltSums:
    r"""Integrate tilts of one length, at equispaced angles, by fast transforms.

    Args:
        moments: those of the density.
        first: the first tilt; the others follow it counter-clockwise.
        count: how many there are, more than two for each mode and two others.

    Returns:
        The sums; $O(N\log N)$ time.
    """
    series = coefficients_of(moments)
    ratios = _ratios(len(moments), first[None])[:, 0]
    one = jnp.ones((1,), series.dtype)
    mass = jnp.fft.irfft(
        jnp.concatenate([one, ratios[:-1] * series]), n=count, norm="forward"
    )
    rising = jnp.concatenate([jnp.conj(series[:1]), ratios[:1], ratios[1:] * series])
    falling = jnp.conj(ratios[:-2] * series[1:])
    gap = jnp.zeros((count - len(rising) - len(falling),), series.dtype)
    both = jnp.concatenate([rising, gap, falling[::-1]])
    return TiltSums(mass, jnp.fft.ifft(both, norm="forward"))


def _ratios(modes: int, tilts: Complex[Array, " m"]) -> Complex[Array, "k m"]:
    """Return the ratios R of the first degree to one more than there are modes."""
    square = tilts.real**2 + tilts.imag**2
    slopes = zonal_slopes(2, square, modes + 1)
    return jnp.cumprod(tilts[None, :] * slopes.astype(tilts.dtype), axis=0)
