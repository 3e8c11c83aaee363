"""A run on disk: the trajectory while it is computed, and all it takes to redo it."""

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from filelock import FileLock, Timeout
from jaxtyping import Array, Float, PyTree

from meanformer import flows
from meanformer.errors import InvalidInput, check
from meanformer.flows.status import STATUS_FLAGS, status_code, status_from
from meanformer.storage import format as files
from meanformer.storage.config import build_flow
from meanformer.storage.fingerprint import fingerprint, parameters, short_hash

TRAJECTORY = "trajectory.zarr"
LOCK = ".lock"
FINGERPRINT = "fingerprint"
PARAMETERS = "parameters"

Kind = TypeVar("Kind", bound=flows.AbstractTrajectory)


# What is written as the status of all depths but the last one asked for.
REACHED = status_code(flows.Status.reached)
UNFINISHED = status_code(flows.Status.interrupted)


class RunStore(flows.AbstractRecorder):
    """A folder that a solve streams its trajectory to, depth by depth.

    `solve(..., store=RunStore(path))` starts a run or continues the one that is there,
    if it is the same one: the same flow, tokens, weights, probes, solver, tolerances,
    merging, stop conditions and key, and depths that begin alike. Gaussians and
    densities on the circle are kept as tokens are.
    `xarray.open_zarr(path / "trajectory.zarr")` reads it at any moment, also while it
    is written or after a crash. One process at a time may write.

    Args:
        path: the folder, made if it does not exist.
        on_begin: called when the folder is ours to write and known to fit, before
            anything is written to it.
    """

    def __init__(
        self, path: str | Path, *, on_begin: Callable[[], None] = lambda: None
    ):
        self.path = Path(path)
        self._on_begin = on_begin
        self._lock = None
        self._last = 0
        self._arrays: files.GrowingArrays | None = None

    def begin(
        self, depths: Float[Array, " t"], request: dict[str, Any], empty: Any
    ) -> flows.AbstractTrajectory | None:
        """Prepare the folder; return what it holds already of these depths."""
        self._acquire()
        self._last = len(depths) - 1
        self._attributes = {
            FINGERPRINT: fingerprint(request),
            PARAMETERS: parameters(request),
        }
        folder = self.path / TRAJECTORY
        metadata = files.read_metadata(folder)
        self._check_is_this_run(folder, metadata)
        rows = files.whole_rows(folder, metadata)
        self._arrays, kept = None, None
        if rows > 0:
            with _reading(self.path):
                columns = read_columns(folder, metadata, rows)
                codes = np.asarray(columns["status"])
                # It goes on: what was not its end is reached.
                codes = np.where(codes == UNFINISHED, REACHED, codes)
                statuses = [status_from(int(code)) for code in codes]
                stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *statuses)
                found = _trajectory(columns, stacked, type(empty))
                kept = dataclasses.replace(empty, **found.along_depth())
            self._check_depths(depths, kept)
        self._on_begin()
        if rows > 0:
            self._arrays = files.GrowingArrays(folder, metadata)
            self._arrays.commit(rows)
        else:
            # Killed before the first depth was whole: nothing is lost.
            shutil.rmtree(folder, ignore_errors=True)
        return kept

    def append(self, index: int, row: flows.AbstractTrajectory) -> None:
        """Write one depth and make it visible."""
        columns = {
            name: np.asarray(array)
            for name, array in row.columns().items()
            if array is not None
        }
        code = status_code(jax.tree.map(lambda leaf: leaf[0], row.status))
        is_within = code == REACHED and index < self._last
        columns["status"] = np.asarray([UNFINISHED if is_within else code])
        axes = {**row.AXES, "status": ("depth",)}
        growing = {
            name: np.asarray(array[0])
            for name, array in columns.items()
            if axes[name][0] == "depth"
        }
        if self._arrays is None:
            self._arrays = files.GrowingArrays.create(
                self.path / TRAJECTORY, self._attributes
            )
            for name, array in (columns | growing).items():
                flags = STATUS_FLAGS if name == "status" else {}
                is_row = name in growing
                self._arrays.add(name, array, axes[name], flags, grows=is_row)
            self._arrays.flush_all()
            self._arrays.commit(0)
        self._arrays.write_row(index, growing)
        self._arrays.commit(index + 1)

    def end(self) -> None:
        """Let other processes write."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _acquire(self) -> None:
        """Lock the folder; the system lets go of it however this process ends."""
        lock = FileLock(self.path / LOCK, thread_local=False)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.acquire(blocking=False)
        except Timeout as error:
            raise InvalidInput(
                f"{self.path} is being written by another process; wait for it or "
                "choose another folder."
            ) from error
        except OSError as error:
            raise InvalidInput(
                f"{self.path} cannot be written: {error.strerror}; choose another "
                "folder."
            ) from error
        self._lock = lock

    def _check_is_this_run(self, folder: Path, metadata: dict[str, Any]) -> None:
        """Raise if what is there is of another run."""
        if not metadata:
            return
        then = metadata.get(".zattrs", {}).get(FINGERPRINT)
        check(
            then is not None,
            f"{folder} was not written by a run; choose another folder.",
        )
        now = self._attributes[FINGERPRINT]
        other = [name for name in now | then if now.get(name) != then.get(name)]
        check(
            not other,
            f"{self.path} holds a run that differs in {', '.join(other)}; ask for the "
            "same, or choose another folder.",
        )

    def _check_depths(self, depths: Float[Array, " t"], kept: Any) -> None:
        check(
            len(kept) <= len(depths),
            f"{self.path} holds {len(kept)} depths, more than the {len(depths)} asked "
            "for; choose another folder.",
        )
        # The last depth of a run that stopped early is where it stopped.
        stored = kept.depths[np.asarray(kept.status == flows.Status.reached)]
        check(
            bool((stored == depths[: len(stored)]).all()),
            f"{self.path} holds a run with other saved depths; list in save=… those "
            "that it has, and further ones, or choose another folder.",
        )


def read_columns(
    folder: Path, metadata: dict[str, Any], rows: int | None
) -> dict[str, np.ndarray]:
    """Return the arrays of a zarr folder, or their first rows; raise if one changed."""
    import zarr

    files.check_chunks(folder, metadata, rows)
    group = cast(Any, zarr.open_group(folder, mode="r"))
    return {
        name: np.asarray(array[:rows] if files.grows(metadata, name) else array[...])
        for name, array in group.arrays()
    }


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Tell in one sentence what zarr raises for a folder that is none of its own."""
    try:
        yield
    except InvalidInput:
        raise
    except (LookupError, OSError, TypeError, ValueError) as error:
        raise InvalidInput(f"{path} holds no trajectory: {error}") from error


@overload
def open_run(
    path: str | Path,
) -> flows.Trajectory | flows.GaussianTrajectory | flows.DensityTrajectory: ...


@overload
def open_run(path: str | Path, *, kind: type[Kind]) -> Kind: ...


def open_run(
    path: str | Path, *, kind: type[flows.AbstractTrajectory] | None = None
) -> flows.AbstractTrajectory:
    """Read a trajectory from a run's folder, or from what its `save` wrote.

    A file that is not as it was written, be it by one byte, is told. The `flow` of a
    run that came from a configuration is there again.

    Args:
        path: the folder of a run, finished or not, or a zarr folder.
        kind: the class of the trajectory, for `training.TrainingRun` or your own.
    """
    path = Path(path)
    folder = path / TRAJECTORY if (path / TRAJECTORY).exists() else path
    check(
        folder.exists(),
        f"{path} does not exist; give the folder of a run or of a saved trajectory.",
    )
    with _reading(path):
        is_ours = any((folder / name).exists() for name in (files.METADATA, ".zgroup"))
        metadata = files.read_metadata(folder) if is_ours else {}
        asked = metadata.get(".zattrs", {}).get(FINGERPRINT)
        # Of a run the end may be missing.
        rows = None if asked is None else files.whole_rows(folder, metadata)
        check(rows != 0, f"{path} holds no finished depth yet; resume the run first.")
        columns = read_columns(folder, metadata, rows)
        status = status_from(int(columns["status"][-1]))
        trajectory = _trajectory(columns, status, kind or _known_kind(columns))
    if isinstance(trajectory, flows.DensityTrajectory):
        return trajectory.trimmed()
    is_described = asked is not None and (path / files.RECORD).exists()
    if not isinstance(trajectory, flows.Trajectory) or not is_described:
        return trajectory
    flow = _described_flow(path, trajectory, asked)
    return eqx.tree_at(
        lambda t: t.flow, trajectory, flow, is_leaf=lambda leaf: leaf is None
    )


def _described_flow(
    path: Path, trajectory: flows.Trajectory, asked: dict[str, str]
) -> flows.Flow | None:
    """Return the flow of a run's configuration; none if it made another run."""
    record, cloud = files.read_record(path), trajectory.cloud(0)
    is_double = trajectory.points.dtype == jnp.float64
    built = []
    for bits in (record["double_precision"], is_double):
        with jax.enable_x64(bits):
            built.append(build_flow(record["config"], cloud))
    return built[1] if short_hash(built[0]) == asked.get("flow") else None


# What tells the kind of a trajectory: an array that only it has.
KINDS = {
    "points": flows.Trajectory,
    "linear": flows.GaussianTrajectory,
    "moments": flows.DensityTrajectory,
}


def _known_kind(columns: Mapping[str, np.ndarray]) -> type[flows.AbstractTrajectory]:
    for name, kind in KINDS.items():
        if name in columns:
            return kind
    raise LookupError(
        f"it has {', '.join(sorted(columns))}; give the class of what was run as kind, "
        "such as training.TrainingRun or your own."
    )


def _trajectory(
    columns: Mapping[str, np.ndarray], status: PyTree, kind: type[Kind]
) -> Kind:
    arrays = {
        name: jnp.asarray(array)
        for name, array in columns.items()
        if array.dtype.kind in "fiu"
    }
    return kind.from_columns(arrays, status)
