r"""Data that cannot be fitted, however small the loss at the start.

Heads of one layer see a context only through $m_\theta[\mu](x)$. If
$\sum_k c_k\,m_\theta[\mu^k](x) = 0$ for every head, as for two contexts and their
convolution, no network of one layer moves $\sum_k c_k\,T(x)$: a target that asks for it
is stuck at a loss as small as one likes, with a gradient that is zero. Data without
such a relation reach zero. Depth breaks the relation, since contexts that have moved no
longer obey it; symmetries it does not break.
"""

from dataclasses import dataclass

import numpy as np

import meanformer.experiments as lab
from meanformer import training
from meanformer.experiments.helpers.fitting import (
    QUERY,
    dependent_contexts,
    independent_contexts,
    network,
    null_offsets,
    offset_by,
)
from meanformer.plotting import draw_curves, mark_values, style

STEP = 0.25


@dataclass(frozen=True)
class Parameters:
    """How long, and from how many starts."""

    starts: int = lab.setting(
        2, full=20, help="initialisations of every network", at_least=1
    )
    time: float = lab.setting(
        200.0, full=1000.0, help="training time, in mean-field units", at_least=100
    )


STUCK = lab.theorem(
    "stuck",
    r"On dependent contexts, with targets along $(-1,-1,1)/\sqrt3$ from where one "
    "layer of 64 heads ends, the squared norm of the gradient is zero.",
    "BHFP26, loss of injectivity",
    source=lab.theory("zero to rounding, below $10^{-25}$"),
)
STAYS = lab.theorem(
    "stays",
    "The risk stays where it is, $1/600$ for offsets of size $0.1$.",
    "BHFP26, loss of injectivity",
    source=lab.closed_form(r"$\lvert 0.1\,\mathrm{null}\rvert^2/(2\cdot 3)$"),
)
SPECTRUM = lab.theorem(
    "spectrum",
    "The tangent kernel of the dependent contexts is singular: its smallest eigenvalue "
    "is zero relative to the largest.",
    "BHFP26, injectivity of the tangent kernel",
    source=lab.theory("zero to rounding"),
)
REACHES = lab.theorem(
    "reaches-zero",
    "With one token moved, the same offsets are fitted: the risk falls below a "
    "fiftieth of its start from every initialisation, and goes on.",
    "BHFP26, global convergence",
    source=lab.theory("zero; the bound is for the time of this run"),
)
FLOOR = lab.theorem(
    "floor",
    r"Generic offsets $0.1\,(e_1, e_2, 0)$ on dependent contexts end at the risk that "
    "their part along the relation leaves.",
    "BHFP26, loss of injectivity",
    source=lab.closed_form(
        r"$\lvert\sum_k c_k r_k\rvert^2/(2N\lvert c\rvert^2) = 1/900$"
    ),
)
ORTHOGONAL = lab.observation(
    "orthogonal",
    "Offsets orthogonal to the relation are fitted although the kernel is singular.",
    source=lab.theory("zero; the bound is for the time of this run"),
)
DEPTH = lab.observation(
    "depth",
    "Eight layers fit what one layer cannot: moving contexts end the relation.",
    source=lab.theory("below nine tenths of the start, and falling"),
)
PARITY = lab.theorem(
    "parity",
    r"The pair $(\mu, x)$, $(-\mu, -x)$ with equal offsets $0.1 e_1$ keeps its risk "
    "with eight layers as with one, since $-1$ commutes with every head.",
    "BHFP26, symmetric data",
    source=lab.closed_form(r"$\lvert r + r'\rvert^2/(4N)$ of the offsets $r$, $N = 3$"),
)
BROKEN = lab.observation(
    "parity-broken",
    "Moving the second query by $(0.5, 0)$ lets one layer fit the pair.",
    source=lab.theory("zero; the bound is for the time of this run"),
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Train on every variant, from several starts."""
    found = {}
    for name in progress.over(VARIANTS):
        found[name] = [
            trained(name, seed, parameters.time) for seed in range(parameters.starts)
        ]
    gradients = [float(run.squared_norms[0]) for run in found["dependent"]]
    kernels = [spectrum(name) for name in ("dependent", "independent")]
    last = {name: np.array([r.risks[-1] for r in runs]) for name, runs in found.items()}
    first = {name: float(runs[0].risks[0]) for name, runs in found.items()}
    parity = np.concatenate([last["parity"], last["parity, 8 layers"]])
    return lab.Outcome(
        findings=[
            STUCK.at_most(gradients, 1e-25),
            STAYS.close_to(last["dependent"], 1 / 600, tolerance=1e-9),
            SPECTRUM.at_most(abs(kernels[0][0] / kernels[0][-1]), 1e-13),
            REACHES.at_most(last["independent"], first["independent"] / 50),
            FLOOR.close_to(last["generic"], 1 / 900, tolerance=1e-9),
            ORTHOGONAL.at_most(last["orthogonal"], first["orthogonal"] / 50),
            DEPTH.at_most(last["8 layers"], 0.9 * first["8 layers"]),
            PARITY.close_to(parity, 0.2**2 / 12, tolerance=1e-12),
            BROKEN.at_most(last["parity, query moved"], first["parity"] / 1000),
        ],
        pictures=[draw_losses(found), draw_spectra(kernels)],
        tables=[table(found)],
    )


def pair(shift: float = 0.0):
    """Contexts and queries that are each other's mirror image, and one that is not."""
    other, _, tokens = dependent_contexts()
    query = np.array(QUERY)
    queries = [query, query, -query + np.array([shift, 0])]
    return [other, tokens, -tokens], np.stack(queries)


def variant(name: str):
    """The layers, heads, options, contexts, queries and offsets of a variant."""
    same = np.tile(QUERY, (3, 1))
    along_x = np.array([[0.0, 0.0], [0.1, 0.0], [0.1, 0.0]])
    across = 0.1 / np.sqrt(2) * np.array([[1.0, 0], [0, 1.0], [1.0, 1.0]])
    generic = 0.1 * np.array([[1.0, 0], [0, 1.0], [0, 0]])
    dependent, independent = dependent_contexts(), independent_contexts()
    return {
        "dependent": (1, 64, {}, dependent, same, null_offsets()),
        "independent": (1, 64, {}, independent, same, null_offsets()),
        "generic": (1, 64, {}, dependent, same, generic),
        "orthogonal": (1, 64, {}, dependent, same, across),
        "8 layers": (8, 16, {}, dependent, same, null_offsets()),
        "parity": (1, 64, {}, *pair(), along_x),
        "parity, 8 layers": (8, 16, {}, *pair(), along_x),
        "parity, query moved": (1, 64, {}, *pair(0.5), along_x),
    }[name]


VARIANTS = (
    "dependent",
    "independent",
    "generic",
    "orthogonal",
    "8 layers",
    "parity",
    "parity, 8 layers",
    "parity, query moved",
)


def trained(name: str, seed: int, time: float) -> training.TrainingRun:
    """A run of gradient descent on one variant from one start."""
    layers, heads, options, *data = variant(name)
    model = network(layers, heads, seed, **options)
    data = offset_by(model, *data)
    return training.train(
        model, data, time, solver=training.GradientDescent(STEP), save=41
    )


def spectrum(name: str) -> np.ndarray:
    """Eigenvalues of the tangent kernel at the first start."""
    layers, heads, options, *data = variant(name)
    model = network(layers, heads, 0, **options)
    kernel = training.tangent_kernel(model, offset_by(model, *data))
    return np.linalg.eigvalsh(np.asarray(kernel))


def table(found) -> lab.Table:
    """Risk at both ends of every variant, over all starts."""
    rows = []
    for name, runs in found.items():
        last = np.array([float(run.risks[-1]) for run in runs])
        rows.append((name, float(runs[0].risks[0]), last.min(), last.max()))
    columns = ("data and network", "risk at the start", "least at the end", "largest")
    return lab.Table(columns, rows, f"Risk over {len(runs)} initialisations.")


def draw_losses(found) -> lab.Picture:
    """Risk against time for all variants."""
    figure, (left, right) = style.canvas(2, panel=(4.4, 3.6))
    panels = (left, VARIANTS[:4], "lower right"), (right, VARIANTS[4:], "lower left")
    for axes, names, place in panels:
        curves = {name: found[name][0].risks for name in names}
        times = found[names[0]][0].times
        settings = {"yscale": "log", "xlabel": "time $t$", "ylim": (1e-9, 2e-2)}
        marks = ("-", "-", "--", "-")
        draw_curves(times, curves, axes, marks=marks, legend=place, **settings)
    mark_values(1 / 900, left, axis="y")
    left.set(ylabel="risk $R$", title="one layer, 64 heads")
    right.set(title="depth and symmetry")
    return lab.Picture(
        figure,
        "Risk along the gradient flow from one start. Left: targets along the relation "
        "of dependent contexts stay, generic ones end at the floor $1/900$ (dotted), "
        "and with one token moved, or offsets orthogonal to the relation, all is "
        "fitted. Right: depth fits what one layer cannot, but not a mirror pair.",
    )


def draw_spectra(kernels) -> lab.Picture:
    """Eigenvalues of both kernels."""
    figure, axes = style.canvas(panel=(4.6, 3.2))
    for values, label in zip(kernels, ("dependent", "independent"), strict=True):
        heights = np.maximum(np.abs(values), 1e-17)
        axes.semilogy(np.arange(1, len(values) + 1), heights, "o-", label=label)
    axes.set(xlabel="index", ylabel="eigenvalue of the tangent kernel")
    axes.legend(loc="center right")
    return lab.Picture(
        figure,
        "Spectra of the tangent kernel of one layer. Two eigenvalues, one for each "
        "coordinate, vanish for dependent contexts.",
    )


experiment = lab.experiment(
    run,
    "Dependent data get stuck, independent data reach zero",
    room="training",
    seconds=12,
)
