r"""Long contexts: one layer either averages or does nothing.

At a fixed temperature a longer context washes attention out; with
$\beta = \gamma\log n$ there is a transition. On $n$ unit tokens with one inner product
$\rho$, one layer of attention maps all of them to one direction if
$\gamma < 1/(1-\rho)$, keeps their directions if $\gamma > 1/(1-\rho)$, and for large
$n$ gives outputs of cosine $4\rho/(1+3\rho)$ at the critical value. For every $n$ the
cosine is a closed form,
$1 - (1-\rho)/(1 + 2\kappa/z + n\kappa/z^2)$ with $z = n^{\gamma(1-\rho)} - 1$ and
$\kappa = 1 + (n-1)\rho$, and the transition sharpens like $1/\log n$.
"""

import jax.numpy as jnp
import jax.random as jr
import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.observables import (
    context_similarity,
    long_context_gamma,
    long_context_similarity,
)
from meanformer.plotting import draw_curves, mark_values, style

RHO = 0.3
PLACES = np.array([0.8, 1.0, 1.2])  # gamma (1 - rho)
POWERS = (6, 12, 50)  # of ten: the lengths of contexts that are drawn


class Parameters(lab.Parameters):
    """Sizes of the clouds that go through an actual layer."""

    largest: int = lab.setting(
        400, full=2000, help="tokens of the largest cloud", at_least=40
    )
    dimension: int = lab.setting(
        512, full=2048, help="dimension of random tokens", at_least=64
    )
    seed: int = lab.setting(0, help="seed of the random tokens", at_least=0)


LAYER = lab.theorem(
    "layer",
    "An actual layer of softmax attention on explicit tokens of one inner product "
    r"gives outputs with the cosine of the closed form, for $\rho$ from $-0.01$ to "
    r"$0.9$ and $\gamma$ from $0$ to $4$.",
    "Rig25, long contexts",
    source=lab.closed_form(),
)
LIMIT = lab.theorem(
    "limit",
    r"At $n = 10^{300}$ the cosines are $1$ below, $4\rho/(1+3\rho)$ at and $\rho$ "
    r"above the critical $\gamma = 1/(1-\rho)$.",
    "Rig25, phase transition of long contexts",
    source=lab.published("three values of the limit, survey Rig25"),
)
WIDTH = lab.observation(
    "width",
    r"The width of the transition in $\gamma(1-\rho)$, from a cosine $0.9$ to $0.4$ "
    r"at $\rho = 0.3$, times $\log n$ tends to $\log(t_1/t_2)$ with "
    r"$\rho t^2 + 2\rho t = (1-\rho)/(1-c) - 1$: at $n = 10^{100}$.",
    source=lab.theory(r"$z = n/t$ up to relative errors of order $1/n$"),
)
RANDOM = lab.observation(
    "random-tokens",
    "Random tokens with a common mean, whose inner products fluctuate, follow the "
    "closed form at their average cosine away from the transition.",
    source=lab.closed_form(r"at the average cosine of the tokens"),
)


@lab.experiment(
    "On a long context one layer either averages or does nothing",
    room="observables",
    seconds=8,
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Run layers on explicit clouds, and compare with the closed form."""
    counts = sorted({10, 100, parameters.largest})
    layers = np.concatenate([layer_cosines(n) for n in progress.over(counts, 0.6)])
    gammas = np.linspace(0, 2.5, 21)
    cloud = random_tokens(parameters)
    random = [context_similarity(cloud, float(g)) for g in progress.over(gammas, 0.4)]
    after, predicted = np.array([(one.after, one.predicted) for one in random]).T
    far = (gammas < 0.3 / (1 - RHO)) | (gammas > 1.6 / (1 - RHO))
    rho = np.array([0.1, 0.3, 0.6, 0.9])[:, None]
    limits = np.hstack([1 + 0 * rho, 4 * rho / (1 + 3 * rho), rho])
    longest = long_context_similarity(1e300, PLACES / (1 - rho), rho)
    return lab.Outcome(
        findings=[
            LAYER.close_to(layers[:, 2], layers[:, 3], tolerance=1e-10),
            LIMIT.close_to(longest, limits, tolerance=1e-12),
            width_finding(),
            RANDOM.close_to(after[far], predicted[far], tolerance=0.02),
        ],
        pictures=[draw_transition(counts, layers), draw_random(gammas, random)],
    )


def equiangular_tokens(count: int, rho: float) -> mf.TokenCloud:
    """Unit vectors with one inner product, in closed form: a shifted identity."""
    spread = np.sqrt(1 - rho)
    shift = (np.sqrt(1 + (count - 1) * rho) - spread) / count
    return mf.TokenCloud(spread * np.eye(count) + shift)


def layer_cosines(count: int) -> np.ndarray:
    r"""Rows of $\rho$, $\gamma(1-\rho)$, the cosine of a layer, and its closed form."""
    rows = []
    for rho in (-0.01 if count <= 100 else 0.0, RHO, 0.9):
        cloud = equiangular_tokens(count, rho)
        for place in (0.0, 0.5, *PLACES, 1.5):
            gamma = min(place / (1 - rho), 4.0)
            outputs = np.asarray(context_similarity(cloud, gamma).outputs)
            exact = float(long_context_similarity(count, gamma, rho))
            rows.append([rho, gamma * (1 - rho), outputs[0] @ outputs[-1], exact])
    return np.array(rows)


def width_finding():
    """How the transition sharpens."""

    def root(cosine):
        excess = (1 - RHO) / (1 - cosine) - 1
        return np.sqrt(1 + excess / RHO) - 1

    ends = [float(long_context_gamma(1e100, cosine, RHO)) for cosine in (0.4, 0.9)]
    width = (ends[0] - ends[1]) * (1 - RHO) * np.log(1e100)
    return WIDTH.close_to(width, np.log(root(0.9) / root(0.4)), relative_tolerance=1e-9)


def random_tokens(parameters: Parameters) -> mf.TokenCloud:
    """Random tokens of the sphere with a common mean."""
    count, dimension = parameters.largest, parameters.dimension
    shift = np.sqrt(RHO / (1 - RHO) / dimension)
    noise = jr.normal(jr.key(parameters.seed), (count, dimension))
    points = noise / np.sqrt(dimension) + shift
    return mf.TokenCloud(points / jnp.linalg.norm(points, axis=1, keepdims=True))


def draw_transition(run_counts, layers) -> lab.Picture:
    """Cosines against the scaled temperature, for growing contexts."""
    figure, axes = style.canvas(panel=(6.0, 4.0))
    places = np.linspace(0, 2, 401)
    counts = {str(n): n for n in run_counts} | {f"10^{{{k}}}": 10.0**k for k in POWERS}
    curves = {
        f"$n = {name}$": long_context_similarity(count, places / (1 - RHO), RHO)
        for name, count in counts.items()
    }
    ink = {"color": style.INK, "markersize": 4}
    _, scaled, found, _ = layers[layers[:, 0] == RHO].T
    axes.plot(scaled, found, "o", label="actual layers", **ink)
    axes.plot(1, 4 * RHO / (1 + 3 * RHO), "D", fillstyle="none", **ink)
    mark_values(1, axes)
    draw_curves(places, curves, axes, colours="depth", legend="lower left")
    axes.set(xlabel=r"$\gamma(1-\rho)$", ylabel="cosine between outputs")
    return lab.Picture(
        figure,
        r"One layer at $\beta = \gamma\log n$ on tokens of inner product $\rho = 0.3$: "
        r"all outputs agree to the left of $\gamma = 1/(1-\rho)$, and are as far apart "
        r"as the tokens to the right. All curves pass near the diamond "
        r"$4\rho/(1+3\rho)$. Dots: layers actually run on explicit tokens.",
    )


def draw_random(gammas, random) -> lab.Picture:
    """Real tokens: before, after, and the prediction at the average cosine."""
    figure, axes = style.canvas(panel=(5.4, 3.6))
    curves = {
        "random tokens, after one layer": [found.after for found in random],
        "equal inner products": [found.predicted for found in random],
        "before the layer": [found.before for found in random],
    }
    mark_values(float(random[0].critical), axes)
    draw_curves(gammas, curves, axes, marks=("o-", "--", "-"))
    axes.set(xlabel=r"$\gamma$", ylabel="average cosine")
    return lab.Picture(
        figure,
        "Random tokens around a common mean, whose inner products fluctuate: the "
        "average cosine after one layer, and the closed form at the average cosine "
        "before it. The dotted line is the critical value.",
    )
