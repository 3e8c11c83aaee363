r"""Do covariances lose rank? A conjecture, its exceptions, and what refutes it.

Under softmax attention with matrices $V$ and $A = K^\top Q$ the covariance of a centred
Gaussian obeys $\dot S = \beta(VSAS + SA^\top SV^\top)$. It was conjectured that what
does not blow up ends with low rank. Read literally that is false: if $V$ is a quarter
turn and $A = I$, every $cI$ is stationary and every other covariance of the plane turns
for ever. And on an open set of matrices $S \sim X/t$ with $X$ of full rank: the limit
is zero, but its direction is not of low rank. What is left is the generic form: for
random matrices, a limit that is not zero has rank $(d + \dim\ker A)/2$ at most.

Draw after draw is followed until the exponents of its eigenvalues tell what becomes of
it. Every exception is looked at again, a hundred times longer, and kept.
"""

import jax.random as jr
import numpy as np
import scipy.optimize

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers.gaussians import change_of
from meanformer.gaussian import KNOWN_CASES
from meanformer.plotting import style

STRUCTURED = ("orthogonal", "symmetric", "commuting", "negative", "near-rotation")
# Draws of the plane that are looked at, and those whose nearest counterexample is.
LOOKED_AT, SEARCHED = 40, 8
PERTURBED, NOISE = 4, 0.02


class Parameters(lab.Parameters):
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
        0, full=40, help="draws of other generic ensembles", at_least=0, at_most=10_000
    )
    depth: float = lab.setting(
        1e5, full=1e6, help="how far, in units of the first change", at_least=1e4
    )
    seed: int = lab.setting(0, help="seed of the draws", at_least=0)


GENERIC = lab.conjecture(
    "generic",
    "For random $Q$, $K$, $V$ no covariance has a limit of full rank.",
    "CACP25, low-rank conjecture (generic form: theory page on Gaussians)",
    source=lab.theory("number of such draws"),
)
RANK = lab.conjecture(
    "rank",
    r"Whatever converges has a limit of rank at most $(d + \dim\ker A)/2$.",
    "CACP25, low-rank conjecture (generic form: theory page on Gaussians)",
    source=lab.theory("rank minus bound, in all ensembles"),
)
DECIDED = lab.observation(
    "decided",
    "The explorer decides on all but a few of the draws.",
    source=lab.theory("one in twenty"),
)
NEAREST = lab.observation(
    "nearest",
    "Generic $Q$ and $V$ must be changed until a covariance of rank $2$ is stationary.",
    source=lab.theory("relative change, by the nearest that a search finds"),
)
ISOTROPIC = lab.conjecture(
    "isotropic",
    r"The range of a limit that is not zero is isotropic: $u^\top Au = 0$.",
    "CACP25, low-rank conjecture (generic form: theory page on Gaussians)",
    source=lab.theory(r"$u^\top Au/|A|$ at the last depth"),
)
LITERAL = lab.theorem(
    "literal",
    "The literal statement is false: for $A = I$ and a quarter turn $V$, $cI$ rests.",
    "CACP25, low-rank conjecture (counterexample: theory page on Gaussians)",
    source=lab.closed_form(r"$VSAS = c^2V$ is antisymmetric: $|LS + SL^\top|$"),
)
PERIOD = lab.theorem(
    "period",
    "All other covariances turn for ever, with a period that depends on the trace.",
    "CACP25, low-rank conjecture (counterexample: theory page on Gaussians)",
    source=lab.closed_form(r"$\pi/(\beta\operatorname{tr}S_0)$"),
)
CONSERVED = lab.theorem(
    "conserved",
    "Trace and determinant are conserved while they turn.",
    "CACP25, low-rank conjecture (counterexample: theory page on Gaussians)",
    source=lab.closed_form("over ten periods, relative to depth 0"),
)
DECAY = lab.observation(
    "decay",
    r"In a known case $t\,S(t) \to X = -\beta(VXAX + XA^\top XV^\top)$ of full rank: "
    "the ratio of the two eigenvalues of $S(t)$ stays away from zero.",
    source=lab.other_method("the equation for $X$, by SciPy's root, and its ratio"),
)
OPEN = lab.observation(
    "open-set",
    "Matrices near by do the same: full rank survives on an open set.",
    source=lab.theory(f"all of {PERTURBED}, entries of $A$, $V$ moved by {NOISE:g}"),
)


@lab.experiment(
    "Covariances lose rank, but not all of them", room="gaussian", seconds=90
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Explore the ensembles, then look at the known cases."""
    explored = {}
    for label, (options, count) in progress.over(ensembles(parameters), 0.8):
        ensemble = mf.gaussian.Ensemble(**options, seed=parameters.seed)
        explored[label] = mf.gaussian.explore(ensemble, count, depth=parameters.depth)
    generic = [one for label, one in explored.items() if label.startswith("generic")]
    draws = [draw for one in explored.values() for draw in one.draws]
    exceptions = [
        [label, draw.index, draw.exception, "yes" if draw.confirmed else ""]
        for label, exploration in explored.items()
        for draw in exploration.exceptions
    ]
    heads = ["ensemble", "draw", "exception", "confirmed"]
    caption = "All exceptions. Ensemble(…, seed).draw(number) gives the matrices."
    for _ in progress.over(range(1), 0.2):
        findings = [
            GENERIC.at_most(sum(len(one.full_rank_limits) for one in generic), 0),
            RANK.at_most([d.rank - d.bound for d in draws if d.rank is not None], 0),
            DECIDED.at_most(np.mean([d.kind == "undecided" for d in draws]), 0.05),
            *plane_findings(generic[0]),
            *rotation_findings(),
            *decay_findings(parameters),
        ]
    return lab.Outcome(
        findings,
        pictures=[draw_outcomes(explored)],
        tables=[lab.Table(heads, exceptions, caption)],
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
    listed |= {name: ({"family": name}, parameters.structured) for name in STRUCTURED}
    return [(label, case) for label, case in listed.items() if case[1] > 0]


def plane_findings(plane: mf.gaussian.Exploration):
    """How near counterexamples are, and whether leading directions are isotropic."""
    distances, scores = [], []
    for draw in plane.draws[:LOOKED_AT]:
        case = plane.ensemble.draw(draw.index)
        if draw.index < SEARCHED:
            found = mf.gaussian.nearest_stationary(case, 2, key=jr.key(draw.index))
            distances.append(np.nan if found is None else found.distance)
        if draw.rank == 1:
            path = mf.gaussian.limit_of(case.gamma(), case.gaussian(), depth=1e5)
            query, key, _ = case.heads[0]
            score, leading = key.T @ query, path.vectors[:, 0]
            scores.append(leading @ score @ leading / np.linalg.norm(score, 2))
    return (
        NEAREST.at_least(distances, 1e-3),
        ISOTROPIC.close_to(scores, 0, tolerance=1e-3),
    )


def rotation_findings():
    """The stationary point, the period and what is conserved, against theory."""
    still, case = KNOWN_CASES["rotation, stationary"], KNOWN_CASES["rotation, periodic"]
    gamma, start = case.gamma(), case.gaussian()
    period = np.pi / (case.beta * np.trace(case.covariance))
    found = mf.gaussian.classify(gamma, start).period
    path = mf.solve(mf.Flow(gamma), start, 10 * period, save=41, rtol=1e-11)
    spreads = np.asarray(path.covariances)
    traces, volumes = np.trace(spreads, axis1=1, axis2=2), np.linalg.det(spreads)
    conserved = [traces / np.trace(spreads[0]), volumes / np.linalg.det(spreads[0])]
    motion = np.abs(change_of(still.gamma(), still.covariance)).max()
    return (
        LITERAL.at_most(motion, 0.0, tolerance=1e-15),
        PERIOD.close_to(found or np.nan, period, relative_tolerance=1e-8),
        CONSERVED.close_to(conserved, 1.0, tolerance=1e-9),
    )


def decay_findings(parameters: Parameters):
    """The replayable case against its stationary equation, and matrices near by."""
    case, square = KNOWN_CASES["full rank over t"], [[0, 1], [1, 2]]
    path = mf.gaussian.limit_of(case.gamma(), case.gaussian(), depth=1e8, rtol=1e-10)
    query, key, value = case.heads[0]

    def residual(entries: np.ndarray) -> np.ndarray:
        half = case.beta * value @ entries[square] @ key.T @ query @ entries[square]
        return (entries[square] + half + half.T)[np.triu_indices(2)]

    last = path.depths[-1] * path.covariances[-1]
    solved = scipy.optimize.root(residual, last[np.triu_indices(2)], tol=1e-13)
    limit = solved.x[square] if solved.success else np.eye(2)
    random, survivors = np.random.default_rng([parameters.seed, 1]), 0
    for _ in range(PERTURBED):
        noise = NOISE * random.standard_normal((2, 2, 2))
        near = case._replace(heads=[(query + noise[0], key, value + noise[1])])
        outcome = mf.gaussian.classify(near.gamma(), near.gaussian(), depth=1e5)
        survivors += (outcome.rank, outcome.normalised_rank) == (0, 2)
    pair = [[*x.ravel(), np.divide(*np.linalg.eigvalsh(x))] for x in (last, limit)]
    return (
        DECAY.close_to(*pair, relative_tolerance=1e-6),
        OPEN.close_to(survivors, PERTURBED, tolerance=0),
    )


def class_of(draw: mf.gaussian.Draw) -> str:
    """The class of a draw, in a few words; exceptions have their own words."""
    plain = draw.kind if draw.rank is None else f"limit of rank {draw.rank}"
    return draw.exception or plain


def draw_outcomes(explorations) -> lab.Picture:
    """The share of each class in each ensemble."""
    figure, axes = style.canvas(panel=(7.4, 0.36 * len(explorations) + 1.7))
    labels = [f"{label}  ({len(e.draws)})" for label, e in explorations.items()]
    classes = [[class_of(draw) for draw in e.draws] for e in explorations.values()]
    starts = np.zeros(len(labels))
    for name in sorted(set().union(*classes)):
        shares = [each.count(name) / len(each) for each in classes]
        axes.barh(labels, shares, 0.72, starts, label=name)
        starts = starts + shares
    axes.set(xlabel="share of the draws", xlim=(0, 1), ylim=(len(labels) - 0.4, -0.6))
    axes.grid(visible=False)
    axes.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.36, 1.0), fontsize=9)
    return lab.Picture(
        figure,
        "What becomes of a covariance, by ensemble (number of draws in brackets). A "
        "limit of a rank that the conjecture forbids would say so.",
    )
