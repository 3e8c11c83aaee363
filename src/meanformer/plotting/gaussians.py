"""Gaussians along depth: their ellipses, their eigenvalues, the cone they live in."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from meanformer.errors import check
from meanformer.flows import GaussianTrajectory
from meanformer.measures import Gaussian
from meanformer.plotting import style
from meanformer.plotting.curves import draw_slope
from meanformer.plotting.token_paths import check_dimension

# A guide lies so much below the smallest eigenvalue, which it would hide otherwise.
GUIDE_OFFSET = 3.0
WHOSE = "the Gaussian has dimension"


def draw_ellipse(
    gaussian: Gaussian,
    axes: Any,
    *,
    deviations: float = 1.0,
    color: str = style.INK,
    **options,
) -> Any:
    r"""Draw where a Gaussian of the plane is so many standard deviations from its mean.

    The curve $\{m + kS^{1/2}e : |e| = 1\}$, a segment where $S$ has rank one. It goes
    with the figures of tokens, over `draw_tokens` or `draw_paths`.

    Args:
        gaussian: a Gaussian of the plane.
        axes: where to draw.
        deviations: how many standard deviations, the $k$ above.
        color: colour of the curve.
        **options: passed to `Axes.plot`.

    Returns:
        The axes.
    """
    check_dimension(gaussian.dimension, 2, subject=WHOSE)
    curve = _ellipse(gaussian.mean(), gaussian.covariance(), deviations)
    axes.plot(*curve.T, color=color, **options)
    return axes


def draw_ellipses(
    trajectory: GaussianTrajectory,
    axes: Any,
    *,
    count: int = 9,
    deviations: float = 1.0,
    is_labelled: bool = True,
) -> Any:
    """Draw the ellipses of a Gaussian along depth, and the path of its mean.

    Args:
        trajectory: Gaussians of the plane along depth.
        axes: where to draw.
        count: how many of the saved depths, the first and the last included.
        deviations: the size of the ellipses, in standard deviations.
        is_labelled: add a colour bar with the depths.

    Returns:
        The axes.
    """
    means, depths = np.asarray(trajectory.means), np.asarray(trajectory.depths)
    check_dimension(means.shape[1], 2, subject=WHOSE)
    covariances = np.asarray(trajectory.covariances)
    chosen = np.unique(np.linspace(0, len(depths) - 1, count).round().astype(int))
    curves = [_ellipse(means[i], covariances[i], deviations) for i in chosen]
    options = {"cmap": style.depth_colours(), "linewidths": 1.6}
    lines = style.add_lines(axes, curves, autolim=True, **options)
    lines.set_array(depths[chosen])
    lines.set_clim(depths.min(), depths.max())
    axes.plot(*means.T, color=style.INK, linewidth=0.9)
    axes.plot(*means[-1], "o", color=style.INK, markersize=3)
    axes.autoscale_view()
    axes.set(aspect="equal", xlabel="$x_1$", ylabel="$x_2$")
    if is_labelled:
        axes.figure.colorbar(lines, ax=axes, label="depth $t$", shrink=0.8)
    return axes


def draw_eigenvalues(
    depths: Any,
    eigenvalues: Any,
    axes: Any,
    *,
    label: str | None = None,
    color: str = style.BLUE,
    slope: float | None = -1.0,
    **options,
) -> Any:
    """Draw eigenvalues against depth on doubly logarithmic axes.

    The line of a slope, below the smallest of them at the later depths, tells a decay
    like that power of depth from a limit. Depth zero and eigenvalues that are zero have
    no place on such axes.

    Args:
        depths: the depths, of shape (t,).
        eigenvalues: those of the covariances, of shape (t, d), such as
            `trajectory.statistics["eigenvalues"]`.
        axes: where to draw.
        label: name of the eigenvalues in the legend.
        color: their colour.
        slope: exponent of the dashed line; none is drawn for `None`.
        **options: passed to `Axes.plot`.

    Returns:
        The axes.
    """
    depths, values = np.asarray(depths, float), np.asarray(eigenvalues, float)
    check(
        values.ndim == 2 and depths.shape == values.shape[:1],
        f"eigenvalues have shape {values.shape} and depths {depths.shape}; they must "
        "be (t, d) and (t,).",
    )
    later = depths > 0
    depths, values = depths[later], np.sort(values[later], axis=1)
    shown = np.where(values > 0, values, np.nan)
    names = [label] + [None] * (values.shape[1] - 1)
    axes.plot(depths, shown, color=color, label=names, **options)
    axes.set(xscale="log", yscale="log")
    axes.set(xlabel="depth $t$", ylabel=r"eigenvalues of $S(t)$")
    if slope is not None and values[-1, 0] > 0:
        # The later part only: nothing has a slope before it has begun to decay.
        late = np.geomspace(np.sqrt(depths[0] * depths[-1]), depths[-1], 3)
        last = values[-1, 0] / GUIDE_OFFSET
        draw_slope(late, last, slope, axes)
        middle = late[1], last * (late[1] / late[-1]) ** slope
        below = {"textcoords": "offset points", "ha": "right", "va": "top"}
        name = f"slope ${slope:g}$"
        axes.annotate(name, middle, (-4, -4), color=style.GREY, **below)
    return axes


def draw_cone(
    paths: Sequence[Any],
    axes: Any,
    *,
    outcomes: Sequence[str] | None = None,
    height: float | None = None,
) -> Any:
    r"""Draw covariances of the plane as points of the cone they form.

    In the coordinates $(S_{11} - S_{22},\, 2S_{12},\, S_{11} + S_{22})$ the positive
    semi-definite matrices are a cone of revolution: rank one on its surface, multiples
    of the identity on its axis, zero at its tip. A disc marks the end of each path, a
    ring its beginning.

    Args:
        paths: covariances along depth, each of shape (t, 2, 2).
        axes: where to draw, with `projection="3d"`.
        outcomes: what becomes of each, in words; it sets the colour, and the legend.
        height: the largest trace shown; what is beyond is cut off. That of the largest
            covariance if left out.

    Returns:
        The axes.
    """
    style.check_axes(axes, 3)
    arrays = [np.asarray(path, float) for path in paths]
    for array in arrays:
        check(
            array.ndim == 3 and array.shape[1:] == (2, 2),
            f"a path has shape {array.shape}; covariances of the plane have (t, 2, 2).",
        )
    names = [""] * len(arrays) if outcomes is None else list(outcomes)
    check(
        len(names) == len(arrays),
        f"there are {len(names)} outcomes for {len(arrays)} paths.",
    )
    points = [_cone_coordinates(array) for array in arrays]
    top = max(float(p[:, 2].max()) for p in points) if height is None else height
    # Otherwise the surface would cover paths inside the cone.
    axes.computed_zorder = False
    _set_cone(axes, top)
    colours = dict(zip(dict.fromkeys(names), style.PALETTE, strict=False))
    for path, name in zip(points, names, strict=True):
        inside = _cut_off(path, top)
        label = None if name in axes.get_legend_handles_labels()[1] else name or None
        options = {"color": colours[name], "zorder": 3}
        axes.plot(*inside.T, label=label, **options)
        axes.plot(*inside[0], "o", markersize=4, markerfacecolor="white", **options)
        axes.plot(*inside[-1], "o", markersize=4, **options)
    if outcomes is not None:
        axes.legend(loc="upper left", bbox_to_anchor=(-0.1, 1.0))
    return axes


def _cone_coordinates(covariances: np.ndarray) -> np.ndarray:
    first, second = covariances[:, 0, 0], covariances[:, 1, 1]
    mixed = covariances[:, 0, 1] + covariances[:, 1, 0]
    return np.stack([first - second, mixed, first + second], axis=1)


def _cut_off(path: np.ndarray, top: float) -> np.ndarray:
    """Return a path up to where it first exceeds a height, which it ends on."""
    beyond = np.flatnonzero(path[:, 2] > top)
    if beyond.size == 0:
        return path
    first = f"a path starts at trace {path[0, 2]:.4g}"
    check(beyond[0] > 0, f"{first}; height is {top:.4g}.")
    last, first = path[beyond[0] - 1], path[beyond[0]]
    share = (top - last[2]) / (first[2] - last[2])
    return np.concatenate([path[: beyond[0]], [last + share * (first - last)]])


def _set_cone(axes: Any, top: float) -> None:
    """Draw the surface of the cone up to a height, and set the axes around it."""
    angles = np.linspace(0, 2 * np.pi, 61)
    circle = np.stack([np.cos(angles), np.sin(angles)])
    heights = np.linspace(0, top, 5)
    x, y = heights[None, :, None] * circle[:, None, :]
    z = np.broadcast_to(heights[:, None], x.shape)
    options = {"color": style.GREY, "alpha": 0.10, "linewidth": 0, "shade": False}
    axes.plot_surface(x, y, z, zorder=1, **options)
    thin = {"color": style.GREY, "linewidth": 0.5, "alpha": 0.6, "zorder": 2}
    for level in heights[1:]:
        axes.plot(*(level * circle), level, **thin)
    for index in range(0, 60, 5):
        tip = top * circle[:, index]
        axes.plot([0, tip[0]], [0, tip[1]], [0, top], **thin)
    axes.set(xlim=(-top, top), ylim=(-top, top), zlim=(0, top))
    axes.set(xlabel=r"$S_{11} - S_{22}$", ylabel=r"$2\,S_{12}$")
    axes.set(zlabel=r"$S_{11} + S_{22}$")
    axes.set_box_aspect((1, 1, 0.8), zoom=1.0)
    axes.grid(visible=False)
    style.remove_walls(axes)


def _ellipse(mean: Any, covariance: Any, deviations: float) -> np.ndarray:
    values, vectors = np.linalg.eigh(np.asarray(covariance, float))
    root = vectors * np.sqrt(np.maximum(values, 0))
    angles = np.linspace(0, 2 * np.pi, 129)
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return np.asarray(mean, float) + deviations * circle @ root.T
