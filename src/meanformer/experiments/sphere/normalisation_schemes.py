r"""Where a layer normalises decides how fast its tokens cluster.

Write a token as $x_i = r_i\theta_i$ and let attention see directions only. Then every
usual placement of the normalisation is the same flow of directions at another speed,
$\dot\theta_i = P_{\theta_i}A_i/s_i$ with $s_i = 1$ after the residual (Post), $r_i$
before attention (Pre), $r_i|A_i|$ on both sides (Peri), $|A_i|/\alpha$ (nGPT),
$\sqrt{1+t}$ (sqrt-scaling), or Post and later Pre (Mix). Radii that grow turn the
exponential collapse into a power of depth.
"""

from functools import partial

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.flows import normalised_flow
from meanformer.observables import Equiangular, mean_cosine
from meanformer.plotting import draw_curves, mark_values, style

COUNT, BETA, SWITCH, DEPTH = 8, 3.0, 2.0, 6.0
SCHEMES = {
    "Post": mf.flows.PostNorm(),
    "Pre": mf.flows.PreNorm(),
    "Peri": mf.flows.PeriNorm(),
    "nGPT": mf.flows.NGPT(),
    "Mix": mf.flows.MixNorm(SWITCH),
    "sqrt": mf.flows.SqrtScaling(),
}
SAVED = np.linspace(0, DEPTH, 25)
# One grid for all that is asked for, so that each scheme is solved once.
DEPTHS = np.unique(np.r_[0:12:49j, np.geomspace(0.3, 1e4, 140), 50, 51, 1e4, 2e4])


class Parameters(lab.Parameters):
    """Sizes of the networks."""

    dimension: int = lab.setting(64, full=512, help="dimension of tokens", at_least=16)
    tokens: int = lab.setting(16, full=64, help="number of tokens", at_least=4)
    layers: int = lab.setting(48, full=64, help="layers of random weights", at_least=24)
    networks: int = lab.setting(16, full=20, help="random networks", at_least=4)
    seed: int = lab.setting(0, help="seed of weights and tokens", at_least=0)


SYSTEM = lab.observation(
    "whole-system",
    "The flow of every scheme, and the equations of one inner product and one "
    "radius, agree along depth with the whole system of tokens.",
    source=lab.other_method("all tokens, solved by SciPy's DOP853"),
)
SLOPE = lab.observation(
    "first-slope",
    "At the start Post, Pre, Mix and sqrt move at the same speed $2q$, Peri and nGPT "
    r"at $2q/|A|$, with $q = 1/(e^\beta + n - 1)$.",
    "KGPR25, initial velocities",
    source=lab.closed_form(r"$|A|^2 = a^2 + (n-1)q^2$ at orthogonal tokens"),
)
EXPONENTIAL = lab.observation(
    "exponential",
    r"In the end the gap $1 - \rho$ falls like $e^{-2t}$ for Post and nGPT and like "
    r"$e^{-4\sqrt t}$ for sqrt.",
    "KGPR25, final velocities",
    source=lab.theory(r"rates $-2$, $-2\alpha$ and $-4$"),
)
POWER = lab.observation(
    "power",
    "For Pre, Peri and Mix it falls like $t^{-2}$: exponents beyond depth $10^4$.",
    "KGPR25, final velocities",
    source=lab.theory(r"$r \sim t$ makes $\dot\rho = 2(1-\rho)/t$"),
)
EARLY = lab.observation(
    "random-early",
    "Under random weights the first layer makes tokens more alike under Peri and nGPT "
    "than under Post and Pre: smallest over largest average cosine.",
    "KGPR25, experiments with random weights",
    source=lab.theory(r"attention shorter than $1$ is stretched"),
)
LATE = lab.observation(
    "random-late",
    "At the last layer Post and nGPT have collapsed and Pre and Peri have not: the "
    "median gap of the former is less than a hundredth of the latter's.",
    "KGPR25, experiments with random weights",
    source=lab.theory("exponential against power"),
)


@lab.experiment(
    "Where a layer normalises decides how fast tokens cluster", room="flows", seconds=50
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Solve flows, models and random networks of all schemes."""
    flows, models, gaps, random = {}, {}, {}, {}
    for index, (name, scheme) in enumerate(progress.over(list(SCHEMES.items()))):
        flows[name] = flow_cosine(scheme)
        models[name] = Equiangular(COUNT, BETA, scheme=scheme)
        gaps[name] = np.asarray(models[name].gap(DEPTHS))
        random[name] = np.asarray(random_cosines(jnp.asarray(index), parameters))
    laws = *flow_findings(flows, models, gaps), *law_findings(gaps)
    pictures = [draw_gaps(gaps), draw_random(random, parameters)]
    return lab.Outcome([*laws, *random_findings(random)], pictures)


def flow_cosine(scheme) -> np.ndarray:
    """Cosine of the first two of eight tokens along the full flow."""
    attention = mf.identity_attention("softmax", COUNT, BETA)
    cloud, flow = mf.TokenCloud(jnp.eye(COUNT)), normalised_flow(attention, scheme)
    path = mf.solve(flow, cloud, DEPTH, save=SAVED, rtol=1e-10, atol=1e-12)
    return first_cosine(np.asarray(path.points))


def first_cosine(points: np.ndarray) -> np.ndarray:
    """Cosine between the first two tokens along depth."""
    units = points / np.linalg.norm(points, axis=2, keepdims=True)
    return np.sum(units[:, 0] * units[:, 1], axis=1)


def whole_system(name: str) -> np.ndarray:
    """The same with the layers of each scheme written out, in NumPy and SciPy."""

    def field(depth, tokens):
        theta = tokens / np.linalg.norm(tokens, axis=1, keepdims=True)
        masses = np.exp(BETA * theta @ theta.T)
        pull = masses @ theta / masses.sum(1, keepdims=True)
        mixed = "Post" if depth < SWITCH else "Pre"
        rule = mixed if name == "Mix" else name
        if rule in ("Peri", "nGPT"):
            pull /= np.linalg.norm(pull, axis=1, keepdims=True)
        if rule in ("Pre", "Peri"):
            return pull
        tangent = pull - np.sum(pull * theta, axis=1, keepdims=True) * theta
        return tangent / (np.sqrt(1 + depth) if rule == "sqrt" else 1)

    # A change of the rule must not lie inside of a step.
    early = lab.by_scipy(field, np.eye(COUNT), SAVED[SAVED <= SWITCH])
    late = lab.by_scipy(field, early[-1], SAVED[SAVED >= SWITCH])
    return first_cosine(np.concatenate([early, late[1:]]))


def flow_findings(flows, models, gaps):
    """Flows and reduced models against the whole system, and first slopes."""
    exact = [[whole_system(name)] * 2 for name in SCHEMES]
    found = [[flows[name], 1 - gaps[name][np.isin(DEPTHS, SAVED)]] for name in SCHEMES]
    slopes = [float(model.velocity(0.0)) for model in models.values()]
    other = 1 / (np.exp(BETA) + COUNT - 1)
    norm = other * np.sqrt(np.exp(2 * BETA) + COUNT - 1)
    expected = 2 * other / np.where(np.isin([*SCHEMES], ["Peri", "nGPT"]), norm, 1)
    return (
        SYSTEM.close_to(found, exact, tolerance=1e-8),
        SLOPE.close_to(slopes, expected, relative_tolerance=1e-12),
    )


def law_findings(gaps):
    """Exponents at the end: in depth, in its root, and in its logarithm."""

    def exponent(name, depths, clock):
        falls = np.diff(np.log(gaps[name][np.isin(DEPTHS, depths)]))
        return float(falls[0] / np.diff(clock)[0])

    late, later = np.array([50.0, 51.0]), np.array([1e4, 2e4])
    clocks = {"Post": late, "nGPT": late, "sqrt": np.sqrt(late + 1)}
    rates = [exponent(name, late, clock) for name, clock in clocks.items()]
    powers = [exponent(name, later, np.log(later)) for name in ("Pre", "Peri", "Mix")]
    return (
        EXPONENTIAL.close_to(rates, [-2, -2, -4], relative_tolerance=1e-6),
        POWER.close_to(powers, -2.0, tolerance=2e-3),
    )


@partial(jax.jit, static_argnums=1)
def random_cosines(index, parameters: Parameters):
    """Average cosines after each layer of networks with random weights, step one."""
    dimension, root = parameters.dimension, parameters.dimension**0.5
    schemes = SCHEMES | {"Mix": mf.flows.MixNorm(parameters.layers / 4)}

    def layer(points, inputs):
        depth, key = inputs
        matrices = jr.normal(key, (3, dimension, dimension)) / root
        attention, cloud = mf.Softmax(*matrices, beta=root), mf.TokenCloud(points)
        layers = [scheme.layers(attention, 1.0) for scheme in schemes.values()]
        branches = [lambda x, s=s: s.velocity(depth, cloud, x, None) for s in layers]
        moved = jax.lax.switch(index, branches, points)
        return moved, mean_cosine(mf.Sphere().retract(moved), cloud.weights)

    def network(key):
        key_x, key_w = jr.split(key)
        start = mf.UniformSphere(dimension).sample(parameters.tokens, key=key_x)
        depths = jnp.arange(parameters.layers, dtype=float)
        return jax.lax.scan(layer, start, (depths, jr.split(key_w, len(depths))))[1]

    return jax.lax.map(network, jr.split(jr.key(parameters.seed), parameters.networks))


def random_findings(random):
    """Who is fast at first, and who collapses."""
    first = {name: np.median(cosines[:, 0]) for name, cosines in random.items()}
    last = {name: np.median(1 - cosines[:, -1]) for name, cosines in random.items()}
    early = min(first["Peri"], first["nGPT"]) / max(first["Post"], first["Pre"])
    late = max(last["Post"], last["nGPT"]) / min(last["Pre"], last["Peri"])
    return EARLY.above(early, 2.0), LATE.below(late, 0.01)


def draw_gaps(gaps) -> lab.Picture:
    """Gaps against depth, with linear and with logarithmic depth."""
    figure, (left, right) = style.canvas(2, panel=(4.6, 3.7))
    cosines = {name: 1 - gap for name, gap in gaps.items()}
    draw_curves(DEPTHS, cosines, left, legend=None, xlabel="depth $t$", xlim=(0, 12))
    left.set_ylabel(r"inner product $\rho$ of any two tokens")
    mark_values(SWITCH, left)
    late = DEPTHS[DEPTHS > 250]
    right.plot(late, 100 / late**2, ":", color=style.INK, label="$t^{-2}$")
    draw_curves(DEPTHS, gaps, right, legend="lower left", xscale="log", yscale="log")
    right.set(xlabel="depth $t$", ylabel=r"gap $1 - \rho$")
    right.set(xlim=(0.25, 1e4), ylim=(1e-12, 2))
    return lab.Picture(
        figure,
        r"Eight orthonormal tokens at $\beta = 3$ under six schemes. Left: Peri and "
        r"nGPT start steepest; Mix leaves Post at the dotted depth. Right: Post, "
        r"nGPT and sqrt collapse exponentially, Pre, Peri and Mix like $t^{-2}$.",
    )


def draw_random(random, parameters: Parameters) -> lab.Picture:
    """Median gaps under random weights, with their bands."""
    figure, axes = style.canvas(panel=(6.4, 3.7))
    layers = np.arange(1, parameters.layers + 1)
    for name, cosines in random.items():
        gaps = np.maximum(1 - cosines, 1e-14)
        low, middle, high = np.quantile(gaps, (0.05, 0.5, 0.95), axis=0)
        axes.fill_between(layers, low, high, alpha=0.18, lw=0)
        axes.plot(layers, middle, label=name)
    axes.set(xlabel="layer", ylabel="median gap", yscale="log", ylim=(1e-8, 1.5))
    axes.legend(loc="lower left")
    return lab.Picture(
        figure,
        rf"Random weights, new in each layer, $\beta = \sqrt d$, {parameters.tokens} "
        f"tokens in dimension $d = {parameters.dimension}$; median and 90% band of "
        f"{parameters.networks} networks. Post and nGPT collapse exponentially, and so "
        "does Mix while it is Post, in the first quarter of the layers.",
    )
