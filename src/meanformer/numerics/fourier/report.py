"""Reports of fast sums: how each was computed, and how accurate it is."""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from meanformer.errors import SlowSums, is_concrete, warn

NONE, MODES, RANGE, WRONG = range(4)
REASONS = (
    None,
    "the scores are too large for the grids there are",
    "the masses differ too much for the arithmetic",
    "the error on a random sample was above the tolerance",
)


class SumReport(eqx.Module):
    """How a sum was computed and how accurate it is; or several in a loop.

    Errors are relative: to the mass, and to the width of the values.

    Attributes:
        level: index of the level that was used; past the last one: the exact sum.
        bound: largest error of a query that was not summed exactly, as estimated from
            those that were, with a margin.
        observed: largest error of the level on a random sample of the queries.
        patched: how many single queries were summed exactly.
        reason: why all were, as an index of `REASONS`; zero if they were not.
    """

    level: Int[Array, "*h"]
    bound: Float[Array, "*h"]
    observed: Float[Array, "*h"]
    patched: Int[Array, "*h"]
    reason: Int[Array, "*h"]

    @property
    def is_exact(self) -> Bool[Array, "*h"]:
        """Whether all queries were summed exactly."""
        return self.reason != NONE

    @property
    def in_words(self) -> str | None:
        """Why all queries were summed exactly; `None` if they were not."""
        return REASONS[int(self.reason)]


def warn_if_exact(report: SumReport, tolerance: float) -> None:
    """Warn where fast sums were asked for and exact ones computed, if that is known."""
    if is_concrete(report.reason) and bool(report.is_exact):
        warn(
            f"Fourier({tolerance}) would have been inaccurate here ({report.in_words}),"
            " so that exact sums were computed; raise the tolerance, lower beta, or "
            "use Auto().",
            SlowSums,
        )


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
