"""`meanformer atlas`: run the experiments and write the page about them."""

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from meanformer.cli import terminal
from meanformer.cli.app import EXPERIMENTS, Only, app


@app.command(rich_help_panel=EXPERIMENTS)
def atlas(
    full: Annotated[
        bool, typer.Option("--full", help="The papers' own sizes; takes hours.")
    ] = False,
    only: Only = None,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("atlas"),
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Processes at once; one per core if left out."),
    ] = None,
) -> None:
    """Check every claim, print the verdicts, write a report with figures.

    Prints one line per claim with measured and expected value, and writes
    [bold]OUT/index.html[/bold], a page that needs nothing else and grows meanwhile.
    """
    from meanformer.experiments.framework import environment, registry

    experiments = registry.select(only)
    profile = "full" if full else "quick"
    start = time.perf_counter()
    records = _explore(experiments, profile, out, jobs or environment.default_jobs())
    seconds = time.perf_counter() - start
    typer.echo(summary(records, seconds, out / "index.html"))
    raise typer.Exit(0 if all(record.holds for record in records) else 1)


def _explore(
    experiments: Sequence[Any], profile: Any, out: Path, jobs: int
) -> list[Any]:
    from meanformer.experiments.framework import atlas as growing
    from meanformer.experiments.framework.workers import Finished

    width = terminal.widest_label(experiments)
    command = shlex.join(["meanformer", *sys.argv[1:]])
    outlook, records = Outlook(experiments, profile, jobs), []
    with terminal.progress_bar("atlas") as update:
        for event in growing.explore(
            experiments, profile, out, jobs=jobs, command=command
        ):
            outlook.hear(event)
            update(outlook.fraction, outlook.seconds_left, outlook.note)
            if isinstance(event, Finished):
                records.append(event.record)
                for line in terminal.claim_lines(event.record, width):
                    terminal.show(line, update.out)
    return records


class Outlook:
    """Progress of an atlas: the share done, and the expected time for the rest."""

    def __init__(self, experiments: Sequence[Any], profile: Any, jobs: int):
        from meanformer.experiments.framework.workers import estimate

        self.jobs = min(jobs, len(experiments))
        self.seconds = {one.name: estimate(one, profile) for one in experiments}
        self.done = dict.fromkeys(self.seconds, 0.0)
        self.running: list[str] = []

    def hear(self, event: Any) -> None:
        """Take note of an event."""
        from meanformer.experiments.framework.workers import Advanced, Started

        if isinstance(event, Started):
            self.running.append(event.name)
        elif isinstance(event, Advanced):
            self.done[event.name] = event.fraction
        else:
            self.done[event.name] = 1.0
            self.running.remove(event.name)

    @property
    def fraction(self) -> float:
        """Work done, by expected time."""
        done = sum(self.seconds[name] * part for name, part in self.done.items())
        return done / sum(self.seconds.values())

    @property
    def seconds_left(self) -> float:
        """Expected time for the rest, shared among the workers."""
        return sum(self.seconds.values()) * (1 - self.fraction) / self.jobs

    @property
    def note(self) -> str:
        """What is running now."""
        return "running " + ", ".join(self.running) if self.running else ""


def summary(records: Sequence[Any], seconds: float, page: Path) -> str:
    """The last line: how many claims hold, and where the page is."""
    claims = [record.finding(claim) for record in records for claim in record.claims]
    holding = sum(finding is not None and finding.holds for finding in claims)
    words = "claim holds" if len(claims) == 1 else "claims hold"
    plural = "s" * (len(records) != 1)
    return (
        f"{holding} of {len(claims)} {words}, {len(records)} experiment{plural}, "
        f"{seconds:.0f} s. Report: {page}"
    )
