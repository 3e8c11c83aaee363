"""Run one experiment and keep its results, in a form that processes can exchange."""

import contextlib
import dataclasses
import math
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

from meanformer.errors import InvalidInput, Overflow
from meanformer.experiments.framework import environment, registry, settings
from meanformer.experiments.framework.claims import Claim, Finding
from meanformer.experiments.framework.experiment import Experiment, Picture, Table
from meanformer.experiments.framework.filming import Reel, check_possible, film
from meanformer.experiments.framework.progress import Progress
from meanformer.experiments.framework.settings import Profile


@dataclasses.dataclass(frozen=True)
class Print:
    """A figure as files: a vector image and a bitmap."""

    svg: str
    png: bytes
    caption: str
    alt: str


@dataclasses.dataclass(frozen=True)
class Record:
    """One run of one experiment.

    A run that broke off has an error sentence and no findings; none of its claims
    holds. The path is that of the experiment's file, if it was found by its path.
    """

    experiment: str
    profile: Profile
    parameters: dict[str, Any]
    claims: Sequence[Claim]
    seconds: float
    findings: Sequence[Finding] = ()
    prints: Sequence[Print] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    error: str = ""
    trace: str = ""
    path: str = ""
    reels: Sequence[Reel] = ()

    @property
    def holds(self) -> bool:
        """Whether every claim was measured in this run and holds."""
        return not self.error and all(finding.holds for finding in self.findings)

    def finding(self, claim: Claim) -> Finding | None:
        """What was found about a claim; nothing if the run broke off."""
        return next((f for f in self.findings if f.claim.id == claim.id), None)

    def to_json(self) -> dict[str, Any]:
        """The record as plain numbers, texts and lists (figures left out)."""
        summary = {
            "experiment": self.experiment,
            "parameters": self.parameters,
            "holds": self.holds,
            "claims": [claim_as_json(c, self.finding(c)) for c in self.claims],
            "seconds": round(self.seconds, 3),
        }
        return summary | ({"error": self.error} if self.error else {})


def run(name: str, profile: Profile = "quick", **changes: Any) -> Record:
    """Run the experiment of this name with some parameters changed.

        run("radius-bound", depth=2.0).holds

    Args:
        name: name of an experiment, or path of its Python file.
        profile: `"quick"` or `"full"`.
        **changes: parameters that differ from those of the profile.
    """
    experiment = registry.find(name)
    parameters = experiment.settings(profile, **changes)
    record = perform(experiment, parameters, profile=profile)
    return dataclasses.replace(record, path=registry.path_of(name))


def perform(
    experiment: Experiment,
    parameters: Any,
    *,
    profile: Profile = "quick",
    progress: Progress | None = None,
) -> Record:
    """Run an experiment and record what it found; its exceptions pass through."""
    from meanformer.plotting import style

    start = time.perf_counter()
    wanted = settings.movies_of(parameters, profile)
    check_possible(wanted)
    with environment.computing(), style.applied(), _overheard() as heard:
        outcome = experiment.run(parameters, progress=progress or Progress())
        experiment.check_complete(outcome)
        prints = tuple(map(_printed, outcome.pictures))
        reels = film(outcome.movies, wanted)
    return Record(
        experiment.name,
        profile,
        settings.as_json(parameters),
        tuple(experiment.claims),
        time.perf_counter() - start,
        findings=tuple(outcome.findings),
        prints=prints,
        tables=tuple(outcome.tables),
        notes=tuple(outcome.notes),
        warnings=_sentences(heard),
        reels=reels,
    )


def attempt(
    experiment: Experiment,
    parameters: Any,
    *,
    profile: Profile = "quick",
    progress: Progress | None = None,
    is_users_choice: bool = False,
) -> Record:
    """Run an experiment; if it breaks off, record why.

    With parameters that are the user's choice, `InvalidInput` and `Overflow` are the
    user's mistake and pass through.
    """
    start = time.perf_counter()
    try:
        return perform(experiment, parameters, profile=profile, progress=progress)
    except Exception as error:
        if is_users_choice and isinstance(error, (InvalidInput, Overflow)):
            raise
        trace = "".join(traceback.format_exception(error))
        return broken(
            experiment, profile, parameters, start, error_sentence(error), trace
        )


def broken(
    experiment: Experiment,
    profile: Profile,
    parameters: Any,
    start: float,
    error: str,
    trace: str = "",
) -> Record:
    """The record of a run that began at a time and did not come to its end."""
    seconds = time.perf_counter() - start
    chosen, claims = settings.as_json(parameters), tuple(experiment.claims)
    run = experiment.name, profile, chosen, claims, seconds
    return Record(*run, error=error, trace=trace)


def error_sentence(error: BaseException) -> str:
    """The first line of what went wrong, with its kind."""
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def claim_as_json(claim: Claim, finding: Finding | None) -> dict[str, Any]:
    """A claim and its verdict; numbers that are not finite become null."""
    given: dict[str, Any] = dict.fromkeys(("measured", "expected", "tolerance"))
    if finding is not None:
        given = {name: _json_number(getattr(finding, name)) for name in given}
    return {
        "id": claim.id,
        "statement": claim.statement,
        **given,
        "holds": finding is not None and finding.holds,
        "status": claim.status,
        "relation": finding and finding.relation,
        "source": finding and str(finding.source),
        "reference": claim.reference,
    }


def _json_number(value: float | tuple[float, float]) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return value if math.isfinite(value) else None


def _printed(picture: Picture) -> Print:
    from meanformer.plotting import style

    drawn = style.to_svg(picture.figure), style.to_png(picture.figure)
    return Print(*drawn, picture.caption, picture.alt or picture.caption)


@contextlib.contextmanager
def _overheard():
    """Collect warnings, and keep what is printed out of standard output."""
    with (
        warnings.catch_warnings(record=True) as heard,
        contextlib.redirect_stdout(sys.stderr),
    ):
        warnings.simplefilter("default")
        # Two workers may meet at one file of the cache; JAX then compiles anew.
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent")
        yield heard


def _sentences(heard: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    sentences = (f"{entry.category.__name__}: {entry.message}" for entry in heard)
    return tuple(dict.fromkeys(sentences))
