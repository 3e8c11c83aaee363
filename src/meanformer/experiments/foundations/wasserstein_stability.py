r"""Two measures that start close stay close, and how close.

The flow of softmax attention is stable in the Wasserstein distance:
$W_2(\mu_t,\nu_t) \le e^{\int_0^t L(R(s))\,\mathrm{d}s}\,W_2(\mu_0,\nu_0)$, with
$L(R) = \|V\|[\beta aR^2 + (1+2\beta aR^2)e^{2\beta aR^2}]$, $a = \|A\|_2$. The
constant is true and enormous. Along a computed path the largest eigenvalue of the
symmetric part of the weighted Jacobian gives a bound of the right size. Three numbers
are shown together: what is observed, the bound along the path, and the bound known
beforehand.
"""

import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import scipy.integrate
import scipy.optimize

import meanformer as mf
import meanformer.experiments as lab
from meanformer.plotting import draw_curves, style

SHIFT = ((1.0, -1.0), (0.5, 0.3), (-0.2, 0.8), (0.0, 1.0))


@dataclass(frozen=True)
class Parameters:
    """Sizes of the random trials."""

    trials: int = lab.setting(6, full=60, help="random pairs of clouds", at_least=1)
    count: int = lab.setting(16, full=48, help="tokens in a cloud, $n$", at_least=2)
    depth: float = lab.setting(1.0, help="depth of the flows", above=0)
    seed: int = lab.setting(0, help="seed of the random clouds", at_least=0)


OBSERVED = lab.observation(
    "observed-growth",
    "The two reference clouds, $0.0501$ apart, part by the factor $1.488$ up to "
    "depth $1$.",
    source=lab.other_method(
        "the dense formula, solved by SciPy's DOP853, and the best matching "
        "among all permutations"
    ),
)
CONSTANT = lab.observation(
    "a-priori-constant",
    "The bound known beforehand is $e^{242.17}$ for them.",
    source=lab.other_method(r"$\int_0^1 L(R(s))\,\mathrm{d}s$ by SciPy's quadrature"),
)
A_PRIORI = lab.theorem(
    "a-priori",
    r"$W_2(\mu_t,\nu_t) \le e^{\int_0^t L(R(s))\,\mathrm{d}s}\,W_2(\mu_0,\nu_0)$: the "
    "logarithm of the observed growth over that of the bound is at most $1$.",
    "CACP25, stability with respect to the initial measure",
    source=lab.theory("all depths of all trials"),
)
A_POSTERIORI = lab.theorem(
    "a-posteriori",
    r"Observed growth over the bound along the path, $e^{\int_0^t \lambda_{\max}}$, "
    "is at most $1$.",
    "CACP25, stability with respect to the initial measure (the bound along the "
    "path: theory page on flows)",
    source=lab.theory("maximised over clouds between the two flows"),
)
SHARP = lab.observation(
    "sharp",
    r"$\mathrm{Lip}_x \le \beta\|V\|aR^2$ is sharp: half masses at $\pm Ru$ with "
    r"$|A^\top u| = a$ attain it at $x = 0$.",
    source=lab.closed_form(r"$\beta\|V\|aR^2$"),
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Compare observed growth with both bounds, for reference and random clouds."""
    flow, *pair = reference_pair(parameters.depth)
    growth = mf.flows.growth_factor(flow, *pair)
    trials = progress.over(range(parameters.trials))
    rows = [random_trial(parameters, trial) for trial in trials]
    a_priori, a_posteriori = (np.array([row[i] for row in rows]) for i in (4, 5))
    return lab.Outcome(
        findings=[
            *reference_findings(),
            A_PRIORI.at_most(a_priori, 1.0),
            A_POSTERIORI.at_most(a_posteriori, 1.0, tolerance=1e-6),
            sharpness(),
        ],
        pictures=[draw(growth, pair[0], bound_before(flow, pair))],
        tables=[
            lab.Table(
                ["$n$", "$W_2$ at depth 0", "observed growth", "bound along the path"],
                [row[:4] for row in rows],
                "Random pairs of clouds under softmax attention.",
            )
        ],
    )


def reference_pair(depth: float):
    """The flow of the reference matrices from two nearby clouds of equal weights."""
    flow, points = mf.Flow(lab.reference_attention()), lab.reference_cloud().points
    options = {"save": 21, "rtol": 1e-10, "atol": 1e-12}
    first = mf.solve(flow, mf.TokenCloud(points), depth, **options)
    moved = mf.TokenCloud(points + 0.05 * jnp.array(SHIFT))
    return flow, first, mf.solve(flow, moved, depth, **options)


def reference_findings():
    """Growth and constant of the reference pair, each by a second method."""
    flow, first, second = reference_pair(1.0)
    clouds = first.cloud(0), second.cloud(0)
    start = float(mf.wasserstein(*clouds))
    observed = float(mf.flows.observed_growth(first, second)[-1])
    before = best_match(*(np.asarray(cloud.points) for cloud in clouds))
    after = best_match(
        *(lab.dense_flow(lab.reference_attention(), cloud, 1.0) for cloud in clouds)
    )
    radius = max(float(path.statistics["radius"][0]) for path in (first, second))
    constant = float(mf.flows.stability_bound(flow, radius, 1.0))
    return (
        OBSERVED.close_to(
            [start, observed, round(start, 4), round(observed, 3)],
            [before, after / before, 0.0501, 1.488],
            tolerance=1e-8,
        ),
        CONSTANT.close_to(
            [constant, round(constant, 2)],
            [integrated_constant(radius), 242.17],
            relative_tolerance=1e-6,
        ),
    )


def best_match(points: np.ndarray, others: np.ndarray) -> float:
    """The distance of two clouds of equal weights, by trying every matching."""
    costs = [
        ((points - others[list(order)]) ** 2).sum() / len(points)
        for order in itertools.permutations(range(len(points)))
    ]
    return min(costs) ** 0.5


def integrated_constant(radius: float) -> float:
    """The exponent of the a priori bound, from its formula."""
    attention = lab.reference_attention()
    norm = np.linalg.norm(attention.value, 2)
    score = np.linalg.norm(attention.score, 2)

    def constant(depth: float) -> float:
        spread = score * (radius * np.exp(norm * depth)) ** 2
        return norm * (spread + (1 + 2 * spread) * np.exp(2 * spread))

    return scipy.integrate.quad(constant, 0, 1, epsabs=0, epsrel=1e-12)[0]


def random_trial(parameters: Parameters, trial: int) -> list:
    """One random pair: sizes, growth, and growth in units of both bounds."""
    keys = jr.split(jr.fold_in(jr.key(parameters.seed), trial), 3)
    points = jr.normal(keys[0], (parameters.count, 2))
    query, key_matrix, value = 0.4 * jr.normal(keys[1], (3, 2, 2))
    flow = mf.Flow(mf.Softmax(query, key_matrix, value))
    moved = points + 0.1 * jr.normal(keys[2], points.shape)
    moved = moved[best_matching(np.asarray(points), np.asarray(moved))]
    options = {"save": 9, "rtol": 1e-9, "atol": 1e-11}
    first, second = (
        mf.solve(flow, mf.TokenCloud(x), parameters.depth, **options)
        for x in (points, moved)
    )
    growth = mf.flows.growth_factor(flow, first, second)
    observed = np.asarray(growth.observed)
    finer = (len(growth.depths) - 1) // (len(first) - 1)
    along = np.exp(np.asarray(growth.log_factors)[::finer])
    start = float(mf.wasserstein(first.cloud(0), second.cloud(0)))
    a_priori = np.log(observed[1:]) / bound_before(flow, (first, second))
    shown = [parameters.count, start, observed[-1], float(along[-1])]
    return [*shown, a_priori, observed / along]


def bound_before(flow: mf.Flow, pair) -> np.ndarray:
    """The exponent of the a priori bound at the later depths of two paths."""
    radius = max(float(path.statistics["radius"][0]) for path in pair)
    depths = np.asarray(pair[0].depths[1:])
    return np.asarray(mf.flows.stability_bound(flow, radius, depths))


def best_matching(points: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """The order of the second cloud that pairs it optimally with the first."""
    costs = ((points[:, None] - moved[None]) ** 2).sum(-1)
    return scipy.optimize.linear_sum_assignment(costs)[1]


def sharpness():
    """The slope in the query at the origin, between two opposite half masses."""
    attention, radius = lab.reference_attention(), 1.7
    left, scales, _ = np.linalg.svd(np.asarray(attention.score))
    pole = radius * jnp.asarray(left[:, 0])
    layer = mf.Softmax(attention.query, attention.key, jnp.eye(2))
    cloud = mf.TokenCloud(jnp.stack([pole, -pole]))
    slope = jax.jacobian(lambda x: layer(cloud, x[None])[0])(jnp.zeros(2))
    return SHARP.close_to(
        float(jnp.linalg.norm(slope, 2)), scales[0] * radius**2, tolerance=1e-10
    )


def draw(growth, path: mf.Trajectory, a_priori: np.ndarray) -> lab.Picture:
    """Observed growth and both bounds along depth."""
    figure, (left, right) = style.canvas(2)
    depths, names = np.asarray(path.depths), ("observed", "bound along the path")
    along = np.interp(depths, growth.depths, growth.log_factors)
    curves = dict(zip(names, (growth.observed, np.exp(along)), strict=True))
    draw_curves(depths, curves, left, marks=("o-", "--"), ylabel="growth of $W_2$")
    left.set(xlabel="depth $t$", title="along the path")
    logs = dict(zip(names, (np.log(growth.observed)[1:], along[1:]), strict=True))
    logs["bound known beforehand"] = a_priori
    draw_curves(depths[1:], logs, right, marks=("o-", "--", "-"), yscale="log")
    right.set(xlabel="depth $t$", ylabel="logarithm of the growth of $W_2$")
    right.set_title("known beforehand")
    return lab.Picture(
        figure,
        "Growth of the distance between two flows of the reference attention: "
        "observed, bounded along the path, and bounded beforehand (right, logarithm "
        "of the growth on a logarithmic scale).",
    )


experiment = lab.experiment(
    run, "The flow is stable in the Wasserstein distance", room="flows", seconds=30
)
