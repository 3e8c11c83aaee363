"""Sums that keep the reports of the fast ones among them."""

import equinox as eqx
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, Float

from meanformer.numerics.fourier.levels import Ladder
from meanformer.numerics.fourier.report import SumReport
from meanformer.numerics.fourier.softmax import fourier_softmax
from meanformer.numerics.pair_sums import AbstractPairSums
from meanformer.numerics.pairs import Pairs
from meanformer.numerics.plans import SumPlan


class Watched(AbstractPairSums):
    """The same sums, whose reports can be read afterwards.

    Reports from inside of a loop or of a compiled function stay there: they are not
    known outside.

    Args:
        sums: how sums are computed.
    """

    sums: AbstractPairSums
    reports: list[SumReport] = eqx.field(static=True)
    _home: object = eqx.field(static=True)

    def __init__(self, sums: AbstractPairSums):
        self.sums = sums
        self.reports = []
        self._home = _where()

    def softmax(self, pairs, values):
        """Log-mass and mean, with the report kept if they were to be fast."""
        ladder = self.ladder(pairs, values)
        if ladder is None:
            return self.sums.softmax(pairs, values)
        result, report = fourier_softmax(pairs, values, ladder)
        if _where() == self._home:
            self.reports.append(report)
        return result

    def ladder(self, pairs: Pairs, values: Float[Array, "n v"]) -> Ladder | None:
        """Return the levels of the sums."""
        return self.sums.ladder(pairs, values)

    def plan(self, pairs: Pairs, values: Float[Array, "n v"]) -> SumPlan:
        """Return the plan of the sums."""
        return self.sums.plan(pairs, values)

    def kernel(self, pairs, values, profile):
        """Mass and moment under a function of the score."""
        return self.sums.kernel(pairs, values, profile)

    def hardmax(self, pairs, values, tolerance):
        """Best score and mean over the tokens that reach it."""
        return self.sums.hardmax(pairs, values, tolerance)


def _where() -> object:
    """Return what tells one traced function from another."""
    return get_opaque_trace_state(convention="flax")
