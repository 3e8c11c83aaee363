"""Run many experiments, and keep the page about them up to date."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from meanformer.errors import InvalidInput
from meanformer.experiments.framework import environment, workers
from meanformer.experiments.framework.experiment import Experiment
from meanformer.experiments.framework.filming import gif_name
from meanformer.experiments.framework.records import Record
from meanformer.experiments.framework.report import Atlas, render
from meanformer.experiments.framework.settings import Profile
from meanformer.experiments.framework.workers import Event, Finished, Started
from meanformer.files import write_atomically


def explore(
    experiments: Sequence[Experiment],
    profile: Profile,
    folder: Path,
    *,
    jobs: int,
    command: str,
) -> Iterator[Event]:
    """Run experiments in parallel and keep `folder/index.html` up to date.

    The page is complete in itself at every moment. If the loop over the events is
    left early, it says which experiments were not run.
    """
    atlas = blank(experiments, command)
    publish(atlas, folder)
    try:
        for event in workers.run_in_parallel(experiments, profile, jobs):
            atlas = _after(atlas, event)
            if isinstance(event, Finished):
                write_figures(event.record, folder)
                remember(event.record)
            if isinstance(event, (Started, Finished)):
                publish(atlas, folder)
            yield event
    finally:
        if atlas.is_growing:
            publish(dataclasses.replace(atlas, is_stopped=True), folder)


def blank(experiments: Sequence[Experiment], command: str) -> Atlas:
    """An atlas with nothing in it yet."""
    alone = len(experiments) == 1
    return Atlas(
        title=experiments[0].title if alone else "Atlas of attention over measures",
        command=command,
        facts=environment.machine_facts(),
        experiments=tuple(experiments),
        records={},
    )


def publish(atlas: Atlas, folder: Path) -> None:
    """Write the page and the numbers behind it."""
    try:
        write_atomically(folder / "index.html", render(atlas))
        write_atomically(folder / "results.json", json.dumps(numbers(atlas), indent=1))
    except OSError as error:
        raise InvalidInput(
            f"The report cannot be written to {str(folder)!r}: {error.strerror}."
        ) from error


def numbers(atlas: Atlas) -> dict:
    """Every number of an atlas, in the order of the page."""
    names = [one.name for one in atlas.experiments]
    records = [atlas.records[name] for name in names if name in atlas.records]
    is_complete = len(records) == len(names)
    return {
        "command": atlas.command,
        **atlas.facts,
        "complete": is_complete,
        "holds": is_complete and all(record.holds for record in records),
        "seconds": round(atlas.seconds, 3),
        "experiments": [record.to_json() for record in records],
    }


def write_figures(record: Record, folder: Path) -> None:
    """Write the figures of a run as SVG and PNG files, its movies as GIF and MP4."""
    from meanformer.plotting import style

    for index, one in enumerate(record.prints, start=1):
        stem = folder / "figures" / f"{record.experiment}-{index}"
        alone = one.svg.replace("currentColor", style.INK)
        write_atomically(stem.with_suffix(".svg"), alone)
        write_atomically(stem.with_suffix(".png"), one.png)
    for index, reel in enumerate(record.reels, start=1):
        path = folder / gif_name(record.experiment, index)
        write_atomically(path, reel.gif)
        if reel.mp4:
            write_atomically(path.with_suffix(".mp4"), reel.mp4)


def remember(record: Record) -> None:
    """Keep how long a run took, for later estimates, unless it broke off."""
    if not record.error:
        environment.remember_seconds(record.experiment, record.profile, record.seconds)


def _after(atlas: Atlas, event: Event) -> Atlas:
    if isinstance(event, Started):
        return dataclasses.replace(atlas, running=atlas.running | {event.name})
    if isinstance(event, Finished):
        records = {**atlas.records, event.name: event.record}
        running = atlas.running - {event.name}
        return dataclasses.replace(atlas, running=running, records=records)
    return atlas
