"""One line of the report: our number, the opponent's, and what was to be reached."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """A measured pair of numbers in the same unit.

    Attributes:
        name: what was done, with its size.
        opponent: who the other number belongs to.
        ours: our number.
        theirs: the opponent's number.
        unit: of both numbers.
        target: the ratio to reach, or `None` where the comparison only informs.
        at_least: whether the ratio counts how many times less we need (`theirs / ours`,
            to be at least the target) or how many times more (`ours / theirs`, to be
            at most the target).
    """

    name: str
    opponent: str
    ours: float
    theirs: float
    unit: str
    target: float | None = None
    at_least: bool = True

    @property
    def ratio(self) -> float:
        """How many times better than the opponent, or how many times its cost."""
        more, less = self.theirs, self.ours
        return more / less if self.at_least else less / more

    @property
    def reached(self) -> bool | None:
        """Whether the target was reached; `None` without a target."""
        if self.target is None:
            return None
        difference = self.ratio - self.target
        return difference >= 0 if self.at_least else difference <= 0

    def goal(self) -> str:
        """Return the target in words."""
        if self.target is None:
            return "–"
        return f"{'≥' if self.at_least else '≤'} {self.target:g}×"
