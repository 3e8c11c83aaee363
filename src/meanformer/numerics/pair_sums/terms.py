"""The arrays that every pair sum is made of."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from meanformer.numerics.arrays import held, matmul
from meanformer.numerics.pair_sums.pairs import Pairs
from meanformer.numerics.pair_sums.tiles import Range


class Tokens(NamedTuple):
    """Points, offsets, and weights times one and the values; one column per token.

    With tokens as columns, the matrix products of the derivative have the layout that
    processors multiply fast.
    """

    points: Float[Array, "k n"]
    offsets: Float[Array, " n"] | None
    masses: Float[Array, "columns n"]


class Terms(NamedTuple):
    """Queries, tokens, and the range of tokens that each query sees."""

    tilts: Float[Array, "m k"]
    tokens: Tokens
    ranges: Range | None


def common_dtype(pairs: Pairs, values: Array) -> jnp.dtype:
    """Return the floating-point type of the result of a sum."""
    arrays = jax.tree.leaves(eqx.filter((pairs, values), eqx.is_inexact_array))
    return jnp.result_type(*arrays)


def in_one_precision(pairs: Pairs, values: Array) -> tuple[Pairs, Array]:
    """Give all arrays the common type; half precision is computed in single."""
    dtype = common_dtype(pairs, values)
    dtype = jnp.dtype(jnp.float32) if jnp.finfo(dtype).bits < 32 else dtype
    floats, ranges = eqx.partition((pairs, values), eqx.is_inexact_array)
    return eqx.combine(jax.tree.map(lambda a: a.astype(dtype), floats), ranges)


def as_terms(pairs: Pairs, values: Float[Array, "n v"]) -> Terms:
    """Gather the arrays of a sum; half precision is computed in single precision."""
    pairs, values = in_one_precision(pairs, values)
    weights = pairs.weights[None, :]
    present = weights > 0
    masses = jnp.concatenate([weights, weights * held(values.T, present)])
    points = _within_range(pairs.points.T, pairs.tilts, present)
    offsets = pairs.offsets
    if offsets is not None:
        offsets = held(offsets[None, :], present, 0.5)[0]
    first, last = pairs.first, pairs.last
    seen = None
    if first is not None and last is not None:
        # Comparisons of short integers keep pace with short floats.
        seen = first.astype(jnp.int32), last.astype(jnp.int32)
    tilts, points = _never_one_product(pairs.tilts, points)
    return Terms(tilts, Tokens(points, offsets, masses), seen)


def _never_one_product(
    tilts: Float[Array, "m k"], points: Float[Array, "k n"]
) -> tuple[Float[Array, "m k2"], Float[Array, "k2 n"]]:
    """Add coordinates of zeros until there are two.

    Compilers merge a single product into everything that uses it, and round it
    differently there. The exponential of large scores sees that: a score must be the
    same number wherever it is used.
    """
    missing = (0, max(0, 2 - tilts.shape[1]))
    return jnp.pad(tilts, ((0, 0), missing)), jnp.pad(points, (missing, (0, 0)))


def _within_range(
    points: Float[Array, "k n"], tilts: Float[Array, "m k"], present: Array
) -> Float[Array, "k n"]:
    """Bound the points of absent tokens, so that their scores do not overflow."""
    limit = float(jnp.finfo(points.dtype).max)
    lengths = jnp.abs(lax.stop_gradient(tilts)).sum(axis=1)
    # A query that is no number must not spoil the others.
    longest = jnp.where(jnp.isfinite(lengths), lengths, 0).max(initial=1)
    points = held(points, present, 0.5)
    largest = limit / 8 / longest
    return jnp.where(present, points, jnp.clip(points, -largest, largest))


def scaled(terms: Terms, factor: float) -> Terms:
    """Multiply all scores by a factor."""
    tilts, points, offsets, masses = terms.tilts, *terms.tokens
    tilts = None if tilts is None else factor * tilts
    offsets = None if offsets is None else factor * offsets
    return Terms(tilts, Tokens(points, offsets, masses), terms.ranges)


def scores_of_tile(tilts: Array, tokens: Tokens) -> Float[Array, "m n"]:
    """Scores of a block of queries against a block of tokens."""
    points, offsets, _ = tokens
    if offsets is not None:
        # One product for all terms, for the reason of `_never_one_product`.
        tilts = jnp.pad(tilts, ((0, 0), (0, 1)), constant_values=1)
        points = jnp.concatenate([points, offsets[None, :]])
    return matmul(tilts, points)


def sizes_of_tile(tilts: Array, tokens: Tokens) -> Float[Array, "m n"]:
    """Sums of the absolute terms of the scores of a tile, which set their rounding."""
    return scores_of_tile(jnp.abs(tilts), jax.tree.map(jnp.abs, tokens))


def is_visible(tokens: Tokens, seen: Array | bool) -> Bool[Array, "_ n"]:
    """Whether each token has weight and is in the range of each query."""
    return (tokens.masses[:1] > 0) & seen


def no_masses(terms: Terms, tilts: Array) -> Float[Array, "m c"]:
    """Return sums of masses for a block of queries before any token is added."""
    masses = terms.tokens.masses
    return jnp.zeros((len(tilts), len(masses)), masses.dtype)


def summed(factors: Float[Array, "m n"], masses: Array) -> Float[Array, "m columns"]:
    """Sum masses over the tokens of a tile, times a factor per pair."""
    return matmul(factors, masses.T)
