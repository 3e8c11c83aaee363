"""A claim and its verdict, in the pieces that the table and the cards share."""

import dataclasses
import math
from typing import Literal, get_args

from meanformer.experiments.framework import citations
from meanformer.experiments.framework.claims import Claim, Finding, Reference
from meanformer.experiments.framework.numbers import SLACK_SIGNS, finding_digits, symbol
from meanformer.experiments.framework.records import Record
from meanformer.experiments.framework.report.html import (
    Markup,
    join,
    number,
    prose,
    tag,
)

State = Literal["holds", "fails", "broken", "running", "queued", "stopped"]
SIGNS = dict(zip(get_args(State), "✓✗!▸·–", strict=True))
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


def distance(finding: Finding) -> dict[str, Markup]:
    """How far the measured value is from the expected one, or from failing."""
    if not math.isfinite(finding.measured):
        return {}
    if not isinstance(finding.expected, tuple) and finding.relation == "close to":
        return {"difference": number(abs(finding.measured - finding.expected), 2)}
    name = "margin" if finding.holds else "beyond by"
    return {name: number(abs(finding.margin), 2)}


def origin(finding: Finding) -> Markup:
    """Where the expected value comes from."""
    kind, detail = finding.source.kind, finding.source.detail
    where = ORIGINS[kind] + (f": {detail}" if detail else "")
    several = f" Least favourable of {finding.comparisons} comparisons."
    said = prose(f"Expected value {where}.")
    return join([said, several if finding.comparisons > 1 else ""])


def cited(reference: Reference) -> Markup:
    """Authors and year with a link, and the place in the work."""
    place = f", {reference.place}" if reference.place else ""
    entry = citations.known().get(reference.key)
    if entry is None:
        return tag("span", reference.key + place, class_="cited")
    return tag("span", link(entry.short, entry.address), place, class_="cited")


def link(label: str, address: str) -> Markup:
    """A link, or only its label when there is no address."""
    return tag("a", label, href=address) if address else tag("span", label)
