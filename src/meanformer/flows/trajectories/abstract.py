"""How a solve is told: cut off where it ended, with a warning if it ended early."""

import abc
import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, PyTree

from meanformer.errors import StoppedEarly, check, is_concrete, warn
from meanformer.files import sealed, write_atomically
from meanformer.flows.status import Status, status_code


class AbstractTrajectory(eqx.Module):
    """What a solve leaves behind, at the saved depths.

    Attributes:
        depths: the saved depths, from the first on.
        status: how the solve ended.
    """

    depths: eqx.AbstractVar[Float[Array, " t"]]
    status: eqx.AbstractVar[PyTree]

    def __len__(self) -> int:
        return self.depths.shape[0]

    @property
    def message(self) -> str:
        """One sentence on how the solve ended."""
        return f"At depth {float(self.depths[-1]):.6g} {Status[self.status]}."

    @abc.abstractmethod
    def to_xarray(self) -> Any:
        """Return the trajectory as a labelled `xarray.Dataset`."""

    @abc.abstractmethod
    def along_depth(self) -> tuple:
        """Return the arrays that have one entry for every saved depth."""

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


def cut_off(trajectory: Any) -> Any:
    """Leave out the states after the end, keep the last status, warn if need be.

    Under `jit` nothing is cut, and nothing is said.
    """
    if not is_concrete(trajectory.depths):
        last = jax.tree.map(lambda leaf: leaf[-1], trajectory.status)
        return eqx.tree_at(lambda t: t.status, trajectory, last)
    stopped = np.asarray(trajectory.status != Status.reached)
    length = int(stopped.argmax()) + 1 if stopped.any() else len(stopped)
    status = jax.tree.map(lambda leaf: leaf[length - 1], trajectory.status)
    depths = np.asarray(trajectory.depths)
    if length > 1 and depths[length - 1] == depths[length - 2]:
        length -= 1  # it stopped where it stood
    short = eqx.tree_at(
        lambda t: t.along_depth(),
        trajectory,
        jax.tree.map(lambda leaf: leaf[:length], trajectory.along_depth()),
        is_leaf=lambda leaf: leaf is None,
    )
    short = eqx.tree_at(lambda t: t.status, short, status)
    asked_for = (Status.reached, Status.steady, Status.condition_met)
    if not any(bool(status == good) for good in asked_for):
        warn(short.message, StoppedEarly)
    return short


def status_codes(trajectory: Any) -> np.ndarray:
    """Return the code of the status at each saved depth, for files."""
    codes = np.full(len(trajectory), status_code(Status.reached))
    codes[-1] = status_code(trajectory.status)
    return codes
