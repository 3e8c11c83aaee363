"""Claims, and the findings that decide whether they hold.

An experiment states its claims first and measures afterwards. The verdict is computed
from the numbers (measured, expected, tolerance, relation); nobody sets it by hand.
"""

import dataclasses
import math
import re
from typing import Any, Literal, get_args

import numpy as np

Status = Literal["theorem", "observation", "conjecture"]
Relation = Literal["close to", "at most", "at least", "inside", "above", "below"]
SourceKind = Literal["closed form", "other method", "tabulated", "published", "theory"]


class InvalidExperiment(ValueError):
    """An experiment that contradicts its own declaration; the author's mistake."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Where an expected value comes from."""

    kind: SourceKind
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


From = Source | None


def closed_form(detail: str = "") -> Source:
    """The expected value is a formula; the detail writes it, with $LaTeX$."""
    return Source("closed form", detail)


def other_method(detail: str = "") -> Source:
    """The expected value was computed in this run by an independent method."""
    return Source("other method", detail)


def tabulated(detail: str = "") -> Source:
    """The expected value was computed beforehand by an independent program."""
    return Source("tabulated", detail)


def published(detail: str = "") -> Source:
    """The expected value is a published number; the detail says where."""
    return Source("published", detail)


def theory(detail: str = "") -> Source:
    """The expected value is what a theorem says: a sign, a rate, an integer."""
    return Source("theory", detail)


@dataclasses.dataclass(frozen=True)
class Reference:
    """A place in the literature: the key of a BibTeX entry, and where to look."""

    key: str
    place: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
    r"""One measurement set against what was expected of it.

    With $m$ the measured value, $e$ the expected one and $\tau$ the tolerance:

    | relation | holds when | margin |
    |---|---|---|
    | close to | $\lvert m - e\rvert \le \tau$ | $\tau - \lvert m - e\rvert$ |
    | at most | $m \le e + \tau$ | $e + \tau - m$ |
    | at least | $m \ge e - \tau$ | $m - e + \tau$ |
    | inside $[a, b]$ | $a - \tau \le m \le b + \tau$ | distance to the nearer end |
    | above, below | $m > e$, $m < e$ (strict; no tolerance) | $\lvert m - e\rvert$ |

    A value that is not finite never holds.
    """

    claim: "Claim"
    relation: Relation
    measured: float
    expected: float | tuple[float, float]
    tolerance: float
    source: Source
    comparisons: int = 1

    @property
    def margin(self) -> float:
        """How far the measured value is from failing; negative when it fails."""
        given = self.measured, self.expected, self.tolerance
        return float(_margin(self.relation, *given))

    @property
    def holds(self) -> bool:
        """The verdict."""
        margin, is_strict = self.margin, self.relation in ("above", "below")
        return math.isfinite(self.measured) and (
            margin > 0 if is_strict else margin >= 0
        )


@dataclasses.dataclass(frozen=True)
class Claim:
    r"""A statement that an experiment checks.

    The methods compare a measurement with what is expected and return a `Finding`.
    They take numbers or arrays; arrays are compared entry by entry, and the finding
    is the entry with the least margin (for closeness, in units of its tolerance), so
    that one claim has one verdict.

    Args:
        id: short kebab-case name, unique within the experiment.
        statement: one sentence, formulas between dollar signs in LaTeX.
        status: whether it is proved, only observed, or conjectured.
        reference: `"key, place"` with a key of `references.bib`; several are
            separated by semicolons. A theorem must have one.
        source: where expected values come from; a comparison whose source depends on
            the run names its own.
    """

    id: str
    statement: str
    status: Status
    reference: str = ""
    source: From = None

    def __post_init__(self) -> None:
        given, statuses = f"claim {self.id!r}", get_args(Status)
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.id):
            raise InvalidExperiment(f"{given} must be kebab-case, like 'radius-bound'.")
        if self.status not in statuses:
            raise InvalidExperiment(
                f"{given} has status {self.status!r}; it must be one of {statuses}."
            )
        if self.status == "theorem" and not self.reference:
            raise InvalidExperiment(f"{given} is called a theorem but cites nothing.")

    @property
    def references(self) -> tuple[Reference, ...]:
        """The places cited, in the order written."""
        pieces = [piece.strip() for piece in self.reference.split(";")]
        halves = [piece.partition(",") for piece in pieces if piece]
        return tuple(Reference(key.strip(), place.strip()) for key, _, place in halves)

    def close_to(
        self,
        measured: Any,
        expected: Any,
        *,
        source: From = None,
        tolerance: Any = None,
        relative_tolerance: float | None = None,
    ) -> Finding:
        """The measured value equals the expected one up to a tolerance.

        Exactly one of `tolerance` (absolute) and `relative_tolerance` is given.
        """
        _declare(
            (tolerance is None) != (relative_tolerance is None),
            f"claim {self.id!r} needs either tolerance or relative_tolerance",
        )
        if relative_tolerance is not None:
            tolerance = relative_tolerance * np.abs(_numbers(expected))
        return self._find("close to", measured, expected, tolerance, source)

    def at_most(
        self, measured: Any, expected: Any, *, source: From = None, tolerance: Any = 0.0
    ) -> Finding:
        """The measured value does not exceed the expected one."""
        return self._find("at most", measured, expected, tolerance, source)

    def at_least(
        self, measured: Any, expected: Any, *, source: From = None, tolerance: Any = 0.0
    ) -> Finding:
        """The measured value is not less than the expected one."""
        return self._find("at least", measured, expected, tolerance, source)

    def inside(
        self, measured: Any, low: float, high: float, *, source: From = None
    ) -> Finding:
        """The measured value lies in a closed interval."""
        low, high = float(low), float(high)
        _declare(
            math.isfinite(low) and math.isfinite(high) and low <= high,
            f"claim {self.id!r} has the interval [{low}, {high}]; its ends must be "
            "finite and in order: use at_least or at_most for one of them",
        )
        return self._find("inside", measured, (low, high), 0.0, source)

    def above(self, measured: Any, expected: Any, *, source: From = None) -> Finding:
        """The measured value is strictly larger than the expected one."""
        return self._find("above", measured, expected, 0.0, source)

    def below(self, measured: Any, expected: Any, *, source: From = None) -> Finding:
        """The measured value is strictly smaller than the expected one."""
        return self._find("below", measured, expected, 0.0, source)

    def _find(self, relation, measured, expected, tolerance, source) -> Finding:
        source, is_interval = source or self.source, relation == "inside"
        _declare(
            source is not None,
            f"claim {self.id!r} does not say where its expected value comes from; "
            "declare it with source=closed_form(...), or another kind",
        )
        arrays = map(_numbers, (measured, 0.0 if is_interval else expected, tolerance))
        values, wanted, slack = map(np.ravel, np.broadcast_arrays(*arrays))
        _declare(values.size > 0, f"claim {self.id!r} was measured on an empty array")
        _declare(
            np.isfinite([wanted, slack]).all() and (slack >= 0).all(),
            f"claim {self.id!r} expects a value or tolerance that is not finite, "
            "or a negative tolerance",
        )
        target = expected if is_interval else wanted
        margins = _margin(relation, values, target, slack)
        if relation == "close to":  # each entry in units of its own tolerance
            with np.errstate(over="ignore"):
                margins = margins / np.where(slack > 0, slack, 1)
        worst = int(np.argmin(np.where(np.isfinite(values), margins, -np.inf)))
        target = expected if is_interval else float(wanted[worst])
        found = float(values[worst]), target, float(slack[worst])
        return Finding(self, relation, *found, source, int(values.size))


def theorem(id: str, statement: str, reference: str, *, source: From = None) -> Claim:
    """A claim that is proved; the reference says where."""
    return Claim(id, statement, "theorem", reference, source)


def observation(
    id: str, statement: str, reference: str = "", *, source: From = None
) -> Claim:
    """A claim that has been seen in computations, and is not proved."""
    return Claim(id, statement, "observation", reference, source)


def conjecture(
    id: str, statement: str, reference: str = "", *, source: From = None
) -> Claim:
    """A claim that somebody conjectured, neither proved nor refuted."""
    return Claim(id, statement, "conjecture", reference, source)


def _margin(relation, measured, expected, tolerance):
    """Distance to failure, as in the table of `Finding`."""
    if relation == "close to":
        return tolerance - np.abs(measured - expected)
    if relation == "inside":
        low, high = expected
        return np.minimum(measured - low, high - measured) + tolerance
    if relation in ("at most", "below"):
        return expected + tolerance - measured
    return measured - expected + tolerance


def _numbers(value: Any) -> np.ndarray:
    return np.asarray(value, dtype=np.float64)


def _declare(condition: Any, message: str) -> None:
    if not condition:
        raise InvalidExperiment(message + ".")
