r"""Normalised attention cannot throw a token far.

Every output of softmax, L2, Sinkhorn, masked or sigmoid attention is $V$ applied to an
average of the tokens seen, of mass at most one. A token at the largest distance $R(t)$
from the origin therefore moves away at speed $\|V\|_2 R(t)$ at most, and the whole
support stays in a ball that grows exponentially. Linear and unnormalised attention are
no averages: their tokens can leave every ball at a finite depth.

Growth is measured in units of the bound: the exponent
$\log(R(t)/R_0) \,/ \int_0^t \|V(s)\|_2\,\mathrm{d}s$ must not exceed $1$.
"""

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.errors import check
from meanformer.plotting import draw_curves, mark_values, style


class Parameters(lab.Parameters):
    """Sizes of the random trials."""

    trials: int = lab.setting(16, full=64, help="random clouds per kind", at_least=1)
    count: int = lab.setting(12, full=24, help="tokens in a cloud, $n$", at_least=1)
    dimension: int = lab.setting(3, full=4, help="dimension, $d$", at_least=1)
    depth: float = lab.setting(1.0, full=2.0, help="depth of the random flows", above=0)
    beta: float = lab.setting(1.0, help=r"inverse temperature, $\beta$", at_least=0)
    seed: int = lab.setting(0, help="seed of the clouds and matrices", at_least=0)


IN_UNITS = lab.theory("growth in units of the bound, at all depths of all trials")
AVERAGES = lab.theorem(
    "averages",
    "Under softmax, L2, Sinkhorn, masked and sigmoid attention the support obeys "
    r"$R(t) \le e^{\int_0^t \|V(s)\|_2\,\mathrm{d}s}\, R_0$.",
    "CACP25, well-posedness for compactly supported data",
    source=IN_UNITS,
)
HEADS = lab.theorem(
    "heads",
    "With several heads of values $C_h$ the support obeys "
    r"$R(t) \le e^{t \sum_h \|C_h\|_2}\, R_0$.",
    "CACP25, well-posedness for compactly supported data",
    source=IN_UNITS,
)
SHARP = lab.observation(
    "sharp",
    r"The exponent is the best possible: a single token under $V = c\,I$ has "
    "$R(t) = e^{ct} R_0$.",
    source=lab.closed_form("$e^{t}$, for $c = R_0 = 1$"),
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
ESCAPES = lab.observation(
    "escapes",
    "That token, and one under unnormalised attention, leave the ball of radius "
    r"$e^{t\|V\|_2} R_0$.",
    source=lab.theory("a growth above 1, in units of the bound, refutes it"),
)


@lab.experiment("The support grows at most exponentially", room="flows", seconds=15)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Measure the growth under every kind, and under the two that are no averages."""
    growth = {
        name: growth_of(*kind, parameters)
        for name, kind in progress.over(KINDS.items(), 0.8)
    }
    *averages, heads = growth.values()
    depths, sharp = lone_token(mf.Softmax, 1.0)
    alone = {
        "linear": lone_token(mf.Linear, 0.45),
        "unnormalised": lone_token(mf.Unnormalised, 0.1),
    }
    times, linear = alone["linear"]
    final, bound, dense = reference_radii()
    return lab.Outcome(
        findings=[
            AVERAGES.at_most(averages, 1.0),
            HEADS.at_most(heads, 1.0),
            SHARP.close_to(sharp, np.exp(depths), tolerance=1e-8),
            REFERENCE_RADIUS.close_to(final, dense, tolerance=1e-8),
            REFERENCE_BOUND.at_most(final, bound),
            BLOW_UP.close_to(linear, (1 - 2 * times) ** -0.5, relative_tolerance=1e-7),
            ESCAPES.above([np.log(r[-1]) / t[-1] for t, r in alone.values()], 1.0),
        ],
        pictures=[draw_growth(growth, parameters.depth, alone)],
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


KINDS = {
    "softmax": (mf.Softmax, held),
    "softmax, depth-dependent": (mf.Softmax, swelling),
    "L2": (mf.L2, held),
    "Sinkhorn": (mf.Sinkhorn, held),
    "causal softmax": (mf.Softmax, masked),
    "sigmoid": (mf.Sigmoid, held),
    "two heads": (mf.Softmax, two_heads),
}


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

    trials, n, d = parameters.trials, parameters.count, parameters.dimension
    keys = jr.split(jr.key(parameters.seed), 3)  # the same data for every kind
    points, masses = (
        jr.normal(keys[0], (trials, n, d)),
        jr.exponential(keys[1], (trials, n)),
    )
    matrices = jr.normal(keys[2], (trials, 3, d, d)) / np.sqrt(d)
    growth, reached = trial(points, masses / masses.sum(1, keepdims=True), matrices)
    check(
        bool((reached == parameters.depth).all()),
        f"A flow ended at depth {reached.min()} instead of {parameters.depth}.",
    )
    return np.asarray(growth) / np.linalg.norm(matrices[:, 2], 2, axis=(1, 2))[:, None]


def reference_radii() -> tuple[float, float, float]:
    """The radius of the reference tokens at depth 1, its bound, and SciPy's."""
    attention, cloud = lab.reference_attention(), lab.reference_cloud()
    path = mf.solve(mf.Flow(attention), cloud, 1.0, save=2, rtol=1e-10, atol=1e-12)
    start, final = map(float, path.statistics["radius"])
    tokens = lab.dense_flow(attention, cloud, 1.0)
    bound = np.exp(np.linalg.norm(attention.value, 2)) * start
    return final, bound, np.linalg.norm(tokens, axis=1).max()


def lone_token(kind, depth: float) -> tuple[np.ndarray, np.ndarray]:
    """Depths and radii of a single token under identity matrices, from radius 1."""
    flow = mf.Flow(mf.identity_attention(kind, 2))
    cloud = mf.TokenCloud(jnp.array([[1.0, 0.0]]))
    path = mf.solve(flow, cloud, depth, save=41, rtol=1e-10, atol=1e-12)
    return np.asarray(path.depths), np.asarray(path.statistics["radius"])


def draw_growth(growth, depth: float, alone) -> lab.Picture:
    """Growth against the bound: averages on the left, the others on the right."""
    figure, (left, right) = style.canvas(2)
    fastest = {name: values.max(axis=0) for name, values in growth.items()}
    depths = np.linspace(0, depth, len(fastest["softmax"]) + 1)[1:]
    draw_curves(depths, fastest, left, ylabel="growth in units of the bound")
    mark_values(1, left, axis="y")
    left.set(title="averages: below the bound", xlabel="depth $t$")
    left.set(xlim=(0, depth), ylim=(0, 1.8), yticks=[0, 0.5, 1])
    left.legend(loc="upper left", ncols=2)
    for name, curve in alone.items():
        right.plot(*curve, label=name)
    depths, look = alone["linear"][0], {"color": style.GREY, "label": "bound $e^t$"}
    right.plot(depths, np.exp(depths), "--", **look)
    right.set(title="no averages: above it", ylabel="radius $R(t)$")
    right.set(xlabel="depth $t$")
    right.legend()
    return lab.Picture(
        figure,
        r"Left: the fastest growing of all random clouds under each attention that "
        r"averages, as $\log(R(t)/R_0) \,/ \int_0^t \|V\|_2$; the bound is the dotted "
        r"line. Right: a single token under linear and under unnormalised attention "
        r"leaves the ball of the bound.",
    )
