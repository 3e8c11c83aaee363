"""Log-mass and mean under the exponential of the score, with their derivative."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from meanformer.numerics.exponential import exponent_scale, scaled_exp
from meanformer.numerics.pairs import Pairs
from meanformer.numerics.terms import (
    Terms,
    Tokens,
    as_terms,
    common_dtype,
    matmul,
    no_masses,
    scaled,
    scores_of_tile,
    summed,
)
from meanformer.numerics.tiles import fold_tiles
from meanformer.numerics.tilted_masses import tilted_masses


@partial(jax.jit, static_argnames="block_size")
def softmax_sum(
    pairs: Pairs, values: Float[Array, "n v"], *, block_size: int | str
) -> tuple[Float[Array, " m"], Float[Array, "m v"]]:
    """Log-mass and mean; see `AbstractPairSums.softmax`."""
    dtype = common_dtype(pairs, values)
    log_mass, mean = tilted_mean(as_terms(pairs, values), block_size)
    return log_mass.astype(dtype), mean.astype(dtype)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def tilted_mean(terms: Terms, block_size: int | str) -> tuple[Array, Array]:
    """Log-mass and mean of the values, from their masses relative to a shift."""
    scale = exponent_scale(terms.tilts.dtype)
    shift, total = tilted_masses(scaled(terms, scale), block_size)
    # A NaN in the scores stays one: the exponential need not keep it.
    mass = jnp.where(jnp.isnan(shift), jnp.nan, total[:, 0])
    is_empty = mass == 0
    log_mass = jnp.where(is_empty, -jnp.inf, shift / scale + jnp.log(mass))
    return log_mass, total[:, 1:] / jnp.where(is_empty, 1, mass)[:, None]


def tilted_mean_jvp(block_size, primals, tangents):
    """Differentiate log-mass and mean through the moving masses."""
    (terms,), (moving,) = primals, tangents
    log_mass, mean = tilted_mean(terms, block_size)
    moved = moved_masses(terms, without_zeros(moving), log_mass, block_size)
    return (log_mass, mean), (moved[:, 0], moved[:, 1:] - mean * moved[:, :1])


tilted_mean.defjvp(tilted_mean_jvp, symbolic_zeros=True)


def without_zeros(moving: Terms) -> Terms:
    """Replace tangents that are known to be zero by `None`."""
    return jax.tree.map(lambda a: None if isinstance(a, SymbolicZero) else a, moving)


def moved_masses(
    terms: Terms, moving: Terms, log_mass: Array, block_size: int | str
) -> Array:
    r"""Derivative of the tilted masses, at fixed normalisation.

    $$\sum_j e^{s_{ij} - \Lambda_i} (\dot s_{ij} W_j + \dot W_j),
      \qquad W_j = w_j (1, v_j).$$
    """
    scale = exponent_scale(log_mass.dtype)
    terms, moving = scaled(terms, scale), scaled(moving, scale)
    top = scale * jnp.where(log_mass == -jnp.inf, jnp.inf, log_mass)

    def row_of_tiles(queries, fold):
        tilts, moving_tilts, top = queries

        def step(total, columns, seen):
            tokens, moving, caps = columns
            exponents = scores_of_tile(tilts, tokens) - top[:, None]
            factors = scaled_exp(jnp.minimum(exponents, caps[None, :]))
            factors = jnp.where(seen, factors, 0)
            slopes = slopes_of_tile(tilts, tokens, moving_tilts, moving)
            if slopes is not None:
                total += summed(factors * slopes, tokens.masses / scale)
            if moving.masses is not None:
                total += summed(factors, moving.masses)
            return total

        return fold(step, no_masses(terms, tilts))

    queries = terms.tilts, moving.tilts, top
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


def exponent_caps(weights: Float[Array, " n"]) -> Float[Array, " n"]:
    """Bound normalised exponents so that no product with them overflows.

    A token that is present never reaches its bound; an absent one may, since its score
    takes no part in the log-mass.
    """
    half = jnp.log(jnp.finfo(weights.dtype).max) / 2
    present = weights > 0
    caps = 1 - jnp.log(jnp.where(present, weights, 1))
    return lax.stop_gradient(
        exponent_scale(weights.dtype)
        * jnp.where(present, jnp.maximum(caps, half), half)
    )
