"""Looking for counterexamples to the low-rank conjecture, draw by draw."""

import collections
import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from meanformer.errors import InvalidInput, as_integer
from meanformer.files import write_atomically
from meanformer.flows import AbstractProgress
from meanformer.flows.dynamics.recorder import bar_for
from meanformer.gaussian.conjecture.classify import (
    CONVERGES,
    GROWS,
    PERIODIC,
    UNDECIDED,
    Outcome,
    classify,
)
from meanformer.gaussian.conjecture.confirmation import is_confirmed
from meanformer.gaussian.conjecture.ensembles import (
    AbstractEnsemble,
    Case,
    case_from_json,
)

SETTINGS, DRAWS = "settings.json", "draws.jsonl"
# What is undecided, or grows like a power of depth, is followed so much longer.
LONGER = 100.0


@dataclasses.dataclass(frozen=True)
class Draw:
    r"""One draw of an ensemble, and what became of it.

    Attributes:
        index: its number in the ensemble.
        kind: as in `Outcome`.
        rank: the rank of the limit; `None` without one.
        normalised_rank: the rank of the limit of the covariance over its trace.
        bound: the largest rank that the conjecture allows, $(d + \dim\ker A)/2$.
        eigenvalues: those of the last covariance.
        reason: the evidence in words.
        exception: what is exceptional about it; empty if nothing is.
        confirmed: for an exception, whether a second method agrees, as told at
            `examine`; `None` otherwise.
        case: the matrices of an exception, to run it again; `None` otherwise.
    """

    index: int
    kind: str
    rank: int | None
    normalised_rank: int | None
    bound: int
    eigenvalues: list[float]
    reason: str
    exception: str = ""
    confirmed: bool | None = None
    case: dict | None = None

    def replay(self) -> Case:
        """Return the matrices of an exception."""
        if self.case is None:
            raise InvalidInput(f"draw {self.index} is no exception; draw it again.")
        return case_from_json(self.case)


@dataclasses.dataclass(frozen=True)
class Exploration:
    """Many draws of an ensemble."""

    ensemble: AbstractEnsemble
    draws: tuple[Draw, ...]

    @property
    def exceptions(self) -> list[Draw]:
        """The draws that the conjecture has to be held against."""
        return [draw for draw in self.draws if draw.exception]

    @property
    def full_rank_limits(self) -> list[Draw]:
        """Draws with a limit that is not zero and has full rank."""
        size = self.ensemble.dimension
        return [d for d in self.draws if d.kind == CONVERGES and d.rank == size]

    @property
    def full_rank_decays(self) -> list[Draw]:
        r"""Draws that tend to zero like $X/t$ with $X$ of full rank."""
        size = self.ensemble.dimension
        return [
            draw
            for draw in self.draws
            if draw.kind == CONVERGES
            and draw.rank == 0
            and draw.normalised_rank == size
            and size > 1
        ]

    def table(self) -> list[tuple[str, int | None, int | None, int]]:
        """Count draws by kind, rank of the limit and rank of the normalised limit."""
        counts = collections.Counter(
            (draw.kind, draw.rank, draw.normalised_rank) for draw in self.draws
        )
        return [(*key, counts[key]) for key in sorted(counts, key=str)]


def explore(
    ensemble: AbstractEnsemble,
    count: int,
    *,
    depth: float = 1e5,
    folder: str | Path | None = None,
    progress: bool | AbstractProgress = False,
) -> Exploration:
    r"""Classify many draws of an ensemble, and look at the exceptions again.

    The conjecture is that, for generic matrices, bounded covariances converge, to a
    limit of rank $(d + \dim\ker A)/2$ at most. An exception is a limit of larger rank,
    a period, a normalised limit of full rank, or a draw that could not be decided.
    Exceptions keep their matrices, so that they can be run again anywhere.

    Args:
        ensemble: the law of the draws.
        count: how many draws.
        depth: how far to follow each, in units of the time in which it moves at first.
        folder: where to write the draws as they come; draws that are there already are
            not computed again. Nothing is written by default.
        progress: show a progress bar on standard error; or an object to report to.
    """
    count = as_integer("count", count, least=1)
    record = None if folder is None else _Record(Path(folder), ensemble, depth)
    done = {} if record is None else record.read()
    draws = []
    with bar_for(progress) as bar:
        for index in range(count):
            draw = done.get(index)
            if draw is None:
                draw = examine(ensemble.draw(index), index, depth)
                if record is not None:
                    record.append(draw)
            draws.append(draw)
            bar.update(index + 1, count)
    return Exploration(ensemble, tuple(draws))


def examine(case: Case, index: int = 0, depth: float = 1e5) -> Draw:
    """Classify a case, and look at it by a second method if it is an exception.

    What is undecided, or grows like a power, is followed a hundred times longer. Then a
    period must return ten more times, a limit must be close to a stationary covariance
    of its rank that is solved for, and a decay of full rank must go on a hundred times
    longer, both flows in factors with a tolerance of 1e-12.

    Args:
        case: the matrices.
        index: the number that the draw is given.
        depth: how far to follow it at first, in units of the time in which it moves.
    """
    bound = (case.dimension + case.kernel_dimension) // 2
    gamma, start = case.gamma(), case.gaussian()
    outcome = classify(gamma, start, depth=depth, locate=False)
    grows_slowly = outcome.kind == GROWS and outcome.normalised_rank is not None
    if outcome.kind == UNDECIDED or grows_slowly:
        outcome = classify(gamma, start, depth=LONGER * depth, locate=False)
    exception = _exception(outcome, case, bound)
    confirmed = is_confirmed(gamma, start, outcome) if exception else None
    return Draw(
        index,
        outcome.kind,
        outcome.rank,
        outcome.normalised_rank,
        bound,
        [float(value) for value in outcome.eigenvalues],
        outcome.reason,
        exception,
        confirmed,
        case.to_json() if exception else None,
    )


def _exception(outcome: Outcome, case: Case, bound: int) -> str:
    if outcome.kind in (UNDECIDED, PERIODIC):
        return outcome.kind
    if outcome.kind != CONVERGES or outcome.rank is None:
        return ""
    if outcome.rank > bound:
        return f"limit of rank {outcome.rank}, more than {bound}"
    full = outcome.normalised_rank == case.dimension > 1
    return "normalised limit of full rank" if full and outcome.rank == 0 else ""


class _Record:
    """Draws on disk: one line of JSON each, after a file with the settings."""

    def __init__(self, folder: Path, ensemble: AbstractEnsemble, depth: float):
        self.folder = folder
        self.settings = {**ensemble.settings(), "depth": depth}

    def read(self) -> dict[int, Draw]:
        """Return the draws that are there; raise if they are of another ensemble."""
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = self.folder / SETTINGS
        if not settings.exists():
            write_atomically(settings, json.dumps(self.settings, indent=2))
            return {}
        found = json.loads(settings.read_text())
        if found != self.settings:
            raise InvalidInput(
                f"{self.folder} holds draws of {found}; these would be of "
                f"{self.settings}: use another folder."
            )
        return {draw.index: draw for draw in self._draws()}

    def _draws(self) -> Iterator[Draw]:
        path = self.folder / DRAWS
        if not path.exists():
            return
        text = path.read_text()
        if not text.endswith("\n"):
            # The last line of a run that was cut off; the next one starts afresh.
            with path.open("a") as file:
                file.write("\n")
        for line in text.splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                yield Draw(**json.loads(line))

    def append(self, draw: Draw) -> None:
        """Write one more line."""
        line = json.dumps(dataclasses.asdict(draw))
        with (self.folder / DRAWS).open("a") as file:
            file.write(line + "\n")
