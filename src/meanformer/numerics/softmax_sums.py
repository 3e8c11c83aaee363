"""Log-mass and mean under the exponential of the score, with their derivative."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.numerics.exponential import exponent_scale
from meanformer.numerics.matrices import matmul
from meanformer.numerics.moving import only_moving
from meanformer.numerics.pairs import Pairs
from meanformer.numerics.terms import (
    Terms,
    Tokens,
    as_terms,
    common_dtype,
    no_masses,
    scaled,
    scores_of_tile,
    summed,
)
from meanformer.numerics.tiles import fold_tiles
from meanformer.numerics.tilted_masses import (
    Shifted,
    exponent_caps,
    sum_tilted_masses,
    tilted_factors,
)


@partial(jax.jit, static_argnames="block_size")
def softmax_sum(
    pairs: Pairs, values: Float[Array, "n v"], *, block_size: int | str
) -> tuple[Float[Array, " m"], Float[Array, "m v"]]:
    """Log-mass and mean; see `AbstractPairSums.softmax`."""
    terms = as_terms(pairs, values)
    scale = exponent_scale(terms.tilts.dtype)
    shift, total = tilted_masses(scaled(terms, scale), block_size)
    log_mass, mean = log_mass_and_mean(shift / scale, total)
    dtype = common_dtype(pairs, values)
    return log_mass.astype(dtype), mean.astype(dtype)


def log_mass_and_mean(
    shift: Float[Array, " m"], total: Float[Array, "m c"]
) -> tuple[Float[Array, " m"], Float[Array, "m v"]]:
    """Log-mass and mean from mass and moments relative to the exponential of shifts."""
    is_empty = total[:, 0] == 0
    # Scores that overflow show as NaN, which the exponential need not keep.
    is_spoilt = jnp.isnan(shift) | (shift == jnp.inf)
    total = jnp.where(is_spoilt[:, None], jnp.nan, total)
    mass = jnp.where(is_empty, 1, total[:, 0])
    log_mass = jnp.where(is_empty, -jnp.inf, shift + jnp.log(mass))
    return log_mass, total[:, 1:] / mass[:, None]


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def tilted_masses(terms: Terms, block_size: int | str) -> Shifted:
    """Sum tilted masses relative to shifts that are constant for differentiation."""
    return sum_tilted_masses(terms, block_size)


def tilted_masses_jvp(block_size, primals, tangents):
    """Differentiate the tilted masses at fixed shifts."""
    (terms,), (moving,) = primals, tangents
    moving = only_moving(moving)
    shift, total = tilted_masses(terms, block_size)
    moved = moved_masses(terms, moving, shift, block_size)
    return (shift, total), (jnp.zeros_like(shift), moved)


tilted_masses.defjvp(tilted_masses_jvp, symbolic_zeros=True)


def moved_masses(
    terms: Terms, moving: Terms, shift: Float[Array, " m"], block_size: int | str
) -> Float[Array, "m c"]:
    r"""Derivative of the tilted masses, tile by tile.

    $$\sum_j e^{s_{ij} - c_i} (\dot s_{ij} W_j + \dot W_j), \qquad W_j = w_j (1, v_j).$$

    It is linear in what moves; its transpose, the backward pass, computes every tile
    again. Terms that do not move are `None` and cost nothing.
    """
    scale = exponent_scale(shift.dtype)
    shift = jnp.where(shift == -jnp.inf, jnp.inf, shift)

    def row_of_tiles(queries, fold):
        tilts, moving_tilts, shift = queries

        def step(total, columns, seen):
            tokens, moving, caps = columns
            scores = scores_of_tile(tilts, tokens)
            factors = tilted_factors(scores, shift, caps, seen)
            slopes = slopes_of_tile(tilts, tokens, moving_tilts, moving)
            if slopes is not None:
                total += summed(factors * slopes, tokens.masses / scale)
            if moving.masses is not None:
                total += summed(factors, moving.masses)
            return total

        return fold(step, no_masses(terms, tilts))

    queries = terms.tilts, moving.tilts, shift
    tokens = terms.tokens, moving.tokens, exponent_caps(terms.tokens.masses[0])
    return fold_tiles(row_of_tiles, queries, tokens, terms.ranges, block_size)


def slopes_of_tile(
    tilts: Array, tokens: Tokens, moving_tilts: Array | None, moving: Tokens
) -> Array | None:
    """Derivative of the scores of a tile, or `None` if they do not move."""
    parts = []
    if moving_tilts is not None:
        parts.append(matmul(moving_tilts, tokens.points))
    if moving.points is not None:
        parts.append(matmul(tilts, moving.points))
    if moving.offsets is not None:
        parts.append(
            jnp.broadcast_to(moving.offsets, (len(tilts), *moving.offsets.shape))
        )
    return sum(parts[1:], start=parts[0]) if parts else None
