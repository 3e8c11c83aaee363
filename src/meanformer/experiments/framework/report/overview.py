"""The top of the page: what this is, how many claims hold, and the table of them."""

from collections.abc import Sequence

from meanformer.experiments.framework.experiment import Experiment
from meanformer.experiments.framework.report.html import Markup, join, prose, tag
from meanformer.experiments.framework.report.verdicts import (
    Verdict,
    badge,
    expected,
    measured,
)

EXPLANATION = (
    "A transformer moves a whole probability measure of tokens. Each card below states "
    "what is known about that motion, measures it, and sets the number against a value "
    "that comes from somewhere else: a closed form, an independent method, a "
    "published figure, a theorem. The verdict follows from these numbers, computed in "
    "this very run; nothing is filled in by hand."
)
STATUSES = (
    "A theorem is proved in the work cited, or derived on the theory page named; an "
    "observation has been seen in computations; a conjecture is neither."
)


def header(title: str, facts: dict[str, str], tally: Markup) -> Markup:
    """Name, explanation, counts, and where and when this was computed."""
    return tag(
        "header",
        tag("p", "meanformer", class_="brand"),
        tag("h1", title),
        tag("p", EXPLANATION, class_="lead"),
        tally,
        tag("p", join(_separated(facts)), class_="facts"),
    )


def tally(verdicts: Sequence[Verdict], experiments: int, seconds: float) -> Markup:
    """The counts that one looks at first."""
    holding = sum(verdict.state == "holds" for verdict in verdicts)
    known = [
        verdict for verdict in verdicts if verdict.state in ("holds", "fails", "broken")
    ]
    failing = len(known) - holding
    waiting = len(verdicts) - len(known)
    counts = [
        _count(f"{holding}", f"of {len(verdicts)} claims hold", "holds"),
        _count(f"{failing}", "do not", "fails") if failing else None,
        _count(f"{waiting}", "not measured yet", "queued") if waiting else None,
        _count(f"{experiments}", "experiment" + "s" * (experiments != 1), "plain"),
        _count(duration(seconds), "computing time", "plain"),
    ]
    return tag("ul", counts, class_="tally", aria_label="Summary")


def claims_table(cards: Sequence[tuple[Experiment, Sequence[Verdict]]]) -> Markup:
    """Every claim with measured value, expected value and verdict."""
    head = tag(
        "tr",
        [tag("th", word, scope="col") for word in ("Claim", "Status")],
        [
            tag("th", word, scope="col", class_="value")
            for word in ("Measured", "Expected")
        ],
        tag("th", "Verdict", scope="col"),
    )
    return tag(
        "section",
        tag("h2", "Claims"),
        tag(
            "div",
            tag("table", tag("thead", head), [_group(*card) for card in cards]),
            class_="scroll",
        ),
        tag("p", STATUSES, class_="key"),
        class_="claims",
        id="claims",
    )


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def _group(experiment: Experiment, verdicts: Sequence[Verdict]) -> Markup:
    anchor = tag("a", experiment.title, href=f"#{experiment.name}")
    name = tag("code", experiment.name)
    heading = tag("th", anchor, " ", name, colspan=5, scope="rowgroup")
    rows = [_row(experiment, verdict) for verdict in verdicts]
    return tag("tbody", tag("tr", heading, class_="group"), rows)


def _row(experiment: Experiment, verdict: Verdict) -> Markup:
    claim, finding = verdict.claim, verdict.finding
    sentence = prose(claim.statement)
    numbers = (measured(finding), expected(finding)) if finding else ("–", "–")
    address = f"#{experiment.name}--{claim.id}"
    return tag(
        "tr",
        tag("td", tag("a", sentence, href=address), class_="statement"),
        tag("td", claim.status, class_="status"),
        [tag("td", value, class_="value") for value in numbers],
        tag("td", badge(verdict.state)),
    )


def _count(value: str, words: str, kind: str) -> Markup:
    return tag("li", tag("strong", value), " ", tag("span", words), class_=kind)


def _separated(facts: dict[str, str]) -> list[Markup]:
    return [tag("span", value, class_=name) for name, value in facts.items()]
