r"""Sphinx extension: docstrings written in Markdown with LaTeX, read as reST.

Docstrings of the library are meant to be read in an editor, so they write `$x$` and
`$$x$$` for mathematics, single backticks for code and `[GLPR23]` for an entry of
`references.bib`; tables have pipes. Sphinx wants roles and directives instead; this
translates.
"""

import functools
import re
import textwrap
from pathlib import Path

BIBLIOGRAPHY = Path(__file__).parent.parent / "references.bib"

# What must not be touched by later rules comes first.
TOKENS = re.compile(
    r"""
    ``[^`]+``                                     # literal, left alone
  | `(?P<code>[^`]+)`(?!_)                        # code
  | \$(?P<math>[^$]+?)\$                          # formula in the line
  | \[(?P<key>[A-Z][A-Za-z]*\d{2}[a-z]?)(?:,\ (?P<place>[^\]]+))?\]   # citation
  | (?<!\\)(?P<special>[*|])                       # reST would read it as markup
    """,
    re.VERBOSE,
)
# Blocks that stand alone: displayed formulas and tables.
BLOCKS = re.compile(
    r"""
    ^(?P<indent>[ ]*)\$\$(?P<formula>.+?)\$\$(?P<rest>[.,;]?)
  | ^(?P<margin>[ ]*)(?P<table>\|[^\n]+\|\n[ ]*\|[-|: ]+\|(?:\n[ ]*\|[^\n]+\|)*)
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)


@functools.cache
def cited_keys(bibliography: Path = BIBLIOGRAPHY) -> frozenset[str]:
    """Return the keys of all entries of a BibTeX file."""
    return frozenset(re.findall(r"^@\w+\{([^,\s]+),", bibliography.read_text(), re.M))


def block(match: re.Match[str], keys: frozenset[str]) -> str:
    """Return a displayed formula or a table as a directive at its indentation."""
    if match["table"]:
        body, margin = table(match["table"], keys), match["margin"]
    else:
        body, margin = formula(match["formula"], match["rest"]), match["indent"]
    return "\n" + textwrap.indent(body, margin) + "\n"


def formula(body: str, rest: str) -> str:
    """Return a displayed formula as a `math` directive."""
    lines = [line.strip() for line in body.strip().splitlines()]
    return ".. math::\n\n" + textwrap.indent("\n".join(lines) + rest, "   ")


def table(text: str, keys: frozenset[str]) -> str:
    """Return a Markdown table as a `list-table` directive."""
    head, _, *body = (re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines())
    rows = [
        "\n".join(
            f"{'  - ' if place else '* - '}{translate_running_text(cell.strip(), keys)}"
            for place, cell in enumerate(row)
        )
        for row in (head, *body)
    ]
    content = textwrap.indent("\n".join(rows), "   ")
    return f".. list-table::\n   :header-rows: 1\n\n{content}"


def inline(match: re.Match[str], keys: frozenset[str]) -> str:
    """Return a token of running text as the reST that means the same."""
    if match["code"]:
        return f"``{match['code']}``" + ending(match)
    if match["math"]:
        return ":math:`{}`".format(" ".join(match["math"].split())) + ending(match)
    if match["key"] in keys:
        place = f" ({match['place']})" if match["place"] else ""
        return f":cite:p:`{match['key']}`{place}"
    if match["special"]:
        return "\\" + match["special"]
    return match[0]


def ending(match: re.Match[str]) -> str:
    """Return what reST needs between markup and a letter that follows at once."""
    following = match.string[match.end() : match.end() + 1]
    return "\\ " if following.isalnum() else ""


def translate(docstring: str, keys: frozenset[str]) -> str:
    """Return a Markdown docstring as reStructuredText."""
    pieces, end = [], 0
    for match in BLOCKS.finditer(docstring):
        pieces.append(translate_running_text(docstring[end : match.start()], keys))
        pieces.append(block(match, keys))
        end = match.end()
    return "".join(pieces) + translate_running_text(docstring[end:], keys)


def translate_running_text(text: str, keys: frozenset[str]) -> str:
    """Return text without blocks as reStructuredText."""
    return TOKENS.sub(lambda match: inline(match, keys), text)


def translate_lines(app, what, name, obj, options, lines: list[str]) -> None:
    """Translate a docstring in place, before napoleon reads its sections."""
    lines[:] = translate("\n".join(lines), cited_keys()).splitlines()


def skip_foreign(app, what, name, obj, skip, options) -> bool | None:
    """Leave out what a room only imports from other libraries."""
    home = getattr(obj, "__module__", None) or ""
    return True if what == "module" and not home.startswith("meanformer") else None


def setup(app) -> dict[str, bool]:
    """Register the translation with Sphinx."""
    app.connect("autodoc-process-docstring", translate_lines, priority=400)
    app.connect("autodoc-skip-member", skip_foreign)
    return {"parallel_read_safe": True}
