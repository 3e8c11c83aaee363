"""What moves in a derivative: tangents, with `None` for what stands still."""

import jax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import PyTree


def only_moving(tangents: PyTree) -> PyTree:
    """Replace tangents known to be zero by `None`, so that they cost nothing."""
    return jax.tree.map(lambda a: None if isinstance(a, SymbolicZero) else a, tangents)
