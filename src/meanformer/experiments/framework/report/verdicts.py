"""A claim and its verdict, in the pieces that the table and the cards share."""

import dataclasses
import math
from typing import Literal

from meanformer.experiments.framework import citations
from meanformer.experiments.framework.claims import Claim, Finding, Reference
from meanformer.experiments.framework.numbers import (
    SLACK_SIGNS,
    finding_digits,
    symbol,
)
from meanformer.experiments.framework.records import Record
from meanformer.experiments.framework.report.html import (
    Markup,
    join,
    number,
    prose,
    tag,
)

State = Literal["holds", "fails", "broken", "running", "queued", "stopped"]
SIGNS = {
    "holds": "✓",
    "fails": "✗",
    "broken": "!",
    "running": "▸",
    "queued": "·",
    "stopped": "–",
}

ORIGINS = {
    "closed form": "in closed form",
    "other method": "by another method",
    "tabulated": "as tabulated beforehand",
    "published": "as published",
    "theory": "from theory",
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What is known about one claim right now."""

    claim: Claim
    state: State
    finding: Finding | None = None


def verdict(claim: Claim, record: Record | None, otherwise: State) -> Verdict:
    """The verdict of a claim; `otherwise` while there is no record."""
    if record is None:
        return Verdict(claim, otherwise)
    finding = record.finding(claim)
    if finding is None:
        return Verdict(claim, "broken")
    return Verdict(claim, "holds" if finding.holds else "fails", finding)


def badge(state: State) -> Markup:
    """The verdict as a word with a sign; colour only repeats it."""
    sign = tag("span", SIGNS[state], aria_hidden="true", class_="sign")
    return tag("span", sign, state, class_=f"badge {state}")


def measured(finding: Finding) -> Markup:
    """The measured value."""
    return number(finding.measured, finding_digits(finding))


def expected(finding: Finding) -> Markup:
    """The relation, the expected value and the tolerance."""
    sign = tag("span", symbol(finding), class_="relation")
    digits = finding_digits(finding)
    if isinstance(finding.expected, tuple):
        low, high = (number(end, digits) for end in finding.expected)
        return join([sign, " [", low, ", ", high, "]"])
    value = join([sign, " ", number(finding.expected, digits)])
    if finding.tolerance == 0:
        return value
    slack = SLACK_SIGNS[finding.relation]
    return join([value, f" {slack} ", number(finding.tolerance, 2)])


def distance(finding: Finding) -> tuple[str, Markup] | None:
    """How far the measured value is from the expected one, or from failing."""
    if not math.isfinite(finding.measured):
        return None
    if not isinstance(finding.expected, tuple) and finding.relation == "close to":
        gap = abs(finding.measured - finding.expected)
        return "difference", number(gap, 2)
    name = "margin" if finding.holds else "beyond by"
    return name, number(abs(finding.margin), 2)


def origin(finding: Finding) -> Markup:
    """Where the expected value comes from."""
    source = finding.source
    detail = f": {source.detail}" if source.detail else ""
    several = f"Least favourable of {finding.comparisons} comparisons."
    return join(
        [
            prose(f"Expected value {ORIGINS[source.kind]}{detail}."),
            f" {several}" if finding.comparisons > 1 else "",
        ]
    )


def cited(reference: Reference) -> Markup:
    """Authors and year with a link, and the place in the work."""
    place = f", {reference.place}" if reference.place else ""
    entry = citations.bibliography(citations.bibliography_file()).get(reference.key)
    if entry is None:
        return tag("span", reference.key + place, class_="cited")
    return tag("span", link(entry.short, entry.address), place, class_="cited")


def link(label: str, address: str) -> Markup:
    """A link, or only its label when there is no address."""
    if not address:
        return tag("span", label)
    return tag("a", label, href=address)
