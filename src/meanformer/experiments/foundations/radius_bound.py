r"""Normalised attention cannot throw a token far.

Every output of softmax, L2, Sinkhorn, masked or sigmoid attention is $V$ applied to an
average of the tokens seen, of mass at most one. A token at the largest distance $R(t)$
from the origin therefore moves away at speed $\|V\|_2 R(t)$ at most, and the whole
support stays in a ball that grows exponentially. Linear and unnormalised attention are
no averages: their tokens can leave every ball at a finite depth.

Growth is measured in units of the bound: the exponent
$\log(R(t)/R_0) \,/ \int_0^t \|V(s)\|_2\,\mathrm{d}s$ must not exceed $1$.
"""

from dataclasses import dataclass

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.errors import check
from meanformer.plotting import draw_curves, mark_values, style


@dataclass(frozen=True)
class Parameters:
    """Sizes of the random trials."""

    trials: int = lab.setting(16, full=64, help="random clouds per kind", at_least=1)
    count: int = lab.setting(12, full=24, help="tokens in a cloud, $n$", at_least=1)
    dimension: int = lab.setting(3, full=4, help="dimension, $d$", at_least=1)
    depth: float = lab.setting(1.0, full=2.0, help="depth of the random flows", above=0)
    beta: float = lab.setting(1.0, help=r"inverse temperature, $\beta$", at_least=0)
    seed: int = lab.setting(0, help="seed of the clouds and matrices", at_least=0)


AVERAGES = lab.theorem(
    "averages",
    "Under softmax, L2, Sinkhorn, masked and sigmoid attention the support obeys "
    r"$R(t) \le e^{\int_0^t \|V(s)\|_2\,\mathrm{d}s}\, R_0$.",
    "CACP25, well-posedness for compactly supported data",
)
HEADS = lab.theorem(
    "heads",
    "With several heads of values $C_h$ the support obeys "
    r"$R(t) \le e^{t \sum_h \|C_h\|_2}\, R_0$.",
    "CACP25, well-posedness for compactly supported data",
)
SHARP = lab.observation(
    "sharp",
    r"The exponent is the best possible: a single token under $V = c\,I$ has "
    "$R(t) = e^{ct} R_0$.",
)
REFERENCE_RADIUS = lab.observation(
    "reference-radius",
    "The four reference tokens under softmax reach $R(1) = 1.5681$.",
    source=lab.other_method("the dense formula in NumPy, solved by SciPy's DOP853"),
)
REFERENCE_BOUND = lab.theorem(
    "reference-bound",
    r"Their radius at depth $1$ is at most $e^{\|V\|_2} R_0 = 2.5517$.",
    "CACP25, well-posedness for compactly supported data",
    source=lab.closed_form(r"$e^{\|V\|_2} R_0$"),
)
BLOW_UP = lab.observation(
    "linear-blows-up",
    "Linear attention has no such bound: a single token under $Q=K=V=I$ follows "
    r"$R(t) = R_0\,(1 - 2 R_0^2 t)^{-1/2}$, infinite at $t = 1/(2R_0^2)$.",
    source=lab.closed_form("$(1 - 2t)^{-1/2}$, for $R_0 = 1$"),
)
LINEAR_ESCAPES = lab.observation(
    "linear-escapes",
    r"That token leaves the ball of radius $e^{t\|V\|_2} R_0$.",
)
UNNORMALISED_ESCAPES = lab.observation(
    "unnormalised-escapes",
    "A single token under unnormalised attention leaves that ball, too.",
)

IN_UNITS = lab.theory("growth in units of the bound, at all depths of all trials")


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Measure the growth under every kind, and under the two that are no averages."""
    growth = {
        name: growth_of(*kind, parameters)
        for name, kind in progress.over((AVERAGING | SEVERAL_HEADS).items(), 0.8)
    }
    linear, unnormalised = lone_token(mf.Linear, 0.45), lone_token(mf.Unnormalised, 0.1)
    alone = {"linear": linear, "unnormalised": unnormalised}
    averages = [growth[name] for name in AVERAGING]
    return lab.Outcome(
        findings=[
            AVERAGES.at_most(averages, 1.0, source=IN_UNITS),
            HEADS.at_most(growth["two heads"], 1.0, source=IN_UNITS),
            sharpness(),
            *reference_findings(reference_path()),
            *escape_findings(linear, unnormalised),
        ],
        pictures=[draw_growth(growth, parameters.depth, alone)],
        tables=[growth_table(growth)],
    )


# Random flows. A kind takes an attention and returns the velocity, and how much value
# has acted up to a depth: the integral of the norm of V over the norm of V(0).


def held(attention):
    """The same attention at every depth."""
    return attention, lambda depths: depths


def masked(attention):
    """Each token sees only those before it."""
    return mf.Masked(attention), lambda depths: depths


def swelling(attention):
    r"""Values that change with depth: $V(s) = (1 + \sin 4s)\,V$."""

    def velocity(depth):
        value = (1 + jnp.sin(4 * depth)) * attention.value
        return eqx.tree_at(lambda one: one.value, attention, value)

    return velocity, lambda depths: depths + (1 - jnp.cos(4 * depths)) / 4


def two_heads(attention):
    """A second head, of another kind, with the values of the first transposed."""
    query, key, value = attention.query, attention.key, attention.value
    other = mf.L2(key, query, value.T, beta=attention.beta)
    return mf.MultiHead([attention, other]), lambda depths: 2 * depths


AVERAGING = {
    "softmax": (mf.Softmax, held),
    "softmax, depth-dependent": (mf.Softmax, swelling),
    "L2": (mf.L2, held),
    "Sinkhorn": (mf.Sinkhorn, held),
    "causal softmax": (mf.Softmax, masked),
    "sigmoid": (mf.Sigmoid, held),
}
SEVERAL_HEADS = {"two heads": (mf.Softmax, two_heads)}


def growth_of(kind, arrangement, parameters: Parameters) -> np.ndarray:
    """Growth in units of the bound: one row per trial, one column per depth."""

    @eqx.filter_jit
    @eqx.filter_vmap
    def trial(points, weights, matrices):
        cloud = mf.in_order(mf.TokenCloud(points, weights))
        velocity, amount = arrangement(kind(*matrices, beta=parameters.beta))
        path = mf.solve(mf.Flow(velocity), cloud, parameters.depth)
        radii = path.statistics["radius"]
        return jnp.log(radii[1:] / radii[0]) / amount(path.depths[1:]), path.depths[-1]

    points, weights, matrices = random_data(parameters)
    norms = np.linalg.norm(matrices[:, 2], 2, axis=(1, 2))
    growth, reached = trial(points, weights, matrices)
    check(
        bool((reached == parameters.depth).all()),
        f"A flow ended at depth {reached.min()} instead of {parameters.depth}.",
    )
    return np.asarray(growth) / norms[:, None]


def random_data(parameters: Parameters):
    """Points, weights, and query, key and value matrices; the same for every kind."""
    trials, n, d = parameters.trials, parameters.count, parameters.dimension
    keys = jr.split(jr.key(parameters.seed), 3)
    masses = jr.exponential(keys[1], (trials, n))
    matrices = jr.normal(keys[2], (trials, 3, d, d)) / np.sqrt(d)
    weights = masses / masses.sum(axis=1, keepdims=True)
    return jr.normal(keys[0], (trials, n, d)), weights, matrices


# The reference tokens, and a token alone.


def reference_path() -> mf.Trajectory:
    """The four reference tokens under softmax, up to depth 1."""
    flow = mf.Flow(lab.reference_attention(mf.Softmax))
    return mf.solve(flow, lab.reference_cloud(), 1.0, save=41, rtol=1e-10, atol=1e-12)


def lone_token(kind, depth: float) -> mf.Trajectory:
    """A single token at distance 1 under identity matrices."""
    flow = mf.Flow(mf.identity_attention(kind, 2))
    cloud = mf.TokenCloud(jnp.array([[1.0, 0.0]]))
    return mf.solve(flow, cloud, depth, save=41, rtol=1e-10, atol=1e-12)


def radius(path: mf.Trajectory) -> np.ndarray:
    """Radius of the support along the path."""
    return np.asarray(path.statistics["radius"])


def sharpness():
    """A single token under identity softmax, where the bound is an equality."""
    path = lone_token(mf.Softmax, 1.0)
    exact = np.exp(np.linspace(0, 1, 41))
    source = lab.closed_form("$e^{t}$, for $c = R_0 = 1$")
    return SHARP.close_to(radius(path), exact, tolerance=1e-8, source=source)


def reference_findings(path: mf.Trajectory):
    """The radius at depth 1, against an independent solver and against the bound."""
    final, start = radius(path)[-1], radius(path)[0]
    norm = np.linalg.norm(lab.reference_attention().value, 2)
    tokens = lab.dense_flow(lab.reference_attention(), lab.reference_cloud(), 1.0)
    return (
        REFERENCE_RADIUS.close_to(
            [final, round(float(final), 4)],
            [np.linalg.norm(tokens, axis=1).max(), 1.5681],
            tolerance=1e-8,
        ),
        REFERENCE_BOUND.at_most(final, np.exp(norm) * start),
    )


def escape_findings(linear: mf.Trajectory, unnormalised: mf.Trajectory):
    """The two kinds that are no averages, against the blow-up and the bound."""
    exact = (1 - 2 * np.linspace(0, 0.45, 41)) ** -0.5
    blow_up = BLOW_UP.close_to(radius(linear), exact, relative_tolerance=1e-7)
    unit = lab.theory("a growth above 1, in units of the bound, refutes it")
    escapes = [
        claim.above(np.log(radius(path)[-1]) / path.depths[-1], 1.0, source=unit)
        for claim, path in (
            (LINEAR_ESCAPES, linear),
            (UNNORMALISED_ESCAPES, unnormalised),
        )
    ]
    return blow_up, *escapes


# What there is to look at.


def growth_table(growth: dict[str, np.ndarray]) -> lab.Table:
    """The fastest and the usual growth of each kind."""
    rows = [
        [name, values.shape[0], values.max(), np.median(values)]
        for name, values in growth.items()
    ]
    caption = "Growth in units of the bound (1 is the bound itself)."
    return lab.Table(["attention", "trials", "largest", "median"], rows, caption)


def draw_growth(growth: dict[str, np.ndarray], depth: float, alone) -> lab.Picture:
    """Growth against the bound: averages on the left, the others on the right."""
    figure, (left, right) = style.canvas(2)
    fastest = {name: values.max(axis=0) for name, values in growth.items()}
    depths = np.linspace(0, depth, len(fastest["softmax"]) + 1)[1:]
    draw_curves(depths, fastest, left, ylabel="growth in units of the bound")
    mark_values(1, left, axis="y")
    left.set(title="averages: below the bound", xlabel="depth $t$")
    left.set(xlim=(0, depth), ylim=(0, 1.8), yticks=[0, 0.5, 1])
    left.legend(loc="upper left", ncols=2)
    for name, path in alone.items():
        right.plot(path.depths, radius(path), label=name)
    depths = np.linspace(0, 0.45, 50)
    bound, options = {"bound $e^t$": np.exp(depths)}, {"colours": style.GREY}
    draw_curves(depths, bound, right, marks="--", xlabel="depth $t$", **options)
    right.set(title="no averages: above it", ylabel="radius $R(t)$")
    caption = (
        r"Left: the fastest growing of all random clouds under each attention that "
        r"averages, as $\log(R(t)/R_0) \,/ \int_0^t \|V\|_2$; the bound is the dotted "
        r"line. Right: a single token under linear and under unnormalised attention "
        r"leaves the ball of the bound."
    )
    return lab.Picture(figure, caption)


experiment = lab.experiment(
    run, "The support grows at most exponentially", room="flows", seconds=15
)
