r"""How smooth attention is, as a function of the number of tokens.

The local Lipschitz constant of softmax attention on $n$ tokens in a ball of radius $R$
is at most $\sqrt3\,\|V\|\,(\beta^2a^2R^4(n+1) + n)^{1/2}$, $a = \|A\|_2$, and at most
$L(R)$, which does not depend on $n$. The growth like $\sqrt{n}$ is real: one token
opposite to $n-1$ others attains it, until $n$ reaches $e^{2\beta R^2\gamma}$. Then the
constant of these clouds falls again; which clouds are worst there is not known.
"""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.plotting import draw_curves, draw_slope, mark_sizes, style


class Parameters(lab.Parameters):
    """Sizes of the clouds."""

    sizes: int = lab.setting(
        5, full=6, help="sizes $n = 4, 16, 64, \\dots$", at_least=3
    )
    trials: int = lab.setting(8, full=100, help="random clouds per size", at_least=1)
    radius: float = lab.setting(2.0, help="radius of the ball, $R$", above=0)
    ascent: int = lab.setting(
        30, full=300, help="steps of the maximisation", at_least=1
    )
    seed: int = lab.setting(0, help="seed of the random clouds", at_least=0)


EXACT = lab.observation(
    "power-iteration",
    "The power iteration finds the largest singular value of the Jacobian: for a "
    r"random layer in space, and on the line for the clouds $(-R, R, \dots, R)$ of "
    "$2$, $10$ and $100$ tokens.",
    source=lab.other_method("singular values of the Jacobian of the dense formula"),
)
UPPER = lab.theorem(
    "upper-bounds",
    "No cloud exceeds the smaller of the two upper bounds: constant over bound is at "
    "most $1$.",
    "CAP24, bounds for self-attention on a ball (with n + 1 instead of 4n + 1: "
    "theory page on attention)",
    source=lab.theory("over all clouds measured"),
)
LOWER = lab.theorem(
    "lower-bound",
    r"The adversarial cloud reaches $\sqrt{n-1}\,/\,(1 + (n-1)e^{-2\beta R^2\gamma})$.",
    "CAP24, lower bound",
    source=lab.closed_form("the lower bound"),
)
ROOT = lab.theorem(
    "square-root",
    "Before saturation the constant grows as $n^{1/2}$.",
    "CAP24, lower bound",
)
MAXIMISED = lab.observation(
    "maximised",
    "Ascending from the adversarial cloud of $16$ tokens finds a larger constant, "
    "still below the upper bound.",
    source=lab.theory("from the start of the ascent to the bound"),
)


@lab.experiment(
    "The Lipschitz constant grows like the root of the number of tokens",
    room="attention",
    seconds=30,
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Measure constants of random, adversarial and maximised clouds."""
    gamma = mf.Softmax([[-1.0]], [[1.0]], [[1.0]])  # A = -1, V = 1 on the line
    counts = 4 ** np.arange(1, parameters.sizes + 1)
    adversarial, random = [], []
    for count in progress.over(map(int, counts), 0.7):
        adversarial.append(adversarial_constant(gamma, count, parameters.radius))
        random.append(random_constants(gamma, count, parameters))
    bounds = [mf.lipschitz_bounds(gamma, parameters.radius, int(n)) for n in counts]
    for _ in progress.over(range(1), 0.3):
        maximised = mf.attention.maximise_lipschitz(
            gamma,
            16,
            parameters.radius,
            key=jr.key(parameters.seed),
            steps=parameters.ascent,
            start=mf.attention.adversarial_cloud(gamma, 16, parameters.radius),
        )
    upper = np.array([float(bound.upper) for bound in bounds])
    ratios = np.array([[*r, a] for r, a in zip(random, adversarial, strict=True)])
    return lab.Outcome(
        findings=[
            exactness(gamma, parameters.seed),
            UPPER.at_most(ratios / upper[:, None], 1.0),
            LOWER.at_least(adversarial, [b.lower for b in bounds], tolerance=1e-9),
            root_finding(gamma),
            MAXIMISED.inside(float(maximised.value), adversarial[1], upper[1]),
        ],
        pictures=[draw(counts, adversarial, random, bounds, maximised)],
    )


def adversarial_constant(gamma, count: int, radius: float) -> float:
    """The constant of one token opposite to all others."""
    cloud = mf.attention.adversarial_cloud(gamma, count, radius)
    return float(mf.local_lipschitz(gamma, cloud))


def random_constants(gamma, count: int, parameters: Parameters) -> np.ndarray:
    """Constants of clouds drawn uniformly from the ball."""
    key = jr.fold_in(jr.key(parameters.seed), count)
    shape = (parameters.trials, count, 1)
    points = parameters.radius * jr.uniform(key, shape, minval=-1, maxval=1)
    return np.array([mf.local_lipschitz(gamma, mf.TokenCloud(x)) for x in points])


def exactness(repelling, seed: int):
    """The power iteration against singular values, in space and on the line."""
    layer = mf.Softmax(*(0.6 * jr.normal(jr.key(seed + 2), (3, 3, 3))))
    cases = [(layer, jr.normal(jr.key(seed + 1), (12, 3)))]
    for count in (2, 10, 100):
        cases.append((repelling, jnp.full((count, 1), 1.5).at[0].set(-1.5)))
    # Tokens of no weight make all clouds one size, which is compiled once.
    padded = [(gamma, mf.pad(mf.TokenCloud(points), 100)) for gamma, points in cases]
    return EXACT.close_to(
        [mf.local_lipschitz(*case) for case in padded],
        [dense_constant(*case) for case in cases],
        relative_tolerance=1e-9,
    )


def dense_constant(layer: mf.Softmax, points: jax.Array) -> float:
    """The largest singular value of the Jacobian of the dense formula."""

    def dense(flat):
        tokens = flat.reshape(points.shape)
        scores = (tokens @ layer.query.T) @ (tokens @ layer.key.T).T
        return (jax.nn.softmax(scores, axis=1) @ tokens @ layer.value.T).ravel()

    return float(np.linalg.norm(jax.jacobian(dense)(points.ravel()), 2))


def root_finding(gamma):
    """The exponent of the adversarial constants far below saturation."""
    counts = [4, 16, 64, 256]
    constants = [adversarial_constant(gamma, count, 3.0) for count in counts]
    slope = np.polyfit(np.log(counts), np.log(constants), 1)[0]
    source = lab.theory(r"fitted to $n = 4, \dots, 256$ at $R = 3$, far below $e^{18}$")
    return ROOT.inside(slope, 0.45, 0.55, source=source)


def draw(counts, adversarial, random, bounds, maximised) -> lab.Picture:
    """All constants and bounds on doubly logarithmic axes."""
    figure, axes = style.canvas(panel=(6.2, 4.2))
    curves = {
        "adversarial cloud": adversarial,
        "random clouds, largest": [max(constants) for constants in random],
        "lower bound": [float(bound.lower) for bound in bounds],
        r"$\sqrt{n}$ bound": [float(bound.by_count) for bound in bounds],
    }
    best = {"color": style.GOLD, "markersize": 11, "label": "maximised"}
    axes.plot(16, float(maximised.value), "*", **best)
    marks = ("o-", "s-", ":", "--")
    draw_curves(counts, curves, axes, marks=marks, xscale="log", yscale="log")
    draw_slope(counts[:3], adversarial[2], 0.5, axes)
    mark_sizes(counts, axes)
    axes.set(xlabel="tokens $n$", ylabel="local Lipschitz constant")
    return lab.Picture(
        figure,
        r"Local Lipschitz constant against the number of tokens, $A = -1$, $V = \beta "
        r"= 1$ on the line, with both $n$-dependent bounds and a line of slope "
        r"$\tfrac12$. The adversarial clouds bend where $n$ approaches $e^{2R^2}$.",
    )
