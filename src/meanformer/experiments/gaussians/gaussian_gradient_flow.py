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
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.attention import AbstractAttention
from meanformer.errors import PrecisionWarning
from meanformer.experiments.helpers.gaussians import (
    COVARIANCE,
    KINDS,
    change_of,
    softmax_of,
)
from meanformer.gaussian import centred
from meanformer.plotting import style

FORM = np.array([[0.8, 0.3], [0.3, -0.4]])
TURN = np.array([[0.0, -0.7], [0.7, 0.0]])
KEY = np.array([[0.4, 0.1], [-0.3, 0.7]])
SCORE = np.array([[0.15, -0.23], [0.27, 0.33]])
TWIST = np.array([[0.6, 0.2], [0.2, 0.3]])
INDEFINITE, INDEFINITE_DEPTH = np.diag([-0.3, 2.0]), 2.4
QUERY_RATIO, VALUE_RATIO = 1.5, 0.8
REWARD = 0.375126721371
# Eigenvalues of the form in the landscapes.
AXES = (0.8, -0.6)
SAVED = 401
# Weights of a first derivative of sixth order.
DIFFERENCES = np.array([-1, 9, -45, 0, 45, -9, 1]) / 60


@dataclass(frozen=True)
class Parameters:
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
    "CACP25, Gaussian data; SABP22, gradient flow interpretation (all rows: theory "
    "page on Gaussians)",
    source=lab.other_method("the written energies by differences, in $\\dot S$"),
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
)
REWARD_VALUE = lab.observation(
    "reward",
    r"The entropic reward of $\mathcal{N}(0, S)$ under "
    r"$B = \left(\begin{smallmatrix}0.8 & 0.3\\ 0.3 & "
    r"-0.4\end{smallmatrix}\right)$ is $E_B = 0.375126721371$.",
    source=lab.tabulated("by the eigenvalues of $H$"),
)
REWARD_CLOUD = lab.observation(
    "reward-of-tokens",
    "It is the entropic energy of a cloud of tokens that stands for the Gaussian.",
)
TOLD = lab.observation(
    "told",
    "The library tells gradients from others: seven layers of one sort, five of the "
    "other.",
    source=lab.theory("all of them"),
)
FALL = lab.observation(
    "fall",
    "With an indefinite matrix in front of $V = A$ the energy of $V = A$ falls first "
    "and rises later.",
    source=lab.theory("smallest increase, and minus the largest"),
)


class Row(NamedTuple):
    r"""A layer, its energy $E$ written out, and $L = 2P\,\nabla F$ with $F = cE$."""

    layer: AbstractAttention
    energy: Callable[[np.ndarray], float]
    factor: float = 1.0
    mobility: np.ndarray = np.eye(2)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Differentiate the energies, then follow them along the flows."""
    listed, mu = rows(), centred(COVARIANCE)
    seven = list(listed.values())
    profiles, slopes = {}, []
    for name, row in progress.over(listed.items(), 0.7):
        options = {"save": SAVED, "rtol": 1e-12, "atol": 1e-14}
        path = mf.solve(mf.Flow(row.layer), mu, parameters.depth, **options)
        profiles[name] = mf.gaussian.energy_profile(row.layer, path)
        energies = [row.energy(spread) for spread in np.asarray(path.covariances)]
        step = parameters.depth / (SAVED - 1)
        slopes.append(row.factor * np.correlate(energies, DIFFERENCES) / step)
    reward = float(mf.gaussian.entropic_reward(mu, jnp.array(FORM)))
    cloud = mf.quadrature(mu, parameters.order)
    with warnings.catch_warnings():
        # Far nodes without weight make the score of Sinkhorn attention large.
        warnings.simplefilter("ignore", PrecisionWarning)
        reward_of_cloud = float(mf.observables.energy(listed["Sinkhorn"].layer, cloud))
        velocities = [row.layer(cloud, cloud.points) for row in seven[:5]]
    for _ in progress.over(range(1), 0.3):
        indefinite = softmax_of(FORM, INDEFINITE @ FORM)
        flow = mf.Flow(indefinite)
        fall = mf.solve(flow, mu, INDEFINITE_DEPTH, save=SAVED, rtol=1e-10)
        falling = [
            listed["softmax"].energy(one) for one in np.asarray(fall.covariances)
        ]
        flows = landscape_flows()
    structure = mf.gaussian.gradient_structure
    others = [lab.reference_attention(kind) for kind in KINDS.values()]
    told = [bool(structure(row.layer)) for row in seven]
    told += [not structure(layer) for layer in (*others, indefinite)]
    return lab.Outcome(
        findings=[
            GRADIENT.close_to(
                [change_of(row.layer, COVARIANCE) for row in seven],
                [climbing_velocity(row) for row in seven],
                tolerance=1e-9,
            ),
            ENERGY.close_to(
                [float(mf.gaussian.energy(row.layer, mu)) for row in seven],
                [row.energy(COVARIANCE) for row in seven],
                tolerance=1e-12,
            ),
            ASCENT.at_most(
                [float(profile.worst_violation) for profile in profiles.values()],
                0.0,
                tolerance=1e-12,
                source=lab.theory(f"largest decrease between two of {SAVED} depths"),
            ),
            DISSIPATION.close_to(
                [
                    row.factor * profiles[name].rates[3:-3]
                    for name, row in listed.items()
                ],
                slopes,
                tolerance=1e-8,
            ),
            MOTION.close_to(
                [
                    row.factor * float(mf.gaussian.dissipation(row.layer, mu))
                    for row in seven[:5]
                ],
                [float(cloud.weights @ jnp.sum(v**2, axis=1)) for v in velocities],
                tolerance=1e-8,
                source=lab.other_method(
                    f"attention of {cloud.count} tokens to themselves"
                ),
            ),
            REWARD_CLOUD.close_to(
                reward,
                reward_of_cloud,
                tolerance=1e-9,
                source=lab.other_method(
                    f"Sinkhorn's algorithm on {cloud.count} tokens"
                ),
            ),
            REWARD_VALUE.close_to(reward, REWARD, tolerance=1e-11),
            TOLD.close_to(sum(told), len(told), tolerance=0),
            FALL.below([np.diff(falling).min(), -np.diff(falling).max()], 0.0),
        ],
        pictures=[draw_energies(profiles, fall.depths, falling), draw_landscape(flows)],
    )


def rows() -> dict[str, Row]:
    """The layers that climb an energy, those without a mobility first."""
    gram, identity = KEY.T @ KEY, np.eye(2)

    def of_score(matrix: np.ndarray) -> Callable[[np.ndarray], float]:
        return lambda spread: np.trace(spread @ matrix.T @ spread @ matrix) / 4

    def of_distance(spread: np.ndarray) -> float:
        volume = np.log(np.linalg.det(identity + 2 * spread @ gram))
        return QUERY_RATIO / 2 * (np.trace(gram @ spread) - volume / 2)

    def of_plan(spread: np.ndarray) -> float:
        # H is similar to S B S B, whose eigenvalues need no root of S.
        return plan_energy(np.linalg.eigvals(spread @ FORM @ spread @ FORM).real)

    softmax, turning = of_score(FORM), of_score(TURN)
    distance = mf.L2(QUERY_RATIO * KEY, KEY, VALUE_RATIO * gram)
    sinkhorn = mf.Sinkhorn(FORM, identity, FORM, kernel="dot", tolerance=1e-13)
    return {
        "softmax": Row(softmax_of(FORM, FORM), softmax),
        "softmax, antisymmetric": Row(softmax_of(TURN, TURN.T), turning),
        "linear": Row(mf.Linear(FORM, identity, FORM), softmax),
        "L2": Row(distance, of_distance, factor=VALUE_RATIO),
        "Sinkhorn": Row(sinkhorn, of_plan, factor=1 / 2),
        "softmax, twisted": Row(
            softmax_of(FORM, TWIST @ FORM), softmax, mobility=TWIST
        ),
        # The metric of Fisher and Rao, at the covariance at depth zero.
        "softmax, Fisher-Rao": Row(
            softmax_of(SCORE),
            lambda spread: np.trace(SCORE @ spread),
            mobility=COVARIANCE / 2,
        ),
    }


def plan_energy(sizes: np.ndarray) -> Any:
    """The entropic reward, from the eigenvalues of $H$ along the first axis."""
    roots = np.sqrt(1 + 4 * sizes)
    return np.sum((roots - 1) / 2 + np.log(2 / (1 + roots)) / 2, axis=0)


def climbing_velocity(row: Row) -> np.ndarray:
    """What the metric makes of the gradient of the energy, by differences."""
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
        widths = 0.7 * np.array([np.cos(angle), np.sin(angle)])
        path = mf.solve(flow, centred(np.diag(widths**2)), 6.0, save=61)
        spreads.append(np.sqrt(np.asarray(path.covariances)[:, [0, 1], [0, 1]]))
    return spreads


def draw_energies(profiles, fall_depths, falling) -> lab.Picture:
    """Gains of the energies along depth, and a fall."""
    figure, (left, right) = style.canvas(2)
    for name, profile in profiles.items():
        gains = np.asarray(profile.energies - profile.energies[0])[1:]
        # Linear attention moves as softmax does, which is to be seen below it.
        line = {"linestyle": (0, (3, 3))} if name == "linear" else {}
        left.semilogy(profile.depths[1:], gains, label=name, **line)
    left.set(title="energies that are climbed", ylim=(1e-3, None))
    left.set(xlabel="depth $t$", ylabel="gain of energy $E(S_t) - E(S_0)$")
    right.plot(fall_depths, falling, color=style.INK)
    right.set(title="not a gradient flow", ylim=(0, None))
    right.set(xlabel="depth $t$", ylabel=r"$\frac{1}{4}\,\mathrm{tr}(SASA)$")
    figure.legend(loc="outside lower center", ncols=4)
    return lab.Picture(
        figure,
        "Left: what seven gradient flows gain from the same first covariance; softmax "
        "and linear attention move a centred Gaussian in the same way. Right: the "
        "energy of $V = A$ along a flow with an indefinite matrix in front, which is "
        "no gradient flow.",
    )


def draw_landscape(flows: list[np.ndarray]) -> lab.Picture:
    """Sinkhorn's energy over two standard deviations, with flows."""
    figure, axes = style.canvas(panel=(5.6, 4.6))
    first, second = np.meshgrid(*[np.linspace(0.02, 2.4, 90)] * 2)
    # Uncorrelated: H is diagonal.
    total = plan_energy(np.stack([AXES[0] * first**2, AXES[1] * second**2]) ** 2)
    levels = np.linspace(0, np.sqrt(total.max()), 17) ** 2
    filled = axes.contourf(first, second, total, levels, cmap="Blues", alpha=0.8)
    axes.contour(first, second, total, levels, colors=style.INK, linewidths=0.35)
    for spreads in flows:
        axes.plot(*spreads.T, color=style.ORANGE, linewidth=1.4)
        axes.plot(*spreads[0], "o", color=style.ORANGE)
    axes.set(xlim=(0, 2.4), ylim=(0, 2.4), aspect="equal")
    axes.set(xlabel=r"standard deviation $\sqrt{S_{11}}$", ylabel=r"$\sqrt{S_{22}}$")
    figure.colorbar(filled, ax=axes, label="energy $E_B$", format="%.2f")
    return lab.Picture(
        figure,
        r"The energy $E_B$ of Sinkhorn attention, "
        r"$B = \operatorname{diag}(0.8, -0.6)$, on uncorrelated Gaussians; in standard "
        "deviations the metric is that of the page, and flows (from the dots) cross "
        "level lines at right angles.",
    )


experiment = lab.experiment(
    run, "Some flows of Gaussians are gradient flows", room="gaussian", seconds=30
)
