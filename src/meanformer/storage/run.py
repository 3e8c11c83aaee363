"""A run on disk: the trajectory while it is computed, and all it takes to redo it."""

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import InvalidInput, as_float_array, check, check_finite
from meanformer.flows import (
    AbstractRecorder,
    Flow,
    GaussianTrajectory,
    State,
    Status,
    Trajectory,
)
from meanformer.flows.dynamics.merging import ATOM_AXES, atom_arrays, atoms_from
from meanformer.flows.dynamics.recorder import Snapshot
from meanformer.flows.dynamics.sum_statistics import SUM_NAMES, sum_arrays, sums_from
from meanformer.flows.dynamics.tokens import Problem
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


class RunStore(AbstractRecorder):
    """A folder that a solve streams its trajectory to, depth by depth.

    `solve(..., store=RunStore(path))` starts a run or continues the one that is there,
    if it is the same one: the same flow, tokens, weights, probes, solver, tolerances,
    merging, stop conditions and key, and depths that begin alike.
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
        self, depths: Float[Array, " t"], problem: Problem, start: State
    ) -> Sequence[Snapshot]:
        """Prepare the folder; return what it holds already of these depths."""
        self._acquire()
        self._depths, self._cloud = depths, problem.cloud
        self._attributes = {
            FINGERPRINT: fingerprint(problem, start),
            PARAMETERS: parameters(problem, start),
        }
        folder = self.path / TRAJECTORY
        metadata = read_metadata(folder)
        self._check_is_this_run(folder, metadata)
        rows = whole_rows(folder, metadata)
        with _reading(self.path):
            snapshots = _snapshots(read_columns(folder, metadata, rows)) if rows else []
        self._check_depths(snapshots)
        self._on_begin()
        self._arrays = None
        if rows > 0:
            self._arrays = GrowingArrays(folder, metadata)
            self._arrays.commit(rows)
        else:
            # Killed before the first depth was whole: nothing is lost.
            shutil.rmtree(folder, ignore_errors=True)
        return snapshots

    def append(self, index: int, state: State, velocities: Float[Array, "n d"]) -> None:
        """Write one depth and make it visible."""
        rows = _rows(state, velocities)
        if self._arrays is None:
            self._arrays = self._create(rows)
        self._arrays.write_row(index, rows)
        self._arrays.commit(index + 1)

    def end(self) -> None:
        """Let other processes write."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _create(self, rows: dict[str, np.ndarray]) -> GrowingArrays:
        arrays = GrowingArrays.create(self.path / TRAJECTORY, self._attributes)
        for name, row in rows.items():
            attributes = STATUS_FLAGS if name == "status" else {}
            arrays.create_growing(name, row, _AXES[name], attributes)
        fixed = {"weights": self._cloud.weights, "position": self._cloud.positions}
        for name, array in fixed.items():
            if array is not None:
                arrays.create_fixed(name, np.asarray(array), ("token",))
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

    def _check_depths(self, snapshots: Sequence[Snapshot]) -> None:
        check(
            len(snapshots) <= len(self._depths),
            f"{self.path} holds {len(snapshots)} depths, more than the "
            f"{len(self._depths)} asked for; choose another folder.",
        )
        # The last depth of a run that stopped early is where it stopped.
        kept = [s for s, _ in snapshots if bool(s.status == Status.reached)]
        stored = [float(state.depth) for state in kept]
        wanted = [float(depth) for depth in self._depths[: len(stored)]]
        check(
            stored == wanted,
            f"{self.path} holds a run with other saved depths; choose another folder.",
        )


_AXES = {
    "depth": (),
    "points": ("token", "coordinate"),
    "velocities": ("token", "coordinate"),
    "probes": ("probe", "coordinate"),
    "status": (),
    "accepted_steps": (),
    "rejected_steps": (),
    **ATOM_AXES,
    **dict.fromkeys(SUM_NAMES, ()),
}


def _rows(state: State, velocities: Float[Array, "n d"]) -> dict[str, np.ndarray]:
    rows = {
        "depth": state.depth,
        "points": state.points,
        "velocities": velocities,
        "probes": state.probes,
        "status": status_code(state.status),
        "accepted_steps": state.accepted_steps,
        "rejected_steps": state.rejected_steps,
    }
    if state.atoms is not None:
        rows |= atom_arrays(state.atoms)
    rows |= sum_arrays(state.sums)
    return {name: np.asarray(row) for name, row in rows.items() if row is not None}


def _snapshots(columns: Mapping[str, np.ndarray]) -> list[Snapshot]:
    """Return the states of a store, bit for bit as they were computed."""
    return [
        (
            State(
                jnp.asarray(columns["depth"][index]),
                jnp.asarray(columns["points"][index]),
                jnp.asarray(columns["probes"][index]) if "probes" in columns else None,
                status_from(int(columns["status"][index])),
                jnp.asarray(columns["accepted_steps"][index]),
                jnp.asarray(columns["rejected_steps"][index]),
                jnp.asarray(index),
                atoms_from(_row(columns, ATOM_AXES, index)),
                sums_from(_row(columns, SUM_NAMES, index)),
            ),
            jnp.asarray(columns["velocities"][index]),
        )
        for index in range(len(columns["depth"]))
    ]


def _row(
    columns: Mapping[str, np.ndarray], names: Iterable[str], index: int
) -> dict[str, Array]:
    """Return the arrays of these names at one depth, those that there are."""
    return {
        name: jnp.asarray(columns[name][index]) for name in names if name in columns
    }


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


def open_run(path: str | Path) -> Trajectory | GaussianTrajectory:
    """Read a trajectory from a run's folder, or from what its `save` wrote.

    A file that is not as it was written, be it by one byte, is told. The `flow` of a
    run that came from a configuration is there again.

    Args:
        path: the folder of a run, finished or not, or a zarr folder.
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
        if "covariances" in columns:
            return _gaussian_from(columns)
        trajectory = _from_columns(columns)
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


def _gaussian_from(columns: Mapping[str, np.ndarray]) -> GaussianTrajectory:
    names = ("depth", "means", "linear", "log_volumes", "drifts", "slopes", "root")
    return GaussianTrajectory(
        *(jnp.asarray(columns[name]) for name in names),
        status_from(int(columns["status"][-1])),
        jnp.asarray(columns["accepted_steps"]),
        jnp.asarray(columns["rejected_steps"]),
    )


def _from_columns(columns: Mapping[str, np.ndarray]) -> Trajectory:
    def array(name: str) -> Array | None:
        return jnp.asarray(columns[name]) if name in columns else None

    points, velocities = (
        as_float_array(name, columns[name]) for name in ("points", "velocities")
    )
    check_finite("points", points)
    check_finite("velocities", velocities)
    return Trajectory(
        array("depth"),
        points,
        velocities,
        array("weights"),
        array("position"),
        array("probes"),
        status_from(int(columns["status"][-1])),
        array("accepted_steps"),
        array("rejected_steps"),
        atoms_from({name: array(name) for name in ATOM_AXES if name in columns}),
        sums_from({name: array(name) for name in SUM_NAMES if name in columns}),
    )
