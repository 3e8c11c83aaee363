"""Axes of space, and whether axes suit what is drawn."""

from typing import Any

import numpy as np

from meanformer.errors import check


def furnish(
    axes: Any, points: np.ndarray, *, margin: float = 0.06, zoom: float = 0.95
) -> None:
    """Make a room of space around points: equal scales, no walls, few ticks."""
    from matplotlib.ticker import MaxNLocator

    # By itself it would hide all discs of a kind behind a plane through their midst.
    axes.computed_zorder = False
    low, high = points.min(axis=0), points.max(axis=0)
    half = np.maximum((high - low) / 2, 1e-9 + 0.02 * np.max(high - low))
    middle, half = (low + high) / 2, (1 + 2 * margin) * half
    axes.set(
        xlim=(middle[0] - half[0], middle[0] + half[0]),
        ylim=(middle[1] - half[1], middle[1] + half[1]),
        zlim=(middle[2] - half[2], middle[2] + half[2]),
        xlabel="$x_1$",
        ylabel="$x_2$",
        zlabel="$x_3$",
    )
    axes.set_box_aspect(half / half.max(), zoom=zoom)
    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        axis.set_pane_color((0, 0, 0, 0))
        axis.gridlines.set_alpha(0.12)
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
