r"""The leading eigenvector of $V$ sorts tokens onto parallel hyperplanes.

If the eigenvalue $\lambda_1$ of $V$ of largest modulus is real, simple and positive,
and $\langle Q\varphi_1, K\varphi_1\rangle > 0$ for its eigenvector, then the rescaled
tokens $z = e^{-tV}x$ tend to at most three parallel hyperplanes $\{\varphi_1^*(z) =
c\}$, one on each side of zero and perhaps one through it. In the other coordinates
nothing is said: along eigenvectors with negative eigenvalues tokens drift apart. The
flow itself is hard to follow by brute force: in these coordinates errors are amplified
like $e^{2\lambda_1t}$. Here it is solved until attention is Boolean and goes on in
closed form. Two defects of a published script show beside it: its classical Runge-Kutta
method is Euler's, and the step to prove that is taken here.
"""

from dataclasses import dataclass

import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers.limits import agreement_finding, dense_finding
from meanformer.observables import find_limit
from meanformer.observables.limits.spectrum import leading_positive
from meanformer.plotting import (
    PlaneFrames,
    SpaceFrames,
    draw_direction,
    draw_hyperplanes,
    draw_paths,
    draw_paths_3d,
    style,
)

PLANE = ((0.64709742, 0.81911926), (0.61210449, 0.63263484))
FIRST_SPACE = (
    (0.2362413, 0.0599536, 0.40506019),
    (0.81321448, 0.49948705, 0.33754772),
    (0.2160645, 0.38505272, 0.14588075),
)
SECOND_SPACE = (
    (0.18608476, 0.34391026, 0.13905949),
    (0.35244288, 0.6694859, 0.39992145),
    (0.46685606, 0.17094454, 0.42092308),
)
CODIMENSION = (
    (0.92761287, 0.94333073, 0.3827744),
    (0.94333073, 0.59991396, 0.47825472),
    (0.3827744, 0.47825472, 0.46668605),
)
MATRICES = {
    "plane": PLANE,
    "space": FIRST_SPACE,
    "space, second": SECOND_SPACE,
    "codimension two": CODIMENSION,
}
EIGENVALUES = (1.3479896139, -0.0682573539)
VECTOR, FUNCTIONAL = (0.7598109326, 0.6501440969), (0.6647784745, 0.7612067074)
OFFSETS = (-0.2391782389, 0.6517280994)


@dataclass(frozen=True)
class Parameters:
    """Sizes of the random clouds."""

    tokens: int = lab.setting(20, full=40, help="tokens of the movies", at_least=4)
    seed: int = lab.setting(1, help="seed of all that is random", at_least=0)
    movie: lab.Movies = lab.movie_setting()


SPECTRUM = lab.observation(
    "spectrum",
    "The published $V$ of the plane has the eigenvalues $1.3479896139$ and "
    r"$-0.0682573539$, with $\varphi_1 = (0.7598109326, 0.6501440969)$ and "
    r"$\varphi_1^* = (0.6647784745, 0.7612067074)$.",
)
TWO = lab.observation(
    "offsets",
    r"The six tokens end on the hyperplanes $\varphi_1^*(z) = -0.2391782389$ (token "
    "three) and $0.6517280994$ (all others, led by the sixth).",
)
DENSE = lab.observation(
    "dense",
    "At depth $8$, far behind the hand-over to the closed form, they are where an "
    "implicit dense program finds them.",
)
THREE = lab.theorem(
    "at-most-three",
    "Under all four published matrices there are at most three hyperplanes.",
    "GLPR23b, Theorem on hyperplanes",
    source=lab.theory(),
)
AGREES = lab.theorem(
    "agrees",
    "Each of these runs reaches the predicted limit.",
    "GLPR23b, Theorem on hyperplanes",
)
CODIM = lab.conjecture(
    "codimension-two",
    "For the published symmetric $V$ with two positive eigenvalues tokens settle in "
    "two coordinates: followers come closer to their leader in the second one like "
    r"$e^{-\lambda_2t}$.",
    "GLPR23b, conjecture on several leading eigenvalues",
    source=lab.theory("the second eigenvalue; measured on a dense program"),
)
EULER = lab.observation(
    "published-step",
    "A classical Runge-Kutta step whose stages move all tokens by the same vector, "
    "as in a published script, is Euler's: largest difference of the two.",
    source=lab.theory("only differences enter"),
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Follow tokens under the published matrices."""
    rng = np.random.default_rng(parameters.seed)
    six = find_limit(lab.plain_attention(PLANE), lab.six_tokens())
    shown = {}
    for name, value in progress.over(list(MATRICES.items()), 1.0):
        points = rng.uniform(-5, 5, size=(parameters.tokens, len(value)))
        shown[name] = find_limit(lab.plain_attention(value), mf.TokenCloud(points))
    reports = [six, *shown.values()]
    offsets = [report.detection.offsets for report in reports]
    counts = [0 if found is None else len(found) for found in offsets]
    return lab.Outcome(
        findings=[
            *six_findings(six),
            THREE.inside(counts, 1, 3),
            agreement_finding(AGREES, reports, share=1.0),
            codimension_finding(shown["codimension two"]),
            euler_finding(),
        ],
        pictures=[draw_plane(six, shown["plane"]), draw_space(shown)],
        movies=movies_of(shown),
    )


def six_findings(six):
    """Spectrum, offsets and the dense program."""
    found, source = six.prediction, lab.tabulated()
    spectrum = [
        *np.real(found.spectrum.eigenvalues),
        *found.spectrum.vectors[0],
        *found.functionals[0],
    ]
    digits = [*EIGENVALUES, *VECTOR, *FUNCTIONAL]
    return (
        SPECTRUM.close_to(spectrum, digits, tolerance=1e-10, source=source),
        TWO.close_to(six.detection.offsets, OFFSETS, tolerance=1e-9, source=source),
        dense_finding(DENSE, six, 8.0, 1e-6, "LSODA"),
    )


def codimension_finding(report):
    """The rate in the second settled coordinate, behind the hand-over."""
    _, functionals, values = leading_positive(np.array(CODIMENSION))
    found, path = report.detection, report.trajectory
    depths = found.depth + np.array([0.5, 3.0]) * report.prediction.time_scale
    attention, cloud = path.flow.velocity.attention, path.cloud(-1)
    gaps = []
    for depth in depths:
        z = lab.dense_rescaled_flow(attention, cloud, depth, start=found.depth)
        gaps.append((z - z[found.follows]) @ functionals[1])
    # Followers of followers come later.
    others = found.follows != np.arange(len(found.follows))
    direct = (found.phase.follows == found.follows) & others
    rates = np.log(np.abs(gaps[0][direct] / gaps[1][direct]))
    return CODIM.close_to(rates / np.diff(depths), values[1], tolerance=1e-4)


def euler_finding():
    """The published scheme against Euler's, over fifty steps."""
    attention, step = lab.plain_attention(PLANE), 0.1
    ours = theirs = np.array(lab.six_tokens().points)
    largest = 0.0
    for _ in range(50):
        ours = ours + step * dense_rescaled_velocity(attention, ours, ours)
        theirs = published_step(attention, theirs, step)
        largest = max(largest, np.abs(ours - theirs).max())
    return EULER.at_most(largest, 1e-13)


def dense_rescaled_velocity(attention, tokens, frozen) -> np.ndarray:
    """Attention among frozen tokens applied to differences of others."""
    weights = np.full(len(tokens), 1 / len(tokens))
    mixed = lab.dense_velocity(attention, weights, tokens, frozen)
    return mixed - tokens @ np.asarray(attention.value).T


def published_step(attention, tokens, step: float) -> np.ndarray:
    """Four stages, in each of which all tokens are moved by the same vector.

    Attention is that of the first stage, and only differences of tokens enter: the
    shift drops out, and the four slopes are equal.
    """
    scores = tokens @ np.asarray(attention.score).T @ tokens.T
    shares = np.exp(scores - scores.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    moved = np.empty_like(tokens)
    for token in range(len(tokens)):
        slopes, shift = [], 0.0
        for weight in (0.5, 0.5, 1.0, 0.0):
            shifted = tokens + shift
            mixed = shares[token] @ (shifted - shifted[token])
            slopes.append(mixed @ np.asarray(attention.value).T)
            shift = weight * step * slopes[-1]
        moved[token] = tokens[token] + step / 6 * (np.array([1, 2, 2, 1]) @ slopes)
    return moved


def draw_plane(six, planar) -> lab.Picture:
    """Paths in the plane, and the leading coordinate against depth."""
    figure, (left, right) = style.canvas(2, panel=(4.6, 3.8))
    path = six.continued(np.linspace(0, 6, 121))
    draw_paths(path, left)
    found = six.prediction
    draw_hyperplanes(found.functionals[0], six.detection.offsets, left)
    draw_direction(found.spectrum.vectors[0], left, label=r"$\varphi_1$")
    left.set(xlabel="$z_1$", ylabel="$z_2$")
    depths = np.linspace(0, 6 / found.spectrum.leading.real, 161)
    heights = planar.continued(depths).points @ found.functionals[0]
    colours = np.where(planar.detection.follows == planar.detection.leaders[0], 0, 1)
    for token, line in enumerate(np.asarray(heights).T):
        right.plot(depths, line, color=style.PALETTE[colours[token]], linewidth=1.1)
    right.set(xlabel="depth $t$", ylabel=r"$\varphi_1^*(z_i(t))$")
    return lab.Picture(
        figure,
        "Left: the six tokens, the two lines they tend to, and the leading "
        f"eigenvector. Right: the leading coordinate of {heights.shape[1]} tokens "
        "that start uniformly in $[-5, 5]^2$; colours tell the leader.",
    )


def draw_space(shown) -> lab.Picture:
    """Paths in space with their planes; and codimension two."""
    names = ["space", "space, second", "codimension two"]
    figure, panels = style.canvas(3, panel=(4.2, 4.0), subplot_kw={"projection": "3d"})
    for axes, name in zip(panels, names, strict=True):
        report = shown[name]
        rate = report.prediction.spectrum.leading.real
        path = report.continued(np.linspace(0, 5 / rate, 81))
        draw_paths_3d(path, axes, is_labelled=False)
        draw_hyperplanes(
            report.prediction.functionals[0], report.detection.offsets, axes
        )
        axes.set(xlabel="$z_1$", ylabel="$z_2$", zlabel="$z_3$")
        axes.set_title(name)
    return lab.Picture(
        figure,
        "Rescaled tokens under the three published matrices of space, from blue to "
        "gold, with the planes they tend to. In the last one a second eigenvalue is "
        "positive, and tokens gather on lines in the planes.",
    )


def movies_of(shown) -> list[lab.Movie]:
    """The plane with its lines, and space with its planes."""
    plane, space = shown["plane"], shown["space"]
    lines = (plane.prediction.functionals[0], plane.detection.offsets)
    planes = (space.prediction.functionals[0], space.detection.offsets)
    return [
        lab.Movie(
            plane.continued(np.linspace(0, 3, 121)),
            "Rescaled tokens of the plane on their way to two parallel lines.",
            draw=PlaneFrames(hyperplanes=lines),
        ),
        lab.Movie(
            space.continued(np.linspace(0, 4, 121)),
            "Rescaled tokens of space on their way to two parallel planes.",
            draw=SpaceFrames(hyperplanes=planes),
        ),
    ]


experiment = lab.experiment(
    run,
    "The leading eigenvector of V sorts tokens onto hyperplanes",
    room="observables",
    seconds=15,
)
