r"""Drawn inwards, tokens collapse slowly, and into a ball.

For $V = -I$ and $K^\top Q = I$ all tokens tend to the origin. The covariance $C$ obeys
$\dot C \approx -2\beta C^2$ once it is small, so that $C(t) \approx I/(2\beta t)$ on
the span of the centred tokens: whatever the start, the cloud becomes round and shrinks
like $t^{-1/2}$. The mean $m$ goes faster, but not exponentially: attention averaged
over the cloud is $m + \tfrac{\beta^2}2\kappa_3{:}C$ to leading order, with the third
central moment $\kappa_3$, so that $m \approx -\tfrac{\beta^2}2\kappa_3{:}C$, which
falls like $t^{-5/2}$ unless the cloud is symmetric. Two opposite tokens $\pm a$ of the
line follow $\dot a = -a\tanh(\beta a^2)$ exactly. The laws of $C$ and $m$ are derived
for small covariances and observed here; that all tokens tend to the origin is a
theorem.
"""

import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers.limits import agreement_finding
from meanformer.observables import find_limit
from meanformer.plotting import draw_paths, draw_slope, style

CASES = ((2, 0.5), (2, 1.0), (2, 2.0), (3, 1.0))  # dimensions and betas


class Parameters(lab.Parameters):
    """Random clouds."""

    tokens: int = lab.setting(12, full=60, help="tokens of a random cloud", at_least=4)
    depth: float = lab.setting(1e3, full=1e4, help="last depth", at_least=1e3)
    seed: int = lab.setting(0, help="seed of the random clouds", at_least=0)


SLOPE = lab.observation(
    "slope",
    "The variance of every cloud falls like $1/t$: fitted exponents over the last "
    "decade of depth.",
    source=lab.theory(r"$\dot C \approx -2\beta C^2$"),
)
CONSTANT = lab.observation(
    "constant",
    r"Random clouds of the plane and of space, $\beta = \tfrac12, 1, 2$, tend to the "
    r"same $2\beta tC \to I$: largest entry of the difference at the last depth.",
    source=lab.theory(r"$C(t) \approx I/(2\beta t)$, for small $C$"),
)
MEAN = lab.observation(
    "mean",
    "The mean of the six tokens at depth $1000$ is "
    r"$-\tfrac12\sum_{jk}\kappa_{ijk}C_{jk}$, with their third central moment "
    r"$\kappa$.",
    source=lab.theory("quasi-static mean; both over the norm of the mean"),
)
MEAN_SLOPE = lab.observation(
    "mean-slope",
    "So the mean of a cloud without symmetry falls like $t^{-5/2}$, not "
    "exponentially: fitted exponents over the last decade of depth.",
    source=lab.theory(r"$\kappa_3 \sim t^{-3/2}$ times $C \sim t^{-1}$"),
)
SCALAR = lab.observation(
    "two-tokens",
    r"Two tokens $\pm a$ follow $\dot a = -a\tanh(a^2)$, from $a = 1$ to depth "
    "$1000$.",
    source=lab.closed_form("the scalar law, by SciPy"),
)
DENSE = lab.observation(
    "dense",
    "The six tokens at depth $20$ are where a dense program finds them.",
    source=lab.other_method("SciPy's DOP853"),
)
AGREES = lab.theorem(
    "agrees",
    "All clouds reach the predicted limit, the origin.",
    "GLPR23b, Theorem on V = -I",
)


@lab.experiment(
    "Drawn inwards, tokens collapse into a ball", room="observables", seconds=12
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Follow the six tokens, random clouds and two tokens for a long depth."""
    six = find_limit(inwards(2), lab.six_tokens())
    rng = np.random.default_rng(parameters.seed)
    clouds = {
        (dimension, beta): random_limit(rng, dimension, beta, parameters)
        for dimension, beta in progress.over(CASES, 0.8)
    }
    reports = [six, *clouds.values()]
    slopes = [report.detection.exponent for report in reports]
    mean_slopes = [mean_exponent(report.trajectory) for report in reports]
    return lab.Outcome(
        findings=[
            SLOPE.close_to(slopes, -1.0, tolerance=0.02),
            CONSTANT.at_most(list(map(distance_to_law, CASES, reports[1:])), 0.03),
            mean_finding(six.trajectory.cloud(-1)),
            MEAN_SLOPE.close_to(mean_slopes, -2.5, tolerance=0.05),
            scalar_finding(),
            dense_finding(),
            agreement_finding(AGREES, reports, share=1.0),
        ],
        pictures=[draw_decay(six, clouds), draw_clouds(six)],
    )


def inwards(dimension: int, beta: float = 1.0) -> mf.Softmax:
    """Attention with V = -I."""
    return lab.plain_attention(-np.eye(dimension), beta=beta)


def random_limit(rng, dimension: int, beta: float, parameters: Parameters):
    """A random cloud, stretched in the first coordinate and off the centre."""
    points = rng.normal(size=(parameters.tokens, dimension)) + 0.5
    points[:, 0] *= 2
    # The mean, of order t^{-5/2}, is lost in errors at the usual tolerance.
    options = {"depth": parameters.depth, "rtol": 1e-12, "atol": 1e-16}
    return find_limit(inwards(dimension, beta), mf.TokenCloud(points), **options)


def distance_to_law(case, report) -> float:
    """How far the covariance, times depth and twice beta, is from the identity."""
    (dimension, beta), path = case, report.trajectory
    scaled = 2 * beta * path.depths[-1] * path.cloud(-1).covariance()
    return float(np.abs(scaled - np.eye(dimension)).max())


def mean_finding(cloud: mf.TokenCloud):
    """The mean, and that at which the third moment balances the attraction."""
    mean, weights = np.asarray(cloud.mean()), np.asarray(cloud.weights)
    centred = np.asarray(cloud.points) - mean
    third = np.einsum("n,ni,nj,nk->ijk", weights, centred, centred, centred)
    slaved = -np.einsum("ijk,jk->i", third, np.asarray(cloud.covariance())) / 2
    size = np.linalg.norm(mean)
    return MEAN.close_to(mean / size, slaved / size, tolerance=0.02)


def dense_finding():
    """The six tokens against the dense program."""
    flow, start = mf.Flow(inwards(2)), lab.six_tokens()
    near = mf.solve(flow, start, 20.0, save=2, rtol=1e-10, atol=1e-12).points[-1]
    return DENSE.close_to(near, lab.dense_flow(inwards(2), start, 20.0), tolerance=1e-8)


def mean_exponent(path: mf.Trajectory) -> float:
    """The power of depth in the norm of the mean, over the last decade."""
    depths = np.asarray(path.depths)
    late = depths >= depths[-1] / 10
    means = np.linalg.norm(path.statistics["mean"], axis=1)[late]
    return float(np.polyfit(np.log(depths[late]), np.log(means), 1)[0])


def scalar_finding():
    """Two opposite tokens of the line against their law."""
    depths, cloud = [0.0, 10.0, 100.0, 1000.0], mf.TokenCloud([[1.0], [-1.0]])
    options = {"save": np.array(depths), "rtol": 1e-11, "atol": 1e-13}
    pair = mf.solve(mf.Flow(inwards(1)), cloud, 1000.0, **options)
    law = lab.by_scipy(lambda _, a: -a * np.tanh(a**2), np.ones(1), depths, atol=1e-14)
    return SCALAR.close_to(pair.points[:, 0], law, tolerance=1e-9)


def draw_decay(six, clouds) -> lab.Picture:
    """Eigenvalues of the covariance against depth."""
    figure, panels = style.canvas(2, panel=(4.4, 3.5))
    for axes, report in zip(panels, (six, clouds[3, 1.0]), strict=True):
        path = report.trajectory
        depths, later = np.asarray(path.depths)[1:], range(1, len(path))
        spectra = [np.linalg.eigvalsh(path.cloud(k).covariance()) for k in later]
        lines = axes.plot(depths, spectra, color=style.BLUE)
        lines[0].set_label("eigenvalues of $C(t)$")
        means = np.linalg.norm(path.statistics["mean"], axis=1)[1:]
        axes.plot(depths, means, color=style.ORANGE, label="norm of the mean")
        late, orange = depths[depths > 1], {"color": style.ORANGE}
        draw_slope(late, 1 / (2 * late[-1]), -1, axes, label=r"$1/(2\beta t)$")
        draw_slope(late, means[-1] / 3, -2.5, axes, label=r"$t^{-5/2}$", **orange)
        axes.set(xscale="log", yscale="log", xlabel="depth $t$")
        axes.set_title(f"dimension {path.points.shape[2]}")
    panels[0].legend(loc="lower left")
    return lab.Picture(
        figure,
        r"Covariance and mean of tokens drawn inwards, $V = -I$: all eigenvalues "
        r"approach $1/(2\beta t)$, while the mean falls like $t^{-5/2}$ (dashed, a "
        r"little below).",
    )


def draw_clouds(six) -> lab.Picture:
    """The six tokens as they are, and blown up by the square root of depth."""
    figure, (left, right) = style.canvas(2, panel=(4.4, 3.7))
    path = six.trajectory
    draw_paths(path, left)
    left.set_title("tokens")
    scale = np.sqrt(2 * np.asarray(path.depths))[:, None, None]
    blown_up = scale * np.asarray(path.points)
    right.plot(*blown_up.transpose(2, 0, 1), linewidth=1.3)
    right.plot(*blown_up[-1].T, "o", color=style.GOLD)
    right.set(aspect="equal", xlabel=r"$\sqrt{2t}\,x_1$", ylabel=r"$\sqrt{2t}\,x_2$")
    right.set_title("blown up")
    return lab.Picture(
        figure,
        r"Left: the six tokens on their way to the origin. Right: the same times "
        r"$\sqrt{2\beta t}$ come to rest: what is left has the identity as covariance, "
        "and keeps a shape of its own.",
    )
