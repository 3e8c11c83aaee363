"""Convex polytopes given by halfspaces: corners, volume, erosion."""

import equinox as eqx
import numpy as np
from jaxtyping import Bool, Float

from meanformer.errors import InvalidInput, as_number, check

# Of the size of a polytope: what is thinner has no volume, only rounding.
THIN = 1e-12
# A corner of a polygon closer to the last one than this share of the size is the same.
SAME = 1e-14


class Polytope(eqx.Module):
    r"""A bounded intersection of halfspaces.

    $$\{x : \langle a_k, x\rangle + b_k \le 0 \text{ for all } k\} .$$

    Attributes:
        halfspaces: the rows $(a_k, b_k)$, of shape (c, d + 1), as in `scipy.spatial`.
        frame: corners of a polytope that contains it; in the plane in their order
            around it, counter-clockwise.
    """

    halfspaces: Float[np.ndarray, "c e"]
    frame: Float[np.ndarray, "p d"]

    @property
    def dimension(self) -> int:
        """Dimension of the space around it."""
        return self.frame.shape[1]

    @property
    def size(self) -> float:
        """The largest distance of the frame from its mean."""
        return float(np.linalg.norm(self.frame - self.frame.mean(0), axis=1).max())

    @property
    def corners(self) -> Float[np.ndarray, "p d"]:
        """The corners, in the plane counter-clockwise; none if it has no volume.

        In the plane and on the line the frame is clipped by one halfspace after the
        other, exactly up to rounding; above, Qhull meets all of them.
        """
        if self.dimension == 1:
            return _interval(self.halfspaces, THIN * self.size)
        if self.dimension == 2:
            return _polygon(self.halfspaces, self.frame, self.size)
        return _corners_by_qhull(self.halfspaces, THIN * self.size)

    @property
    def volume(self) -> float:
        """Length, area or volume; zero if there is none."""
        return volume_of(self.corners)

    def contains(
        self, x: Float[np.ndarray, "m d"], *, tolerance: float = 1e-12
    ) -> Bool[np.ndarray, " m"]:
        """Whether points lie in it, or so close to it, relative to its size."""
        normals, offsets = self.halfspaces[:, :-1], self.halfspaces[:, -1]
        lengths = np.linalg.norm(normals, axis=1)
        # A condition without a direction holds everywhere or nowhere.
        slack = tolerance * np.where(lengths > 0, lengths * self.size, 1)
        heights = np.asarray(x, np.float64) @ normals.T + offsets[None, :]
        return np.asarray((heights <= slack[None, :]).all(axis=1))

    def eroded(self, distance: float) -> "Polytope":
        r"""Return the points whose ball of this radius lies in the polytope.

        Each halfspace moves inwards by the distance; one that touches the polytope in
        no facet moves too, and cuts off nothing more.
        """
        number = as_number("distance", distance)
        check(number >= 0, f"distance is {distance}; it must be zero or more.")
        rows = self.halfspaces.copy()
        rows[:, -1] += number * np.linalg.norm(rows[:, :-1], axis=1)
        return Polytope(rows, self.frame)


def hull_of(points: Float[np.ndarray, "n d"]) -> Polytope:
    """Return the convex hull of points, which must not lie in a hyperplane."""
    if points.shape[1] == 1:
        low, high = points.min(), points.max()
        check(low < high, _flat(points))
        return Polytope(
            np.array([[-1.0, low], [1.0, -high]]), np.array([[low], [high]])
        )
    from scipy.spatial import ConvexHull, QhullError

    try:
        hull = ConvexHull(points)
    except (QhullError, ValueError) as error:
        raise InvalidInput(_flat(points)) from error
    return Polytope(np.unique(hull.equations, axis=0), points[hull.vertices])


def volume_of(corners: Float[np.ndarray, "p d"]) -> float:
    """Return the volume of the hull of corners; of a polygon, given in order."""
    dimension = corners.shape[1]
    if len(corners) <= dimension:
        return 0.0
    if dimension == 1:
        return float(np.ptp(corners))
    if dimension == 2:
        # Seen from a corner, so that a small polygon far away keeps its digits.
        x, y = (corners - corners[0]).T
        return float(np.sum(x * np.roll(y, -1) - y * np.roll(x, -1)) / 2)
    from scipy.spatial import ConvexHull

    return float(ConvexHull(corners).volume)


def _flat(points: np.ndarray) -> str:
    count, dimension = points.shape
    return (
        f"the {count} points lie in a hyperplane of dimension {dimension - 1} or less "
        f"(to rounding); a hull with a volume needs {dimension + 1} points that do not."
    )


def _interval(halfspaces: np.ndarray, thin: float) -> np.ndarray:
    slopes, offsets = halfspaces.T
    low = np.max(-offsets[slopes < 0] / slopes[slopes < 0])
    high = np.min(-offsets[slopes > 0] / slopes[slopes > 0])
    is_empty = (offsets[slopes == 0] > 0).any() or high - low <= thin
    return np.empty((0, 1)) if is_empty else np.array([[low], [high]])


def _polygon(halfspaces: np.ndarray, frame: np.ndarray, size: float) -> np.ndarray:
    corners = frame
    for row in halfspaces:
        corners = _clipped(corners, row[:-1], row[-1])
        if len(corners) == 0:
            return corners
    corners = _distinct(corners, SAME * size)
    is_thin = volume_of(corners) <= THIN * size**2
    return np.empty((0, 2)) if is_thin else corners


def _clipped(corners: np.ndarray, normal: np.ndarray, offset: float) -> np.ndarray:
    """Return the part of a polygon in a half-plane, going around it once."""
    heights = corners @ normal + offset
    kept = []
    for index in range(len(corners)):
        before, after = corners[index - 1], corners[index]
        low, high = heights[index - 1], heights[index]
        if (low <= 0) != (high <= 0):
            kept.append(before + low / (low - high) * (after - before))
        if high <= 0:
            kept.append(after)
    return np.array(kept).reshape(-1, 2)


def _distinct(corners: np.ndarray, distance: float) -> np.ndarray:
    gaps = np.linalg.norm(corners - np.roll(corners, 1, axis=0), axis=1)
    return corners[gaps > distance]


def _corners_by_qhull(halfspaces: np.ndarray, thin: float) -> np.ndarray:
    from scipy.spatial import HalfspaceIntersection

    dimension = halfspaces.shape[1] - 1
    lengths = np.linalg.norm(halfspaces[:, :-1], axis=1)
    proper = halfspaces[lengths > 0]
    centre, radius = _inner_ball(proper, lengths[lengths > 0])
    is_empty = (halfspaces[lengths == 0, -1] > 0).any() or radius <= thin
    if is_empty:
        return np.empty((0, dimension))
    return HalfspaceIntersection(proper, centre).intersections


def _inner_ball(halfspaces: np.ndarray, lengths: np.ndarray) -> tuple:
    """Return centre and radius of a largest ball inside, by linear programming."""
    from scipy.optimize import linprog

    cost = np.append(np.zeros(halfspaces.shape[1] - 1), -1.0)
    rows = np.column_stack([halfspaces[:, :-1], lengths])
    # A negative radius tells how far from having a common point they are.
    found = linprog(cost, rows, -halfspaces[:, -1], bounds=(None, None))
    return found.x[:-1], found.x[-1]
