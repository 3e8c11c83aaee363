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

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import scipy.linalg

import meanformer as mf
import meanformer.experiments as lab
from meanformer.gaussian import centred
from meanformer.gaussian.without_warnings import quiet_solve
from meanformer.plotting import draw_eigenvalues, draw_slope, style

COVARIANCE = np.array([[1.0, 0.3], [0.3, 0.6]])
EXPLICIT_SCORE = np.array([[1.0, 0.3], [0.0, -0.5]])
POSITIVE_SCORE = np.array([[1.0, 0.4], [-0.6, 0.5]])
POSITIVE_VALUE = np.array([[2.0, 0.5], [0.5, 1.0]])
# How near to a blow-up the covariance is looked at, as shares of its depth.
LEFT = np.concatenate(
    [[1.0], 1 - np.geomspace(0.03, 0.85, 10), np.geomspace(0.1, 1e-4, 13)]
)
# Depths saved along flows without a blow-up.
SAVED = 21

# One dimension: query, key, value, beta, mean and variance.
LINE = {"query": 0.9, "key": 1.0, "value": 0.7, "beta": 1.3}
START = {"mean": 0.2, "variance": 0.5}
KINDS = {
    "softmax": mf.Softmax,
    "L2": mf.L2,
    "Sinkhorn": mf.Sinkhorn,
    "linear": mf.Linear,
}


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
)
TRACE = lab.theorem(
    "explicit-law",
    r"On the way there $S(t)^{-1} = S_0^{-1} - 2\beta t\,A_s$, until a ten-thousandth "
    "of $t^*$ is left.",
    "CACP25, Gaussian data (the explicit law: theory page on Gaussians)",
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
)
SINGULAR_TIME = lab.theorem(
    "singular-key-time",
    r"L2 attention with $K = (1, 0)$, $Q = (0, 1)$, $V = \mathrm{diag}(0, 1)$ blows "
    r"up at $t^* = (1 + 2\beta S_{11})/(2\beta S_{12}) = 5$.",
    "CACP25, Gaussian data (a counterexample where $K$ is singular: theory page on "
    "Gaussians)",
)
SINGULAR_LAW = lab.theorem(
    "singular-key-law",
    "There $S_{12}$ grows like $1/(t^* - t)$ and $S_{22}$ like its square: "
    "$S = (1, 0.6, 2.4)$ at depth $2.5$ and $(1, 3, 60)$ at $4.5$.",
    "CACP25, Gaussian data (a counterexample where $K$ is singular: theory page on "
    "Gaussians)",
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
    for _ in progress.over(range(1), 0.3):
        explicit = approached(softmax(EXPLICIT_SCORE), explicit_time())
        singular = approached(singular_layer(), 5.0)
        positive = found_depth(softmax(POSITIVE_SCORE, POSITIVE_VALUE), COVARIANCE)
    bounded = [
        found_depth(softmax(score, value), spread)
        for score, value, spread in progress.over(positive_cases(parameters), 0.1)
    ]
    line = {
        name: line_path(kind, parameters.depth)
        for name, kind in progress.over(KINDS.items(), 0.3)
    }
    late = [line_path(kind, 12.0) for kind in (mf.L2, mf.Sinkhorn)]
    ratios = {
        kind: [
            trace_ratios(kind, case, parameters.horizon)
            for case in random_cases(parameters)
        ]
        for kind in progress.over((mf.Sinkhorn, mf.L2), 0.3)
    }
    cases = [(POSITIVE_SCORE, POSITIVE_VALUE, COVARIANCE), *positive_cases(parameters)]
    times = np.array([positive, *bounded])
    low, high = np.array([bounds(*case) for case in cases]).T
    over_bound = lab.closed_form("measured depth over the bound")
    return lab.Outcome(
        findings=[
            EXPLICIT.close_to(
                float(explicit.depths[-1]),
                explicit_time(),
                relative_tolerance=1e-8,
                source=lab.closed_form("the generalised eigenvalue, by SciPy"),
            ),
            explicit_finding(explicit),
            LOWER.at_least(times / low, 1.0, source=over_bound),
            UPPER.at_most(times / high, 1.0, source=over_bound),
            *line_findings(line),
            GROWTH.close_to(
                [2 * float(path.slopes[-1, 0, 0]) for path in late],
                [2 * LINE["value"] * LINE["query"] / LINE["key"], 2 * LINE["value"]],
                tolerance=1e-4,
                source=lab.closed_form(
                    r"$2vq/k$ and $2v$, against the rate at depth 12"
                ),
            ),
            SINGULAR_TIME.close_to(
                float(singular.depths[-1]),
                5.0,
                relative_tolerance=1e-8,
                source=lab.closed_form(),
            ),
            singular_finding(singular),
            bound_finding(SINKHORN, ratios[mf.Sinkhorn]),
            bound_finding(L2_BOUND, ratios[mf.L2]),
        ],
        pictures=[draw_blow_ups(explicit, singular), draw_line(line)],
    )


def softmax(score: np.ndarray, value: np.ndarray | None = None) -> mf.Softmax:
    """Softmax attention with this score, and values that are the identity."""
    value = np.eye(len(score)) if value is None else value
    return mf.Softmax(jnp.asarray(score), jnp.eye(len(score)), jnp.asarray(value))


def singular_layer() -> mf.L2:
    """L2 attention that blows up although its weights are bounded."""
    return mf.L2(
        jnp.array([[0.0, 1.0]]), jnp.array([[1.0, 0.0]]), jnp.diag(jnp.array([0.0, 1]))
    )


def explicit_time() -> float:
    """The depth of the blow-up for values that are the identity."""
    symmetric = EXPLICIT_SCORE + EXPLICIT_SCORE.T
    return 1 / scipy.linalg.eigh(symmetric, np.linalg.inv(COVARIANCE))[0][-1]


def approached(layer, blow_up: float) -> mf.flows.GaussianTrajectory:
    """The flow into its blow-up, saved ever closer to it; the last depth is found."""
    return blown_up(layer, COVARIANCE, np.append(blow_up * (1 - LEFT), 2 * blow_up))


def found_depth(layer, spread: np.ndarray) -> float:
    """The depth at which the integration runs into the blow-up."""
    # As many depths as in the other runs, which spares a compilation.
    depths = np.linspace(0, 1e3, len(LEFT) + 1)
    return float(blown_up(layer, spread, depths).depths[-1])


def blown_up(
    layer, spread: np.ndarray, depths: np.ndarray
) -> mf.flows.GaussianTrajectory:
    """The flow in a clock that resolves the blow-up."""
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


def explicit_finding(path: mf.flows.GaussianTrajectory):
    """The traces against the explicit law, relative."""
    depths = explicit_time() * (1 - LEFT)
    symmetric = EXPLICIT_SCORE + EXPLICIT_SCORE.T
    inverses = np.linalg.inv(COVARIANCE) - depths[:, None, None] * symmetric
    expected = np.trace(np.linalg.inv(inverses), axis1=1, axis2=2)
    found = np.asarray(path.statistics["trace"])[: len(depths)]
    return TRACE.close_to(
        found,
        expected,
        relative_tolerance=1e-4,
        source=lab.closed_form(r"trace of $(S_0^{-1} - 2\beta tA_s)^{-1}$"),
    )


def positive_cases(parameters: Parameters):
    """Random scores, values and covariances for which both bounds exist."""
    random = np.random.default_rng(parameters.seed)
    cases = []
    for _ in range(parameters.cases):
        roots = random.standard_normal((3, 2, 2))
        score, value, spread = (root @ root.T + 0.1 * np.eye(2) for root in roots)
        turn = random.standard_normal()
        cases.append((score + turn * np.array([[0, 1], [-1, 0]]), value, spread))
    return cases


def bounds(score, value, spread) -> tuple[float, float]:
    """Depths before which no blow-up happens, and by which it has happened."""
    size = math.prod(np.linalg.norm(matrix, 2) for matrix in (value, score, spread))
    slowest = np.linalg.eigvalsh((score + score.T) / 2)[0]
    trace = np.trace(np.linalg.solve(value, spread))
    least = np.linalg.eigvalsh(value)[0]
    return 1 / float(2 * size), len(value) / float(2 * slowest * least**2 * trace)


def line_path(kind, depth: float) -> mf.flows.GaussianTrajectory:
    """The flow in one dimension."""
    query, key, value = (jnp.array([[LINE[n]]]) for n in ("query", "key", "value"))
    flow = mf.Flow(kind(query, key, value, beta=LINE["beta"]))
    mu = mf.Gaussian(jnp.array([START["mean"]]), jnp.array([[START["variance"]]]))
    return mf.solve(flow, mu, depth, rtol=1e-12, atol=1e-13)


def clock_and_rate(name: str, variance, mean=0.0):
    """The function of the variance that grows linearly with depth, and its rate."""
    score, beta = LINE["key"] * LINE["query"], LINE["beta"]
    rate = 2 * beta * LINE["value"] * score
    if name == "softmax":
        return -1 / variance, rate
    if name == "linear":
        return -1 / (variance + mean**2), rate
    if name == "L2":
        curvature = 2 * beta * LINE["key"] ** 2
        return -1 / variance + curvature * np.log(variance), 2 * rate
    u = np.arcsinh(2 * (2 * beta * score) * variance)
    return u - 1 / np.tanh(u / 2), 2 * LINE["value"]


def numbers(
    path: mf.flows.GaussianTrajectory,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Depths, means and variances of a flow in one dimension."""
    means, variances = np.asarray(path.means)[:, 0], np.asarray(path.covariances)
    return np.asarray(path.depths), means, variances[:, 0, 0]


def line_findings(line: dict[str, mf.flows.GaussianTrajectory]):
    """Clocks and means at the saved depths against the integrated equations."""
    score, value, start = LINE["key"] * LINE["query"], LINE["value"], START["variance"]
    clocks, lines, found, expected = [], [], [], []
    for name, path in line.items():
        depths, means, variances = numbers(path)
        clock, rate = clock_and_rate(name, variances, means)
        clocks.append(clock)
        lines.append(clock_and_rate(name, start, START["mean"])[0] + rate * depths)
        spread = np.sqrt(variances / start)
        eased = (1 / start - 1 / variances) / (4 * LINE["beta"] * score)
        growth = {
            "softmax": np.exp(value * depths) * spread,
            "L2": np.exp(eased) * spread,
            "Sinkhorn": np.exp(value * depths),
            "linear": spread,
        }
        found.append(means)
        expected.append(START["mean"] * growth[name])
    source = lab.closed_form("the integrated equations")
    return (
        LINE_CLOCKS.close_to(clocks, lines, tolerance=1e-9, source=source),
        LINE_MEANS.close_to(found, expected, tolerance=1e-9, source=source),
    )


def singular_finding(path: mf.flows.GaussianTrajectory):
    """The covariances on the way to the blow-up against their law."""
    growth = 1 / LEFT
    expected = np.stack([np.ones_like(growth), growth, growth**2], axis=1)
    expected = expected * np.array([1.0, 0.3, 0.6])
    spreads = np.asarray(path.covariances)[: len(LEFT)]
    found = np.stack([spreads[:, 0, 0], spreads[:, 0, 1], spreads[:, 1, 1]], axis=1)
    return SINGULAR_LAW.close_to(
        found,
        expected,
        relative_tolerance=1e-4,
        source=lab.closed_form(
            r"$S_{12}(0)/(1 - t/t^*)$ and $S_{22}(0)/(1 - t/t^*)^2$"
        ),
    )


def random_cases(parameters: Parameters):
    """Random queries, keys, values and covariances."""
    random, size = np.random.default_rng(parameters.seed), parameters.dimension
    draws = random.standard_normal((parameters.cases, 4, size, size))
    return [
        (query, key, value, root @ root.T / size) for query, key, value, root in draws
    ]


def trace_ratios(kind, case, depth: float) -> np.ndarray:
    """The trace along the flow over its bound, in logarithms per unit of rate."""
    query, key, value, spread = case
    layer = kind(*map(jnp.asarray, (query, key, value)))
    path = mf.solve(mf.Flow(layer), centred(spread), depth, save=SAVED, rtol=1e-8)
    size = np.linalg.norm(value, 2)
    if kind is mf.L2:
        smallest = np.linalg.norm(key, -2)
        size = size * np.linalg.norm(key.T @ query, 2) / smallest**2
    traces = np.asarray(path.statistics["trace"])
    depths = np.asarray(path.depths)
    return np.log(traces / traces[0])[1:] / (2 * size * depths[1:])


def bound_finding(claim: lab.Claim, ratios: list[np.ndarray]):
    """The growth of the trace over the bound on it, for every case and depth."""
    return claim.at_most(
        np.concatenate(ratios),
        1.0,
        source=lab.closed_form(
            r"$\log(\mathrm{tr}\,S(t)/\mathrm{tr}\,S_0)$ over the exponent"
        ),
    )


def draw_blow_ups(explicit, singular) -> lab.Picture:
    """Traces up to the blow-up, and eigenvalues against the depth that is left."""
    figure, (left, right) = style.canvas(2)
    runs = {
        "softmax, $V = I$": (explicit, explicit_time(), style.BLUE, -1),
        "L2, $K$ of rank one": (singular, 5.0, style.ORANGE, -2),
    }
    for label, (path, blow_up, colour, power) in runs.items():
        depths, statistics = np.asarray(path.depths), path.statistics
        traces = np.asarray(statistics["trace"])[: len(LEFT)]
        left.plot(depths[1 : len(LEFT)], traces[1:], "o-", markersize=2.5, color=colour)
        left.axvline(blow_up, color=colour, linestyle=":", linewidth=1)
        values, rest = (
            np.asarray(statistics["eigenvalues"])[: len(LEFT)],
            blow_up * LEFT,
        )
        draw_eigenvalues(rest, values, right, label=label, color=colour, slope=None)
        name = f"$(t^*-t)^{{{power}}}$"
        draw_slope(rest[1:], 2 * values[-1, 0], power, right, label=name)
    left.set(xscale="log", yscale="log", ylim=(0.9, 1e6))
    left.set(xlabel="depth $t$", ylabel=r"$\mathrm{tr}\,S(t)$")
    right.set(xlabel="depth left, $t^* - t$")
    right.invert_xaxis()
    right.legend(loc="upper left")
    return lab.Picture(
        figure,
        "Left: trace of the covariance from the same start; dotted: the depth of the "
        "blow-up. Right: both eigenvalues against the depth that is left; one stays "
        "bounded, the other grows like $(t^* - t)^{-1}$ under softmax and like "
        "$(t^* - t)^{-2}$ under L2 attention (dashed).",
    )


def draw_line(line) -> lab.Picture:
    """Variances in one dimension, solved and by their clocks."""
    figure, axes = style.canvas()
    for (name, path), colour in zip(line.items(), style.PALETTE, strict=False):
        depths, _, variances = numbers(path)
        axes.plot(depths, variances, "o", color=colour, label=name)
        fine = np.linspace(START["variance"], variances.max(), 100)
        # Only the clock of linear attention needs the mean, which goes with the root.
        means = START["mean"] * np.sqrt(fine / START["variance"])
        clock, rate = clock_and_rate(name, fine, means)
        axes.plot((clock - clock[0]) / rate, fine, color=colour, linewidth=1)
    axes.set(xlabel="depth $t$", ylabel="variance $s(t)$")
    axes.legend()
    return lab.Picture(
        figure,
        "Variance in one dimension, solved (dots) and from the clock of its kind "
        "(lines).",
    )


experiment = lab.Experiment(
    name="gaussian-blowup",
    title="When the covariance of a Gaussian becomes infinite",
    room="gaussian",
    parameters=Parameters,
    run=run,
    seconds=25,
)
