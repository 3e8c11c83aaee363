"""Cubic interpolation between two saved depths, by the saved velocities."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meanformer.errors import check, is_concrete


class Place(NamedTuple):
    """A depth between two saved ones.

    Attributes:
        after: the index of the saved depth after it.
        share: how far it is on the way to that one, from zero to one.
        width: the distance of the two.
    """

    after: Int[Array, ""]
    share: Float[Array, ""]
    width: Float[Array, ""]


def check_in_range(depths: Float[Array, " t"], depth: Float[Array, ""]) -> None:
    """Raise unless a depth lies between the first and the last."""
    if not (is_concrete(depth) and is_concrete(depths)):
        return
    ends = np.asarray(depths)[[0, -1]]
    low, high = float(ends.min()), float(ends.max())
    check(
        low <= float(depth) <= high,
        f"depth is {float(depth)}; the trajectory covers [{low}, {high}].",
    )


def place_of(depths: Float[Array, " t"], depth: Float[Array, ""]) -> Place:
    """Return where a depth lies among two saved ones or more, in either direction."""
    forward = jnp.where(depths[-1] >= depths[0], 1, -1)
    order = (depths * forward.astype(depths.dtype), depth * forward)
    after = jnp.clip(jnp.searchsorted(*order), 1, len(depths) - 1)
    start, end = depths[after - 1], depths[after]
    width = jnp.where(end == start, 1, end - start)
    return Place(after, (depth - start) / width, width)


def at_depth(
    depths: Float[Array, " t"],
    depth: float | Float[Array, ""],
    path: Float[Array, "t *shape"],
    velocities: Float[Array, "t *shape"],
) -> Float[Array, "*shape"]:
    """Return a saved value, or the cubic between two of them, at a depth in range."""
    depth = jnp.asarray(depth, depths.dtype)
    check_in_range(depths, depth)
    if len(depths) == 1:
        return path[0]
    return hermite(place_of(depths, depth), path, velocities)


def hermite(
    place: Place, path: Float[Array, "t *shape"], velocities: Float[Array, "t *shape"]
) -> Float[Array, "*shape"]:
    """Return the cubic through two saved values with their velocities."""
    after, s, width = place
    return (
        (1 + 2 * s) * (1 - s) ** 2 * path[after - 1]
        + s**2 * (3 - 2 * s) * path[after]
        + width
        * s
        * (1 - s)
        * ((1 - s) * velocities[after - 1] - s * velocities[after])
    )
