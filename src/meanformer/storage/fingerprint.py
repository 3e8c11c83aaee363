"""Fingerprints of runs: a short hash of each thing that a solve was asked.

Only what was asked counts, not the versions that answer: an object is described by the
name of its class and by those of its fields that differ from their defaults, an array
by its bytes, a function by its qualified name and the values it encloses.
"""

import contextlib
import dataclasses
import functools
import hashlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

LARGEST_SHOWN = 64  # entries of an array


def fingerprint(request: Mapping[str, Any]) -> dict[str, str]:
    """Return a hash of each part of what a run was asked for."""
    return {name: short_hash(part) for name, part in request.items()}


def parameters(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return each part of it for people to read: names, numbers, small arrays."""
    return {name: _shown(part) for name, part in request.items()}


def short_hash(part: Any) -> str:
    """Return a hash of what a value says, the same on every machine."""
    digest = hashlib.sha256()
    for piece in _pieces(part):
        digest.update(len(piece).to_bytes(8, "little") + piece)
    return digest.hexdigest()[:16]


def _pieces(value: Any, inside: tuple = ()) -> Iterator[bytes]:
    """Describe a value piece by piece; `inside` holds what is being described."""
    if any(value is other for other in inside):
        return  # a function that encloses itself
    inside = (*inside, value)
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        if _is_key(value):
            yield str(jr.key_impl(value)).encode()
        array = _plain(value)
        yield f"{array.dtype.str} {array.shape}".encode()
        yield array.tobytes()
    elif isinstance(value, tuple | list):
        yield f"{len(value)} items".encode()
        for item in value:
            yield from _pieces(item, inside)
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield repr(value).encode()
    else:
        name, contents = _named_contents(value)
        yield name.encode()
        for key in sorted(contents):
            yield key.encode()
            yield from _pieces(contents[key], inside)


def _shown(value: Any, inside: tuple = ()) -> Any:
    """Return a value as JSON can hold it; `inside` holds what is being shown."""
    if any(value is other for other in inside):
        return "itself"
    inside = (*inside, value)
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        array = _plain(value)
        is_small = array.size <= LARGEST_SHOWN
        return _shown(array.tolist()) if is_small else f"{array.dtype} {array.shape}"
    if isinstance(value, tuple | list):
        return [_shown(item, inside) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if np.isfinite(value) else repr(value)
    if isinstance(value, complex | bytes):
        return repr(value)
    name, contents = _named_contents(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        contents = {one.name: getattr(value, one.name) for one in fields}
    given = {key: item for key, item in contents.items() if item is not None}
    shown = {key: _shown(item, inside) for key, item in given.items()}
    kind = name.partition(":")[2] or name
    return {"kind": kind, **shown} if shown else kind


def _is_key(array: Any) -> bool:
    return isinstance(array, jax.Array) and jnp.issubdtype(
        array.dtype, jax.dtypes.prng_key
    )


def _plain(array: Any) -> np.ndarray:
    """Return an array, or the numbers of a random key, as numpy holds them."""
    return np.asarray(jr.key_data(array) if _is_key(array) else array)


def _named_contents(value: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name of an object or function, and the values it is made of."""
    if isinstance(value, Mapping):
        return "mapping", {repr(key): item for key, item in value.items()}
    if isinstance(value, jax.sharding.Mesh):
        # How many devices, not which: another machine gives them other numbers.
        return "mesh", dict(value.shape)
    if isinstance(value, functools.partial):
        return "partial", {"of": value.func, "to": value.args, **value.keywords}
    if isinstance(value, type):
        return _name(value), {}
    if inspect.isroutine(value := inspect.unwrap(value)):
        return _name(value), _enclosed(value)
    if dataclasses.is_dataclass(value):
        return _name(type(value)), _changed_fields(value)
    return _name(type(value)), vars(value) if "__dict__" in dir(value) else {}


def _enclosed(function: Any) -> dict[str, Any]:
    if inspect.ismethod(function):
        return {"self": function.__self__}
    if not inspect.isfunction(function):
        return {}
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    nonlocals = {}
    for name, cell in zip(names, cells, strict=True):
        # A name that was never given a value has an empty cell.
        with contextlib.suppress(ValueError):
            nonlocals[name] = cell.cell_contents
    defaults = function.__defaults__, tuple((function.__kwdefaults__ or {}).items())
    return {"defaults": defaults, **nonlocals}


def _changed_fields(value: Any) -> dict[str, Any]:
    """Return the fields that differ from their defaults.

    A version that adds an option, off by default, still describes old runs alike.
    """
    changed = {}
    for field in dataclasses.fields(value):
        held, default = getattr(value, field.name), field.default
        if held is not default and short_hash(held) != short_hash(default):
            changed[field.name] = held
    return changed


def _name(value: Any) -> str:
    """Return package and qualified name; files may move inside a package."""
    package = (value.__module__ or "builtins").partition(".")[0]
    return f"{package}:{value.__qualname__}"
