"""Sums of masses tilted by the exponential of the score, safe from overflow."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meanformer.numerics.arrays import any_in_batch, matmul
from meanformer.numerics.pair_sums.tiles import (
    Terms,
    Tokens,
    fold_tiles,
    is_visible,
    no_masses,
    scores_of_tile,
    summed,
)

# Best polynomial for 2^f on [-1/2, 1/2] with value 1 at 0, highest degree first;
# its relative error is 2e-9.
COEFFICIENTS = (
    0.00015353362,
    0.00133988739,
    0.00961843692,
    0.0555033237,
    0.240226477,
    0.693147182,
    1.0,
)
# The sum of this constant and a small integer has the integer in its lowest bits.
INTEGER_TO_BITS = 1.5 * 2.0**23
MANTISSA_BITS = 23
LARGEST_EXPONENT = 127.0

# Below this many pairs a second sweep costs less than compiling the branch around it.
FEW_PAIRS = 256 * 256
# Rounding of an exponent, beyond which it could change a sum by many times its size.
ROUGH = 1.0

Shifted = tuple[Float[Array, " m"], Float[Array, "m c"]]
# Tokens, bounds on their exponents, and their indices.
Capped = tuple[Tokens, Float[Array, " n"], Int[Array, " n"]]


def exponent_scale(dtype: jnp.dtype) -> float:
    """Return the factor that exponents must carry before `scaled_exp`.

    Single precision works in base two: the whole part of an exponent goes straight
    into the bits of the result and only the fraction is computed.
    """
    return math.log2(math.e) if dtype == jnp.float32 else 1.0


@jax.custom_jvp
def scaled_exp(exponents: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    r"""Exponential of exponents that already carry the factor `exponent_scale`.

    It saturates instead of overflowing, so that zero times the result is zero. In
    single precision it is $2^x$, within one unit in the last place for
    $-126 \le x \le 127$ and zero from $-127$ down; in double precision $e^x$.
    """
    if exponents.dtype != jnp.float32:
        largest = jnp.finfo(exponents.dtype).max
        return jnp.exp(jnp.minimum(exponents, math.floor(math.log(largest))))
    exponents = jnp.clip(exponents, -LARGEST_EXPONENT, LARGEST_EXPONENT)
    whole = lax.round(exponents, lax.RoundingMethod.TO_NEAREST_EVEN)
    fraction = exponents - whole
    power = functools.reduce(lambda sum_, c: sum_ * fraction + c, COEFFICIENTS)
    whole_bits = lax.bitcast_convert_type(whole + INTEGER_TO_BITS, jnp.int32)
    bits = lax.bitcast_convert_type(power, jnp.int32) + (whole_bits << MANTISSA_BITS)
    return lax.bitcast_convert_type(bits, jnp.float32)


@scaled_exp.defjvp
def scaled_exp_jvp(primals, tangents):
    """Differentiate: the exponential again, over the scale."""
    (exponents,), (moving,) = primals, tangents
    power = scaled_exp(exponents)
    return power, power * moving / exponent_scale(exponents.dtype)


def sum_tilted_masses(
    terms: Terms, best: Int[Array, " m"] | None, block_size: int | str
) -> Shifted:
    r"""Sum masses times exponentials of scores that carry `exponent_scale`.

    Args:
        terms: what is summed.
        best: the tokens with the largest terms, where they are known.
        block_size: queries and tokens per tile.

    Returns:
        Shifts $c_i$ and $\sum_j W_j e^{s_{ij} - c_i}$, so that nothing overflows and
        nothing that matters underflows. Queries that see nothing get zero.
    """
    if best is None:
        return relative_to_bound(terms, block_size)
    shift = score_of_best(terms, best)

    def row_of_tiles(queries, fold):
        def step(queries, total, columns, seen):
            tilts, *rest = queries
            factors = factors_of_tile(tilts, columns, *rest, seen)
            return total + summed(factors, columns[0].masses)

        return fold(step, no_masses(terms, queries[0]))

    # A tiny weight on a large score must not hide the other terms.
    weights = lax.stop_gradient(terms.tokens.masses[0])[best]
    weights = jnp.where(weights > 0, weights, 1)
    rest = exponent_scale(shift.dtype) * jnp.log(weights)
    queries, tokens = (terms.tilts, shift, rest, best), with_caps(terms.tokens)
    total = fold_tiles(row_of_tiles, queries, tokens, terms.ranges, block_size)
    return shift, weights[:, None] * total


def are_few(terms: Terms) -> bool:
    """Whether there are so few pairs that a sweep more does not matter."""
    return len(terms.tilts) * terms.tokens.masses.shape[1] <= FEW_PAIRS


def score_of_best(terms: Terms, best: Int[Array, " m"]) -> Float[Array, " m"]:
    """Score of one token for each query; NaN if it overflows downwards."""
    points, offsets, _ = terms.tokens
    scores = jnp.sum(terms.tilts * points[:, best].T, axis=1)
    scores = scores if offsets is None else scores + offsets[best]
    return lax.stop_gradient(jnp.where(scores == -jnp.inf, jnp.nan, scores))


def factors_of_tile(
    tilts: Array,
    columns: Capped,
    shift: Array,
    rest: Array,
    best: Array | None,
    seen: Array | bool,
) -> Float[Array, "m n"]:
    """Exponentials of scores less shift and rest, which may be too small to join it.

    That of the best token, whose score is the shift, is known without rounding. A large
    score may be rounded differently wherever it is computed.
    """
    tokens, caps, index = columns
    exponents = scores_of_tile(tilts, tokens) - shift[:, None]
    if best is not None:
        known = jnp.where(jnp.isfinite(exponents), exponents, 0)
        # The value is zero, the derivative is not: the shift counts as a constant.
        zero = known - lax.stop_gradient(known)
        exponents = jnp.where(index[None, :] == best[:, None], zero, exponents)
    exponents = jnp.minimum(exponents - rest[:, None], caps[None, :])
    return jnp.where(seen, scaled_exp(exponents), 0)


def relative_to_bound(terms: Terms, block_size: int | str) -> Shifted:
    """Sum in one sweep, relative to a bound on the scores.

    Where a mass comes out so small that terms of it may be lost, the block of queries
    is summed again, relative to the largest terms.
    """
    lost = smallest_mass(terms.tokens.masses[0])

    def row_of_tiles(queries, fold):
        tilts, bounds, ranges = queries
        start = no_masses(terms, tilts)
        total = fold(add_tile, start)
        # Written so that a NaN is lost too.
        is_lost = ~(total[:, 0] >= lost)
        if ranges is not None:
            is_lost &= ranges[0] < ranges[1]
        return lax.cond(
            any_in_batch(jnp.any(is_lost)),
            lambda: relative_to_largest(start, fold),
            lambda: (bounds, total),
        )

    queries = terms.tilts, score_bounds(terms), terms.ranges
    return fold_tiles(row_of_tiles, queries, terms.tokens, terms.ranges, block_size)


def score_bounds(terms: Terms) -> Float[Array, " m"]:
    """Bound the scores of each query by a ball around the tokens."""
    middle, reach = middle_and_reach(terms)
    bounds = middle + reach
    weights, offsets = terms.tokens.masses[0], terms.tokens.offsets
    if offsets is not None:
        highest = jnp.where(weights > 0, offsets, -jnp.inf).max()
        bounds += jnp.where(highest == -jnp.inf, 0, highest)
    # Norms overflow before scores do, and a bound whose rounding the exponential sees
    # is none; an infinite bound finds no mass.
    is_rough = ~(jnp.finfo(bounds.dtype).eps * score_sizes(terms) < ROUGH)
    return jnp.where(is_rough, jnp.inf, bounds)


def score_sizes(terms: Terms) -> Float[Array, " m"]:
    """Bound the absolute scores of each query."""
    middle, reach = middle_and_reach(terms)
    weights, offsets = terms.tokens.masses[0], terms.tokens.offsets
    sizes = jnp.abs(middle) + reach
    if offsets is not None:
        sizes += jnp.where(weights > 0, jnp.abs(offsets), 0).max()
    return sizes


def middle_and_reach(terms: Terms) -> tuple[Float[Array, " m"], Float[Array, " m"]]:
    """Score of each query at the mean of the tokens, and how far others differ."""
    points, weights = terms.tokens.points, terms.tokens.masses[0]
    mass = weights.sum()
    centre = matmul(points, weights) / jnp.where(mass > 0, mass, 1)
    distances = jnp.linalg.norm(points - centre[:, None], axis=0)
    radius = jnp.where(weights > 0, distances, 0).max()
    return matmul(terms.tilts, centre), radius * jnp.linalg.norm(terms.tilts, axis=1)


def smallest_mass(weights: Float[Array, " n"]) -> Float[Array, ""]:
    """Mass below which terms that underflowed could matter, in value or derivative."""
    return jnp.sqrt(jnp.finfo(weights.dtype).tiny) * jnp.maximum(weights.sum(), 1)


def add_tile(queries: tuple, total: Array, tokens: Tokens, seen: Array | bool) -> Array:
    """Add the masses of a tile, relative to the bounds."""
    tilts, bounds, _ = queries
    factors = scaled_exp(scores_of_tile(tilts, tokens) - bounds[:, None])
    return total + summed(jnp.where(seen, factors, 0), tokens.masses)


def relative_to_largest(start: Array, fold: Callable) -> Shifted:
    """Sum relative to the largest term so far, rescaling when it grows."""
    unknown = jnp.full(len(start), -jnp.inf, start.dtype)
    top, total = fold(add_tile_rescaling, (unknown, start))
    # Scores that all overflow downwards leave no mass, although tokens are seen.
    is_spoilt = (top > -jnp.inf) & (total[:, 0] == 0)
    return jnp.where(is_spoilt, jnp.nan, top), total


def add_tile_rescaling(
    queries: tuple, carry: Shifted, tokens: Tokens, seen: Array | bool
) -> Shifted:
    """Add the masses of a tile, relative to the largest term so far."""
    (tilts, *_), (top, total) = queries, carry
    scores = scores_of_tile(tilts, tokens)
    new_top = jnp.maximum(top, log_terms(scores, tokens, seen).max(axis=1))
    shift = jnp.where(new_top == -jnp.inf, 0, new_top)
    caps = exponent_caps(tokens.masses[0])
    exponents = jnp.minimum(scores - shift[:, None], caps[None, :])
    factors = jnp.where(seen, scaled_exp(exponents), 0)
    total = total * scaled_exp(top - shift)[:, None]
    return new_top, total + summed(factors, tokens.masses)


def log_terms(scores: Array, tokens: Tokens, seen: Array | bool) -> Array:
    """Logarithms of the terms of a tile; minus infinity where nothing is seen alone.

    The weight counts: a tiny one on a large score must not hide the other terms.
    """
    log_weights = exponent_scale(scores.dtype) * jnp.log(tokens.masses[:1])
    heights = jnp.maximum(scores + log_weights, jnp.finfo(scores.dtype).min)
    return jnp.where(is_visible(tokens, seen), heights, -jnp.inf)


def with_caps(tokens: Tokens) -> Capped:
    """Return the tokens with bounds on their exponents and their indices."""
    weights = tokens.masses[0]
    return tokens, exponent_caps(weights), jnp.arange(len(weights))


def exponent_caps(weights: Float[Array, " n"]) -> Float[Array, " n"]:
    """Bound the exponents so that no product with their exponential overflows.

    A token that is present reaches its bound by rounding at most; an absent one may
    pass it, since its score takes no part in the shift.
    """
    half = jnp.log(jnp.finfo(weights.dtype).max) / 2
    present = weights > 0
    caps = jnp.where(present, 1 - jnp.log(jnp.where(present, weights, 1)), half)
    return lax.stop_gradient(exponent_scale(weights.dtype) * caps)
