r"""No critical point is missed: topology and a scan of the torus count the same.

Two atoms on the circle are a point of the torus. With attention and three sigmoid units
without symmetry the energy is a function on it whose critical points are isolated, so
that by Morse theory their indices have the alternating sum zero, the Euler
characteristic. The search by Newton's method and deflation is compared with this sum,
and with all zeros of both slopes that a scan of the torus finds. For the energies with
a matrix the critical points of one atom on the sphere are the axes.
"""

import numpy as np
import scipy.optimize

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers import circle_atoms
from meanformer.experiments.helpers.circle_atoms import full_index, pull, turned
from meanformer.plotting import style
from meanformer.plotting.circles import quarter_ticks

MARKS = (("^", "maximum"), ("P", "saddle"), ("v", "minimum"))
# No symmetry, no flat region: the energy of two atoms has isolated critical points.
UNITS = ((0.3, 6.0, 0.2), (2.0, 5.0, -0.3), (4.1, 4.0, 0.1))  # angle, strength, bias
MASSES, LENGTH = (0.7, 0.3), 1.5  # of the atoms; of the directions of the units
LEVELS = (1.5, 1.0, 0.5)  # eigenvalues of the matrix on the sphere


class Parameters(lab.Parameters):
    """Sizes."""

    starts: int = lab.setting(12, full=200, help="starts of a search", at_least=8)
    cells: int = lab.setting(240, full=960, help="cells in each angle", at_least=60)
    seed: int = lab.setting(3, help="seed of all samples", at_least=0)


EULER = lab.theorem(
    "euler",
    "The critical points of two atoms of masses $0.7, 0.3$ on the circle with three "
    r"sigmoid units have indices $k$ with $\sum(-1)^k = 0$, the Euler characteristic "
    "of the torus: none has been missed that this sum would tell.",
    "Mil63, Theorem 5.2",
    source=lab.theory("Morse theory"),
)
SCANNED = lab.observation(
    "all-found",
    "The search finds as many critical points of each index $0, 1, 2$ as there are "
    "zeros of both slopes in a scan of the whole torus, and all of them where the "
    "scan does.",
    source=lab.other_method("sign changes on a grid of the torus and SciPy's roots"),
)
AXES = lab.observation(
    "matrix-axes",
    "With the matrix $D = $ diag$(1.5, 1, 0.5)$ single atoms on the sphere rest at "
    r"the axes only, at energies $\frac12e^{\lambda_k}$ with index $k - 1$.",
    source=lab.closed_form(r"rates $(\lambda_j - \lambda_k)e^{\lambda_k}$"),
)


@lab.experiment(
    "No critical point of two atoms is missed", room="observables", seconds=12
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Search, scan and count."""
    searches = (
        (generic_flow(), MASSES),
        (mf.observables.matrix_energy_flow(np.diag(LEVELS)), (1.0,)),
    )
    options = {"starts": parameters.starts, "seed": parameters.seed}
    found, axes = (
        circle_atoms.search_of(*one, **options) for one in progress.over(searches)
    )
    euler = sum((-1.0) ** full_index(point) for point in found)
    scanned = scan(parameters.cells)
    return lab.Outcome(
        findings=[
            EULER.close_to(euler, 0.0, tolerance=0.0),
            scan_finding(found, scanned),
            axes_finding(axes),
        ],
        pictures=[draw_landscape(scanned)],
        tables=[circle_atoms.table_of(found)],
    )


def generic_flow() -> mf.Flow:
    """Attention with three sigmoid units without symmetry."""
    angles, strengths, biases = np.transpose(UNITS)
    return mf.observables.perceptron_flow(
        mf.identity_attention("unnormalised", 2, 2.0),
        LENGTH * mf.TokenCloud.from_angles(angles).points,
        strengths,
        biases,
        activation="sigmoid",
    )


def generic_slopes(angles):
    """The slopes of the energy per mass in both angles, from its formula."""
    heavy, light = MASSES
    force = pull(angles[1] - angles[0], 2.0)
    return generic_lift(np.array(angles)) + np.multiply.outer([light, -heavy], force)


def generic_lift(angle):
    """The slope of the potential of the sigmoid units in the angle."""
    return sum(
        c * LENGTH * np.sin(u - angle) / (1 + np.exp(-LENGTH * np.cos(angle - u) - b))
        for u, c, b in UNITS
    )


def generic_energy(first, second):
    """The energy of two atoms under the sigmoid units, from its formula."""
    cross = 2 * MASSES[0] * MASSES[1] * np.exp(2 * np.cos(first - second))
    pairs = (np.exp(2) * np.dot(MASSES, MASSES) + cross) / 4
    heights = sum(
        c * mass * np.logaddexp(0, LENGTH * np.cos(angle - u) + b)
        for u, c, b in UNITS
        for mass, angle in zip(MASSES, (first, second), strict=True)
    )
    return pairs + heights


def scan(count: int) -> list[tuple[np.ndarray, int]]:
    """All zeros of both slopes, with indices: a root finder where both change sign."""
    turn = 2 * np.pi * (np.arange(count) + 0.123) / count
    slopes = generic_slopes(np.meshgrid(turn, turn, indexing="ij"))
    corners = [np.roll(slopes, s, (1, 2)) > 0 for s in ((0, 0), (-1, 0), (0, -1))]
    corners.append(np.roll(slopes, (-1, -1), (1, 2)) > 0)
    changes = np.ptp(np.array(corners, int), axis=0).all(axis=0)
    zeros: list[tuple[np.ndarray, int]] = []
    for cell in np.argwhere(changes):
        found = scipy.optimize.root(
            generic_slopes, turn[cell] + np.pi / count, tol=1e-13
        )
        is_zero = np.abs(found.fun).max() < 1e-9
        if is_zero and all(turned(found.x, old).max() > 1e-6 for old, _ in zeros):
            zeros.append((found.x % (2 * np.pi), index_at(found.x)))
    return zeros


def index_at(angles) -> int:
    """How many directions grow, by differences of the slopes."""
    steps = 1e-5 * np.eye(2)
    columns = [generic_slopes(angles + s) - generic_slopes(angles - s) for s in steps]
    return int((np.linalg.eigvals(np.stack(columns, axis=1)).real > 0).sum())


def on_torus(point) -> np.ndarray:
    """The angles of the heavy and of the light token."""
    order = np.argsort(-np.asarray(point.cloud.weights))
    return np.resize(circle_atoms.angles_of(point.cloud)[order], 2)


def scan_finding(found, scanned):
    """Numbers of each index, and how far points are from the nearest of the scan."""
    indices = [full_index(point) for point in found]
    others = [index for _, index in scanned]
    apart = [
        min(turned(on_torus(point), angles).max() for angles, _ in scanned)
        for point in found
    ]
    return SCANNED.close_to(
        [*(indices.count(k) for k in range(3)), max(apart, default=np.pi)],
        [*(others.count(k) for k in range(3)), 0.0],
        tolerance=1e-8,
    )


def axes_finding(found):
    """Energies and indices of single atoms on the sphere."""
    measured = [(2 * point.energy, point.index) for point in found]
    # A search that finds fewer or more fails the claim.
    missing = [(np.nan, -1)] * (len(LEVELS) - len(measured))
    extra = [(np.nan, -1)] * (len(measured) - len(LEVELS))
    exact = [(np.exp(level), k) for k, level in enumerate(LEVELS)]
    return AXES.close_to(
        np.ravel([*measured, *missing]), np.ravel([*exact, *extra]), tolerance=1e-9
    )


def draw_landscape(scanned) -> lab.Picture:
    """The energy over the torus with its critical points."""
    figure, axes = style.canvas(panel=(5.4, 4.4))
    turn = np.linspace(0, 2 * np.pi, 181)
    heights = generic_energy(turn[:, None], turn[None, :])
    image = axes.contourf(turn, turn, heights.T, 24, cmap=style.depth_colours())
    figure.colorbar(image, ax=axes, label="energy")
    for index, (mark, name) in enumerate(MARKS):
        places = [angles for angles, other in scanned if other == index]
        looks = {"s": 70, "c": "white", "zorder": 3, "label": name}
        axes.scatter(*np.transpose(places), marker=mark, **looks)
    for axis in ("x", "y"):
        quarter_ticks(axes, axis)
    axes.grid(visible=False)
    axes.set(xlabel="angle of the heavy token", ylabel="angle of the light token")
    axes.legend(labelcolor="white", loc="upper right")
    return lab.Picture(
        figure,
        "Two tokens of masses 0.7 and 0.3 with three sigmoid units: the energy over "
        "all pairs of angles, with its maxima (triangles up), saddles (crosses) and "
        "minima (triangles down), by a scan.",
    )
