"""Pairs of points by their distance: the nearest, chains of close ones, changes."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, ScalarLike

PAIRS_AT_ONCE = 2_000_000


def nearest_neighbours(
    points: Float[Array, "n d"], present: Bool[Array, " n"]
) -> tuple[Float[Array, " n"], Int[Array, " n"]]:
    """Return how far the nearest other present point is, and which it is.

    An absent point, and a point without another, has the distance infinity. Distances
    come from differences, so they are right to rounding also for points that nearly
    meet. No derivative. Cost: $O(n^2 d)$ time, two million pairs of memory.
    """
    points = lax.stop_gradient(points)

    def of_row(index):
        others = present & present[index] & (jnp.arange(len(points)) != index)
        squares = jnp.where(others, _squares(points, index), jnp.inf)
        partner = jnp.argmin(squares)
        return jnp.sqrt(squares[partner]), partner

    return _by_rows(of_row, len(points))


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
    A change that neighbours share does not count. Cost: as `nearest_neighbours`.

    Args:
        points: the points $x_i$.
        changes: their changes $c_i$.
        present: which of them count.
        relative: the share $\rho$ of a gap that its change may have.
        absolute: the change $\alpha > 0$ that is always allowed.
    """

    def of_row(index):
        gaps = jnp.sqrt(_squares(points, index))
        ratios = jnp.sqrt(_squares(changes, index)) / (relative * gaps + absolute)
        return jnp.max(jnp.where(present & present[index], ratios, 0))

    return jnp.max(_by_rows(of_row, len(points)))


def chain_labels(
    points: Float[Array, "n d"], present: Bool[Array, " n"], distance: ScalarLike
) -> Int[Array, " n"]:
    """Label each point by the first point that a chain of short steps leads to.

    A step leads from a present point to another one at most `distance` away; absent
    points keep their own index. Cost: $O(n^2 d)$ time for each link of the longest
    chain, two million pairs of memory.
    """
    points = lax.stop_gradient(points)

    def sweep(carry):
        labels, _ = carry

        def of_row(index):
            close = _squares(points, index) <= distance**2
            linked = present & present[index] & close
            return jnp.min(jnp.where(linked, labels, labels[index]))

        lower = _by_rows(of_row, len(points))
        return lower, jnp.any(lower != labels)

    start = jnp.arange(len(points)), jnp.array(True)
    return lax.while_loop(lambda carry: carry[1], sweep, start)[0]


def _squares(points: Float[Array, "n d"], index: Int[Array, ""]) -> Float[Array, " n"]:
    return jnp.sum((points - points[index][None, :]) ** 2, axis=1)


def _by_rows(of_row, count: int):
    rows_at_once = max(1, PAIRS_AT_ONCE // count)
    if count <= rows_at_once:
        return jax.vmap(of_row)(jnp.arange(count))
    return lax.map(of_row, jnp.arange(count), batch_size=rows_at_once)
