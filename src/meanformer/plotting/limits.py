"""Limits of axes around points, and whether axes suit what is drawn."""

from typing import Any

import numpy as np

from meanformer.errors import check


def set_square(axes: Any, points: np.ndarray, *, margin: float) -> None:
    """Make axes of the plane square around points, with a margin on each side."""
    low, high = points.min(axis=0), points.max(axis=0)
    half = (0.5 + margin) * max(float((high - low).max()), 1e-9)
    (left, bottom), (right, top) = (low + high) / 2 - half, (low + high) / 2 + half
    axes.set(xlim=(left, right), ylim=(bottom, top), aspect="equal")
    axes.set(xlabel="$x_1$", ylabel="$x_2$")


def set_box(axes: Any, points: np.ndarray, *, zoom: float = 0.95) -> None:
    """Make axes of space a box around points: equal scales, no walls, few ticks."""
    # By itself it would hide all discs of a kind behind a plane through their midst.
    axes.computed_zorder = False
    low, high = points.min(axis=0), points.max(axis=0)
    half = np.maximum((high - low) / 2, 1e-9 + 0.02 * np.max(high - low))
    middle, half = (low + high) / 2, 1.12 * half
    for name, centre, reach in zip("xyz", middle, half, strict=True):
        axes.set(**{f"{name}lim": (centre - reach, centre + reach)})
    axes.set(xlabel="$x_1$", ylabel="$x_2$", zlabel="$x_3$")
    axes.set_box_aspect(half / half.max(), zoom=zoom)
    remove_walls(axes)
    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        axis.gridlines.set_alpha(0.12)


def remove_walls(axes: Any) -> None:
    """Make the walls of a box transparent, and its ticks few."""
    from matplotlib.ticker import MaxNLocator

    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        axis.set_pane_color((0, 0, 0, 0))
        axis.set_major_locator(MaxNLocator(4, prune="both"))


def check_axes(axes: Any, dimension: int) -> None:
    """Raise unless the axes are of the plane or of space as the dimension is."""
    kind = getattr(axes, "name", None)
    check(
        kind is not None and (kind == "3d") == (dimension == 3),
        f"what has {dimension} coordinates is given for {kind or type(axes).__name__} "
        "axes; three need "
        'those of canvas(subplot_kw={"projection": "3d"}), two those of canvas().',
    )


def check_planar(subject: str, dimension: int) -> None:
    """Raise unless the dimension is two; the subject says whose it is."""
    check(dimension == 2, f"{subject} {dimension}; this figure is flat.")
