"""How accurate the fast sums of a solve were, and where exact sums replaced them."""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meanformer.numerics.fourier.report import SumReport


class SumSummary(eqx.Module):
    """The fast sums of one velocity, or of several along depth.

    Attributes:
        bound: largest bound on the relative error of a query summed fast.
        error: largest relative error seen on random samples of the queries.
        patched: how many single queries were summed exactly.
        exact: how many sums were exact because fast ones would have been inaccurate.
    """

    bound: Float[Array, "*t"]
    error: Float[Array, "*t"]
    patched: Int[Array, "*t"]
    exact: Int[Array, "*t"]


def summary_of(reports: Sequence[SumReport]) -> SumSummary:
    """Return the worst of the reports, of which there is at least one."""

    def gathered(values) -> Array:
        return jnp.concatenate([jnp.ravel(value) for value in values])

    return SumSummary(
        gathered(report.bound for report in reports).max(),
        gathered(report.observed for report in reports).max(),
        gathered(report.patched for report in reports).sum(),
        gathered(report.is_exact for report in reports).sum(),
    )


#: The arrays of `SumSummary` as files and statistics name them.
SUM_NAMES = ("sum_bound", "sum_error", "patched_queries", "exact_sums")
