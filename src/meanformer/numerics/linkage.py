"""Groups of points by single linkage: shortest trees and chains of short steps.

On the host, in NumPy: how many groups there are depends on the values. Points may
coincide, which tools for sparse graphs take for the absence of an edge.
"""

from collections.abc import Callable, Iterator

import numpy as np

from meanformer.numerics.arrays import norms_of

PAIRS_AT_ONCE = 2_000_000
# Cells of a grid are numbered by integers, which end near 2^63.
MOST_CELLS = 2.0**62


def scale_of(points: np.ndarray) -> float:
    """Return a power of two near the range of the points, to divide them by."""
    ranges = points.max(axis=0, initial=0) - points.min(axis=0, initial=0)
    return float(np.ldexp(1.0, np.clip(np.frexp(ranges.max())[1], -1000, 1000)))


def spanning_edges(points: np.ndarray) -> np.ndarray:
    """Return the edges of a shortest tree through all points, two indices per row.

    By the algorithm of Prim on squares of differences: $O(n^2 d)$ time, $O(nd)$ memory.
    """
    # The squares of very large or very small differences have no place in floats.
    points = points / scale_of(points)
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


def close_components(
    points: np.ndarray,
    distance: float,
    is_step: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    r"""Label the points that chains of steps no longer than a distance connect.

    The same groups as cutting the shortest tree, without the tree. Points in one cell
    of a grid, of diameter `distance`, belong together; two cells belong together if
    their first points are close, and otherwise if any two points are.

    Args:
        points: the points, one per row.
        distance: the longest step.
        is_step: decides, row by row, whether two points are a step apart, where
            rounding matters; by default from their distance.

    Returns:
        One number from zero on for each point. Cost: memory $O(nd)$ and two million
        pairs; time $O(n \log n)$, times the number of cells within three steps of one,
        so that it is at most $O(n^2 d)$ plus one search tree for each cell.
    """
    if distance == 0:
        return _equal_rows(points)[1]
    is_step = is_step or _within(distance)
    scale = scale_of(points)
    scaled, reach = points / scale, distance / scale
    firsts, cell_of = _cells(scaled, reach)
    order = np.argsort(cell_of, kind="stable")
    members = np.split(order, np.cumsum(np.bincount(cell_of))[:-1])
    labels = np.arange(len(firsts))
    for one, other in _near(scaled[firsts], scaled[firsts], reach):
        is_open = labels[one] != labels[other]
        one, other = one[is_open], other[is_open]
        is_close = is_step(points[firsts[one]], points[firsts[other]])
        labels = _joined(labels, one[is_close], other[is_close])
    crowded = np.flatnonzero(np.bincount(cell_of) > 1)
    # Points of two cells are a step apart only if their first points are within three.
    for row, other in _near(scaled[firsts[crowded]], scaled[firsts], 3 * reach):
        one = crowded[row]
        is_open = labels[one] != labels[other]
        links = _links(scaled, points, members, one[is_open], other[is_open], is_step)
        labels = _joined(labels, *links)
    return labels[cell_of]


def _within(distance: float) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    return lambda first, second: norms_of(first - second) <= distance


def _equal_rows(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first of each set of equal rows, and the number of the set."""
    _, firsts, sets = np.unique(
        points + 0.0, axis=0, return_index=True, return_inverse=True
    )
    return firsts, sets.ravel()


def _cells(points: np.ndarray, distance: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the first point of each cell of a grid, and the cell of each point."""
    # A little smaller, so that rounding does not make a cell too wide.
    side = distance / np.sqrt(points.shape[1]) * (1 - 1e-9)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        cells = np.floor((points - points.min(axis=0)) / side)
    if not (cells < MOST_CELLS).all():
        return _equal_rows(points)
    return _equal_rows(cells)


def _near(
    first: np.ndarray, second: np.ndarray, radius: float
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the indices of all pairs within a radius, and a few just beyond."""
    from scipy.spatial import KDTree

    if len(first) == 0:
        return
    radius, tree = radius * (1 + 1e-9), KDTree(second)
    counts = np.cumsum(tree.query_ball_point(first, radius, return_length=True))
    start = 0
    while start < len(first):
        before = counts[start - 1] if start else 0
        stop = int(np.searchsorted(counts, before + PAIRS_AT_ONCE, side="right"))
        stop = max(stop, start + 1)
        found = KDTree(first[start:stop]).sparse_distance_matrix(
            tree, radius, output_type="ndarray"
        )
        yield found["i"] + start, found["j"]
        start = stop


def _links(
    scaled: np.ndarray,
    points: np.ndarray,
    members: list[np.ndarray],
    one: np.ndarray,
    other: np.ndarray,
    is_step: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs of cells, among those given, of which two points are close."""
    from scipy.spatial import KDTree

    is_linked = np.zeros(len(one), bool)
    order = np.argsort(one, kind="stable")
    for group in np.split(order, np.flatnonzero(np.diff(one[order])) + 1):
        if len(group) == 0:
            continue
        mine = members[one[group[0]]]
        theirs = [members[cell] for cell in other[group]]
        joint = np.concatenate(theirs)
        nearest = mine[KDTree(scaled[mine]).query(scaled[joint])[1]]
        is_close = is_step(points[nearest], points[joint])
        owners = np.repeat(group, [len(cell) for cell in theirs])
        is_linked[owners[is_close]] = True
    return one[is_linked], other[is_linked]


def _joined(labels: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the labels when the groups of some pairs are joined."""
    if len(one) == 0:
        return labels
    edges = np.stack([labels[one], labels[other]], axis=1)
    return components(int(labels.max()) + 1, edges)[labels]
