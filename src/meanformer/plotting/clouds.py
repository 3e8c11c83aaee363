"""Tokens in the plane and in space: paths, clusters, hyperplanes, directions."""

from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np

from meanformer.attention import AbstractInContextMap
from meanformer.errors import check
from meanformer.flows import Trajectory
from meanformer.measures import TokenCloud
from meanformer.plotting import style
from meanformer.plotting import token_paths as tokens
from meanformer.plotting.hulls import around
from meanformer.plotting.token_paths import check_dimension, paths_of

# Arrows as long as the vectors that they show.
TRUE_TO_SCALE = {"angles": "xy", "scale_units": "xy", "scale": 1, "width": 0.009}


def draw_tokens(
    cloud: TokenCloud, axes: Any, *, color: str = style.INK, **options
) -> Any:
    """Draw tokens as discs whose area is their weight.

    Args:
        cloud: tokens in the plane.
        axes: where to draw.
        color: colour of the discs.
        **options: passed to `Axes.scatter`.

    Returns:
        The axes.
    """
    check_dimension(cloud.dimension, 2)
    sizes = tokens.disc_areas(np.asarray(cloud.weights), 90)
    axes.scatter(*np.asarray(cloud.points).T, s=sizes, color=color, zorder=3, **options)
    return axes


def draw_paths(trajectory: Trajectory, axes: Any, *, is_labelled: bool = True) -> Any:
    """Draw the tokens' paths in the plane, coloured by depth.

    Args:
        trajectory: tokens in the plane along depth.
        axes: where to draw.
        is_labelled: add a colour bar with the depths.

    Returns:
        The axes.
    """
    paths = paths_of(trajectory)
    check_dimension(paths.dimension, 2)
    bar = {"shrink": 0.8} if is_labelled else {}
    tokens.draw_coloured_paths(paths, axes, linewidth=1.6, largest=110, **bar)
    axes.autoscale_view()
    axes.set(aspect="equal", xlabel="$x_1$", ylabel="$x_2$")
    return axes


def draw_field(
    gamma: AbstractInContextMap, cloud: TokenCloud, axes: Any, *, resolution: int = 15
) -> Any:
    r"""Draw $x \mapsto \Gamma[\mu](x)$ on a grid, with the tokens and their moves.

    Args:
        gamma: a map of the plane.
        cloud: the context.
        axes: where to draw.
        resolution: arrows along each side of the grid.

    Returns:
        The axes.
    """
    check_dimension(cloud.dimension, 2)
    reach = 1.35 * float(cloud.radius())
    side = np.linspace(-reach, reach, resolution)
    grid = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    field = np.asarray(gamma(cloud, jnp.asarray(grid)))
    axes.quiver(*grid.T, *field.T, color=style.GREY, alpha=0.7, width=0.0035)
    moves = np.asarray(gamma(cloud, cloud.points, positions=cloud.positions))
    starts = np.asarray(cloud.points).T
    axes.quiver(*starts, *moves.T, color=style.ORANGE, zorder=4, **TRUE_TO_SCALE)
    draw_tokens(cloud, axes, color=style.BLUE)
    axes.set(aspect="equal", xlim=(-reach, reach), ylim=(-reach, reach))
    return axes


def draw_paths_3d(trajectory: Any, axes: Any, *, is_labelled: bool = True) -> Any:
    """Draw the tokens' paths in space, coloured by depth.

    Args:
        trajectory: tokens of space along depth; those of weight zero are absent.
        axes: where to draw, with `projection="3d"`.
        is_labelled: add a colour bar with the depths.

    Returns:
        The axes.
    """
    paths = paths_of(trajectory)
    check_dimension(paths.dimension, 3)
    style.check_axes(axes, 3)
    style.set_box(axes, paths.points.reshape(-1, 3))
    bar = {"shrink": 0.65, "pad": 0.1} if is_labelled else {}
    tokens.draw_coloured_paths(paths, axes, linewidth=1.3, largest=36, **bar)
    return axes


def draw_clusters(points: Any, labels: Any, axes: Any, *, legend: bool = False) -> Any:
    """Draw tokens of the plane or of space, each in the colour of its cluster.

    Args:
        points: tokens as a cloud or as rows.
        labels: the cluster of each token; -1 for those of none, which are grey.
        axes: where to draw; with `projection="3d"` for tokens of space.
        legend: add a legend that counts the tokens of each cluster.

    Returns:
        The axes.
    """
    paths, clusters = paths_of(points), np.asarray(labels)
    check_dimension(paths.dimension, 2, 3)
    style.check_axes(axes, paths.dimension)
    count = points.count if isinstance(points, TokenCloud) else len(paths.weights)
    check(
        clusters.shape == (count,),
        f"there are {clusters.size} labels for {count} tokens; give one for each.",
    )
    if isinstance(points, TokenCloud):
        clusters = clusters[np.asarray(points.weights) > 0]
    if paths.dimension == 3:
        style.set_box(axes, paths.points[-1])
    for label in np.unique(clusters):
        mine = clusters == label
        name = "no cluster" if label == tokens.UNCLUSTERED else f"cluster {label + 1}"
        options = {"mine": mine, "label": f"{name}: {sum(mine)}"}
        options["color"] = tokens.cluster_colours([label])[0]
        tokens.scatter_discs(paths.points[-1], paths.weights, axes, **options)
    if legend:
        axes.legend(loc="upper left")
    return axes


def draw_hyperplanes(
    normal: Any,
    offsets: Any,
    axes: Any,
    *,
    color: str = style.GREEN,
    opacity: float = 0.16,
    label: str | None = None,
) -> Any:
    r"""Draw the hyperplanes $\{x : \langle a, x\rangle = c\}$ inside the axes' limits.

    Lines in the plane, translucent planes in space. Draw the tokens first: the limits
    of the axes are kept, and a hyperplane that misses them is not drawn.

    Args:
        normal: the common normal $a$, of two or three entries, not zero.
        offsets: the values $c$, a number or several.
        axes: where to draw; with `projection="3d"` for planes.
        color: colour of all of them.
        opacity: opacity of the planes.
        label: their name in the legend; none by default.

    Returns:
        The axes.
    """
    normal = np.asarray(normal, float)
    check(
        normal.shape in ((2,), (3,))
        and bool(np.isfinite(normal).all() and np.any(normal != 0)),
        f"normal is {normal}; it must have two or three entries, finite and not all "
        "zero.",
    )
    style.check_axes(axes, len(normal))
    limits = {"xlim": axes.get_xlim(), "ylim": axes.get_ylim()}
    limits |= {"zlim": axes.get_zlim()} if len(normal) == 3 else {}
    box = np.sort(list(limits.values()), axis=1)
    sections = [cross_section(normal, c, box) for c in np.ravel(offsets)]
    for section in (one for one in sections if len(one) >= len(normal)):
        if len(normal) == 2:
            axes.plot(*section.T, "--", color=color, linewidth=1.3, label=label)
        else:
            inside, edge = [(color, opacity)], (color, 0.6)
            options = {"linewidths": 0.8, "label": label, "autolim": False}
            style.add_polygons(axes, [section], inside, edge, **options)
        label = None
    axes.set(**limits)
    return axes


def draw_direction(
    vector: Any,
    axes: Any,
    *,
    start: Any = None,
    color: str = style.ROSE,
    label: str | None = None,
) -> Any:
    """Draw a vector, such as a leading eigenvector, as an arrow with its name.

    Args:
        vector: where it points, two or three entries.
        axes: where to draw; with `projection="3d"` for three.
        start: its foot; the origin by default.
        color: its colour.
        label: text at its tip, such as an eigenvector's name.

    Returns:
        The axes.
    """
    vector = np.asarray(vector, float)
    foot = np.zeros(len(vector)) if start is None else np.asarray(start, float)
    check(
        vector.shape in ((2,), (3,)) and foot.shape == vector.shape,
        f"vector has shape {vector.shape} and start {foot.shape}; both must have two "
        "or three entries.",
    )
    style.check_axes(axes, len(vector))
    if len(vector) == 2:
        axes.quiver(*foot, *vector, color=color, zorder=5, **TRUE_TO_SCALE)
        axes.update_datalim([foot, foot + 1.15 * vector])
        axes.autoscale_view()
    else:
        axes.quiver(*foot, *vector, color=color, linewidth=2, arrow_length_ratio=0.12)
    if label is not None:
        axes.text(*(foot + 1.08 * vector), label, color=color, ha="center", zorder=6)
    return axes


def cross_section(normal: np.ndarray, offset: float, limits: np.ndarray) -> np.ndarray:
    """Corners of a hyperplane inside a box, in order; fewer if it misses the box.

    The limits are the low and the high end of each side of the box, (d, 2).
    """
    dimension, found = len(normal), []
    for axis, others in product(range(dimension), product((0, 1), repeat=dimension)):
        if others[axis] == 1:
            continue  # each edge once, from its low end
        start = limits[np.arange(dimension), others]
        rise = normal[axis] * np.diff(limits[axis])[0]
        share = (offset - normal @ start) / rise if rise else -1.0
        if -1e-12 <= share <= 1 + 1e-12:
            step = np.eye(dimension)[axis] * np.diff(limits[axis])[0]
            found.append(start + np.clip(share, 0, 1) * step)
    if not found:
        return np.empty((0, dimension))
    size = np.ptp(limits, axis=1).max()
    _, kept = np.unique(np.round(np.array(found) / size, 9), axis=0, return_index=True)
    corners = np.array(found)[kept]
    return corners[around(corners, normal)] if dimension == 3 else corners
