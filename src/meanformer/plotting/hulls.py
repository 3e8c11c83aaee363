"""Convex hulls in the plane and in space, as outlines and shaded facets."""

from typing import Any

import numpy as np

from meanformer.plotting import style
from meanformer.plotting.token_paths import check_dimension, paths_of

FLAT = 1e-9  # of the extent of the points: below it they have none
ROUNDING = 10 * np.finfo(float).eps  # of the points: an extent below it is no extent
COPLANAR = 1e-7


def draw_hull(
    points: Any,
    axes: Any,
    *,
    color: str = style.BLUE,
    opacity: float = 0.16,
    vertices: bool = False,
    **options: Any,
) -> Any:
    """Draw the convex hull of tokens: a polygon in the plane, facets in space.

    Tokens on one line, or in one plane of space, give a segment or a polygon.

    Args:
        points: tokens as a cloud (those of weight zero are absent) or as rows.
        axes: where to draw; with `projection="3d"` for tokens of space.
        color: colour of facets and edges.
        opacity: opacity of the facets; 0 leaves the edges only.
        vertices: mark the vertices with dots.
        **options: passed to the collection of facets, such as `zorder`.

    Returns:
        The axes.
    """
    paths = paths_of(points)
    check_dimension(paths.dimension, 2, 3)
    style.check_opacity(opacity)
    style.check_axes(axes, paths.dimension)
    facets = hull_facets(paths.points[-1])
    if paths.dimension == 2:
        faces, edge = [(color, opacity)], (color, 0.8)
        defaults = {"linewidths": 1.2, "zorder": 1.5}
    else:
        faces = [(_lit(facet, color), opacity) for facet in facets]
        edge, defaults = (color, 0.75), {"linewidths": 0.9}
        if not axes.has_data():
            style.set_box(axes, paths.points[-1])
    style.add_polygons(axes, facets, faces, edge, autolim=True, **defaults | options)
    if vertices:
        corners = np.unique(np.concatenate(facets), axis=0)
        axes.scatter(*corners.T, s=16, color=color, zorder=options.get("zorder", 2.5))
    if paths.dimension == 2:
        axes.autoscale_view()
    return axes


def hull_facets(points: np.ndarray) -> list[np.ndarray]:
    """The facets of a convex hull, each as its vertices in order around it.

    In the plane the only facet is the polygon. Where the points have no volume there
    is one facet as well: a polygon, a segment (two vertices) or a point (one).

    Args:
        points: one row for each point, in the plane or in space.

    Returns:
        Arrays of shape (vertices, dimension).
    """
    points = np.asarray(points, float)
    middle = points.mean(axis=0)
    _, extents, directions = np.linalg.svd(points - middle, full_matrices=False)
    noise = ROUNDING * np.abs(points).max() * np.sqrt(len(points))
    rank = int((extents > max(FLAT * extents[0], noise)).sum())
    flat = (points - middle) @ directions[:rank].T / (extents[0] or 1.0)
    return [points[indices] for indices in _facets(flat)]


def _facets(flat: np.ndarray) -> list[np.ndarray]:
    """The vertices of each facet of points that have an extent in all directions."""
    from scipy.spatial import ConvexHull

    if flat.shape[1] == 0:
        return [np.array([0])]
    if flat.shape[1] == 1:
        return [np.array([flat.argmin(), flat.argmax()])]
    hull = ConvexHull(flat)
    if flat.shape[1] == 2:
        return [hull.vertices]
    # Triangles of one plane are joined into one facet.
    planes = hull.equations / [1, 1, 1, np.abs(flat).max()]
    facets, left = [], list(range(len(planes)))
    while left:
        gaps = np.abs(planes[left] - planes[left[0]]).max(axis=1)
        joined = [one for one, gap in zip(left, gaps, strict=True) if gap < COPLANAR]
        corners = np.unique(hull.simplices[joined])
        facets.append(corners[around(flat[corners], planes[left[0]][:3])])
        left = [one for one in left if one not in joined]
    return facets


def around(corners: np.ndarray, normal: np.ndarray) -> np.ndarray:
    """The order of the corners of a plane convex polygon of space, one by one."""
    spokes = corners - corners.mean(axis=0)
    first = spokes[np.linalg.norm(spokes, axis=1).argmax()]
    second = np.cross(normal, first)
    return np.argsort(np.arctan2(spokes @ second, spokes @ first))


def _lit(facet: np.ndarray, color: str) -> np.ndarray:
    """The colour of a facet in a light from above, the same on both of its sides."""
    from matplotlib.colors import to_rgb

    shade = 0.5
    if len(facet) > 2:
        normal = np.cross(facet[1] - facet[0], facet[2] - facet[0])
        light = np.array([0.48, -0.36, 0.8])
        shade = abs(normal @ light) / max(float(np.linalg.norm(normal)), 1e-300)
    return 1 - (1 - np.array(to_rgb(color))) * min(1.1 - 0.75 * shade, 1.0)
