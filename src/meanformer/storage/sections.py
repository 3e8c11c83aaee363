"""Reading a configuration table: every key known, every value of the right type."""

import difflib
from collections.abc import Iterable
from typing import Any

from meanformer.errors import InvalidInput

_NAMES = {
    float: "a number",
    int: "a whole number",
    str: "a text",
    bool: "true or false",
}


class Section:
    """A table of a configuration file, read key by key; what is left over is a mistake.

    Args:
        name: how the file calls the table, for messages.
        table: its contents.
    """

    def __init__(self, name: str, table: Any):
        if not isinstance(table, dict):
            raise InvalidInput(f"[{name}] is {table!r}; it must be a table.")
        self.name = name
        self._left = dict(table)
        self._known: set[str] = set()

    def take(self, key: str, kind: type | None = None, default: Any = None) -> Any:
        """Return the value of a key, or the default; raise if its type is wrong."""
        self._known.add(key)
        if key not in self._left:
            return default
        value = self._left.pop(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind is float and is_number:
            return float(value)
        if kind is not None and type(value) is not kind:
            raise InvalidInput(
                f"{self.name}.{key} is {value!r}; it must be {_NAMES[kind]}."
            )
        return value

    def require(self, key: str, kind: type | None = None) -> Any:
        """Return the value of a key that must be there."""
        value = self.take(key, kind)
        if value is None:
            raise InvalidInput(f"{self.name}.{key} is missing; it must be given.")
        return value

    def choose(
        self, key: str, choices: Iterable[str], default: str | None = None
    ) -> str:
        """Return one of the named choices."""
        value, allowed = self.take(key, str, default), list(choices)
        if value not in allowed:
            raise InvalidInput(
                f"{self.name}.{key} is {value!r}; it must be one of "
                f"{', '.join(allowed)}{hint(value, allowed)}."
            )
        return value

    def finish(self) -> None:
        """Raise if the table holds a key that nobody asked for."""
        for key in self._left:
            known = sorted(self._known)
            raise InvalidInput(
                f"{self.name}.{key} is not known{hint(key, known)}; the keys are "
                f"{', '.join(known)}."
            )


def hint(word: object, known: Iterable[str]) -> str:
    """Return a question naming the nearest known word, or nothing."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
