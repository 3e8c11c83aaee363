"""Walking over all pairs of queries and tokens tile by tile.

A tile is a block of queries against a block of tokens; only one tile of scores exists
at any moment, in the value and, because tiles are recomputed, in the derivatives.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

TILE_AREA = 1024 * 1024

Range = tuple[Int[Array, " m"], Int[Array, " m"]]


def tile_shape(queries: int, tokens: int, block_size: int | str) -> tuple[int, int]:
    """Return how many queries and how many tokens meet in one tile.

    With `"auto"` a tile has a fixed area, so that a problem with few pairs is one
    tile and a few queries meet many tokens at once.
    """
    if not isinstance(block_size, str):
        return min(block_size, queries), min(block_size, tokens)
    side = math.isqrt(TILE_AREA)
    rows = min(queries, max(side, TILE_AREA // tokens))
    return rows, min(tokens, max(side, TILE_AREA // rows))


def fold_tiles(
    step: Callable,
    start: Callable,
    queries: PyTree[Array],
    tokens: PyTree[Array],
    ranges: Range | None,
    block_size: int | str,
) -> PyTree[Array]:
    """Fold `step(carry, queries, tokens, seen)` over the tokens, tile by tile.

    Args:
        step: one tile; `seen` tells which tokens are in the range of which query, and
            is `True` when there are no ranges.
        start: from the queries of a tile to the carry before its first token.
        queries: arrays with one row per query.
        tokens: arrays with one row per token, continued by zeros to fill the tiles.
        ranges: first and one-past-last token that each query sees, or everything.
        block_size: see `tile_shape`.

    Returns:
        The last carry, whose arrays must have one row per query. Tiles that no range
        meets are skipped; tiles are recomputed in the backward pass.
    """
    count = len(jax.tree.leaves(tokens)[0])
    rows, columns = tile_shape(len(jax.tree.leaves(queries)[0]), count, block_size)
    padded = -(-count // columns) * columns
    tokens = jax.tree.map(lambda a: pad_rows(a, padded, mode="constant"), tokens)
    starts = jnp.arange(0, padded, columns)

    def row_of_tiles(block):
        queries, ranges = block

        def tile(carry, column):
            tokens, first = column
            return step(carry, queries, tokens, in_range(ranges, first, columns))

        def is_needed(column):
            return ranges is None or meets(ranges, column[1], columns)

        return fold_blocks(tile, start(queries), (tokens, starts), columns, is_needed)

    return map_blocks(row_of_tiles, (queries, ranges), rows)


def in_range(ranges: Range | None, start: Array, length: int) -> Array | bool:
    """Whether each token of a block is in the range of each query."""
    if ranges is None:
        return True
    first, last = ranges
    index = (start + jnp.arange(length))[None, :]
    return (index >= first[:, None]) & (index < last[:, None])


def meets(ranges: Range, start: Array, length: int) -> Array:
    """Whether any query sees any token of a block."""
    first, last = ranges
    return jnp.any((first < last) & (first < start + length) & (last > start))


def map_blocks(function: Callable, rows: PyTree, length: int) -> PyTree:
    """Apply a function to blocks of rows in turn and join the results."""
    count = len(jax.tree.leaves(rows)[0])
    if count <= length:
        return function(rows)
    padded = -(-count // length) * length
    rows = jax.tree.map(lambda a: pad_rows(a, padded, mode="edge"), rows)
    blocks = lax.map(function, split_rows(rows, length))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:count], blocks)


def fold_blocks(
    step: Callable, carry: PyTree, columns: PyTree, length: int, is_needed: Callable
) -> PyTree:
    """Fold over blocks of tokens, recomputing each in the backward pass."""
    tokens, starts = columns
    if len(starts) == 1:
        return step(carry, (tokens, starts[0]))

    @jax.checkpoint
    def guarded(carry, column):
        needed = is_needed(column)
        if needed is True:
            return step(carry, column), None
        return lax.cond(needed, step, lambda carry, _: carry, carry, column), None

    return lax.scan(guarded, carry, (split_rows(tokens, length), starts))[0]


def pad_rows(array: Array, count: int, *, mode: str) -> Array:
    """Append rows until there are `count`: zeros, or copies of the last row."""
    missing = [(0, count - len(array))] + [(0, 0)] * (array.ndim - 1)
    return jnp.pad(array, missing, mode=mode)


def split_rows(tree: PyTree, length: int) -> PyTree:
    """Reshape every array from `(count, ...)` to `(count / length, length, ...)`."""
    return jax.tree.map(lambda a: a.reshape(-1, length, *a.shape[1:]), tree)
