r"""How clustered random tokens are, over depth and temperature.

Thirty-two tokens start uniformly on the sphere and follow softmax attention with
$Q = K = V = I$. The fraction of pairs with $\langle x_i, x_j\rangle > 0.999$, a mean
over many starts, is drawn over depth and $\beta$: the published phase diagrams. In high
dimension random tokens are nearly orthogonal, the angles stay nearly equal, and the
diagram is a sharp front, at the depth
$T(\beta) = \int_0^{0.999} \frac{e^{\beta(1-r)} + n - 1}{2(1-r)((n-1)r + 1)}\,dr$; in
low dimension a wide region of several clusters lies beyond it. The published scheme,
Euler steps and division by the norm, is late, because it also moves along the radius.
"""

import math

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.observables import Equiangular, PhaseDiagram, phase_diagram
from meanformer.plotting import draw_phase_diagram, style

COUNT, LEVEL, HIGH, EULER_STEP = 32, 0.999, 1024, 0.1
LAST, LAST_UNNORMALISED = 30.0, 1.0
STEEPEST = 6.0  # up to here the front of high dimension is compared with the curve
SPAN = 8  # dimension of the tokens moved by random matrices


class Parameters(lab.Parameters):
    """Sizes of the diagrams."""

    starts: int = lab.setting(24, full=2048, help="random starts", at_least=8)
    betas: int = lab.setting(14, full=90, help="inverse temperatures", at_least=4)
    depths: int = lab.setting(121, full=200, help="depths", at_least=61)
    largest: float = lab.setting(9.0, help=r"largest $\beta$ of softmax", at_least=6)
    largest_unnormalised: float = lab.setting(
        8.0, full=9.0, help=r"largest $\beta$ without normalisation", at_least=6
    )
    lowest: int = lab.setting(8, full=2, help="least dimension", at_least=2, at_most=8)
    ensembles: int = lab.setting(
        1, full=5, help="ensembles of random matrices", at_least=1, at_most=5
    )
    drawn: int = lab.setting(6, full=64, help="starts of each of them", at_least=2)
    seed: int = lab.setting(0, help="seed of all starts", at_least=0)


CURVE = lab.observation(
    "equiangular-front",
    rf"In dimension ${HIGH}$ half of the pairs have clustered at the depth "
    r"$T(\beta)$ of tokens at equal angles, within four percent for $\beta \le 6$; "
    r"$T(0) = \frac12\log\frac{(n - 1)(1-\delta) + 1}{\delta}$ with $\delta = 0.001$.",
    "GLPR23, phase diagrams and the curve in high dimension",
    source=lab.closed_form("the time of tokens at equal angles, an integral"),
)
DIMENSION = lab.observation(
    "front-sharpens",
    r"The front tends to that curve with the dimension: at $\beta = 6$ it is further "
    "away in dimension $128$ than in dimension $1024$.",
    source=lab.other_method("the same distance in dimension 1024"),
)
UNNORMALISED = lab.observation(
    "unnormalised-front",
    rf"Without normalisation, in dimension ${HIGH}$, the front follows its "
    r"own curve within six percent for $\beta$ from $5$ to $6$.",
    source=lab.closed_form("the time of tokens at equal angles, an integral"),
)
AGREES = lab.observation(
    "dense-integration",
    "The fractions of a few starts are those of a dense integration.",
    source=lab.other_method("SciPy's DOP853 in double precision"),
)
EULER_ERROR = lab.observation(
    "euler-error",
    "On the same starts the published scheme is late: at some depth its fraction is "
    "less by more than $0.1$.",
    source=lab.other_method("SciPy's DOP853 in double precision"),
)
FOR_EVER = lab.observation(
    "clusters-stay",
    "In no dimension does the fraction ever decrease with depth: smallest increase.",
    source=lab.theory("tokens that are close do not part"),
)
SPAN_FALLS = lab.observation(
    "span-falls",
    r"Under random $K^\top Q$ with $V = I$, redrawn at every unit of depth, tokens "
    r"still end in one point at $\beta = 0.1$: their span has dimension one.",
    source=lab.theory("convex combinations of tokens in a hemisphere contract"),
)


@lab.experiment(
    "Phase diagrams of clustering on the sphere", room="observables", seconds=10
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Compute the diagrams, then compare with curves and other integrations."""
    cases = [(d, "softmax") for d in sorted({parameters.lowest, 8, 128, HIGH})]
    diagrams = {
        case: diagram(*case, parameters)
        for case in progress.over([*cases, (HIGH, "unnormalised")], 0.7)
    }
    names = list(random_matrices(jr.key(0), float))[: parameters.ensembles]
    spans = {name: span_diagram(name, parameters) for name in progress.over(names, 0.3)}
    _, redrawn = next(iter(spans.values()))
    increases = [np.diff(diagrams[case].mean, axis=1).min() for case in cases]
    findings = [
        *front_findings(diagrams),
        *euler_findings(parameters),
        FOR_EVER.at_least(min(increases), 0.0, tolerance=1e-3),
        SPAN_FALLS.close_to(redrawn.mean[0, -1], 1.0, tolerance=0.2),
    ]
    return lab.Outcome(findings, [draw_diagrams(diagrams), draw_spans(spans)])


def measured(betas, depths, starts, parameters: Parameters, **options) -> PhaseDiagram:
    """A diagram of thirty-two tokens, in single precision."""
    options |= {"level": LEVEL, "dtype": "float32", "key": jr.key(parameters.seed)}
    return phase_diagram(betas=betas, depths=depths, starts=starts, **options)


def diagram(dimension: int, kind: str, parameters: Parameters) -> PhaseDiagram:
    """One diagram of uniform starts; the ends of comparisons belong to its grid."""
    last, top, *ends = LAST, parameters.largest, 0.0, STEEPEST
    if kind == "unnormalised":
        last, top, *ends = LAST_UNNORMALISED, parameters.largest_unnormalised, 5.0, 6.0
    betas = np.unique([*np.linspace(0.1, top, parameters.betas), *ends])
    depths = np.linspace(0, last, parameters.depths)
    options = {"dimension": dimension, "count": COUNT, "kind": kind}
    return measured(betas, depths, parameters.starts, parameters, **options)


def curve_depths(betas, kind: str = "softmax") -> np.ndarray:
    """Depths at which tokens at equal angles reach the level."""
    return np.array([Equiangular(COUNT, b, kind=kind).time_to(LEVEL) for b in betas])


def front_findings(diagrams) -> list:
    """Fronts of high dimension, and the curves."""
    high, free = diagrams[HIGH, "softmax"], diagrams[HIGH, "unnormalised"]
    inside, chosen = high.betas <= STEEPEST, (free.betas >= 5) & (free.betas <= 6)
    front, expected = high.passage()[inside], curve_depths(high.betas[inside])
    low = diagrams[128, "softmax"].passage()[inside]
    own = curve_depths(free.betas[chosen], "unnormalised")
    return [
        CURVE.close_to(front, expected, relative_tolerance=0.04),
        DIMENSION.above(abs(low - expected)[-1], abs(front - expected)[-1]),
        UNNORMALISED.close_to(free.passage()[chosen], own, relative_tolerance=0.06),
    ]


def attention_of(tokens: np.ndarray, beta: float) -> np.ndarray:
    """Softmax attention of any number of clouds, in NumPy."""
    weights = np.exp(beta * (tokens @ np.swapaxes(tokens, -1, -2) - 1))
    return weights @ tokens / weights.sum(axis=-1, keepdims=True)


def euler_findings(parameters: Parameters, beta: float = 3.0) -> list:
    """A few starts in dimension 8 by SciPy, by Euler steps and by us."""

    def velocity(_, points):
        pulls = attention_of(points, beta)
        return pulls - np.sum(pulls * points, axis=2, keepdims=True) * points

    shape = min(parameters.starts, 32), COUNT, 8
    tokens = np.random.default_rng(0).standard_normal(shape)
    tokens /= np.linalg.norm(tokens, axis=2, keepdims=True)
    depths, steps = EULER_STEP * np.arange(parameters.depths), [tokens]
    for _ in depths[1:]:
        moved = steps[-1] + EULER_STEP * attention_of(steps[-1], beta)
        steps.append(moved / np.linalg.norm(moved, axis=2, keepdims=True))
    ours = measured([beta], depths, np.float32(tokens), parameters).mean[0]
    exact = fractions(lab.by_scipy(velocity, tokens, depths, rtol=1e-9, atol=1e-11))
    return [
        AGREES.close_to(ours, exact, tolerance=5e-3),
        EULER_ERROR.above(np.max(exact - fractions(np.stack(steps))), 0.1),
    ]


def fractions(points: np.ndarray) -> np.ndarray:
    """Mean fraction of close pairs over several clouds, at each depth."""
    gram = points @ np.swapaxes(points, -1, -2)
    close = np.sum(gram > LEVEL, axis=(-1, -2)) - COUNT
    return np.mean(close / (COUNT * (COUNT - 1)), axis=1)


def random_matrices(key: jax.Array, dtype) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Score and value of each ensemble."""
    first, second, third = jr.normal(key, (3, SPAN, SPAN), dtype) / SPAN**0.25
    identity, product = jnp.eye(SPAN, dtype=dtype), first @ second
    symmetric = (first + first.T) * (SPAN**0.25 / math.sqrt(2))
    unit = symmetric / math.sqrt(SPAN + 1)
    return {
        r"Gaussian $K^\top Q$, $V = I$": (product, identity),
        r"symmetric $K^\top Q$, $V = I$": (symmetric, identity),
        r"Gaussian $K^\top Q$, $V \succeq 0$": (product, third @ third.T),
        r"$V = K^\top Q$ symmetric": (symmetric, unit),
        r"$V = -K^\top Q$ symmetric": (symmetric, -unit),
    }


def span_diagram(name: str, parameters: Parameters) -> tuple[PhaseDiagram, ...]:
    """Dimension of the span under random matrices, kept and redrawn."""

    def layer(key: jax.Array, beta: jax.Array) -> mf.Softmax:
        score, value = random_matrices(key, beta.dtype)[name]
        return mf.Softmax(score, jnp.eye(SPAN, dtype=beta.dtype), value, beta=beta)

    betas = np.linspace(0.1, parameters.largest, max(4, parameters.betas // 3))
    places = betas, np.linspace(0, LAST, 61), parameters.drawn, parameters
    options = {"dimension": SPAN, "count": COUNT, "quantity": "rank", "draw": layer}
    return tuple(measured(*places, **options, redraw=unit) for unit in (None, 1.0))


def draw_diagrams(diagrams) -> lab.Picture:
    """Diagrams of softmax in all dimensions and one without normalisation."""
    figure, axes = style.canvas(len(diagrams), panel=(3.1, 3.1))
    for panel, ((dimension, kind), found) in zip(axes, diagrams.items(), strict=True):
        betas = np.linspace(found.betas[0], found.betas[-1], 60)
        curve, is_last = (curve_depths(betas, kind), betas), kind == "unnormalised"
        draw_phase_diagram(found, panel, curve=curve, bar=is_last)
        title = "unnormalised, " * is_last + f"$d = {dimension}$"
        panel.set(title=title, ylabel=r"$\beta$" if panel is axes[0] else "")
    return lab.Picture(
        figure,
        r"Fraction of pairs with $\langle x_i, x_j\rangle > 0.999$ for $32$ uniform "
        "tokens. Dashed: where tokens at equal angles reach 0.999. In high dimension "
        "the front follows it; in low dimension several clusters last beyond it.",
    )


def draw_spans(spans) -> lab.Picture:
    """Dimension of the span under random matrices."""
    options = {"sharex": True, "sharey": True, "squeeze": False}
    figure, axes = style.canvas(2, len(spans), panel=(4.0, 2.5), **options)
    for row, (name, pair) in zip(axes, spans.items(), strict=True):
        for panel, found, word in zip(row, pair, ("kept", "redrawn"), strict=True):
            draw_phase_diagram(found, panel, bar=word == "redrawn")
            panel.set_title(f"{name}, {word}", fontsize=9.5)
            panel.label_outer()
    return lab.Picture(
        figure,
        rf"Dimension of the span (eigenvalues of the Gram matrix above $10^{{-3}}$) of "
        rf"$32$ tokens in dimension ${SPAN}$ under random matrices: drawn once for "
        "each start (left), and drawn anew at every unit of depth (right).",
    )
