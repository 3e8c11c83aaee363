"""Walking over all pairs of queries and tokens tile by tile.

A tile is a block of queries against a block of tokens. Only one tile of scores exists
at a time: in the value, and in the derivatives too, which compute each tile again.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree

from meanformer.numerics.arrays import any_in_batch

# Found by timing: fewer pairs wait for threads, more fall out of the cache.
TILE_ROWS, TILE_COLUMNS = 2048, 1024
# Square tiles waste the least along the edge of a causal mask.
MASKED_TILE_ROWS = 1024
VECTOR_LENGTH = 16

Range = tuple[Int[Array, " m"], Int[Array, " m"]]


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
            `fold(step, carry)`, which folds `step(carry, tokens, seen)` over the blocks
            of tokens. `seen` tells which token is in the range of which query, or is
            `True` where all are. Blocks that no range meets are skipped.
        queries: arrays with one row per query.
        tokens: arrays with one column per token; blocks are filled up with zeros.
        ranges: the first token that each query sees and one past the last, or `None`
            when all are seen.
        block_size: queries and tokens per tile, or `"auto"`.

    Returns:
        What `row_of_tiles` returns, with one row per query.
    """
    counts = row_count(queries), column_count(tokens)
    rows, columns = tile_shape(*counts, block_size, is_masked=ranges is not None)

    # Before the loop over queries, which would do it again for each block of them.
    blocks = split_columns(tokens, columns)

    def of_block(block):
        queries, ranges = block

        def fold(step, carry):
            return fold_columns(step, carry, blocks, columns, ranges)

        return row_of_tiles(queries, fold)

    return map_rows(of_block, (queries, ranges), rows)


def tile_shape(
    queries: int, tokens: int, block_size: int | str, *, is_masked: bool = False
) -> tuple[int, int]:
    """Return how many queries and how many tokens meet in one tile.

    Automatic tiles have a fixed area at most: few pairs are one tile, and few queries
    meet many tokens at once.
    """
    if not isinstance(block_size, str):
        return min(block_size, queries), min(block_size, tokens)
    most_rows = MASKED_TILE_ROWS if is_masked else TILE_ROWS
    area = most_rows * TILE_COLUMNS
    rows = balanced(queries, max(most_rows, area // tokens))
    return rows, balanced(tokens, max(TILE_COLUMNS, area // max(rows, 1)))


def balanced(count: int, largest: int) -> int:
    """Return the length of equal blocks, no longer than asked, with little padding."""
    if count <= largest:
        return count
    length = -(-count // -(-count // largest))
    return -(-length // VECTOR_LENGTH) * VECTOR_LENGTH


def in_range(
    ranges: Range | None, start: Array, length: int
) -> Bool[Array, "m length"] | bool:
    """Whether each token of a block is in the range of each query."""
    if ranges is None:
        return True
    first, last = ranges
    index = (start + jnp.arange(length, dtype=start.dtype))[None, :]
    return (index >= first[:, None]) & (index < last[:, None])


def sight(
    ranges: Range, starts: Int[Array, " blocks"], length: int
) -> Int[Array, " blocks"]:
    """Return which blocks are seen by no query, in part, or wholly by each: 0, 1, 2."""
    first, last = (bound[None, :] for bound in ranges)
    start, stop = starts[:, None], starts[:, None] + length
    is_seen = jnp.any((first < last) & (first < stop) & (last > start), axis=1)
    is_cut = jnp.any((first > start) | (last < stop), axis=1)
    # A batch decides together, so that a branch stays a branch.
    return jnp.where(any_in_batch(is_seen), jnp.where(any_in_batch(is_cut), 1, 2), 0)


def map_rows(function: Callable, rows: PyTree, length: int) -> PyTree:
    """Apply a function to blocks of rows in turn and join the results."""
    count = row_count(rows)
    if count <= length:
        return function(rows)
    blocks = lax.map(function, split_rows(rows, length))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:count], blocks)


def fold_columns(
    step: Callable, carry: PyTree, blocks: PyTree, length: int, ranges: Range | None
) -> PyTree:
    """Fold over the blocks of tokens that are seen; each is computed again backward."""

    def in_part(carry, block, start):
        return step(carry, block, in_range(ranges, start, length))

    def wholly(carry, block, start):
        return step(carry, block, True)

    def not_at_all(carry, block, start):
        return carry

    starts = length * jnp.arange(row_count(blocks), dtype=jnp.int32)
    if len(starts) == 1:
        return in_part(carry, jax.tree.map(lambda block: block[0], blocks), starts[0])
    branches = [not_at_all, in_part, wholly]
    seen = None if ranges is None else sight(ranges, starts, length)

    @jax.checkpoint
    def of_block(carry, column):
        block, start, seen = column
        if seen is None:
            return wholly(carry, block, start), None
        return lax.switch(seen, branches, carry, block, start), None

    return lax.scan(of_block, carry, (blocks, starts, seen))[0]


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
