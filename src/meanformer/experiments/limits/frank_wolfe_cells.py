r"""Hardmax attention as Frank and Wolfe's method, over the cells of a hull.

At zero temperature a token moves towards the vertex of the tokens' hull that its score
$\langle Bx, v\rangle$ likes best, which is a step of Frank and Wolfe's method. The hull
falls into cells, one for each vertex. If every vertex lies in its own cell, tokens stay
in their cells and go straight to their vertices; if one does not, it moves and the hull
shrinks; for negative $B$ all tokens collapse to one point, which is not the origin in
general. The published figures show cells on a grid of pixels and no dynamics; here the
cells are polygons, exact up to rounding, and tokens move over them.
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np
from scipy.spatial import ConvexHull, HalfspaceIntersection

import meanformer as mf
import meanformer.experiments as lab
from meanformer.flows import HardmaxRun, run_hardmax
from meanformer.geometry import Cells
from meanformer.plotting import (
    PlaneFrames,
    draw_cells,
    draw_leaders,
    style,
)

SEED, TRIES = 42, 500
# The published settings: vertices, norms, hull, scores; the most different ones first.
SETTINGS = (
    (5, "var", "bij", "raw"),
    (5, "eq", "bij", "unit"),
    (6, "var", "bij", "unit"),
    (7, "var", "free", "raw"),
    (9, "var", "bij", "raw"),
    (10, "var", "free", "unit"),
    (16, "eq", "bij", "unit"),
    (18, "var", "free", "raw"),
    *((k, norms, "bij", "unit") for k in (3, 4) for norms in ("eq", "var")),
    *((k, "var", "bij", "unit") for k in (5, 7, 9, 10)),
    *((k, "eq", "bij", "unit") for k in (6, 7, 9, 10, 25)),
    *((k, "var", "free", "raw") for k in (5, 6, 9, 10, 16)),
    *((k, "var", "free", "unit") for k in (15, 18)),
)
AREAS = {
    "unit": (0.28031875, 0.31174743, 0.27476068, 0.20394601, 0.26689277, 0.34687950),
    "raw": (0.24492750, 0.26606200, 0.23714874, 0.10595056, 0.39754369, 0.43291265),
}
SQUARE = ((1.0, 1.0), (1.0, -1.0), (-1.0, -1.0), (-1.0, 1.0))
EXTRA = ((0.2, 0.1), (-0.3, 0.25), (0.05, -0.4), (-0.2, -0.1))
SHRINKING = ((2.0, 0.9), (-2.0, 0.9), (0.0, -3.0), (0.2, 0.95))
STEP = 0.3
MARGIN, EROSION, TARGET = 0.05, 0.03, 2


@dataclass(frozen=True)
class Parameters:
    """How many of the published settings, and how many tokens move over them."""

    settings: int = lab.setting(
        8,
        full=len(SETTINGS),
        help="published settings of vertices",
        at_least=3,
        at_most=len(SETTINGS),
    )
    tokens: int = lab.setting(40, full=400, help="tokens that move over the cells")


TABULATED = lab.observation(
    "areas",
    r"The cells of the six vertices of seed 42 have the areas $0.28031875, \dots$ for "
    r"unit directions and $0.24492750, \dots$ for raw scores.",
    source=lab.tabulated(),
)
PARTITION = lab.theorem(
    "partition",
    "The cells cover the hull without overlap: their areas, or volumes in three "
    "dimensions, add up to that of the hull.",
    "AGR25, cells of the hull",
    source=lab.other_method("the hull, by Qhull"),
)
QHULL = lab.observation(
    "other-areas",
    "Areas by clipping are those that Qhull finds from the lists of half-planes, in "
    "all settings.",
    source=lab.other_method("Qhull, by duality"),
)
VORONOI = lab.theorem(
    "voronoi",
    r"Where all $\lvert v_i\rvert$ are equal, the cell of a point is that of its "
    "nearest vertex.",
    "AGR25, cells are a Voronoi diagram for equal norms",
    source=lab.other_method("distances to the vertices"),
)
STAYS = lab.theorem(
    "stay-in-cells",
    "If every vertex lies in its own cell, tokens never leave the cell that they "
    "start in: the largest number of cells that a token sees is one.",
    "AGR25, invariance of the cells",
    source=lab.theory(),
)
STRAIGHT = lab.theorem(
    "straight",
    r"They go straight to their vertex, $z(k) = v + (1-\gamma)^k(z(0) - v)$.",
    "AGR25, invariance of the cells",
    source=lab.closed_form("the segment"),
)
SHRINKS = lab.observation(
    "hull-shrinks",
    "The vertex $(0.2, 0.95)$ of the hull of $(2, 0.9)$, $(-2, 0.9)$, $(0, -3)$ and "
    "itself is not in its own cell: it goes to $(2, 0.9)$, and the area of the hull "
    "falls from $7.9$ to $7.8$.",
    source=lab.closed_form("areas of triangles"),
)
CONTRACTION = lab.observation(
    "contraction",
    "For $B = -I$ and the symmetric square the largest norm is $0.5656854249$ after "
    r"one step of $\gamma = 0.3$, and then falls by the factor "
    r"$\lvert 1 - 2\gamma\rvert = 0.4$ in each of $40$ steps.",
    source=lab.closed_form(r"$\sqrt 2\,\lvert 1-2\gamma\rvert^k$"),
)
NOT_ZERO = lab.observation(
    "not-to-zero",
    r"For $B = -1$ and constant steps $\gamma = 0.3$ the tokens $-1$ and $2$ both "
    "tend to $0.26$, not to $0$ as the first version of the paper says.",
    "AGR25, negative semi-definite forms",
)
CONE = lab.observation(
    "cone-areas",
    r"The polygon $P$ where a vertex wins by $\eta = 0.05$, eroded by "
    r"$\varepsilon = 0.03$, has the area "
    r"$\lvert P\rvert - \varepsilon\ell + \varepsilon^2\sum_i\cot(\theta_i/2)$, with "
    r"the perimeter $\ell$ and the angles $\theta_i$ of $P$.",
    source=lab.closed_form("area of an inner polygon"),
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Cells of all settings, then tokens that move over them."""
    chosen = {name: cells_of(*name) for name in SETTINGS[: parameters.settings]}
    generator = np.random.default_rng(SEED)
    own = [Cells(cells.vertices) for cells in chosen.values()]
    paths = [
        walk(cells, generator, parameters.tokens)
        for cells in progress.over(own, 0.5)
        if cells.keeps_vertex.all()
    ]
    shrinking = run_hardmax(mf.TokenCloud(SHRINKING), 60, step=STEP)
    square = mf.TokenCloud(SQUARE + EXTRA)
    collapsing = run_hardmax(square, 40, step=STEP, score=-np.eye(2))
    line = mf.TokenCloud([[-1.0], [2.0]])
    missing = run_hardmax(line, 100, step=STEP, score=-np.eye(1))
    areas = [area_of_hull(points) for points in (SHRINKING, shrinking.limits)]
    leads = "after two steps the first token is at 0.26 and leads"
    return lab.Outcome(
        findings=[
            *area_findings(chosen, progress),
            voronoi_finding(generator, parameters.tokens),
            *path_findings(paths),
            SHRINKS.close_to(
                [*shrinking.limits[3], *areas], [2.0, 0.9, 7.9, 7.8], tolerance=1e-12
            ),
            CONTRACTION.close_to(
                np.linalg.norm(collapsing.points, axis=2).max(axis=1)[1:],
                np.sqrt(2) * abs(1 - 2 * STEP) ** np.arange(1, 41),
                relative_tolerance=1e-12,
            ),
            NOT_ZERO.close_to(
                missing.points[-1],
                0.26,
                tolerance=1e-12,
                source=lab.closed_form(leads),
            ),
            cone_finding(),
        ],
        pictures=[
            picture_of_settings(chosen),
            picture_of_paths(paths, shrinking, collapsing),
        ],
        movies=[cells_movie(*paths[-1])] if paths else [],
    )


def cells_movie(cells: Cells, path: HardmaxRun) -> lab.Movie:
    """Tokens on their way over the cells."""
    shown = path.to_trajectory()
    count = shown.points.shape[1]
    # Passive tokens have no weight, and would not be drawn.
    visible = replace(shown, weights=np.full(count, 1 / count))
    return lab.Movie(
        visible,
        "Tokens go straight to the vertex of the cell they start in.",
        draw=PlaneFrames(decorate=lambda axes, frame: draw_cells(cells, axes)),
        depths=np.linspace(0, float(shown.depths[12]), 60),
    )


def draw_vertices(k: int, norms: str, hull: str) -> np.ndarray:
    """Random vertices as in the published figures, hull vertices only."""
    generator = np.random.default_rng(SEED)
    for _ in range(TRIES):
        angles = generator.uniform(0, 2 * np.pi, k)
        lengths = generator.uniform(0.4, 1.0, k) if norms == "var" else np.ones(k)
        points = lengths[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1)
        corners = Cells(points).hull.frame
        if hull == "free":
            return corners
        if len(corners) == k:
            return points
    raise RuntimeError(f"no {k} points in convex position in {TRIES} draws")


def cells_of(k: int, norms: str, hull: str, scores: str) -> Cells:
    """The cells of a published setting."""
    return Cells(draw_vertices(k, norms, hull), scores=scores)


def uniform_in(cells: Cells, generator, count: int) -> np.ndarray:
    """Random points of the hull, by rejection."""
    corners = cells.hull.frame
    points = generator.uniform(corners.min(0), corners.max(0), (40 * count, 2))
    return points[cells.hull.contains(points)][:count]


def walk(cells: Cells, generator, count: int) -> tuple[Cells, HardmaxRun]:
    """Tokens of no weight that start anywhere in the hull, and its vertices."""
    tokens = uniform_in(cells, generator, count)
    weights = np.append(np.full(len(cells), 1 / len(cells)), np.zeros(len(tokens)))
    cloud = mf.TokenCloud(np.concatenate([cells.vertices, tokens]), weights)
    return cells, run_hardmax(cloud, 30, step=STEP)


def area_findings(chosen, progress):
    """Areas against the table, against the hull, and against Qhull by duality."""
    six = [cells_of(6, "var", "bij", scores) for scores in AREAS]
    solid = Cells(np.random.default_rng(SEED).normal(size=(12, 3)))
    spaces = [*chosen.values(), solid]
    met = []
    for cells in progress.over(chosen.values(), 0.5):
        for cell in (cells.cell(index) for index in range(len(cells))):
            met.append(0.0)
            if len(cell.corners) > 0:
                inner = cell.corners.mean(axis=0)
                meets = HalfspaceIntersection(cell.halfspaces, inner)
                met[-1] = area_of_hull(meets.intersections)
    return (
        TABULATED.close_to(
            np.concatenate([cells.volumes for cells in six]),
            np.concatenate(list(AREAS.values())),
            tolerance=1e-7,
        ),
        PARTITION.close_to(
            [cells.volumes.sum() for cells in spaces],
            [area_of_hull(cells.vertices) for cells in spaces],
            relative_tolerance=1e-12,
        ),
        QHULL.close_to(
            np.concatenate([cells.volumes for cells in chosen.values()]),
            met,
            tolerance=1e-12,
        ),
    )


def area_of_hull(points) -> float:
    """Volume of a convex hull, by Qhull."""
    return ConvexHull(points).volume


def voronoi_finding(generator, count: int):
    """Owners of random points against their nearest vertices."""
    wrong = []
    for k in (5, 9, 16):
        cells = cells_of(k, "eq", "bij", "raw")
        points = uniform_in(cells, generator, 20 * count)
        gaps = np.linalg.norm(points[:, None] - cells.vertices[None], axis=2)
        wrong.append(np.mean(cells.owner(points) != gaps.argmin(axis=1)))
    return VORONOI.close_to(wrong, 0.0, tolerance=0.0)


def path_findings(paths):
    """How many cells each token visits, and how far it is from its segment."""
    visited, distances = [], []
    for cells, path in paths:
        tokens = path.points[:, len(cells) :]
        owners = np.stack([cells.owner(points) for points in tokens])
        visited.append(max(len(set(column)) for column in owners.T))
        goals = cells.vertices[owners[0]]
        shrunk = (1 - STEP) ** np.arange(len(path))[:, None, None]
        distances.append(np.abs(tokens - goals - shrunk * (tokens[0] - goals)).max())
    return (
        STAYS.close_to(visited, 1, tolerance=0),
        STRAIGHT.close_to(distances, 0.0, tolerance=1e-14),
    )


def cone_finding():
    """Areas of eroded cones of the third vertex against the formula of erosion."""
    eroded, exact = [], []
    for k in (5, 7):
        frame = Cells(draw_vertices(k, "eq", "bij")).hull.frame
        cone = Cells(frame).cone(TARGET, MARGIN)
        eroded.append(cone.eroded(EROSION).volume)
        sides = np.roll(cone.corners, -1, axis=0) - cone.corners
        headings = np.arctan2(*sides.T[::-1])
        turns = (headings - np.roll(headings, 1)) % (2 * np.pi)
        rim = EROSION * np.linalg.norm(sides, axis=1).sum()
        rim -= EROSION**2 * np.tan(turns / 2).sum()
        exact.append(area_of_hull(cone.corners) - rim)
    return CONE.close_to(eroded, exact, tolerance=1e-13)


def picture_of_settings(chosen) -> lab.Picture:
    """Cells of all settings."""
    columns = 4 if len(chosen) <= 12 else 7
    rows = -(-len(chosen) // columns)
    figure, axes = style.canvas(columns, rows, panel=(2.3, 2.45), squeeze=False)
    for panel, item in itertools.zip_longest(axes.ravel(), chosen.items()):
        if item is None:
            panel.set_axis_off()
            continue
        (k, norms, hull, scores), cells = item
        draw_cells(cells, panel, is_labelled=False)
        title = f"{k} {'equal' if norms == 'eq' else 'varying'}, {scores}"
        panel.set_title(title + (", free" if hull == "free" else ""), fontsize=9.5)
    return lab.Picture(
        figure,
        "Cells of random vertices with equal or varying norms, scored by the vertices "
        "(raw) or by their directions (unit); free: points inside the hull were left "
        "out. A cell is a cone from the origin ($+$). A crossed ring is a vertex "
        "outside its own cell: it moves.",
    )


def picture_of_paths(paths, shrinking: HardmaxRun, collapsing: HardmaxRun):
    """Tokens over cells that stay, a hull that loses a vertex, and a collapse."""
    figure, (left, middle, right) = style.canvas(3, panel=(3.4, 3.4))
    for cells, path in paths[:1]:
        draw_cells(cells, left)
        x, y = np.moveaxis(path.points[:, len(cells) :][:, :40], 2, 0)
        left.plot(x, y, ".-", color=style.INK, linewidth=0.7, markersize=2.2)
    left.set_title("tokens stay in their cells")
    draw_cells(Cells(SHRINKING), middle)
    draw_leaders(shrinking, middle, color=style.INK)
    middle.set_title("$B = I$: a vertex leaves")
    draw_leaders(collapsing, right, color=style.BLUE, step=12)
    right.plot(*collapsing.points[0].T, "o", color=style.GREY, markersize=3)
    right.set_title("$B = -I$: collapse to 0")
    return lab.Picture(
        figure,
        rf"Steps of $\gamma = {STEP}$. Left: all vertices lie in their own cells, and "
        "each token goes straight to the vertex of its cell. Middle: the crossed "
        "vertex goes to $v_1$ and the hull shrinks to a triangle. Right: for a "
        "negative form a symmetric cloud (grey: at the start) collapses to the origin.",
    )


experiment = lab.experiment(
    run,
    "Hardmax attention moves tokens straight through the cells of their hull",
    room="geometry",
    seconds=6,
)
