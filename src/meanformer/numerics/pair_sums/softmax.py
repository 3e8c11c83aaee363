"""Log-mass and mean under the exponential of the score, with their derivative."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meanformer.numerics.arrays import any_in_batch, matmul
from meanformer.numerics.pair_sums.pairs import Pairs
from meanformer.numerics.pair_sums.tiles import (
    Terms,
    Tokens,
    as_terms,
    common_dtype,
    fold_tiles,
    no_masses,
    only_moving,
    scaled,
    scores_of_tile,
    summed,
)
from meanformer.numerics.pair_sums.tilted_masses import (
    Shifted,
    are_few,
    exponent_scale,
    factors_of_tile,
    log_terms,
    score_sizes,
    sum_tilted_masses,
    with_caps,
)

# Scores up to this size have slopes whose rounding no derivative shows.
SHARP = 256.0
# What is taken off the scores of each query: a shift, what it is too large to hold, and
# the token whose score it is, if it is one.
Shifts = tuple[Float[Array, " m"], Float[Array, " m"], Int[Array, " m"] | None]


@partial(jax.jit, static_argnames="block_size")
def softmax_sum(
    pairs: Pairs, values: Float[Array, "n v"], *, block_size: int | str
) -> tuple[Float[Array, " m"], Float[Array, "m v"]]:
    """Log-mass and mean; see `AbstractPairSums.softmax`."""
    terms = as_terms(pairs, values)
    terms = scaled(terms, exponent_scale(terms.tilts.dtype))
    log_mass, mean = tilted_average(terms, block_size)
    dtype = common_dtype(pairs, values)
    return log_mass.astype(dtype), mean.astype(dtype)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def tilted_average(
    terms: Terms, block_size: int | str
) -> tuple[Float[Array, " m"], Float[Array, "m v"]]:
    """Log-mass and mean under scores that carry `exponent_scale`."""
    best = best_tokens(terms, block_size) if are_few(terms) else None
    shift, total = tilted_masses(terms, best, block_size)
    return log_mass_and_mean(shift / exponent_scale(shift.dtype), total)


def tilted_average_jvp(block_size, primals, tangents):
    r"""Differentiate as a covariance: slopes less that of each query's best token.

    $$\dot\Lambda_i = \dot s_{i*} + \sum_j p_{ij}(\dot s_{ij} - \dot s_{i*}), \qquad
      \dot m_i = \sum_j p_{ij}(\dot s_{ij} - \dot s_{i*})(v_j - m_i)$$
    and what weights and values add. Large scores have large slopes; only differences
    of them may remain.
    """
    (terms,), (moving,) = primals, tangents
    moving = only_moving(moving)
    best, (shift, total) = leading_masses(terms, block_size)
    scale = exponent_scale(shift.dtype)
    log_mass, mean = log_mass_and_mean(shift / scale, total)
    is_empty = total[:, 0] == 0
    mass = jnp.where(is_empty, 1, total[:, 0])
    shift = jnp.where(is_empty, -jnp.inf, shift)
    lead = slopes_of_best(terms, moving, best)
    lead = None if lead is None else jnp.where(is_empty | (best < 0), 0, lead)
    shifts = shift, scale * jnp.log(mass), best
    moved = moved_masses(terms, moving, shifts, block_size, lead)
    share = moved[:, 0] if lead is None else moved[:, 0] + lead / scale
    return (log_mass, mean), (share, moved[:, 1:] - mean * moved[:, :1])


def leading_masses(
    terms: Terms, block_size: int | str
) -> tuple[Int[Array, " m"], Shifted]:
    """Return the best token of each query where its slope matters, and the masses.

    Small scores have small slopes: -1 stands for a token that is not needed.
    """

    def with_best():
        best = best_tokens(terms, block_size)
        return best, tilted_masses(terms, best, block_size)

    def without():
        nobody = jnp.full(len(terms.tilts), -1)
        return nobody, tilted_masses(terms, None, block_size)

    if are_few(terms):
        return with_best()
    is_sharp = any_in_batch(jnp.any(~(score_sizes(terms) < SHARP)))
    return lax.cond(is_sharp, with_best, without)


tilted_average.defjvp(tilted_average_jvp, symbolic_zeros=True)


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


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def tilted_masses(
    terms: Terms, best: Int[Array, " m"] | None, block_size: int | str
) -> Shifted:
    """Sum tilted masses relative to shifts that are constant for differentiation."""
    return sum_tilted_masses(terms, best, block_size)


def tilted_masses_jvp(block_size, primals, tangents):
    """Differentiate the tilted masses at fixed shifts."""
    terms, best = primals
    moving = only_moving(tangents[0])
    shift, total = tilted_masses(terms, best, block_size)
    shifts = shift, jnp.zeros_like(shift), best
    moved = moved_masses(terms, moving, shifts, block_size)
    return (shift, total), (jnp.zeros_like(shift), moved)


tilted_masses.defjvp(tilted_masses_jvp, symbolic_zeros=True)


def moved_masses(
    terms: Terms,
    moving: Terms,
    shifts: Shifts,
    block_size: int | str,
    lead: Float[Array, " m"] | None = None,
) -> Float[Array, "m c"]:
    r"""Derivative of the tilted masses, tile by tile.

    $$\sum_j e^{s_{ij} - c_i} ((\dot s_{ij} - r_i) W_j + \dot W_j), \qquad
      W_j = w_j (1, v_j),$$
    with $r$ the slope of the best token, if that leads, and $c$ the sum of both shifts,
    of which the first may be too large to hold the second. It is linear in what moves;
    its transpose, the backward pass, computes every tile again. Terms that do not move
    are `None` and cost nothing.
    """
    shift, rest, best = shifts
    scale = exponent_scale(shift.dtype)
    shift = jnp.where(shift == -jnp.inf, jnp.inf, shift)

    def row_of_tiles(queries, fold):
        def step(queries, total, columns, seen):
            tilts, moving_tilts, shift, rest, best, lead = queries
            (tokens, caps, index), moving = columns
            factors = factors_of_tile(
                tilts, (tokens, caps, index), shift, rest, best, seen
            )
            slopes = slopes_of_tile(tilts, tokens, (moving_tilts, moving), lead)
            if slopes is not None:
                if best is not None and lead is not None:
                    # Not by subtraction: rounding times a large slope is large.
                    slopes = jnp.where(index[None, :] == best[:, None], 0, slopes)
                total += summed(factors * slopes, tokens.masses / scale)
            if moving.masses is not None:
                total += summed(factors, moving.masses)
            return total

        return fold(step, no_masses(terms, queries[0]))

    queries = terms.tilts, moving.tilts, shift, rest, best, lead
    tokens = with_caps(terms.tokens), moving.tokens
    return fold_tiles(row_of_tiles, queries, tokens, terms.ranges, block_size)


def slopes_of_tile(
    tilts: Array,
    tokens: Tokens,
    moving: tuple[Array | None, Tokens],
    lead: Float[Array, " m"] | None,
) -> Array | None:
    """Derivative of the scores of a tile, less the lead; `None` if they do not move.

    It is zero for absent tokens.
    """
    moving_tilts, moving_tokens = moving
    points = jnp.where(tokens.masses[:1] > 0, tokens.points, 0)
    parts = []
    if lead is not None:
        # One more product, rather than a difference, which is slow to transpose.
        present = (tokens.masses[:1] > 0).astype(points.dtype)
        left, right = [-lead[:, None]], [present]
        if moving_tilts is not None:
            left, right = [moving_tilts, *left], [points, *right]
        parts.append(matmul(jnp.concatenate(left, axis=1), jnp.concatenate(right)))
    elif moving_tilts is not None:
        parts.append(matmul(moving_tilts, points))
    if moving_tokens.points is not None:
        parts.append(matmul(tilts, moving_tokens.points))
    if moving_tokens.offsets is not None:
        offsets = moving_tokens.offsets
        parts.append(jnp.broadcast_to(offsets, (len(tilts), *offsets.shape)))
    return sum(parts[1:], start=parts[0]) if parts else None


def slopes_of_best(
    terms: Terms, moving: Terms, best: Int[Array, " m"]
) -> Float[Array, " m"] | None:
    """Derivative of the score of one token for each query, or `None` if none moves."""
    parts = []
    if moving.tilts is not None:
        parts.append(jnp.sum(moving.tilts * terms.tokens.points[:, best].T, axis=1))
    if moving.tokens.points is not None:
        parts.append(jnp.sum(terms.tilts * moving.tokens.points[:, best].T, axis=1))
    if moving.tokens.offsets is not None:
        parts.append(moving.tokens.offsets[best])
    return sum(parts[1:], start=parts[0]) if parts else None


def best_tokens(terms: Terms, block_size: int | str) -> Int[Array, " m"]:
    """Index of the token with the largest term of each query; -1 if it sees none."""
    terms = lax.stop_gradient(terms)

    def row_of_tiles(tilts, fold):
        def step(tilts, carry, columns, seen):
            tokens, index = columns
            heights = log_terms(scores_of_tile(tilts, tokens), tokens, seen)
            best, top = heights.argmax(axis=1), heights.max(axis=1)
            kept = jnp.where(top > carry[0], index[best], carry[1])
            return jnp.maximum(top, carry[0]), kept

        unknown = jnp.full(len(tilts), -jnp.inf, tilts.dtype)
        return fold(step, (unknown, jnp.full(len(tilts), -1)))[1]

    tokens = terms.tokens, jnp.arange(terms.tokens.masses.shape[1])
    return fold_tiles(row_of_tiles, terms.tilts, tokens, terms.ranges, block_size)
