"""Pairs of points by their distance: closest, farthest, chains of close ones.

Squares of distances are sums of squared differences, right to rounding also for points
that nearly meet; inner products would lose them. One block of pairs exists at a time.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, ScalarLike

from meanformer.numerics.arrays import matmul, widened
from meanformer.numerics.pair_sums.tiles import map_rows

PAIRS_AT_ONCE = 2_000_000
# Coordinates up to which writing out the sum is faster than a loop over it.
WRITTEN_OUT = 8


def closest_pair(
    points: Float[Array, "n d"], present: Bool[Array, " n"]
) -> tuple[Float[Array, ""], Int[Array, ""], Int[Array, ""]]:
    """Return the smallest distance between present points, and between which.

    Infinity if there are not two of them. No derivative. Cost: $O(n^2 d)$ time, two
    million pairs of memory.
    """
    points = lax.stop_gradient(points)

    def squares_to_others(index, rows, is_row):
        others = index[:, None] != jnp.arange(len(points))[None, :]
        pairs = others & is_row[:, None] & present[None, :]
        return jnp.where(pairs, squared_distances(rows, points), jnp.inf)

    def of_block(block):
        return squares_to_others(*block).min(axis=1)

    table = jnp.arange(len(points)), points, present
    first = jnp.argmin(_by_rows(of_block, table))
    row = squares_to_others(*[column[first][None] for column in table])[0]
    second = jnp.argmin(row)
    return jnp.sqrt(row[second]), first, second


@jax.jit
def farthest_pair(
    points: Float[Array, "n d"],
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Return the indices of two points at the largest distance; no derivative.

    Squares of distances come from inner products, so the origin should lie among the
    points. Cost: $O(n^2 d)$ time, two million pairs of memory.
    """
    points = widened(lax.stop_gradient(points))
    size = jnp.max(jnp.abs(points))
    points = points / jnp.where(size > 0, size, 1)
    squares = jnp.sum(points**2, axis=1)

    def farthest_from(index):
        distances = squares - 2 * matmul(points, points[index])
        partner = jnp.argmax(distances)
        return squares[index] + distances[partner], partner

    indices = jnp.arange(len(points))
    rows_at_once = max(1, PAIRS_AT_ONCE // len(points))
    distances, partners = lax.map(farthest_from, indices, batch_size=rows_at_once)
    first = jnp.argmax(distances)
    return first, partners[first]


def chain_labels(
    points: Float[Array, "n d"], present: Bool[Array, " n"], distance: ScalarLike
) -> Int[Array, " n"]:
    """Label each point by the first point that a chain of short steps leads to.

    A step leads from a present point to another one at most `distance` away; absent
    points keep their own index. No derivative. Cost: $O(n^2 d)$ time for each link of
    the longest chain, two million pairs of memory.
    """
    points = lax.stop_gradient(points)

    def lowered(labels: Int[Array, " n"]) -> Int[Array, " n"]:
        def of_block(block):
            rows, is_row, own = block
            close = squared_distances(rows, points) <= distance**2
            linked = close & is_row[:, None] & present[None, :]
            return jnp.where(linked, labels[None, :], own[:, None]).min(axis=1)

        return _by_rows(of_block, (points, present, labels))

    return settled_labels(lowered, jnp.arange(len(points)))


def settled_labels(lowered: Callable[[Array], Array], start: Array) -> Array:
    """Return labels that are lowered again and again until nothing changes."""

    def sweep(carry):
        lower = lowered(carry[0])
        return lower, jnp.any(lower != carry[0])

    return lax.while_loop(lambda carry: carry[1], sweep, (start, jnp.array(True)))[0]


def largest_relative_change(
    points: Float[Array, "n d"],
    changes: Float[Array, "n d"],
    present: Bool[Array, " n"],
    *,
    relative: ScalarLike,
    absolute: ScalarLike,
) -> Float[Array, ""]:
    r"""Return how much the gaps of present points change, against what is allowed.

    $$\max_{i \ne j} \frac{|c_i - c_j|}{\rho\,|x_i - x_j| + \alpha}.$$
    A change that neighbours share does not count. Cost: as `closest_pair`, twice.

    Args:
        points: the points $x_i$.
        changes: their changes $c_i$.
        present: which of them count.
        relative: the share $\rho$ of a gap that its change may have.
        absolute: the change $\alpha > 0$ that is always allowed.
    """

    def of_block(block):
        rows, moves, is_row = block
        allowed = relative * jnp.sqrt(squared_distances(rows, points)) + absolute
        ratios = jnp.sqrt(squared_distances(moves, changes)) / allowed
        pairs = is_row[:, None] & present[None, :]
        return jnp.where(pairs, ratios, 0).max(axis=1)

    return jnp.max(_by_rows(of_block, (points, changes, present)))


def squared_distances(
    rows: Float[Array, "m d"], points: Float[Array, "n d"]
) -> Float[Array, "m n"]:
    """Return squared distances; coordinate by coordinate, so that it vectorises."""
    ends, starts = rows.T, points.T

    def add(k, total):
        return total + (ends[k][:, None] - starts[k][None, :]) ** 2

    total = jnp.zeros((len(rows), len(points)), points.dtype)
    if points.shape[1] > WRITTEN_OUT:
        return lax.fori_loop(0, points.shape[1], add, total)
    for k in range(points.shape[1]):
        total = add(k, total)
    return total


def _by_rows(of_block: Callable, table: PyTree[Array]) -> Array:
    count = len(table[0])
    return map_rows(of_block, table, max(1, PAIRS_AT_ONCE // count))
