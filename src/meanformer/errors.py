"""Exceptions of the library, and the checks that all rooms share.

A check of an array's values looks only at concrete arrays: shapes and options are
checked always, values when they are known. Under `jit` the values are not known, and
a failure shows in the status of the solve instead.
"""

import difflib
import inspect
import numbers
import operator
import warnings
from collections.abc import Iterable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import jax.random
import numpy as np
from jaxtyping import Array


class InvalidInput(ValueError):
    """A user's mistake, told in one sentence."""


class Unsupported(InvalidInput):
    """A combination that has no closed form or no meaning; the message says why."""


class Overflow(ArithmeticError):
    """A quantity too large for its floating-point type; the message names the row."""


class PrecisionWarning(UserWarning):
    """Fewer digits than were given, or asked for; the message gives advice."""


class StoppedEarly(UserWarning):
    """A solve that ended before the depth asked for; the message gives advice."""


class QuadratureWarning(UserWarning):
    """A continuous measure that was replaced by tokens; the message tells the error."""


class LostDepths(UserWarning):
    """Depths of a run whose files are gone from the disk; the message tells which."""


class ConflictingTargets(UserWarning):
    """Equal contexts and queries with different targets, which nothing can fit."""


class NotPeriodic(UserWarning):
    """A function on a box whose periodic continuation jumps; the message tells it."""


class SlowSums(UserWarning):
    """Fast sums that would have been inaccurate, so that exact ones were computed."""


# Packages whose frames stand between a user's line and a warning about it.
_BETWEEN = ("meanformer", "equinox", "jax", "jaxtyping", "beartype", "contextlib")


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line outside of the library that led here."""
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def check(condition: bool | np.bool_, message: str) -> None:
    """Raise `InvalidInput` with the message unless the condition holds."""
    if not condition:
        raise InvalidInput(message)


def nearest(word: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return the known names that look most like the word, best first, in any case."""
    by_small = {name.lower(): name for name in known}
    small = word.lower()
    close = difflib.get_close_matches(small, by_small, n=count, cutoff=0.5)
    starting = [name for name in by_small if small and name.startswith(small)]
    return [by_small[name] for name in dict.fromkeys(close + starting)][:count]


def hint(word: object, known: Iterable[str]) -> str:
    """Return a question naming the nearest known word, or nothing."""
    close = nearest(str(word), known, count=1)
    return f" (did you mean {close[0]}?)" if close else ""


def check_choice(
    name: str, value: object, choices: Iterable[str], otherwise: str = ""
) -> None:
    """Raise unless the value is one of the names, telling them and the nearest one.

    Args:
        name: what the user calls the option.
        value: what was given.
        choices: the names that are allowed.
        otherwise: what else is allowed, in words.
    """
    allowed = list(choices)
    if isinstance(value, str) and value in allowed:
        return
    quoted = " or ".join(f'"{choice}"' for choice in allowed)
    listed = quoted if len(allowed) < 3 else f"one of {', '.join(allowed)}"
    raise InvalidInput(
        f"{name} is {value!r}; it must be {listed}{otherwise}{hint(value, allowed)}."
    )


def check_kind(name: str, value: object, kind: Any, allowed: str) -> None:
    """Raise unless the value is of a kind, such as a class or a union of several.

    Args:
        name: what the user calls it.
        value: what was given.
        kind: as for `isinstance`.
        allowed: what it must be, in words.
    """
    if not isinstance(value, kind):
        written = repr(value)
        is_brief = len(written) <= 60 or isinstance(value, str)
        shown = written if is_brief else f"a {type(value).__name__}"
        raise InvalidInput(f"{name} is {shown}; it must be {allowed}.")


def check_known(caller: str, *arrays: Any, otherwise: str = "") -> None:
    """Raise unless the values of all arrays are known, which this function looks at."""
    check(
        all(map(is_concrete, arrays)),
        f"{caller} cannot run under jit or grad, where values are not known; call it "
        f"outside{otherwise}.",
    )


def is_concrete(array) -> bool:
    """Whether the values of an array are known here and now.

    A traced array has no values yet; one laid out over several processes has some of
    them elsewhere.
    """
    if isinstance(array, jax.core.Tracer):
        return False
    return not isinstance(array, jax.Array) or array.is_fully_addressable


def as_float_array(name: str, value: Any) -> Array:
    """Return the value as a floating-point JAX array, integers promoted.

    Warns when a float64 array would lose digits because JAX runs in 32 bits.
    """
    if value is None or isinstance(value, str):
        raise InvalidInput(f"{name} is {value!r}; it must be an array of numbers.")
    if not jax.config.read("jax_enable_x64") and _holds_doubles(value):
        warn(
            f"{name} is float64 but JAX runs in 32 bits, so digits are lost; call "
            'jax.config.update("jax_enable_x64", True) first, or pass float32.',
            PrecisionWarning,
        )
        value = np.asarray(value, np.float32)
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        reason = str(error).split(". ")[0].rstrip(".")
        raise InvalidInput(
            f"{name} is not an array of numbers ({reason}); it must hold numbers only, "
            "with rows of one length."
        ) from error
    check(
        not jnp.issubdtype(array.dtype, jnp.complexfloating),
        f"{name} is complex ({array.dtype}); it must be real.",
    )
    if not jnp.issubdtype(array.dtype, jnp.floating):
        array = array.astype(jnp.result_type(float))
    return array


def as_finite_array(
    name: str,
    value: Any,
    shape: tuple[int | None, ...],
    dtype: jnp.dtype | None = None,
) -> Array:
    """Return the value as a floating-point array of this shape without NaN, or raise.

    `None` in the shape stands for any length; the type is the value's own by default.
    """
    array = as_float_array(name, value)
    array = array if dtype is None else array.astype(dtype)
    check_shape(name, array, shape)
    check_finite(name, array)
    return array


def as_doubles(name: str, value: Any) -> np.ndarray:
    """Return the value as a float64 array of numpy, whatever JAX is set to."""
    try:
        return np.asarray(value, np.float64)
    except (TypeError, ValueError, jax.errors.JAXTypeError):
        raise InvalidInput(
            f"{name} is {value!r}; it must be a number or an array of numbers."
        ) from None


def _holds_doubles(value: Any) -> bool:
    """Whether a value is a float64 array of numpy, or a list with one inside."""
    if isinstance(value, list | tuple):
        return any(_holds_doubles(part) for part in value)
    return isinstance(value, np.ndarray | np.generic) and value.dtype == np.float64


def as_integer(name: str, value: Any, *, least: int) -> int:
    """Return the value as an integer of Python, or raise if it is none or too small."""
    try:
        number = operator.index(value)
    except (TypeError, jax.errors.JAXTypeError):
        raise InvalidInput(
            f"{name} is {value!r}; it must be an integer, {least} or more."
        ) from None
    check(number >= least, f"{name} is {value}; it must be {least} or more.")
    return number


def as_key(key: Any) -> Any:
    """Return the random key, or raise if it is none."""
    try:
        data = jax.random.key_data(key)
    except TypeError:
        seed = key if isinstance(key, int) else "seed"
        raise InvalidInput(
            f"key is {key!r}; it must be a random key of JAX: jax.random.key({seed})."
        ) from None
    check(
        data.ndim == 1,
        f"key is an array of keys, of shape {data.shape[:-1]}; pass one of them.",
    )
    return key


def as_number(
    name: str,
    value: Any,
    allowed: str = "a number",
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> float:
    """Return the value as a number of Python, or raise, saying what is allowed.

    Args:
        name: what the user calls it.
        value: what was given.
        allowed: what it must be, in words; they tell the bounds too.
        least: the smallest number that is allowed.
        above: what it must be larger than.
        below: what it must be smaller than; infinity asks for a finite number.

    A bound refuses NaN.
    """
    is_scalar = isinstance(value, numbers.Real | np.ndarray | jax.Array)
    if isinstance(value, bool) or not is_scalar or np.shape(value) != ():
        raise InvalidInput(f"{name} is {value!r}; it must be {allowed}.")
    try:
        number = float(value)
    except (TypeError, ValueError, jax.errors.JAXTypeError):
        raise InvalidInput(f"{name} is {value!r}; it must be {allowed}.") from None
    is_allowed = (
        (least is None or number >= least)
        and (above is None or number > above)
        and (below is None or number < below)
    )
    if not is_allowed:
        raise InvalidInput(f"{name} is {value}; it must be {allowed}.")
    return number


def check_finite(name: str, array: Array) -> None:
    """Raise if a concrete array holds NaN or infinity, naming it and the place."""
    if not is_concrete(array):
        return
    finite = np.isfinite(np.asarray(array, dtype=np.float64))
    if not finite.all():
        place = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise InvalidInput(
            f"{name} holds {float(array[place])} at index {place}; "
            "all its entries must be finite."
        )


def check_range(what: str, rows: Array, advice: str) -> None:
    """Raise if a concrete result is not finite, naming the first such query.

    Minus infinity, the logarithm of nothing, is let through in a single column.
    """
    if not is_concrete(rows):
        return
    known = np.asarray(rows, np.float64)
    is_right = np.isfinite(known).all(axis=1) if known.ndim > 1 else known < np.inf
    if not is_right.all():
        raise Overflow(
            f"{what} overflows {rows.dtype} at query {int(is_right.argmin())}; "
            f"{advice}, or use a wider floating-point type."
        )


def check_shape(name: str, array: Array, shape: tuple[int | None, ...]) -> None:
    """Raise unless the array has this shape; `None` stands for any length."""
    matches = len(array.shape) == len(shape) and all(
        wanted in (None, length)
        for wanted, length in zip(shape, array.shape, strict=True)
    )
    lengths = ["any" if length is None else str(length) for length in shape]
    pattern = f"({lengths[0]},)" if len(lengths) == 1 else f"({', '.join(lengths)})"
    check(matches, f"{name} has shape {array.shape}; it must be {pattern}.")


def check_square(name: str, matrix: Any) -> None:
    """Raise unless this is a square matrix."""
    is_square = len(matrix.shape) == 2 and matrix.shape[0] == matrix.shape[1]
    check(is_square, f"{name} has shape {matrix.shape}; it must be square.")
