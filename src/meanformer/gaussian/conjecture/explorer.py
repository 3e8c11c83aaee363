"""Looking for counterexamples to the low-rank conjecture, draw by draw."""

import collections
import contextlib
import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from meanformer.attention import AbstractInContextMap
from meanformer.errors import InvalidInput, as_integer, check
from meanformer.files import write_atomically
from meanformer.flows import AbstractProgress
from meanformer.flows.dynamics.recorder import bar_for
from meanformer.gaussian.conjecture.classify import (
    CONVERGES,
    GROWS,
    PERIODIC,
    UNDECIDED,
    Classification,
    classify,
)
from meanformer.gaussian.conjecture.ensembles import (
    AbstractEnsemble,
    Case,
    case_from_json,
)
from meanformer.gaussian.long_depth import growth_along, long_flow
from meanformer.gaussian.stationary import certified, polished
from meanformer.gaussian.velocity import quiet_solve
from meanformer.measures import Gaussian

SETTINGS, DRAWS = "settings.json", "draws.jsonl"
# What is undecided, or grows like a power of depth, is followed so much longer, and so
# is a decay that is to be confirmed.
LONGER = 100.0
# How many more periods, and how close the covariance must be to itself after each.
PERIODS, RETURNED = 10, 1e-5
# A stationary covariance is solved for, and must be one to this, near the limit.
STATIONARY, NEAR = 1e-9, 1e-2
# Tolerance of the second look; that of the first is about 1e-9.
PRECISE = 1e-12


@dataclasses.dataclass(frozen=True)
class Draw:
    r"""One draw of an ensemble, and what became of it.

    Attributes:
        index: its number in the ensemble.
        kind: as in `Classification`.
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
        decays = [d for d in self.draws if d.kind == CONVERGES and d.rank == 0]
        return [d for d in decays if d.normalised_rank == size > 1]

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
    draws: dict[int, Draw] = {}
    if folder is not None:
        draws = _known_draws(Path(folder), {**ensemble.settings(), "depth": depth})
    with bar_for(progress) as bar:
        for index in range(count):
            if index not in draws:
                draws[index] = examine(ensemble.draw(index), index, depth)
                if folder is not None:
                    with (Path(folder) / DRAWS).open("a") as file:
                        file.write(json.dumps(dataclasses.asdict(draws[index])) + "\n")
            bar.update(index + 1, count)
    return Exploration(ensemble, tuple(draws[index] for index in range(count)))


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


def _exception(outcome: Classification, case: Case, bound: int) -> str:
    if outcome.kind in (UNDECIDED, PERIODIC):
        return outcome.kind
    if outcome.kind != CONVERGES or outcome.rank is None:
        return ""
    if outcome.rank > bound:
        return f"limit of rank {outcome.rank}, more than {bound}"
    full = outcome.normalised_rank == case.dimension > 1
    return "normalised limit of full rank" if full and outcome.rank == 0 else ""


def is_confirmed(
    gamma: AbstractInContextMap, mu: Gaussian, found: Classification
) -> bool:
    r"""Whether another method agrees with what was found.

    - A period: the flow of factors, with a tolerance of 1e-12, returns ten more times.
    - A limit: a stationary covariance of its rank is solved for, starting there; it
      must be one to 1e-9 and lie close.
    - A decay of full rank: the flow of factors, a hundred times longer, with a
      tolerance of 1e-12; all eigenvalues must decay alike over the last two decades.

    What is undecided or without a limit has nothing to be confirmed, and is not.
    """
    if found.kind == PERIODIC and found.period is not None:
        return _is_periodic(gamma, mu, found.depth, found.period)
    if found.kind != CONVERGES or found.limit is None:
        return False
    if found.rank:
        return _is_stationary(gamma, found.limit, found.rank)
    run = growth_along(long_flow(gamma, mu, LONGER * found.depth, PRECISE))
    same_rank = run.normalised_rank == found.normalised_rank
    return bool(run.is_settled and run.rank == 0 and same_rank)


def _is_periodic(gamma, mu: Gaussian, late: float, period: float) -> bool:
    depths = np.concatenate([[0.0], late + period * np.arange(PERIODS + 1)])
    path = quiet_solve(gamma, mu, float(depths[-1]), save=depths, rtol=PRECISE)
    if len(path) < len(depths):
        return False
    first, *later = np.asarray(path.covariances)[1:]
    away = [np.linalg.norm(spread - first) for spread in later]
    return bool(max(away) <= RETURNED * np.linalg.norm(first))


def _is_stationary(gamma, limit: np.ndarray, rank: int) -> bool:
    values, vectors = np.linalg.eigh(limit)
    root = vectors[:, -rank:] * np.sqrt(values[-rank:])
    point = certified(gamma, np.asarray(polished(gamma, jnp.asarray(root))))
    away = np.linalg.norm(point.covariance - limit) / np.linalg.norm(limit)
    return bool(point.residual <= STATIONARY and away <= NEAR)


def _known_draws(folder: Path, settings: dict) -> dict[int, Draw]:
    """Return the draws on disk, a line of JSON each; raise if they are of others."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SETTINGS
    if not path.exists():
        write_atomically(path, json.dumps(settings, indent=2))
        return {}
    found = json.loads(path.read_text())
    check(
        found == settings,
        f"{folder} holds draws of {found}; these would be of {settings}: use another "
        "folder.",
    )
    draws = {}
    with (folder / DRAWS).open("a+") as file:
        file.seek(0)
        text = file.read()
        if text and not text.endswith("\n"):
            # The last line of a run that was cut off; the next one starts afresh.
            file.write("\n")
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            draw = Draw(**json.loads(line))
            draws[draw.index] = draw
    return draws
