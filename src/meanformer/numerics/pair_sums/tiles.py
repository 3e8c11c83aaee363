"""The arrays of a pair sum, and the walk over all its pairs tile by tile.

A tile is a block of queries against a block of tokens. Only one tile of scores exists
at a time: in the value, and in the derivatives too, which compute each tile again.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int, PyTree

from meanformer.numerics.arrays import any_in_batch, held, matmul
from meanformer.numerics.pair_sums.pairs import Pairs

# Found by timing: fewer pairs wait for threads, more fall out of the cache.
TILE_ROWS, TILE_COLUMNS = 2048, 1024
# A mask leaves less work for the same memory: smaller tiles touch less of it.
MASKED_TILE_BYTES = 2**22
# A tile that is seen in part is cut, so that little of it is computed in vain.
PIECE = 256
VECTOR_LENGTH = 16

Range = tuple[Int[Array, " m"], Int[Array, " m"]]


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


def only_moving(tangents: PyTree) -> PyTree:
    """Replace tangents known to be zero by `None`, so that they cost nothing."""
    return jax.tree.map(lambda a: None if isinstance(a, SymbolicZero) else a, tangents)


def fold_tiles(
    row_of_tiles: Callable,
    queries: PyTree[Array],
    tokens: PyTree[Array],
    ranges: Range | None,
    block_size: int | str,
) -> PyTree[Array]:
    """Sum over the tokens for one block of queries after the other.

    Args:
        row_of_tiles: called with a block of `queries` and a function
            `fold(step, carry)`, which folds `step(queries, carry, tokens, seen)` over
            the blocks of tokens. `seen` tells which token is in the range of which
            query, or is `True` where all are. Blocks that no range meets are skipped;
            those that some do are cut into pieces, with some of the queries each.
        queries: arrays with one row per query.
        tokens: arrays with one column per token; blocks are filled up with zeros.
        ranges: the first token that each query sees and one past the last, or `None`
            when all are seen.
        block_size: queries and tokens per tile, or `"auto"`.

    Returns:
        What `row_of_tiles` returns, with one row per query.
    """
    counts = row_count(queries), column_count(tokens)
    most_rows = TILE_ROWS
    if ranges is not None:
        itemsize = jax.tree.leaves(queries)[0].dtype.itemsize
        most_rows = MASKED_TILE_BYTES // (TILE_COLUMNS * itemsize)
    rows, columns = tile_shape(*counts, block_size, most_rows)

    # Before the loop over queries, which would do it again for each block of them.
    blocks = split_columns(tokens, columns)

    def of_block(block):
        queries, ranges = block

        def fold(step, carry):
            rows = queries, carry, ranges
            return fold_columns(step, rows, blocks, columns)

        return row_of_tiles(queries, fold)

    return map_rows(of_block, (queries, ranges), rows)


def tile_shape(
    queries: int, tokens: int, block_size: int | str, most_rows: int = TILE_ROWS
) -> tuple[int, int]:
    """Return how many queries and how many tokens meet in one tile.

    Automatic tiles have a fixed area at most: few pairs are one tile, and few queries
    meet many tokens at once.
    """
    if not isinstance(block_size, str):
        return min(block_size, queries), min(block_size, tokens)
    area = most_rows * TILE_COLUMNS
    rows = balanced(queries, max(most_rows, area // tokens))
    return rows, balanced(tokens, max(TILE_COLUMNS, area // max(rows, 1)))


def balanced(count: int, largest: int) -> int:
    """Return the length of equal blocks, no longer than asked, with little padding."""
    if count <= largest:
        return count
    length = -(-count // -(-count // largest))
    return -(-length // VECTOR_LENGTH) * VECTOR_LENGTH


def in_range(ranges: Range, start: Array, length: int) -> Bool[Array, "m length"]:
    """Whether each token of a block is in the range of each query."""
    first, last = ranges
    index = (start + jnp.arange(length, dtype=start.dtype))[None, :]
    return (index >= first[:, None]) & (index < last[:, None])


def sight(
    ranges: Range, starts: Int[Array, " blocks"], length: int
) -> Int[Array, " blocks"]:
    """Return which blocks are seen by no query, in part, or wholly by each: 0, 1, 2."""
    first, last = (bound[None, :] for bound in ranges)
    start, stop = starts[:, None], starts[:, None] + length
    is_cut = any_in_batch(jnp.any((first > start) | (last < stop), axis=1))
    return jnp.where(is_seen(ranges, starts, length), jnp.where(is_cut, 1, 2), 0)


def is_seen(
    ranges: Range, starts: Int[Array, " blocks"], length: int
) -> Bool[Array, " blocks"]:
    """Return which blocks are seen by a query."""
    first, last = (bound[None, :] for bound in ranges)
    start, stop = starts[:, None], starts[:, None] + length
    # A batch decides together, so that a branch stays a branch.
    return any_in_batch(jnp.any((first < last) & (first < stop) & (last > start), 1))


def map_rows(function: Callable, rows: PyTree, length: int) -> PyTree:
    """Apply a function to blocks of rows in turn and join the results."""
    count = row_count(rows)
    if count <= length:
        return function(rows)
    blocks = lax.map(function, split_rows(rows, length))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:count], blocks)


def fold_columns(step: Callable, rows: PyTree, blocks: PyTree, length: int) -> PyTree:
    """Fold over the blocks of tokens that are seen; each is computed again backward.

    Rows are queries, what is carried of them, and their ranges.
    """
    queries, carry, ranges = rows

    def in_part(carry, block, start):
        return fold_pieces(step, (queries, carry, ranges), block, start)

    def wholly(carry, block, start):
        return step(queries, carry, block, True)

    def not_at_all(carry, block, start):
        return carry

    starts = length * jnp.arange(row_count(blocks), dtype=jnp.int32)
    if len(starts) == 1:
        of_one = wholly if ranges is None else in_part
        return of_one(carry, jax.tree.map(lambda block: block[0], blocks), starts[0])
    branches = [not_at_all, in_part, wholly]
    seen = None if ranges is None else sight(ranges, starts, length)

    @jax.checkpoint
    def of_block(carry, column):
        block, start, seen = column
        if seen is None:
            return wholly(carry, block, start), None
        return lax.switch(seen, branches, carry, block, start), None

    return lax.scan(of_block, carry, (blocks, starts, seen))[0]


def fold_pieces(step: Callable, rows: PyTree, block: PyTree, start: Array) -> PyTree:
    """Fold over the pieces of a tile that are seen."""
    length = balanced(column_count(block), PIECE)

    def in_part(row, piece, start):
        queries, carry, ranges = row
        return step(queries, carry, piece, in_range(ranges, start, length))

    if row_count(rows) <= PIECE and column_count(block) <= PIECE:
        return in_part(rows, block, start)
    pieces = split_columns(block, length)
    starts = start + length * jnp.arange(row_count(pieces), dtype=start.dtype)

    def of_row(row):
        queries, carry, ranges = row

        @jax.checkpoint
        def of_piece(carry, column):
            row = queries, carry, ranges
            # What is seen wholly has no branch of its own, which costs more to compile.
            seen = is_seen(ranges, column[1][None], length)[0]
            return lax.cond(seen, in_part, lambda row, *_: row[1], row, *column), None

        return lax.scan(of_piece, carry, (pieces, starts))[0]

    return map_rows(of_row, rows, balanced(row_count(rows), PIECE))


def row_count(tree: PyTree) -> int:
    """Return the length of the first axis, which all arrays of a tree share."""
    return jax.tree.leaves(tree)[0].shape[0]


def column_count(tree: PyTree) -> int:
    """Return the length of the last axis, which all arrays of a tree share."""
    return jax.tree.leaves(tree)[0].shape[-1]


def split_rows(tree: PyTree, length: int) -> PyTree:
    """Cut the first axis into blocks, filling the last with copies of its end."""

    def split(array):
        missing = (0, -len(array) % length)
        padded = jnp.pad(array, [missing] + [(0, 0)] * (array.ndim - 1), mode="edge")
        return padded.reshape(-1, length, *array.shape[1:])

    return jax.tree.map(split, tree)


def split_columns(tree: PyTree, length: int) -> PyTree:
    """Cut the last axis into blocks, filling the last with zeros."""

    def split(array):
        missing = (0, -array.shape[-1] % length)
        padded = jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [missing])
        return jnp.moveaxis(padded.reshape(*array.shape[:-1], -1, length), -2, 0)

    return jax.tree.map(split, tree)
