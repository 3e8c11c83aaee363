"""Draw the time of a velocity against the number of tokens, for each kind of sums.

`python -m benchmarks.growth` measures and writes `docs/figures/fast_sums.json` and
`docs/figures/fast_sums.svg`; `--draw` draws the numbers that are there again.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from benchmarks import fourier_times
from benchmarks.fourier_times import measured
from meanformer.plotting.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    VIOLET,
    applied,
    canvas,
    to_png,
    to_svg,
)

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
COUNTS = (1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
LARGEST_EXACT = 30_000
# What each line is called: kind of sums, dimension, beta, tolerance.
SERIES = {
    "exact, sphere": ("exact", 3, 4),
    "Fourier, sphere": ("fourier", 3, 4, 1e-8),
    "Fourier, circle": ("fourier", 2, 10, 1e-8),
    "Auto, sphere": ("auto", 3, 4, 1e-8),
}
# Colour, marker, line; Auto lies on one of the others, so that it is drawn as rings.
LOOKS = {
    "exact, sphere": (ORANGE, "s", "-"),
    "Fourier, sphere": (BLUE, "o", "-"),
    "Fourier, circle": (GREEN, "^", "-"),
    "Auto, sphere": (VIOLET, "o", "none"),
}


def main() -> None:
    """Measure, unless told not to, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="do not measure again")
    parser.add_argument("--png", type=Path, help="also write a bitmap here")
    options = parser.parse_args()
    numbers = FIGURES / "fast_sums.json"
    if not options.draw:
        numbers.write_text(json.dumps(times(), indent=2) + "\n")
    figure = drawn(json.loads(numbers.read_text()))
    (FIGURES / "fast_sums.svg").write_text(to_svg(figure) + "\n")
    if options.png is not None:
        options.png.write_bytes(to_png(figure))


def times() -> dict[str, dict[str, float]]:
    """Return the seconds of each series by number of tokens."""
    found: dict[str, dict[str, float]] = {name: {} for name in SERIES}
    for count in COUNTS:
        shown = [
            [name, *problem]
            for name, problem in SERIES.items()
            if problem[0] != "exact" or count <= LARGEST_EXACT
        ]
        for name, seconds in measured(fourier_times.growth, count, *shown).items():
            found[name][str(count)] = seconds
    return found


def drawn(times: dict[str, dict[str, float]]) -> Any:
    """Return the figure: both axes logarithmic, with guides of slopes one and two."""
    figure, axes = canvas(panel=(6.2, 4.2))
    with applied():
        for name, seconds in times.items():
            counts = [int(count) for count in seconds]
            colour, marker, line = LOOKS[name]
            is_ring = line == "none"
            axes.loglog(
                counts,
                list(seconds.values()),
                color=colour,
                marker=marker,
                linestyle=line,
                markersize=9 if is_ring else None,
                markerfacecolor="none" if is_ring else None,
                label=label(name),
            )
        exact, circle = times["exact, sphere"], times["Fourier, circle"]
        guide(axes, LARGEST_EXACT, exact[str(LARGEST_EXACT)], 2, "$n^2$")
        # Below the lowest line, where it crosses nothing.
        guide(axes, COUNTS[2], circle[str(COUNTS[2])] / 3, 1, "$n$")
        axes.set_xlabel("number of tokens $n$")
        axes.set_ylabel("time of one velocity (s)")
        axes.legend(loc="upper left")
    return figure


def label(name: str) -> str:
    """Return what the legend says: the sums, and the problem they solve."""
    _, _, beta, *tolerance = SERIES[name]
    kept = [f"error $\\leq 10^{{{math.log10(each):.0f}}}$" for each in tolerance]
    return ", ".join([name, f"$\\beta = {beta}$", *kept])


def guide(axes: Any, start: int, seconds: float, power: int, text: str) -> None:
    """Draw a power of the number of tokens from a point on, dotted, and name it."""
    last = seconds * (COUNTS[-1] / start) ** power
    axes.loglog([start, COUNTS[-1]], [seconds, last], color=GREY, linestyle=":")
    place = COUNTS[-1], last
    axes.annotate(text, place, (6, 0), textcoords="offset points", va="center")


if __name__ == "__main__":
    main()
