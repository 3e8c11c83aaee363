r"""The matrices of a layer tell the limit of its tokens, before any simulation.

Query, key and value alone decide what tokens tend to: Boolean attention on the line, a
polytope, parallel hyperplanes, a polytope times a subspace, the origin, or something no
theorem knows. Layers of every kind are drawn at random, their limit is predicted from
the spectrum of $V$ and the sign of $\langle Q\varphi, K\varphi\rangle$, tokens are
followed, and a detector says what they did. Where either cannot tell it must say so: a
wrong answer is a failure, an open one is not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.observables import BooleanPhase, find_limit
from meanformer.plotting import style

TOKENS = 8
Matrices = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Parameters:
    """How many layers."""

    cases: int = lab.setting(
        5, full=63, help="random layers of each of the eight kinds", at_least=2
    )
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
    "from their limits one growth time after the hand-over, and the distance that "
    "the closed form leaves there, in the coordinates that settle, relative to the "
    "diameter at first; the difference of the two.",
    source=lab.other_method("SciPy's DOP853, from the first tokens on"),
)
DECIDED = lab.observation(
    "decided",
    "Most are decided: share of the layers with a known limit that are predicted and "
    "found.",
    source=lab.theory("generically all of them"),
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Draw layers, predict, follow, detect, compare."""
    seeds = range(parameters.seed, parameters.seed + parameters.cases)
    cases = [(kind, seed) for kind in KINDS for seed in seeds]
    results = [(kind, compare(kind, seed)) for kind, seed in progress.over(cases, 1.0)]
    known = [result for kind, result in results if is_known(kind)]
    every = [result for _, result in results]
    return lab.Outcome(
        findings=[
            PREDICTED.close_to(
                sum(result.is_prediction_wrong for result in every),
                0,
                tolerance=0,
                source=lab.theory(f"in {len(every)} layers"),
            ),
            DETECTED.close_to(
                sum(result.is_verdict_wrong for result in every),
                0,
                tolerance=0,
                source=lab.theory(f"in {len(every)} runs"),
            ),
            DENSE.close_to(
                [against_scipy(kind, parameters.seed) for kind in SETTLING],
                0.0,
                tolerance=1e-4,
            ),
            DECIDED.at_least(np.mean([result.agrees for result in known]), 0.9),
        ],
        pictures=[draw(results)],
    )


@dataclass(frozen=True)
class Result:
    """One layer: what it was made for, what was said and what was found."""

    made_for: str
    predicted: str
    found: str
    verdict: str

    @property
    def is_prediction_wrong(self) -> bool:
        """Whether the prediction is another limit than the right one."""
        return self.predicted not in (self.made_for, "unknown")

    @property
    def is_verdict_wrong(self) -> bool:
        """Whether tokens are said to have reached another limit."""
        return self.verdict == "reached" and self.found != self.made_for

    @property
    def agrees(self) -> bool:
        """Whether the right limit was predicted and found."""
        return self.predicted == self.found == self.made_for


def is_known(kind: str) -> bool:
    """Whether a theorem covers the kind."""
    return KINDS[kind][1] != "unknown"


def compare(kind: str, seed: int) -> Result:
    """Predict, follow and detect one random layer."""
    attention, cloud, made_for = random_case(kind, seed)
    report = find_limit(attention, cloud, depth=None if is_known(kind) else 6.0)
    found = report.detection
    return Result(made_for, report.prediction.geometry, found.geometry, found.verdict)


def against_scipy(kind: str, seed: int) -> float:
    """Tokens of a dense program against the closed form, in settled coordinates."""
    attention, cloud, _ = random_case(kind, seed)
    report = find_limit(attention, cloud)
    found, phase = report.detection, cast(BooleanPhase, report.detection.phase)
    depth = found.depth + cast(float, report.prediction.time_scale)
    functionals = report.prediction.functionals
    closed = phase.at(depth) @ functionals.T
    dense = lab.dense_rescaled_flow(attention, cloud, depth) @ functionals.T
    size = np.ptp(np.asarray(cloud.points) @ functionals.T)
    return float(np.abs(dense - closed).max() / size)


def random_case(kind: str, seed: int) -> tuple[mf.Softmax, mf.TokenCloud, str]:
    """Return a random layer of a kind, tokens, and the limit that theory gives."""
    rng = np.random.default_rng(seed)
    make, geometry = KINDS[kind]
    query, key, value = make(rng)
    cloud = mf.TokenCloud(rng.normal(size=(TOKENS, len(value))))
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


def with_blocks(rng, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A matrix that has these blocks in a random basis, and the basis."""
    vectors = basis(rng)
    return vectors @ blocks @ np.linalg.inv(vectors), vectors


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
    value, vectors = with_blocks(rng, blocks)
    first = vectors[:, 0] / np.linalg.norm(vectors[:, 0])
    form = rng.normal(size=(3, 3))
    form += (rng.uniform(0.2, 1.5) - first @ form @ first) * np.outer(first, first)
    return *projections(rng, form), value


def double_leading(rng) -> Matrices:
    """A double positive leading eigenvalue, a definite form."""
    leading = rng.uniform(0.5, 2)
    blocks = np.diag([leading, leading, leading * rng.uniform(-0.7, 0.7)])
    return *projections(rng, lab.definite_form(rng, 3)), with_blocks(rng, blocks)[0]


def inwards(rng) -> Matrices:
    """A negative multiple of the identity, scores a positive multiple of its form."""
    query, key = projections(rng, rng.uniform(0.3, 2) * np.eye(3))
    return query, key, -rng.uniform(0.5, 2) * np.eye(3)


def rotating(rng) -> Matrices:
    """A complex pair of leading eigenvalues."""
    leading = rng.uniform(0.5, 2)
    blocks = np.diag(leading * rng.uniform(-0.8, 0.8, size=3))
    blocks[:2, :2] = leading * turn(rng.uniform(0.3, 2.8))
    return *projections(rng, lab.definite_form(rng, 3)), with_blocks(rng, blocks)[0]


def shrinking(rng) -> Matrices:
    """A negative leading eigenvalue."""
    leading = rng.uniform(0.5, 2)
    blocks = np.diag([-leading, *(leading * rng.uniform(-0.8, 0.8, size=2))])
    return *projections(rng, lab.definite_form(rng, 3)), with_blocks(rng, blocks)[0]


def turned_away(rng) -> Matrices:
    """A positive leading eigenvalue, scores of the wrong sign."""
    leading = rng.uniform(0.5, 2)
    blocks = np.diag([leading, *(leading * rng.uniform(-0.8, -0.1, size=2))])
    return *projections(rng, -lab.definite_form(rng, 3)), with_blocks(rng, blocks)[0]


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


def draw(results) -> lab.Picture:
    """What layers were made for against what was found."""
    shapes = ["boolean-1d", "polytope", "hyperplanes", "polytope x subspace", "origin"]
    names = [*shapes, "unknown"]
    counts = np.zeros((len(names), len(names)), int)
    for _, result in results:
        found = result.found if result.verdict == "reached" else "unknown"
        counts[names.index(result.made_for), names.index(found)] += 1
    figure, axes = style.canvas(panel=(6.2, 4.6))
    colours = style.density_colours()
    axes.imshow(counts, cmap=colours, vmin=-counts.max(), vmax=counts.max())
    for (row, column), count in np.ndenumerate(counts):
        if count:
            # Cells are light or dark whatever the page behind them.
            shade = "#ffffff" if count > counts.max() / 4 else "#222222"
            axes.text(column, row, str(count), ha="center", va="center", color=shade)
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


experiment = lab.experiment(
    run,
    "The matrices of a layer tell the limit of its tokens",
    room="observables",
    seconds=15,
)
