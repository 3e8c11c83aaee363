"""Modes of the density of a Poisson process: what few tokens per bandwidth do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import as_float_array, check, is_concrete
from meanformer.typing import ArrayLike

# Modes per bandwidth of many tokens: those of a stationary Gaussian process.
DENSE_LIMIT = float(np.sqrt(1.5) / (2 * np.pi))

# Rates and densities: up to 0.3 counted on some 10^7 bandwidths
# (`sample_poisson_modes`, standard errors 3e-5 to 7e-5), beyond by quadrature
# (`poisson_mode_integral`, with errors of 3e-5 at 0.4 and 1e-6 from 1 on).
# The first after zero is the expansion.
_COUNTED = {0.0: 0.0, 0.025: 0.02377, 0.05: 0.04512, 0.1: 0.08127, 0.15: 0.10950}
_COUNTED |= {0.2: 0.13139, 0.3: 0.16037}
_INTEGRATED = {0.4: 0.1766, 0.5: 0.18526, 0.6: 0.18977, 0.7: 0.19207, 0.8: 0.19324}
_INTEGRATED |= {0.9: 0.193833, 1.0: 0.194149, 1.1: 0.194328, 1.25: 0.194480}
_INTEGRATED |= {1.5: 0.194609, 1.75: 0.194678, 2.0: 0.194718, 2.5: 0.194765}
_INTEGRATED |= {3.0: 0.194792, 4.0: 0.194825, 5.0: 0.194845, 7.0: 0.194868}
_INTEGRATED |= {10.0: 0.1948848, 20.0: 0.1949045, 50.0: 0.1949163, 100.0: 0.1949203}


def poisson_mode_density(rate: ArrayLike) -> Float[Array, "..."]:
    r"""Modes per bandwidth of the density of a Poisson process on the line.

    $F(\lambda)$ is the mean number of modes, per unit of length, of
    $\sum_i e^{-(t - Y_i)^2/2}$ for a Poisson process $Y$ of the rate $\lambda$, that is
    with $\lambda$ tokens per bandwidth:
    $$F(\lambda) = \lambda - 2\lambda^2 + O(\lambda^3), \qquad
      F(\lambda) \to F(\infty) = \frac{\sqrt{3/2}}{2\pi} = 0.194924\ldots$$
    Lone tokens are modes, two at a distance below two bandwidths share one, and many
    fluctuate like a Gaussian process.

    Args:
        rate: mean numbers $\lambda \ge 0$ of tokens per bandwidth.

    Returns:
        One number for each: a monotone cubic through a table that this library
        computed, with errors of some 5e-5; beyond the rate 100 a tail like
        $1/\lambda$. Cost: one search in the table for each.
    """
    rate = as_float_array("rate", rate)
    if is_concrete(rate):
        check(bool((rate >= 0).all()), f"rate is {rate}; it must not be negative.")
    return _density(rate)


@jax.jit
def _density(rate: Float[Array, "..."]) -> Float[Array, "..."]:
    """The interpolant of the table, and its tail."""
    nodes, values, slopes = (jnp.asarray(part, rate.dtype) for part in _interpolant())
    last = nodes[-1]
    index = jnp.searchsorted(nodes, jnp.minimum(rate, last), side="right") - 1
    index = jnp.clip(index, 0, len(nodes) - 2)
    width = nodes[index + 1] - nodes[index]
    share = (jnp.minimum(rate, last) - nodes[index]) / width
    # The cubic between two values that is level at both, and what slopes add to it.
    step = values[index + 1] - values[index]
    inside = values[index] + step * share**2 * (3 - 2 * share)
    rise = slopes[index] * (1 - share) - slopes[index + 1] * share
    inside = inside + width * share * (1 - share) * rise
    beyond = DENSE_LIMIT - (DENSE_LIMIT - values[-1]) * last / jnp.maximum(rate, last)
    return jnp.where(rate > last, beyond, inside)


@functools.cache
def _interpolant() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes, values and slopes of the monotone cubic of Fritsch and Carlson.

    The first slope is known: lone tokens are modes.
    """
    from scipy.interpolate import PchipInterpolator

    table = np.array(sorted((_COUNTED | _INTEGRATED).items()))
    slopes = PchipInterpolator(*table.T).derivative()(table[:, 0])
    slopes[0] = 1.0
    return table[:, 0], table[:, 1], slopes
