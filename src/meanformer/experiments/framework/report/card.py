"""One experiment on the page: statements, figures, numbers, parameters, citation."""

import base64
import re
import shlex
from collections.abc import Sequence
from typing import Any

from meanformer.experiments.framework import citations, text
from meanformer.experiments.framework.claims import Finding
from meanformer.experiments.framework.experiment import Experiment, Table
from meanformer.experiments.framework.filming import Reel, gif_name
from meanformer.experiments.framework.records import Print, Record
from meanformer.experiments.framework.report import overview, verdicts
from meanformer.experiments.framework.report.html import (
    Markup,
    join,
    number,
    prose,
    tag,
)
from meanformer.experiments.framework.report.verdicts import Verdict
from meanformer.experiments.framework.settings import as_json

FEW_CLAIMS = 4  # more of them stand in two columns
WAITING = {
    "running": "Running now; this page fills in by itself.",
    "queued": "Waiting for a free worker.",
    "stopped": "Not run: the atlas was stopped before its turn.",
}
STILL = "(prefers-reduced-motion: reduce), print"
LARGEST_DRAWING = 1_500_000  # characters of SVG; beyond, the bitmap is lighter


def card(
    experiment: Experiment, record: Record | None, found: Sequence[Verdict]
) -> Markup:
    """The card of one experiment, finished or not."""
    kind = "findings many" if len(found) > FEW_CLAIMS else "findings"
    command = rerun_command(experiment, record)
    waiting = tag("p", WAITING.get(found[0].state), class_="waiting")
    return tag(
        "article",
        _heading(experiment, record),
        _paragraphs(experiment),
        _figures(record) if record else None,
        tag("ol", [_claim(experiment, one) for one in found], class_=kind),
        _results(experiment, record) if record else waiting,
        _citations(experiment),
        tag("p", "Run it again: ", tag("code", command), class_="rerun"),
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
    places = [
        join(["; " * (index > 0), verdicts.cited(reference)])
        for index, reference in enumerate(claim.references)
    ]
    kind = tag("span", claim.status.capitalize(), class_="kind")
    badge = verdicts.badge(verdict.state)
    return tag(
        "li",
        tag("div", badge, kind, tag("span", places), class_="source"),
        tag("p", prose(claim.statement), class_="statement"),
        _numbers(finding) if finding else None,
        id=f"{experiment.name}--{claim.id}",
        class_=verdict.state,
    )


def _numbers(finding: Finding) -> list[Markup]:
    both = {
        "measured": verdicts.measured(finding),
        "expected": verdicts.expected(finding),
    }
    pairs = both | verdicts.distance(finding)
    cells = [tag("div", tag("dt", name), tag("dd", pairs[name])) for name in pairs]
    origin = tag("p", verdicts.origin(finding), class_="origin")
    return [tag("dl", cells, class_="numbers"), origin]


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
    reels = enumerate(record.reels, start=1)
    return tag(
        "div",
        [_figure(one) for one in record.prints],
        [_movie(reel, gif_name(record.experiment, index)) for index, reel in reels],
        class_="figures",
    )


def _failure(record: Record) -> Markup:
    label = tag("summary", "Where it happened")
    trace = tag("details", label, tag("pre", record.trace)) if record.trace else None
    said = tag("p", "The run broke off: ", tag("strong", record.error))
    return tag("div", said, trace, class_="failure")


def _figure(one: Print) -> Markup:
    caption = tag("figcaption", prose(one.caption))
    width = f"width: {drawn_width(one.svg):.0f}px"
    return tag("figure", _image(one), caption, style=width)


def _image(one: Print) -> Markup:
    description = text.to_plain(one.alt)
    if len(one.svg) <= LARGEST_DRAWING:
        return tag("div", Markup(one.svg), role="img", aria_label=description)
    source = _inline("png", one.png)
    return tag("img", src=source, alt=description, class_="bitmap")


def _movie(reel: Reel, address: str) -> Markup:
    """A movie that plays by itself.

    On paper, and for readers who ask for less motion, the last frame stands in its
    place, beside a link to the file.
    """
    source, alt = _inline("gif", reel.gif), text.to_plain(reel.alt)
    image = tag("img", src=source, alt=alt, width=reel.width, class_="bitmap")
    still = tag("source", srcset=_inline("png", reel.still), media=STILL)
    play = tag("a", "Play the movie.", href=address, class_="play")
    caption = tag("figcaption", prose(reel.caption), " ", play)
    width = f"width: {reel.width}px"
    return tag("figure", tag("picture", still, image), caption, style=width)


def _inline(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


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
    known = citations.known()
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
    shown = verdicts.link(entry.address.removeprefix("https://"), entry.address)
    title = tag("cite", entry.text("title"))
    # A title that asks a question keeps its own mark.
    stop = " " if entry.text("title").endswith("?") else ". "
    return join([f"{entry.authors}. ", title, stop, venue, " ", shown])


def _written(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
