"""Writing HTML from Python: elements nest, and text is escaped."""

import html
from collections.abc import Iterable
from typing import Any

from meanformer.experiments.framework import text
from meanformer.experiments.framework.numbers import digits_and_power

VOID = {"meta", "link", "br", "hr", "img", "source"}


class Markup(str):
    """Text that is HTML already."""


def tag(name: str, *children: Any, **attributes: Any) -> Markup:
    """An element: `tag("p", "a < b", class_="note")`.

    An attribute that is `None` or false is left out; underscores become hyphens.
    """
    opening = name + "".join(_attribute(*pair) for pair in attributes.items())
    if name in VOID:
        return Markup(f"<{opening}>")
    return Markup(f"<{opening}>{join(children)}</{name}>")


def join(children: Iterable[Any]) -> Markup:
    """Children one after the other; lists are flattened, nothing is left out."""
    return Markup("".join(map(_child, children)))


def prose(sentence: str) -> Markup:
    """A sentence with $formulas$ and `code`."""
    return Markup(text.to_html(sentence))


def number(value: float, digits: int = 5) -> Markup:
    """A number with a true minus sign and a raised power of ten."""
    mantissa, power = digits_and_power(value, digits)
    mantissa = mantissa.replace("-", "−")
    if power is None:
        return tag("span", mantissa, class_="number")
    factor = "" if mantissa == "1" else f"{mantissa}\u202f×\u202f"
    raised = tag("sup", str(power).replace("-", "−"))
    return tag("span", factor, "10", raised, class_="number")


def _attribute(name: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'


def _child(child: Any) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return html.escape(child)
    return join(child)
