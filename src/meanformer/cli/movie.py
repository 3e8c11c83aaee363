"""`meanformer movie`: a stored run as a movie."""

from pathlib import Path
from typing import Annotated, Any

import typer

from meanformer.cli import signals, terminal
from meanformer.cli.app import SIMULATIONS, app, complain


@app.command(rich_help_panel=SIMULATIONS)
@signals.apart
def movie(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of a run, finished or not.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The movie: a .gif or a .mp4 file.")
    ],
    frames: Annotated[int, typer.Option(help="How many frames.", min=1)] = 100,
    fps: Annotated[float, typer.Option(help="Frames per second.")] = 25.0,
    dpi: Annotated[float, typer.Option(help="Pixels per inch, of 4.8 inches.")] = 100.0,
    coordinates: Annotated[
        str | None,
        typer.Option(
            metavar="I,J[,K]", help="Two or three coordinates to show, from 1 on."
        ),
    ] = None,
    saved: Annotated[
        bool,
        typer.Option(
            "--saved", help="One frame for each saved depth, however far apart."
        ),
    ] = False,
) -> None:
    """Make a movie of a run: tokens in the plane or in space, on circle or sphere.

    Frames are equally spaced in depth, with tails that show where tokens come from.
    """
    from meanformer import plotting
    from meanformer.experiments.framework import environment
    from meanformer.plotting.movies import check_path

    check_path(out)
    with environment.computing():
        trajectory = _tokens(folder, coordinates)
        try:
            with terminal.progress_bar("drawing") as update:
                plotting.movie(
                    trajectory,
                    out,
                    frames=frames,
                    depths=trajectory.depths if saved else None,
                    fps=fps,
                    dpi=dpi,
                    progress=terminal.solve_progress(update),
                )
        except OSError as error:
            complain(f"{out} could not be written: {error.strerror or error}.")
            raise typer.Exit(1) from None
    shown = len(trajectory) if saved else frames
    typer.echo(f"{shown} frames, {shown / fps:.1f} s: {out}")


def _tokens(folder: Path, coordinates: str | None) -> Any:
    from meanformer.errors import InvalidInput
    from meanformer.flows import GaussianTrajectory, Trajectory
    from meanformer.plotting.token_paths import choose_coordinates
    from meanformer.storage import open_run

    trajectory = open_run(folder)
    if not isinstance(trajectory, Trajectory):
        is_gaussian = isinstance(trajectory, GaussianTrajectory)
        kind = "Gaussians" if is_gaussian else "densities"
        raise InvalidInput(f"{folder} holds {kind} along depth; a movie shows tokens.")
    if coordinates is None:
        return trajectory
    try:
        chosen = [int(word) for word in coordinates.split(",")]
    except ValueError:
        raise InvalidInput(
            f"--coordinates is {coordinates!r}; it must be a list such as 1,2 or 1,2,3."
        ) from None
    return choose_coordinates(trajectory, [number - 1 for number in chosen])
