"""A run on disk: the trajectory while it is computed, and all it takes to redo it."""

import fcntl
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import InvalidInput, as_float_array, check
from meanformer.flows import (
    AbstractRecorder,
    GaussianTrajectory,
    State,
    Status,
    Trajectory,
)
from meanformer.flows.integrate import Problem
from meanformer.flows.merging import ATOM_AXES, atom_arrays, atoms_from
from meanformer.flows.recorder import Snapshot
from meanformer.flows.status import STATUS_FLAGS, status_code, status_from
from meanformer.flows.sums import SUM_NAMES, sum_arrays, sums_from
from meanformer.storage.fingerprint import fingerprint
from meanformer.storage.format import GrowingArrays, read_metadata, whole_rows

TRAJECTORY = "trajectory.zarr"
LOCK = ".lock"
FINGERPRINT = "fingerprint"


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
        self._fingerprint = fingerprint(problem, start)
        folder = self.path / TRAJECTORY
        rows = self._rows_of_this_run(folder)
        snapshots = read_snapshots(GrowingArrays(folder), rows) if rows else []
        self._check_depths(snapshots)
        self._on_begin()
        self._arrays = None
        if rows > 0:
            self._arrays = GrowingArrays(folder)
            self._arrays.plan(len(depths))
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
            self._lock.close()
            self._lock = None

    def _create(self, rows: dict[str, np.ndarray]) -> GrowingArrays:
        arrays = GrowingArrays(self.path / TRAJECTORY)
        arrays.describe({FINGERPRINT: self._fingerprint})
        for name, row in rows.items():
            attributes = STATUS_FLAGS if name == "status" else {}
            arrays.create_growing(name, len(self._depths), row, _AXES[name], attributes)
        fixed = {"weights": self._cloud.weights, "position": self._cloud.positions}
        for name, array in fixed.items():
            if array is not None:
                arrays.create_fixed(name, np.asarray(array), ("token",))
        arrays.flush_all()
        arrays.commit(0)
        return arrays

    def _acquire(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / LOCK).open("w")
        except OSError as error:
            raise InvalidInput(
                f"{self.path} cannot be written: {error.strerror}; choose another "
                "folder."
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InvalidInput(
                f"{self.path} is being written by another process; wait for it or "
                "choose another folder."
            ) from error

    def _rows_of_this_run(self, folder: Path) -> int:
        """Return how many depths are there; raise if they are of another run."""
        metadata = read_metadata(folder)
        if not metadata:
            return 0
        then = metadata.get(".zattrs", {}).get(FINGERPRINT)
        if then is None:
            raise InvalidInput(
                f"{folder} was not written by a run; choose another folder."
            )
        now = self._fingerprint
        other = [name for name in now | then if now.get(name) != then.get(name)]
        check(
            not other,
            f"{self.path} holds a run with other {', '.join(other)}; ask for the same, "
            "or choose another folder.",
        )
        return whole_rows(folder)

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


def read_snapshots(arrays: GrowingArrays, rows: int) -> list[Snapshot]:
    """Return the first states of a store, bit for bit as they were computed."""
    names = arrays.names()
    columns = {name: arrays.read(name, rows) for name in _AXES if name in names}
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
                atoms_from(_row(columns, ATOM_AXES, index)),
                sums_from(_row(columns, SUM_NAMES, index)),
            ),
            jnp.asarray(columns["velocities"][index]),
        )
        for index in range(rows)
    ]


def _row(
    columns: Mapping[str, np.ndarray], names: Iterable[str], index: int
) -> dict[str, Array]:
    """Return the arrays of these names at one depth, those that there are."""
    return {
        name: jnp.asarray(columns[name][index]) for name in names if name in columns
    }


def open_run(path: str | Path) -> Trajectory | GaussianTrajectory:
    """Read a trajectory from a run's folder, or from what its `save` wrote.

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
        if FINGERPRINT in dataset.attrs:  # a run, of which the end may be missing
            dataset = dataset.isel(depth=slice(0, whole_rows(folder)))
        check(
            dataset.sizes["depth"] > 0,
            f"{path} holds no finished depth yet; resume the run first.",
        )
        is_gaussian = "covariances" in dataset
        return _gaussian_from(dataset) if is_gaussian else _from_xarray(dataset)
    except InvalidInput:
        raise
    except (KeyError, OSError, ValueError) as error:
        raise InvalidInput(f"{path} holds no trajectory: {error}") from error


def _gaussian_from(dataset) -> GaussianTrajectory:
    def array(name: str) -> Array:
        return jnp.asarray(dataset[name].values)

    names = ("depth", "means", "linear", "log_volumes", "drifts", "slopes", "root")
    return GaussianTrajectory(
        *map(array, names),
        status_from(int(dataset["status"].values[-1])),
        array("accepted_steps"),
        array("rejected_steps"),
    )


def _from_xarray(dataset) -> Trajectory:
    def array(name: str) -> Array | None:
        return jnp.asarray(dataset[name].values) if name in dataset else None

    return Trajectory(
        array("depth"),
        as_float_array("points", dataset["points"].values),
        array("velocities"),
        array("weights"),
        array("position"),
        array("probes"),
        status_from(int(dataset["status"].values[-1])),
        array("accepted_steps"),
        array("rejected_steps"),
        atoms_from({name: array(name) for name in ATOM_AXES if name in dataset}),
        sums_from({name: array(name) for name in SUM_NAMES if name in dataset}),
    )
