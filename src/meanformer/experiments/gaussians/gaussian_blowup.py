r"""When the covariance of a Gaussian becomes infinite.

Under softmax attention $\dot S$ is quadratic in $S$, so the covariance may become
infinite at a finite depth. With $V = vI$ the law is explicit,
$S(t)^{-1} = S_0^{-1} - 2\beta vt\,A_s$ with $A_s = \tfrac12(A + A^\top)$; with $V$
positive definite the depth of the blow-up lies between two bounds. Sinkhorn attention
never blows up. L2 attention does not if $K$ has full column rank, and can if not: a
theorem of global existence needs that hypothesis. In one dimension every kind has a
clock, a function of the variance that grows linearly with depth.
"""

import jax.numpy as jnp
import numpy as np
import scipy.linalg

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers.gaussians import COVARIANCE, KINDS, softmax_of
from meanformer.gaussian import centred
from meanformer.gaussian.velocity import quiet_solve
from meanformer.plotting import draw_curves, draw_eigenvalues, draw_slope, style

EXPLICIT_SCORE = np.array([[1.0, 0.3], [0.0, -0.5]])
# Query, key and value of L2 attention that blows up although its weights are bounded.
SINGULAR = np.array([[0.0, 1.0]]), np.array([[1.0, 0.0]]), np.diag([0.0, 1.0])
# How near to a blow-up the covariance is looked at, as shares of its depth.
LEFT = np.r_[1.0, 1 - np.geomspace(0.03, 0.85, 10), np.geomspace(0.1, 1e-4, 13)]
# The flows in one dimension.
QUERY, KEY, VALUE, BETA, MEAN, VARIANCE = 0.9, 1.0, 0.7, 1.3, 0.2, 0.5


class Parameters(lab.Parameters):
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
    r"Softmax attention with $V = I$ blows up at $1/(2\beta\lambda_{\max}(S_0A_s))$.",
    "CACP25, Gaussian data (the explicit law: theory page on Gaussians)",
    source=lab.closed_form("the generalised eigenvalue, by SciPy"),
)
TRACE = lab.theorem(
    "explicit-law",
    r"Until $t^*/10^4$ is left of this depth, $S(t)^{-1} = S_0^{-1} - 2\beta t\,A_s$.",
    "CACP25, Gaussian data (the explicit law: theory page on Gaussians)",
    source=lab.closed_form(r"trace of $(S_0^{-1} - 2\beta tA_s)^{-1}$"),
)
LOWER = lab.theorem(
    "lower-bound",
    r"Softmax attention does not blow up before $1/(2\beta|V||A||S_0|)$.",
    "CACP25, Gaussian data (the constant: theory page on Gaussians)",
    source=lab.closed_form("measured depth over the bound"),
)
UPPER = lab.theorem(
    "upper-bound",
    "With $V$ and $A_s$ positive definite it has blown up by "
    r"$d/(2\beta\lambda_{\min}(A_s)\lambda_{\min}(V)^2\mathrm{tr}(V^{-1}S_0))$.",
    "CACP25, Gaussian data (the constant: theory page on Gaussians)",
    source=lab.closed_form("measured depth over the bound"),
)
LINE = lab.theorem(
    "one-dimension",
    r"In one dimension $-1/s$ (softmax), $-1/s + 2\beta k^2\log s$ (L2), "
    r"$u - \coth(u/2)$ with $\sinh u = 2|b|s$ (Sinkhorn) and $-1/(s + m^2)$ (linear) "
    "grow linearly with depth, and the means follow from the variances.",
    "CACP25, Gaussian data (one dimension: theory page on Gaussians)",
    source=lab.closed_form("the integrated equations"),
)
GROWTH = lab.theorem(
    "growth",
    "There $s$ grows like $e^{2v(q/k)t}$ (L2) and $e^{2vt}$ (Sinkhorn) if $va > 0$.",
    "CACP25, Gaussian data (one dimension: theory page on Gaussians)",
    source=lab.closed_form("$vq/k$ and $v$, against half the rate at depth 12"),
)
SINGULAR_TIME = lab.theorem(
    "singular-key-time",
    r"L2 attention with $K = (1, 0)$, $Q = (0, 1)$, $V = \mathrm{diag}(0, 1)$ blows "
    r"up at $t^* = (1 + 2\beta S_{11})/(2\beta S_{12}) = 5$.",
    "CACP25, Gaussian data (where $K$ is singular: theory page on Gaussians)",
    source=lab.closed_form(),
)
SINGULAR_LAW = lab.theorem(
    "singular-key-law",
    "There $S_{12}$ grows like $1/(t^* - t)$ and $S_{22}$ like its square.",
    "CACP25, Gaussian data (where $K$ is singular: theory page on Gaussians)",
    source=lab.closed_form(r"$S_{12}(0)/(1 - t/t^*)$ and $S_{22}(0)/(1 - t/t^*)^2$"),
)
SINKHORN = lab.theorem(
    "sinkhorn-global",
    r"Under Sinkhorn attention $\mathrm{tr}\,S(t) \le e^{2|V|t}\,\mathrm{tr}\,S_0$.",
    "CACP25, Gaussian data (the constant: theory page on Gaussians)",
    source=lab.closed_form(r"$\log(\mathrm{tr}\,S(t)/\mathrm{tr}\,S_0)$ over $2|V|t$"),
)
L2_BOUND = lab.theorem(
    "l2-global",
    "Under L2 attention with $K$ of full column rank "
    r"$\mathrm{tr}\,S(t) \le e^{2|V||A|t/\sigma_{\min}(K)^2}\,\mathrm{tr}\,S_0$.",
    "CACP25, Gaussian data (the constant: theory page on Gaussians)",
    source=lab.closed_form("the same over the exponent of this bound"),
)


@lab.experiment(
    "When covariances of Gaussians become infinite", room="gaussian", seconds=25
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Run into blow-ups, and past depths where there are none."""
    symmetric, inverse = EXPLICIT_SCORE + EXPLICIT_SCORE.T, np.linalg.inv(COVARIANCE)
    blow_up = 1 / scipy.linalg.eigh(symmetric, inverse)[0][-1]
    inverses = inverse - blow_up * (1 - LEFT)[:, None, None] * symmetric
    runs = (softmax_of(EXPLICIT_SCORE), blow_up), (mf.L2(*SINGULAR), 5.0)
    explicit, singular = (
        blown_up(layer, COVARIANCE, np.append(depth * (1 - LEFT), 2 * depth))
        for layer, depth in progress.over(runs, 0.3)
    )
    low, high = over_bounds(parameters, progress).T
    clocks, found, expected = {}, [], []
    for name, kind in progress.over(KINDS.items(), 0.3):
        path = line_path(kind, parameters.depth)
        clock, rate, growth = line_law(name, path)
        clocks[name] = clock - clock[0]
        found += [clocks[name], path.means[:, 0]]
        expected += [rate * path.depths, MEAN * growth]
    late = [line_path(kind, 12.0).slopes[-1, 0, 0] for kind in (mf.L2, mf.Sinkhorn)]
    kinds = progress.over((mf.Sinkhorn, mf.L2), 0.3)
    sinkhorn, distance = (trace_ratios(kind, parameters) for kind in kinds)
    return lab.Outcome(
        findings=[
            EXPLICIT.close_to(explicit.depths[-1], blow_up, relative_tolerance=1e-8),
            TRACE.close_to(
                explicit.statistics["trace"][: len(LEFT)],
                np.trace(np.linalg.inv(inverses), axis1=1, axis2=2),
                relative_tolerance=1e-4,
            ),
            LOWER.at_least(low, 1.0),
            UPPER.at_most(high, 1.0),
            LINE.close_to(found, expected, tolerance=1e-9),
            GROWTH.close_to(late, [VALUE * QUERY / KEY, VALUE], tolerance=5e-5),
            SINGULAR_TIME.close_to(singular.depths[-1], 5.0, relative_tolerance=1e-8),
            SINGULAR_LAW.close_to(
                singular.covariances[: len(LEFT), [0, 0, 1], [0, 1, 1]],
                [1.0, 0.3, 0.6] / LEFT[:, None] ** np.arange(3),
                relative_tolerance=1e-4,
            ),
            SINKHORN.at_most(sinkhorn, 1.0),
            L2_BOUND.at_most(distance, 1.0),
        ],
        pictures=[draw_growth(explicit, blow_up, singular, path.depths, clocks)],
    )


def blown_up(layer, spread: np.ndarray, depths: np.ndarray):
    """The flow in a clock that resolves the blow-up, which is its last depth."""
    options = {"save": depths, "solver": mf.LongDepth(), "rtol": 1e-11, "atol": 1e-13}
    return quiet_solve(layer, centred(spread), float(depths[-1]), **options)


def over_bounds(parameters: Parameters, progress) -> np.ndarray:
    """Depths of blow-ups over their lower and upper bounds, in random cases."""
    random, ratios = np.random.default_rng(parameters.seed), []
    # As many depths as in the other runs, which spares a compilation.
    depths = np.linspace(0, 1e3, len(LEFT) + 1)
    for _ in progress.over(range(parameters.cases), 0.1):
        roots = random.standard_normal((3, 2, 2))
        score, value, spread = (root @ root.T + 0.1 * np.eye(2) for root in roots)
        slowest, least = (np.linalg.eigvalsh(one)[0] for one in (score, value))
        score = score + random.standard_normal() * np.array([[0, 1], [-1, 0]])
        depth = float(blown_up(softmax_of(score, value), spread, depths).depths[-1])
        size = np.prod(np.linalg.norm([value, score, spread], 2, axis=(1, 2)))
        trace = np.trace(np.linalg.solve(value, spread))
        ratios.append([depth * 2 * size, depth * slowest * least**2 * trace])
    return np.array(ratios)


def trace_ratios(kind, parameters: Parameters) -> list[np.ndarray]:
    """Traces along flows of random cases over their bounds, in logarithms."""
    random, size = np.random.default_rng(parameters.seed), parameters.dimension
    cases, ratios = random.standard_normal((parameters.cases, 4, size, size)), []
    for query, key, value, root in cases:
        flow, mu = mf.Flow(kind(query, key, value)), centred(root @ root.T / size)
        path = mf.solve(flow, mu, parameters.horizon, save=21, rtol=1e-8)
        rate = np.linalg.norm(value, 2)
        if kind is mf.L2:
            rate *= np.linalg.norm(key.T @ query, 2) / np.linalg.norm(key, -2) ** 2
        traces, depths = np.asarray(path.statistics["trace"]), np.asarray(path.depths)
        ratios.append(np.log(traces / traces[0])[1:] / (2 * rate * depths[1:]))
    return ratios


def line_path(kind, depth: float):
    """The flow in one dimension."""
    flow = mf.Flow(kind(*(np.array([[one]]) for one in (QUERY, KEY, VALUE)), beta=BETA))
    mu = mf.Gaussian(jnp.array([MEAN]), jnp.array([[VARIANCE]]))
    return mf.solve(flow, mu, depth, rtol=1e-12, atol=1e-13)


def line_law(name: str, path: mf.flows.GaussianTrajectory):
    """The clock of the variance, its rate, and by how much the mean has grown."""
    variance, mean = np.asarray(path.covariances)[:, 0, 0], np.asarray(path.means)[:, 0]
    rate, spread = 2 * BETA * VALUE * KEY * QUERY, np.sqrt(variance / VARIANCE)
    shift = np.exp(VALUE * np.asarray(path.depths))
    if name == "softmax":
        return -1 / variance, rate, shift * spread
    if name == "linear":
        return -1 / (variance + mean**2), rate, spread
    if name == "L2":
        eased = (1 / VARIANCE - 1 / variance) / (4 * BETA * KEY * QUERY)
        clock = -1 / variance + 2 * BETA * KEY**2 * np.log(variance)
        return clock, 2 * rate, np.exp(eased) * spread
    u = np.arcsinh(4 * BETA * KEY * QUERY * variance)
    return u - 1 / np.tanh(u / 2), 2 * VALUE, shift


def draw_growth(explicit, blow_up, singular, depths, clocks) -> lab.Picture:
    """Eigenvalues before a blow-up, and the clocks of one dimension."""
    figure, (axes, right) = style.canvas(2)
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
    draw_curves(depths, clocks, right, marks=("o-", "o-", "o-", "x--"))
    right.set(xlabel="depth $t$", ylabel="clock, from its first value")
    return lab.Picture(
        figure,
        "Left: both eigenvalues of two covariances against the depth left until the "
        "blow-up; one stays bounded, the other grows by the dashed powers. Right: "
        "the clocks of one dimension go straight, softmax and linear at one rate.",
    )
