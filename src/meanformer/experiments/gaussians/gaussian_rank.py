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

import jax.random as jr
import numpy as np
import scipy.linalg

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers.gaussians import KINDS, change_of, softmax_of
from meanformer.gaussian import centred
from meanformer.gaussian.velocity import quiet_solve
from meanformer.plotting import draw_eigenvalues, style

DIMENSION = 4
SAVED = 41  # depths, over all decades
# The decaying eigenvalues are those of the inverse of this times t |A_s|.
INVERSE_RATES = {"softmax": 2.0, "L2": 4.0, "Sinkhorn": 4.0}
# Residual up to which a covariance is stationary: some zeros are double, found slowly.
RESIDUAL = 1e-6
# Least ratio of eigenvalues for a rank to count: the residual sees but their squares.
SURE = 30 * RESIDUAL**0.5
# Signs of the eigenvalues of the scores of which stationary covariances are looked for.
SIGNATURES = ((1, 1, -1, -1), (1, 1, 1, -1), (1, 1, 0, -1), (1, 0, 0, -1), (1, 1, 1, 1))


class Parameters(lab.Parameters):
    """How far the covariances are followed, and how many of them."""

    depth: float = lab.setting(1e6, full=1e8, help="depth of the flows", at_least=1e4)
    draws: int = lab.setting(3, full=30, help="random draws of each kind", at_least=1)
    starts: int = lab.setting(
        16, full=64, help="starts of the search for stationary covariances", at_least=4
    )
    seed: int = lab.setting(0, help="seed of all draws", at_least=0)


LIMIT = lab.theorem(
    "limit",
    r"With $V = I$ and $A \le 0$ all three kinds tend to $(\Pi S_0^{-1}\Pi)^+$.",
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
    "Covariances built from eigenvectors, of isotropic range, do not move.",
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


@lab.experiment(
    "Attention lowers the rank of a covariance", room="gaussian", seconds=25
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Follow covariances over many decades of depth, and look for those at rest."""
    cases = [case for rank in (1, 2, 3) for case in drawn_cases(rank, parameters)]
    runs = {
        name: [follow(KINDS[name], case, parameters) for case in cases]
        for name in progress.over(INVERSE_RATES, 0.5)
    }
    definite = drawn_cases(2, parameters, has_values=True)
    falls = [follow(mf.Softmax, case, parameters) for case in definite]
    rests = [stationary(one, parameters) for one in progress.over(SIGNATURES, 0.5)]
    highest, expected, motions = zip(*rests, strict=True)
    return lab.Outcome(
        findings=[
            *decay_findings(cases, runs),
            ISOTROPIC.close_to(highest, expected, tolerance=0),
            SHARP.at_most(motions, 0.0, tolerance=1e-13),
            *definite_findings(definite, falls),
        ],
        pictures=[draw_decay(runs, falls, parameters)],
    )


def drawn_cases(rank: int, parameters: Parameters, *, has_values: bool = False):
    """Roots of scores of this rank, values (I by default) and first covariances."""
    random, cases = np.random.default_rng([parameters.seed, rank, has_values]), []
    for _ in range(parameters.draws):
        root, start = random.standard_normal((2, DIMENSION, DIMENSION))
        root[rank:] = 0
        # Away from singular, both: small eigenvalues are slow to show what they do.
        tall = random.standard_normal((2 * DIMENSION, DIMENSION))
        value = tall.T @ tall / DIMENSION if has_values else np.eye(DIMENSION)
        spread = np.eye(DIMENSION) / 2 + start @ start.T / DIMENSION
        cases.append((root, value, spread))
    return cases


def follow(kind, case, parameters: Parameters) -> mf.flows.GaussianTrajectory:
    """The flow in a clock of its own, with factors that keep small eigenvalues."""
    root, value, start = case
    depths = np.append(0.0, np.geomspace(1e-2, parameters.depth, SAVED))
    options = {"solver": mf.LongDepth(), "save": depths, "rtol": 1e-9}
    return quiet_solve(kind(root, -root, value), centred(start), depths[-1], **options)


def decay_findings(cases, runs):
    """Limits, their ranks, and how the other eigenvalues decay."""
    ends, limits, ranks, kernels = [], [], [], []
    exponents, scaled, constants = [], [], []
    for name, row in runs.items():
        for (root, _, start), path in zip(cases, row, strict=True):
            basis = scipy.linalg.null_space(root)
            inner = basis.T @ np.linalg.solve(start, basis)
            size, kernel = np.linalg.norm(start), basis.shape[1]
            ends.append(np.asarray(path.covariances[-1]) / size)
            limits.append(basis @ np.linalg.inv(inner) @ basis.T / size)
            growth = mf.gaussian.growth_along(path)
            ranks.append(growth.rank)
            kernels.append(kernel)
            exponents.extend(growth.exponents[kernel:])
            values = np.asarray(path.statistics["eigenvalues"])[-1, kernel:]
            scaled.extend(float(path.depths[-1]) * values)
            rates = np.linalg.eigvalsh(root.T @ root)[kernel:]
            constants.extend(1 / (INVERSE_RATES[name] * rates))
    return (
        LIMIT.close_to(ends, limits, tolerance=1e-4),
        RANK.close_to(ranks, kernels, tolerance=0),
        DECAY.close_to(exponents, -1.0, tolerance=1e-3),
        CONSTANT.close_to(scaled, constants, relative_tolerance=1e-3),
    )


def definite_findings(cases, falls):
    """What is left of AS, the rank, and growth of the Lyapunov function."""
    left, growth, ranks = [], [], []
    for (root, value, start), path in zip(cases, falls, strict=True):
        spreads, score = np.asarray(path.covariances), root.T @ root
        size = np.linalg.norm(score, 2) * np.linalg.norm(start, 2)
        left.append(np.linalg.norm(score @ spreads[-1], 2) / size)
        levels = np.einsum("ij,tji->t", np.linalg.inv(value), spreads)
        growth.append(np.diff(levels).max() / levels[0])
        ranks.append(mf.gaussian.growth_along(path).rank)
    return (
        DEFINITE.at_most(left, 0.0, tolerance=1e-4),
        DEFINITE_RANK.at_most(ranks, 2),
        FALLING.at_most(growth, 0.0, tolerance=1e-8),
    )


def stationary(signs: tuple[int, ...], parameters: Parameters):
    """Highest rank at rest found and expected, and the motion of one built for it."""
    random = np.random.default_rng(parameters.seed)
    vectors = np.linalg.qr(random.standard_normal((DIMENSION, DIMENSION)))[0]
    values = np.array(signs) * random.uniform(0.5, 2.0, DIMENSION)
    turn = random.standard_normal((DIMENSION, DIMENSION))
    score = (vectors * values) @ vectors.T + turn - turn.T
    layer, highest, key = softmax_of(score), 0, jr.key(parameters.seed)
    options = {"tolerance": RESIDUAL, "key": key, "starts": parameters.starts}
    for rank in range(1, DIMENSION + 1):
        points = mf.gaussian.stationary_points(layer, DIMENSION, rank, **options)
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
