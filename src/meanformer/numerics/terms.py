"""The arrays that every pair sum is made of."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from meanformer.numerics.matrices import matmul
from meanformer.numerics.pairs import Pairs
from meanformer.numerics.tiles import Range


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
    masses = jnp.concatenate([weights, weights * values.T])
    points = _within_range(pairs.points.T, weights > 0)
    first, last = pairs.first, pairs.last
    seen = None if first is None or last is None else (first, last)
    tilts, points = _never_one_product(pairs.tilts, points)
    return Terms(tilts, Tokens(points, pairs.offsets, masses), seen)


def _never_one_product(
    tilts: Float[Array, "m k"], points: Float[Array, "k n"]
) -> tuple[Float[Array, "m k2"], Float[Array, "k2 n"]]:
    """Add a coordinate of zeros to a single one.

    Compilers merge a single product into everything that uses it, and round it
    differently there. The exponential of large scores sees that: a score must be the
    same number wherever it is used.
    """
    if tilts.shape[1] != 1:
        return tilts, points
    return jnp.pad(tilts, ((0, 0), (0, 1))), jnp.pad(points, ((0, 1), (0, 0)))


def _within_range(points: Float[Array, "k n"], present: Array) -> Float[Array, "k n"]:
    """Bound the points of absent tokens, so that their scores do not overflow."""
    largest = jnp.sqrt(jnp.finfo(points.dtype).max).astype(points.dtype)
    return jnp.where(present, points, jnp.clip(points, -largest, largest))


def scaled(terms: Terms, factor: float) -> Terms:
    """Multiply all scores by a factor."""
    tilts, points, offsets, masses = terms.tilts, *terms.tokens
    tilts = None if tilts is None else factor * tilts
    offsets = None if offsets is None else factor * offsets
    return Terms(tilts, Tokens(points, offsets, masses), terms.ranges)


def scores_of_tile(tilts: Array, tokens: Tokens) -> Float[Array, "m n"]:
    """Scores of a block of queries against a block of tokens."""
    scores = matmul(tilts, tokens.points)
    return scores if tokens.offsets is None else scores + tokens.offsets[None, :]


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
