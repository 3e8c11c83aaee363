"""The bibliography is complete: what is cited is there, and what is there is whole."""

import re
from pathlib import Path

import pybtex.database
import pytest

ROOT = Path(__file__).parents[2]
BIBLIOGRAPHY = pybtex.database.parse_file(str(ROOT / "docs" / "references.bib"))


def keys_cited_in_pages() -> set[str]:
    pages = (ROOT / "docs").rglob("*.md")
    text = "".join(p.read_text() for p in pages if "_build" not in p.parts)
    groups = re.findall(r"\{cite:\w+\}`([^`]+)`", text)
    return {key.strip() for group in groups for key in group.split(",")}


def keys_cited_in_docstrings() -> set[str]:
    text = "".join(p.read_text() for p in (ROOT / "src").rglob("*.py"))
    return set(re.findall(r"\[([A-Z][A-Za-z]*\d{2}[a-z]?)(?:,[^\]]*)?\]", text))


@pytest.mark.parametrize("cited", [keys_cited_in_pages, keys_cited_in_docstrings])
def test_every_key_that_is_cited_is_in_the_bibliography(cited):
    assert cited()
    assert cited() <= set(BIBLIOGRAPHY.entries)


@pytest.mark.parametrize("key", sorted(BIBLIOGRAPHY.entries))
def test_every_entry_says_who_wrote_what_when_and_where(key):
    entry = BIBLIOGRAPHY.entries[key]
    assert entry.persons["author"]
    assert entry.fields["title"]
    assert entry.fields["year"].isdigit()
    assert {"eprint", "journal", "booktitle", "publisher"} & set(entry.fields)


def test_no_preprint_stands_in_the_bibliography_twice():
    numbers = [
        e.fields["eprint"]
        for e in BIBLIOGRAPHY.entries.values()
        if "eprint" in e.fields
    ]
    assert len(numbers) == len(set(numbers))
