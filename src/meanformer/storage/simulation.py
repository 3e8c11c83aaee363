"""Simulations from a configuration: started, resumed, extended, always restartable."""

import json
import platform
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from meanformer.errors import InvalidInput, check
from meanformer.flows import AbstractProgress, Trajectory, solve
from meanformer.storage.config import build, depth_grid, read_config
from meanformer.storage.format import replace_file
from meanformer.storage.run import RunStore

RECORD = "run.json"
_PACKAGES = ("meanformer", "jax", "jaxlib", "equinox", "diffrax", "numpy")


def simulate(
    config: Path, folder: Path, *, progress: bool | AbstractProgress = False
) -> Trajectory:
    """Start the run that a configuration file describes, streamed to a folder.

    Args:
        config: a TOML file.
        folder: a new or empty folder; it will hold all it takes to redo the run.
        progress: show a bar on standard error.
    """
    tables = read_config(config)
    run = build(tables, config.parent)
    check(
        not folder.exists() or not any(folder.iterdir()),
        f"{folder} is not empty; use resume, or choose another folder.",
    )
    folder.mkdir(parents=True, exist_ok=True)
    if "file" in tables["tokens"]:
        shutil.copy(config.parent / tables["tokens"]["file"], folder / "tokens.npy")
        tables["tokens"]["file"] = "tokens.npy"
    _write_record(folder, tables)
    return _continue(folder, run, progress)


def resume(folder: Path, *, progress: bool | AbstractProgress = False) -> Trajectory:
    """Go on with a run that was interrupted, as if it had not been.

    Args:
        folder: the folder of the run.
        progress: show a bar on standard error.
    """
    record = read_record(folder)
    return _continue(folder, build(record["config"], folder), progress)


def extend(
    folder: Path, depth: float, *, progress: bool | AbstractProgress = False
) -> Trajectory:
    """Go on with a run to a larger depth, as if that had been asked for at once.

    Args:
        folder: the folder of the run.
        depth: the new last depth.
        progress: show a bar on standard error.
    """
    record = read_record(folder)
    table = record["config"]["solve"]
    old, every = table["depth"], table.get("save_every", table["depth"] / 10)
    check(depth > old, f"depth is {depth}; the run already goes to {old}.")
    depth_grid(depth, every)
    table.update(depth=depth, save_every=every)
    _write_record(folder, record["config"])
    return _continue(folder, build(record["config"], folder), progress)


def read_record(folder: Path) -> dict[str, Any]:
    """Return what a run's folder says: configuration, versions, precision."""
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"{folder} holds no run that can be resumed ({RECORD}: {error})."
        ) from error
    check(
        record["double_precision"] == jax.config.read("jax_enable_x64"),
        f"{folder} was started in {'64' if record['double_precision'] else '32'} bits; "
        'set jax.config.update("jax_enable_x64", …) to match.',
    )
    return record


def changed_versions(folder: Path) -> dict[str, tuple[str, str]]:
    """Return the packages whose version differs from when the run was started."""
    then, now = read_record(folder)["versions"], _versions()
    return {
        name: (then[name], now[name]) for name in now if then.get(name) != now[name]
    }


def _continue(folder: Path, run, progress: bool | AbstractProgress) -> Trajectory:
    return solve(
        run.flow,
        run.cloud,
        float(run.depths[-1]),
        save=run.depths,
        progress=progress,
        store=RunStore(folder),
        **run.options,
    )


def _write_record(folder: Path, tables: dict[str, Any]) -> None:
    record = {
        "config": tables,
        "versions": _versions(),
        "double_precision": jax.config.read("jax_enable_x64"),
        "machine": platform.machine(),
    }
    replace_file(folder / RECORD, json.dumps(record, indent=2))


def _versions() -> dict[str, str]:
    packages = {name: version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **packages}
