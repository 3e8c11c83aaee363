"""Run the benchmarks, print a table of ratios, write them as JSON."""

import argparse
import fnmatch
import importlib
import json
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.result import Result

NAMES = (
    "velocity",
    "gradient",
    "memory",
    "startup",
    "fast_sums",
    "long_depth",
    "staircase",
    "phase_diagram",
    "training_step",
)
VERDICTS = {True: "[green]reached[/]", False: "[red]not reached[/]", None: ""}


def main() -> None:
    """Run what was asked for; the exit code does not depend on the numbers."""
    options = parsed()
    chosen = [name for name in NAMES if fnmatch.fnmatch(name, f"*{options.only}*")]
    if not chosen:
        raise SystemExit(f"--only {options.only}: choose among {', '.join(NAMES)}.")
    console, results = Console(soft_wrap=True), []
    for name in chosen:
        module = importlib.import_module(f"benchmarks.{name}")
        console.print(f"[bold]{name}[/]: {module.__doc__}")
        for result in module.results():
            console.print(f"  {line(result)}")
            results.append(result)
    console.print(table(results))
    write(results, options.out)
    console.print(f"Written to {options.out}")


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", default="*", help="part of a name, or a pattern")
    out = Path(__file__).parent / "results" / "bench.json"
    parser.add_argument("--out", type=Path, default=out, help="where the JSON goes")
    return parser.parse_args()


def line(result: Result) -> str:
    """Return a result as one line of text."""
    numbers = f"{result.ours:.4g} against {result.theirs:.4g} {result.unit}"
    return f"{result.name}: {numbers} ({result.opponent}), {result.ratio:.2f}×"


def table(results: list[Result]) -> Table:
    """Return all results with ratios and targets."""
    report = Table(title="meanformer against its opponents")
    for heading in ("work", "opponent", "ours", "theirs", "ratio", "target", ""):
        is_number = heading in ("ours", "theirs", "ratio", "target")
        report.add_column(heading, justify="right" if is_number else "left")
    for result in results:
        report.add_row(
            result.name,
            result.opponent,
            f"{result.ours:.4g} {result.unit}",
            f"{result.theirs:.4g} {result.unit}",
            f"{result.ratio:.2f}×",
            result.goal(),
            VERDICTS[result.reached],
        )
    return report


def write(results: list[Result], path: Path) -> None:
    """Write results, versions and machine as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [asdict(r) | {"ratio": r.ratio, "reached": r.reached} for r in results]
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.processor() or platform.machine()}, "
        f"{psutil.cpu_count()} cores, load {psutil.getloadavg()[0]:.1f}",
        "versions": {name: installed(name) for name in ("meanformer", "jax", "torch")},
        "results": rows,
    }
    path.write_text(json.dumps(report, indent=2) + "\n")


def installed(name: str) -> str | None:
    """Return the version of a package, or `None`."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
