"""Helping with misspelt names: the nearest known ones."""

import difflib
from collections.abc import Iterable

LISTED = 12


def nearest(word: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names that look most like the word, best first, whatever the case."""
    by_small = {name.lower(): name for name in known}
    small = word.lower()
    close = difflib.get_close_matches(small, by_small, n=count, cutoff=0.5)
    starting = [name for name in by_small if small and name.startswith(small)]
    return [by_small[name] for name in dict.fromkeys(close + starting)][:count]


def unknown(kind: str, word: str, known: Iterable[str]) -> str:
    """One sentence saying that a name is not known and which ones are near."""
    known = list(known)
    close = nearest(word, known)
    if close:
        return f"There is no {kind} {word!r}; did you mean {' or '.join(close)}?"
    return f"There is no {kind} {word!r}; the known ones are {listed(known)}."


def listed(names: list[str]) -> str:
    """Names separated by commas, the first dozen if there are more."""
    rest = len(names) - LISTED
    shown = ", ".join(names[:LISTED]) or "none"
    return f"{shown} and {rest} more" if rest > 0 else shown
