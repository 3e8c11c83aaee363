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


class Parameters(lab.Parameters):
    """Sizes of the random trials."""

    trials: int = lab.setting(6, full=60, help="random pairs of clouds", at_least=1)
    count: int = lab.setting(16, full=48, help="tokens in a cloud, $n$", at_least=2)
    depth: float = lab.setting(1.0, help="depth of the flows", above=0)
    seed: int = lab.setting(0, help="seed of the random clouds", at_least=0)


OBSERVED = lab.observation(
    "observed-growth",
    "The distance of the two reference clouds, $0.0501$ at the start and $1.488$ times "
    "that at depth $1$, is what an ordinary integrator finds.",
    source=lab.other_method(
        "the dense formula, solved by SciPy's DOP853, and the best matching "
        "among all permutations"
    ),
)
CONSTANT = lab.observation(
    "a-priori-constant",
    "The bound known beforehand is $e^{242.17}$ for them at depth $1$.",
    source=lab.other_method(r"$\int_0^t L(R(s))\,\mathrm{d}s$ by SciPy's quadrature"),
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


@lab.experiment(
    "The flow is stable in the Wasserstein distance", room="flows", seconds=30
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Compare observed growth with both bounds, for reference and random clouds."""
    points, flow = lab.reference_cloud().points, mf.Flow(lab.reference_attention())
    moved = points + 0.05 * jnp.array(SHIFT)
    starts, depth = (mf.TokenCloud(points), mf.TokenCloud(moved)), parameters.depth
    reference = log_growths(flow, starts, depth, save=21, rtol=1e-10, atol=1e-12)
    trials = progress.over(range(parameters.trials))
    rows, growths = zip(*(random_trial(parameters, k) for k in trials), strict=True)
    observed, along, beforehand = np.swapaxes(growths, 0, 1)
    return lab.Outcome(
        findings=[
            *reference_findings(starts, depth, reference),
            A_PRIORI.at_most(observed[:, 1:] / beforehand[:, 1:], 1.0),
            A_POSTERIORI.at_most(np.exp(observed - along), 1.0, tolerance=1e-6),
            sharpness(),
        ],
        pictures=[draw(np.linspace(0, depth, 21), reference)],
        tables=[
            lab.Table(
                ["$n$", "$W_2$ at depth 0", "observed growth", "bound along the path"],
                rows,
                "Random pairs of clouds under softmax attention.",
            )
        ],
    )


def log_growths(flow: mf.Flow, starts, depth: float, **options) -> np.ndarray:
    """Logarithms of the growth: observed, bounded along the path, and beforehand."""
    first, second = (mf.solve(flow, cloud, depth, **options) for cloud in starts)
    growth = mf.flows.growth_factor(flow, first, second)
    along = np.interp(first.depths, growth.depths, growth.log_factors)
    beforehand = mf.flows.stability_bound(flow, radius_of(starts), first.depths[1:])
    return np.array([np.log(growth.observed), along, np.append(0, beforehand)])


def radius_of(clouds) -> float:
    """The radius of the smallest ball around the origin that holds the clouds."""
    return max(float(jnp.linalg.norm(c.points, axis=1).max()) for c in clouds)


def reference_findings(starts, depth: float, reference: np.ndarray):
    """Growth and constant of the reference pair, each by a second method."""
    attention = lab.reference_attention()
    before = best_match(*(np.asarray(cloud.points) for cloud in starts))
    after = best_match(*(lab.dense_flow(attention, c, depth) for c in starts))
    found = mf.wasserstein(*starts), np.exp(reference[0, -1])
    exponent = integrated_constant(attention, radius_of(starts), depth)
    return (
        OBSERVED.close_to(found, [before, after / before], tolerance=1e-8),
        CONSTANT.close_to(reference[2, -1], exponent, relative_tolerance=1e-6),
    )


def best_match(points: np.ndarray, others: np.ndarray) -> float:
    """The distance of two clouds of equal weights, by trying every matching."""
    costs = [
        ((points - others[list(order)]) ** 2).sum() / len(points)
        for order in itertools.permutations(range(len(points)))
    ]
    return min(costs) ** 0.5


def integrated_constant(attention, radius: float, end: float) -> float:
    """The exponent of the a priori bound, from its formula."""
    norm, score = (np.linalg.norm(m, 2) for m in (attention.value, attention.score))

    def constant(depth: float) -> float:
        spread = score * (radius * np.exp(norm * depth)) ** 2
        return norm * (spread + (1 + 2 * spread) * np.exp(2 * spread))

    return scipy.integrate.quad(constant, 0, end, epsabs=0, epsrel=1e-12)[0]


def random_trial(parameters: Parameters, trial: int) -> tuple[list, np.ndarray]:
    """One random pair: a row of the table, and its growths."""
    keys = jr.split(jr.fold_in(jr.key(parameters.seed), trial), 3)
    points = jr.normal(keys[0], (parameters.count, 2))
    flow = mf.Flow(mf.Softmax(*(0.4 * jr.normal(keys[1], (3, 2, 2)))))
    moved = points + 0.1 * jr.normal(keys[2], points.shape)
    costs = ((points[:, None] - moved[None]) ** 2).sum(-1)
    moved = moved[scipy.optimize.linear_sum_assignment(costs)[1]]
    starts, depth = (mf.TokenCloud(points), mf.TokenCloud(moved)), parameters.depth
    growths = log_growths(flow, starts, depth, save=9, rtol=1e-9, atol=1e-11)
    final = np.exp(growths[:2, -1])
    return [parameters.count, mf.wasserstein(*starts), *final], growths


def sharpness():
    """The slope in the query at the origin, between two opposite half masses."""
    attention, radius = lab.reference_attention(), 1.7
    left, scales, _ = np.linalg.svd(np.asarray(attention.score))
    pole = radius * jnp.asarray(left[:, 0])
    layer = mf.Softmax(attention.query, attention.key, jnp.eye(2))
    cloud = mf.TokenCloud(jnp.stack([pole, -pole]))
    slope = jax.jacobian(lambda x: layer(cloud, x[None])[0])(jnp.zeros(2))
    steepest = jnp.linalg.norm(slope, 2)
    return SHARP.close_to(steepest, scales[0] * radius**2, tolerance=1e-10)


def draw(depths: np.ndarray, logs: np.ndarray) -> lab.Picture:
    """Observed growth and both bounds along depth."""
    figure, (left, right) = style.canvas(2)
    names = "observed", "bound along the path", "bound known beforehand"
    curves = dict(zip(names[:2], np.exp(logs[:2]), strict=True))
    draw_curves(depths, curves, left, marks=("o-", "--"), ylabel="growth of $W_2$")
    left.set(xlabel="depth $t$", title="along the path")
    curves = dict(zip(names, logs[:, 1:], strict=True))
    draw_curves(depths[1:], curves, right, marks=("o-", "--", "-"), yscale="log")
    right.set(xlabel="depth $t$", ylabel="logarithm of the growth of $W_2$")
    right.set_title("known beforehand")
    return lab.Picture(
        figure,
        "Growth of the distance between two flows of the reference attention: "
        "observed, bounded along the path, and bounded beforehand (right, logarithm "
        "of the growth on a logarithmic scale).",
    )
