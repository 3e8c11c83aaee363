"""Arithmetic that is precise enough: half precision is computed in single."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree


def widened(tree: PyTree) -> PyTree:
    """Replace arrays of half precision by arrays of single precision."""

    def widen(leaf):
        is_half = eqx.is_inexact_array(leaf) and jnp.finfo(leaf.dtype).bits < 32
        return leaf.astype(jnp.float32) if is_half else leaf

    return jax.tree.map(widen, tree)


def cast(tree: PyTree, dtype: jnp.dtype) -> PyTree:
    """Return a tree with its floating-point arrays in one type."""

    def convert(leaf):
        return leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf

    return jax.tree.map(convert, tree)
