"""Messages about unknown names, with the nearest known ones."""

from collections.abc import Iterable

from meanformer.errors import nearest

LISTED = 12


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
