"""Sentences with formulas: as HTML with MathML, and as plain text for a terminal."""

import functools
import html
import re
from xml.etree import ElementTree

FORMULA = re.compile(r"\$([^$]+)\$")
LONELY = re.compile(r"(<math(?:(?!</math>).)*</math>[.,;:!?)]+)", re.DOTALL)
CODE = re.compile(r"`([^`]+)`")
NAMESPACE = "{http://www.w3.org/1998/Math/MathML}"
RAISED = dict(zip("0123456789+-−=()diknptT⊤", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾ᵈⁱᵏⁿᵖᵗᵀᵀ", strict=True))
LOWERED = dict(
    zip(
        "0123456789+-−=()aehijklmnoprstuvx",
        "₀₁₂₃₄₅₆₇₈₉₊₋₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓ",
        strict=True,
    )
)
ACCENTS = dict(zip("^~¯‾―˙", "\u0302\u0303\u0304\u0304\u0304\u0307", strict=True))
MARKS = {*RAISED.values(), *LOWERED.values(), *ACCENTS.values()}
SPACED = set("=<>≤≥≈∼→⟶∈∉⊂≠≡≍±+×⟹↦∝≪≫,")
BIG = set("∫∬∑∏")


def to_html(sentence: str) -> str:
    """HTML of a sentence, formulas as MathML and backquoted words as code.

    A formula stays on one line with the punctuation that follows it.
    """
    pieces = FORMULA.split(sentence)
    pieces[0::2] = (CODE.sub(r"<code>\1</code>", html.escape(t)) for t in pieces[0::2])
    pieces[1::2] = map(mathml, pieces[1::2])
    return LONELY.sub(r'<span class="together">\1</span>', "".join(pieces))


def to_plain(sentence: str) -> str:
    """A sentence in plain Unicode, formulas written on one line."""
    pieces = FORMULA.split(sentence)
    pieces[1::2] = map(_one_line, pieces[1::2])
    return re.sub(r"\s+", " ", "".join(pieces)).replace("`", "").strip()


@functools.lru_cache(maxsize=4096)
def mathml(formula: str) -> str:
    """The MathML element of a formula written in LaTeX."""
    ElementTree.register_namespace("", NAMESPACE.strip("{}"))
    return ElementTree.tostring(_tree(formula), encoding="unicode")


def _tree(formula: str) -> ElementTree.Element:
    from latex2mathml.converter import convert

    # The converter forgets that \mathrm is upright; operator names stay upright.
    root = ElementTree.fromstring(
        convert(formula.replace(r"\mathrm", r"\operatorname"))
    )
    for node in root.iter():
        _mend(node)
    return root


def _mend(node: ElementTree.Element) -> None:
    """Letters are identifiers, everything else an operator; names are upright."""
    text, tag = (node.text or "").strip(), node.tag.removeprefix(NAMESPACE)
    if tag == "mo" and text.isalpha() and text.isascii():
        node.tag = NAMESPACE + "mi"
        if len(text) == 1:
            node.set("mathvariant", "normal")
    if tag == "mi" and len(text) == 1 and not (text.isalnum() or text == "∞"):
        node.tag = NAMESPACE + "mo"
        if text in "⟨⟩":
            node.set("stretchy", "false")


def _one_line(formula: str) -> str:
    line = _linear(_tree(formula)).strip()
    line = re.sub(r"(?<=\w) (?=[(\[])", "", line)
    return re.sub(r"\s+(?=[)\],.;])|(?<=[(\[])\s+", "", re.sub(r"\s+", " ", line))


def _linear(node: ElementTree.Element) -> str:
    """A MathML element on one line of text."""
    tag = node.tag.removeprefix(NAMESPACE)
    parts = [_linear(child) for child in node]
    match [tag, *parts]:
        case ["mfrac", over, under]:
            return f"{_grouped(over)}/{_grouped(under)} "
        case ["msqrt", *inner]:
            return "√" + _grouped("".join(inner))
        case ["msup", base, high]:
            return _indexed(base, "", high)
        case ["msub" | "munder", base, low]:
            return _indexed(base, low, "")
        case ["msubsup" | "munderover", base, low, high]:
            return _indexed(base, low, high)
        case ["mover", base, accent]:
            return base + ACCENTS.get(accent, accent)
        case ["mspace"]:
            return " "
        case ["mtable", *rows]:
            return "; ".join(rows)
        case ["mtr", *cells]:
            return " ".join(cells)
        case [_]:
            return _leaf(node)
    return "".join(parts)


def _leaf(node: ElementTree.Element) -> str:
    text = (node.text or "").replace("\u2061", "").replace("\u00a0", " ")
    if text in SPACED:
        return f" {text} "
    is_name = node.tag == NAMESPACE + "mi" and len(text) > 1 and text.isascii()
    return f"{text} " if is_name or text in BIG else text


def _indexed(base: str, low: str, high: str) -> str:
    """A letter with what stands below and above it; names keep their space."""
    name = base.rstrip()
    indices = _shifted(low, LOWERED, "_") + _shifted(high, RAISED, "^")
    return name + indices + base[len(name) :]


def _shifted(text: str, letters: dict[str, str], mark: str) -> str:
    """Small letters where Unicode has all of them, else a mark and brackets."""
    dense = text.replace(" ", "")
    if all(letter in letters for letter in dense):
        return "".join(letters[letter] for letter in dense)
    return mark + _grouped(text)


def _grouped(text: str) -> str:
    """Brackets around more than a number or one letter with its indices and accents."""
    text = text.strip()
    rest = [mark for mark in text[1:] if mark not in MARKS]
    return f"({text})" if rest and not text.isdigit() else text
