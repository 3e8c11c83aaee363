"""Exact sums for the few queries whose fast sums are not accurate enough."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from meanformer.numerics.arrays import any_in_batch
from meanformer.numerics.fourier.level_sums import MassAndMean
from meanformer.numerics.fourier.levels import Devices
from meanformer.numerics.pair_sums.pairs import Pairs
from meanformer.numerics.pair_sums.softmax import softmax_sum


class Decisions(NamedTuple):
    """The level that was chosen, and the queries to sum exactly; without derivative.

    Attributes:
        level: index of the level; past the last one: the exact sum.
        patch: indices of queries with the largest error bounds.
        is_patched: which of them are summed exactly.
    """

    level: Int[Array, ""]
    patch: Int[Array, " p"]
    is_patched: Bool[Array, " p"]


def exactly(
    pairs: Pairs, values: Float[Array, "n v"], devices: Devices | None
) -> MassAndMean:
    """Return the exact log-mass and mean."""
    if devices is None:
        return softmax_sum(pairs, values, block_size="auto")
    return devices.exact(devices.mesh, devices.axis, pairs, values)


def queries_of(pairs: Pairs, index: Int[Array, " p"]) -> Pairs:
    """Return some of the queries with all the tokens."""
    return eqx.tree_at(lambda pairs: pairs.tilts, pairs, pairs.tilts[index])


def results_at(result: MassAndMean, index: Int[Array, " p"]) -> MassAndMean:
    """Return the results of some of the queries."""
    return result[0][index], result[1][index]


def replaced(result: MassAndMean, decisions: Decisions, by: MassAndMean) -> MassAndMean:
    """Put in the rows that were summed exactly."""
    index, is_patched = decisions.patch, decisions.is_patched

    def put(array: Array, new: Array) -> Array:
        keep = is_patched.reshape(-1, *[1] * (array.ndim - 1))
        rows = jnp.where(keep, new, array[index])
        return array.at[index].set(rows, unique_indices=True)

    return jax.tree.map(put, result, by)


def replaced_exactly(
    result: MassAndMean,
    decisions: Decisions,
    pairs: Pairs,
    values: Float[Array, "n v"],
    devices: Devices | None,
) -> MassAndMean:
    """Replace the sums of the patched queries by exact ones."""

    def replace() -> MassAndMean:
        exact = exactly(queries_of(pairs, decisions.patch), values, devices)
        return replaced(result, decisions, exact)

    is_needed = any_in_batch(decisions.is_patched.any())
    return lax.cond(is_needed, replace, lambda: result)
