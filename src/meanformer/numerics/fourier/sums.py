"""Pair sums by fast Fourier transforms, and the choice between them and exact ones."""

import abc
import importlib.util
import math
from collections.abc import Sequence

import equinox as eqx
import jax
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, Float, PyTree

from meanformer.errors import Unsupported, check, is_concrete
from meanformer.numerics.fourier.levels import (
    GAUSSIAN,
    LARGEST_DIMENSION,
    SAMPLE,
    Ladder,
    Level,
    full_ladder,
    kernel_width,
    smallest_tolerance,
    working_dtype,
)
from meanformer.numerics.fourier.report import SumReport, warn_if_exact
from meanformer.numerics.fourier.softmax import first_level, fourier_softmax
from meanformer.numerics.pair_sums.pairs import Pairs
from meanformer.numerics.pair_sums.sums import (
    AbstractPairSums,
    AbstractPlannedSums,
    Blocked,
    Sizes,
    SumPlan,
    exact_plan,
    sizes_of,
)

# Exact sums that take less than this many seconds are not worth a compilation.
WORTHWHILE = 0.1
NOT_INSTALLED = "jax-finufft is not installed (pip install 'meanformer[fourier]')"
# Numbers of tokens to look at, as multiples of powers of ten.
MARKS = (1, 2, 3, 5, 7)
# Seconds to spread one point to one node of the grid, by dimension.
POINT = {1: 4e-9, 2: 1.2e-9, 3: 8e-10}
# Seconds of the fast Fourier transform, by mode and binary digit of their number.
MODE = 1e-9


class AbstractFastSums(AbstractPlannedSums):
    """Sums by fast transforms, at least for some pairs."""

    @abc.abstractmethod
    def ladder(self, pairs: Pairs, values: Float[Array, "n v"]) -> Ladder | None:
        """Return the levels of fast transforms to choose from; `None`: sum exactly."""


def ladder_of(
    sums: AbstractPairSums, pairs: Pairs, values: Float[Array, "n v"]
) -> Ladder | None:
    """Return the levels that sums choose from; `None` if they are exact."""
    if isinstance(sums, AbstractFastSums):
        return sums.ladder(pairs, values)
    return None


class Fourier(AbstractFastSums):
    r"""Sums in nearly linear time, where queries and keys have at most 3 dimensions.

    The exponential of the score is a Gaussian in the right coordinates, or a function
    of the angle on the circle, so that the sum is a convolution, computed by two
    nonuniform fast Fourier transforms. For softmax, L2, unnormalised and Sinkhorn
    attention. Never silently inaccurate: each query's error is estimated, with a
    margin, from those of some that are summed exactly as well; queries above the
    tolerance are summed exactly, and if they are many, all are, with a warning
    (`SlowSums`) outside of compiled code; `report` tells.

    Args:
        tolerance: largest error allowed, relative to the mass that a query sees and to
            the width of the values; at least 2.4e-13, and 1.6e-5 where JAX computes in
            single precision.

    Cost: $O((m + n)\log^k(1/\varepsilon) + N^k \log N)$ time, where $N$ grows like the
    square root of the largest score.
    """

    tolerance: float = eqx.field(default=1e-8, static=True)

    def __check_init__(self):
        _check_tolerance(self.tolerance)
        _refuse(None if _is_installed() else NOT_INSTALLED)

    def softmax(self, pairs, values):
        """Log-mass and mean under the exponential of the score."""
        ladder = self.ladder(pairs, values)
        if ladder is None:
            return Blocked().softmax(pairs, values)
        result, report = fourier_softmax(pairs, values, ladder)
        warn_if_exact(report, self.tolerance)
        return result

    def report(self, pairs: Pairs, values: Float[Array, "n v"]) -> SumReport:
        """Compute the sum and tell how, and how accurate it is."""
        _check_supported(pairs, self.tolerance)
        return fourier_softmax(pairs, values, self._full_ladder(pairs))[1]

    def plan(self, pairs: Pairs, values: Float[Array, "n v"]) -> SumPlan:
        """Find the level that the sum would start with."""
        ladder = self.ladder(pairs, values)
        if ladder is None:
            return exact_plan(pairs, values, "there are so few queries")
        return _plan(pairs, values, ladder, "Fourier was asked for")

    def kernel(self, pairs, values, profile):
        """Refuse: only an exponential of the score is a convolution."""
        raise Unsupported(
            "Fourier sums are for softmax, L2, unnormalised and Sinkhorn attention "
            "without a mask; use sums=Auto(), which sums the others exactly."
        )

    def hardmax(self, pairs, values, tolerance):
        """Refuse: the largest score is no sum."""
        raise Unsupported(
            "Fourier sums cannot find the largest score; use sums=Auto() for hardmax."
        )

    def ladder(self, pairs: Pairs, values: Float[Array, "n v"]) -> Ladder | None:
        """Return all levels; few queries are summed exactly."""
        _check_supported(pairs, self.tolerance)
        return None if len(pairs.tilts) <= SAMPLE else self._full_ladder(pairs)

    def _full_ladder(self, pairs: Pairs) -> Ladder:
        return full_ladder(pairs.tilts.shape[1], self.tolerance, working_dtype())


class Auto(AbstractFastSums):
    """The default: the fastest sums whose error stays below a tolerance.

    Fast sums where a model of their cost says that they are faster, exact ones
    elsewhere: few tokens (some 10 000), masks, more than three dimensions, kernels
    other than the exponential, no jax-finufft. `explain` tells what is chosen.

    Args:
        tolerance: largest error allowed, relative to the mass that a query sees and to
            the width of the values.
    """

    tolerance: float = eqx.field(default=1e-8, static=True)

    def __check_init__(self):
        _check_tolerance(self.tolerance)

    def softmax(self, pairs, values):
        """Log-mass and mean under the exponential of the score."""
        ladder = self.ladder(pairs, values)
        if ladder is None:
            return Blocked().softmax(pairs, values)
        return fourier_softmax(pairs, values, ladder)[0]

    def plan(self, pairs: Pairs, values: Float[Array, "n v"]) -> SumPlan:
        """Compare what both ways cost, and find the level to start with."""
        reason = _why_not(pairs, self.tolerance)
        if reason is not None:
            return exact_plan(pairs, values, reason)
        ladder = self.ladder(pairs, values)
        if ladder is None:
            return exact_plan(pairs, values, "that is faster for so few")
        return _plan(pairs, values, ladder, "that is faster for so many")

    def kernel(self, pairs, values, profile):
        """Mass and moment under a function of the score."""
        return Blocked().kernel(pairs, values, profile)

    def hardmax(self, pairs, values, tolerance):
        """Best score and mean over the tokens that reach it."""
        return Blocked().hardmax(pairs, values, tolerance)

    def ladder(self, pairs: Pairs, values: Float[Array, "n v"]) -> Ladder | None:
        """Return the levels that are faster than the exact sum, if there are any."""
        sizes = sizes_of(pairs, values)
        if sizes.exact_seconds() < WORTHWHILE or _why_not(pairs, self.tolerance):
            return None
        return self.ladder_for(sizes)

    def ladder_for(self, sizes: Sizes) -> Ladder | None:
        """Return the levels that are faster than the exact sum of these sizes."""
        exact = sizes.exact_seconds()
        if exact < WORTHWHILE:
            return None
        ladder = full_ladder(sizes.dimension, self.tolerance, working_dtype())
        faster = tuple(
            level for level in ladder.levels if fast_seconds(level, sizes) < exact
        )
        return ladder._replace(levels=faster) if faster else None


class ReportedSums(AbstractPairSums):
    """Sums computed as others are, which keep a report of each fast one.

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


def smallest_fast_count(sums: Auto, dimension: int) -> int:
    """Return from how many tokens on, to a digit, sums over a cloud are fast."""
    for count in (mantissa * 10**power for power in range(2, 9) for mantissa in MARKS):
        sizes = Sizes(count, count, dimension, 1 + dimension)
        if sums.ladder_for(sizes) is not None:
            break
    return count


def _plan(pairs, values, ladder: Ladder, reason: str) -> SumPlan:
    """Plan a fast sum; inside compiled code its level is not known."""
    if not is_concrete(pairs.tilts):
        plan = fourier_plan(pairs, values, ladder.levels[0], reason)
        return plan._replace(level=None)
    index, problem = first_level(pairs, values, ladder)
    if problem is not None:
        return exact_plan(pairs, values, problem)
    return fourier_plan(pairs, values, ladder.levels[index], reason)


def fourier_plan(
    pairs: Pairs, values: Float[Array, "n v"], level: Level, reason: str
) -> SumPlan:
    """Plan a sum at a level."""
    sizes = sizes_of(pairs, values)
    exact = exact_plan(pairs, values, reason)
    return exact._replace(
        method="fourier", seconds=fast_seconds(level, sizes), level=level
    )


def _why_not(pairs: Pairs, tolerance: float) -> str | None:
    """Return why a sum cannot be fast, if it cannot."""
    dimension = pairs.tilts.shape[1]
    if dimension > LARGEST_DIMENSION:
        return f"the score is one of {dimension} dimensions, more than three"
    if pairs.first is not None:
        return "a mask gives each query its own sum"
    absent = missing()
    if absent is not None:
        return absent
    smallest = smallest_tolerance(working_dtype())
    if tolerance < smallest:
        return f"{working_dtype()} can keep a tolerance of {smallest:.1e}, not less"
    return None


def missing() -> str | None:
    """Return why there is no fast transform on this machine, if there is none."""
    if not _is_installed():
        return NOT_INSTALLED
    backend = jax.default_backend()
    module = "jax_finufft_cpu" if backend == "cpu" else "jax_finufft_gpu"
    if importlib.util.find_spec(f"jax_finufft.{module}") is None:
        return f"there is no fast transform for {backend}"
    return None


def _is_installed() -> bool:
    return importlib.util.find_spec("jax_finufft") is not None


def _check_supported(pairs: Pairs, tolerance: float) -> None:
    _refuse(_why_not(pairs, tolerance))


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise Unsupported(
            f"Fourier sums cannot be used: {reason}; use sums=Auto(), which sums "
            "exactly there."
        )


def _check_tolerance(tolerance: float) -> None:
    check(0 < tolerance < 1, f"tolerance is {tolerance!r}; it must be between 0 and 1.")


def fast_seconds(level: Level, sizes: Sizes) -> float:
    """Predict the time of a sum at a level, its sample included."""
    axes = sizes.dimension if level.kind == GAUSSIAN else 1
    point = POINT[axes] * kernel_width(level.accuracy) ** axes
    fine = (2 * level.modes) ** axes
    transform = MODE * fine * math.log2(fine)
    complex_columns = -(-sizes.columns // 2)
    sampled = sizes._replace(queries=min(SAMPLE, sizes.queries)).exact_seconds()
    points = sizes.queries + sizes.tokens
    return sampled + complex_columns * (points * point + 2 * transform)
