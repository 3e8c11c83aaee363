r"""Attention lowers the rank of a covariance, as far as its kernel allows.

With $V = I$ and $A$ negative semi-definite the covariance converges, under softmax, L2
and Sinkhorn attention alike, to $(\Pi S_0^{-1}\Pi)^+$, where $\Pi$ projects onto
$\ker A_s$: its rank is the dimension of that kernel, neither less nor more. The other
eigenvalues go to zero like $1/t$, so that no threshold tells them from small limits,
but their exponent does.

For $V = I$ a covariance is stationary under softmax attention if and only if its range
is isotropic for $A_s$. So its rank is at most $n_0 + \min(n_+, n_-)$, with the numbers
of zero, positive and negative eigenvalues of $A_s$, and this is reached. At most half
the dimension, as has been said, holds for invertible $A_s$ only.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.random as jr
import numpy as np
import scipy.linalg

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers.gaussians import KINDS, change_of, softmax_of
from meanformer.gaussian import centred
from meanformer.gaussian.without_warnings import quiet_solve
from meanformer.plotting import draw_cone, draw_eigenvalues, style

DIMENSION = 4
# Depths saved, over all decades.
SAVED = 41
# The decaying eigenvalues are those of the inverse of this times t |A_s|.
INVERSE_RATES = {"softmax": 2.0, "L2": 4.0, "Sinkhorn": 4.0}
# Residual up to which a covariance is stationary: some zeros are double, found slowly.
RESIDUAL = 1e-6
# Least ratio of extreme eigenvalues for the rank to count: a direction too many, of an
# eigenvalue of about the root of the residual, does not show in it.
SURE = 30 * RESIDUAL**0.5
# Signs of the eigenvalues of the scores of which stationary covariances are looked for.
SIGNATURES = ((1, 1, -1, -1), (1, 1, 1, -1), (1, 1, 0, -1), (1, 0, 0, -1), (1, 1, 1, 1))


@dataclass(frozen=True)
class Parameters:
    """How far the covariances are followed, and how many of them."""

    depth: float = lab.setting(1e6, full=1e8, help="depth of the flows", at_least=1e4)
    draws: int = lab.setting(3, full=30, help="random draws of each kind", at_least=1)
    starts: int = lab.setting(
        16, full=64, help="starts of the search for stationary covariances", at_least=4
    )
    seed: int = lab.setting(0, help="seed of all draws", at_least=0)


LIMIT = lab.theorem(
    "limit",
    r"With $V = I$ and $A \le 0$ the covariance tends to $(\Pi S_0^{-1}\Pi)^+$ under "
    "softmax, L2 and Sinkhorn attention alike.",
    "CACP25, Gaussian data (the limit: theory page on Gaussians)",
    source=lab.closed_form(r"$(\Pi S_0^{-1}\Pi)^+$, relative to $|S_0|$"),
)
RANK = lab.theorem(
    "rank",
    r"The rank of the limit is $\dim\ker A_s$ exactly.",
    "CACP25, Gaussian data (the limit: theory page on Gaussians)",
    source=lab.theory(r"$\dim\ker A_s$ for each of the draws"),
)
DECAY = lab.theorem(
    "decay",
    "The other eigenvalues decay like $t^{-1}$.",
    "CACP25, Gaussian data (the rate: theory page on Gaussians)",
    source=lab.theory("exponents over the last decade of depth"),
)
CONSTANT = lab.theorem(
    "decay-constant",
    r"Times depth they tend to the inverses of $2\beta$ (softmax) or $4\beta$ (L2, "
    "Sinkhorn) times the eigenvalues of $-A_s$.",
    "CACP25, Gaussian data (the rate: theory page on Gaussians)",
    source=lab.closed_form(r"$1/(2\beta a_i)$ and $1/(4\beta a_i)$"),
)
ISOTROPIC = lab.theorem(
    "stationary-rank",
    "With $V = I$ the highest rank of a stationary covariance of softmax attention "
    r"is $n_0 + \min(n_+, n_-)$.",
    "CACP25, Gaussian data (in the corrected form of the theory page on Gaussians)",
    source=lab.theory("highest rank found, for five signatures"),
)
SHARP = lab.theorem(
    "isotropic",
    "Covariances whose range is isotropic for $A_s$, built from eigenvectors, do not "
    "move.",
    "CACP25, Gaussian data (in the corrected form of the theory page on Gaussians)",
    source=lab.theory(r"$|LS + SL^\top|/(|A||S|^2)$"),
)
DEFINITE = lab.theorem(
    "definite-values",
    r"With $V = W^\top W$ and $A = -Q^\top Q$ of rank 2 in dimension 4, $AS(t)$ tends "
    "to zero under softmax attention.",
    "CACP25, Gaussian data (definite values: theory page on Gaussians)",
    source=lab.theory(r"$|AS|/(|A||S_0|)$ at the last depth"),
)
DEFINITE_RANK = lab.theorem(
    "definite-values-rank",
    r"There at most $\dim\ker A_s = 2$ eigenvalues of $S(t)$ do not tend to zero.",
    "CACP25, Gaussian data (definite values: theory page on Gaussians)",
    source=lab.theory(r"$\dim\ker A_s$"),
)
FALLING = lab.theorem(
    "falling",
    r"On the way $\mathrm{tr}(V^{-1}S)$ never grows.",
    "CACP25, Gaussian data (definite values: theory page on Gaussians)",
    source=lab.theory("largest growth between saved depths, relative"),
)


class Case(NamedTuple):
    r"""A score $-Q^\top Q$ by its root $Q$, values, and a covariance to start from."""

    root: np.ndarray
    value: np.ndarray
    start: np.ndarray


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Follow covariances over many decades of depth, and look for those at rest."""
    cases = [case for rank in (1, 2, 3) for case in drawn_cases(rank, parameters)]
    runs = {
        name: [follow(KINDS[name], case, parameters) for case in cases]
        for name in progress.over(INVERSE_RATES, 0.5)
    }
    definite = drawn_cases(2, parameters, has_values=True)
    falls = [follow(mf.Softmax, case, parameters) for case in definite]
    highest, expected, motions = zip(
        *(stationary(signs, parameters) for signs in progress.over(SIGNATURES, 0.3)),
        strict=True,
    )
    for _ in progress.over(range(1), 0.2):
        planar = planar_flows()
    return lab.Outcome(
        findings=[
            *decay_findings(cases, runs),
            ISOTROPIC.close_to(highest, expected, tolerance=0),
            SHARP.at_most(motions, 0.0, tolerance=1e-13),
            *definite_findings(definite, falls),
        ],
        pictures=[draw_decay(runs, falls, parameters), draw_planar(planar)],
    )


def drawn_cases(rank: int, parameters: Parameters, *, has_values: bool = False):
    """Random cases with a score of this rank; values other than I on demand."""
    random = np.random.default_rng([parameters.seed, rank, has_values])
    cases = []
    for _ in range(parameters.draws):
        root, start = random.standard_normal((2, DIMENSION, DIMENSION))
        root[rank:] = 0
        # Away from singular, both: small eigenvalues are slow to show what they do.
        tall = random.standard_normal((2 * DIMENSION, DIMENSION))
        value = tall.T @ tall / DIMENSION if has_values else np.eye(DIMENSION)
        spread = np.eye(DIMENSION) / 2 + start @ start.T / DIMENSION
        cases.append(Case(root, value, spread))
    return cases


def follow(kind, case: Case, parameters: Parameters) -> mf.flows.GaussianTrajectory:
    """The flow of a case over many decades of depth."""
    layer = kind(case.root, -case.root, case.value)
    return long_flow(layer, case.start, np.geomspace(1e-2, parameters.depth, SAVED))


def long_flow(layer, start, depths: np.ndarray) -> mf.flows.GaussianTrajectory:
    """The flow in a clock of its own, with factors that keep small eigenvalues."""
    options = {"solver": mf.LongDepth(), "save": np.append(0.0, depths), "rtol": 1e-9}
    return quiet_solve(layer, centred(start), float(depths[-1]), **options)


def decay_findings(cases, runs):
    """Limits, their ranks, and how the other eigenvalues decay."""
    ends, limits, ranks, kernels = [], [], [], []
    exponents, scaled, constants = [], [], []
    for name, row in runs.items():
        for case, path in zip(cases, row, strict=True):
            basis = scipy.linalg.null_space(case.root)
            inner = basis.T @ np.linalg.solve(case.start, basis)
            size, kernel = np.linalg.norm(case.start), basis.shape[1]
            ends.append(np.asarray(path.covariances[-1]) / size)
            limits.append(basis @ np.linalg.inv(inner) @ basis.T / size)
            growth = mf.gaussian.growth_along(path)
            ranks.append(growth.rank)
            kernels.append(kernel)
            exponents.extend(growth.exponents[kernel:])
            values = np.asarray(path.statistics["eigenvalues"])[-1, kernel:]
            scaled.extend(float(path.depths[-1]) * values)
            rates = np.linalg.eigvalsh(case.root.T @ case.root)[kernel:]
            constants.extend(1 / (INVERSE_RATES[name] * rates))
    return (
        LIMIT.close_to(ends, limits, tolerance=1e-4),
        RANK.close_to(ranks, kernels, tolerance=0),
        DECAY.close_to(exponents, -1.0, tolerance=1e-3),
        CONSTANT.close_to(scaled, constants, relative_tolerance=1e-3),
    )


def definite_findings(cases, falls):
    """What is left of AS, the rank, and growth of the Lyapunov function."""
    left, growth = [], []
    for case, path in zip(cases, falls, strict=True):
        spreads, score = np.asarray(path.covariances), case.root.T @ case.root
        size = np.linalg.norm(score, 2) * np.linalg.norm(case.start, 2)
        left.append(np.linalg.norm(score @ spreads[-1], 2) / size)
        levels = np.einsum("ij,tji->t", np.linalg.inv(case.value), spreads)
        growth.append(np.diff(levels).max() / levels[0])
    return (
        DEFINITE.at_most(left, 0.0, tolerance=1e-4),
        DEFINITE_RANK.at_most(
            [mf.gaussian.growth_along(path).rank for path in falls], 2
        ),
        FALLING.at_most(growth, 0.0, tolerance=1e-8),
    )


def stationary(signs: tuple[int, ...], parameters: Parameters):
    """Highest rank at rest found and expected, and the motion of one built for it."""
    random = np.random.default_rng(parameters.seed)
    vectors = np.linalg.qr(random.standard_normal((DIMENSION, DIMENSION)))[0]
    values = np.array(signs) * random.uniform(0.5, 2.0, DIMENSION)
    turn = random.standard_normal((DIMENSION, DIMENSION))
    score = (vectors * values) @ vectors.T + turn - turn.T
    layer, highest = softmax_of(score), 0
    for rank in range(1, DIMENSION + 1):
        points = mf.gaussian.stationary_points(
            layer,
            DIMENSION,
            rank,
            tolerance=RESIDUAL,
            key=jr.key(parameters.seed),
            starts=parameters.starts,
        )
        if any(point.smallest > SURE for point in points):
            highest = rank
    scaled = vectors / np.sqrt(np.where(values == 0, 1, np.abs(values)))
    ups, downs = scaled[:, values > 0].T, scaled[:, values < 0].T
    pairs = [up + down for up, down in zip(ups, downs, strict=False)]
    basis = np.array([*scaled[:, values == 0].T, *pairs])
    if not len(basis):
        return highest, 0, 0.0
    spread = basis.T @ np.diag(np.arange(1, len(basis) + 1)) @ basis
    size = np.linalg.norm(score) * np.linalg.norm(spread) ** 2
    return highest, len(basis), np.linalg.norm(change_of(layer, spread)) / size


def planar_flows() -> list[mf.flows.GaussianTrajectory]:
    """Covariances of the plane under scores of three kinds, from four starts."""
    scores = (
        np.array([[-0.8, -0.4], [-0.4, -0.2]]),
        np.array([[-0.5, -0.2], [-0.2, -1.0]]),
        np.array([[0.6, 0.3], [0.3, -0.9]]),
    )
    turns = np.pi * np.arange(4) / 2 + 0.6
    across, along = 0.4 * np.cos(turns), 0.4 * np.sin(turns)
    starts = np.array([[0.9 + across, along], [along, 0.9 - across]]).transpose(2, 0, 1)
    depths = np.geomspace(1e-2, 1e4, 150)
    return [
        long_flow(softmax_of(score), start, depths)
        for score in scores
        for start in starts
    ]


def draw_decay(runs, falls, parameters: Parameters) -> lab.Picture:
    """Eigenvalues along depth: the three kinds, and values other than the identity."""
    figure, (left, right) = style.canvas(2, sharey=True)
    middle = parameters.draws  # the first draw with a score of rank two
    for (name, row), colour in zip(runs.items(), style.PALETTE, strict=False):
        depths, values = row[middle].depths, row[middle].statistics["eigenvalues"]
        options = {"label": name, "color": colour, "slope": None}
        if name == "Sinkhorn":
            # The same as L2 attention at large depths, which it must not hide.
            options |= {"slope": -1.0, "linestyle": (0, (4, 4))}
        draw_eigenvalues(depths, values, left, **options)
    left.set_title("$V = I$")
    left.legend(loc="lower left")
    for path, colour in zip(falls, style.PALETTE[3:], strict=False):
        values = path.statistics["eigenvalues"]
        draw_eigenvalues(path.depths, values, right, color=colour, slope=None)
    right.set(title=r"softmax, $V = W^\top W$", ylabel="")
    return lab.Picture(
        figure,
        r"Four eigenvalues of the covariance where $A = -Q^\top Q$ has rank 2: two "
        "have positive limits, two decay like $1/t$ (dashed). Left: one draw, three "
        "kinds of attention, with the same limits. Right: a colour for each draw.",
    )


def draw_planar(planar: list[mf.flows.GaussianTrajectory]) -> lab.Picture:
    """Covariances of the plane in their cone."""
    words = ("tends to zero", "limit of rank one", "limit of rank two")
    outcomes = [
        words[mf.gaussian.growth_along(path).rank]
        if path.blow_up is None
        else "blows up"
        for path in planar
    ]
    figure, axes = style.canvas(panel=(5.8, 4.6), subplot_kw={"projection": "3d"})
    covariances = [path.covariances for path in planar]
    draw_cone(covariances, axes, outcomes=outcomes, height=3.0)
    return lab.Picture(
        figure,
        "Covariances of the plane under softmax attention with $V = I$, from the same "
        "four starts (rings), in the cone of positive semi-definite matrices. With $A$ "
        "negative semi-definite of rank one they end on the surface of the cone, where "
        "the rank is one; with $A$ negative definite at its tip; with $A$ indefinite "
        "they leave for infinity.",
    )


experiment = lab.experiment(
    run,
    "Attention lowers the rank of a covariance to that of a kernel",
    room="gaussian",
    seconds=30,
)
