r"""Data that one layer cannot fit, however small the loss at the start.

Heads of one layer see a context only through $m_\theta[\mu](x)$. If
$\sum_k c_k\,m_\theta[\mu^k](x^k) = 0$ for every head, as for two contexts and their
convolution, no network of one layer moves $\sum_k c_k\,T(x^k)$: a target that asks for
it is stuck at a loss as small as one likes, with a gradient that is zero. A report on
the data says so before training, with the loss that is left. Change a token, a query,
or let values have a bias, and the same offsets are fitted, at a rate that the smallest
eigenvalue of the tangent kernel tells.
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
    independent_contexts,
    null_offsets,
    summary,
)
from meanformer.plotting import style


class Parameters(lab.Parameters):
    """How long, and from how many starts."""

    starts: int = lab.setting(
        2, full=20, help="initialisations of every network", at_least=1
    )
    time: float = lab.setting(
        200.0, full=1000.0, help="training time, in mean-field units", at_least=100
    )
    seed: int = lab.setting(0, help="seed of all heads", at_least=0)


FORETOLD = lab.other_method("the report on the data, made before training")

STUCK = lab.theorem(
    "stuck",
    "Where targets are off along a null vector of the report, the squared norm of the "
    "gradient is zero.",
    "BHFP26, loss of injectivity",
    source=lab.theory("zero to rounding, below $10^{-25}$"),
)
SINGULAR = lab.theorem(
    "singular",
    "The tangent kernel has two eigenvalues zero, one for each coordinate, for every "
    "null vector of the report, and no others.",
    "BHFP26, injectivity of the tangent kernel",
    source=FORETOLD,
)
FLOOR = lab.theorem(
    "floor",
    "Risks end at the floor of the report: $1/600$ for dependent contexts off along "
    "their relation, $1/900$ for generic offsets, $1/400$ for a mirror pair, $1/800$ "
    "for translates with two queries, $1/600$ for duplicates.",
    "BHFP26, loss of injectivity",
    source=FORETOLD,
)
RATE = lab.theorem(
    "rate",
    r"What is above the floor falls at least like $e^{-2\int\lambda/N}$, with "
    r"$\lambda$ the smallest eigenvalue that is not zero: from all starts, at all "
    "times kept.",
    "BHFP26, Polyak-Lojasiewicz inequality",
    source=lab.other_method("eigenvalues along the run; as a share of this bound"),
)
REACHES = lab.observation(
    "reaches-zero",
    r"With one token moved the risk is below $R(0)\,e^{-t/60}$, from every start and "
    "at all times kept; that is below $10^{-10}$ at $t = 1000$.",
    source=lab.theory(r"a rate that $2\lambda_{\min}/N$ exceeds for such heads"),
)
FITTED = lab.observation(
    "fitted",
    "So is that of offsets beside the relation, although the kernel is singular, of a "
    "mirror pair with one query moved or with a value bias, and of translates with one "
    "query.",
    source=lab.theory(r"the same bound, $R(0)\,e^{-t/60}$"),
)


def variants() -> dict[str, Variant]:
    """All data sets, with the networks of one layer that are to fit them."""
    first, second, sums = dependent_contexts()
    tokens, query = np.concatenate([first, second]), np.array(QUERY)
    shifted, other = tokens + np.array([0.7, -0.3]), np.array([-0.4, 1.0])

    def along_x(*signs):
        return 0.1 / np.sqrt(len(signs)) * np.outer(signs, (1, 0))

    dependent = Variant([first, second, sums], [query] * 3, null_offsets())
    generic = 0.1 * np.array([[1, 0], [0, 1], [0, 0]])
    beside = 0.1 / np.sqrt(2) * np.array([[1, 0], [0, 1], [1, 1]])
    mirror = Variant([tokens, -tokens], [query, -query], along_x(1, 1))
    aside = np.array([0.5, 0.0]) - query
    translates = Variant([tokens, shifted], [query, query], along_x(1, -1))
    asked = [query, query, other, other]
    return {
        "dependent": dependent,
        "generic offsets": dependent._replace(offsets=generic),
        "offsets beside": dependent._replace(offsets=beside),
        "token moved": dependent._replace(contexts=independent_contexts()),
        "mirror pair": mirror,
        "query moved": mirror._replace(queries=[query, aside]),
        "value bias": mirror._replace(options=(("value_bias", True),)),
        "translates": translates,
        "two queries": Variant(translates.contexts * 2, asked, along_x(1, -1, -1, 1)),
        "duplicates": Variant([tokens, tokens[::-1], sums], [query] * 3, generic),
    }


HARMLESS = ("offsets beside", "query moved", "value bias", "translates")
STAYING = ("dependent", "mirror pair", "two queries")
MOVING = ("token moved", "generic offsets", "duplicates", *HARMLESS)
PANELS = {
    "contexts and their convolution": slice(0, 4),
    "a pair and its mirror image": slice(4, 7),
    "translates and duplicates": slice(7, 10),
}


@lab.experiment(
    "Dependent data get stuck, independent data reach zero", room="training", seconds=9
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
    many = fits.values()
    above = [fit for fit in many if fit.floor > 1e-9]
    ends = np.concatenate([fit.risks[:, -1] for fit in above])
    floors = np.repeat([fit.floor for fit in above], parameters.starts)
    zeros = np.concatenate([fit.zeros for fit in many])
    nullities = np.repeat([fit.nullity for fit in many], parameters.starts)
    norms = [fits[name].squared_norms[:, 0] for name in STAYING]
    return lab.Outcome(
        findings=[
            STUCK.at_most(norms, 1e-25),
            SINGULAR.close_to(zeros, nullities, tolerance=0),
            FLOOR.close_to(ends, floors, tolerance=1e-9),
            RATE.at_most([fits[name].shares for name in MOVING], 1, tolerance=0.02),
            REACHES.at_most(pace(fits["token moved"]), 1),
            FITTED.at_most([pace(fits[name]).max() for name in HARMLESS], 1),
        ],
        pictures=[draw_panels(fits), draw_spectra(fits)],
        tables=[lab.Table(SUMMARY, summary(fits), caption(parameters))],
    )


def pace(fit: Fit) -> np.ndarray:
    """Later risks as shares of those that fall at the rate one sixtieth."""
    return (fit.risks / (fit.risks[:, :1] * np.exp(-fit.times / 60)))[:, 1:]


def caption(parameters: Parameters) -> str:
    """What the table shows."""
    return (
        f"Risks at the start and after a time $T = {parameters.time:g}$, over "
        f"{parameters.starts} initialisations of one layer of 64 heads."
    )


def draw_panels(fits: dict[str, Fit]) -> lab.Picture:
    """Risk against time: medians over starts, and the range of all."""
    figure, panels = style.canvas(3, panel=(3.6, 3.5), sharey=True)
    for axes, (title, chosen) in zip(panels, PANELS.items(), strict=True):
        draw_risks(dict(list(fits.items())[chosen]), axes)
        axes.set(title=title, ylim=(1e-9, 2))
        axes.label_outer()
    return lab.Picture(
        figure,
        "Risk along the gradient flow, the median and the range over all starts; "
        "dotted, the floors of the report. What has a floor ends at it; change a "
        "token, a query, or give values a bias, and the same offsets are fitted.",
    )


def draw_spectra(fits: dict[str, Fit]) -> lab.Picture:
    """Eigenvalues of the tangent kernel at all starts."""
    figure, axes = style.canvas(panel=(7.6, 3.4))
    for place, fit in enumerate(fits.values()):
        values = np.maximum(np.abs(fit.values[:, 0]), 1e-18)
        spread = place + np.linspace(-0.25, 0.25, values.shape[1])
        axes.plot(spread, values.T, "o", color=style.BLUE, markersize=2.5, alpha=0.6)
    axes.set_xticks(range(len(fits)), [name.replace(" ", "\n") for name in fits])
    axes.set(yscale="log", ylabel="eigenvalues of the kernel")
    return lab.Picture(
        figure,
        "Spectra of the tangent kernel at the start, for all data sets and starts: one "
        "dot for each eigenvalue. Two vanish where the report finds a relation.",
    )
