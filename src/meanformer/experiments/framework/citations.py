r"""The literature behind the claims, read from one BibTeX file.

The file is `docs/references.bib`; a built package carries a copy of it.
"""

import dataclasses
import functools
import re
import unicodedata
from pathlib import Path

from meanformer.errors import InvalidInput
from meanformer.experiments.framework.experiment import Experiment
from meanformer.experiments.framework.names import unknown

PACKAGED = Path(__file__).with_name("references.bib")
IN_CHECKOUT = Path(__file__).parents[4] / "docs" / "references.bib"
COMBINING = {
    "'": "\u0301", "`": "\u0300", "^": "\u0302", '"': "\u0308", "~": "\u0303",
    "c": "\u0327", "v": "\u030c", "=": "\u0304", ".": "\u0307", "u": "\u0306",
}  # fmt: skip
LETTERS = {r"\ss": "ß", r"\o": "ø", r"\l": "ł", r"\L": "Ł", r"\i": "ı", r"\ae": "æ"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of the bibliography."""

    key: str
    fields: dict[str, str]
    bibtex: str

    @property
    def authors(self) -> str:
        """Names in reading order, separated by commas."""
        turned = [" ".join(reversed(name.split(", ", 1))) for name in self._names()]
        return ", ".join(turned).replace("others", "et al.")

    @property
    def short(self) -> str:
        """Family names and year, like `Castin, Ablin and Peyré (2024)`."""
        names = self._names()
        family = [n.split(",")[0] if "," in n else n.split(" ")[-1] for n in names]
        listed = f"{family[0]} et al." if len(family) > 3 else _enumerated(family)
        return f"{listed} ({self.text('year')})"

    @property
    def venue(self) -> str:
        """Journal or proceedings; empty for a preprint."""
        wanted = ("journal", "booktitle", "howpublished", "publisher", "school")
        return next((self.text(field) for field in wanted if field in self.fields), "")

    @property
    def address(self) -> str:
        """Where to read it."""
        if "doi" in self.fields:
            return f"https://doi.org/{self.text('doi')}"
        if "eprint" in self.fields:
            return f"https://arxiv.org/abs/{self.text('eprint')}"
        return self.text("url")

    def text(self, field: str) -> str:
        """A field in plain Unicode, empty if it is absent."""
        return without_latex(self.fields.get(field, ""))

    def _names(self) -> list[str]:
        return re.split(r"\s+and\s+", self.text("author"))


def bibliography_file() -> Path:
    """The one BibTeX file: the packaged copy, or the checkout's own."""
    return PACKAGED if PACKAGED.is_file() else IN_CHECKOUT


def known() -> dict[str, Entry]:
    """All entries of the bibliography, by key."""
    return bibliography(bibliography_file())


def lookup(key: str) -> Entry:
    """The entry of this key."""
    if key not in known():
        raise InvalidInput(unknown("reference", key, known()))
    return known()[key]


def entries_behind(experiment: Experiment) -> tuple[Entry, ...]:
    """The entries that the claims of an experiment cite, each once."""
    keys = [ref.key for claim in experiment.claims for ref in claim.references]
    return tuple(lookup(key) for key in dict.fromkeys(keys))


@functools.cache
def bibliography(path: Path) -> dict[str, Entry]:
    """All entries of a BibTeX file, by key."""
    if not path.is_file():
        return {}
    return {entry.key: entry for entry in parse(path.read_text(encoding="utf-8"))}


def parse(text: str) -> list[Entry]:
    """The entries of a BibTeX text, in order."""
    entries = []
    for start in re.finditer(r"^\s*@(\w+)\s*\{\s*([^,\s]+)\s*,", text, re.MULTILINE):
        if start[1].lower() in ("comment", "string", "preamble"):
            continue
        end = _closing_brace(text, text.index("{", start.start()))
        body = text[start.end() : end]
        source = text[start.start() : end + 1].strip()
        entries.append(Entry(start[2], _fields(body), source))
    return entries


def without_latex(text: str) -> str:
    """Plain Unicode: accents composed, braces and ties removed."""
    for command, letter in LETTERS.items():
        text = re.sub(re.escape(command) + r"(?![a-zA-Z])\s*", letter, text)
    accent = re.compile(r"\\([`'^\"~=.]|[cvu](?![a-zA-Z]))\s*\{?\s*(\w)\}?")
    text = accent.sub(lambda found: found[2] + COMBINING[found[1]], text)
    text = re.sub(r"\\([&%$#_])", r"\1", text).replace("--", "–").replace("~", " ")
    text = re.sub(r"\s+", " ", re.sub(r"[{}$]", "", text))
    return unicodedata.normalize("NFC", text).strip()


def _fields(body: str) -> dict[str, str]:
    fields, position = {}, 0
    while found := re.compile(r"\s*([\w-]+)\s*=\s*").search(body, position):
        value, position = _value(body, found.end())
        fields[found[1].lower()] = value
    return fields


def _value(body: str, start: int) -> tuple[str, int]:
    """A field's value and the place after it."""
    if body[start] == "{":
        end = _closing_brace(body, start)
        return body[start + 1 : end], end + 1
    if body[start] == '"':
        end = body.index('"', start + 1)
        return body[start + 1 : end], end + 1
    word = re.compile(r"[^,\s]*").match(body, start)
    return (word[0], word.end()) if word else ("", start)


def _closing_brace(text: str, start: int) -> int:
    depth = 0
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise InvalidInput("A BibTeX entry is not closed by a brace.")


def _enumerated(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
