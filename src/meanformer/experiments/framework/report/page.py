"""The whole page, finished or still growing."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from meanformer.experiments.framework.experiment import Experiment
from meanformer.experiments.framework.records import Record
from meanformer.experiments.framework.report import overview
from meanformer.experiments.framework.report.card import card
from meanformer.experiments.framework.report.html import Markup, prose, tag
from meanformer.experiments.framework.report.verdicts import State, Verdict, verdict

SECONDS_BETWEEN_RELOADS = 4
STYLESHEET = Path(__file__).with_name("page.css")
ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'"
    "%3E%3Ccircle cx='8' cy='8' r='6' fill='%233b78c9'/%3E%3C/svg%3E"
)


@dataclasses.dataclass(frozen=True)
class Atlas:
    """All that a page shows: experiments, what they gave so far, and who is at work."""

    title: str
    command: str
    facts: Mapping[str, str]
    experiments: Sequence[Experiment]
    records: Mapping[str, Record]
    running: frozenset[str] = frozenset()
    is_stopped: bool = False

    @property
    def is_growing(self) -> bool:
        """Whether some experiments are still to come."""
        return not self.is_stopped and len(self.records) < len(self.experiments)

    @property
    def seconds(self) -> float:
        """Computing time of all experiments together."""
        return sum(record.seconds for record in self.records.values())

    def verdicts(self, experiment: Experiment) -> list[Verdict]:
        """What is known about each claim of an experiment."""
        record, waiting = self.records.get(experiment.name), self._waiting(experiment)
        return [verdict(claim, record, waiting) for claim in experiment.claims]

    def _waiting(self, experiment: Experiment) -> State:
        if self.is_stopped:
            return "stopped"
        return "running" if experiment.name in self.running else "queued"


def render(atlas: Atlas) -> str:
    """The page as one HTML document that needs nothing else."""
    cards = [(one, atlas.verdicts(one)) for one in atlas.experiments]
    found = [one for _, several in cards for one in several]
    counts = overview.tally(found, len(cards), atlas.seconds)
    drawn = [card(one, atlas.records.get(one.name), several) for one, several in cards]
    body = tag(
        "body",
        overview.header(atlas.title, atlas.facts, counts),
        tag("main", overview.claims_table(cards), drawn),
        _footer(atlas.command),
    )
    return "<!doctype html>\n" + tag("html", _head(atlas), body, lang="en") + "\n"


def _head(atlas: Atlas) -> Markup:
    reload = tag("meta", http_equiv="refresh", content=SECONDS_BETWEEN_RELOADS)
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        reload if atlas.is_growing else None,
        tag("title", f"{atlas.title} · meanformer"),
        tag("link", rel="icon", href=ICON),
        tag("style", Markup(STYLESHEET.read_text(encoding="utf-8"))),
    )


def _footer(command: str) -> Markup:
    how = ["This page was written by ", tag("code", command), "."]
    files = "`results.json` (every number) and `figures/` (SVG and PNG; movies as GIF)"
    return tag("footer", tag("p", how), tag("p", prose(f"Beside it: {files}.")))
