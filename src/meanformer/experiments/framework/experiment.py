"""An experiment: what is claimed, with which settings, and how it is measured."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meanformer.experiments.framework.claims import Claim, Finding, InvalidExperiment
from meanformer.experiments.framework.settings import Profile, check_declaration, choose


@dataclasses.dataclass(frozen=True)
class Picture:
    """A matplotlib figure with its caption.

    Args:
        figure: a `matplotlib.figure.Figure`; `plotting.style.canvas` makes one.
        caption: what is to be seen, formulas between dollar signs.
        alt: the same for a reader who cannot see it; the caption if left out.
    """

    figure: Any
    caption: str
    alt: str = ""


@dataclasses.dataclass(frozen=True)
class Movie:
    """Tokens along depth with a caption, made into a movie if the run makes any.

    Nothing is drawn before: it costs nothing to return one. `movie_setting` gives the
    experiment a parameter that decides; without, the full profile makes movies.

    Args:
        trajectory: the tokens along depth.
        caption: what is to be seen, formulas between dollar signs.
        alt: the same for a reader who cannot see it; the caption if left out.
        draw: draws one frame; as for `plotting.movie`, like all that follows.
        frames: how many.
        depths: the depths of the frames; equally spaced ones if left out.
        fps: frames per second.
        size: width and height in inches.
    """

    trajectory: Any
    caption: str
    alt: str = ""
    draw: Callable[[Any, Any], Any] | None = None
    frames: int = 80
    depths: Any = None
    fps: float = 20
    size: tuple[float, float] = (4.4, 4.4)


@dataclasses.dataclass(frozen=True)
class Table:
    """A small table of numbers and words, with a caption.

    Cells that are neither become numbers, so that array scalars are welcome.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise InvalidExperiment(
                f"a row of the table {self.caption!r} does not have "
                f"{len(self.columns)} cells."
            )
        plain = tuple(tuple(map(_plain_cell, row)) for row in self.rows)
        object.__setattr__(self, "rows", plain)


def _plain_cell(cell: Any) -> str | int | float:
    return cell if isinstance(cell, (str, int, float)) else float(cell)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a run: one finding per claim, and figures, tables and movies."""

    findings: Sequence[Finding]
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    movies: Sequence[Movie] = ()


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One theorem or figure, made into a check that anybody can run again.

    Args:
        name: kebab-case; the file is the same name with underscores.
        title: a short sentence, the heading of its card in the report.
        room: the room of the library that it exercises, such as `flows`.
        parameters: its `Parameters`, or another frozen dataclass of settings.
        run: `run(parameters, *, progress) -> Outcome`.
        claims: what is checked; all claims of the file of `run` if left out.
        about: a paragraph for the reader; the docstring of that file if left out.
        seconds: rough time of the quick profile on two cores, for estimates.
    """

    name: str
    title: str
    room: str
    parameters: type
    run: Callable[..., Outcome]
    claims: Sequence[Claim] = ()
    about: str = ""
    seconds: float = 5.0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.name):
            raise InvalidExperiment(f"experiment name {self.name!r} is not kebab-case.")
        file = getattr(inspect.unwrap(self.run), "__globals__", {})
        if not self.claims:
            found = (value for value in file.values() if isinstance(value, Claim))
            object.__setattr__(self, "claims", tuple(found))
        ids = [claim.id for claim in self.claims]
        if not ids or len(set(ids)) < len(ids):
            raise InvalidExperiment(
                f"{self.name} must declare at least one claim, each with its own id."
            )
        check_declaration(self.parameters)
        object.__setattr__(
            self, "about", inspect.cleandoc(self.about or file.get("__doc__") or "")
        )

    def settings(self, profile: Profile = "quick", **changes: Any) -> Any:
        """The parameters of a profile, some of them changed by name."""
        return choose(self.parameters, profile, changes)

    def check_complete(self, outcome: Outcome) -> None:
        """Raise unless there is exactly one finding for each declared claim."""
        declared = {claim.id for claim in self.claims}
        measured = [finding.claim.id for finding in outcome.findings]
        complaints = (
            (declared - set(measured), "declares but did not measure"),
            (set(measured) - declared, "measured but does not declare"),
            ({i for i in measured if measured.count(i) > 1}, "measured twice"),
        )
        for ids, complaint in complaints:
            if ids:
                listed = ", ".join(sorted(ids))
                raise InvalidExperiment(f"{self.name} {complaint} {listed}.")


def experiment(
    title: str, *, room: str, seconds: float = 5.0
) -> Callable[[Callable[..., Outcome]], Experiment]:
    """Declare the experiment of a file: `@experiment(title, room=…)` above its `run`.

    Its name is that of the file with hyphens, its parameters are what `run` says it
    takes, its claims are those of the file, and the file's docstring is its text.
    """

    def declare(run: Callable[..., Outcome]) -> Experiment:
        written = inspect.unwrap(run)
        name = Path(written.__code__.co_filename).stem.replace("_", "-")
        parameters = inspect.get_annotations(written)["parameters"]
        return Experiment(name, title, room, parameters, run, seconds=seconds)

    return declare
