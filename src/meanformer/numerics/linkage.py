"""Groups of points by single linkage: shortest trees and chains of short steps.

On the host, in NumPy: how many groups there are depends on the values. Points may
coincide, which tools for sparse graphs take for the absence of an edge.
"""

import jax.numpy as jnp
import numpy as np

from meanformer.numerics.nearest import chain_labels

# Coordinates up to which cells of a grid are few enough to be of use.
GRID_DIMENSION = 6


def spanning_edges(points: np.ndarray) -> np.ndarray:
    """Return the edges of a shortest tree through all points, two indices per row.

    By the algorithm of Prim on squares of differences: $O(n^2 d)$ time, $O(nd)$ memory.
    """
    count = len(points)
    nearest = np.full(count, np.inf)
    anchors, edges = np.zeros(count, int), np.empty((count - 1, 2), int)
    outside, newest = np.ones(count, bool), 0
    for edge in edges:
        outside[newest] = False
        squares = np.sum((points - points[newest]) ** 2, axis=1)
        is_closer = outside & (squares < nearest)
        nearest[is_closer], anchors[is_closer] = squares[is_closer], newest
        newest = int(np.argmin(np.where(outside, nearest, np.inf)))
        edge[:] = anchors[newest], newest
    return edges


def line_edges(places: np.ndarray) -> np.ndarray:
    r"""Return the edges between neighbours on the line; $O(n \log n)$ time."""
    return _path(np.argsort(places, kind="stable"))


def circle_edges(angles: np.ndarray) -> np.ndarray:
    """Return the edges between neighbours on the circle, the longest one left out."""
    order = np.argsort(angles, kind="stable")
    gaps = np.diff(angles[order], append=angles[order[0]] + 2 * np.pi)
    return _path(np.roll(order, -1 - int(gaps.argmax())))


def _path(order: np.ndarray) -> np.ndarray:
    """Return the edges from each index of a list to the next."""
    return np.stack([order[:-1], order[1:]], axis=1)


def components(count: int, edges: np.ndarray) -> np.ndarray:
    """Label the points that edges connect, by numbers from zero on."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    links = np.ones(len(edges), bool), (edges[:, 0], edges[:, 1])
    graph = coo_array(links, shape=(count, count))
    return connected_components(graph, directed=False)[1]


def close_components(points: np.ndarray, distance: float) -> np.ndarray:
    r"""Label the points that chains of steps no longer than a distance connect.

    The same groups as cutting the shortest tree, without the tree. Points in one cell
    of a grid, of diameter `distance`, belong together; two cells belong together if
    their first points are close, and otherwise if any two points are. In more than six
    dimensions all pairs are looked at.

    Cost: $O(n \log n)$ time and $O(n)$ memory, times the cells near a cell; beyond six
    dimensions $O(n^2 d)$ time for each link of the longest chain.
    """
    if distance == 0:
        return np.unique(points, axis=0, return_inverse=True)[1].ravel()
    if points.shape[1] > GRID_DIMENSION:
        present = jnp.ones(len(points), bool)
        found = chain_labels(jnp.asarray(points), present, distance)
        return np.unique(np.asarray(found), return_inverse=True)[1]
    # A little smaller, so that rounding does not make a cell too wide.
    side = distance / np.sqrt(points.shape[1]) * (1 - 1e-9)
    cells = np.floor((points - points.min(axis=0)) / side).astype(np.int64)
    _, firsts, cell_of = np.unique(
        cells, axis=0, return_index=True, return_inverse=True
    )
    labels = _linked_cells(points, firsts, cell_of.ravel(), distance)
    return labels[cell_of.ravel()]


def _linked_cells(
    points: np.ndarray, firsts: np.ndarray, cell_of: np.ndarray, distance: float
) -> np.ndarray:
    """Label the cells by what they are linked to, directly or through others."""
    from scipy.spatial import KDTree

    # Points of two cells are this close only if their first points are three times so.
    near = KDTree(points[firsts]).query_pairs(3 * distance, output_type="ndarray")
    steps = points[firsts[near[:, 0]]] - points[firsts[near[:, 1]]]
    is_close = np.sum(steps**2, axis=1) <= distance**2
    links = [near[is_close]]
    labels = components(len(firsts), near[is_close])
    open_pairs = near[labels[near[:, 0]] != labels[near[:, 1]]]
    members = np.split(np.argsort(cell_of, kind="stable"), _ends(cell_of))
    for first, second in open_pairs:
        if labels[first] == labels[second]:
            continue
        reach = KDTree(points[members[first]]).query(points[members[second]])[0]
        if reach.min() <= distance:
            links.append(np.array([[first, second]]))
            labels = np.where(labels == labels[second], labels[first], labels)
    return components(len(firsts), np.concatenate(links))


def _ends(cell_of: np.ndarray) -> np.ndarray:
    """Return where, in the order of cells, each but the last one ends."""
    return np.cumsum(np.bincount(cell_of))[:-1]
