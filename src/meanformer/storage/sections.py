"""Reading a configuration table: every key known, every value of the right type."""

import difflib
import math
import reprlib
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from meanformer.errors import InvalidInput, check, hint

_NAMES = {
    float: "a finite number",
    int: "a whole number",
    str: "a text",
    bool: "true or false",
}


# Whole where it is short; nested as deeply as arrays can be, it would never end.
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 200
_BRIEF.maxlist = _BRIEF.maxdict = 12


def shown(value: Any) -> str:
    """Return a value of a file as a message shows it, shortened if it is long."""
    return _BRIEF.repr(value)


class Section:
    """A table of a configuration file, read key by key; what is left over is a mistake.

    Args:
        name: how the file calls the table, for messages.
        table: its contents.
    """

    def __init__(self, name: str, table: Any):
        if not isinstance(table, dict):
            raise InvalidInput(f"[{name}] is {shown(table)}; it must be a table.")
        self.name = name
        self._left = dict(table)
        self._known: set[str] = set()

    def has(self, key: str) -> bool:
        """Return whether the table has a key that nobody asked for yet."""
        return key in self._left

    def take(self, key: str, kind: type | None = None, default: Any = None) -> Any:
        """Return the value of a key, or the default; raise if its type is wrong."""
        self._known.add(key)
        if key not in self._left:
            return default
        value = self._left.pop(key)
        if kind is float and is_number(value):
            return float(value)
        check(
            kind is None or (kind is not float and type(value) is kind),
            f"{self.name}.{key} is {shown(value)}; it must be {_NAMES.get(kind)}.",
        )
        check(
            kind is not int or -(2**63) <= value < 2**63,
            f"{self.name}.{key} is {shown(value)}; it must lie between -2^63 and "
            "2^63 - 1.",
        )
        return value

    def take_positive(self, key: str, kind: type, default: Any = None) -> Any:
        """Return a number that must be positive if it is given."""
        value = self.take(key, kind, default)
        check(
            value is None or value > 0,
            f"{self.name}.{key} is {value}; it must be positive.",
        )
        return value

    def require_positive(self, key: str) -> int:
        """Return a positive whole number that must be there."""
        self._must_have(key)
        return self.take_positive(key, int)

    def take_seed(self, key: str, default: int | None = None) -> int:
        """Return a seed for random numbers: any whole number of 64 bits."""
        return (
            self.require(key, int) if default is None else self.take(key, int, default)
        )

    def take_numbers(self, key: str) -> Array | None:
        """Return a number, or lists of numbers of equal length, as an array."""
        value = self.take(key)
        return None if value is None else numbers(f"{self.name}.{key}", value)

    def require(self, key: str, kind: type | None = None) -> Any:
        """Return the value of a key that must be there."""
        self._must_have(key)
        return self.take(key, kind)

    def choose(
        self, key: str, choices: Iterable[str], default: str | None = None
    ) -> str:
        """Return one of the named choices."""
        value, allowed = self.take(key, str, default), list(choices)
        if value not in allowed:
            raise InvalidInput(
                f"{self.name}.{key} is {shown(value)}; it must be one of "
                f"{', '.join(allowed)}{hint(value, allowed)}."
            )
        return value

    def require_numbers(self, key: str) -> Array:
        """Return an array that must be there."""
        self._must_have(key)
        return numbers(f"{self.name}.{key}", self.take(key))

    def _must_have(self, key: str) -> None:
        # So close that it cannot be another key of the table.
        close = difflib.get_close_matches(key, self._left, n=1, cutoff=0.75)
        question = f" (did you mean it by {close[0]}?)" if close else ""
        check(
            key in self._left,
            f"{self.name}.{key} is missing; it must be given{question}.",
        )

    def finish(self) -> None:
        """Raise if the table holds a key that nobody asked for."""
        for key in self._left:
            known = sorted(self._known)
            raise InvalidInput(
                f"{self.name}.{key} is not known{hint(key, known)}; the keys are "
                f"{', '.join(known)}."
            )


def is_number(value: Any) -> bool:
    """Whether a value of a file is a number that arithmetic can use."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300 and math.isfinite(value)


def numbers(name: str, value: Any) -> Array:
    """Return a number or nested lists of numbers as an array, or raise."""
    try:
        array = np.asarray(value)
    except (RecursionError, ValueError):
        array = np.asarray("lists of unequal length, or too deep")
    check(
        array.dtype.kind in "if" and bool(np.isfinite(array).all()),
        f"{name} is {shown(value)}; it must be made of finite numbers, in lists of "
        "equal length.",
    )
    return jnp.asarray(array, float)
