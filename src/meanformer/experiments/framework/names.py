"""Helping with misspelt names: the nearest known ones."""

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names that look most like the word, best first."""
    known = list(known)
    close = difflib.get_close_matches(word.lower(), known, n=count, cutoff=0.5)
    starting = [name for name in known if word and name.startswith(word.lower())]
    return list(dict.fromkeys(close + starting))[:count]


def unknown(kind: str, word: str, known: Iterable[str]) -> str:
    """One sentence saying that a name is not known and which ones are near."""
    known = list(known)
    close = nearest(word, known)
    if close:
        return f"There is no {kind} {word!r}; did you mean {' or '.join(close)}?"
    listed = ", ".join(known) if known else "none"
    return f"There is no {kind} {word!r}; the known ones are {listed}."
