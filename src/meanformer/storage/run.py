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
from jaxtyping import Array, Float, PyTree

from meanformer.errors import InvalidInput, check
from meanformer.flows import (
    AbstractRecorder,
    AbstractTrajectory,
    DensityTrajectory,
    Flow,
    GaussianTrajectory,
    Status,
    Trajectory,
)
from meanformer.flows.status import STATUS_FLAGS, status_code, status_from
from meanformer.storage.config import build_flow
from meanformer.storage.fingerprint import fingerprint, parameters, short_hash
from meanformer.storage.format import (
    METADATA,
    GrowingArrays,
    check_chunks,
    grows,
    read_metadata,
    whole_rows,
)
from meanformer.storage.record import RECORD, read_record

TRAJECTORY = "trajectory.zarr"
LOCK = ".lock"
FINGERPRINT = "fingerprint"
PARAMETERS = "parameters"

Kind = TypeVar("Kind", bound=AbstractTrajectory)


class RunStore(AbstractRecorder):
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
        self._arrays: GrowingArrays | None = None

    def begin(
        self, depths: Float[Array, " t"], request: dict[str, Any], empty: Any
    ) -> AbstractTrajectory | None:
        """Prepare the folder; return what it holds already of these depths."""
        self._acquire()
        self._attributes = {
            FINGERPRINT: fingerprint(request),
            PARAMETERS: parameters(request),
        }
        folder = self.path / TRAJECTORY
        metadata = read_metadata(folder)
        self._check_is_this_run(folder, metadata)
        rows = whole_rows(folder, metadata)
        self._arrays, kept = None, None
        if rows > 0:
            with _reading(self.path):
                columns = read_columns(folder, metadata, rows)
                found = _trajectory(columns, _statuses(columns), type(empty))
                kept = dataclasses.replace(empty, **found.along_depth())
            self._check_depths(depths, kept)
        self._on_begin()
        if rows > 0:
            self._arrays = GrowingArrays(folder, metadata)
            self._arrays.commit(rows)
        else:
            # Killed before the first depth was whole: nothing is lost.
            shutil.rmtree(folder, ignore_errors=True)
        return kept

    def append(self, index: int, row: AbstractTrajectory) -> None:
        """Write one depth and make it visible."""
        columns = {
            name: np.asarray(array)
            for name, array in row.columns().items()
            if array is not None
        }
        status = jax.tree.map(lambda leaf: leaf[0], row.status)
        growing = {
            name: np.asarray(array[0])
            for name, array in columns.items()
            if row.AXES[name][0] == "depth"
        }
        growing["status"] = np.asarray(status_code(status))
        if self._arrays is None:
            self._arrays = self._create(row, columns, growing)
        self._arrays.write_row(index, growing)
        self._arrays.commit(index + 1)

    def end(self) -> None:
        """Let other processes write."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _create(
        self,
        row: AbstractTrajectory,
        columns: Mapping[str, np.ndarray],
        growing: Mapping[str, np.ndarray],
    ) -> GrowingArrays:
        arrays = GrowingArrays.create(self.path / TRAJECTORY, self._attributes)
        for name, array in growing.items():
            is_status = name == "status"
            axes = () if is_status else row.AXES[name][1:]
            arrays.create_growing(name, array, axes, STATUS_FLAGS if is_status else {})
        for name in columns.keys() - growing.keys():
            arrays.create_fixed(name, columns[name], row.AXES[name])
        arrays.flush_all()
        arrays.commit(0)
        return arrays

    def _acquire(self) -> None:
        """Lock the folder; the system lets go of it however this process ends."""
        from filelock import FileLock, Timeout

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
        if then is None:
            raise InvalidInput(
                f"{folder} was not written by a run; choose another folder."
            )
        now = self._attributes[FINGERPRINT]
        other = [name for name in now | then if now.get(name) != then.get(name)]
        check(
            not other,
            f"{self.path} holds a run with other {', '.join(other)}; ask for the same, "
            "or choose another folder.",
        )

    def _check_depths(self, depths: Float[Array, " t"], kept: Any) -> None:
        check(
            len(kept) <= len(depths),
            f"{self.path} holds {len(kept)} depths, more than the {len(depths)} asked "
            "for; choose another folder.",
        )
        # The last depth of a run that stopped early is where it stopped.
        stored = kept.depths[np.asarray(kept.status == Status.reached)]
        check(
            bool((stored == depths[: len(stored)]).all()),
            f"{self.path} holds a run with other saved depths; choose another folder.",
        )


def read_columns(
    folder: Path, metadata: dict[str, Any], rows: int | None
) -> dict[str, np.ndarray]:
    """Return the arrays of a zarr folder, all of them or their first rows.

    Raises if a byte of them has changed since it was written.
    """
    import zarr

    check_chunks(folder, metadata, rows)
    group = cast(Any, zarr.open_group(folder, mode="r"))
    return {
        name: np.asarray(array[:rows] if grows(metadata, name) else array[...])
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
) -> Trajectory | GaussianTrajectory | DensityTrajectory: ...


@overload
def open_run(path: str | Path, *, kind: type[Kind]) -> Kind: ...


def open_run(
    path: str | Path, *, kind: type[AbstractTrajectory] | None = None
) -> AbstractTrajectory:
    """Read a trajectory from a run's folder, or from what its `save` wrote.

    A file that is not as it was written, be it by one byte, is told. The `flow` of a
    run that came from a configuration is there again.

    Args:
        path: the folder of a run, finished or not, or a zarr folder.
        kind: the class of the trajectory, for one of your own.
    """
    path = Path(path)
    folder = path / TRAJECTORY if (path / TRAJECTORY).exists() else path
    check(
        folder.exists(),
        f"{path} does not exist; give the folder of a run or of a saved trajectory.",
    )
    with _reading(path):
        is_ours = any((folder / name).exists() for name in (METADATA, ".zgroup"))
        metadata = read_metadata(folder) if is_ours else {}
        asked = metadata.get(".zattrs", {}).get(FINGERPRINT)
        # Of a run the end may be missing.
        rows = None if asked is None else whole_rows(folder, metadata)
        check(rows != 0, f"{path} holds no finished depth yet; resume the run first.")
        columns = read_columns(folder, metadata, rows)
        status = status_from(int(columns["status"][-1]))
        trajectory = _trajectory(columns, status, kind or _known_kind(columns))
    if isinstance(trajectory, DensityTrajectory):
        return trajectory.trimmed()
    if not isinstance(trajectory, Trajectory):
        return trajectory
    if asked is None or not (path / RECORD).exists():
        return trajectory
    flow = _described_flow(path, trajectory, asked)
    return eqx.tree_at(
        lambda t: t.flow, trajectory, flow, is_leaf=lambda leaf: leaf is None
    )


def _described_flow(
    path: Path, trajectory: Trajectory, asked: dict[str, str]
) -> Flow | None:
    """Return the flow of a run's configuration; none if it made another run."""
    record, cloud = read_record(path), trajectory.cloud(0)
    is_double = trajectory.points.dtype == jnp.float64
    flows = []
    for bits in (record["double_precision"], is_double):
        with jax.enable_x64(bits):
            flows.append(build_flow(record["config"], cloud))
    return flows[1] if short_hash(flows[0]) == asked.get("flow") else None


# What tells the kind of a trajectory: an array that only it has.
KINDS = {
    "points": Trajectory,
    "linear": GaussianTrajectory,
    "moments": DensityTrajectory,
}


def _known_kind(columns: Mapping[str, np.ndarray]) -> type[AbstractTrajectory]:
    for name, kind in KINDS.items():
        if name in columns:
            return kind
    raise LookupError(
        f"it has {', '.join(sorted(columns))}; for a trajectory of your own give its "
        "class as kind."
    )


def _trajectory(
    columns: Mapping[str, np.ndarray], status: PyTree, kind: type[AbstractTrajectory]
) -> Any:
    arrays = {
        name: jnp.asarray(array)
        for name, array in columns.items()
        if array.dtype.kind in "fiu"
    }
    return kind.from_columns(arrays, status)


def _statuses(columns: Mapping[str, np.ndarray]) -> PyTree:
    """Return the statuses at all depths, stacked."""
    statuses = [status_from(int(code)) for code in columns["status"]]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *statuses)
