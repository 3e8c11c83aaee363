r"""Which flows of Gaussians climb an energy, and how fast.

The covariance of a centred Gaussian moves by $\dot S = LS + SL^\top$. Where
$L = 2\nabla F$ that is the gradient ascent of $F$ in the Bures-Wasserstein metric, the
one that optimal transport puts on covariances, and $F$ grows at the rate
$\operatorname{tr}(LSL^\top)$. Softmax and linear attention have such an $F$ if the
score is symmetric or antisymmetric and $V = cA^\top$, L2 attention if $Q = qK$ and
$V = cK^\top K$, Sinkhorn attention if $B = B^\top$ and $V = cB$. A positive definite
matrix in front of $V$ twists the metric; and softmax with $V = I$ climbs
$\beta\operatorname{tr}(AS)$ in the metric of Fisher and Rao. Each $F$ is a constant,
which the values set, times an energy $E$ of the kind.

The energies are written out anew here and differentiated by differences, so that
neither the velocity nor the energy of the library is compared with itself.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.attention import AbstractAttention
from meanformer.errors import PrecisionWarning
from meanformer.experiments.helpers import gaussians
from meanformer.experiments.helpers.gaussians import COVARIANCE, softmax_of
from meanformer.plotting import style

FORM = np.array([[0.8, 0.3], [0.3, -0.4]])
TURN = np.array([[0.0, -0.7], [0.7, 0.0]])
KEY = np.array([[0.4, 0.1], [-0.3, 0.7]])
SCORE = np.array([[0.15, -0.23], [0.27, 0.33]])
TWIST = np.array([[0.6, 0.2], [0.2, 0.3]])
INDEFINITE = np.diag([-0.3, 2.0])
QUERY_RATIO, VALUE_RATIO = 1.5, 0.8
SAVED = 401
AXES = (0.8, -0.6)  # eigenvalues of the form in the landscape
DIFFERENCES = np.array([-1, 9, -45, 0, 45, -9, 1]) / 60  # derivative of sixth order


class Parameters(lab.Parameters):
    """Depth of the flows and accuracy of the integrals."""

    depth: float = lab.setting(
        0.4, full=0.45, help="depth of the flows", above=0, at_most=0.45
    )
    order: int = lab.setting(
        24, full=40, help="Gauss-Hermite nodes along each axis", at_least=20, at_most=48
    )


GRADIENT = lab.theorem(
    "gradient",
    r"In the Bures-Wasserstein metric $L = 2\nabla F$, with a mobility $P$ "
    r"$L = 2P\,\nabla F$, in that of Fisher and Rao $\dot S = 2S\,\nabla F\,S$.",
    "CACP25, Gaussian data; SABP22, gradient flow interpretation",
    source=lab.other_method(r"the written energies by differences, in $\dot S$"),
)
ENERGY = lab.observation(
    "energy",
    "The energies of the seven layers are those of their formulas.",
    source=lab.closed_form("the formulas, in NumPy"),
)
ASCENT = lab.theorem(
    "ascent",
    "Along the flows the energy never falls.",
    "CACP25, Gaussian data (energies: theory page on Gaussians)",
    source=lab.theory(f"largest decrease between two of {SAVED} depths"),
)
DISSIPATION = lab.theorem(
    "dissipation",
    r"$F$ grows at the rate $\operatorname{tr}(LSL^\top)$, in a twisted metric "
    r"$\operatorname{tr}(P^{-1}LSL^\top)$, in that of Fisher and Rao "
    r"$\tfrac12\operatorname{tr}((S^{-1}\dot S)^2)$.",
    "CACP25, Gaussian data (energies: theory page on Gaussians)",
    source=lab.other_method("differences of the energy along the flow"),
)
MOTION = lab.theorem(
    "motion",
    r"Without a mobility that rate is $\int|\Gamma|^2\,\mathrm{d}\mu$, the mean "
    "square of the velocity of the tokens.",
    "SABP22, gradient flow interpretation",
    source=lab.other_method("attention of the nodes of a quadrature to themselves"),
)
REWARD = lab.observation(
    "reward-of-tokens",
    "The entropic reward of a Gaussian is the entropic energy of its tokens.",
    source=lab.other_method("Sinkhorn's algorithm on the nodes of a quadrature"),
)
TOLD = lab.observation(
    "told",
    "The library tells the seven gradient flows from five flows that are not.",
    source=lab.theory("all of them"),
)
FALL = lab.observation(
    "fall",
    "With an indefinite matrix in front the energy of $V = A$ falls, then rises.",
    source=lab.theory("smallest increase, and minus the largest"),
)


class Row(NamedTuple):
    r"""A layer, its energy $E$ written out, and $L = 2P\,\nabla F$ with $F = cE$."""

    layer: AbstractAttention
    energy: Callable[[np.ndarray], float]
    factor: float = 1.0
    mobility: np.ndarray = np.eye(2)


@lab.experiment(
    "Some flows of Gaussians are gradient flows", room="gaussian", seconds=30
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Differentiate the energies, then follow them along the flows."""
    listed, mu = rows(), mf.gaussian.centred(COVARIANCE)
    step = parameters.depth / (SAVED - 1)
    profiles, energies, rates, slopes = [], [], [], []
    for row in progress.over(listed, 0.7):
        options = {"save": SAVED, "rtol": 1e-12, "atol": 1e-14}
        path = mf.solve(mf.Flow(row.layer), mu, parameters.depth, **options)
        profiles.append(mf.gaussian.energy_profile(row.layer, path))
        energies.append([row.energy(spread) for spread in np.asarray(path.covariances)])
        rates.append(row.factor * np.asarray(profiles[-1].rates))
        slopes.append(row.factor * np.correlate(energies[-1], DIFFERENCES) / step)
    cloud = mf.quadrature(mu, parameters.order)
    with warnings.catch_warnings():
        # Far nodes without weight make the score of Sinkhorn attention large.
        warnings.simplefilter("ignore", PrecisionWarning)
        reward = float(mf.observables.energy(listed[4].layer, cloud))
        velocities = [row.layer(cloud, cloud.points) for row in listed[:5]]
    for _ in progress.over(range(1), 0.3):
        indefinite = softmax_of(FORM, INDEFINITE @ FORM)
        fall = mf.solve(mf.Flow(indefinite), mu, 2.4, save=SAVED, rtol=1e-10)
        falling = [listed[0].energy(spread) for spread in np.asarray(fall.covariances)]
        flows = landscape_flows()
    structure = mf.gaussian.gradient_structure
    others = [lab.reference_attention(kind) for kind in gaussians.KINDS.values()]
    told = [bool(structure(row.layer)) for row in listed]
    told += [not structure(layer) for layer in (*others, indefinite)]
    changes = [gaussians.change_of(row.layer, COVARIANCE) for row in listed]
    climbs = [climbing_velocity(row) for row in listed]
    squares = [float(cloud.weights @ jnp.sum(v**2, axis=1)) for v in velocities]
    violations = [float(profile.worst_violation) for profile in profiles]
    exact = float(mf.gaussian.entropic_reward(mu, jnp.array(FORM)))
    return lab.Outcome(
        findings=[
            GRADIENT.close_to(changes, climbs, tolerance=1e-9),
            ENERGY.close_to([p.energies for p in profiles], energies, tolerance=1e-12),
            ASCENT.at_most(violations, 0.0, tolerance=1e-12),
            DISSIPATION.close_to(np.array(rates)[:, 3:-3], slopes, tolerance=1e-8),
            MOTION.close_to(np.array(rates)[:5, 0], squares, tolerance=1e-8),
            REWARD.close_to(exact, reward, tolerance=1e-9),
            TOLD.close_to(sum(told), len(told), tolerance=0),
            FALL.below([np.diff(falling).min(), -np.diff(falling).max()], 0.0),
        ],
        pictures=[draw_climb_and_fall(flows, fall.depths, falling)],
    )


def rows() -> list[Row]:
    """The layers that climb an energy, those without a mobility first."""
    gram, identity = KEY.T @ KEY, np.eye(2)

    def of_score(spread: np.ndarray, score: np.ndarray = FORM) -> float:
        return np.trace(spread @ score.T @ spread @ score) / 4

    def of_distance(spread: np.ndarray) -> float:
        volume = np.log(np.linalg.det(identity + 2 * spread @ gram))
        return QUERY_RATIO / 2 * (np.trace(gram @ spread) - volume / 2)

    def of_plan(spread: np.ndarray) -> float:
        # H is similar to S B S B, whose eigenvalues need no root of S.
        return plan_energy(np.linalg.eigvals(spread @ FORM @ spread @ FORM).real)

    distance = mf.L2(QUERY_RATIO * KEY, KEY, VALUE_RATIO * gram)
    sinkhorn = mf.Sinkhorn(FORM, identity, FORM, kernel="dot", tolerance=1e-13)
    return [
        Row(softmax_of(FORM, FORM), of_score),
        Row(softmax_of(TURN, TURN.T), lambda spread: of_score(spread, TURN)),
        Row(mf.Linear(FORM, identity, FORM), of_score),
        Row(distance, of_distance, factor=VALUE_RATIO),
        Row(sinkhorn, of_plan, factor=1 / 2),
        Row(softmax_of(FORM, TWIST @ FORM), of_score, mobility=TWIST),
        # The metric of Fisher and Rao, at the covariance at depth zero.
        Row(softmax_of(SCORE), lambda s: np.trace(SCORE @ s), mobility=COVARIANCE / 2),
    ]


def plan_energy(sizes: np.ndarray) -> Any:
    """The entropic reward, from the eigenvalues of $H$ along the first axis."""
    roots = np.sqrt(1 + 4 * sizes)
    return np.sum((roots - 1) / 2 + np.log(2 / (1 + roots)) / 2, axis=0)


def climbing_velocity(row: Row) -> np.ndarray:
    """The velocity that climbs the energy in the metric, by differences."""
    step, gradient = 1e-3, np.zeros((2, 2))
    for place in np.ndindex(2, 2):
        unit = np.zeros((2, 2))
        unit[place] = step
        unit = (unit + unit.T) / 2
        energies = [row.energy(COVARIANCE + k * unit) for k in range(-3, 4)]
        gradient[place] = row.factor * (DIFFERENCES @ energies) / step
    half = 2 * row.mobility @ gradient @ COVARIANCE
    return half + half.T


def landscape_flows() -> list[np.ndarray]:
    """Standard deviations along flows of Sinkhorn attention that start on a circle."""
    flow = mf.Flow(mf.Sinkhorn(np.diag(AXES), np.eye(2), np.diag(AXES), kernel="dot"))
    spreads = []
    for angle in np.linspace(0.06, np.pi / 2 - 0.06, 7):
        start = mf.gaussian.centred(np.diag([np.cos(angle), np.sin(angle)]) ** 2 * 0.49)
        path = mf.solve(flow, start, 6.0, save=61)
        spreads.append(np.sqrt(np.asarray(path.covariances)[:, [0, 1], [0, 1]]))
    return spreads


def draw_climb_and_fall(flows, depths, falling) -> lab.Picture:
    """Sinkhorn's energy over two standard deviations, with flows; and a fall."""
    figure, (left, right) = style.canvas(2, panel=(5.2, 4.2))
    first, second = np.meshgrid(*[np.linspace(0.02, 2.4, 90)] * 2)
    # Uncorrelated: H is diagonal.
    total = plan_energy(np.stack([AXES[0] * first**2, AXES[1] * second**2]) ** 2)
    levels = np.linspace(0, np.sqrt(total.max()), 17) ** 2
    filled = left.contourf(first, second, total, levels, cmap="Blues", alpha=0.8)
    left.contour(first, second, total, levels, colors=style.INK, linewidths=0.35)
    for spreads in flows:
        left.plot(*spreads.T, "o-", color=style.ORANGE, linewidth=1.4, markevery=[0])
    left.set(title="a gradient flow", xlim=(0, 2.4), ylim=(0, 2.4), aspect="equal")
    left.set(xlabel=r"standard deviation $\sqrt{S_{11}}$", ylabel=r"$\sqrt{S_{22}}$")
    figure.colorbar(filled, ax=left, label="energy $E_B$", format="%.2f")
    right.plot(depths, falling, color=style.INK)
    right.set(title="not a gradient flow", ylim=(0, None))
    right.set(xlabel="depth $t$", ylabel=r"$\frac{1}{4}\,\mathrm{tr}(SASA)$")
    return lab.Picture(
        figure,
        "Left: the energy of Sinkhorn attention on uncorrelated Gaussians, "
        r"$B = \operatorname{diag}(0.8, -0.6)$; in standard deviations the metric is "
        "that of the page, and flows (from dots) cross level lines at right angles. "
        "Right: the energy of $V = A$ along a flow with an indefinite matrix in front.",
    )
