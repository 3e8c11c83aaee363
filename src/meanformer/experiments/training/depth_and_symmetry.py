r"""Depth fits what one layer cannot, but for data that are symmetric.

A relation between contexts, such as that of two measures and their convolution, stops
one layer of heads. In a deeper network it holds for the contexts at the start alone:
contexts that have moved no longer obey it, and with frozen contexts it is the queries
that part ways. The smallest eigenvalue of the tangent kernel is positive, though
small, and the loss goes to zero, though slowly. What commutes with every head is left
at all depths: a context and query with their mirror images, and equal contexts.
"""

import numpy as np

import meanformer.experiments as lab
from meanformer.experiments.helpers.fitting import (
    QUERY,
    SUMMARY,
    Fit,
    Variant,
    dependent_contexts,
    draw_risks,
    fit_all,
    null_offsets,
    summary,
)
from meanformer.plotting import style

LAYERS = 8


class Parameters(lab.Parameters):
    """How long, and from how many starts."""

    starts: int = lab.setting(
        2, full=20, help="initialisations of every network", at_least=1
    )
    time: float = lab.setting(
        100.0, full=1000.0, help="training time, in mean-field units", at_least=50
    )
    seed: int = lab.setting(0, help="seed of all heads", at_least=0)


FORETOLD = lab.other_method("the report on the data, made before training")

SINGULAR = lab.theorem(
    "singular",
    "The tangent kernel of eight layers has two eigenvalues zero, one for each "
    "coordinate, for every relation that persists, and no others.",
    "BHFP26, symmetric data",
    source=FORETOLD,
)
STUCK = lab.theorem(
    "stuck",
    "For a mirror pair with equal offsets the squared norm of the gradient is zero.",
    "BHFP26, symmetric data",
    source=lab.theory("zero to rounding, below $10^{-25}$"),
)
STAYS = lab.theorem(
    "stays",
    "It keeps its risk, which is $1/400$, at all times.",
    "BHFP26, symmetric data",
    source=FORETOLD,
)
FLOOR = lab.theorem(
    "floor",
    "No risk is ever below the floor that persisting relations leave.",
    "BHFP26, symmetric data",
    source=FORETOLD,
)
BELOW = lab.observation(
    "below",
    "Dependent contexts, moving or frozen, end below the floor of one layer.",
    source=FORETOLD,
)
RATE = lab.theorem(
    "rate",
    r"What is above the floor falls at least like $e^{-2\int\lambda/N}$, with "
    r"$\lambda$ the smallest eigenvalue that is not zero, from all starts.",
    "BHFP26, Polyak-Lojasiewicz inequality",
    source=lab.other_method("eigenvalues along the run; as a share of this bound"),
)
SLOWER = lab.observation(
    "slower",
    "Depth makes dependent data slow to fit: at the start the smallest eigenvalue is "
    "less than a hundredth of the largest.",
    source=lab.theory("one hundredth"),
)


def variants() -> dict[str, Variant]:
    """All data sets, with the deep networks that are to fit them."""
    first, second, sums = dependent_contexts()
    tokens, query = np.concatenate([first, second]), np.array(QUERY)
    equal = 0.1 / np.sqrt(2) * np.array([[1.0, 0], [1, 0]])
    generic = 0.1 * np.array([[1, 0], [0, 1], [0, 0]])
    three, mirrored = [query] * 3, [query, -query]
    dependent = Variant([first, second, sums], three, null_offsets(), LAYERS)
    return {
        "dependent": dependent,
        "frozen contexts": dependent._replace(options=(("context", "frozen"),)),
        "mirror pair": Variant([tokens, -tokens], mirrored, equal, LAYERS),
        "duplicates": Variant([tokens, tokens[::-1], sums], three, generic, LAYERS),
    }


FREE = ("dependent", "frozen contexts")
MOVING = (*FREE, "duplicates")


@lab.experiment(
    "Depth fits dependent data, not symmetric data", room="training", seconds=9
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Train on every variant, from several starts."""
    given, fits = variants(), {}
    for options in progress.over(dict.fromkeys(one.options for one in given.values())):
        alike = {name: one for name, one in given.items() if one.options == options}
        fits |= fit_all(
            alike, starts=parameters.starts, time=parameters.time, seed=parameters.seed
        )
    fits = {name: fits[name] for name in given}
    many, pair = fits.values(), fits["mirror pair"]
    free = [fits[name] for name in FREE]
    first = np.concatenate([fit.values[:, 0] for fit in free])
    return lab.Outcome(
        findings=[
            SINGULAR.close_to(
                [fit.zeros for fit in many],
                [[fit.nullity] for fit in many],
                tolerance=0,
            ),
            STUCK.at_most(pair.squared_norms[:, 0], 1e-25),
            STAYS.close_to(pair.risks, pair.floor, tolerance=1e-9),
            FLOOR.at_least(
                [fit.risks.min() for fit in many],
                [fit.floor for fit in many],
                tolerance=1e-15,
            ),
            BELOW.below(
                [fit.risks[:, -1].max() for fit in free],
                [fit.floor_of_one for fit in free],
            ),
            RATE.at_most([fits[name].shares for name in MOVING], 1, tolerance=0.02),
            SLOWER.below(first[:, 0] / first[:, -1], 0.01),
        ],
        pictures=[draw(fits)],
        tables=[
            lab.Table(
                SUMMARY,
                summary(fits),
                f"Risks at the start and after a time $T = {parameters.time:g}$, over "
                f"{parameters.starts} initialisations of eight layers of 16 heads.",
            )
        ],
    )


def draw(fits: dict[str, Fit]) -> lab.Picture:
    """Risk against time, and the smallest eigenvalues along the way."""
    figure, (left, right) = style.canvas(2, panel=(4.6, 3.6))
    draw_risks(fits, left)
    for name, fit in fits.items():
        values = fit.values[:, :, fit.nullity]
        (line,) = right.semilogy(fit.times, np.median(values, axis=0), label=name)
        low, high = values.min(axis=0), values.max(axis=0)
        right.fill_between(fit.times, low, high, color=line.get_color(), alpha=0.2)
    right.set(xlabel="time $t$", ylabel="smallest eigenvalue that is not zero")
    return lab.Picture(
        figure,
        "Left: the risk, the median and the range over all starts; dotted, the floors "
        "that persist at every depth. Right: the smallest eigenvalue of the tangent "
        "kernel beside those that stay zero. Dependent contexts are fitted slowly.",
    )
