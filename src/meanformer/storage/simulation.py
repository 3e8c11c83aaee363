"""Simulations from a configuration: started, resumed, extended, always restartable."""

import platform
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from meanformer.errors import InvalidInput, check
from meanformer.flows import AbstractProgress, AbstractTrajectory, solve
from meanformer.storage.config import Run, build, depth_grid, read_config
from meanformer.storage.format import RECORD, TOKENS, flush, read_record, write_record
from meanformer.storage.run import LOCK, RunStore

_PACKAGES = ("meanformer", "jax", "jaxlib", "equinox", "diffrax", "numpy")


def simulate(
    config: str | Path, folder: str | Path, *, progress: bool | AbstractProgress = False
) -> AbstractTrajectory:
    """Start the run that a configuration file describes, streamed to a folder.

    A mistake in the configuration leaves no folder behind.

    Args:
        config: a TOML file.
        folder: a new or empty folder; it will hold all it takes to redo the run.
        progress: show a bar on standard error.
    """
    config, folder = Path(config), Path(folder)
    tables = read_config(config)
    run = build(tables, config.parent)
    _check_free(folder)
    record = {
        "config": tables,
        "versions": _versions(),
        "double_precision": jax.config.read("jax_enable_x64"),
        "machine": platform.machine(),
        "history": [],
    }

    def write() -> None:
        _check_free(folder)
        if "file" in tables.get("tokens", {}):
            # The record comes first, unfinished: it says whose the copy is.
            (folder / f"{RECORD}.new").touch()
            shutil.copy(config.parent / tables["tokens"]["file"], folder / TOKENS)
            flush(folder / TOKENS)
            tables["tokens"]["file"] = TOKENS
        write_record(folder, record)

    return _carry_out(folder, run, write, progress)


def resume(
    folder: str | Path, *, progress: bool | AbstractProgress = False
) -> AbstractTrajectory:
    """Go on with a run that was interrupted, as if it had not been.

    It computes in the precision in which the run was started.

    Args:
        folder: the folder of the run.
        progress: show a bar on standard error.
    """
    folder = Path(folder)
    record = read_record(folder)

    def write() -> None:
        if changed_versions(folder):
            write_record(folder, _continued(record, "resume"))

    with jax.enable_x64(record["double_precision"]):
        run = build(record["config"], folder)
        return _carry_out(folder, run, write, progress)


def extend(
    folder: str | Path, depth: float, *, progress: bool | AbstractProgress = False
) -> AbstractTrajectory:
    """Go on with a run to a larger depth, as if that had been asked for at once.

    Args:
        folder: the folder of the run.
        depth: the new last depth, in line with the saved depths.
        progress: show a bar on standard error.
    """
    folder = Path(folder)
    record = read_record(folder)
    with jax.enable_x64(record["double_precision"]):
        build(record["config"], folder)
        table = record["config"]["solve"]
        old = table["depth"]
        check(depth > old, f"depth is {depth}; the run already goes to {old}.")
        if "saves_per_decade" not in table:
            every = table.get("save_every", old / 10)
            depth_grid(depth, every)
            table.update(save_every=every)
        table.update(depth=depth)
        longer = _continued(record, "extend", depth=depth)
        run = build(record["config"], folder)
        return _carry_out(folder, run, lambda: write_record(folder, longer), progress)


def changed_versions(folder: str | Path) -> dict[str, tuple[str, str]]:
    """Return the packages whose version differs from when the run was started."""
    then, now = read_record(Path(folder))["versions"], _versions()
    return {
        name: (then.get(name, "absent"), now[name])
        for name in now
        if then.get(name) != now[name]
    }


def _carry_out(
    folder: Path, run: Run, write: Callable[[], None], progress: bool | AbstractProgress
) -> AbstractTrajectory:
    """Solve; the record is written once all is checked and the folder is ours."""
    return solve(
        run.flow,
        run.measure,
        float(run.depths[-1]),
        save=run.depths,
        progress=progress,
        store=RunStore(folder, on_begin=write),
        **run.options,
    )


def _check_free(folder: Path) -> None:
    """Raise unless the folder is new, empty, or was left before its run began."""
    try:
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    except OSError as error:
        raise InvalidInput(
            f"{folder} is no folder to write to: {error.strerror}; choose another."
        ) from error
    ours = {LOCK, f"{RECORD}.new"}
    if f"{RECORD}.new" in names:
        ours.add(TOKENS)
    check(
        names <= ours, f"{folder} is not empty; use resume, or choose another folder."
    )


def _continued(record: dict[str, Any], action: str, **facts: Any) -> dict[str, Any]:
    """Return the record with one line more in its history."""
    line = {"action": action, **facts, "versions": _versions()}
    return record | {"history": [*record["history"], line]}


def _versions() -> dict[str, str]:
    packages = {name: version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **packages}
