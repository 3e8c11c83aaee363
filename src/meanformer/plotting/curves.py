"""Named curves, rates of convergence, and marks of values and sizes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meanformer.plotting import style


def draw_curves(
    places: Any,
    curves: Mapping[str, Any],
    axes: Any,
    *,
    marks: str | Sequence[str] = "-",
    colours: Any = None,
    linewidth: float | None = None,
    legend: str | None = "best",
    **settings: Any,
) -> Any:
    """Draw curves over common places, label the axes and add the legend.

    Args:
        places: where the curves have their heights.
        curves: the heights of each, under its name in the legend.
        axes: where to draw.
        marks: a format of `Axes.plot` such as `"o-"`, for all or one for each.
        colours: a colour for all or one for each; `"depth"` goes from blue to gold,
            and by default they follow those that the axes have used.
        linewidth: width of all lines; that of our style by default.
        legend: where the legend stands; `None` for no legend.
        **settings: passed to `Axes.set`, such as `xlabel` and `yscale`.

    Returns:
        The axes.
    """
    count = len(curves)
    each_mark = [marks] * count if isinstance(marks, str) else marks
    if colours == "depth":
        colours = style.shades(count)
    elif colours is None or isinstance(colours, str):
        colours = [colours] * count
    for (name, heights), mark, colour in zip(
        curves.items(), each_mark, colours, strict=True
    ):
        axes.plot(places, heights, mark, color=colour, linewidth=linewidth, label=name)
    axes.set(**settings)
    if legend is not None:
        axes.legend(loc=legend)
    return axes


def mark_values(
    values: Any, axes: Any, *, axis: str = "x", label: str | None = None
) -> Any:
    """Mark values on an axis by dotted lines across the picture.

    Args:
        values: one value, or several.
        axes: where to draw.
        axis: on which axis they are, `"x"` or `"y"`.
        label: their common name in the legend; none by default.

    Returns:
        The axes.
    """
    draw = axes.axvline if axis == "x" else axes.axhline
    for value in np.ravel(values):
        draw(value, color=style.INK, linestyle=":", linewidth=1, label=label)
        label = None
    return axes


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
