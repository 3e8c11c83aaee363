"""Convex polytopes given by halfspaces: corners, volume, erosion."""

import math
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Bool, Float

from meanformer.errors import InvalidInput, Overflow, as_doubles, as_number, check
from meanformer.numerics.arrays import norms_of
from meanformer.typing import ArrayLike

# Of the size of a polytope: what is thinner has no volume, only rounding.
THIN = 1e-12
# A corner of a polygon closer to the last one than this share of the size is the same.
SAME = 1e-14
# In units of the frame no halfspace so far away cuts off anything, or leaves anything.
FAR_AWAY = 100.0


class Polytope(eqx.Module):
    r"""A bounded intersection of halfspaces.

    $$\{x : \langle a_k, x\rangle + b_k \le 0 \text{ for all } k\} .$$

    Units do not matter: all is computed for the frame moved and scaled to size one.

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
        centre, unit = unit_of(self.frame)
        points = (self.frame - centre) / unit
        return unit * float(norms_of(points - points.mean(0)).max())

    @property
    def corners(self) -> Float[np.ndarray, "p d"]:
        """The corners, in the plane counter-clockwise; none if it has no volume.

        In the plane and on the line the frame is clipped by one halfspace after the
        other, exactly up to rounding; above, Qhull meets all of them.
        """
        centre, unit = unit_of(self.frame)
        return centre + unit * self._unit_corners()

    @property
    def volume(self) -> float:
        """Length, area or volume; zero if there is none."""
        _, unit = unit_of(self.frame)
        volume = volume_of(self._unit_corners())
        exponent = self.dimension * (math.frexp(unit)[1] - 1)
        try:
            return math.ldexp(volume, exponent)
        except OverflowError:
            digits = math.log10(volume) + exponent * math.log10(2)
            raise Overflow(
                f"the volume is about 1e{digits:.0f}, too large for a number; give the "
                "points in a larger unit."
            ) from None

    @property
    def is_empty(self) -> bool:
        """Whether it has no volume, rather than one that is rounded to zero."""
        return len(self._unit_corners()) == 0

    def contains(
        self, x: ArrayLike, *, tolerance: float = 1e-12
    ) -> Bool[np.ndarray, " m"]:
        """Whether points lie in it, or so close to it, relative to its size.

        Args:
            x: points, of shape (m, d).
            tolerance: the distance allowed, in units of the size of the frame.
        """
        points = as_points("x", x, self.dimension)
        centre, unit = unit_of(self.frame)
        rows = self._unit_halfspaces()
        with np.errstate(over="ignore", invalid="ignore"):  # far outside
            heights = (points - centre) / unit @ rows[:, :-1].T + rows[None, :, -1]
        return np.asarray((heights <= tolerance).all(axis=1))

    def eroded(self, distance: float) -> "Polytope":
        r"""Return the points whose ball of this radius lies in the polytope.

        Each halfspace moves inwards by the distance; one that touches the polytope in
        no facet moves too, and cuts off nothing more.
        """
        allowed = "zero or more, and finite"
        number = as_number("distance", distance, allowed, least=0, below=np.inf)
        rows = self.halfspaces.copy()
        rows[:, -1] += number * norms_of(rows[:, :-1])
        return Polytope(rows, self.frame)

    def _unit_halfspaces(self) -> np.ndarray:
        """The halfspaces where the frame has size one, their normals of length one."""
        centre, unit = unit_of(self.frame)
        lengths = norms_of(self.halfspaces[:, :-1])
        with np.errstate(over="ignore"):
            # A condition without a direction holds everywhere or nowhere.
            rows = self.halfspaces / np.where(lengths > 0, lengths, 1)[:, None]
            rows[:, -1] = (rows[:, :-1] @ centre + rows[:, -1]) / unit
        rows[:, -1] = np.clip(rows[:, -1], -FAR_AWAY, FAR_AWAY)
        return rows

    def _unit_corners(self) -> np.ndarray:
        centre, unit = unit_of(self.frame)
        rows = self._unit_halfspaces()
        if self.dimension == 1:
            return _interval(rows)
        if self.dimension == 2:
            return _polygon(rows, (self.frame - centre) / unit)
        return _corners_by_qhull(rows)


def hull_of(points: Float[np.ndarray, "n d"]) -> Polytope:
    """Return the convex hull of points, which must not lie in a hyperplane."""
    check(points.size > 0, f"the points have shape {points.shape}; there are none.")
    if points.shape[1] == 1:
        low, high = points.min(), points.max()
        check(low < high, _flat(points))
        return Polytope(
            np.array([[-1.0, low], [1.0, -high]]), np.array([[low], [high]])
        )
    from scipy.spatial import ConvexHull, QhullError

    centre, unit = unit_of(points)
    try:
        hull = ConvexHull((points - centre) / unit)
    except (QhullError, ValueError) as error:
        raise InvalidInput(_flat(points)) from error
    rows = np.unique(hull.equations, axis=0)
    rows[:, -1] = unit * rows[:, -1] - rows[:, :-1] @ centre
    return Polytope(rows, points[hull.vertices])


def unit_of(points: Float[np.ndarray, "n d"]) -> tuple[np.ndarray, float]:
    """Return a centre of points and, as a power of two, how far they reach from it."""
    centre = points.min(axis=0) / 2 + points.max(axis=0) / 2
    reach = float(np.abs(points - centre).max())
    return centre, math.ldexp(1.0, math.frexp(reach)[1] - 1) if reach > 0 else 1.0


def as_points(name: str, value: Any, dimension: int) -> Float[np.ndarray, "m d"]:
    """Return points of this dimension in double precision, or raise."""
    points = as_doubles(name, value)
    check(
        points.ndim == 2 and points.shape[1] == dimension,
        f"{name} has shape {points.shape}; it must be (any, {dimension}), one row for "
        "each point.",
    )
    return points


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


def _interval(halfspaces: np.ndarray) -> np.ndarray:
    slopes, offsets = halfspaces.T
    low = np.max(-offsets[slopes < 0] / slopes[slopes < 0])
    high = np.min(-offsets[slopes > 0] / slopes[slopes > 0])
    is_empty = (offsets[slopes == 0] > 0).any() or high - low <= THIN
    return np.empty((0, 1)) if is_empty else np.array([[low], [high]])


def _polygon(halfspaces: np.ndarray, frame: np.ndarray) -> np.ndarray:
    corners = frame
    for row in halfspaces:
        corners = _clipped(corners, row[:-1], row[-1])
        if len(corners) == 0:
            return corners
    gaps = np.linalg.norm(corners - np.roll(corners, 1, axis=0), axis=1)
    corners = corners[gaps > SAME]
    return np.empty((0, 2)) if volume_of(corners) <= THIN else corners


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


def _corners_by_qhull(halfspaces: np.ndarray) -> np.ndarray:
    from scipy.spatial import HalfspaceIntersection

    is_proper = (halfspaces[:, :-1] != 0).any(axis=1)
    proper = halfspaces[is_proper]
    centre = _inner_point(proper)
    radius = -(proper[:, :-1] @ centre + proper[:, -1]).max()
    if (halfspaces[~is_proper, -1] > 0).any() or radius <= THIN:
        return np.empty((0, len(centre)))
    return HalfspaceIntersection(proper, centre).intersections


def _inner_point(halfspaces: np.ndarray) -> np.ndarray:
    """Return the centre of a largest ball inside, by linear programming.

    The normals have length one. A negative radius tells how far from having a common
    point the halfspaces are.
    """
    from scipy.optimize import linprog

    cost = np.append(np.zeros(halfspaces.shape[1] - 1), -1.0)
    rows = np.column_stack([halfspaces[:, :-1], np.ones(len(halfspaces))])
    found = linprog(cost, rows, -halfspaces[:, -1], bounds=(None, None))
    check(
        found.success,
        "the halfspaces do not bound a polytope: the linear program for a largest ball "
        f"inside has no solution ({found.message.rstrip('.')}).",
    )
    return found.x[:-1]
