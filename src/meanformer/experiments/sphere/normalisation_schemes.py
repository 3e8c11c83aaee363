r"""Where a layer normalises decides how fast its tokens cluster.

Write a token as $x_i = r_i\theta_i$ and let attention see directions only. Then every
usual placement of the normalisation is the same flow of directions at another speed,
$\dot\theta_i = P_{\theta_i}A_i/s_i$ with $s_i = 1$ after the residual (Post), $r_i$
before attention (Pre), $r_i|A_i|$ on both sides (Peri), $|A_i|/\alpha$ (nGPT),
$\sqrt{1+t}$ (sqrt-scaling), or Post and later Pre (Mix). Radii that grow turn the
exponential collapse into a power of depth. Six schemes are compared with the whole
system of tokens solved by SciPy, with their finite networks, and on random weights.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.flows import run_normalised_layers
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
TABULATED = (
    0.9987033043,
    0.4219170507,
    0.5602673761,
    0.9997645242,
    0.9169127290,
    0.7861427632,
)

SAVED = np.linspace(0, DEPTH, 25)
EARLY_DEPTHS, LATE_DEPTHS = np.linspace(0, 12, 49), np.geomspace(0.3, 1e4, 140)
# One grid for all that is asked for, so that each scheme is solved once.
DEPTHS = np.unique([*SAVED, *EARLY_DEPTHS, *LATE_DEPTHS, 50, 51, 400, 1e4, 2e4])
COLOURS = dict(zip(SCHEMES, style.PALETTE, strict=False))


@dataclass(frozen=True)
class Parameters:
    """Sizes of the networks."""

    finest: int = lab.setting(
        480, full=3840, help="layers of the finest network", at_least=240
    )
    dimension: int = lab.setting(
        64, full=512, help="dimension of random weights", at_least=16
    )
    tokens: int = lab.setting(
        16, full=64, help="tokens under random weights", at_least=4
    )
    layers: int = lab.setting(48, full=64, help="layers of random weights", at_least=24)
    networks: int = lab.setting(16, full=20, help="random networks", at_least=4)
    seed: int = lab.setting(0, help="seed of weights and tokens", at_least=0)


TABLE = lab.observation(
    "table",
    r"Eight orthonormal tokens at $\beta = 3$ have, at depth $6$, the inner products "
    "tabulated for all six schemes.",
    source=lab.tabulated(),
)
SYSTEM = lab.observation(
    "whole-system",
    "The flow of every scheme, and the equations of one inner product and one "
    "radius, agree along depth with the whole system of directions and radii.",
    source=lab.other_method("directions and radii, solved by SciPy's DOP853"),
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
    source=lab.theory(r"rates $2$, $2\alpha$ and $4$"),
)
POWER = lab.observation(
    "power",
    "For Pre, Peri and Mix it falls like $t^{-2}$: exponents between depths $10^4$ "
    r"and $2\cdot 10^4$.",
    "KGPR25, final velocities",
    source=lab.theory(r"$r \sim t$ makes $\dot\rho = 2(1-\rho)/t$"),
)
AT_400 = lab.observation(
    "at-400",
    r"At depth $400$ the gaps of Pre, Peri and Mix are $1.691\cdot 10^{-4}$, "
    r"$1.658\cdot 10^{-4}$ and $9.758\cdot 10^{-6}$.",
    source=lab.tabulated(),
)
LAYERS = lab.observation(
    "layers",
    "The finite network of every scheme tends to its flow at first order in the step.",
    source=lab.theory("first order"),
)
EARLY = lab.observation(
    "random-early",
    "Under random weights, new in each layer, the first layer makes tokens more "
    "alike under Peri and nGPT than under Post and Pre: smallest over largest "
    "average cosine.",
    "KGPR25, experiments with random weights",
)
LATE = lab.observation(
    "random-late",
    "At the last layer Post and nGPT have collapsed and Pre and Peri have not: the "
    "median gap of the former is less than a hundredth of the latter's.",
    "KGPR25, experiments with random weights",
    source=lab.theory("exponential against power"),
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Solve flows, models and networks of all schemes."""
    flows, gaps, errors, random = {}, {}, {}, {}
    for index, (name, scheme) in enumerate(progress.over(list(SCHEMES.items()), 1.0)):
        flows[name] = flow_cosines(scheme)
        gaps[name] = np.asarray(model(scheme).gap(DEPTHS))
        errors[name] = layer_errors(scheme, parameters.finest, flows[name][-1])
        random[name] = random_cosines(jnp.asarray(index), parameters)
    return lab.Outcome(
        findings=[
            *flow_findings(flows, gaps),
            *law_findings(gaps),
            LAYERS.inside(
                [np.log2(coarse / fine) for coarse, fine in errors.values()], 0.9, 1.1
            ),
            *random_findings(random),
        ],
        pictures=[draw_gaps(gaps), draw_random(random, parameters)],
    )


def model(scheme) -> Equiangular:
    """Eight tokens at equal angles."""
    return Equiangular(COUNT, BETA, scheme=scheme)


def at(depths, gaps: np.ndarray) -> np.ndarray:
    """The gaps at some depths of the grid."""
    return gaps[np.searchsorted(DEPTHS, depths)]


def flow_cosines(scheme) -> np.ndarray:
    """Inner product of the first two of eight tokens under the full flow."""
    attention = mf.identity_attention("softmax", COUNT, BETA)
    path = mf.solve(
        mf.flows.normalised_flow(attention, scheme),
        mf.TokenCloud(jnp.eye(COUNT)),
        DEPTH,
        save=SAVED,
        rtol=1e-10,
        atol=1e-12,
    )
    return first_cosine(path.points)


def first_cosine(points) -> np.ndarray:
    """Cosine between the first two tokens along depth."""
    first, second = np.asarray(points[:, 0]), np.asarray(points[:, 1])
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return np.sum(first * second, axis=1) / lengths


def whole_system(name: str) -> np.ndarray:
    """Directions and radii of all tokens, in NumPy, by SciPy's DOP853."""

    def field(depth, state):
        theta, radius = state[:, :-1], state[:, -1]
        masses = np.exp(BETA * theta @ theta.T)
        pull = masses @ theta / masses.sum(1, keepdims=True)
        radial, norm = np.sum(theta * pull, axis=1), np.linalg.norm(pull, axis=1)
        mixed = "Post" if depth < SWITCH else "Pre"
        one, zero = np.ones_like(radius), np.zeros_like(radius)
        slowness, growth = {
            "Post": (one, zero),
            "Pre": (radius, radial),
            "Peri": (radius * norm, radial / norm),
            "nGPT": (norm, zero),
            "sqrt": (np.sqrt(1 + depth) * one, zero),
        }[mixed if name == "Mix" else name]
        turning = (pull - radial[:, None] * theta) / slowness[:, None]
        return np.column_stack([turning, growth])

    # A change of the rule must not lie inside of a step.
    start = np.column_stack([np.eye(COUNT), np.ones(COUNT)])
    early = lab.by_scipy(field, start, SAVED[SAVED <= SWITCH])
    late = lab.by_scipy(field, early[-1], SAVED[SAVED >= SWITCH])
    states = np.concatenate([early, late[1:]])
    return np.sum(states[:, 0, :-1] * states[:, 1, :-1], axis=1)


def flow_findings(flows, gaps):
    """Flows and reduced models against the table and the whole system; slopes."""
    exact = [whole_system(name) for name in SCHEMES]
    other = 1 / (np.exp(BETA) + COUNT - 1)
    norm = other * np.sqrt(np.exp(2 * BETA) + COUNT - 1)
    is_stretched = [name in ("Peri", "nGPT") for name in SCHEMES]
    return (
        TABLE.close_to(
            [cosines[-1] for cosines in flows.values()], TABULATED, tolerance=1e-9
        ),
        SYSTEM.close_to(
            [[flows[name], 1 - at(SAVED, gaps[name])] for name in SCHEMES],
            [[cosines, cosines] for cosines in exact],
            tolerance=1e-8,
        ),
        SLOPE.close_to(
            [float(model(scheme).velocity(0.0)) for scheme in SCHEMES.values()],
            2 * other / np.where(is_stretched, norm, 1),
            relative_tolerance=1e-12,
        ),
    )


def law_findings(gaps):
    """Exponents at the end, and gaps at depth 400."""
    ends = np.array([50.0, 51.0])
    clocks = {"Post": ends, "nGPT": ends, "sqrt": np.sqrt(ends + 1)}
    rates = [
        -np.diff(np.log(at(ends, gaps[name])))[0] / np.diff(clock)[0]
        for name, clock in clocks.items()
    ]
    slow = [at([400, 1e4, 2e4], gaps[name]) for name in ("Pre", "Peri", "Mix")]
    return (
        EXPONENTIAL.close_to(rates, [2, 2, 4], relative_tolerance=1e-6),
        POWER.close_to(
            [np.log2(gap[2] / gap[1]) for gap in slow], -2.0, tolerance=2e-3
        ),
        AT_400.close_to(
            [gap[0] for gap in slow],
            [1.691e-4, 1.658e-4, 9.758e-6],
            relative_tolerance=5e-4,
        ),
    )


def layer_errors(scheme, finest: int, limit: float) -> list[float]:
    """Errors at the last depth of a network with half as many layers, and the finest.

    Both are run for the largest number of layers, so that one program serves them.
    """
    attention = mf.identity_attention("softmax", COUNT, BETA)
    cloud, errors = mf.TokenCloud(jnp.eye(COUNT)), []
    for count in (finest // 2, finest):
        step = DEPTH / count
        path = run_normalised_layers(attention, scheme, cloud, finest, step=step)
        errors.append(abs(float(first_cosine(path.points)[count] - limit)))
    return errors


@partial(jax.jit, static_argnums=1)
def random_cosines(index, parameters: Parameters):
    """Average cosines after each layer of networks with random weights, step one."""
    dimension = parameters.dimension
    beta = jnp.sqrt(jnp.asarray(dimension, float))
    # Mix changes after a quarter of the layers.
    schemes = SCHEMES | {"Mix": mf.flows.MixNorm(parameters.layers / 4)}

    def layer(points, inputs):
        depth, key = inputs
        matrices = jr.normal(key, (3, dimension, dimension)) / jnp.sqrt(1.0 * dimension)
        attention, cloud = mf.Softmax(*matrices, beta=beta), mf.TokenCloud(points)
        branches = [
            lambda x, scheme=scheme: scheme.layers(attention, 1.0).velocity(
                depth, cloud, x, None
            )
            for scheme in schemes.values()
        ]
        moved = jax.lax.switch(index, branches, points)
        return moved, mean_cosine(mf.Sphere().retract(moved), cloud.weights)

    def network(key):
        key_x, key_w = jr.split(key)
        start = mf.UniformSphere(dimension).sample(parameters.tokens, key=key_x)
        depths = jnp.arange(parameters.layers, dtype=float)
        weights = jr.split(key_w, parameters.layers)
        return jax.lax.scan(layer, start, (depths, weights))[1]

    keys = jr.split(jr.key(parameters.seed), parameters.networks)
    return jax.lax.map(network, keys)


def random_findings(random):
    """Who is fast at first, and who collapses."""
    first = {name: np.median(cosines[:, 0]) for name, cosines in random.items()}
    last = {name: np.median(1 - cosines[:, -1]) for name, cosines in random.items()}
    early = min(first["Peri"], first["nGPT"]) / max(first["Post"], first["Pre"])
    late = max(last["Post"], last["nGPT"]) / min(last["Pre"], last["Peri"])
    stretched = lab.theory(r"attention shorter than $1$ is stretched")
    return (
        EARLY.above(early, 2.0, source=stretched),
        LATE.below(late, 0.01),
    )


def draw_gaps(gaps) -> lab.Picture:
    """Gaps against depth, with linear and with logarithmic depth."""
    figure, (left, right) = style.canvas(2, panel=(4.6, 3.7))
    early, late = EARLY_DEPTHS, LATE_DEPTHS
    cosines = {name: 1 - at(early, found) for name, found in gaps.items()}
    draw_curves(early, cosines, left, legend=None, xlabel="depth $t$")
    left.set_ylabel(r"inner product $\rho$ of any two tokens")
    mark_values(SWITCH, left)
    shown = {name: at(late, found) for name, found in gaps.items()}
    shown["$t^{-2}$"] = np.where(late > 250, 100 / late**2, np.nan)
    draw_curves(
        late,
        shown,
        right,
        marks=[*["-"] * len(SCHEMES), ":"],
        colours=[*style.PALETTE[: len(SCHEMES)], style.INK],
        legend="lower left",
        xscale="log",
        yscale="log",
        ylim=(1e-12, 2),
        xlabel="depth $t$",
        ylabel=r"gap $1 - \rho$",
    )
    return lab.Picture(
        figure,
        r"Eight orthonormal tokens at $\beta = 3$ under six schemes. Left: Peri and "
        r"nGPT start steepest; Mix leaves Post at the dotted depth. Right: Post, "
        r"nGPT and sqrt collapse exponentially, Pre, Peri and Mix like $t^{-2}$.",
    )


def draw_random(random, parameters: Parameters) -> lab.Picture:
    """Average cosines under random weights, with their bands."""
    figure, (left, right) = style.canvas(2, panel=(4.6, 3.7))
    layers = np.arange(1, parameters.layers + 1)
    for name, cosines in random.items():
        low, middle, high = np.quantile(cosines, (0.05, 0.5, 0.95), axis=0)
        left.fill_between(layers, low, high, color=COLOURS[name], alpha=0.18, lw=0)
        left.plot(layers, middle, color=COLOURS[name], label=name)
        gap = np.maximum(1 - middle, 1e-14)
        right.plot(layers, gap, color=COLOURS[name], label=name)
    left.set(xlabel="layer", ylabel="average cosine")
    right.set(xlabel="layer", ylabel="median gap", yscale="log", ylim=(1e-8, 1.5))
    right.legend(loc="lower left")
    return lab.Picture(
        figure,
        f"Random weights, new in each layer: {parameters.tokens} tokens in dimension "
        rf"{parameters.dimension}, $\beta = \sqrt d$, step 1, entries of variance "
        f"$1/d$; median and 90% band over {parameters.networks} networks. Post and "
        "nGPT collapse exponentially, and so does Mix while it is Post, in the first "
        "quarter of the layers; radii that grow slow Pre and Peri down.",
    )


experiment = lab.experiment(
    run,
    "Where a layer normalises decides how fast tokens cluster",
    room="flows",
    seconds=50,
)
