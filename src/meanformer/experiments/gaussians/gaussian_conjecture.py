r"""Do covariances lose rank? A conjecture, its exceptions, and what refutes it.

Under softmax attention with matrices $V$ and $A = K^\top Q$ the covariance of a centred
Gaussian obeys $\dot S = \beta(VSAS + SA^\top SV^\top)$. It was conjectured that what
does not blow up ends with low rank. Read literally that is false: if $V$ is a quarter
turn and $A = I$, every $cI$ is stationary and every other covariance of the plane turns
for ever. And on an open set of matrices $S \sim X/t$ with $X$ of full rank: the limit
is zero, but its direction is not of low rank. What is left is the generic form: for
random matrices, a limit that is not zero has rank $(d + \dim\ker A)/2$ at most.

Draw after draw is followed until the exponents of its eigenvalues tell what becomes of
it. Nothing is set aside: every exception is looked at again, a hundred times longer,
and kept with its matrices.
"""

from dataclasses import dataclass

import jax.random as jr
import numpy as np
import scipy.optimize

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers.gaussians import change_of
from meanformer.plotting import style

STRUCTURED = ("orthogonal", "symmetric", "commuting", "negative", "near-rotation")
SHOWN = 40
PERTURBED, NOISE = 4, 0.02
# Draws for which the nearest counterexample is searched.
SEARCHED = 8

# What theory says of each known case: outcome, rank of the limit, normalised rank,
# and whether a second look confirms it.
KNOWN = {
    "rotation, stationary": ("converges", 2, 2, True),
    "rotation, periodic": ("periodic", None, None, True),
    "rotation, contracting": ("converges", 0, 2, True),
    "rotation, expanding": ("blow-up", None, None, None),
    "full rank over t": ("converges", 0, 2, True),
}

# Classes of the figures, in the order of the bars, with their colours.
CLASSES = {
    "blow-up": style.GREY,
    "grows": style.GOLD,
    "limit of low rank": style.BLUE,
    "tends to 0, low rank": style.TEAL,
    "tends to 0 like $X/t$, $X$ of full rank": style.GREEN,
    "periodic": style.ROSE,
    "undecided": style.VIOLET,
    "limit of too large a rank": style.ORANGE,
}


@dataclass(frozen=True)
class Parameters:
    """How many draws of each ensemble, and how far they are followed."""

    plane: int = lab.setting(
        30, full=600, help="generic draws in dimension 2", at_least=20, at_most=100_000
    )
    space: int = lab.setting(
        10, full=400, help="generic draws in dimension 3", at_least=5, at_most=100_000
    )
    structured: int = lab.setting(
        3, full=60, help="draws of each structured ensemble", at_least=1, at_most=10_000
    )
    others: int = lab.setting(
        0,
        full=40,
        help="draws in dimension 4, under L2 and Sinkhorn attention, with two heads",
        at_least=0,
        at_most=10_000,
    )
    depth: float = lab.setting(
        1e5,
        full=1e6,
        help="how far, in units of the time in which a covariance moves at first",
        at_least=1e4,
    )
    seed: int = lab.setting(0, help="seed of the draws", at_least=0)


GENERIC = lab.conjecture(
    "generic",
    "For random $Q$, $K$, $V$ no covariance has a limit of full rank.",
    "CACP25, low-rank conjecture (generic form: theory page on Gaussians)",
)
RANK = lab.conjecture(
    "rank",
    "Whatever converges, in any ensemble, has a limit of rank at most "
    r"$(d + \dim\ker A)/2$.",
    "CACP25, low-rank conjecture (generic form: theory page on Gaussians)",
)
DECIDED = lab.observation(
    "decided",
    "The explorer decides on all but a few of the draws.",
)
NEAREST = lab.observation(
    "nearest",
    "Generic $Q$ and $V$ of the plane have to be changed until a covariance of rank "
    "$2$ is stationary.",
    source=lab.theory("relative change, by the nearest that a search finds"),
)
ISOTROPIC = lab.conjecture(
    "isotropic",
    "The range of a limit that is not zero is isotropic for the score: "
    r"$u^\top Au = 0$.",
    "CACP25, low-rank conjecture (generic form: theory page on Gaussians)",
    source=lab.theory("$u^\\top Au/|A|$ at the last depth"),
)
LITERAL = lab.theorem(
    "literal",
    "The literal statement is false: for $A = I$ and a quarter turn $V$ the "
    "covariance $cI$, of rank $2$, is stationary.",
    "CACP25, low-rank conjecture (counterexample: theory page on Gaussians)",
    source=lab.closed_form("$VSAS = c^2V$ is antisymmetric: $|LS + SL^\\top|$"),
)
PERIOD = lab.theorem(
    "period",
    "All other covariances turn for ever, with the period "
    r"$\pi/(\beta\operatorname{tr}S_0)$.",
    "CACP25, low-rank conjecture (counterexample: theory page on Gaussians)",
    source=lab.closed_form(r"$\pi/(\beta\operatorname{tr}S_0)$"),
)
CONSERVED = lab.theorem(
    "conserved",
    "Trace and determinant are conserved while they turn.",
    "CACP25, low-rank conjecture (counterexample: theory page on Gaussians)",
    source=lab.closed_form("their values at depth 0, over ten periods"),
)
DECAY = lab.observation(
    "decay",
    r"In the replayable case $t\,S(t) \to X$ with $X$ of full rank and "
    r"$-X = \beta(VXAX + XA^\top XV^\top)$.",
)
RATIO = lab.observation(
    "ratio",
    "There the ratio of the two eigenvalues of $S(t)$ stays away from zero.",
)
OPEN = lab.observation(
    "open-set",
    "Matrices near by do the same: full rank survives on an open set.",
)
FOUND = lab.observation(
    "found",
    "The explorer tells the known cases for what they are, exceptions as exceptions, "
    "and a second look confirms them.",
    source=lab.theory("all the known cases"),
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Explore the ensembles, then look at the known cases and at the paths."""
    explorations = {
        label: mf.gaussian.explore(
            mf.gaussian.Ensemble(**options, seed=parameters.seed),
            count,
            depth=parameters.depth,
        )
        for label, (options, count) in progress.over(ensembles(parameters), 0.8)
    }
    told = []
    for name, expected in progress.over(KNOWN.items(), 0.1):
        draw = mf.gaussian.examine(mf.gaussian.KNOWN_CASES[name])
        found = draw.kind, draw.rank, draw.normalised_rank, draw.confirmed
        told.append(found == expected)
    generic = [e for label, e in explorations.items() if label.startswith("generic")]
    plane = generic[0]
    draws = [draw for one in explorations.values() for draw in one.draws]
    excess = [draw.rank - draw.bound for draw in draws if draw.rank is not None]
    undecided = sum(draw.kind == "undecided" for draw in draws)
    decays = sum(len(one.full_rank_decays) for one in explorations.values())
    for _ in progress.over(range(1), 0.1):
        paths = []
        for draw in plane.draws[:SHOWN]:
            case = plane.ensemble.draw(draw.index)
            path = mf.gaussian.limit_of(case.gamma(), case.gaussian(), depth=1e5)
            paths.append((draw, case, path))
        findings = [
            GENERIC.at_most(
                sum(len(one.full_rank_limits) for one in generic),
                0,
                source=lab.theory(f"among {sum(len(e.draws) for e in generic)} draws"),
            ),
            RANK.at_most(
                excess,
                0,
                source=lab.theory(
                    f"rank minus bound of the {len(excess)} that converge"
                ),
            ),
            DECIDED.at_most(
                undecided / len(draws),
                0.05,
                source=lab.theory(f"one in twenty of {len(draws)}"),
            ),
            *plane_findings(paths),
            *rotation_findings(),
            *decay_findings(parameters),
            FOUND.close_to(sum(told), len(KNOWN), tolerance=0),
        ]
    return lab.Outcome(
        findings=findings,
        pictures=[draw_outcomes(explorations), draw_collapse(paths)],
        tables=[
            lab.Table(
                ["ensemble", "draw", "exception", "confirmed"],
                [
                    [label, draw.index, draw.exception, "yes" if draw.confirmed else ""]
                    for label, exploration in explorations.items()
                    for draw in exploration.exceptions
                ],
                "All exceptions. Ensemble(…, seed).draw(number) gives the matrices.",
            )
        ],
        notes=[
            f"{decays} of {len(draws)} draws tend to zero like $X/t$ with $X$ of full "
            "rank: for these the rank of the limit is 0, that of the normalised limit "
            "is not low.",
            f"{undecided} of {len(draws)} draws are undecided: they turn so often, or "
            "so near a stationary covariance, that the steps were used up.",
        ],
    )


def ensembles(parameters: Parameters):
    """Names of the ensembles, with their options and the number of draws."""
    listed = {
        "generic, $d = 2$": ({}, parameters.plane),
        "generic, $d = 3$": ({"dimension": 3}, parameters.space),
        "generic, $d = 4$": ({"dimension": 4}, parameters.others),
        "generic, two heads": ({"heads": 2}, parameters.others),
        "generic, L2": ({"kind": "l2"}, parameters.others),
        "generic, Sinkhorn": ({"kind": "sinkhorn"}, parameters.others),
    }
    for family in STRUCTURED:
        listed[family] = {"family": family}, parameters.structured
    return [(label, case) for label, case in listed.items() if case[1] > 0]


def plane_findings(paths):
    """How near counterexamples are, and whether leading directions are isotropic."""
    distances, scores = [], []
    for draw, case, path in paths:
        if len(distances) < SEARCHED:
            found = mf.gaussian.nearest_stationary(case, 2, key=jr.key(draw.index))
            distances.append(np.nan if found is None else found.distance)
        if draw.rank == 1:
            query, key, _ = case.heads[0]
            score, leading = key.T @ query, path.vectors[:, 0]
            scores.append(leading @ score @ leading / np.linalg.norm(score, 2))
    return (
        NEAREST.at_least(distances, 1e-3),
        ISOTROPIC.close_to(scores, 0, tolerance=1e-3),
    )


def rotation_findings():
    """The stationary point, the period and what is conserved, against theory."""
    still = mf.gaussian.KNOWN_CASES["rotation, stationary"]
    case = mf.gaussian.KNOWN_CASES["rotation, periodic"]
    gamma, start = case.gamma(), case.gaussian()
    period = np.pi / (case.beta * np.trace(case.covariance))
    found = mf.gaussian.classify(gamma, start).period
    path = mf.solve(mf.Flow(gamma), start, 10 * period, save=41, rtol=1e-11)
    spreads = np.asarray(path.covariances)
    conserved = [np.trace(spreads, axis1=1, axis2=2), np.linalg.det(spreads)]
    expected = [np.trace(case.covariance), np.linalg.det(case.covariance)]
    return (
        LITERAL.at_most(
            np.abs(change_of(still.gamma(), still.covariance)).max(),
            0.0,
            tolerance=1e-15,
        ),
        PERIOD.close_to(
            np.nan if found is None else found, period, relative_tolerance=1e-8
        ),
        CONSERVED.close_to(
            np.array(conserved), np.array(expected)[:, None], relative_tolerance=1e-9
        ),
    )


def decay_findings(parameters: Parameters):
    """The replayable case against its stationary equation, and matrices near by."""
    case = mf.gaussian.KNOWN_CASES["full rank over t"]
    path = mf.gaussian.limit_of(case.gamma(), case.gaussian(), depth=1e8, rtol=1e-10)
    last, limit = path.covariances[-1], profile_of(case)
    ratios = [np.divide(*np.linalg.eigvalsh(one)) for one in (last, limit)]
    query, key, value = case.heads[0]
    random, survivors = np.random.default_rng([parameters.seed, 1]), 0
    for _ in range(PERTURBED):
        noise = NOISE * random.standard_normal((2, 2, 2))
        near = case._replace(heads=[(query + noise[0], key, value + noise[1])])
        outcome = mf.gaussian.classify(near.gamma(), near.gaussian(), depth=1e5)
        survivors += (outcome.rank, outcome.normalised_rank) == (0, 2)
    source = lab.other_method(
        "the equation for $X$, solved from many starts by SciPy's root"
    )
    return (
        DECAY.close_to(
            path.depths[-1] * last, limit, relative_tolerance=1e-5, source=source
        ),
        RATIO.close_to(*ratios, tolerance=1e-6, source=source),
        OPEN.close_to(
            survivors,
            PERTURBED,
            tolerance=0,
            source=lab.theory(
                f"all of {PERTURBED}, entries of $A$, $V$ moved by {NOISE:g}"
            ),
        ),
    )


def profile_of(case: mf.gaussian.Case) -> np.ndarray:
    """The positive definite solution of the equation for the profile of a decay."""
    query, key, value = case.heads[0]
    score, random = key.T @ query, np.random.default_rng(0)

    def residual(entries: np.ndarray) -> np.ndarray:
        profile = entries[[[0, 1], [1, 2]]]
        half = case.beta * value @ profile @ score @ profile
        return (profile + half + half.T)[np.triu_indices(2)]

    for _ in range(200):
        factor = 3 * random.standard_normal((2, 2))
        start = (factor @ factor.T)[np.triu_indices(2)]
        found = scipy.optimize.root(residual, start, tol=1e-13)
        profile = found.x[[[0, 1], [1, 2]]]
        if found.success and np.linalg.eigvalsh(profile)[0] > 1e-3:
            return profile
    return np.full((2, 2), np.nan)


def class_of(draw) -> str:
    """The class of a draw in the figures."""
    if draw.kind != "converges":
        return draw.kind
    if draw.rank > draw.bound:
        return "limit of too large a rank"
    if draw.rank > 0:
        return "limit of low rank"
    is_full = draw.normalised_rank == len(draw.eigenvalues)
    return list(CLASSES)[4] if is_full else "tends to 0, low rank"


def draw_outcomes(explorations) -> lab.Picture:
    """The share of each class in each ensemble."""
    figure, axes = style.canvas(panel=(7.4, 0.36 * len(explorations) + 1.7))
    labels = [f"{label}  ({len(e.draws)})" for label, e in explorations.items()]
    classes = [[class_of(draw) for draw in e.draws] for e in explorations.values()]
    places, starts = np.arange(len(labels))[::-1], np.zeros(len(labels))
    for name, colour in CLASSES.items():
        counts = np.array([each.count(name) for each in classes])
        shares = counts / [len(each) for each in classes]
        if counts.any() or name == "limit of too large a rank":
            bars = axes.barh(places, shares, 0.72, starts, color=colour, label=name)
            numbers = [str(count) if count else "" for count in counts]
            axes.bar_label(bars, numbers, label_type="center", color="white")
        starts = starts + shares
    axes.set_yticks(places, labels)
    axes.set(xlabel="share of the draws", xlim=(0, 1))
    axes.grid(visible=False)
    axes.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.36, 1.0), fontsize=9)
    return lab.Picture(
        figure,
        "What becomes of a covariance, by ensemble (numbers of draws in the bars and "
        "in brackets). A limit of a rank that the conjecture forbids would be orange.",
    )


def draw_collapse(paths) -> lab.Picture:
    """Paths in the plane of trace and ratio of eigenvalues."""
    figure, axes = style.canvas(panel=(6.4, 4.2))
    for draw, _, path in paths:
        name, (high, low) = class_of(draw), np.exp(path.log_eigenvalues).T
        axes.plot(high + low, low / high, color=CLASSES[name], label=name, linewidth=1)
        axes.plot((high + low)[0], (low / high)[0], "o", color=CLASSES[name])
    axes.set(xscale="log", yscale="log", xlim=(1e-6, 1e7), ylim=(1e-7, 1.5))
    axes.set(xlabel=r"size $\operatorname{tr}S$")
    axes.set(ylabel=r"ratio of eigenvalues $\lambda_2/\lambda_1$")
    handles, names = axes.get_legend_handles_labels()
    once = dict(zip(names, handles, strict=True))
    axes.legend(once.values(), once, loc="lower left", fontsize=9)
    return lab.Picture(
        figure,
        f"The first {len(paths)} generic draws of the plane, from their first "
        "covariance (dots). Limits of rank one fall at a constant size, most blow-ups "
        "fall while they grow. Where $S$ goes like $X/t$, or like $X$ over the depth "
        "left to a blow-up, with $X$ of full rank, the ratio stays.",
    )


experiment = lab.experiment(
    run, "Covariances lose rank, but not all of them", room="gaussian", seconds=90
)
