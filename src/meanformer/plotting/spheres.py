"""Tokens on the sphere: seen from outside, and their density on a flat map."""

from typing import Any

import numpy as np

from meanformer.errors import as_integer, check
from meanformer.measures import TokenCloud
from meanformer.plotting import style
from meanformer.plotting import token_paths as tokens
from meanformer.plotting.token_paths import TokenPaths, check_dimension, paths_of

LARGEST_CONTRAST = 100.0
HIDDEN = 0.28  # opacity of what lies behind the sphere, relative to what is in front
FAR_FROM_ONE = 0.1


def draw_sphere(
    subject: Any,
    axes: Any,
    *,
    index: int = -1,
    tail: int = 12,
    view: tuple[float, float] = (18.0, -50.0),
    labels: Any = None,
) -> Any:
    """Draw tokens on the unit sphere, with tails that fade into the past.

    What lies on the hidden side is paler. The colour is that of the depth, from blue
    at the first to gold at the last, or that of the token's cluster.

    Args:
        subject: a trajectory; or a cloud or points, which have no tails.
        axes: where to draw, with `projection="3d"`.
        index: which of the saved depths.
        tail: how many saved depths before it the tails reach back.
        view: elevation and azimuth of the eye, in degrees.
        labels: the cluster of each token of positive weight; colours by depth if left
            out.

    Returns:
        The axes.
    """
    style.check_axes(axes, 3)
    paths = on_sphere(subject, 3)
    eye = _look(axes, view)
    _draw_globe(axes, eye)
    colours = tokens.token_colours(paths, index, labels)
    points, tails = paths.points[index], paths.tail(index, tail)
    sides = ((False, HIDDEN, 2), (True, 1.0, 5))
    for is_front, opacity, order in sides:
        options = {"opacity": opacity, "zorder": order}
        options["is_seen"] = lambda places, side=is_front: (places @ eye >= 0) == side
        tokens.draw_tails(tails, colours, axes, **options)
    for is_front, opacity, order in sides:
        mine = (points @ eye >= 0) == is_front
        options = {"c": colours[mine], "alpha": opacity, "zorder": order + 0.5}
        options |= {"mine": mine, "largest": 34}
        tokens.scatter_discs(points, paths.weights, axes, **options)
    return axes


def on_sphere(subject: Any, dimension: int) -> TokenPaths:
    """Tokens put exactly on the unit sphere; raise if they are far from it."""
    paths = paths_of(subject)
    check_dimension(paths.dimension, dimension)
    check(
        paths.off_sphere <= FAR_FROM_ONE,
        f"a token is {paths.off_sphere:.2g} away from the unit sphere; this figure is "
        "of tokens on it.",
    )
    return paths.rounded()


def _look(axes: Any, view: tuple[float, float]) -> np.ndarray:
    """Look at the sphere without perspective; return the direction of the eye."""
    elevation, azimuth = np.deg2rad(view)
    axes.view_init(*view)
    axes.set_proj_type("ortho")
    axes.computed_zorder = False
    axes.set(xlim=(-1, 1), ylim=(-1, 1), zlim=(-1, 1))
    axes.set_box_aspect((1, 1, 1), zoom=1.55)
    axes.set_axis_off()
    level = np.cos(elevation) * np.array([np.cos(azimuth), np.sin(azimuth), 0])
    return level + np.array([0, 0, np.sin(elevation)])


def _draw_globe(axes: Any, eye: np.ndarray) -> None:
    """A translucent ball: its outline, and a net of meridians and parallels."""
    turn = np.linspace(0, 2 * np.pi, 121)
    across = np.cross(eye, [0.0, 0.0, 1.0] if abs(eye[2]) < 0.9 else [1.0, 0.0, 0.0])
    across /= np.linalg.norm(across)
    outline = np.outer(np.cos(turn), across)
    outline += np.outer(np.sin(turn), np.cross(eye, across))
    inside, edge = [(style.BLUE, 0.05)], (style.GREY, 0.8)
    options = {"linewidths": 0.9, "zorder": 3, "autolim": False}
    style.add_polygons(axes, [outline], inside, edge, **options)
    for is_front, opacity, order in ((False, 0.13, 1), (True, 0.4, 4)):
        pieces = [p for curve in _net() for p in _seen(curve, eye, is_front)]
        options = {"colors": (style.GREY, opacity), "linewidths": 0.45}
        style.add_lines(axes, pieces, zorder=order, **options)


def _net() -> list[np.ndarray]:
    """Meridians and parallels, thirty degrees apart."""
    turn = np.linspace(0, 2 * np.pi, 73)
    across, along = np.cos(turn), np.sin(turn)
    meridians = [
        np.stack([across * np.cos(a), across * np.sin(a), along], axis=1)
        for a in np.deg2rad(np.arange(0, 180, 30))
    ]
    level = np.ones_like(turn)
    parallels = [
        np.stack([across * np.cos(a), along * np.cos(a), level * np.sin(a)], axis=1)
        for a in np.deg2rad(np.arange(-60, 90, 30))
    ]
    return meridians + parallels


def _seen(curve: np.ndarray, eye: np.ndarray, is_front: bool) -> list[np.ndarray]:
    """The parts of a curve on the side of the eye, or on the other."""
    mine = (curve @ eye >= 0) == is_front
    ends = np.flatnonzero(np.diff(mine)) + 1
    parts = np.split(np.arange(len(curve)), ends)
    # One point more, so that the parts of both sides meet.
    return [curve[part[0] : part[-1] + 2] for part in parts if mine[part[0]]]


def draw_sphere_density(cloud: TokenCloud, axes: Any, *, cells: int = 72) -> Any:
    """Draw the density of tokens on the unit sphere, relative to the uniform law.

    Args:
        cloud: tokens on the sphere in three dimensions.
        axes: where to draw, with `projection="mollweide"`.
        cells: cells along the equator; half as many from pole to pole, all of one area.

    Returns:
        The mesh, for a colour bar.
    """
    from matplotlib.colors import LogNorm

    paths = on_sphere(cloud, 3)
    cells = as_integer("cells", cells, least=2)
    x, y, z = paths.points[0].T
    longitudes = np.linspace(-np.pi, np.pi, cells + 1)
    heights = np.linspace(-1, 1, cells // 2 + 1)
    masses, _, _ = np.histogram2d(
        np.arctan2(y, x),
        np.clip(z, -1, 1),
        bins=(longitudes, heights),
        weights=paths.weights,
    )
    density = masses * masses.size
    mesh = axes.pcolormesh(
        longitudes,
        np.arcsin(heights),
        np.clip(density, 1 / LARGEST_CONTRAST, LARGEST_CONTRAST).T,
        norm=LogNorm(1 / LARGEST_CONTRAST, LARGEST_CONTRAST),
        cmap=style.density_colours(),
        rasterized=True,
    )
    axes.set(xticklabels=[], yticklabels=[])
    axes.grid(visible=False)
    return mesh
