r"""How clustered random tokens are, over depth and temperature.

Thirty-two tokens start uniformly on the sphere and follow softmax attention with
$Q = K = V = I$. The fraction of pairs with $\langle x_i, x_j\rangle > 0.999$, a mean
over many starts, is drawn over depth and $\beta$: the published phase diagrams. In high
dimension random tokens are nearly orthogonal, the angles stay nearly equal, and the
diagram is a sharp front, at the depth
$T(\beta) = \int_0^{0.999} \frac{e^{\beta(1-r)} + n - 1}{2(1-r)((n-1)r + 1)}\,dr$; in
low dimension a wide region of several clusters lies beyond it. The published scheme,
Euler steps of $0.1$ and division by the norm, runs a slow clock, because it also moves
along the radius; here steps are adaptive, and tangent to the sphere.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.observables import (
    Equiangular,
    PhaseDiagram,
    phase_diagram,
)
from meanformer.plotting import draw_phase_diagram, style

COUNT, LEVEL = 32, 0.999
LAST, LAST_UNNORMALISED = 30.0, 1.0
HIGH = 1024
EULER_STEP = 0.1
EULER = {EULER_STEP: 5.60, 0.05: 5.45, 0.01: 5.30}  # tabulated
# Up to here the front of high dimension is compared with the curve.
STEEPEST = 6.0
SPAN = 8  # dimension of the tokens moved by random matrices
# Score and value of the ensembles of random matrices.
ENSEMBLES = {
    r"Gaussian $K^\top Q$, $V = I$": ("product", "identity"),
    r"symmetric $K^\top Q$, $V = I$": ("symmetric", "identity"),
    r"Gaussian $K^\top Q$, $V \succeq 0$": ("product", "positive"),
    r"$V = K^\top Q$ symmetric": ("symmetric", "ascent"),
    r"$V = -K^\top Q$ symmetric": ("symmetric", "descent"),
}
PART = 256  # starts at a time, few enough to be followed as they are


@dataclass(frozen=True)
class Parameters:
    """Sizes of the diagrams."""

    starts: int = lab.setting(24, full=2048, help="random starts", at_least=8)
    betas: int = lab.setting(14, full=90, help="inverse temperatures", at_least=4)
    depths: int = lab.setting(121, full=200, help="depths", at_least=61)
    largest: float = lab.setting(9.0, help=r"largest $\beta$ of softmax", at_least=6)
    largest_unnormalised: float = lab.setting(
        8.0, full=9.0, help=r"largest $\beta$ without normalisation", at_least=6
    )
    lowest: int = lab.setting(
        8, full=2, help="smallest dimension of a diagram", at_least=2, at_most=8
    )
    ensembles: int = lab.setting(
        1, full=5, help="ensembles of random matrices", at_least=1, at_most=5
    )
    drawn: int = lab.setting(6, full=64, help="starts of each of them", at_least=2)
    seed: int = lab.setting(0, help="seed of all starts", at_least=0)


CURVE = lab.observation(
    "equiangular-front",
    rf"In dimension ${HIGH}$ half of the pairs have clustered at the depth "
    r"$T(\beta)$ of tokens at equal angles, within four percent for $\beta \le 6$.",
    "GLPR23, phase diagrams and the curve in high dimension",
)
DIMENSION = lab.observation(
    "front-sharpens",
    r"The front tends to that curve with the dimension: at $\beta = 6$ it is further "
    "away in dimension $128$ than in dimension $1024$.",
    source=lab.other_method("the same distance in dimension 1024"),
)
HOT = lab.observation(
    "hot-limit",
    r"At $\beta = 0$ the curve starts at "
    r"$\frac12\log\frac{(n - 1)(1-\delta) + 1}{\delta}$ with $\delta = 0.001$, and so "
    "does the front.",
    source=lab.closed_form(r"up to the distance of two depths"),
)
UNNORMALISED = lab.observation(
    "unnormalised-front",
    rf"Without normalisation, in dimension ${HIGH}$, the front follows its "
    r"own curve within six percent for $\beta$ from $5$ to $6$.",
)
EXACT = lab.theorem(
    "orthonormal-time",
    r"Thirty-two orthonormal tokens at $\beta = 1$ pass $0.999$ at the depth $5.2703$ "
    "of the integral.",
    "GLPR23, equal angles stay equal",
)
SLOW_CLOCK = lab.observation(
    "slow-clock",
    "Euler steps with division by the norm take them there only at $5.60$, $5.45$ "
    "and $5.30$, for steps of $0.1$, $0.05$ and $0.01$.",
    source=lab.published("a rerun of the published scheme"),
)
AGREES = lab.observation(
    "dense-integration",
    "The fractions of a few starts are those of a dense integration in double "
    "precision.",
)
EULER_ERROR = lab.observation(
    "euler-error",
    "On the same starts the published scheme errs by more than $0.1$ at some depth.",
)
FOR_EVER = lab.observation(
    "clusters-stay",
    "In no dimension does the fraction ever decrease with depth: smallest increase "
    "from one depth to the next.",
    source=lab.theory("tokens that are close do not part"),
)
PARTS = lab.observation(
    "parts",
    "In low dimension, at the lowest, a middle and the highest temperature, the "
    "diagram of all starts is the mean of those of some of them at a time: largest "
    "difference. Many starts are computed otherwise than few: they leave their batch "
    "where they are one cluster, and tokens that have met become one.",
    source=lab.other_method("at most 256 starts at a time"),
)
SPAN_FALLS = lab.observation(
    "span-falls",
    r"Under random $K^\top Q$ with $V = I$, redrawn at every unit of depth, tokens "
    r"still end in one point at $\beta = 0.1$: their span has dimension one.",
    source=lab.theory("convex combinations of tokens in a hemisphere contract"),
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Compute the diagrams, then compare with curves and other integrations."""
    dimensions = sorted({parameters.lowest, 8, 128, HIGH})
    diagrams = {
        dimension: diagram(dimension, parameters)
        for dimension in progress.over(dimensions, 0.5)
    }
    for _ in progress.over(range(1), 0.2):
        unnormalised = diagram(HIGH, parameters, kind="unnormalised")
    spans = {
        name: span_diagram(name, parameters)
        for name in progress.over(list(ENSEMBLES)[: parameters.ensembles], 0.2)
    }
    _, redrawn = next(iter(spans.values()))
    findings = [
        *front_findings(diagrams, unnormalised, LAST / (parameters.depths - 1)),
        *clock_findings(parameters),
        *few_starts_findings(parameters),
        parts_finding(diagrams, parameters),
        FOR_EVER.at_least(
            min(np.diff(found.mean, axis=1).min() for found in diagrams.values()),
            0.0,
            tolerance=1e-3,
        ),
        SPAN_FALLS.close_to(redrawn.mean[0, -1], 1.0, tolerance=0.2),
    ]
    pictures = [draw_diagrams(diagrams, unnormalised), draw_spans(spans)]
    return lab.Outcome(findings=findings, pictures=pictures)


def measured(betas, depths, starts, parameters: Parameters, **options) -> PhaseDiagram:
    """A diagram of thirty-two tokens, in single precision."""
    starts = starts if isinstance(starts, int) else np.asarray(starts, np.float32)
    options |= {"level": LEVEL, "dtype": "float32", "key": jr.key(parameters.seed)}
    return phase_diagram(betas=betas, depths=depths, starts=starts, **options)


def diagram(dimension: int, parameters: Parameters, kind="softmax") -> PhaseDiagram:
    """One diagram of uniform starts."""
    is_softmax = kind == "softmax"
    top = parameters.largest if is_softmax else parameters.largest_unnormalised
    # In high dimension just their number: they would take much memory.
    starts = parameters.starts
    if dimension <= SPAN:
        starts = uniform(starts, dimension, parameters.seed)
    # The ends of the comparisons belong to the grid.
    ends = [0.0, STEEPEST] if is_softmax else [5.0, 6.0]
    return measured(
        np.unique(np.append(np.linspace(0.1, top, parameters.betas), ends)),
        np.linspace(0, LAST if is_softmax else LAST_UNNORMALISED, parameters.depths),
        starts,
        parameters,
        dimension=dimension,
        count=COUNT,
        kind=kind,
    )


def uniform(starts: int, dimension: int, seed: int) -> np.ndarray:
    """Starts of thirty-two uniform tokens on the sphere."""
    drawn = np.random.default_rng(seed).standard_normal((starts, COUNT, dimension))
    return drawn / np.linalg.norm(drawn, axis=2, keepdims=True)


def parts_finding(diagrams, parameters: Parameters):
    """Some rows of the diagrams of low dimension, from some starts at a time."""
    number = parameters.starts
    part = min(PART, -(-number // 2))
    differences = []
    for dimension in (d for d in diagrams if d <= SPAN):
        whole = diagrams[dimension]
        starts = uniform(number, dimension, parameters.seed)
        rows = np.array([0, len(whole.betas) // 4, len(whole.betas) - 1])
        mean = np.zeros((len(rows), len(whole.depths)))
        for first in range(0, number, part):
            some = starts[first : first + part]
            found = measured(whole.betas[rows], whole.depths, some, parameters)
            mean += found.mean * len(some) / number
        differences.append(np.abs(mean - whole.mean[rows]).max())
    return PARTS.at_most(differences, 5e-3)


def curve_depths(betas, kind: str = "softmax") -> np.ndarray:
    """Depths at which tokens at equal angles reach the level."""
    return np.array([Equiangular(COUNT, b, kind=kind).time_to(LEVEL) for b in betas])


def front_findings(diagrams, unnormalised: PhaseDiagram, spacing: float) -> list:
    """Fronts of high dimension, known up to the spacing of depths, and the curves."""
    high, front = diagrams[HIGH], diagrams[HIGH].passage()
    inside = high.betas <= STEEPEST
    expected = curve_depths(high.betas[inside])
    steep = np.flatnonzero(high.betas == STEEPEST)[0]
    chosen = (unnormalised.betas >= 5) & (unnormalised.betas <= 6)
    source = lab.closed_form("the time of tokens at equal angles, an integral")
    return [
        CURVE.close_to(front[inside], expected, relative_tolerance=0.04, source=source),
        DIMENSION.above(
            abs(diagrams[128].passage()[steep] - expected[-1]),
            abs(front[steep] - expected[-1]),
        ),
        HOT.close_to(
            [front[0], *curve_depths([0.0])],
            0.5 * np.log(((COUNT - 1) * LEVEL + 1) / (1 - LEVEL)),
            tolerance=spacing,
        ),
        UNNORMALISED.close_to(
            unnormalised.passage()[chosen],
            curve_depths(unnormalised.betas[chosen], "unnormalised"),
            relative_tolerance=0.06,
            source=source,
        ),
    ]


def clock_findings(parameters: Parameters) -> list:
    """Orthonormal tokens: our depth, and that of Euler steps."""
    (exact,) = curve_depths([1.0])
    # Of the shape of the diagrams, whose compiled program serves again.
    shape = parameters.starts, COUNT, COUNT
    starts = np.broadcast_to(np.eye(COUNT, dtype=np.float32), shape)
    depths = exact + np.linspace(-0.02, 0.02, parameters.depths)
    found = measured([1.0], depths, starts, parameters, tolerance=1e-5).passage()[0]
    source = lab.closed_form("the integral of the equiangular equation")
    slow = []
    for step in EULER:
        tokens, index = np.eye(COUNT), 0
        while tokens[0] @ tokens[1] < LEVEL:
            tokens, index = euler_step(tokens, 1.0, step), index + 1
        slow.append(index * step)
    return [
        EXACT.close_to(found, exact, tolerance=1e-3, source=source),
        SLOW_CLOCK.close_to(slow, list(EULER.values()), tolerance=1e-9),
    ]


def attention_of(tokens: np.ndarray, beta: float) -> np.ndarray:
    """Softmax attention of any number of clouds, in NumPy."""
    weights = np.exp(beta * (tokens @ np.swapaxes(tokens, -1, -2) - 1))
    return weights @ tokens / weights.sum(axis=-1, keepdims=True)


def euler_step(tokens: np.ndarray, beta: float, step: float) -> np.ndarray:
    """One step of the published scheme, for any number of clouds."""
    moved = tokens + step * attention_of(tokens, beta)
    return moved / np.linalg.norm(moved, axis=-1, keepdims=True)


def few_starts_findings(parameters: Parameters, beta: float = 3.0) -> list:
    """A few starts in dimension 8 by SciPy, by Euler steps and by us."""

    def velocity(_, points):
        pulls = attention_of(points, beta)
        return pulls - np.sum(pulls * points, axis=2, keepdims=True) * points

    tokens = uniform(min(parameters.starts, 32), 8, 0)
    depths = EULER_STEP * np.arange(parameters.depths)
    ours = measured([beta], depths, tokens, parameters).mean[0]
    exact = fractions(lab.by_scipy(velocity, tokens, depths, rtol=1e-9, atol=1e-11))
    steps = [tokens]
    for _ in depths[1:]:
        steps.append(euler_step(steps[-1], beta, EULER_STEP))
    error = np.abs(fractions(np.stack(steps)) - exact).max()
    dense = lab.other_method("SciPy's DOP853 in double precision")
    return [
        AGREES.close_to(ours, exact, tolerance=5e-3, source=dense),
        EULER_ERROR.above(error, 0.1, source=dense),
    ]


def fractions(points: np.ndarray) -> np.ndarray:
    """Mean fraction of close pairs over several clouds, at each depth."""
    gram = points @ np.swapaxes(points, -1, -2)
    close = np.sum(gram > LEVEL, axis=(-1, -2)) - COUNT
    return np.mean(close / (COUNT * (COUNT - 1)), axis=1)


def random_layer(name: str, key: jax.Array, beta: jax.Array) -> mf.Softmax:
    """Softmax attention with a score and a value of this ensemble."""
    shape = SPAN, SPAN
    first, second = jr.normal(key, (2, *shape), beta.dtype)
    entries = jr.normal(key, shape, beta.dtype)
    others = jr.normal(jr.fold_in(key, 1), shape, beta.dtype)
    symmetric = (entries + entries.T) / math.sqrt(2)
    matrices = {
        "identity": jnp.eye(SPAN, dtype=beta.dtype),
        "product": first @ second / math.sqrt(SPAN),
        "positive": others @ others.T / math.sqrt(SPAN),
        "symmetric": symmetric,
        "ascent": symmetric / math.sqrt(SPAN + 1),
        "descent": -symmetric / math.sqrt(SPAN + 1),
    }
    score, value = (matrices[part] for part in ENSEMBLES[name])
    return mf.Softmax(score, matrices["identity"], value, beta=beta)


def span_diagram(name: str, parameters: Parameters) -> tuple[PhaseDiagram, ...]:
    """Dimension of the span under random matrices, kept and redrawn."""
    betas = np.linspace(0.1, parameters.largest, max(4, parameters.betas // 3))
    places = betas, np.linspace(0, LAST, 61), parameters.drawn, parameters
    options = {"dimension": SPAN, "count": COUNT, "quantity": "rank"}
    options["draw"] = partial(random_layer, name)
    return tuple(measured(*places, **options, redraw=unit) for unit in (None, 1.0))


def draw_diagrams(diagrams, unnormalised: PhaseDiagram) -> lab.Picture:
    """Diagrams of softmax in all dimensions and one without normalisation."""
    shown = {f"$d = {d}$": found for d, found in diagrams.items()}
    shown[f"unnormalised, $d = {HIGH}$"] = unnormalised
    figure, axes = style.canvas(len(shown), panel=(3.1, 3.1))
    for panel, (title, found) in zip(axes, shown.items(), strict=True):
        betas = np.linspace(found.betas[0], found.betas[-1], 60)
        curve = curve_depths(betas, found.kind), betas
        draw_phase_diagram(found, panel, curve=curve, bar=found is unnormalised)
        panel.set(title=title, ylabel=r"$\beta$" if panel is axes[0] else "")
    return lab.Picture(
        figure,
        r"Fraction of pairs with $\langle x_i, x_j\rangle > 0.999$ for $32$ uniform "
        "tokens. Dashed: where tokens at equal angles reach 0.999. In high dimension "
        "the front is sharp and follows the curve; in low dimension several clusters "
        r"last beyond it. Without normalisation a larger $\beta$ clusters sooner.",
    )


def draw_spans(spans) -> lab.Picture:
    """Dimension of the span under random matrices."""
    figure, axes = style.canvas(
        2, len(spans), panel=(4.0, 2.5), sharex=True, sharey=True, squeeze=False
    )
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


experiment = lab.experiment(
    run, "Phase diagrams of clustering on the sphere", room="observables", seconds=10
)
