"""Global minima of functions on the circle, with a certificate."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

FIRST = 512
MOST_CELLS = 60_000
ZOOMS = 4


class CircleMinimum(NamedTuple):
    """Where a function is smallest, its value, and a proven bound from below.

    `size` is the largest absolute value that was seen.
    """

    angle: float
    value: float
    bound: float | None
    size: float


def circle_minimum(
    function: Callable[[np.ndarray], np.ndarray],
    curvature: float | None,
    *,
    tolerance: float,
) -> CircleMinimum:
    r"""Minimise a function of the angle, by bisection of cells with bounds.

    On a cell of width $h$ the function is at least the smaller of its values at the
    ends less $Lh^2/8$, if $|f''| \le L$ almost everywhere. Without $L$ the search goes
    on as if it were that of the samples, and nothing is proven.
    """
    ends = 2 * np.pi * np.arange(FIRST + 1) / FIRST
    values = function(ends)
    cells = np.stack([ends[:-1], ends[1:]], axis=1)
    heights = np.stack([values[:-1], values[1:]], axis=1)
    bend = curvature
    if bend is None:
        step = ends[1]
        bend = 4 * np.abs(np.diff(values, n=2)).max() / step**2
    best, angle = float(values.min()), float(ends[values.argmin()])
    bound, width = np.inf, float(ends[1])
    while True:
        lows = heights.min(axis=1) - bend * width**2 / 8
        open_cells = lows < best - tolerance
        bound = min(bound, float(lows[~open_cells].min(initial=np.inf)))
        cells, heights = cells[open_cells], heights[open_cells]
        if len(cells) == 0 or len(cells) > MOST_CELLS or width < 1e-9:
            bound = min(bound, float(lows[open_cells].min(initial=np.inf)))
            break
        middles = cells.mean(axis=1)
        centres = function(middles)
        if centres.min() < best:
            best, angle = float(centres.min()), float(middles[centres.argmin()])
        cells, heights = _halved(cells, middles), _halved(heights, centres)
        width = width / 2
    angle, best = _zoomed(function, angle, best, width)
    proven = min(bound, best) if curvature is not None else None
    return CircleMinimum(angle, best, proven, float(np.abs(values).max()))


def _zoomed(
    function: Callable[[np.ndarray], np.ndarray],
    angle: float,
    best: float,
    width: float,
) -> tuple[float, float]:
    """Return the best angle and value nearby: cells know it to their width only."""
    for _ in range(ZOOMS):
        nodes = angle + width * np.linspace(-1, 1, 65)
        values = function(nodes)
        if values.min() < best:
            best, angle = float(values.min()), float(nodes[values.argmin()])
        width = width / 16
    return angle, best


def _halved(pairs: np.ndarray, middles: np.ndarray) -> np.ndarray:
    left = np.stack([pairs[:, 0], middles], axis=1)
    return np.concatenate([left, np.stack([middles, pairs[:, 1]], axis=1)])
