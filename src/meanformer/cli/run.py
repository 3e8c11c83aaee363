"""`meanformer run`: one experiment, with parameters of one's own."""

import dataclasses
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from meanformer.cli import signals, terminal
from meanformer.cli.app import EXPERIMENTS, AsJson, app


@app.command(rich_help_panel=EXPERIMENTS)
@signals.apart
def run(
    name: Annotated[
        str, typer.Argument(help="Name of an experiment, or its .py file.")
    ],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a parameter; repeatable."
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Start from the papers' own sizes.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for a report with the figures.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run one experiment, with changed parameters if you like."""
    from meanformer.experiments.framework import registry
    from meanformer.experiments.framework.settings import split_assignments

    experiment = registry.find(name)
    if registry.is_unreadable(experiment):
        changes = None  # running it tells why
    profile = "full" if full else "quick"
    settings = experiment.settings(profile, **split_assignments(changes or []))
    record = _perform(experiment, settings, profile)
    record = dataclasses.replace(record, path=registry.path_of(name))
    if out is not None:
        _write_report(experiment, record, out)
    if as_json:
        typer.echo(json.dumps(record.to_json(), allow_nan=False))
    else:
        _print(experiment, record, out)
    raise typer.Exit(0 if record.holds else 1)


def _perform(experiment: Any, settings: Any, profile: Any) -> Any:
    from meanformer.experiments.framework.atlas import remember
    from meanformer.experiments.framework.progress import Progress
    from meanformer.experiments.framework.records import attempt
    from meanformer.experiments.framework.workers import estimate

    start, usual = time.perf_counter(), estimate(experiment, profile)
    is_changed = settings != experiment.settings(profile)
    with terminal.progress_bar(experiment.name) as update:

        def listen(fraction: float) -> None:
            elapsed = time.perf_counter() - start
            whole = elapsed / fraction if fraction > 0 else usual
            update(fraction, whole - elapsed)

        update(0.0, usual)
        record = attempt(
            experiment,
            settings,
            profile=profile,
            progress=Progress(listen),
            is_users_choice=is_changed,
        )
    if not is_changed:
        remember(record)
    return record


def _write_report(experiment: Any, record: Any, folder: Path) -> None:
    from meanformer.experiments.framework import atlas

    page = atlas.blank([experiment], shlex.join(["meanformer", *sys.argv[1:]]))
    page = dataclasses.replace(page, records={experiment.name: record})
    atlas.publish(page, folder)
    atlas.write_figures(record, folder)


def _print(experiment: Any, record: Any, folder: Path | None) -> None:
    from meanformer.experiments.framework.text import to_plain

    out = terminal.console()
    terminal.show(f"[bold]{to_plain(experiment.title)}[/bold]", out)
    settings = "  ".join(f"{key}={value}" for key, value in record.parameters.items())
    out.print(settings, style="dim", markup=False)
    for line in terminal.claim_lines(record):
        terminal.show(line, out)
    for note in (*record.notes, *record.warnings):
        out.print(to_plain(note), style="dim", markup=False)
    where = f" Report: {folder / 'index.html'}" if folder else ""
    typer.echo(f"{record.seconds:.1f} s.{where}")
