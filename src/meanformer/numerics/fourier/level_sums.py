"""Log-mass and mean at one level, with the amplification of each query."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from meanformer.numerics.fourier.frames import AbstractFrame, box
from meanformer.numerics.fourier.levels import Level
from meanformer.numerics.pair_sums.pairs import Pairs

# Units of rounding in a sum of either way.
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
    """Return log-mass and mean at a level, and each query's amplification.

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
    total = lax.stop_gradient(masses.sum())
    # Elsewhere rounding has eaten the mass.
    found = sums[0] > ROUNDINGS * jnp.finfo(total.dtype).eps * total
    mass = jnp.where(found, sums[0], 1)
    mean = middle[None, :] + width * (sums[1:] / mass[None, :]).T
    amplification = jnp.where(found, total / lax.stop_gradient(mass), jnp.inf)
    return (frame.log_queries + top + jnp.log(mass), mean), amplification


def middle_and_width(
    values: Float[Array, "n v"], counted: Bool[Array, " n"]
) -> tuple[Float[Array, " v"], Float[Array, ""]]:
    """Return the middle of the counted values, and their largest width, never zero."""
    middle, widths = box(values, counted)
    tiny = jnp.finfo(values.dtype).tiny
    return middle, jnp.maximum(jnp.max(widths, initial=0), tiny)


def sum_distances(
    first: MassAndMean, second: MassAndMean, width: Float[Array, ""]
) -> Float[Array, " _m"]:
    """Return the relative difference of each query's results, beyond their rounding."""
    unit = ROUNDINGS * jnp.finfo(width.dtype).eps

    def beyond(difference, size):
        return difference - unit * jnp.abs(size)

    masses = beyond(jnp.abs(jnp.expm1(first[0] - second[0])), second[0])
    means = beyond(jnp.abs(first[1] - second[1]), second[1]) / width
    largest = jnp.maximum(masses, jnp.max(means, axis=1, initial=0))
    return jnp.where(jnp.isnan(largest), jnp.inf, jnp.maximum(largest, 0))
