r"""The leading eigenvector of $V$ sorts tokens onto parallel hyperplanes.

If the eigenvalue $\lambda_1$ of $V$ of largest modulus is real, simple and positive,
and $\langle Q\varphi_1, K\varphi_1\rangle > 0$ for its eigenvector, then the rescaled
tokens $z = e^{-tV}x$ tend to at most three parallel hyperplanes $\{\varphi_1^*(z) =
c\}$, one on each side of zero and perhaps one through it. In the other coordinates
nothing is said: along eigenvectors with negative eigenvalues tokens drift apart. The
flow itself is hard to follow by brute force: in these coordinates errors are amplified
like $e^{2\lambda_1t}$. Here it is solved until attention is Boolean and goes on in
closed form; the classical Runge-Kutta step of a published script turns out as Euler's.
"""

import numpy as np
import scipy.special

import meanformer as mf
import meanformer.experiments as lab
from meanformer import plotting
from meanformer.experiments.helpers.limits import agreement_finding, dense_finding
from meanformer.observables import find_limit
from meanformer.observables.limits.spectrum import leading_positive
from meanformer.plotting import style

# The published value matrices.
MATRICES = {
    "plane": ((0.64709742, 0.81911926), (0.61210449, 0.63263484)),
    "space": (
        (0.2362413, 0.0599536, 0.40506019),
        (0.81321448, 0.49948705, 0.33754772),
        (0.2160645, 0.38505272, 0.14588075),
    ),
    "space, second": (
        (0.18608476, 0.34391026, 0.13905949),
        (0.35244288, 0.6694859, 0.39992145),
        (0.46685606, 0.17094454, 0.42092308),
    ),
    "codimension two": (
        (0.92761287, 0.94333073, 0.3827744),
        (0.94333073, 0.59991396, 0.47825472),
        (0.3827744, 0.47825472, 0.46668605),
    ),
}


class Parameters(lab.Parameters):
    """Sizes of the random clouds."""

    tokens: int = lab.setting(20, full=40, help="tokens of the movies", at_least=4)
    seed: int = lab.setting(1, help="seed of all that is random", at_least=0)
    movie: lab.Movies = lab.movie_setting()


DENSE = lab.observation(
    "dense",
    "At depth $8$, far behind the hand-over to the closed form, six tokens of the "
    "plane are where an implicit dense program finds them.",
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


@lab.experiment("Tokens settle on parallel hyperplanes", room="observables", seconds=15)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Follow tokens under the published matrices."""
    rng = np.random.default_rng(parameters.seed)
    six = find_limit(lab.plain_attention(MATRICES["plane"]), lab.six_tokens())
    shown = {}
    for name, value in progress.over(list(MATRICES.items()), 1.0):
        points = rng.uniform(-5, 5, size=(parameters.tokens, len(value)))
        shown[name] = find_limit(lab.plain_attention(value), mf.TokenCloud(points))
    reports = [six, *shown.values()]
    offsets = [report.detection.offsets for report in reports]
    counts = [0 if found is None else len(found) for found in offsets]
    return lab.Outcome(
        findings=[
            dense_finding(DENSE, six, 8.0, 1e-6, "LSODA"),
            THREE.inside(counts, 1, 3),
            agreement_finding(AGREES, reports, share=1.0),
            codimension_finding(shown["codimension two"]),
            euler_finding(),
        ],
        pictures=[draw_plane(six, shown["plane"]), draw_space(shown)],
        movies=[
            movie_of(shown["plane"], 3, "the plane", plotting.PlaneFrames),
            movie_of(shown["space"], 4, "space", plotting.SpaceFrames),
        ],
    )


def codimension_finding(report):
    """The rate in the second settled coordinate, behind the hand-over."""
    _, functionals, values = leading_positive(np.array(MATRICES["codimension two"]))
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
    attention, step = lab.plain_attention(MATRICES["plane"]), 0.1
    ours = theirs = np.array(lab.six_tokens().points)
    value, weights = np.asarray(attention.value), np.full(len(ours), 1 / len(ours))
    largest = 0.0
    for _ in range(50):
        mixed = lab.dense_velocity(attention, weights, ours)
        ours = ours + step * (mixed - ours @ value.T)
        theirs = published_step(value, theirs, step)
        largest = max(largest, np.abs(ours - theirs).max())
    return EULER.at_most(largest, 1e-13)


def published_step(value, tokens, step: float) -> np.ndarray:
    """Four stages, in each of which all tokens are moved by the same vector.

    Attention is that of the first stage, and only differences of tokens enter: the
    shift drops out, and the four slopes are equal.
    """
    shares = scipy.special.softmax(tokens @ tokens.T, axis=1)
    slopes, shift = [], np.zeros_like(tokens)
    for weight in (0.5, 0.5, 1.0, 0.0):
        # Row by row: all tokens, moved by what one of them wants.
        moved = tokens[None, :] + shift[:, None]
        gaps = moved - (tokens + shift)[:, None]
        slopes.append(np.einsum("ij,ijd->id", shares, gaps) @ value.T)
        shift = weight * step * slopes[-1]
    return tokens + step / 6 * np.tensordot([1, 2, 2, 1], slopes, axes=1)


def hyperplanes_of(report) -> tuple[np.ndarray, np.ndarray]:
    """The normal and the offsets of the hyperplanes found."""
    return report.prediction.functionals[0], report.detection.offsets


def draw_plane(six, planar) -> lab.Picture:
    """Paths in the plane, and the leading coordinate against depth."""
    figure, (left, right) = style.canvas(2, panel=(4.6, 3.8))
    path = six.continued(np.linspace(0, 6, 121))
    plotting.draw_paths(path, left)
    found = six.prediction
    plotting.draw_hyperplanes(*hyperplanes_of(six), left)
    plotting.draw_direction(found.spectrum.vectors[0], left, label=r"$\varphi_1$")
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
        plotting.draw_paths_3d(path, axes, is_labelled=False)
        plotting.draw_hyperplanes(*hyperplanes_of(report), axes)
        axes.set(xlabel="$z_1$", ylabel="$z_2$", zlabel="$z_3$", title=name)
    return lab.Picture(
        figure,
        "Rescaled tokens under the three published matrices of space, from blue to "
        "gold, with the planes they tend to. In the last one a second eigenvalue is "
        "positive, and tokens gather on lines in the planes.",
    )


def movie_of(report, depth: float, words: str, frames) -> lab.Movie:
    """Tokens on their way to the hyperplanes."""
    path = report.continued(np.linspace(0, depth, 121))
    caption = f"Rescaled tokens of {words} on their way to two parallel hyperplanes."
    return lab.Movie(path, caption, draw=frames(hyperplanes=hyperplanes_of(report)))
