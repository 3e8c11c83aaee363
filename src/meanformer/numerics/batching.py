"""Decisions that a batch takes together, so that branches stay branches in `vmap`.

A branch on a condition that differs within a batch would be computed on both sides.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool


@jax.custom_batching.custom_vmap
def any_in_batch(condition: Bool[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Return the condition; within `vmap`, whether it holds anywhere in the batch."""
    return condition


@any_in_batch.def_vmap
def _join_conditions(axis_size, in_batched, condition):
    return any_in_batch(jnp.any(condition, axis=0)), False


def all_in_batch(condition: Bool[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Return the condition; within `vmap`, whether it holds everywhere in the batch."""
    return ~any_in_batch(~condition)
