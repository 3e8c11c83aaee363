"""Base class of trajectories: cut off where a solve ended, saved, written to files."""

import abc
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from meanformer.errors import StoppedEarly, check, is_concrete, warn
from meanformer.files import sealed, write_atomically
from meanformer.flows.status import (
    IN_PYTHON,
    STATUS_FLAGS,
    Status,
    status_code,
    status_name,
)

# Arrays of files that are labels of others.
LABELS = ("position",)
Part = TypeVar("Part")


class AbstractTrajectory(eqx.Module):
    """Base class of trajectories: what `solve` returns, at the saved depths.

    Attributes:
        depths: the saved depths, from the first on.
        status: how the solve ended.
        AXES: the axes of the arrays in files, by their names there.
        UNMOVED: the fields that are not arrays along depth.
        CLOCK: what depth is called where it is something else, such as a time.
        TOLD: texts of statuses, by their names, where they are other than usual.
    """

    depths: eqx.AbstractVar[Float[Array, " t"]]
    status: eqx.AbstractVar[PyTree]
    AXES: eqx.AbstractClassVar[Mapping[str, tuple[str, ...]]]
    UNMOVED: eqx.AbstractClassVar[tuple[str, ...]]
    CLOCK: ClassVar[str] = "depth"
    TOLD: ClassVar[Mapping[str, str]] = {}

    def __len__(self) -> int:
        return self.depths.shape[0]

    @property
    def message(self) -> str:
        """One sentence on how the solve ended."""
        end = f"{self.CLOCK} {float(self.depths[-1]):.6g}"
        text = self.TOLD.get(status_name(self.status), Status[self.status])
        return f"At {end} {text}."

    @property
    def caption(self) -> str:
        """What a progress bar shows about the last depth, beside the share done."""
        return ""

    @abc.abstractmethod
    def columns(self) -> dict[str, Any]:
        """Return the arrays by their names in files; `None` for those there are not."""

    @classmethod
    @abc.abstractmethod
    def from_columns(cls, columns: Mapping[str, Array], status: PyTree) -> Any:
        """Return the trajectory that arrays of a file stand for."""

    def along_depth(self) -> dict[str, PyTree]:
        """Return the fields that have one entry for every saved depth, by name."""
        names = [field.name for field in dataclasses.fields(self)]
        return {name: getattr(self, name) for name in names if name not in self.UNMOVED}

    def to_xarray(self):
        """Return the trajectory as a labelled `xarray.Dataset`."""
        import xarray

        variables: dict[str, tuple] = {
            name: (self.AXES[name], np.asarray(array))
            for name, array in self.columns().items()
            if array is not None
        }
        codes = np.full(len(self), status_code(Status.reached))
        codes[-1] = status_code(self.status)
        variables["status"] = (("depth",), codes, STATUS_FLAGS)
        dataset = xarray.Dataset(variables)
        return dataset.set_coords([name for name in LABELS if name in variables])

    def save(self, path: str | Path) -> None:
        """Write the trajectory to a zarr folder, for `open_run` and xarray to read.

        Every file has a checksum, so that `open_run` tells if a byte has changed.
        """
        from numcodecs import CRC32, Blosc

        path, dataset = Path(path), self.to_xarray()
        check(not path.exists(), f"{path} exists; give a new folder.")
        # The checksum is that of the compressed bytes, so that it is looked at first.
        codecs = {"filters": [Blosc()], "compressors": CRC32()}
        dataset.to_zarr(
            path,
            mode="w-",
            zarr_format=2,
            consolidated=False,
            encoding=dict.fromkeys(dataset.variables, codecs),
            write_empty_chunks=True,
        )
        parts = [*path.rglob(".zgroup"), *path.rglob(".zattrs"), *path.rglob(".zarray")]
        metadata = {
            part.relative_to(path).as_posix(): json.loads(part.read_text())
            for part in parts
        }
        document = {"zarr_consolidated_format": 1, "metadata": metadata}
        write_atomically(path / ".zmetadata", sealed(document))


def arrays_of(part: Any, names: Iterable[str]) -> dict[str, Array]:
    """Return the arrays of a part by their names in files; none if there is no part."""
    if part is None:
        return {}
    fields = zip(names, dataclasses.fields(part), strict=True)
    arrays = {name: getattr(part, field.name) for name, field in fields}
    return {name: array for name, array in arrays.items() if array is not None}


def part_from(
    kind: Callable[..., Part], names: Iterable[str], columns: Mapping[str, Array]
) -> Part | None:
    """Return the part that arrays of a file stand for; `None` if they are not there."""
    arrays = [columns.get(name) for name in names]
    return None if arrays[0] is None else kind(*arrays)


def cut_off(trajectory: Any) -> Any:
    """Leave out the states after the end, keep the last status, warn if need be.

    Under `jit` nothing is cut, and nothing is said.
    """
    if not is_concrete(trajectory.depths):
        last = jax.tree.map(lambda leaf: leaf[-1], trajectory.status)
        return eqx.tree_at(lambda t: t.status, trajectory, last)
    stopped = np.asarray(trajectory.status != Status.reached)
    end = int(stopped.argmax()) if stopped.any() else len(stopped) - 1
    depths = np.asarray(trajectory.depths)
    # It may have stopped where it stood.
    length = end + 1 - (end > 0 and depths[end] == depths[end - 1])
    status = jax.tree.map(lambda leaf: leaf[end], trajectory.status)
    short = _changed(lambda leaf: leaf[:length], trajectory)
    short = eqx.tree_at(lambda t: t.status, short, status)
    asked_for = (Status.reached, Status.steady, Status.condition_met)
    if not any(bool(status == good) for good in asked_for):
        name = status_name(status)
        calls = None if name in short.TOLD else IN_PYTHON.get(name)
        also = f" In Python: {calls}." if calls else ""
        warn(short.message + also, StoppedEarly)
    return short


def joined(parts: Sequence[Any]) -> Any:
    """Return trajectories that follow each other as one, each with all its statuses."""
    if len(parts) == 1:
        return parts[0]
    return _changed(lambda *leaves: jnp.concatenate(leaves), *parts)


def _changed(change: Callable, first: Any, *others: Any) -> Any:
    """Return the first trajectory with other arrays along depth."""
    fields = [one.along_depth() for one in (first, *others)]
    return dataclasses.replace(first, **jax.tree.map(change, *fields))
