"""`meanformer simulate`, `resume`, `extend`: runs of one's own, restartable."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from meanformer.cli import terminal
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
    from meanformer import storage

    work = lambda bar: storage.simulate(config, out, progress=bar)  # noqa: E731
    _carry_out(out, work, is_new=True)


@app.command(rich_help_panel=SIMULATIONS)
def resume(folder: Folder) -> None:
    """Go on with an interrupted run, bit for bit as if it had not been.

    It computes in the precision in which the run was started.
    """
    from meanformer import storage

    _carry_out(folder, lambda bar: storage.resume(folder, progress=bar))


@app.command(rich_help_panel=SIMULATIONS)
def extend(
    folder: Folder,
    depth: Annotated[
        float,
        typer.Option(help="The new last depth, a multiple of solve.save_every."),
    ],
) -> None:
    """Go on with a run to a larger depth."""
    from meanformer import storage

    _carry_out(folder, lambda bar: storage.extend(folder, depth, progress=bar))


def _carry_out(folder: Path, work: Any, *, is_new: bool = False) -> None:
    import warnings

    from meanformer.errors import StoppedEarly
    from meanformer.experiments.framework import environment
    from meanformer.storage.words import in_words_of_a_file

    try:
        with environment.computing(), warnings.catch_warnings():
            warnings.simplefilter("ignore", StoppedEarly)
            if not is_new:
                _warn_of_changes(folder)
            with terminal.progress_bar("solving") as update:
                trajectory = work(terminal.solve_progress(update))
    except KeyboardInterrupt:
        complain("interrupted" + _way_on(folder, "; go on with"))
        raise
    except OSError as error:
        complain(f"{error}" + _way_on(folder, "; what was written is kept"))
        raise typer.Exit(1) from None
    steps = int(trajectory.accepted_steps[-1])
    typer.echo(
        f"{in_words_of_a_file(trajectory.message)} {len(trajectory)} depths, "
        f"{steps} steps: {folder}"
    )


def _way_on(folder: Path, words: str) -> str:
    """How to go on, if there is something to go on with."""
    from meanformer.storage.simulation import RECORD

    is_there = (folder / RECORD).is_file()
    return f"{words}: meanformer resume {shlex.quote(str(folder))}" if is_there else "."


def _warn_of_changes(folder: Path) -> None:
    from meanformer import storage

    for name, (then, now) in storage.changed_versions(folder).items():
        complain(f"{name} was {then} when the run was started and is {now} now.")
