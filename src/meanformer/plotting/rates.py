"""Rates of convergence on doubly logarithmic axes."""

from typing import Any

import numpy as np

from meanformer.plotting import style


def draw_rate(
    sizes: Any, errors: Any, axes: Any, *, label: str, slope: float | None = None
) -> Any:
    """Draw errors against sizes, with the line of a slope through the last of them.

    Args:
        sizes: what is refined, such as counts or steps.
        errors: the errors found.
        axes: where to draw.
        label: name of the errors in the legend.
        slope: exponent of the line to draw; none if left out.

    Returns:
        The axes.
    """
    sizes, errors = np.asarray(sizes, float), np.asarray(errors, float)
    (line,) = axes.plot(sizes, errors, "o-", label=label)
    if slope is not None:
        draw_slope(sizes, errors[-1], slope, axes, color=line.get_color())
    axes.set(xscale="log", yscale="log")
    return axes


def draw_slope(
    sizes: Any,
    last: float,
    slope: float,
    axes: Any,
    *,
    color: str = style.GREY,
    label: str | None = None,
) -> Any:
    """Draw a dashed line of this exponent that ends at the last size.

    Args:
        sizes: the range to cover.
        last: its height at the last size.
        slope: the exponent.
        axes: where to draw.
        color: its colour.
        label: its name in the legend; none by default.

    Returns:
        The axes.
    """
    sizes = np.asarray(sizes, float)
    heights = last * (sizes / sizes[-1]) ** slope
    options = {"color": color, "alpha": 0.55, "linewidth": 1.1}
    axes.plot(sizes, heights, "--", label=label, **options)
    return axes


def mark_sizes(sizes: Any, axes: Any) -> Any:
    """Put ticks on a logarithmic axis at the sizes used, and nowhere else.

    Args:
        sizes: where, in the order of the axis.
        axes: whose horizontal axis to mark.

    Returns:
        The axes.
    """
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.xaxis.minorticks_off()
    return axes
