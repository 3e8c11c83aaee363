"""Sums that keep the reports of the fast ones among them."""

from collections.abc import Sequence

import equinox as eqx
import jax
from jax.extend.core import get_opaque_trace_state
from jaxtyping import PyTree

from meanformer.numerics.fourier.report import SumReport
from meanformer.numerics.fourier.softmax import fourier_softmax
from meanformer.numerics.fourier.sums import ladder_of
from meanformer.numerics.pair_sums.sums import AbstractPairSums


class Watched(AbstractPairSums):
    """The same sums, whose reports can be read afterwards.

    Reports from inside of a loop or of a compiled function stay there, unless it
    watches the sums anew and hands the reports out.

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


def unwatched(tree: PyTree) -> tuple[PyTree, Watched | None]:
    """Return a tree whose sums are not watched, and who watched them."""

    def is_watched(node) -> bool:
        return isinstance(node, Watched)

    found = filter(is_watched, jax.tree.leaves(tree, is_leaf=is_watched))
    bare = jax.tree.map(
        lambda node: node.sums if is_watched(node) else node, tree, is_leaf=is_watched
    )
    return bare, next(found, None)


def watched(tree: PyTree, watch: Watched) -> PyTree:
    """Return a tree with other sums that are watched in the place of its own."""

    def is_sums(node) -> bool:
        return isinstance(node, AbstractPairSums)

    return jax.tree.map(
        lambda node: watch if is_sums(node) else node, tree, is_leaf=is_sums
    )


def watched_anew(tree: PyTree) -> tuple[PyTree, Watched]:
    """Return a tree whose sums are watched from here, and who watches them."""

    def is_sums(node) -> bool:
        return isinstance(node, AbstractPairSums)

    sums = filter(is_sums, jax.tree.leaves(tree, is_leaf=is_sums))
    watch = Watched(next(sums))
    return watched(tree, watch), watch


def _where() -> object:
    """Return what tells one traced function from another."""
    return get_opaque_trace_state(convention="flax")
