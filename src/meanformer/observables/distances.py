"""Distances between the tokens of a cloud: mean, largest, quantiles."""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from meanformer.errors import as_float_array, check, check_shape, is_concrete
from meanformer.measures import TokenCloud
from meanformer.typing import ArrayLike

BLOCK_AREA = 1 << 20


class DistanceStatistics(eqx.Module):
    r"""Statistics of $|x - y|$ for two tokens drawn independently from a cloud.

    Attributes:
        mean: $\iint |x-y|\,\mathrm{d}\mu\,\mathrm{d}\mu$.
        largest: the diameter of the support.
        levels: the levels of the quantiles.
        quantiles: for each level $q$ the smallest $r$ with probability at least $q$ of
            $|x-y| \le r$.
    """

    mean: Float[Array, ""]
    largest: Float[Array, ""]
    levels: Float[Array, " q"]
    quantiles: Float[Array, " q"]


def distance_statistics(
    cloud: TokenCloud,
    levels: ArrayLike = (0.05, 0.25, 0.5, 0.75, 0.95),
) -> DistanceStatistics:
    r"""Statistics of the distances between the tokens of a cloud.

    They belong to the measure: a token also meets itself, and neither the order of
    tokens nor splitting one in two changes anything.

    Args:
        cloud: the tokens; those of weight zero are absent.
        levels: levels in $[0, 1]$ of the quantiles to compute.

    Returns:
        The statistics. Cost: $O(n^2 d)$ time, about fifty times for the quantiles,
        which are found by bisection to rounding; memory for one block of pairs.
    """
    levels = as_float_array("levels", levels).astype(cloud.points.dtype)
    check_shape("levels", levels, (None,))
    if is_concrete(levels):
        given = np.asarray(levels)
        inside = bool(((given >= 0) & (given <= 1)).all())
        check(inside, f"levels is {levels}; they must lie in [0, 1].")
    return _statistics(cloud, levels)


@eqx.filter_jit
def _statistics(cloud: TokenCloud, levels: Float[Array, " q"]) -> DistanceStatistics:
    # Absent tokens stand on a present one, so that they cannot be the farthest.
    anchor = cloud.points[jnp.argmax(cloud.weights)]
    present = (cloud.weights > 0)[:, None]
    cloud = cloud.moved(jnp.where(present, cloud.points, anchor[None, :]))
    largest = _of_rows(cloud, jnp.max).max()
    mean = cloud.weights @ _of_rows(cloud, lambda distances: distances @ cloud.weights)
    quantiles = _bisected(lambda radii: _mass_within(cloud, radii), levels, largest)
    return DistanceStatistics(mean, largest, levels, quantiles)


def _bisected(mass_within: Callable, levels: Array, largest: Array) -> Array:
    """Return the smallest radii within which there is enough mass."""
    enough = levels - 64 * jnp.finfo(levels.dtype).eps

    def halve(_, bracket):
        low, high = bracket
        middle = (low + high) / 2
        is_enough = mass_within(middle) >= enough
        return jnp.where(is_enough, low, middle), jnp.where(is_enough, middle, high)

    zeros = jnp.zeros_like(levels)
    steps = jnp.finfo(levels.dtype).nmant + 2
    high = lax.fori_loop(0, steps, halve, (zeros, zeros + largest))[1]
    return jnp.where(mass_within(zeros) >= enough, 0, high)


def _mass_within(cloud: TokenCloud, radii: Float[Array, " q"]) -> Float[Array, " q"]:
    """Return the mass of the pairs that are no farther apart than each radius."""

    def masses(distances: Float[Array, " n"]) -> Float[Array, " q"]:
        is_near = distances[None, :] <= radii[:, None]
        return jnp.where(is_near, cloud.weights[None, :], 0).sum(axis=1)

    return cloud.weights @ _of_rows(cloud, masses)


def _of_rows(cloud: TokenCloud, summary: Callable) -> Array:
    """Summarise the distances of each token to all others, a block at a time."""

    def of_row(point):
        differences = point[None, :] - cloud.points
        return summary(jnp.sqrt(jnp.sum(differences**2, axis=1)))

    rows = min(max(1, BLOCK_AREA // cloud.points.size), cloud.count)
    return lax.map(of_row, cloud.points, batch_size=rows)
