"""Plans: how a sum would be computed, how long it would take, and why."""

import collections
from typing import Any, NamedTuple

from jaxtyping import Array, Float

from meanformer.numerics.pair_sums.pairs import Pairs

# Seconds on two recent cores: one exponential and its share of the sums, and one
# multiplication and addition for a pair.
PAIR, PAIR_PRODUCT = 6e-10, 5e-11


class SumPlan(NamedTuple):
    """How one sum would be computed.

    Attributes:
        method: `"exact"` or `"fourier"`.
        reason: why.
        seconds: predicted time.
        exact_seconds: predicted time of the exact sum.
        queries: number of queries.
        tokens: number of tokens.
        level: what a sum that is not exact starts with; `print` shows it in words.
    """

    method: str
    reason: str
    seconds: float
    exact_seconds: float
    queries: int
    tokens: int
    level: Any = None

    def __str__(self) -> str:
        """Say it in one line."""
        what = f"{self.queries} queries, {self.tokens} tokens: {self.method} sums"
        if self.level is not None:
            what += f" ({self.level})"
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


class Sizes(NamedTuple):
    """What the time of a sum depends on; a column is the mass or one value."""

    queries: int
    tokens: int
    dimension: int
    columns: int

    def exact_seconds(self) -> float:
        """Predict the time of the exact sum; masks are not counted."""
        products = self.dimension + self.columns
        return self.queries * self.tokens * (PAIR + products * PAIR_PRODUCT)


def sizes_of(pairs: Pairs, values: Float[Array, "n v"]) -> Sizes:
    """Return the sizes of a sum."""
    counts = len(pairs.tilts), len(pairs.points)
    return Sizes(*counts, pairs.tilts.shape[1], 1 + values.shape[1])


def exact_plan(pairs: Pairs, values: Float[Array, "n v"], reason: str) -> SumPlan:
    """Plan an exact sum."""
    sizes = sizes_of(pairs, values)
    seconds = sizes.exact_seconds()
    return SumPlan("exact", reason, seconds, seconds, sizes.queries, sizes.tokens)
