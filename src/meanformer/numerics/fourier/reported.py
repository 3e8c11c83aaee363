"""Pair sums that keep a report of each fast sum: its error, level and patches."""

from collections.abc import Sequence

import equinox as eqx
import jax
from jax.extend.core import get_opaque_trace_state
from jaxtyping import PyTree

from meanformer.numerics.fourier.report import SumReport
from meanformer.numerics.fourier.softmax import fourier_softmax
from meanformer.numerics.fourier.sums import ladder_of
from meanformer.numerics.pair_sums.sums import AbstractPairSums


class ReportedSums(AbstractPairSums):
    """Sums computed as others are, whose reports can be read afterwards.

    Reports from inside of a loop or of a compiled function stay there, unless it calls
    `reported_anew` and hands the reports out.

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
        ladder = ladder_of(self.sums, pairs, values)
        if ladder is None:
            return self.sums.softmax(pairs, values)
        result, report = fourier_softmax(pairs, values, ladder)
        self.keep([report])
        return result

    def keep(self, reports: Sequence[SumReport]) -> None:
        """Keep reports, if they are from here."""
        if _where() == self._home:
            self.reports.extend(reports)

    def kernel(self, pairs, values, profile):
        """Mass and moment under a function of the score."""
        return self.sums.kernel(pairs, values, profile)

    def hardmax(self, pairs, values, tolerance):
        """Best score and mean over the tokens that reach it."""
        return self.sums.hardmax(pairs, values, tolerance)


def without_reports(tree: PyTree) -> tuple[PyTree, ReportedSums | None]:
    """Return a tree whose sums make no reports, and those that did, if any."""
    reported = [sums for sums in _sums_in(tree) if isinstance(sums, ReportedSums)]
    bare = jax.tree.map(
        lambda node: node.sums if isinstance(node, ReportedSums) else node,
        tree,
        is_leaf=_is_sums,
    )
    return bare, reported[0] if reported else None


def reported_anew(tree: PyTree) -> tuple[PyTree, ReportedSums]:
    """Return a tree whose sums report to this place in the program, and those sums."""
    sums = ReportedSums(_sums_in(tree)[0])
    return with_sums(tree, sums), sums


def with_sums(tree: PyTree, sums: AbstractPairSums) -> PyTree:
    """Return a tree with these sums in place of its own."""
    return jax.tree.map(
        lambda node: sums if _is_sums(node) else node, tree, is_leaf=_is_sums
    )


def _sums_in(tree: PyTree) -> list[AbstractPairSums]:
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_sums) if _is_sums(leaf)]


def _is_sums(node: object) -> bool:
    return isinstance(node, AbstractPairSums)


def _where() -> object:
    """Return what tells one traced function from another."""
    return get_opaque_trace_state(convention="flax")
