"""Sums over all pairs of queries and tokens, in memory linear in their number."""

import abc
import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
from jaxtyping import Array, Float, ScalarLike

from meanformer.errors import check
from meanformer.numerics.pair_sums.kernel import hardmax_sum, kernel_sum
from meanformer.numerics.pair_sums.pairs import Pairs, thinned
from meanformer.numerics.pair_sums.softmax import softmax_sum

# Seconds on two recent cores: one exponential and its share of the sums, and one
# multiplication and addition for a pair.
PAIR, PAIR_PRODUCT = 6e-10, 5e-11

MassAndVectors = tuple[Float[Array, " m"], Float[Array, "m v"]]


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
    """The sizes that set the time of a sum; a column is the mass or one value."""

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


class AbstractPairSums(eqx.Module):
    """How sums over tokens are computed; what they mean does not depend on it."""

    @abc.abstractmethod
    def softmax(self, pairs: Pairs, values: Float[Array, "n v"]) -> MassAndVectors:
        r"""Log-mass and mean of the values, reweighted by the exponential of the score.

        $$\Lambda_i = \log \sum_j w_j e^{s_{ij}}, \qquad
          m_i = \sum_j w_j e^{s_{ij} - \Lambda_i} v_j.$$

        Args:
            pairs: queries and tokens.
            values: the vectors $v_j$ to average, one per token.

        Returns:
            $\Lambda$ and $m$; a query that sees nothing gets $-\infty$ and zero, and
            has zero derivative.
        """

    @abc.abstractmethod
    def kernel(
        self, pairs: Pairs, values: Float[Array, "n v"], profile: Callable
    ) -> MassAndVectors:
        r"""Mass and moment of the values for weights that are a function of the score.

        $$M_i = \sum_j w_j \varphi(s_{ij}), \qquad
          V_i = \sum_j w_j \varphi(s_{ij}) v_j.$$

        Args:
            pairs: queries and tokens.
            values: the vectors $v_j$, one per token.
            profile: the function $\varphi$, applied to arrays element by element.

        Returns:
            $M$ and $V$, both zero for a query that sees nothing.
        """

    @abc.abstractmethod
    def hardmax(
        self, pairs: Pairs, values: Float[Array, "n v"], tolerance: ScalarLike
    ) -> MassAndVectors:
        r"""Best score, and mean of the values over the tokens that reach it.

        $$s_i^* = \max_{j:\, w_j > 0} s_{ij}, \qquad m_i = \sum_{j \in J_i} w_j v_j
          \Big/ \sum_{j \in J_i} w_j, \qquad
          J_i = \{j : w_j > 0,\ s_{ij} \ge s_i^* - \mathrm{tolerance}\}.$$

        The set $J_i$ is constant for differentiation; the derivative of $s_i^*$ is the
        weighted average of the derivatives of the scores in $J_i$.

        Args:
            pairs: queries and tokens.
            values: the vectors $v_j$, one per token.
            tolerance: how far below the best score still counts as a tie.

        Returns:
            $s^*$ and $m$; a query that sees nothing gets $-\infty$ and zero.
        """

    def explain(self, cloud: Any, gamma: Callable) -> Explanation:
        """Say how an in-context map at a cloud's own tokens would be summed, and why.

        The map is called once with sums that answer from about a thousand tokens, so
        that this is cheap for any cloud.

        Args:
            cloud: the context, and the queries.
            gamma: the map.

        Returns:
            One plan for each sum that the map asks for; `print` shows it in words.
        """
        noted = NotedSums(self)
        gamma(eqx.tree_at(lambda cloud: cloud.sums, cloud, noted), cloud.points)
        return Explanation(tuple(noted.plans))


class AbstractPlannedSums(AbstractPairSums):
    """Sums that do not always add up all pairs, and can say when."""

    @abc.abstractmethod
    def plan(self, pairs: Pairs, values: Float[Array, "n v"]) -> SumPlan:
        """Say how `softmax` would compute this sum, without computing it."""


def plan_softmax(
    sums: AbstractPairSums, pairs: Pairs, values: Float[Array, "n v"]
) -> SumPlan:
    """Say how the log-mass and mean would be computed, without computing them."""
    if isinstance(sums, AbstractPlannedSums):
        return sums.plan(pairs, values)
    return exact_plan(pairs, values, "exact sums were asked for")


class Blocked(AbstractPairSums):
    """Exact sums, tile by tile: neither value nor derivative stores all pairs.

    Args:
        block_size: queries and tokens per tile; `"auto"` chooses for speed.

    Cost: time proportional to the number of pairs, memory to one tile.
    """

    block_size: int | str = eqx.field(default="auto", static=True)

    def __check_init__(self):
        size = self.block_size
        is_count = isinstance(size, int) and not isinstance(size, bool) and size > 0
        check(
            is_count or size == "auto",
            f"block_size is {size!r}; it must be a positive integer or 'auto'.",
        )

    def softmax(self, pairs, values):
        """Log-mass and mean under the exponential of the score."""
        return softmax_sum(pairs, values, block_size=self.block_size)

    def kernel(self, pairs, values, profile):
        """Mass and moment under a function of the score."""
        return kernel_sum(pairs, values, profile, block_size=self.block_size)

    def hardmax(self, pairs, values, tolerance):
        """Best score and mean over the tokens that reach it."""
        return hardmax_sum(pairs, values, tolerance, block_size=self.block_size)


class NotedSums(AbstractPairSums):
    """Sums that note what they are asked and answer from some of the tokens."""

    sums: AbstractPairSums
    plans: list[SumPlan] = eqx.field(default_factory=list, static=True)

    def softmax(self, pairs, values):
        """Note the plan of the sum."""
        self.plans.append(plan_softmax(self.sums, pairs, values))
        return Blocked().softmax(*thinned(pairs, values))

    def kernel(self, pairs, values, profile):
        """Note that all pairs are summed, or refuse as the sums do."""
        self.plans.append(exact_plan(pairs, values, "the kernel is no exponential"))
        return self.sums.kernel(*thinned(pairs, values), profile)

    def hardmax(self, pairs, values, tolerance):
        """Note that all pairs are summed, or refuse as the sums do."""
        self.plans.append(exact_plan(pairs, values, "the largest score is sought"))
        return self.sums.hardmax(*thinned(pairs, values), tolerance)
