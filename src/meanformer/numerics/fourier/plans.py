"""Plans: how a sum would be computed, how long it would take, and why."""

import collections
from typing import NamedTuple

from jaxtyping import Array, Float

from meanformer.numerics.fourier.costs import costs
from meanformer.numerics.fourier.levels import GAUSSIAN, Level
from meanformer.numerics.pair_sums.pairs import Pairs


class SumPlan(NamedTuple):
    """How one sum would be computed.

    Attributes:
        method: `"exact"` or `"fourier"`.
        reason: why.
        seconds: predicted time.
        exact_seconds: predicted time of the exact sum.
        queries: number of queries.
        tokens: number of tokens.
        level: modes and accuracy of the transforms; `None` for an exact sum.
    """

    method: str
    reason: str
    seconds: float
    exact_seconds: float
    queries: int
    tokens: int
    level: Level | None = None

    def __str__(self) -> str:
        """Say it in one line."""
        what = f"{self.queries} queries, {self.tokens} tokens: {self.method} sums"
        if self.level is not None:
            what += f" ({level_in_words(self.level)})"
        what += f", about {self.seconds:.2g} s"
        if self.method != "exact":
            what += f" instead of {self.exact_seconds:.2g} s"
        return f"{what}, since {self.reason}"


class Explanation(NamedTuple):
    """The plans of all sums that a map asks for."""

    plans: tuple[SumPlan, ...]

    def __str__(self) -> str:
        """Say it, one line for each sum."""
        if not self.plans:
            return "no sum over pairs is asked for"
        counts = collections.Counter(map(str, self.plans))
        return "\n".join(
            plan if count == 1 else f"{count} times: {plan}"
            for plan, count in counts.items()
        )


def level_in_words(level: Level) -> str:
    """Describe modes and accuracy."""
    kind = "Gaussian" if level.kind == GAUSSIAN else "circle"
    return f"{kind}, {level.modes} modes per axis, accuracy {level.accuracy:.0e}"


class Sizes(NamedTuple):
    """What the time of a sum depends on; a column is the mass or one value."""

    queries: int
    tokens: int
    dimension: int
    columns: int


def sizes_of(pairs: Pairs, values: Float[Array, "n v"]) -> Sizes:
    """Return the sizes of a sum."""
    counts = len(pairs.tilts), len(pairs.points)
    return Sizes(*counts, pairs.tilts.shape[1], 1 + values.shape[1])


def exact_plan(pairs: Pairs, values: Float[Array, "n v"], reason: str) -> SumPlan:
    """Plan an exact sum; masks are not counted."""
    sizes = sizes_of(pairs, values)
    seconds = costs().exact(*sizes)
    return SumPlan("exact", reason, seconds, seconds, sizes.queries, sizes.tokens)


def fourier_plan(
    pairs: Pairs, values: Float[Array, "n v"], level: Level, reason: str
) -> SumPlan:
    """Plan a sum at a level."""
    sizes = sizes_of(pairs, values)
    seconds, exact = costs().fast(level, *sizes), costs().exact(*sizes)
    counts = sizes.queries, sizes.tokens
    return SumPlan("fourier", reason, seconds, exact, *counts, level)
