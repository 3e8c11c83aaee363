"""Sphinx extension: entries of the bibliography are labelled by their BibTeX keys.

So that `[GLPR23]` in a docstring, on a page and in the list of references is one name.
"""

from collections.abc import Iterator, Sequence

from pybtex.database import Entry
from pybtex.plugin import register_plugin
from pybtex.style.formatting.unsrt import Style as UnsortedStyle
from pybtex.style.labels import BaseLabelStyle


class KeyLabels(BaseLabelStyle):
    """The key of an entry as its label."""

    def format_labels(self, sorted_entries: Sequence[Entry]) -> Iterator[str]:
        """Return one label per entry."""
        return (entry.key for entry in sorted_entries)


class KeyStyle(UnsortedStyle):
    """Plain entries, sorted by author and labelled by their keys."""

    default_label_style = KeyLabels
    default_sorting_style = "author_year_title"


def setup(app) -> dict[str, bool]:
    """Register the style under the name `keys`."""
    register_plugin("pybtex.style.formatting", "keys", KeyStyle)
    return {"parallel_read_safe": True}
