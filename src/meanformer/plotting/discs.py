"""Tokens as discs with fading tails, and the colours of clusters and depths."""

from typing import Any

import numpy as np

from meanformer.errors import check
from meanformer.plotting import style
from meanformer.plotting.token_paths import TokenPaths

FAINTEST = 0.05  # opacity at the end of a tail
UNCLUSTERED = -1


def cluster_colours(labels: Any) -> list[str]:
    """A colour for each label, the same for the same label; grey for -1."""
    colours = style.PALETTE[:-1]
    return [
        style.GREY if label == UNCLUSTERED else colours[int(label) % len(colours)]
        for label in labels
    ]


def token_colours(paths: TokenPaths, index: int, labels: Any) -> np.ndarray:
    """A colour for each token: that of its cluster, or from blue to gold by depth."""
    from matplotlib.colors import to_rgb

    count = len(paths.weights)
    if labels is None:
        return np.tile(style.depth_colours()(paths.share(index))[:3], (count, 1))
    check(
        len(labels) == count,
        f"there are {len(labels)} labels for {count} tokens of positive weight; give "
        "one for each.",
    )
    return np.array([to_rgb(colour) for colour in cluster_colours(labels)])


def disc_areas(weights: np.ndarray, largest: float) -> np.ndarray:
    """Areas of discs in proportion to masses."""
    return largest * weights / weights.max()


def scatter_discs(
    points: np.ndarray,
    weights: np.ndarray,
    axes: Any,
    *,
    largest: float = 36.0,
    **options: Any,
) -> None:
    """Draw discs whose area is their weight, in the plane or in space."""
    flat = {"depthshade": False} if points.shape[1] == 3 else {}
    areas = disc_areas(weights, largest)
    defaults = {"zorder": 3, "linewidths": 0}
    axes.scatter(*points.T, s=areas, **defaults | flat | options)


def add_lines(axes: Any, pieces: Any, *, autolim: bool = False, **options: Any) -> Any:
    """Add line segments of the plane or of space to axes; return their collection."""
    from matplotlib.collections import LineCollection
    from mpl_toolkits.mplot3d.art3d import Line3DCollection

    kind = Line3DCollection if axes.name == "3d" else LineCollection
    lines = kind(pieces, **options)
    axes.add_collection(lines, autolim=autolim)
    return lines


def draw_tails(
    tails: np.ndarray,
    colours: np.ndarray,
    axes: Any,
    *,
    widest: float = 1.6,
    is_seen: Any = None,
    opacity: float = 1.0,
    **options: Any,
) -> None:
    """Draw where tokens come from, the fainter and thinner the longer ago.

    Args:
        tails: the tokens at some depths up to now, `(s, n, d)`.
        colours: a colour for each token, `(n, 3)`.
        axes: where to draw.
        widest: what is added to the least width at the near end.
        is_seen: which segments to draw, told by their middles; all if left out.
        opacity: opacity of the near end.
        **options: passed to the collection of segments.
    """
    stages, count, dimension = tails.shape
    pieces = np.stack([tails[:-1], tails[1:]], axis=2).reshape(-1, 2, dimension)
    youth = np.repeat(np.arange(1, stages) / max(stages - 1, 1), count)
    fading = opacity * (FAINTEST + (1 - FAINTEST) * youth**1.5)
    shades = np.column_stack([np.tile(colours, (stages - 1, 1)), fading])
    mine = slice(None) if is_seen is None else is_seen(pieces.mean(axis=1))
    widths = 0.5 + widest * youth[mine]
    add_lines(axes, pieces[mine], colors=shades[mine], linewidths=widths, **options)


def draw_coloured_paths(
    paths: TokenPaths, axes: Any, *, linewidth: float, largest: float, **bar: Any
) -> None:
    """Draw paths in the colours of depth, with discs at both ends.

    Args:
        paths: tokens along depth.
        axes: where to draw.
        linewidth: width of the paths.
        largest: area of the largest disc.
        **bar: options of a colour bar with the depths; none without them.
    """
    points, depths = paths.points, paths.depths
    pieces = np.stack([points[:-1], points[1:]], axis=2)
    lines = add_lines(
        axes,
        pieces.reshape(-1, 2, paths.dimension),
        autolim=paths.dimension == 2,
        cmap=style.depth_colours(),
        linewidths=linewidth,
    )
    lines.set_array(np.repeat((depths[:-1] + depths[1:]) / 2, points.shape[1]))
    for index, color in ((0, style.BLUE), (-1, style.GOLD)):
        scatter_discs(points[index], paths.weights, axes, color=color, largest=largest)
    if bar:
        axes.figure.colorbar(lines, ax=axes, label="depth $t$", **bar)
