"""Sums of masses tilted by the exponential of the score, safe from overflow."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from meanformer.numerics.batching import any_in_batch
from meanformer.numerics.exponential import exponent_scale, scaled_exp
from meanformer.numerics.matrices import matmul
from meanformer.numerics.terms import (
    Terms,
    Tokens,
    is_visible,
    no_masses,
    scores_of_tile,
    summed,
)
from meanformer.numerics.tiles import fold_tiles

# Below this many pairs a second sweep costs less than compiling the branch around it.
FEW_PAIRS = 256 * 256
# Rounding of an exponent, beyond which it could change a sum by many times its size.
ROUGH = 1.0

Shifted = tuple[Float[Array, " m"], Float[Array, "m c"]]


def sum_tilted_masses(terms: Terms, block_size: int | str) -> Shifted:
    r"""Sum masses times exponentials of scores that carry `exponent_scale`.

    Returns:
        Shifts $c_i$ and $\sum_j W_j e^{s_{ij} - c_i}$, so that nothing overflows and
        nothing that matters underflows. Queries that see nothing get zero.
    """
    pair_count = len(terms.tilts) * terms.tokens.points.shape[1]
    if pair_count > FEW_PAIRS:
        return relative_to_bound(terms, block_size)

    def row_of_tiles(tilts, fold):
        return relative_to_largest(tilts, no_masses(terms, tilts), fold)

    return fold_tiles(row_of_tiles, *terms, block_size)


def relative_to_bound(terms: Terms, block_size: int | str) -> Shifted:
    """Sum in one sweep, relative to a bound on the scores.

    Where a mass comes out so small that terms of it may be lost, the block of queries
    is summed again, relative to the largest terms.
    """
    lost = smallest_mass(terms.tokens.masses[0])

    def row_of_tiles(queries, fold):
        tilts, bounds, ranges = queries
        start = no_masses(terms, tilts)
        total = fold(partial(add_tile, tilts, bounds), start)
        # Written so that a NaN is lost too.
        is_lost = ~(total[:, 0] >= lost)
        if ranges is not None:
            is_lost &= ranges[0] < ranges[1]
        return lax.cond(
            any_in_batch(jnp.any(is_lost)),
            lambda: relative_to_largest(tilts, start, fold),
            lambda: (bounds, total),
        )

    queries = terms.tilts, score_bounds(terms), terms.ranges
    return fold_tiles(row_of_tiles, queries, terms.tokens, terms.ranges, block_size)


def score_bounds(terms: Terms) -> Float[Array, " m"]:
    """Bound the scores of each query by a ball around the tokens."""
    points, offsets, masses = terms.tokens
    weights = masses[0]
    mass = weights.sum()
    centre = matmul(points, weights) / jnp.where(mass > 0, mass, 1)
    distances = jnp.linalg.norm(points - centre[:, None], axis=0)
    radius = jnp.where(weights > 0, distances, 0).max()
    bounds = matmul(terms.tilts, centre)
    reach = radius * jnp.linalg.norm(terms.tilts, axis=1)
    sizes = jnp.abs(bounds) + reach
    bounds += reach
    if offsets is not None:
        highest = jnp.where(weights > 0, offsets, -jnp.inf).max()
        bounds += jnp.where(mass > 0, highest, 0)
        sizes += jnp.where(weights > 0, jnp.abs(offsets), 0).max()
    # Norms overflow before scores do, and a bound whose rounding the exponential sees
    # is none; an infinite bound finds no mass.
    is_rough = ~(jnp.finfo(sizes.dtype).eps * sizes < ROUGH)
    return jnp.where(is_rough, jnp.inf, bounds)


def smallest_mass(weights: Float[Array, " n"]) -> Float[Array, ""]:
    """Mass below which terms that underflowed could matter, in value or derivative."""
    return jnp.sqrt(jnp.finfo(weights.dtype).tiny) * jnp.maximum(weights.sum(), 1)


def add_tile(
    tilts: Array, bounds: Array, total: Array, tokens: Tokens, seen: Array | bool
) -> Array:
    """Add the masses of a tile, relative to the bounds."""
    factors = scaled_exp(scores_of_tile(tilts, tokens) - bounds[:, None])
    return total + summed(jnp.where(seen, factors, 0), tokens.masses)


def relative_to_largest(tilts: Array, start: Array, fold: Callable) -> Shifted:
    """Sum relative to the largest term so far, rescaling when it grows."""
    unknown = jnp.full(len(tilts), -jnp.inf, tilts.dtype)
    top, total = fold(partial(add_tile_rescaling, tilts), (unknown, start))
    # Scores that all overflow downwards leave no mass, although tokens are seen.
    is_spoilt = (top > -jnp.inf) & (total[:, 0] == 0)
    return jnp.where(is_spoilt, jnp.nan, top), total


def add_tile_rescaling(
    tilts: Array, carry: Shifted, tokens: Tokens, seen: Array | bool
) -> Shifted:
    """Add the masses of a tile, relative to the largest term so far."""
    top, total = carry
    scores = scores_of_tile(tilts, tokens)
    # The weight counts: a tiny one on a large score must not hide the other terms.
    visible = is_visible(tokens, seen)
    log_weights = exponent_scale(top.dtype) * jnp.log(tokens.masses[0])
    terms = jnp.maximum(scores + log_weights[None, :], jnp.finfo(top.dtype).min)
    terms = jnp.where(visible, terms, -jnp.inf)
    new_top = jnp.maximum(top, terms.max(axis=1))
    shift = jnp.where(new_top == -jnp.inf, 0, new_top)
    factors = tilted_factors(scores, shift, exponent_caps(tokens.masses[0]), seen)
    total = total * scaled_exp(top - shift)[:, None]
    return new_top, total + summed(factors, tokens.masses)


def tilted_factors(
    scores: Array, shift: Array, caps: Array, seen: Array | bool
) -> Float[Array, "m n"]:
    """Exponentials of scores less the shifts, within the caps of the tokens."""
    exponents = jnp.minimum(scores - shift[:, None], caps[None, :])
    return jnp.where(seen, scaled_exp(exponents), 0)


def exponent_caps(weights: Float[Array, " n"]) -> Float[Array, " n"]:
    """Bound the exponents so that no product with their exponential overflows.

    A token that is present reaches its bound by rounding at most; an absent one may
    pass it, since its score takes no part in the shift.
    """
    half = jnp.log(jnp.finfo(weights.dtype).max) / 2
    present = weights > 0
    caps = jnp.where(present, 1 - jnp.log(jnp.where(present, weights, 1)), half)
    return lax.stop_gradient(exponent_scale(weights.dtype) * caps)
