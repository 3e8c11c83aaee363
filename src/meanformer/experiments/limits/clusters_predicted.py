r"""The matrices of a layer tell the limit of its tokens, before any simulation.

Query, key and value alone decide what tokens tend to: Boolean attention on the line, a
polytope, parallel hyperplanes, a polytope times a subspace, the origin, or something no
theorem knows. Layers of every kind are drawn at random, their limit is predicted from
the spectrum of $V$ and the sign of $\langle Q\varphi, K\varphi\rangle$, tokens are
followed, and a detector says what they did. Where either cannot tell it must say so: a
wrong answer is a failure, an open one is not.
"""

from collections.abc import Callable
from typing import cast

import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers.limits import dense_tokens
from meanformer.observables import BooleanPhase, find_limit
from meanformer.plotting import style

Matrices = tuple[np.ndarray, np.ndarray, np.ndarray]


class Parameters(lab.Parameters):
    """How many layers."""

    cases: int = lab.setting(5, full=63, help="layers of each kind", at_least=2)
    seed: int = lab.setting(0, help="seed of the first layer", at_least=0)


PREDICTED = lab.theorem(
    "never-wrong-prediction",
    "No prediction is wrong: layers whose prediction is neither the limit they were "
    "made for nor open.",
    "GLPR23b, limits for one, simple and multiple leading eigenvalues",
)
DETECTED = lab.theorem(
    "never-wrong-verdict",
    "No verdict is wrong: runs said to have reached another shape than that which "
    "the layer was made for, such as two hyperplanes on one side of zero.",
    "GLPR23b, limits for one, simple and multiple leading eigenvalues",
)
DENSE = lab.observation(
    "dense",
    "The limits found are those of a dense program: largest distance of its tokens "
    "from the closed form one growth time after the hand-over, in the coordinates "
    "that settle, relative to the diameter at first.",
    source=lab.other_method("SciPy's DOP853, from the first tokens on"),
)
DECIDED = lab.observation(
    "decided",
    "Most are decided: share of the layers with a known limit that are predicted and "
    "found.",
    source=lab.theory("generically all of them"),
)


@lab.experiment(
    "Query, key and value tell the tokens' limit", room="observables", seconds=15
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Draw layers, predict, follow, detect, compare."""
    seeds = range(parameters.seed, parameters.seed + parameters.cases)
    cases = [(kind, seed) for kind in KINDS for seed in seeds]
    names = [shapes_of(*case) for case in progress.over(cases, 1.0)]
    made_for, predicted, found = np.array(names).T
    wrong = (predicted != made_for) & (predicted != "unknown")
    mistaken = (found != made_for) & (found != "open")
    agrees = (predicted == made_for) & (found == made_for)
    errors = [against_scipy(kind, parameters.seed) for kind in SETTLING]
    in_all = lab.theory(f"in {len(cases)} layers")
    return lab.Outcome(
        findings=[
            PREDICTED.close_to(wrong.sum(), 0, tolerance=0, source=in_all),
            DETECTED.close_to(mistaken.sum(), 0, tolerance=0, source=in_all),
            DENSE.close_to(errors, 0.0, tolerance=1e-4),
            DECIDED.at_least(agrees[made_for != "unknown"].mean(), 0.9),
        ],
        pictures=[draw(made_for, found)],
    )


def shapes_of(kind: str, seed: int) -> tuple[str, str, str]:
    """The limit that a random layer was made for, the predicted and the found one."""
    attention, cloud, made_for = random_case(kind, seed)
    depth = 6.0 if made_for == "unknown" else None
    report = find_limit(attention, cloud, depth=depth)
    found = report.detection
    shape = found.geometry if found.verdict == "reached" else "open"
    return made_for, report.prediction.geometry, shape


def against_scipy(kind: str, seed: int) -> float:
    """Tokens of a dense program against the closed form, in settled coordinates."""
    attention, cloud, _ = random_case(kind, seed)
    report = find_limit(attention, cloud)
    depth = report.detection.depth + cast(float, report.prediction.time_scale)
    closed = cast(BooleanPhase, report.detection.phase).at(depth)
    functionals = report.prediction.functionals
    errors = (dense_tokens(report, depth) - closed) @ functionals.T
    size = np.ptp(np.asarray(cloud.points) @ functionals.T)
    return float(np.abs(errors).max() / size)


def random_case(kind: str, seed: int) -> tuple[mf.Softmax, mf.TokenCloud, str]:
    """Return a random layer of a kind, tokens, and the limit that theory gives."""
    rng = np.random.default_rng(seed)
    make, geometry = KINDS[kind]
    query, key, value = make(rng)
    cloud = mf.TokenCloud(rng.normal(size=(8, len(value))))
    return mf.Softmax(query, key, value), cloud, geometry


def basis(rng) -> np.ndarray:
    """A random basis of space that is not too skew."""
    while True:
        matrix = rng.normal(size=(3, 3))
        if np.linalg.cond(matrix) < 10:
            return matrix


def projections(rng, form: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    r"""Query and key with $Q^\top K$ a given form."""
    query = basis(rng)
    return query, np.linalg.solve(query.T, form)


def with_blocks(rng, blocks: np.ndarray, sign: int = 1) -> Matrices:
    """A value matrix that has these blocks in a random basis, and a definite form."""
    query, key = projections(rng, sign * lab.definite_form(rng, 3))
    vectors = basis(rng)
    return query, key, vectors @ blocks @ np.linalg.inv(vectors)


def turn(angle: float) -> np.ndarray:
    """A rotation of the plane."""
    return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])


def on_the_line(rng) -> Matrices:
    """Three positive numbers."""
    query, key, value = rng.uniform(0.3, 2, size=(3, 1, 1))
    return query, key, value


def multiple_of_identity(rng) -> Matrices:
    """A positive multiple of the identity, a definite form."""
    return *projections(rng, lab.definite_form(rng, 3)), rng.uniform(0.5, 2) * np.eye(3)


def simple_leading(rng) -> Matrices:
    """A simple positive leading eigenvalue, others real or a complex pair."""
    leading = rng.uniform(0.5, 2)
    rest = leading * rng.uniform(-0.8, 0.8, size=2)
    blocks = np.diag([leading, *rest])
    if rng.random() < 0.4:
        blocks[1:, 1:] = rest[0] * turn(rng.uniform(0, 6))
    vectors = basis(rng)
    value = vectors @ blocks @ np.linalg.inv(vectors)
    first = vectors[:, 0] / np.linalg.norm(vectors[:, 0])
    form = rng.normal(size=(3, 3))
    form += (rng.uniform(0.2, 1.5) - first @ form @ first) * np.outer(first, first)
    return *projections(rng, form), value


def double_leading(rng) -> Matrices:
    """A double positive leading eigenvalue, a definite form."""
    blocks = rng.uniform(0.5, 2) * np.diag([1, 1, rng.uniform(-0.7, 0.7)])
    return with_blocks(rng, blocks)


def inwards(rng) -> Matrices:
    """A negative multiple of the identity, scores a positive multiple of its form."""
    query, key = projections(rng, rng.uniform(0.3, 2) * np.eye(3))
    return query, key, -rng.uniform(0.5, 2) * np.eye(3)


def rotating(rng) -> Matrices:
    """A complex pair of leading eigenvalues."""
    leading = rng.uniform(0.5, 2)
    blocks = np.diag(rng.uniform(-0.8, 0.8, size=3))
    blocks[:2, :2] = turn(rng.uniform(0.3, 2.8))
    return with_blocks(rng, leading * blocks)


def shrinking(rng) -> Matrices:
    """A negative leading eigenvalue."""
    blocks = rng.uniform(0.5, 2) * np.diag([-1, *rng.uniform(-0.8, 0.8, size=2)])
    return with_blocks(rng, blocks)


def turned_away(rng) -> Matrices:
    """A positive leading eigenvalue, scores of the wrong sign."""
    blocks = rng.uniform(0.5, 2) * np.diag([1, *rng.uniform(-0.8, -0.1, size=2)])
    return with_blocks(rng, blocks, sign=-1)


KINDS: dict[str, tuple[Callable[..., Matrices], str]] = {
    "line": (on_the_line, "boolean-1d"),
    "multiple of I": (multiple_of_identity, "polytope"),
    "simple leading": (simple_leading, "hyperplanes"),
    "double leading": (double_leading, "polytope x subspace"),
    "inwards": (inwards, "origin"),
    "rotating": (rotating, "unknown"),
    "shrinking": (shrinking, "unknown"),
    "turned away": (turned_away, "unknown"),
}
SETTLING = ("line", "multiple of I", "simple leading", "double leading")


def draw(made_for, found) -> lab.Picture:
    """What layers were made for against what was found."""
    shapes = ["boolean-1d", "polytope", "hyperplanes", "polytope x subspace", "origin"]
    names = [*shapes, "unknown"]
    counts = np.zeros((len(names), len(names)), int)
    for row, column in zip(made_for, found, strict=True):
        column = "unknown" if column == "open" else column
        counts[names.index(row), names.index(column)] += 1
    figure, axes = style.canvas(panel=(6.2, 4.6))
    colours = style.density_colours()
    axes.imshow(counts, cmap=colours, vmin=-counts.max(), vmax=counts.max())
    for (row, column), count in np.ndenumerate(counts):
        # Cells are light or dark whatever the page behind them.
        shade = "#ffffff" if count > counts.max() / 4 else "#222222"
        axes.text(column, row, str(count or ""), ha="center", va="center", color=shade)
    axes.set_xticks(range(len(names)), [*shapes, "open"], rotation=30, ha="right")
    axes.set_yticks(range(len(names)), [*shapes, "no theorem"])
    axes.set(xlabel="found in the trajectory", ylabel="made for")
    axes.grid(visible=False)
    return lab.Picture(
        figure,
        "Random layers by the limit that they were made for, and by what the detector "
        "found. Off the diagonal only the last column, where the detector stays open, "
        "is allowed.",
    )
