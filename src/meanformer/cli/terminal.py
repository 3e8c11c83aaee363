"""Output of the commands: claims one per line, and progress on standard error."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

SIGNS = {
    "holds": ("✓", "green"),
    "fails": ("✗", "bold red"),
    "broken": ("!", "bold red"),
}


def console(*, is_error: bool = False) -> Any:
    """Standard output or standard error; lines are only cut where someone reads."""
    from rich.console import Console

    return Console(stderr=is_error, highlight=False, soft_wrap=True)


def show(line: Any, out: Any) -> None:
    """Print one line: shortened to the width of a terminal, whole in a file."""
    is_narrow = out.is_terminal
    out.print(line, no_wrap=True, overflow="ellipsis" if is_narrow else "ignore",
              crop=is_narrow, soft_wrap=not is_narrow)  # fmt: skip


def claim_lines(record: Any, width: int = 0) -> list[Any]:
    """One line per claim of a run: verdict, name, measured, expected, statement."""
    from rich.text import Text

    from meanformer.experiments.framework.text import to_plain

    lines = []
    for claim in record.claims:
        finding = record.finding(claim)
        state = "broken" if finding is None else "holds" if finding.holds else "fails"
        sign, style = SIGNS[state]
        numbers = record.error if finding is None else finding_text(finding)
        line = Text.assemble(
            (f"{sign} {state:<6}", style),
            f"  {label(record.experiment, claim):<{width}}  {numbers:<46}  ",
            (to_plain(claim.statement), "dim"),
        )
        lines.append(line)
    return lines


def label(experiment: str, claim: Any) -> str:
    """How a claim is called on the terminal."""
    return f"{experiment}/{claim.id}"


def widest_label(experiments: Sequence[Any]) -> int:
    """Room to leave for the names of all claims."""
    labels = (label(one.name, claim) for one in experiments for claim in one.claims)
    return max(map(len, labels))


@contextmanager
def progress_bar(description: str) -> Iterator[Any]:
    """A bar on standard error, shown only if that is a terminal.

    Yields a function `update(fraction, seconds_left, note)`.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    out = console(is_error=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[note]}"),
    )
    is_shown = out.is_terminal
    with Progress(*columns, console=out, transient=True, disable=not is_shown) as bar:
        task = bar.add_task(description, total=1.0, note="")

        def update(fraction: float, seconds_left: float | None, note: str = "") -> None:
            notes = [note] if note else []
            if seconds_left is not None:
                minutes = f"{seconds_left / 60:.0f} min"
                short = f"{seconds_left:.0f} s" if seconds_left < 90 else minutes
                notes.insert(0, f"about {short} left")
            text = ", ".join(notes)
            bar.update(task, completed=fraction, note=text)

        # On one terminal, lines must go through the bar, or they would break it.
        update.out = out if is_shown and sys.stdout.isatty() else console()
        yield update


def solve_progress(update: Any) -> Any:
    """Return progress for `solve`, which moves our bar and estimates the time left."""
    from meanformer.flows import AbstractProgress

    class Bar(AbstractProgress):
        """Passes the progress on."""

        start = time.perf_counter()

        def update(self, done: int, total: int) -> None:
            share = done / total
            elapsed = time.perf_counter() - self.start
            update(share, elapsed * (1 - share) / share if share > 0 else None)

    return Bar()


def finding_text(finding: Any) -> str:
    """Measured and expected value with their relation."""
    from meanformer.experiments.framework import numbers
    from meanformer.experiments.framework.numbers import plain

    digits = numbers.finding_digits(finding)
    measured, sign = plain(finding.measured, digits), numbers.symbol(finding)
    if isinstance(finding.expected, tuple):
        low, high = (plain(end, digits) for end in finding.expected)
        return f"measured {measured}, expected {sign} [{low}, {high}]"
    expected = f"{sign} {plain(finding.expected, digits)}"
    if finding.tolerance:
        slack = numbers.SLACK_SIGNS[finding.relation]
        expected += f" {slack} {plain(finding.tolerance, 2)}"
    return f"measured {measured}, expected {expected}"
