"""Cells of a hull: where which vertex has the largest score."""

from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Bool, Float, Int

from meanformer.errors import (
    as_finite_array,
    as_integer,
    as_number,
    check,
    check_choice,
)
from meanformer.geometry.polytopes import Polytope, as_points, hull_of
from meanformer.numerics.arrays import norms_of
from meanformer.typing import ArrayLike

SCORES = ("raw", "unit")
OUTSIDE = -1
LARGEST = np.finfo(np.float64).max


class Cells(eqx.Module):
    r"""The cells into which the scores of vertices divide their convex hull.

    $$C_i = \{x \in \operatorname{hull}(v) : \langle Bx, v_i\rangle \ge
      \langle Bx, v_j\rangle \text{ for all } j\} .$$

    A step of Frank and Wolfe's method for the quadratic form $B$, that is of hardmax
    attention, moves the points of $C_i$ towards $v_i$ (`run_hardmax`). The cells cover
    the hull and are cones from the origin, cut off by the hull; those of points inside
    the hull are empty with raw scores. Where the norms
    $\langle Bv_i, v_i\rangle^{1/2}$ are equal, they are a Voronoi diagram. If $B$ is
    positive semi-definite and every vertex lies in its own cell, vertices stay, and a
    point of $C_i$ moves straight to $v_i$ inside $C_i$ [AGR25].

    Everything is computed by NumPy and SciPy in double precision, whatever the type
    of the input: in the plane by clipping, exact up to rounding; above by Qhull.

    Args:
        vertices: the points $v_i$, of shape (k, d), not in a hyperplane.
        form: the matrix $B$; the identity by default.
        scores: `"raw"`, or `"unit"` for the directions $v_i/|v_i|$ in place of the
            $v_i$, so that the length of a vertex does not count.

    Attributes:
        hull: the convex hull of the vertices.
    """

    vertices: Float[np.ndarray, "k d"]
    form: Float[np.ndarray, "d d"]
    scores: str = eqx.field(static=True)
    hull: Polytope

    def __init__(
        self, vertices: ArrayLike, *, form: ArrayLike | None = None, scores: str = "raw"
    ):
        points = _checked("vertices", vertices, (None, None))
        dimension = points.shape[1]
        check(
            points.size > 0,
            f"vertices has shape {points.shape}; it must be (k, d) with "
            f"{dimension + 1} or more vertices.",
        )
        check_choice("scores", scores, SCORES)
        is_zero = (points == 0).all(axis=1)
        check(
            scores == "raw" or not is_zero.any(),
            f"vertex {is_zero.argmax()} is zero and has no direction; use "
            'scores="raw", or leave it out.',
        )
        self.vertices, self.scores = points, scores
        self.form = np.eye(dimension)
        if form is not None:
            self.form = _checked("form", form, (dimension, dimension))
        self.hull = hull_of(points)

    def __len__(self) -> int:
        return len(self.vertices)

    @property
    def dimension(self) -> int:
        """Dimension of the space around the hull."""
        return self.vertices.shape[1]

    @property
    def directions(self) -> Float[np.ndarray, "k d"]:
        """The vectors that points are scored with: the vertices or unit vectors."""
        if self.scores == "raw":
            return self.vertices
        return self.vertices / norms_of(self.vertices)[:, None]

    def score(self, x: ArrayLike) -> Float[np.ndarray, "m k"]:
        r"""Return the scores $\langle Bx, v_i\rangle$ of points, a column a cell."""
        points = as_points("x", x, self.dimension)
        return points @ self.form.T @ self.directions.T

    def cell(self, index: int) -> Polytope:
        """Return a cell as a polytope."""
        return self.cone(index, 0.0)

    def cone(self, index: int, margin: float) -> Polytope:
        r"""Return where a vertex wins by a margin.

        $$\{x \in \operatorname{hull}(v) : \langle Bx, v_i - v_j\rangle \ge \eta
          \text{ for all } j \ne i\} ,$$
        the closure of the strict dominance cone of [AGR25]. Equal vertices do not
        compete with each other. `cone(...).eroded(distance)` takes a rim off it.

        Args:
            index: the vertex.
            margin: the number $\eta \ge 0$.
        """
        index = as_integer("index", index, least=0)
        check(
            index < len(self),
            f"index is {index}; it must be below {len(self)}, the number of vertices.",
        )
        allowed = "zero or more, and finite"
        number = as_number("margin", margin, allowed, least=0, below=np.inf)
        gaps = self.directions - self.directions[index]
        gaps = gaps[(gaps != 0).any(axis=1)]
        sizes, form_size = norms_of(gaps), _size(self.form)
        normals = gaps / sizes[:, None] @ (self.form / form_size)
        with np.errstate(over="ignore"):
            margins = np.minimum(number / sizes / form_size, LARGEST)
        conditions = np.column_stack([normals, margins])
        rows = np.concatenate([self.hull.halfspaces, conditions])
        return Polytope(rows, self.hull.frame)

    @property
    def volumes(self) -> Float[np.ndarray, " k"]:
        """Lengths, areas or volumes of the cells."""
        return np.array([self.cell(index).volume for index in range(len(self))])

    def contains(
        self, x: ArrayLike, *, tolerance: float = 1e-12
    ) -> Bool[np.ndarray, "m k"]:
        r"""Whether points lie in cells: several in the common boundary of cells.

        Args:
            x: points, of shape (m, d).
            tolerance: relative to $\lvert Bx\rvert\max_j\lvert v_j\rvert$, and to the
                size of the hull.
        """
        points = as_points("x", x, self.dimension)
        scores, sizes = self._relative_scores(points)
        slack = tolerance * sizes[:, None]
        is_best = scores >= scores.max(axis=1, keepdims=True) - slack
        return is_best & self.hull.contains(points, tolerance=tolerance)[:, None]

    def owner(self, x: ArrayLike) -> Int[np.ndarray, " m"]:
        """Return the cell of each point, the first one on a boundary; -1 outside.

        Args:
            x: points, of shape (m, d).
        """
        points = as_points("x", x, self.dimension)
        scores, _ = self._relative_scores(points)
        return np.where(self.hull.contains(points), scores.argmax(axis=1), OUTSIDE)

    def _relative_scores(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        r"""Scores and $\lvert Bx\rvert\max_j\lvert v_j\rvert$, both over a size."""
        lengths = norms_of(points)
        moved = points / np.where(lengths > 0, lengths, 1)[:, None]
        moved = moved @ (self.form / _size(self.form)).T
        directions = self.directions / norms_of(self.directions).max()
        return moved @ directions.T, np.linalg.norm(moved, axis=1)

    @property
    def keeps_vertex(self) -> Bool[np.ndarray, " k"]:
        """Which vertices lie in their own cell, and so stay where they are."""
        return self.contains(self.vertices).diagonal()

    @property
    def has_origin(self) -> bool:
        """Whether the hull contains the origin, the tip of all cells."""
        return bool(self.hull.contains(np.zeros((1, self.dimension)))[0])

    def explain(self) -> str:
        """Say in words which cells are empty and which vertices move, and why."""
        empty = [i for i in range(len(self)) if self.cell(i).is_empty]
        moving = np.flatnonzero(~self.keeps_vertex).tolist()
        sentences = [f"{len(self) - len(empty)} of {len(self)} cells have a volume."]
        if empty:
            sentences.append(
                f"Empty: {_listed(empty)}; another vertex wins everywhere."
            )
        if not self.has_origin:
            sentences.append(
                "The hull does not contain the origin, from which the cells are cones: "
                "vertices on the side of the origin may win nowhere."
            )
        sentences.append(
            f"Not in their own cells, so that they move, and the hull shrinks if it "
            f"loses a vertex: {_listed(moving)}."
            if moving
            else "All vertices lie in their own cells."
        )
        return " ".join(sentences)


def _size(matrix: np.ndarray) -> float:
    """The largest entry, to divide by; one for the matrix zero."""
    return float(np.abs(matrix).max()) or 1.0


def _listed(indices: list[int]) -> str:
    return ", ".join(map(str, indices))


def _checked(name: str, value: Any, shape: tuple[int | None, ...]) -> np.ndarray:
    array = as_finite_array(name, value, shape)
    return np.asarray(array, np.float64)
