"""The top of the page: what this is, how many claims hold, and the table of them."""

from collections.abc import Mapping, Sequence

from meanformer.experiments.framework.experiment import Experiment
from meanformer.experiments.framework.report import verdicts
from meanformer.experiments.framework.report.html import Markup, prose, tag
from meanformer.experiments.framework.report.verdicts import Verdict

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


def header(title: str, facts: Mapping[str, str], counts: Markup) -> Markup:
    """Name, explanation, counts, and where and when this was computed."""
    named = [tag("span", value, class_=name) for name, value in facts.items()]
    return tag(
        "header",
        tag("p", "meanformer", class_="brand"),
        tag("h1", title),
        tag("p", EXPLANATION, class_="lead"),
        counts,
        tag("p", named, class_="facts"),
    )


def tally(found: Sequence[Verdict], experiments: int, seconds: float) -> Markup:
    """The counts that one looks at first."""
    states = [verdict.state for verdict in found]
    holding = states.count("holds")
    failing = states.count("fails") + states.count("broken")
    waiting = len(states) - holding - failing
    counts = [
        _count(f"{holding}", f"of {len(states)} claims hold", "holds"),
        _count(f"{failing}", "do not", "fails") if failing else None,
        _count(f"{waiting}", "not measured yet", "queued") if waiting else None,
        _count(f"{experiments}", "experiment" + "s" * (experiments != 1), "plain"),
        _count(duration(seconds), "computing time", "plain"),
    ]
    return tag("ul", counts, class_="tally", aria_label="Summary")


def claims_table(cards: Sequence[tuple[Experiment, Sequence[Verdict]]]) -> Markup:
    """Every claim with measured value, expected value and verdict."""
    words = ("Claim", "Status", "Measured", "Expected", "Verdict")
    kinds = (None, None, "value", "value", None)
    pairs = zip(words, kinds, strict=True)
    head = [tag("th", word, scope="col", class_=kind) for word, kind in pairs]
    rows = [_group(*card) for card in cards]
    table = tag("table", tag("thead", tag("tr", head)), rows)
    return tag(
        "section",
        tag("h2", "Claims"),
        tag("div", table, class_="scroll"),
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


def _group(experiment: Experiment, found: Sequence[Verdict]) -> Markup:
    anchor = tag("a", experiment.title, href=f"#{experiment.name}")
    name = tag("code", experiment.name)
    heading = tag("th", anchor, " ", name, colspan=5, scope="rowgroup")
    rows = [_row(experiment, verdict) for verdict in found]
    return tag("tbody", tag("tr", heading, class_="group"), rows)


def _row(experiment: Experiment, verdict: Verdict) -> Markup:
    claim, finding = verdict.claim, verdict.finding
    sentence = prose(claim.statement)
    numbers: Sequence[str] = ("–", "–")
    if finding:
        numbers = verdicts.measured(finding), verdicts.expected(finding)
    address = f"#{experiment.name}--{claim.id}"
    return tag(
        "tr",
        tag("td", tag("a", sentence, href=address), class_="statement"),
        tag("td", claim.status, class_="status"),
        [tag("td", value, class_="value") for value in numbers],
        tag("td", verdicts.badge(verdict.state)),
    )


def _count(value: str, words: str, kind: str) -> Markup:
    return tag("li", tag("strong", value), " ", tag("span", words), class_=kind)
