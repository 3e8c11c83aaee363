"""Reading a configuration table: every key known, every value of the right type."""

import dataclasses
import difflib
import math
import reprlib
import typing
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from meanformer.errors import InvalidInput, check, hint

MUST = object()  # in place of a default: the key must be there
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

    def take(
        self,
        key: str,
        kind: type | None = None,
        default: Any = None,
        *,
        positive: bool = False,
    ) -> Any:
        """Return the value of a key, or raise if it is not of the right kind.

        Args:
            key: the key.
            kind: the type of the value, any by default; `Array` for a number, or lists
                of numbers of equal length.
            default: what is returned if the key is not there; `MUST` if it must be.
            positive: whether a number must be positive.
        """
        self._known.add(key)
        if key not in self._left:
            # So close that it cannot be another key of the table.
            close = difflib.get_close_matches(key, self._left, n=1, cutoff=0.75)
            question = f" (did you mean it by {close[0]}?)" if close else ""
            check(
                default is not MUST,
                f"{self.name}.{key} is missing; it must be given{question}.",
            )
            return default
        name, value = f"{self.name}.{key}", self._left.pop(key)
        if kind is Array:
            return numbers(name, value)
        is_right = is_number(value) if kind is float else type(value) is kind
        check(
            kind is None or is_right,
            f"{name} is {shown(value)}; it must be {_NAMES.get(kind)}.",
        )
        check(
            kind is not int or -(2**63) <= value < 2**63,
            f"{name} is {shown(value)}; it must lie between -2^63 and 2^63 - 1.",
        )
        value = float(value) if kind is float else value
        check(not positive or value > 0, f"{name} is {value}; it must be positive.")
        return value

    def choose(self, key: str, choices: Iterable[str], default: Any = MUST) -> Any:
        """Return one of the named choices, or the default if the key is not there."""
        if default is not MUST and not self.has(key):
            return self.take(key, default=default)
        value, allowed = self.take(key, str, default), list(choices)
        if value not in allowed:
            raise InvalidInput(
                f"{self.name}.{key} is {shown(value)}; it must be one of "
                f"{', '.join(allowed)}{hint(value, allowed)}."
            )
        return value

    def take_fields(self, kind: type, *others: str) -> dict[str, Any]:
        """Return what the table gives for the fields of a class, but for the others.

        Each is read by its type; a field without a default must be given.
        """
        values = {}
        for field in dataclasses.fields(kind):
            if field.name in others:
                continue
            types = typing.get_args(field.type) or (field.type,)
            plain = [one for one in types if one in _NAMES] or [Array]
            default = MUST if field.default is dataclasses.MISSING else None
            values[field.name] = self.take(field.name, plain[0], default)
        return {name: value for name, value in values.items() if value is not None}

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
