"""The two points of a cloud that are farthest from each other."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meanformer.numerics.matrices import matmul
from meanformer.numerics.precision import widened

PAIRS_AT_ONCE = 2_000_000


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
