r"""Hardmax attention as Frank and Wolfe's method, over the cells of a hull.

At zero temperature a token moves towards the vertex of the tokens' hull that its score
$\langle Bx, v\rangle$ likes best, which is a step of Frank and Wolfe's method. The hull
falls into cells, one for each vertex. If every vertex lies in its own cell, tokens stay
in their cells and go straight to their vertices; if one does not, it moves and the hull
shrinks; for negative $B$ all tokens collapse to one point, which is not the origin in
general. Here cells are polygons, exact up to rounding, and tokens move over them.
"""

import numpy as np
from scipy.spatial import ConvexHull

import meanformer as mf
import meanformer.experiments as lab
from meanformer.flows import run_hardmax
from meanformer.geometry import Cells
from meanformer.plotting import PlaneFrames, draw_cells, draw_leaders, style

SEED, STEP = 42, 0.3
SETTINGS = tuple(  # the published ones; the most different ones first
    (k, norms, hull, scores)
    for norms, hull, scores, counts in (
        ("var", "bij", "raw", (5, 9)),
        ("eq", "bij", "unit", (5, 16)),
        ("var", "bij", "unit", (6,)),
        ("var", "free", "raw", (7, 18)),
        ("var", "free", "unit", (10,)),
        ("eq", "bij", "unit", (3, 4, 6, 7, 9, 10, 25)),
        ("var", "bij", "unit", (3, 4, 5, 7, 9, 10)),
        ("var", "free", "raw", (5, 6, 9, 10, 16)),
        ("var", "free", "unit", (15, 18)),
    )
    for k in counts
)
SQUARE = ((1.0, 1.0), (1.0, -1.0), (-1.0, -1.0), (-1.0, 1.0))
EXTRA = ((0.2, 0.1), (-0.3, 0.25), (0.05, -0.4), (-0.2, -0.1))
SHRINKING = ((2.0, 0.9), (-2.0, 0.9), (0.0, -3.0), (0.2, 0.95))


class Parameters(lab.Parameters):
    """How many of the published settings, and how many tokens move over them."""

    settings: int = lab.setting(
        8, full=28, help="published settings of vertices", at_least=3, at_most=28
    )
    tokens: int = lab.setting(40, full=400, help="tokens that move over the cells")


PARTITION = lab.theorem(
    "partition",
    "The cells cover the hull without overlap: their areas, or volumes in three "
    "dimensions, add up to that of the hull.",
    "AGR25, cells of the hull",
    source=lab.other_method("the hull, by Qhull"),
)
VORONOI = lab.theorem(
    "voronoi",
    r"If all $\lvert v_i\rvert$ are equal, a point is in the cell of its nearest "
    "vertex: share of points that are not.",
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
    r"For $B = -I$ and the symmetric square the largest norm falls by the factor "
    r"$\lvert 1 - 2\gamma\rvert = 0.4$ in each of $40$ steps of $\gamma = 0.3$.",
    source=lab.closed_form(r"$\sqrt 2\,\lvert 1-2\gamma\rvert^k$"),
)
NOT_ZERO = lab.observation(
    "not-to-zero",
    r"For $B = -1$ and constant steps $\gamma = 0.3$ the tokens $-1$ and $2$ both "
    "tend to $0.26$, not to $0$ as the first version of the paper says.",
    "AGR25, negative semi-definite forms",
    source=lab.closed_form("after two steps the first token is at 0.26 and leads"),
)


@lab.experiment(
    "Hardmax tokens go straight through their cells", room="geometry", seconds=6
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Cells of all settings, then tokens that move over them."""
    chosen = {name: cells_of(*name) for name in SETTINGS[: parameters.settings]}
    generator, count = np.random.default_rng(SEED), parameters.tokens
    spaces = [*chosen.values(), Cells(generator.normal(size=(12, 3)))]
    volumes = [(c.volumes.sum(), ConvexHull(c.vertices).volume) for c in spaces]
    own = [Cells(cells.vertices) for cells in chosen.values()]
    keeping = [cells for cells in own if cells.keeps_vertex.all()]
    paths = [
        (cells, hardmax([*cells.vertices, *uniform_in(cells, generator, count)], 30))
        for cells in progress.over(keeping)
    ]
    shrinking = hardmax(SHRINKING, 60)
    collapsing = hardmax(SQUARE + EXTRA, 40, score=-np.eye(2))
    missing = hardmax([[-1.0], [2.0]], 100, score=-np.eye(1))
    areas = [ConvexHull(points).volume for points in (SHRINKING, shrinking.limits)]
    sizes = np.linalg.norm(collapsing.points, axis=2).max(axis=1)
    shrunk = np.sqrt(2) * abs(1 - 2 * STEP) ** np.arange(41)
    return lab.Outcome(
        findings=[
            PARTITION.close_to(*np.transpose(volumes), relative_tolerance=1e-12),
            voronoi_finding(generator, count),
            *path_findings(paths),
            SHRINKS.close_to(
                [*shrinking.limits[3], *areas], [2.0, 0.9, 7.9, 7.8], tolerance=1e-12
            ),
            CONTRACTION.close_to(sizes, shrunk, relative_tolerance=1e-12),
            NOT_ZERO.close_to(missing.points[-1], 0.26, tolerance=1e-12),
        ],
        pictures=[draw_settings(chosen), draw_steps(paths, shrinking, collapsing)],
        movies=[cells_movie(*path) for path in paths[-1:]],
    )


def hardmax(points, count: int, **options):
    """Steps of hardmax attention."""
    return run_hardmax(mf.TokenCloud(np.array(points)), count, step=STEP, **options)


def cells_movie(cells: Cells, path) -> lab.Movie:
    """Tokens on their way over the cells."""
    shown = path.to_trajectory()
    return lab.Movie(
        shown,
        "Tokens go straight to the vertex of the cell they start in.",
        draw=PlaneFrames(decorate=lambda axes, frame: draw_cells(cells, axes)),
        depths=np.linspace(0, float(shown.depths[12]), 60),
    )


def cells_of(k: int, norms: str, hull: str, scores: str) -> Cells:
    """Cells of random vertices as in the published figures, hull vertices only."""
    generator = np.random.default_rng(SEED)
    while True:
        angles = generator.uniform(0, 2 * np.pi, k)
        lengths = generator.uniform(0.4, 1.0, k) if norms == "var" else np.ones(k)
        points = lengths[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1)
        corners = Cells(points).hull.frame
        if hull == "free" or len(corners) == k:
            return Cells(corners if hull == "free" else points, scores=scores)


def uniform_in(cells: Cells, generator, count: int) -> np.ndarray:
    """Random points of the hull, by rejection."""
    corners = cells.hull.frame
    points = generator.uniform(corners.min(0), corners.max(0), (40 * count, 2))
    return points[cells.hull.contains(points)][:count]


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


def draw_settings(chosen) -> lab.Picture:
    """Cells of all settings."""
    columns = 4 if len(chosen) <= 12 else 7
    rows = -(-len(chosen) // columns)
    figure, axes = style.canvas(columns, rows, panel=(2.3, 2.45), squeeze=False)
    for panel in axes.ravel():
        panel.set_axis_off()
    for panel, (name, cells) in zip(axes.ravel(), chosen.items(), strict=False):
        k, norms, hull, scores = name
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


def draw_steps(paths, shrinking, collapsing) -> lab.Picture:
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
        "each token goes straight to its vertex. Middle: the crossed vertex goes to "
        "$v_1$ and the hull shrinks to a triangle. Right: for a negative form a "
        "symmetric cloud (grey: at the start) collapses to the origin.",
    )
