"""Settings of an experiment: typed, documented, with a quick and a full value."""

import dataclasses
import operator
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from meanformer.errors import InvalidInput, check
from meanformer.experiments.framework.claims import InvalidExperiment
from meanformer.experiments.framework.names import unknown

Profile = Literal["quick", "full"]
Movies = Literal["none", "gif", "mp4"]


@typing.dataclass_transform(frozen_default=True)
class Parameters:
    """The parameters of an experiment: each subclass is a frozen dataclass of them."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True)(cls)


def setting(
    quick: Any,
    *,
    help: str,
    full: Any = None,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
) -> Any:
    """A field of `Parameters`.

    Args:
        quick: its value in the default profile, a few seconds per experiment.
        help: what it is, for the list of parameters in the report.
        full: its value at the papers' own sizes; the quick one if left out.
        at_least: smallest allowed value.
        at_most: largest allowed value.
        above: bound that the value must exceed strictly.
    """
    limits = {"at least": at_least, "at most": at_most, "larger than": above}
    about = {"help": help, "full": quick if full is None else full, "limits": limits}
    return dataclasses.field(default=quick, metadata=about)


def movie_setting() -> Any:
    """The field `movie: Movies` of an experiment that returns movies."""
    return setting(
        "none",
        full="gif",
        help="movies to make: none, gif, or mp4 files besides (which need ffmpeg)",
    )


def movies_of(settings: Any, profile: Profile) -> Movies:
    """Which movies a run makes: as its settings say, or else by its profile."""
    return as_json(settings).get("movie", "gif" if profile == "full" else "none")


def check_declaration(settings: type) -> None:
    """Raise unless this is a frozen dataclass whose fields are all settings."""
    options = vars(settings).get("__dataclass_params__")
    if options is None or not options.frozen:
        raise InvalidExperiment(f"{settings.__name__} must be a frozen dataclass.")
    for field in dataclasses.fields(settings):
        if "help" not in field.metadata:
            raise InvalidExperiment(f"{field.name} must be declared with setting(...).")


def choose(settings: type, profile: Profile, changes: Mapping[str, Any]) -> Any:
    """The settings of a profile with some of them changed.

    Changes that are strings are read according to the type of the field.
    """
    fields = {field.name: field for field in dataclasses.fields(settings)}
    kinds = typing.get_type_hints(settings)
    values = {
        name: field.metadata["full"] if profile == "full" else field.default
        for name, field in fields.items()
    }
    for name, value in changes.items():
        check(name in fields, unknown("parameter", name, fields))
        is_text = isinstance(value, str)
        values[name] = read_value(name, value, kinds[name]) if is_text else value
        _check_range(name, values[name], fields[name].metadata["limits"])
    return settings(**values)


def split_assignments(assignments: list[str]) -> dict[str, str]:
    """Turn `key=value` texts into a dictionary."""
    changes = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        check(
            equals == "=" and name.strip() != "",
            f"--set {assignment!r} is not of the form key=value, like depth=2.5.",
        )
        changes[name.strip().replace("-", "_")] = value.strip()
    return changes


def read_value(name: str, text: str, kind: Any) -> Any:
    """Read a text as a value of this type; one sentence if it is not one."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        choices = {str(choice): choice for choice in arguments}
        listed = " or ".join(map(repr, choices))
        check(text in choices, f"{name} is {text!r}; it must be {listed}.")
        return choices[text]
    if origin in (types.UnionType, typing.Union):
        if text.lower() == "none" and type(None) in arguments:
            return None
        return read_value(name, text, arguments[arguments[0] is type(None)])
    if origin is tuple:
        pieces = [piece for piece in text.strip("()[] ").split(",") if piece.strip()]
        return tuple(read_value(name, piece.strip(), arguments[0]) for piece in pieces)
    return _read_scalar(name, text, kind)


def as_json(settings: Any) -> dict[str, Any]:
    """The settings as a dictionary of numbers, texts and lists."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in dataclasses.asdict(settings).items()
    }


def describe(kind: Any) -> str:
    """A type in words, for messages and help."""
    words = {int: "a whole number", float: "a number", str: "a text"}
    if typing.get_origin(kind) is tuple:
        return (
            f"a comma-separated list, each entry {describe(typing.get_args(kind)[0])}"
        )
    return words.get(kind, "true or false" if kind is bool else str(kind))


def _read_scalar(name: str, text: str, kind: Any) -> Any:
    try:
        return _READERS[kind](text)
    except (ValueError, KeyError, OverflowError) as error:
        message = f"{name} is {text!r}; it must be {describe(kind)}."
        raise InvalidInput(message) from error


def _read_integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        value = float(text)
        if value != int(value):
            raise
        return int(value)


_SWITCHES = dict.fromkeys(("true", "yes", "1"), True)
_SWITCHES |= dict.fromkeys(("false", "no", "0"), False)

_RELATIONS = {
    "at least": operator.ge,
    "at most": operator.le,
    "larger than": operator.gt,
}

_READERS = {
    bool: lambda text: _SWITCHES[text.lower()],
    int: _read_integer,
    float: float,
    str: str,
}


def _check_range(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    entries = value if isinstance(value, tuple) else (value,)
    for entry in (entry for entry in entries if isinstance(entry, (int, float))):
        check(abs(entry) < float("inf"), f"{name} is {entry}; it must be finite.")
        check(
            isinstance(entry, float) or abs(entry) < 2**63,
            f"{name} is {entry}; it must be smaller than 2^63.",
        )
        for words, bound in limits.items():
            check(
                bound is None or _RELATIONS[words](entry, bound),
                f"{name} is {entry}; it must be {words} {bound}.",
            )
