"""Absent tokens: rows that fill up to a number, and places that must do no harm."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree


def padded(tree: PyTree[Array], size: int) -> PyTree[Array]:
    """Fill up with rows of zeros, absent tokens or queries to drop, to equal shares."""

    def pad(array):
        missing = (0, -len(array) % size)
        return jnp.pad(array, [missing] + [(0, 0)] * (array.ndim - 1))

    return jax.tree.map(pad, tree)


def held(
    array: Float[Array, "*shape"], present: Bool[Array, "..."], power: float = 0.25
) -> Float[Array, "*shape"]:
    """Hold what absent tokens have fixed, below a power of the largest number.

    They have no derivative but that by their weight, which stays finite.
    """
    largest = float(jnp.finfo(array.dtype).max) ** power
    fixed = jnp.nan_to_num(lax.stop_gradient(array), posinf=largest)
    return jnp.where(present, array, jnp.clip(fixed, -largest, largest))
