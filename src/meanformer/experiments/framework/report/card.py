"""One experiment on the page: statements, figures, numbers, parameters, citation."""

import base64
import shlex
from collections.abc import Sequence
from typing import Any

from meanformer.experiments.framework import citations, text
from meanformer.experiments.framework.experiment import Experiment, Table
from meanformer.experiments.framework.records import Print, Record
from meanformer.experiments.framework.report import overview
from meanformer.experiments.framework.report.html import Markup, join, number, prose, tag
from meanformer.experiments.framework.report.verdicts import (
    State,
    Verdict,
    badge,
    cited,
    distance,
    expected,
    link,
    measured,
)
from meanformer.experiments.framework.settings import as_json

LARGEST_DRAWING = 1_500_000  # characters of SVG; beyond, the bitmap is lighter


def card(
    experiment: Experiment, record: Record | None, verdicts: Sequence[Verdict]
) -> Markup:
    """The card of one experiment, finished or not."""
    return tag(
        "article",
        _heading(experiment, record),
        _paragraphs(experiment.about),
        tag("ol", [_claim(experiment, one) for one in verdicts], class_="findings"),
        _results(experiment, record) if record else _waiting(verdicts[0].state),
        _citations(experiment),
        _rerun(rerun_command(experiment, record)),
        id=experiment.name,
        class_="card",
    )


def rerun_command(experiment: Experiment, record: Record | None) -> str:
    """The command line that repeats this run."""
    words = ["meanformer", "run", experiment.name]
    if record is None:
        return shlex.join(words)
    usual = as_json(experiment.settings(record.profile))
    for name, value in record.parameters.items():
        if value != usual[name]:
            words += ["--set", f"{name}={_written(value)}"]
    return shlex.join(words + ["--full"] * (record.profile == "full"))


def _heading(experiment: Experiment, record: Record | None) -> Markup:
    anchor = tag("a", experiment.name, href=f"#{experiment.name}")
    seconds = overview.duration(record.seconds) if record else None
    facts = [anchor, experiment.room, seconds]
    return tag(
        "header",
        tag("h2", prose(experiment.title)),
        tag("p", [tag("span", fact) for fact in facts if fact], class_="meta"),
    )


def _paragraphs(about: str) -> list[Markup]:
    blocks = [block for block in about.split("\n\n") if block.strip()]
    return [tag("p", prose(" ".join(block.split())), class_="about") for block in blocks]


def _claim(experiment: Experiment, verdict: Verdict) -> Markup:
    claim, finding = verdict.claim, verdict.finding
    places = [join(["; " * (i > 0), cited(r)]) for i, r in enumerate(claim.references)]
    kind = tag("span", claim.status.capitalize(), class_="kind")
    return tag(
        "li",
        tag("div", badge(verdict.state), kind, places, class_="source"),
        tag("p", prose(claim.statement), class_="statement"),
        _numbers(finding) if finding else None,
        id=f"{experiment.name}--{claim.id}",
        class_=verdict.state,
    )


def _numbers(finding) -> Markup:
    several = f", worst of {finding.comparisons} comparisons"
    cells = [
        ("measured", measured(finding)),
        ("expected", expected(finding)),
        ("", distance(finding)),
    ]
    origin = prose(f"Expected value from {finding.source}")
    tail = several if finding.comparisons > 1 else ""
    return join(
        [
            tag("dl", [_pair(*cell) for cell in cells if cell[1]], class_="numbers"),
            tag("p", origin, tail, ".", class_="origin"),
        ]
    )


def _pair(name: str, value: Markup) -> Markup:
    return tag("div", tag("dt", name or "that is"), tag("dd", value))


def _results(experiment: Experiment, record: Record) -> list[Any]:
    return [
        _failure(record) if record.error else None,
        tag("div", [_figure(one) for one in record.prints], class_="figures"),
        [_table(table) for table in record.tables],
        [tag("p", prose(note), class_="note") for note in record.notes],
        [tag("p", warning, class_="warning") for warning in record.warnings],
        _parameters(experiment, record),
    ]


def _waiting(state: State) -> Markup:
    words = {
        "running": "Running now; this page fills in by itself.",
        "queued": "Waiting for a free worker.",
        "stopped": "Not run: the atlas was stopped before its turn.",
    }
    return tag("p", words[state], class_="waiting")


def _failure(record: Record) -> Markup:
    trace = tag("details", tag("summary", "Where it happened"), tag("pre", record.trace))
    return tag(
        "div",
        tag("p", "The run broke off: ", tag("strong", record.error)),
        trace if record.trace else None,
        class_="failure",
    )


def _figure(one: Print) -> Markup:
    description = text.to_plain(one.alt)
    if len(one.svg) <= LARGEST_DRAWING:
        drawing = Markup(one.svg)
        image = tag("div", drawing, role="img", aria_label=description, class_="drawing")
    else:
        data = base64.b64encode(one.png).decode()
        source = f"data:image/png;base64,{data}"
        image = tag("img", src=source, alt=description, class_="bitmap")
    return tag("figure", image, tag("figcaption", prose(one.caption)))


def _table(table: Table) -> Markup:
    head = tag("tr", [tag("th", prose(name), scope="col") for name in table.columns])
    rows = [tag("tr", [_cell(cell) for cell in row]) for row in table.rows]
    caption = tag("caption", prose(table.caption)) if table.caption else None
    body = tag("table", caption, tag("thead", head), tag("tbody", rows))
    return tag("div", body, class_="scroll data")


def _cell(cell: Any) -> Markup:
    if isinstance(cell, bool) or not isinstance(cell, (int, float)):
        return tag("td", prose(str(cell)))
    return tag("td", number(float(cell)), class_="value")


def _parameters(experiment: Experiment, record: Record) -> Markup | None:
    if not record.parameters:
        return None
    fields = experiment.parameters.__dataclass_fields__
    rows = [
        tag(
            "tr",
            tag("th", tag("code", name), scope="row"),
            tag("td", _written(value), class_="value"),
            tag("td", prose(fields[name].metadata["help"])),
        )
        for name, value in record.parameters.items()
    ]
    label = tag("summary", f"Parameters ({record.profile} profile)")
    return tag("details", label, tag("table", tag("tbody", rows)), class_="parameters")


def _citations(experiment: Experiment) -> Markup | None:
    keys = [ref.key for claim in experiment.claims for ref in claim.references]
    known = citations.bibliography(citations.bibliography_file())
    entries = [known[key] for key in dict.fromkeys(keys) if key in known]
    if not entries:
        return None
    source = "\n\n".join(entry.bibtex for entry in entries)
    return tag(
        "section",
        tag("h3", "References"),
        [tag("p", _formatted(entry), class_="reference") for entry in entries],
        tag("details", tag("summary", "BibTeX"), tag("pre", source)),
        class_="references",
    )


def _formatted(entry: citations.Entry) -> Markup:
    venue = f"{entry.venue}, {entry.text('year')}."
    archive = f"arXiv:{entry.eprint}" if entry.eprint else entry.address
    shown = link(archive, entry.address) if archive else None
    title = tag("cite", entry.text("title"))
    # A title that asks a question keeps its own mark.
    stop = " " if entry.text("title").endswith("?") else ". "
    return join([f"{entry.authors}. ", title, stop, venue, " ", shown])


def _rerun(command: str) -> Markup:
    return tag("p", "Run it again: ", tag("code", command), class_="rerun")


def _written(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
