"""Solves that have no derivative say so, instead of failing somewhere inside."""

from functools import partial

import equinox as eqx
import jax
from jaxtyping import PyTree

from meanformer.errors import Unsupported


def without_derivative(tree: PyTree, reason: str) -> PyTree:
    """Return the same; raise with a reason if somebody differentiates through it."""
    arrays, rest = eqx.partition(tree, eqx.is_inexact_array)
    return eqx.combine(_constant(arrays, reason), rest)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _constant(arrays: PyTree, reason: str) -> PyTree:
    return arrays


@_constant.defjvp
def _refuse(reason, primals, tangents):
    raise Unsupported(reason)
