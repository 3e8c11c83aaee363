r"""Near most data there are data that one layer cannot fit, and a search finds them.

What heads read from $N$ contexts, $S_{k\theta} = m_\theta[\mu^k](x)$, has a smallest
singular value, which is zero for dependent data. Steps of Gauss and Newton move tokens
as little as they can to make $\sum_k c_k S_{k\theta}$ vanish, with $c$ the singular
vector. From contexts that are nearly a convolution they end, in a few steps, at an
exact one, which the report on the data recognises. Training is stuck there. On the way
back the smallest eigenvalue of the tangent kernel grows with the square of the
distance: data that are only nearly dependent are fitted, but slowly.
"""

from typing import NamedTuple

import numpy as np
from scipy.special import softmax

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers.fitting import (
    QUERY,
    SUMMARY,
    Fit,
    Variant,
    dependent_contexts,
    draw_risks,
    fit_all,
    summary,
)
from meanformer.plotting import draw_rate, mark_sizes, style
from meanformer.training import injectivity_report

NOISE, HEADS = 0.1, 100
STEPS, LAST = 20, 5  # of the search: towards the nearest data, then onto the relation
SHARES = {"found": 0.0, "a quarter back": 0.25, "half way back": 0.5, "given": 1.0}
BACK = tuple(SHARES.values())[1:]


class Parameters(lab.Parameters):
    """How many data sets, and how training on one of them goes."""

    searches: int = lab.setting(8, full=40, help="data sets to search from", at_least=1)
    starts: int = lab.setting(2, full=20, help="initialisations", at_least=1)
    time: float = lab.setting(
        200.0, full=1000.0, help="training time, in mean-field units", at_least=100
    )
    seed: int = lab.setting(0, help="seed of data and heads", at_least=0)


FOUND = lab.observation(
    "found",
    "The search ends at data whose smallest singular value is zero, as a share of the "
    "largest.",
    source=lab.theory("zero to rounding"),
)
NAMED = lab.observation(
    "named",
    "The report calls all of them dependent, by a convolution.",
    source=lab.other_method("functions and tokens in place of heads"),
)
NEARER = lab.observation(
    "nearer",
    "They are nearer than the convolution to which noise was added.",
    source=lab.closed_form("root mean square of the noise"),
)
SQUARE = lab.observation(
    "square",
    "On the way back the smallest eigenvalue of the tangent kernel grows with the "
    "square of the distance: the exponent, in the mean over starts.",
    source=lab.theory("two, of a singular value that is linear in the distance"),
)
STUCK = lab.theorem(
    "stuck",
    "Training on what was found, off along the null vector, stays at the floor of the "
    "report.",
    "BHFP26, loss of injectivity",
    source=lab.other_method("the report"),
)
RATE = lab.theorem(
    "rate",
    r"On the way back risks fall at least like $e^{-2\int\lambda_{\min}/N}$.",
    "BHFP26, Polyak-Lojasiewicz inequality",
    source=lab.other_method("eigenvalues along the run; as a share of this bound"),
)
SLOW = lab.observation(
    "slow",
    r"They fall hardly faster: in the second half of training the rate is "
    r"$2\lambda_{\min}/N$, up to a fifth.",
    source=lab.other_method("the mean of the eigenvalue at the times kept"),
)


@lab.experiment(
    "Dependent data are near, and a search finds them", room="training", seconds=6
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Search near many data sets, and train on one of them and what was found."""
    random = np.random.default_rng(parameters.seed)
    scores = np.matmul(*random.normal(size=(2, HEADS, 2, 2)))
    exact = dependent_contexts()
    shape = (parameters.searches, sum(map(len, exact)), 2)
    noises = NOISE * random.normal(size=shape)
    given = np.concatenate(exact) + noises
    searches = [search(one, scores @ QUERY) for one in progress.over(given, 0.3)]
    ends = np.array([one.tokens for one in searches])
    reports = [injectivity_report(clouds(end), QUERY) for end in ends]
    names = [[one.name for one in report.relations] for report in reports]
    moved, noise = size(ends - given), size(noises)
    variants = way_back(ends[0], given[0], reports[0].null_vectors[0])
    fits = fit_all(
        variants, starts=parameters.starts, time=parameters.time, seed=parameters.seed
    )
    stuck, *others = fits.values()
    exponent, _ = np.polyfit(
        np.log(BACK), np.log([fit.values[:, 0, 0].mean() for fit in others]), 1
    )
    pairs = np.transpose([rates(fit) for fit in others], (1, 0, 2))
    return lab.Outcome(
        findings=[
            FOUND.at_most([one.values[-1] for one in searches], 1e-14),
            NAMED.close_to(
                sum(one == ["convolution"] for one in names),
                parameters.searches,
                tolerance=0,
            ),
            NEARER.below(moved, noise),
            SQUARE.close_to(exponent, 2, tolerance=0.1),
            STUCK.close_to(stuck.risks, stuck.floor, tolerance=1e-12),
            RATE.at_most([fit.shares for fit in others], 1, tolerance=0.02),
            SLOW.close_to(pairs[0], pairs[1], relative_tolerance=0.2),
        ],
        pictures=[draw_search(searches, moved, noise), draw_way(fits)],
        tables=[lab.Table(SUMMARY, summary(fits), CAPTION)],
    )


CAPTION = "Training on the way from what was found to the data given, from all starts."


class Search(NamedTuple):
    """Where a search ends, and the singular value, as a share, before each step."""

    tokens: np.ndarray
    values: np.ndarray


def search(start: np.ndarray, tilts: np.ndarray) -> Search:
    """Find the nearest tokens that are dependent, by steps of Gauss and Newton."""
    tokens, values = start, []
    for step in range(STEPS + LAST):
        seen = [read(one, tilts) for one in parts(tokens)]
        rows = np.stack([means.ravel() for means, _ in seen])
        left, sizes, right = np.linalg.svd(rows, full_matrices=False)
        values.append(sizes[-1] / sizes[0])
        pairs = zip(left[:, -1], seen, strict=True)
        slopes = [c * change.reshape(rows.shape[1], -1) for c, (_, change) in pairs]
        # Changes along the other singular vectors change c, not the singular value.
        others, slope = right[:-1], np.concatenate(slopes, axis=1)
        slope = slope - others.T @ (others @ slope)
        back = (start - tokens).ravel() * (step < STEPS)
        miss = left[:, -1] @ rows + slope @ back
        move = back - np.linalg.lstsq(slope, miss, rcond=1e-6)[0]
        tokens = tokens + move.reshape(tokens.shape)
    return Search(tokens, np.array(values))


def parts(tokens: np.ndarray) -> list[np.ndarray]:
    """Tokens of all contexts, one context after the other."""
    return np.split(tokens, np.cumsum([len(one) for one in dependent_contexts()])[:-1])


def clouds(tokens: np.ndarray) -> list[mf.TokenCloud]:
    """The contexts as measures."""
    return [mf.TokenCloud(one) for one in parts(tokens)]


def read(tokens: np.ndarray, tilts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean of a context under each tilt, and its derivative in the tokens."""
    shares = softmax(tilts @ tokens.T, axis=1)
    means = shares @ tokens
    spread = tokens[None] - means[:, None]
    products = np.einsum("hja,hb->hajb", spread, tilts)
    change = np.eye(2)[None, :, None] + products
    return means, shares[:, None, :, None] * change


def size(moves: np.ndarray) -> np.ndarray:
    """How far tokens have moved, the root mean square over all of a data set."""
    return np.sqrt(np.mean(np.sum(moves**2, axis=-1), axis=-1))


def way_back(found, given, null) -> dict[str, Variant]:
    """Data between what was found and the data given, off along the null vector."""
    offsets, queries = 0.1 * np.outer(null, (1, 0)), [np.array(QUERY)] * len(null)
    return {
        name: Variant(parts((1 - share) * found + share * given), queries, offsets)
        for name, share in SHARES.items()
    }


def rates(fit: Fit) -> tuple[np.ndarray, np.ndarray]:
    """The rate of the risk in the second half of training, and what is foretold."""
    half = len(fit.times) // 2
    falls = np.log(fit.risks[:, half] / fit.risks[:, -1])
    values = fit.values[:, half:, 0].mean(axis=1)
    return falls / (fit.times[-1] - fit.times[half]), 2 * values / fit.count


def draw_search(searches, moved, noise) -> lab.Picture:
    """Singular values along the searches, and how far they went."""
    figure, (left, right) = style.canvas(2, panel=(4.2, 3.4))
    for one in searches:
        left.semilogy(
            np.maximum(one.values[:10], 1e-17), "o-", color=style.BLUE, alpha=0.6
        )
    left.set(xlabel="steps of the search", ylabel=r"$\sigma_{\min}/\sigma_{\max}$")
    right.plot(noise, moved, "o")
    ends = [0, 1.1 * noise.max()]
    right.plot(ends, ends, ":", color=style.INK)
    right.set(xlabel="distance of the convolution", ylabel="distance of what is found")
    return lab.Picture(
        figure,
        "Left: the smallest singular value of what heads read, along each search. "
        "Right: how far tokens have moved, against the noise that was added to a "
        "convolution; below the dotted line what is found is nearer.",
    )


def draw_way(fits: dict[str, Fit]) -> lab.Picture:
    """Eigenvalues and risks on the way from what was found to the data given."""
    figure, (left, right) = style.canvas(2, panel=(4.2, 3.4))
    values = [fit.values[:, 0, 0].mean() for fit in fits.values()]
    label = r"$\lambda_{\min}$, mean over starts"
    draw_rate(BACK, values[1:], left, label=label, slope=2)
    mark_sizes(BACK, left)
    left.set(xlabel="share of the way back", ylabel="smallest eigenvalue")
    left.legend()
    draw_risks(fits, right)
    return lab.Picture(
        figure,
        "Left: the smallest eigenvalue of the tangent kernel between what was found "
        "and the data given; dashed, slope 2. Right: the risk in training there, "
        "median and range over starts: stuck at the relation, slow near it.",
    )
