"""Cells of a hull, cones inside of them, and hardmax attention at work in the plane."""

from typing import Any

import numpy as np

from meanformer.errors import check
from meanformer.flows import HardmaxRun
from meanformer.geometry import Cells, Polytope
from meanformer.plotting import style
from meanformer.plotting.hulls import hull_facets
from meanformer.plotting.token_paths import check_dimension

# Names of vertices stand so far outside of the hull, as a share of its size.
NAME_OFFSET = 0.09
CYCLES = (7, 6, 5)


def draw_cells(
    cells: Cells,
    axes: Any,
    *,
    opacity: float = 0.45,
    color: str | None = None,
    is_labelled: bool | None = None,
) -> Any:
    """Draw the cells of a hull in the plane, its vertices, and the origin.

    A ring marks a vertex that lies in its own cell, and a cross in a ring one that does
    not: it moves, and the hull shrinks. Vertices inside the hull are small dots.

    Args:
        cells: cells in the plane.
        axes: where to draw.
        opacity: opacity of the cells.
        color: one colour for all cells; each its own by default.
        is_labelled: write the numbers of the vertices, from one on; by default if there
            are at most ten.

    Returns:
        The axes.
    """
    check_dimension(cells.dimension, 2, subject="the dimension is")
    style.check_opacity(opacity)
    for index, own in enumerate(cell_colours(cells)):
        options = {"color": color or own, "opacity": opacity, "linewidth": 0.6}
        draw_polytope(cells.cell(index), axes, **options)
    _draw_vertices(cells, axes)
    axes.plot(0, 0, "+", color=style.INK, markersize=7, markeredgewidth=1.2)
    if len(cells) <= 10 if is_labelled is None else is_labelled:
        _name_vertices(cells, axes)
    _bare(axes)
    return axes


def draw_polytope(
    polytope: Polytope,
    axes: Any,
    *,
    color: str = style.GREEN,
    opacity: float = 0.6,
    linewidth: float = 1.0,
    label: str | None = None,
) -> Any:
    """Draw a polygon, such as a cone where a vertex wins by a margin, or its erosion.

    Args:
        polytope: a polytope in the plane; nothing is drawn if it is empty.
        axes: where to draw.
        color: colour of the inside.
        opacity: opacity of the inside.
        linewidth: width of the outline; zero for none.
        label: its name in the legend.

    Returns:
        The axes.
    """
    check_dimension(polytope.dimension, 2, subject="the dimension is")
    corners = polytope.corners
    if len(corners) > 0:
        axes.fill(
            *corners.T,
            facecolor=(color, opacity),
            edgecolor=style.INK,
            linewidth=linewidth,
            label=label,
        )
    return axes


def draw_form(cells: Cells, axes: Any, *, resolution: int = 240) -> Any:
    r"""Draw the quadratic form $\tfrac12\langle Bx, x\rangle$ over the hull.

    Args:
        cells: the hull, in the plane, and the form.
        axes: where to draw.
        resolution: points along each side of the grid.

    Returns:
        The axes; a colour bar is added below.
    """
    from matplotlib.patches import Polygon

    check_dimension(cells.dimension, 2, subject="the dimension is")
    corners = cells.hull.corners
    sides = np.linspace(corners.min(0), corners.max(0), resolution).T
    grid = np.stack(np.meshgrid(*sides), axis=-1)
    values = _halved_form(cells, grid)
    inside = cells.hull.contains(grid.reshape(-1, 2)).reshape(values.shape)
    shown = np.append(values[inside], _halved_form(cells, corners))
    low, high = shown.min(), shown.max()
    levels = np.linspace(low, max(high, low + 1e-300), 25)
    values = np.clip(values, low, high)
    image = axes.contourf(*sides, values, levels, cmap=style.depth_colours())
    image.set_clip_path(Polygon(corners, transform=axes.transData))
    axes.fill(*corners.T, facecolor="none", edgecolor=style.INK, linewidth=1.0)
    axes.plot(0, 0, "+", color=style.INK, markersize=7, markeredgewidth=1.2)
    axes.plot(*cells.vertices.T, "x", color=style.INK, markersize=5)
    axes.figure.colorbar(
        image,
        ax=axes,
        orientation="horizontal",
        shrink=0.8,
        pad=0.03,
        label=r"$\frac{1}{2}\,\langle Bx, x\rangle$",
        ticks=[low, (low + high) / 2, high],
        format="%.2f",
    )
    _bare(axes)
    return axes


def draw_leaders(
    run: HardmaxRun,
    axes: Any,
    *,
    step: int = -1,
    color: str | None = None,
    has_tails: bool = True,
) -> Any:
    """Draw tokens of the plane at a step of hardmax attention, with their leaders.

    Leaders are stars, other tokens discs in the colour of the one they follow, or white
    if they are tied between several. A tail shows the way so far. The shaded polygon is
    the hull of the leaders.

    Args:
        run: steps of hardmax attention in the plane.
        axes: where to draw.
        step: the step to show; the last by default.
        color: one colour for all, over cells that have their own.
        has_tails: draw the ways so far.

    Returns:
        The axes.
    """
    count, _, dimension = run.points.shape
    check_dimension(dimension, 2, subject="the dimension is")
    allowed = f"the run has steps 0 to {count - 1}"
    check(-count <= step < count, f"step is {step}; {allowed}.")
    now = step % count
    points, leads = run.points[now], run.is_leader[now]
    present = np.asarray(run.start.weights) > 0
    edges = _colours_at(run, now, color)
    faces = np.where(run.is_tied[now], "white", edges)
    for token in np.flatnonzero(present & has_tails):
        axes.plot(*run.points[: now + 1, token].T, color=edges[token], linewidth=0.9)
    for chosen, marker, size in ((~leads & present, "o", 22), (leads, "*", 110)):
        axes.scatter(
            *points[chosen].T,
            s=size,
            marker=marker,
            c=faces[chosen],
            edgecolors=edges[chosen],
            linewidths=0.9,
            zorder=3 + (marker == "*"),
        )
    if color is None and leads.any():
        (corners,) = hull_facets(points[leads])
        axes.fill(*corners.T, facecolor=style.BLUE, alpha=0.12, lw=0, zorder=0)
    _bare(axes)
    return axes


def cell_colours(cells: Cells) -> list[str]:
    """Return a colour for each cell; cells next to each other have different ones."""
    angles = np.arctan2(*cells.vertices[:, :2].T[::-1]) if cells.dimension > 1 else None
    order = np.argsort(cells.vertices[:, 0] if angles is None else angles)
    cycle = next(length for length in CYCLES if len(cells) % length != 1)
    return [style.PALETTE[rank % cycle] for rank in np.argsort(order)]


def _colours_at(run: HardmaxRun, index: int, color: str | None) -> np.ndarray:
    """The colour of whom each token follows: one for all that are ever followed."""
    if color is not None:
        return np.full(run.followed[index].shape, color)
    ever = np.unique(run.followed[run.followed >= 0])
    rank = np.searchsorted(ever, run.followed[index]) % (len(style.PALETTE) - 1)
    return np.where(run.is_tied[index], style.INK, np.array(style.PALETTE)[rank])


def _draw_vertices(cells: Cells, axes: Any) -> None:
    at_corner = _at_corner(cells)
    options = {"s": 34, "facecolors": "white", "edgecolors": style.INK, "zorder": 3}
    axes.scatter(*cells.vertices[at_corner].T, linewidths=1.0, **options)
    leaves = cells.vertices[at_corner & ~cells.keeps_vertex].T
    axes.scatter(*leaves, s=20, marker="x", color=style.INK, linewidths=1, zorder=4)
    axes.scatter(*cells.vertices[~at_corner].T, s=8, color=style.INK, zorder=3)


def _halved_form(cells: Cells, x: np.ndarray) -> np.ndarray:
    return np.einsum("...i,ij,...j->...", x, cells.form, x) / 2


def _at_corner(cells: Cells) -> np.ndarray:
    corners = cells.hull.corners
    gaps = np.linalg.norm(cells.vertices[:, None] - corners[None], axis=2).min(axis=1)
    return gaps <= 1e-12 * cells.hull.size


def _name_vertices(cells: Cells, axes: Any) -> None:
    middle, size = cells.hull.corners.mean(0), cells.hull.size
    for index in np.flatnonzero(_at_corner(cells)):
        vertex = cells.vertices[index]
        away = (vertex - middle) / np.linalg.norm(vertex - middle)
        place = vertex + NAME_OFFSET * size * away
        axes.text(*place, f"$v_{{{index + 1}}}$", ha="center", va="center")


def _bare(axes: Any) -> None:
    """Equal scales; neither ticks nor frame, since only the shape is to be seen."""
    axes.set(aspect="equal", xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.use_sticky_edges = False
    axes.margins(0.06)
    axes.autoscale_view()
