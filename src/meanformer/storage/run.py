"""A run on disk: the trajectory while it is computed, and all it takes to redo it."""

import fcntl
import shutil
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import InvalidInput, check
from meanformer.flows import AbstractRecorder, State, Status, Trajectory
from meanformer.flows.recorder import Snapshot
from meanformer.flows.status import STATUS_FLAGS, status_code, status_from
from meanformer.measures import TokenCloud
from meanformer.storage.format import GrowingArrays

TRAJECTORY = "trajectory.zarr"


class RunStore(AbstractRecorder):
    """A folder that a solve streams its trajectory to, depth by depth.

    `solve(..., store=RunStore(path))` starts a run or continues the one that is there;
    `xarray.open_zarr(path / "trajectory.zarr")` reads it at any moment, also while it
    is written or after a crash. One process at a time may write.

    Args:
        path: the folder, made if it does not exist.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._lock = None
        self._arrays: GrowingArrays | None = None

    def begin(
        self, depths: Float[Array, " t"], cloud: TokenCloud
    ) -> Sequence[Snapshot]:
        """Prepare the folder; return what it holds already of these depths."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._acquire()
        self._depths, self._cloud = depths, cloud
        folder = self.path / TRAJECTORY
        if not is_readable(folder):
            # Killed before the first depth was planned: nothing is lost.
            shutil.rmtree(folder, ignore_errors=True)
            self._arrays = None
            return []
        self._arrays = GrowingArrays(folder)
        snapshots = read_snapshots(self._arrays)
        if snapshots:
            self._check_same_run(snapshots)
        self._arrays.plan(len(depths))
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
            self._lock.close()
            self._lock = None

    def _create(self, rows: dict[str, np.ndarray]) -> GrowingArrays:
        arrays = GrowingArrays(self.path / TRAJECTORY)
        for name, row in rows.items():
            attributes = STATUS_FLAGS if name == "status" else {}
            arrays.create_growing(name, len(self._depths), row, _AXES[name], attributes)
        fixed = {"weights": self._cloud.weights, "position": self._cloud.positions}
        for name, array in fixed.items():
            if array is not None:
                arrays.create_fixed(name, np.asarray(array), ("token",))
        arrays.commit(0)
        return arrays

    def _acquire(self) -> None:
        self._lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InvalidInput(
                f"{self.path} is being written by another process; wait for it or "
                "choose another folder."
            ) from error

    def _check_same_run(self, snapshots: Sequence[Snapshot]) -> None:
        check(
            len(snapshots) <= len(self._depths),
            f"{self.path} holds {len(snapshots)} depths, more than the "
            f"{len(self._depths)} asked for; choose another folder.",
        )
        stored = [float(state.depth) for state, _ in snapshots]
        wanted = [float(depth) for depth in self._depths[: len(stored)]]
        stopped = not bool(snapshots[-1][0].status == Status.reached)
        compared = len(stored) - 1 if stopped else len(stored)
        check(
            stored[:compared] == wanted[:compared],
            f"{self.path} holds a run with other saved depths; choose another folder.",
        )
        check(
            snapshots[0][0].points.shape == self._cloud.points.shape
            and bool((snapshots[0][0].points == self._cloud.points).all()),
            f"{self.path} holds a run of other tokens; choose another folder.",
        )


_AXES = {
    "depth": (),
    "points": ("token", "coordinate"),
    "velocities": ("token", "coordinate"),
    "probes": ("probe", "coordinate"),
    "status": (),
    "accepted_steps": (),
    "rejected_steps": (),
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
    return {name: np.asarray(row) for name, row in rows.items() if row is not None}


def read_snapshots(arrays: GrowingArrays) -> list[Snapshot]:
    """Return the states that a store holds, bit for bit as they were computed."""
    names = arrays.names()
    columns = {name: arrays.read(name) for name in _AXES if name in names}
    return [
        (
            State(
                jnp.asarray(columns["depth"][index]),
                jnp.asarray(columns["points"][index]),
                jnp.asarray(columns["probes"][index]) if "probes" in names else None,
                status_from(int(columns["status"][index])),
                jnp.asarray(columns["accepted_steps"][index]),
                jnp.asarray(columns["rejected_steps"][index]),
                jnp.asarray(index),
            ),
            jnp.asarray(columns["velocities"][index]),
        )
        for index in range(arrays.committed())
    ]


def is_readable(folder: Path) -> bool:
    """Return whether a trajectory folder has a first finished depth."""
    from meanformer.storage.format import METADATA

    return (folder / METADATA).exists()


def open_run(path: str | Path) -> Trajectory:
    """Read a trajectory from a run's folder, or from what `Trajectory.save` wrote.

    Args:
        path: the folder of a run, finished or not, or a zarr folder.
    """
    import xarray

    path = Path(path)
    folder = path / TRAJECTORY if (path / TRAJECTORY).exists() else path
    check(
        folder.exists(),
        f"{path} does not exist; give the folder of a run or of a saved trajectory.",
    )
    try:
        dataset = xarray.open_zarr(folder)
        return _from_xarray(dataset)
    except (KeyError, OSError, ValueError) as error:
        raise InvalidInput(f"{path} holds no trajectory: {error}") from error


def _from_xarray(dataset) -> Trajectory:
    def array(name: str) -> Array | None:
        return jnp.asarray(dataset[name].values) if name in dataset else None

    return Trajectory(
        array("depth"),
        array("points"),
        array("velocities"),
        array("weights"),
        array("position"),
        array("probes"),
        status_from(int(dataset["status"].values[-1])),
        array("accepted_steps"),
        array("rejected_steps"),
    )
