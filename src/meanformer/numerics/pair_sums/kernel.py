"""Sums over tokens weighted by a function of the score, or by the best score."""

from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, ScalarLike

from meanformer.numerics.arrays import matmul
from meanformer.numerics.pair_sums.pairs import Pairs
from meanformer.numerics.pair_sums.tiles import (
    Terms,
    as_terms,
    common_dtype,
    fold_tiles,
    is_visible,
    no_masses,
    scores_of_tile,
    sizes_of_tile,
    summed,
)

# Roundings by which equal scores may differ.
ROUNDINGS = 8
# The best score of each query, and the size that sets its rounding.
Best = tuple[Float[Array, " m"], Float[Array, " m"]]


@eqx.filter_jit
def kernel_sum(
    pairs: Pairs,
    values: Float[Array, "n v"],
    profile: Callable,
    *,
    block_size: int | str,
) -> tuple[Float[Array, " m"], Float[Array, "m v"]]:
    """Mass and moment; see `AbstractPairSums.kernel`."""
    terms = as_terms(pairs, values)

    def row_of_tiles(tilts, fold):
        def step(tilts, total, tokens, seen):
            visible = is_visible(tokens, seen)
            factors = profiled(profile, scores_of_tile(tilts, tokens), visible)
            return total + summed(jnp.where(seen, factors, 0), tokens.masses)

        return fold(step, no_masses(terms, tilts))

    total = fold_tiles(row_of_tiles, *terms, block_size)
    total = total.astype(common_dtype(pairs, values))
    return total[:, 0], total[:, 1:]


def identity(scores: Array) -> Array:
    """Return the scores: the profile of linear attention, and its feature map."""
    return scores


def profiled(profile: Callable, scores: Array, visible: Array) -> Array:
    """Apply a profile so that invisible scores have finite values and no derivative.

    The value at an absent token stays, as the derivative with respect to its weight.
    """
    factors = profile(jnp.where(visible, scores, lax.stop_gradient(scores)))
    factors = jnp.where(visible, factors, lax.stop_gradient(factors))
    return jnp.where(visible | jnp.isfinite(factors), factors, 0)


@partial(jax.jit, static_argnames="block_size")
def hardmax_sum(
    pairs: Pairs,
    values: Float[Array, "n v"],
    tolerance: ScalarLike,
    *,
    block_size: int | str,
) -> tuple[Float[Array, " m"], Float[Array, "m v"]]:
    """Best score and mean over its ties; see `AbstractPairSums.hardmax`."""
    terms, dtype = as_terms(pairs, values), common_dtype(pairs, values)
    best = best_scores(lax.stop_gradient(terms), block_size)
    total, slope = sums_over_ties(terms, best, tolerance, block_size)
    best_score, mean = mean_over_ties(best[0], total, slope)
    return best_score.astype(dtype), mean.astype(dtype)


def mean_over_ties(best: Array, total: Array, slope: Array) -> tuple[Array, Array]:
    """Best score, with its derivative, and mean from what `sums_over_ties` returns."""
    is_empty = best == -jnp.inf
    # Divided twice: the square of a tiny mass is no number.
    unit = jnp.where(is_empty, 1, lax.stop_gradient(total[:, 0]))
    total, slope = total / unit[:, None], slope / unit
    mass = jnp.where(is_empty, 1, total[:, 0])
    slope = slope / mass
    # The value is the best score itself; its derivative is that of the average.
    return best + (slope - lax.stop_gradient(slope)), total[:, 1:] / mass[:, None]


def best_scores(terms: Terms, block_size: int | str) -> Best:
    """Largest visible score of each query, or minus infinity, and its size."""

    def row_of_tiles(tilts, fold):
        def step(tilts, carry, tokens, seen):
            visible, scores = is_visible(tokens, seen), scores_of_tile(tilts, tokens)
            scores = jnp.where(visible, scores, -jnp.inf)
            best = scores.max(axis=1)
            is_best = visible & (scores == best[:, None])
            sizes = jnp.where(is_best, sizes_of_tile(tilts, tokens), 0).max(axis=1)
            return better(carry, (best, sizes))

        return fold(step, no_best(tilts))

    return fold_tiles(row_of_tiles, *terms, block_size)


def no_best(tilts: Float[Array, "m k"]) -> Best:
    """Return what is known of the best scores before any token is seen."""
    unknown = jnp.full(len(tilts), -jnp.inf, tilts.dtype)
    return unknown, jnp.zeros_like(unknown)


def better(one: Best, other: Best) -> Best:
    """Return the better of two scores of each query; of equal ones the larger size."""
    best = jnp.maximum(one[0], other[0])
    sizes = [jnp.where(score == best, size, 0) for score, size in (one, other)]
    return best, jnp.maximum(*sizes)


def tie_margin(
    best_size: Float[Array, "m 1"],
    sizes: Float[Array, "m n"],
    tolerance: ScalarLike,
) -> Float[Array, "m n"]:
    r"""How far below the best score a score may be and still tie with it.

    A score $\sum_k u_k y_k + b$ is rounded relative to its size
    $\sum_k |u_k y_k| + |b|$, which says more than its value: terms may cancel. Two
    scores that differ by rounding tie whatever the tolerance.

    Args:
        best_size: the size of each query's best score.
        sizes: the sizes of all scores.
        tolerance: the margin asked for.
    """
    # Each on its own: the sum of two sizes may be no number where they are.
    unit = ROUNDINGS * jnp.finfo(sizes.dtype).eps
    return jnp.maximum(tolerance, unit * sizes + unit * best_size)


def sums_over_ties(
    terms: Terms, best: Best, tolerance: ScalarLike, block_size: int | str
) -> tuple[Array, Array]:
    """Masses, and weight times score, summed over the tokens as good as the best."""

    def row_of_tiles(queries, fold):
        tilts, best, _ = queries

        def step(queries, carry, tokens, seen):
            (tilts, best, best_size), (total, slope) = queries, carry
            scores = scores_of_tile(tilts, tokens)
            sizes = lax.stop_gradient(sizes_of_tile(tilts, tokens))
            margin = tie_margin(best_size[:, None], sizes, tolerance)
            is_tie = seen & (jnp.abs(scores - best[:, None]) <= margin)
            total += summed(is_tie.astype(scores.dtype), tokens.masses)
            slope += matmul(jnp.where(is_tie, scores, 0), tokens.masses[0])
            return total, slope

        return fold(step, (no_masses(terms, tilts), jnp.zeros_like(best)))

    queries = terms.tilts, *best
    return fold_tiles(row_of_tiles, queries, terms.tokens, terms.ranges, block_size)
