"""Log-mass and mean at one level, with the error bound of each query."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from meanformer.numerics.fourier.frames import AbstractFrame, box
from meanformer.numerics.fourier.levels import ERROR, Level
from meanformer.numerics.pairs import Pairs

# Units of rounding in an exponent or in a sum of the two ways.
ROUNDINGS = 16
# Some of the queries, so that their number is not bound.
MassAndMean = tuple[Float[Array, " _m"], Float[Array, "_m _v"]]


def token_masses(
    frame: AbstractFrame, weights: Float[Array, " n"], counted: Bool[Array, " n"]
) -> tuple[Float[Array, ""], Float[Array, " n"]]:
    r"""Return the largest $t$ and the masses $w_j e^{t_j - t}$."""
    exponents = jnp.where(counted, frame.log_tokens, -jnp.inf)
    top = lax.stop_gradient(exponents.max())
    top = jnp.where(jnp.isfinite(top), top, 0)
    return top, weights * jnp.exp(exponents - top)


def level_sum(
    frame: AbstractFrame,
    pairs: Pairs,
    values: Float[Array, "n v"],
    level: Level,
    counted: Bool[Array, " n"],
    *,
    is_moving: bool = False,
) -> tuple[MassAndMean, Float[Array, " m"]]:
    """Return log-mass and mean at a level, and the bound on each query's error.

    Args:
        frame: the frame of the level's kind.
        pairs: queries and tokens.
        values: what to average.
        level: modes and accuracy.
        counted: the tokens that matter.
        is_moving: whether the result is to be differentiated.
    """
    middle, width = middle_and_width(lax.stop_gradient(values), counted)
    relative = jnp.where(counted[:, None], values - middle[None, :], 0) / width
    top, masses = token_masses(frame, pairs.weights, counted)
    columns = jnp.concatenate([masses[None, :], masses[None, :] * relative.T])
    if is_moving:
        sums = frame.convolve_moving(pairs, columns, level)
    else:
        sums = frame.convolve(columns, level)
    error = ERROR * level.accuracy * lax.stop_gradient(masses.sum())
    found = sums[0] > error
    mass = jnp.where(found, sums[0], 1)
    # Where rounding has eaten the mass there is no bound.
    bound = jnp.where(found, error / (mass - error), jnp.inf) + own_error(frame, top)
    mean = middle[None, :] + width * (sums[1:] / mass[None, :]).T
    return (frame.log_queries + top + jnp.log(mass), mean), lax.stop_gradient(bound)


def middle_and_width(
    values: Float[Array, "n v"], counted: Bool[Array, " n"]
) -> tuple[Float[Array, " v"], Float[Array, ""]]:
    """Return the middle of the counted values, and their largest width, never zero."""
    middle, widths = box(values, counted)
    tiny = jnp.finfo(values.dtype).tiny
    return middle, jnp.maximum(jnp.max(widths, initial=0), tiny)


def own_error(frame: AbstractFrame, top: Float[Array, ""]) -> Float[Array, " m"]:
    """Return what the frame and its rounding do to the mass of each query."""
    unit = ROUNDINGS * jnp.finfo(top.dtype).eps
    return unit * (frame.exponents() + jnp.abs(top)) + frame.defect()


def sum_distance(
    first: MassAndMean, second: MassAndMean, width: Float[Array, ""]
) -> Float[Array, ""]:
    """Return the largest relative difference of two results, beyond their rounding."""
    unit = ROUNDINGS * jnp.finfo(width.dtype).eps

    def beyond(difference, size):
        return jnp.max(difference - unit * jnp.abs(size), initial=0)

    masses = beyond(jnp.abs(jnp.expm1(first[0] - second[0])), second[0])
    return jnp.maximum(masses, beyond(jnp.abs(first[1] - second[1]), second[1]) / width)
