r"""When the covariance of a Gaussian becomes infinite.

Under softmax attention $\dot S$ is quadratic in $S$, so the covariance may become
infinite at a finite depth. With $V = vI$ the law is explicit,
$S(t)^{-1} = S_0^{-1} - 2\beta vt\,A_s$ with $A_s = \tfrac12(A + A^\top)$; with $V$
positive definite the depth of the blow-up lies between two bounds. Sinkhorn attention
never blows up. L2 attention does not if $K$ has full column rank, and can if not: a
theorem of global existence needs that hypothesis.

In one dimension every kind has a clock, a function of the variance that grows linearly
with depth.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import scipy.linalg

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers.gaussians import COVARIANCE, KINDS, softmax_of
from meanformer.gaussian import centred
from meanformer.gaussian.without_warnings import quiet_solve
from meanformer.plotting import draw_eigenvalues, draw_slope, style

EXPLICIT_SCORE = np.array([[1.0, 0.3], [0.0, -0.5]])
POSITIVE_SCORE = np.array([[1.0, 0.4], [-0.6, 0.5]])
POSITIVE_VALUE = np.array([[2.0, 0.5], [0.5, 1.0]])
# Query, key and value of L2 attention that blows up although its weights are bounded.
SINGULAR = np.array([[0.0, 1.0]]), np.array([[1.0, 0.0]]), np.diag([0.0, 1.0])
# How near to a blow-up the covariance is looked at, as shares of its depth.
LEFT = np.concatenate(
    [[1.0], 1 - np.geomspace(0.03, 0.85, 10), np.geomspace(0.1, 1e-4, 13)]
)
# Depths saved along flows without a blow-up.
SAVED = 21
# The flows in one dimension.
QUERY, KEY, VALUE, BETA, MEAN, VARIANCE = 0.9, 1.0, 0.7, 1.3, 0.2, 0.5


@dataclass(frozen=True)
class Parameters:
    """How many random cases, and how far."""

    cases: int = lab.setting(12, full=200, help="random cases of each kind", at_least=2)
    depth: float = lab.setting(
        0.8, help="depth of the flows in one dimension", above=0, at_most=0.95
    )
    dimension: int = lab.setting(
        2, full=5, help="dimension of the random Sinkhorn and L2 cases", at_least=2
    )
    horizon: float = lab.setting(2.0, help="depth of those", above=0, at_most=4)
    seed: int = lab.setting(0, help="seed of the random cases", at_least=0)


EXPLICIT = lab.theorem(
    "explicit-time",
    "With $V = I$ softmax attention blows up at "
    r"$t^* = 1/(2\beta\lambda_{\max}(S_0^{1/2}A_sS_0^{1/2}))$.",
    "CACP25, Gaussian data (the explicit law: theory page on Gaussians)",
    source=lab.closed_form("the generalised eigenvalue, by SciPy"),
)
TRACE = lab.theorem(
    "explicit-law",
    r"On the way there $S(t)^{-1} = S_0^{-1} - 2\beta t\,A_s$, until a ten-thousandth "
    "of $t^*$ is left.",
    "CACP25, Gaussian data (the explicit law: theory page on Gaussians)",
    source=lab.closed_form(r"trace of $(S_0^{-1} - 2\beta tA_s)^{-1}$"),
)
LOWER = lab.theorem(
    "lower-bound",
    r"Softmax attention does not blow up before $1/(2\beta|V||A||S_0|)$.",
    "CACP25, Gaussian data (the constant: theory page on Gaussians)",
)
UPPER = lab.theorem(
    "upper-bound",
    "With $V$ and $A_s$ positive definite it has blown up by "
    r"$d/(2\beta\lambda_{\min}(A_s)\lambda_{\min}(V)^2\mathrm{tr}(V^{-1}S_0))$.",
    "CACP25, Gaussian data (the constant: theory page on Gaussians)",
)
LINE_CLOCKS = lab.theorem(
    "one-dimension",
    r"In one dimension $-1/s$ (softmax), $-1/s + 2\beta k^2\log s$ (L2), "
    r"$u - \coth(u/2)$ with $\sinh u = 2|b|s$ (Sinkhorn) and $-1/(s + m^2)$ (linear) "
    "grow linearly with depth.",
    "CACP25, Gaussian data (one dimension: theory page on Gaussians)",
)
LINE_MEANS = lab.theorem(
    "one-dimension-means",
    "The means follow from the variances in closed form.",
    "CACP25, Gaussian data (one dimension: theory page on Gaussians)",
)
GROWTH = lab.theorem(
    "growth",
    "In one dimension with $va > 0$ the variance grows like $e^{2v(q/k)t}$ under L2 "
    "and like $e^{2vt}$ under Sinkhorn attention.",
    "CACP25, Gaussian data (one dimension: theory page on Gaussians)",
    source=lab.closed_form(r"$2vq/k$ and $2v$, against the rate at depth 12"),
)
SINGULAR_TIME = lab.theorem(
    "singular-key-time",
    r"L2 attention with $K = (1, 0)$, $Q = (0, 1)$, $V = \mathrm{diag}(0, 1)$ blows "
    r"up at $t^* = (1 + 2\beta S_{11})/(2\beta S_{12}) = 5$.",
    "CACP25, Gaussian data (a counterexample where $K$ is singular: theory page on "
    "Gaussians)",
    source=lab.closed_form(),
)
SINGULAR_LAW = lab.theorem(
    "singular-key-law",
    "There $S_{12}$ grows like $1/(t^* - t)$ and $S_{22}$ like its square: "
    "$S = (1, 0.6, 2.4)$ at depth $2.5$ and $(1, 3, 60)$ at $4.5$.",
    "CACP25, Gaussian data (a counterexample where $K$ is singular: theory page on "
    "Gaussians)",
    source=lab.closed_form(r"$S_{12}(0)/(1 - t/t^*)$ and $S_{22}(0)/(1 - t/t^*)^2$"),
)
SINKHORN = lab.theorem(
    "sinkhorn-global",
    r"Under Sinkhorn attention $\mathrm{tr}\,S(t) \le e^{2|V|t}\,\mathrm{tr}\,S_0$, "
    "whatever $Q$ and $K$.",
    "CACP25, Gaussian data (the constant: theory page on Gaussians)",
)
L2_BOUND = lab.theorem(
    "l2-global",
    "Under L2 attention with $K$ of full column rank "
    r"$\mathrm{tr}\,S(t) \le e^{2|V||A|t/\sigma_{\min}(K)^2}\,\mathrm{tr}\,S_0$.",
    "CACP25, Gaussian data (the constant: theory page on Gaussians)",
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Run into blow-ups, and past depths where there are none."""
    symmetric, inverse = EXPLICIT_SCORE + EXPLICIT_SCORE.T, np.linalg.inv(COVARIANCE)
    blow_up = 1 / scipy.linalg.eigh(symmetric, inverse)[0][-1]
    runs = (softmax_of(EXPLICIT_SCORE), blow_up), (mf.L2(*SINGULAR), 5.0)
    explicit, singular = (
        blown_up(layer, COVARIANCE, np.append(depth * (1 - LEFT), 2 * depth))
        for layer, depth in progress.over(runs, 0.3)
    )
    times, bounds = [], []
    for score, value, spread in progress.over(positive_cases(parameters), 0.1):
        # As many depths as in the other runs, which spares a compilation.
        depths = np.linspace(0, 1e3, len(LEFT) + 1)
        path = blown_up(softmax_of(score, value), spread, depths)
        times.append(float(path.depths[-1]))
        size = np.prod(np.linalg.norm([value, score, spread], 2, axis=(1, 2)))
        slowest, least = (
            np.linalg.eigvalsh(one)[0] for one in ((score + score.T) / 2, value)
        )
        trace = np.trace(np.linalg.solve(value, spread))
        bounds.append([1 / (2 * size), 2 / (2 * slowest * least**2 * trace)])
    line = {
        name: line_path(kind, parameters.depth)
        for name, kind in progress.over(KINDS.items(), 0.3)
    }
    late = [line_path(kind, 12.0) for kind in (mf.L2, mf.Sinkhorn)]
    ratios = [
        trace_ratios(kind, parameters)
        for kind in progress.over((mf.Sinkhorn, mf.L2), 0.3)
    ]
    inverses = inverse - blow_up * (1 - LEFT)[:, None, None] * symmetric
    spreads = np.asarray(singular.covariances)[: len(LEFT)]
    low, high = np.array(bounds).T
    over_bound = lab.closed_form("measured depth over the bound")
    over_exponent = lab.closed_form(
        r"$\log(\mathrm{tr}\,S(t)/\mathrm{tr}\,S_0)$ over the exponent"
    )
    return lab.Outcome(
        findings=[
            EXPLICIT.close_to(
                float(explicit.depths[-1]), blow_up, relative_tolerance=1e-8
            ),
            TRACE.close_to(
                np.asarray(explicit.statistics["trace"])[: len(LEFT)],
                np.trace(np.linalg.inv(inverses), axis1=1, axis2=2),
                relative_tolerance=1e-4,
            ),
            LOWER.at_least(times / low, 1.0, source=over_bound),
            UPPER.at_most(times / high, 1.0, source=over_bound),
            *line_findings(line),
            GROWTH.close_to(
                [2 * float(path.slopes[-1, 0, 0]) for path in late],
                [2 * VALUE * QUERY / KEY, 2 * VALUE],
                tolerance=1e-4,
            ),
            SINGULAR_TIME.close_to(
                float(singular.depths[-1]), 5.0, relative_tolerance=1e-8
            ),
            SINGULAR_LAW.close_to(
                spreads[:, [0, 0, 1], [0, 1, 1]],
                [1.0, 0.3, 0.6] / LEFT[:, None] ** np.arange(3),
                relative_tolerance=1e-4,
            ),
            SINKHORN.at_most(ratios[0], 1.0, source=over_exponent),
            L2_BOUND.at_most(ratios[1], 1.0, source=over_exponent),
        ],
        pictures=[draw_blow_ups(explicit, blow_up, singular), draw_line(line)],
    )


def blown_up(
    layer, spread: np.ndarray, depths: np.ndarray
) -> mf.flows.GaussianTrajectory:
    """The flow in a clock that resolves the blow-up, which is its last depth."""
    path = quiet_solve(
        layer,
        centred(spread),
        float(depths[-1]),
        save=depths,
        solver=mf.LongDepth(),
        rtol=1e-11,
        atol=1e-13,
    )
    if path.blow_up is None:
        raise ArithmeticError(f"no blow-up was met. {path.message}")
    return path


def positive_cases(parameters: Parameters):
    """Scores, values and covariances for which both bounds exist, random but one."""
    random = np.random.default_rng(parameters.seed)
    cases = [(POSITIVE_SCORE, POSITIVE_VALUE, COVARIANCE)]
    for _ in range(parameters.cases):
        roots = random.standard_normal((3, 2, 2))
        score, value, spread = (root @ root.T + 0.1 * np.eye(2) for root in roots)
        turn = random.standard_normal()
        cases.append((score + turn * np.array([[0, 1], [-1, 0]]), value, spread))
    return cases


def line_path(kind, depth: float) -> mf.flows.GaussianTrajectory:
    """The flow in one dimension."""
    flow = mf.Flow(kind(*(np.array([[one]]) for one in (QUERY, KEY, VALUE)), beta=BETA))
    mu = mf.Gaussian(jnp.array([MEAN]), jnp.array([[VARIANCE]]))
    return mf.solve(flow, mu, depth, rtol=1e-12, atol=1e-13)


def clock_and_rate(name: str, variance, mean=0.0):
    """The function of the variance that grows linearly with depth, and its rate."""
    rate = 2 * BETA * VALUE * KEY * QUERY
    if name == "softmax":
        return -1 / variance, rate
    if name == "linear":
        return -1 / (variance + mean**2), rate
    if name == "L2":
        return -1 / variance + 2 * BETA * KEY**2 * np.log(variance), 2 * rate
    u = np.arcsinh(4 * BETA * KEY * QUERY * variance)
    return u - 1 / np.tanh(u / 2), 2 * VALUE


def line_findings(line: dict[str, mf.flows.GaussianTrajectory]):
    """Clocks and means at the saved depths against the integrated equations."""
    clocks, lines, found, expected = [], [], [], []
    for name, path in line.items():
        depths, means = np.asarray(path.depths), np.asarray(path.means)[:, 0]
        variances = np.asarray(path.covariances)[:, 0, 0]
        clock, rate = clock_and_rate(name, variances, means)
        clocks.append(clock)
        lines.append(clock_and_rate(name, VARIANCE, MEAN)[0] + rate * depths)
        spread = np.sqrt(variances / VARIANCE)
        eased = (1 / VARIANCE - 1 / variances) / (4 * BETA * KEY * QUERY)
        growth = {
            "softmax": np.exp(VALUE * depths) * spread,
            "L2": np.exp(eased) * spread,
            "Sinkhorn": np.exp(VALUE * depths),
            "linear": spread,
        }
        found.append(means)
        expected.append(MEAN * growth[name])
    source = lab.closed_form("the integrated equations")
    return (
        LINE_CLOCKS.close_to(clocks, lines, tolerance=1e-9, source=source),
        LINE_MEANS.close_to(found, expected, tolerance=1e-9, source=source),
    )


def trace_ratios(kind, parameters: Parameters) -> list[np.ndarray]:
    """Traces along flows of random cases over their bounds, in logarithms."""
    random, size = np.random.default_rng(parameters.seed), parameters.dimension
    ratios = []
    for query, key, value, root in random.standard_normal(
        (parameters.cases, 4, size, size)
    ):
        flow, mu = mf.Flow(kind(query, key, value)), centred(root @ root.T / size)
        path = mf.solve(flow, mu, parameters.horizon, save=SAVED, rtol=1e-8)
        rate = np.linalg.norm(value, 2)
        if kind is mf.L2:
            rate *= np.linalg.norm(key.T @ query, 2) / np.linalg.norm(key, -2) ** 2
        traces, depths = np.asarray(path.statistics["trace"]), np.asarray(path.depths)
        ratios.append(np.log(traces / traces[0])[1:] / (2 * rate * depths[1:]))
    return ratios


def draw_blow_ups(explicit, blow_up, singular) -> lab.Picture:
    """Eigenvalues against the depth that is left until the blow-up."""
    figure, axes = style.canvas()
    for label, path, depth, colour, power in (
        ("softmax, $V = I$", explicit, blow_up, style.BLUE, -1),
        ("L2, $K$ of rank one", singular, 5.0, style.ORANGE, -2),
    ):
        values, left = path.statistics["eigenvalues"][: len(LEFT)], depth * LEFT
        draw_eigenvalues(left, values, axes, label=label, color=colour, slope=None)
        name = f"$(t^*-t)^{{{power}}}$"
        draw_slope(left[1:], 2 * float(values[-1, 0]), power, axes, label=name)
    axes.set(xlabel="depth left, $t^* - t$")
    axes.invert_xaxis()
    axes.legend(loc="upper left")
    return lab.Picture(
        figure,
        "Both eigenvalues of the covariance, from the same start, against the depth "
        "that is left until the blow-up; one stays bounded, the other grows like "
        "$(t^* - t)^{-1}$ under softmax and like $(t^* - t)^{-2}$ under L2 attention "
        "(dashed).",
    )


def draw_line(line) -> lab.Picture:
    """Variances in one dimension, solved and by their clocks."""
    figure, axes = style.canvas()
    for (name, path), colour in zip(line.items(), style.PALETTE, strict=False):
        variances = np.asarray(path.covariances)[:, 0, 0]
        axes.plot(path.depths, variances, "o", color=colour, label=name)
        fine = np.linspace(VARIANCE, variances.max(), 100)
        # Only the clock of linear attention needs the mean, which goes with the root.
        clock, rate = clock_and_rate(name, fine, MEAN * np.sqrt(fine / VARIANCE))
        axes.plot((clock - clock[0]) / rate, fine, color=colour, linewidth=1)
    axes.set(xlabel="depth $t$", ylabel="variance $s(t)$")
    axes.legend()
    return lab.Picture(
        figure,
        "Variance in one dimension, solved (dots) and from the clock of its kind "
        "(lines).",
    )


experiment = lab.experiment(
    run,
    "When the covariance of a Gaussian becomes infinite",
    room="gaussian",
    seconds=25,
)
