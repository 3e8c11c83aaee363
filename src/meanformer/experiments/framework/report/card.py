"""One experiment on the page: statements, figures, numbers, parameters, citation."""

import base64
import re
import shlex
from collections.abc import Sequence
from typing import Any

from meanformer.experiments.framework import citations, text
from meanformer.experiments.framework.claims import Finding
from meanformer.experiments.framework.experiment import Experiment, Table
from meanformer.experiments.framework.records import Print, Record
from meanformer.experiments.framework.report import overview
from meanformer.experiments.framework.report.html import (
    Markup,
    join,
    number,
    prose,
    tag,
)
from meanformer.experiments.framework.report.movies import movie_figures
from meanformer.experiments.framework.report.verdicts import (
    State,
    Verdict,
    badge,
    cited,
    distance,
    expected,
    link,
    measured,
    origin,
)
from meanformer.experiments.framework.settings import as_json

FEW_CLAIMS = 4  # more of them stand in two columns
LARGEST_DRAWING = 1_500_000  # characters of SVG; beyond, the bitmap is lighter


def card(
    experiment: Experiment, record: Record | None, verdicts: Sequence[Verdict]
) -> Markup:
    """The card of one experiment, finished or not."""
    kind = "findings many" if len(verdicts) > FEW_CLAIMS else "findings"
    return tag(
        "article",
        _heading(experiment, record),
        _paragraphs(experiment),
        _figures(record) if record else None,
        tag("ol", [_claim(experiment, one) for one in verdicts], class_=kind),
        _results(experiment, record) if record else _waiting(verdicts[0].state),
        _citations(experiment),
        _rerun(rerun_command(experiment, record)),
        id=experiment.name,
        class_="card",
    )


def rerun_command(experiment: Experiment, record: Record | None) -> str:
    """The command line that repeats this run."""
    if record is None:
        return shlex.join(["meanformer", "run", experiment.name])
    words = ["meanformer", "run", record.path or experiment.name]
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


def _paragraphs(experiment: Experiment) -> list[Markup]:
    blocks = [" ".join(block.split()) for block in experiment.about.split("\n\n")]
    if blocks[0].rstrip(".") == experiment.title.rstrip("."):
        blocks = blocks[1:]
    return [tag("p", prose(block), class_="about") for block in blocks if block]


def _claim(experiment: Experiment, verdict: Verdict) -> Markup:
    claim, finding = verdict.claim, verdict.finding
    places = [join(["; " * (i > 0), cited(r)]) for i, r in enumerate(claim.references)]
    cited_places = tag("span", places)
    kind = tag("span", claim.status.capitalize(), class_="kind")
    return tag(
        "li",
        tag("div", badge(verdict.state), kind, cited_places, class_="source"),
        tag("p", prose(claim.statement), class_="statement"),
        _numbers(finding) if finding else None,
        id=f"{experiment.name}--{claim.id}",
        class_=verdict.state,
    )


def _numbers(finding: Finding) -> Markup:
    pairs = [("measured", measured(finding)), ("expected", expected(finding))]
    gap = distance(finding)
    pairs += [gap] if gap else []
    cells = [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs]
    return join(
        [
            tag("dl", cells, class_="numbers"),
            tag("p", origin(finding), class_="origin"),
        ]
    )


def _results(experiment: Experiment, record: Record) -> list[Any]:
    return [
        _failure(record) if record.error else None,
        [_table(table) for table in record.tables],
        [tag("p", prose(note), class_="note") for note in record.notes],
        [tag("p", warning, class_="warning") for warning in record.warnings],
        _parameters(experiment, record),
    ]


def _figures(record: Record) -> Markup | None:
    if not record.prints and not record.reels:
        return None
    figures = [_figure(one) for one in record.prints]
    return tag("div", figures, movie_figures(record), class_="figures")


def _waiting(state: State) -> Markup:
    words = {
        "running": "Running now; this page fills in by itself.",
        "queued": "Waiting for a free worker.",
        "stopped": "Not run: the atlas was stopped before its turn.",
    }
    return tag("p", words[state], class_="waiting")


def _failure(record: Record) -> Markup:
    trace = tag(
        "details", tag("summary", "Where it happened"), tag("pre", record.trace)
    )
    return tag(
        "div",
        tag("p", "The run broke off: ", tag("strong", record.error)),
        trace if record.trace else None,
        class_="failure",
    )


def _figure(one: Print) -> Markup:
    caption = tag("figcaption", prose(one.caption))
    width = f"width: {drawn_width(one.svg):.0f}px"
    return tag("figure", _image(one), caption, style=width)


def _image(one: Print) -> Markup:
    description = text.to_plain(one.alt)
    if len(one.svg) <= LARGEST_DRAWING:
        return tag("div", Markup(one.svg), role="img", aria_label=description)
    data = base64.b64encode(one.png).decode()
    source = f"data:image/png;base64,{data}"
    return tag("img", src=source, alt=description, class_="bitmap")


def drawn_width(svg: str) -> float:
    """Width in pixels that a drawing asks for; its own unit is the point."""
    found = re.search(r'<svg[^>]*\bwidth="([\d.]+)pt"', svg)
    return float(found[1]) * 96 / 72 if found else 600.0


def _table(table: Table) -> Markup:
    head = tag("tr", [_column(table, place) for place in range(len(table.columns))])
    rows = [tag("tr", [_cell(cell) for cell in row]) for row in table.rows]
    caption = tag("caption", prose(table.caption)) if table.caption else None
    body = tag("table", caption, tag("thead", head), tag("tbody", rows))
    return tag("div", body, class_="scroll data")


def _column(table: Table, place: int) -> Markup:
    is_numeric = all(isinstance(row[place], (int, float)) for row in table.rows)
    kind = "value" if is_numeric else None
    return tag("th", prose(table.columns[place]), scope="col", class_=kind)


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
    venue = f"{entry.venue or 'Preprint'}, {entry.text('year')}."
    shown = link(entry.address.removeprefix("https://"), entry.address)
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
