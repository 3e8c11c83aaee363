r"""Which data one layer of attention cannot fit, told before any training.

A layer of heads moves the query $x^k$ of a context $\mu^k$ by an average of
$V\,m_\theta[\mu^k](x^k)$. If $\sum_k c_k m_\theta[\mu^k](x^k) = 0$ for all heads, no
layer fits targets with a part along $c$. Equal contexts do this, and so do three
translates at equal distances, a convolution beside its factors, boxes whose sides
cancel, a context and its mirror image. The report, which looks at contexts and queries
alone, is compared with the tangent kernel of random heads.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from scipy.special import softmax

import meanformer as mf
import meanformer.experiments as lab
from meanformer.plotting import draw_curves, style
from meanformer.training import dependence, injectivity_report


class Parameters(lab.Parameters):
    """How many heads the kernel averages over, and which contexts are drawn."""

    heads: int = lab.setting(1000, full=4000, help="heads of the kernel", at_least=200)
    seed: int = lab.setting(1, help="seed of contexts, heads and targets")


DEPENDENT = lab.theorem(
    "dependent",
    "Where the report says dependent, the smallest eigenvalue of the kernel is zero, "
    "as a share of the largest.",
    "BHFP26, injectivity of the tangent kernel",
    source=lab.theory("a null vector that all heads share"),
)
INDEPENDENT = lab.theorem(
    "independent",
    "Where it says independent, the smallest eigenvalue is positive.",
    "BHFP26, injectivity of the tangent kernel",
    source=lab.theory("no null vector; far above rounding"),
)
NULL = lab.observation(
    "null-vectors",
    "Its null vectors are orthogonal to the other eigenvectors of the kernel.",
    source=lab.other_method("eigenvectors of the kernel of random heads"),
)
STATUS = lab.observation(
    "status",
    "All rows are dependent or not as they were made: modulo constants, modulo affine "
    "functions, in the kernel, and in that with a value bias.",
    source=lab.theory("none is classified otherwise"),
)
NAMED = lab.observation(
    "named",
    "Every null vector is explained by a relation with a name.",
    source=lab.theory("as many relations as null vectors"),
)
FLOOR = lab.observation(
    "floor",
    "The risk predicted for random targets is the least risk of a layer.",
    source=lab.other_method("least squares for the values of random heads"),
)


class Row(NamedTuple):
    """Contexts and queries; d or i for const, affine, kernel, bias, - for no matter."""

    measures: Sequence[mf.measures.AbstractMeasure]
    queries: np.ndarray
    status: str


X, Y = np.array([1.0, 0.5]), np.array([-0.4, 1.0])
A, B, C, E = np.array([[1, 0], [-0.5, 0.8], [0.3, -1], [-0.2, 0.4]])
SUMS = np.array([A + C, A + E, B + C, B + E])


def catalogue(seed: int = 1) -> dict[str, Row]:
    """Data that are dependent, in one sense or another, and data that are not."""
    rng, cloud = np.random.default_rng(seed), mf.TokenCloud
    tokens, shift = rng.standard_normal((5, 2)), np.array([0.7, -0.3])
    one, two, three = (cloud(tokens + k * shift) for k in range(3))
    far = [cloud(100 + 0.01 * (tokens + k * shift)) for k in range(3)]
    shares = np.array([0.2, 0.2, 0.2, 0.2, 0.1, 0.1])
    split = cloud(np.vstack([tokens[::-1], tokens[:1]]), shares)
    factors = [cloud(np.array([A, B])), cloud(np.array([C, E]))]
    off = cloud(SUMS + np.array([[0, 0], [0, 0], [0, 0], [0.5, 0]]))
    coin = cloud(np.array([[0.0], [1.0]]))
    coins = cloud(np.array([[0.0], [1.0], [2.0]]), np.array([0.25, 0.5, 0.25]))
    points = [cloud(point[None]) for point in np.array([[1.0, 0], [0, 1], [1, 1]])]
    same_mean, double = cloud(2 * tokens - tokens.mean(axis=0)), cloud(2 * tokens)
    roots = rng.standard_normal((6, 3, 2))
    normal = [mf.Gaussian(r[2], r[:2] @ r[:2].T + 0.1 * np.eye(2)) for r in roots]
    sides = np.array([[1.0, 1], [2, 1], [1, 3], [2, 3]])
    boxes = [mf.UniformBox(np.zeros(2), one) for one in sides]
    twin = mf.Gaussian(normal[0].mean() + shift, normal[0].covariance())
    clouds = [cloud(rng.standard_normal((5, 2))) for _ in range(6)]
    four = np.array([X, Y, X + Y, X - Y])
    return {
        "equal measures": Row([one, split], X, "dddd"),
        "two translates": Row([one, two], X, "idii"),
        "three translates": Row([one, two, three], X, "dddd"),
        "three, small and far away": Row(far, X, "dddd"),
        "two translates, two queries": Row([one, two] * 2, four[[0, 0, 1, 1]], "--dd"),
        "convolution": Row([*factors, cloud(SUMS)], X, "dddi"),
        "convolution power": Row([coin, coins], np.ones(1), "dddi"),
        "boxes": Row(boxes, X, "dddd"),
        "parity": Row([one, cloud(-tokens)], np.array([X, -X]), "--di"),
        "dilation": Row([double, one], np.array([X, 2 * X]), "--di"),
        "three Diracs": Row(points, X, "dddi"),
        "one Dirac": Row(points[:1], X, "idii"),
        "queries zero": Row([one, same_mean], np.zeros(2), "--dd"),
        "six Gaussians": Row(normal, X, "dddi"),
        "five Gaussians": Row(normal[:5], X, "idii"),
        "two equal covariances": Row([normal[0], twin], X, "idii"),
        "six random clouds": Row(clouds, X, "iiii"),
        "convolution, token moved": Row([*factors, off], X, "iiii"),
        "cloud and its double": Row([one, double], X, "iiii"),
        "three boxes": Row([*boxes[:2], boxes[3]], X, "iiii"),
        "one context, $x$ and $2x$": Row([one] * 2, np.array([X, 2 * X]), "--ii"),
        "one context, four queries": Row([one] * 4, four, "--ii"),
    }


@lab.experiment(
    "What one layer cannot fit is known before training", room="training", seconds=6
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Classify every row by the report, and by the kernel of random heads."""
    rng, rows = np.random.default_rng(parameters.seed), catalogue(parameters.seed)
    zero, positive, angles, misses, unnamed = [], [], [], 0, 0
    floors, table, nulls = [], [], {}
    for name in progress.over(rows, 0.8):
        row, heads = rows[name], read(rows[name], parameters.heads, rng)
        senses = [dependence(row.measures, modulo=m) for m in ("constants", "affine")]
        given = row.measures, row.queries
        reports = [injectivity_report(*given, bias=bias) for bias in (False, True)]
        for bias, report in enumerate(reports):
            null = report.null_vectors
            values, vectors = np.linalg.eigh(heads @ heads.T / parameters.heads + bias)
            group = zero if report.verdict == "dependent" else positive
            group.append(values[0] / values[-1])
            angles.append(np.abs(null @ vectors[:, len(null) :]).max(initial=0.0))
            unnamed += len(null) - len(report.relations)
        found = [one.verdict for one in [*senses, *reports]]
        pairs = list(zip(found, row.status, strict=True))
        misses += sum(letter not in ("-", word[0]) for word, letter in pairs)
        shown = [word if letter != "-" else "-" for word, letter in pairs]
        table.append([name, *shown, reports[0].statistic, row.status])
        nulls[name] = reports[0].null_vectors
        floors.append(floor_of(nulls[name], heads, rng))
    predicted, fitted = np.transpose(floors)
    return lab.Outcome(
        findings=[
            DEPENDENT.close_to(zero, 0.0, tolerance=1e-13),
            INDEPENDENT.at_least(positive, 1e-7),
            NULL.at_most(angles, 0.0, tolerance=1e-6),
            STATUS.close_to(misses, 0, tolerance=0),
            NAMED.close_to(unnamed, 0, tolerance=0),
            FLOOR.close_to(predicted, fitted, tolerance=1e-9),
        ],
        pictures=[draw_nulls(nulls), draw_sums([sums(rows[name]) for name in SUMMED])],
        tables=[lab.Table(HEADER, table, CAPTION)],
    )


HEADER = ["data", "constants", "affine", "kernel", "with bias", "statistic", "made"]
CAPTION = "Verdicts, the statistic of the kernel, and how data were made."
PLACES, ANGLES = np.linspace(-6, 6, 121), np.array([0.3, 1.2, 2.4])
SUMMED = {
    "convolution": "flat: dependent",
    "two translates": "straight: modulo affine",
    "convolution, token moved": "bent: independent",
}


def read(row: Row, count: int, rng: np.random.Generator) -> np.ndarray:
    """What random heads read from each context: a row for each, for all heads."""
    size = row.measures[0].dimension
    scores = np.matmul(*rng.standard_normal((2, count, size, size)))
    queries = np.broadcast_to(row.queries, (len(row.measures), size))
    pairs = zip(row.measures, queries, strict=True)
    return np.stack([tilted(one, scores @ x).ravel() for one, x in pairs])


def tilted(measure, u: np.ndarray) -> np.ndarray:
    """The tilted mean, densely for clouds."""
    if isinstance(measure, mf.TokenCloud):
        scores = u @ np.asarray(measure.points).T + np.log(measure.weights)
        return np.asarray(softmax(scores, axis=1)) @ np.asarray(measure.points)
    return np.asarray(measure.tilted_mean(jnp.asarray(u)))


def floor_of(null, heads: np.ndarray, rng: np.random.Generator) -> tuple[float, float]:
    """The least risk for random targets: predicted, and by least squares."""
    count = len(heads)
    residuals = rng.standard_normal((count, 2))
    best = np.linalg.lstsq(heads, residuals, rcond=1e-9)[0]
    fitted = np.sum((heads @ best - residuals) ** 2)
    return np.sum((null @ residuals) ** 2) / (2 * count), fitted / (2 * count)


def sums(row: Row) -> np.ndarray:
    """Log-Laplace transforms along lines: those of all but the last, less that one."""
    lines = np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=1) * PLACES[:, None, None]
    u = jnp.asarray(lines.reshape(-1, 2))
    values = np.stack([one.log_laplace(u) for one in row.measures])
    return (values[:-1].sum(axis=0) - values[-1]).reshape(len(PLACES), -1)


def draw_nulls(nulls: dict[str, np.ndarray]) -> lab.Picture:
    """Sizes of the entries of null vectors, one row each."""
    figure, axes = style.canvas(panel=(5.6, 3.9))
    rows = [(name, row) for name, found in nulls.items() for row in found]
    widest = max(len(row) for _, row in rows)
    table = [[*np.abs(row), *[np.nan] * (widest - len(row))] for _, row in rows]
    shades = style.colours_through("sizes", "#f4f4f2", style.BLUE)
    image = axes.imshow(table, cmap=shades, vmin=0, vmax=1, aspect="auto")
    figure.colorbar(image, ax=axes, label="$|c_k|$")
    axes.set_xticks(range(widest), range(1, widest + 1))
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set(xlabel="context $k$")
    axes.grid(False)
    return lab.Picture(
        figure,
        "Null vectors of data that one layer cannot fit: which contexts are to blame, "
        "and how much.",
    )


def draw_sums(curves: list[np.ndarray]) -> lab.Picture:
    """Sums of log-Laplace transforms along lines."""
    figure, panels = style.canvas(len(curves), panel=(3.1, 3.0), sharey=True)
    for axes, title, total in zip(panels, SUMMED.values(), curves, strict=True):
        along = {f"direction {k + 1}": line for k, line in enumerate(total.T)}
        draw_curves(PLACES, along, axes, xlabel="$t$", title=title, legend=None)
    panels[0].set(ylabel=r"$\sum_k c_k\,\Lambda_k(tv)$")
    panels[0].legend(loc="lower center")
    return lab.Picture(
        figure,
        r"$\sum_k c_k\Lambda_k$ along three lines. A convolution and its factors "
        "cancel; a translate and its original leave a linear function, which one query "
        "sees and two do not; with one token moved, nothing cancels.",
    )
