"""Rows filled up to a number that can be shared."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree


def padded(tree: PyTree[Array], size: int) -> PyTree[Array]:
    """Fill up with rows of zeros, absent tokens or queries to drop, to equal shares."""

    def pad(array):
        missing = (0, -len(array) % size)
        return jnp.pad(array, [missing] + [(0, 0)] * (array.ndim - 1))

    return jax.tree.map(pad, tree)
