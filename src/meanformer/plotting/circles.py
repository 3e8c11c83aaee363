"""Tokens on the circle: where they are, where they were, their angles along depth."""

from typing import Any

import numpy as np

from meanformer.plotting import style
from meanformer.plotting.discs import (
    add_lines,
    draw_tails,
    scatter_discs,
    token_colours,
)
from meanformer.plotting.spheres import on_sphere
from meanformer.plotting.token_paths import paths_of

INWARD = 0.3  # how far the end of a tail leans towards the centre


def draw_circle(
    subject: Any,
    axes: Any,
    *,
    index: int = -1,
    tail: int = 12,
    labels: Any = None,
) -> Any:
    """Draw tokens on the unit circle, with tails that spiral inwards into the past.

    Args:
        subject: a trajectory; or a cloud or points, which have no tails.
        axes: where to draw.
        index: which of the saved depths.
        tail: how many saved depths before it the tails reach back.
        labels: the cluster of each token of positive weight; colours by depth if left
            out.

    Returns:
        The axes.
    """
    paths = on_sphere(paths_of(subject), 2)
    turn = np.linspace(0, 2 * np.pi, 181)
    outline = {"color": style.GREY, "linewidth": 0.9, "alpha": 0.7, "zorder": 1}
    axes.plot(np.cos(turn), np.sin(turn), **outline)
    colours = token_colours(paths, index, labels)
    tails = paths.tail(index, tail)
    age = np.arange(len(tails))[::-1] / max(tail, 1)
    leaning = tails * (1 - INWARD * age)[:, None, None]
    draw_tails(leaning, colours, axes)
    scatter_discs(paths.points[index], paths.weights, axes, c=colours, largest=44)
    axes.set(aspect="equal", xlim=(-1.12, 1.12), ylim=(-1.12, 1.12))
    axes.set_axis_off()
    return axes


def draw_angles(trajectory: Any, axes: Any, *, labels: Any = None) -> Any:
    """Draw the angles of tokens on the circle against depth, without jumps.

    Args:
        trajectory: tokens on the unit circle along depth.
        axes: where to draw; make its depth logarithmic with `xscale="log"` if need be.
        labels: the cluster of each token of positive weight; a colour by the angle at
            the first depth if left out.

    Returns:
        The axes.
    """
    paths = on_sphere(paths_of(trajectory), 2)
    angles = np.arctan2(paths.points[..., 1], paths.points[..., 0])
    angles = np.unwrap(angles % (2 * np.pi), axis=0)
    lines = [np.stack([paths.depths, one], axis=1) for one in angles.T]
    if labels is None:
        colours = style.depth_colours()(angles[0] / (2 * np.pi))
    else:
        colours = token_colours(paths, -1, labels)
    widths = 0.7 + 1.1 * paths.weights / paths.weights.max()
    add_lines(axes, lines, autolim=True, colors=colours, linewidths=widths)
    axes.autoscale_view()
    quarter = np.arange(np.ceil(2 * angles.min() / np.pi), 2 * angles.max() / np.pi + 1)
    axes.set_yticks(quarter * np.pi / 2, [_multiple_of_pi(k) for k in quarter])
    axes.set(xlabel="depth $t$", ylabel="angle")
    return axes


def _multiple_of_pi(halves: float) -> str:
    """So many halves of pi, as a formula."""
    count = int(halves)
    if count == 0:
        return "$0$"
    sign, size = "-" * (count < 0), abs(count)
    over, top = ("/2", size) if size % 2 else ("", size // 2)
    return rf"${sign}{'' if top == 1 else top}\pi{over}$"
