"""`meanformer simulate`, `resume`, `extend`: runs of one's own, restartable."""

import shlex
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from meanformer.cli import signals, terminal
from meanformer.cli.app import SIMULATIONS, app, complain

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the run.")]


@app.command(rich_help_panel=SIMULATIONS)
def simulate(
    config: Annotated[Path, typer.Argument(help="A TOML file that describes the run.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="New folder for the run.")],
) -> None:
    """Start a run of your own, streamed to disk while it is computed.

    A run that stops before its depth (blow-up, escape, steps used up) is a result too:
    the last line says why, the folder keeps it as `status`, and the exit code is 0.
    """
    _carry_out(
        out, lambda room, bar: room.simulate(config, out, progress=bar), is_new=True
    )


@app.command(rich_help_panel=SIMULATIONS)
def resume(folder: Folder) -> None:
    """Go on with an interrupted run, bit for bit as if it had not been.

    It computes in the precision in which the run was started.
    """
    _carry_out(folder, lambda room, bar: room.resume(folder, progress=bar))


@app.command(rich_help_panel=SIMULATIONS)
def extend(
    folder: Folder,
    depth: Annotated[
        float, typer.Option(help="The new last depth, a multiple of solve.save_every.")
    ],
) -> None:
    """Go on with a run to a larger depth."""
    _carry_out(folder, lambda room, bar: room.extend(folder, depth, progress=bar))


def _carry_out(folder: Path, work: Any, *, is_new: bool = False) -> None:
    try:
        with terminal.progress_bar("solving") as update:
            last_line = _computed(folder, work, update, is_new)
    except (KeyboardInterrupt, SystemExit) as stop:
        word = "interrupted" if isinstance(stop, KeyboardInterrupt) else "terminated"
        complain(word + _way_on(folder, "; go on with"))
        raise
    except OSError as error:
        complain(f"{error}" + _way_on(folder, "; what was written is kept"))
        raise typer.Exit(1) from None
    typer.echo(last_line)


@signals.apart
def _computed(folder: Path, work: Any, update: Any, is_new: bool) -> str:
    """Carry out the work; return how it ended."""
    from meanformer import storage
    from meanformer.errors import StoppedEarly
    from meanformer.experiments.framework import environment

    with environment.computing(), warnings.catch_warnings():
        warnings.simplefilter("ignore", StoppedEarly)
        changes = {} if is_new else storage.changed_versions(folder)
        for name, (then, now) in changes.items():
            complain(f"{name} was {then} when the run was started and is {now} now.")
        trajectory = work(storage, terminal.solve_progress(update))
        steps = int(trajectory.accepted_steps[-1])
    return f"{trajectory.message} {len(trajectory)} depths, {steps} steps: {folder}"


def _way_on(folder: Path, words: str) -> str:
    """How to go on, if there is something to go on with."""
    is_there = (folder / "run.json").is_file()
    return f"{words}: meanformer resume {shlex.quote(str(folder))}" if is_there else "."
