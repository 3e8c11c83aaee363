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
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.attention import AbstractAttention
from meanformer.errors import PrecisionWarning
from meanformer.plotting import style

SPREAD = ((1.0, 0.3), (0.3, 0.6))
FORM = ((0.8, 0.3), (0.3, -0.4))
TURN = ((0.0, -0.7), (0.7, 0.0))
KEY = ((0.4, 0.1), (-0.3, 0.7))
SCORE = ((0.15, -0.23), (0.27, 0.33))
TWIST = ((0.6, 0.2), (0.2, 0.3))
INDEFINITE, INDEFINITE_DEPTH = ((-0.3, 0.0), (0.0, 2.0)), 2.4
QUERY_RATIO, VALUE_RATIO = 1.5, 0.8
REWARD = 0.375126721371
# Eigenvalues of the form in the landscapes.
AXES = (0.8, -0.6)
SAVED = 401


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
)
ENERGY = lab.observation(
    "energy",
    "The energies of the seven layers are those of their formulas.",
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
)
REWARD_CLOUD = lab.observation(
    "reward-of-tokens",
    "It is the entropic energy of a cloud of tokens that stands for the Gaussian.",
)
TOLD = lab.observation(
    "told",
    "The library tells gradients from others: seven layers of one sort, five of the "
    "other.",
)
FALL = lab.observation(
    "fall",
    "With an indefinite matrix in front of $V = A$ the energy of $V = A$ falls first "
    "and rises later.",
)


class Row(NamedTuple):
    """A layer, its energy written out, and how the covariance follows the gradient.

    What is climbed is the energy times the factor.
    """

    layer: AbstractAttention
    energy: Callable[[np.ndarray], float]
    velocity: Callable[[np.ndarray, np.ndarray], np.ndarray]
    factor: float = 1.0


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Differentiate the energies, then follow them along the flows."""
    listed, exact = rows(), {"save": SAVED, "rtol": 1e-12, "atol": 1e-14}
    paths = {
        name: mf.solve(mf.Flow(row.layer), start(), parameters.depth, **exact)
        for name, row in progress.over(listed.items(), 0.7)
    }
    profiles = {
        name: mf.gaussian.energy_profile(listed[name].layer, path)
        for name, path in paths.items()
    }
    slopes = {name: differences(listed[name], path) for name, path in paths.items()}
    reward = float(mf.gaussian.entropic_reward(start(), jnp.array(FORM)))
    cloud = mf.quadrature(start(), parameters.order)
    with warnings.catch_warnings():
        # Far nodes without weight make the score of Sinkhorn attention large.
        warnings.simplefilter("ignore", PrecisionWarning)
        motion = motion_finding(listed, cloud)
        reward_of_cloud = float(mf.observables.energy(listed["Sinkhorn"].layer, cloud))
    for _ in progress.over(range(1), 0.3):
        layer = others()["softmax, indefinite"]
        fall = mf.solve(
            mf.Flow(layer), start(), INDEFINITE_DEPTH, save=SAVED, rtol=1e-10
        )
        falling = along(listed["softmax"], fall)
        flows = landscape_flows()
    structure = mf.gaussian.gradient_structure
    right = [bool(structure(row.layer)) for row in listed.values()]
    right += [not structure(layer) for layer in others().values()]
    return lab.Outcome(
        findings=[
            gradient_finding(listed),
            ENERGY.close_to(
                [
                    float(mf.gaussian.energy(row.layer, start()))
                    for row in listed.values()
                ],
                [row.energy(np.array(SPREAD)) for row in listed.values()],
                tolerance=1e-12,
                source=lab.closed_form("the formulas, in NumPy"),
            ),
            ASCENT.at_most(
                [float(profile.worst_violation) for profile in profiles.values()],
                0.0,
                tolerance=1e-12,
                source=lab.theory(f"largest decrease between two of {SAVED} depths"),
            ),
            DISSIPATION.close_to(
                [listed[name].factor * profiles[name].rates[3:-3] for name in listed],
                [listed[name].factor * slopes[name] for name in listed],
                tolerance=1e-8,
                source=lab.other_method("differences of the energy along the flow"),
            ),
            motion,
            REWARD_CLOUD.close_to(
                reward,
                reward_of_cloud,
                tolerance=1e-9,
                source=lab.other_method(
                    f"Sinkhorn's algorithm on {cloud.count} tokens"
                ),
            ),
            REWARD_VALUE.close_to(
                reward,
                REWARD,
                tolerance=1e-11,
                source=lab.tabulated("by the eigenvalues of $H$"),
            ),
            TOLD.close_to(
                sum(right), len(right), tolerance=0, source=lab.theory("all of them")
            ),
            FALL.below(
                [np.diff(falling).min(), -np.diff(falling).max()],
                0.0,
                source=lab.theory("smallest increase, and minus the largest"),
            ),
        ],
        pictures=[
            draw_energies(profiles, slopes, np.asarray(fall.depths), falling),
            draw_landscape(flows),
        ],
        tables=[table(listed)],
    )


def start() -> mf.Gaussian:
    """The Gaussian at depth zero."""
    return mf.Gaussian(jnp.zeros(2), jnp.array(SPREAD))


def rows() -> dict[str, Row]:
    """The layers that climb an energy."""
    form, key, score, turn, twist = map(np.array, (FORM, KEY, SCORE, TURN, TWIST))
    gram, identity = key.T @ key, np.eye(2)

    def of_score(matrix: np.ndarray) -> Callable[[np.ndarray], float]:
        return lambda spread: np.trace(spread @ matrix.T @ spread @ matrix) / 4

    def of_distance(spread: np.ndarray) -> float:
        volume = np.log(np.linalg.det(identity + 2 * spread @ gram))
        return QUERY_RATIO / 2 * (np.trace(gram @ spread) - volume / 2)

    def of_plan(spread: np.ndarray) -> float:
        # H is similar to S B S B, whose eigenvalues need no root of S.
        sizes = np.linalg.eigvals(spread @ form @ spread @ form).real
        roots = np.sqrt(1 + 4 * sizes)
        return float(np.sum((roots - 1) / 2 + np.log(2 / (1 + roots)) / 2))

    def bures(gradient: np.ndarray, spread: np.ndarray) -> np.ndarray:
        return 2 * (gradient @ spread + spread @ gradient)

    def twisted(gradient: np.ndarray, spread: np.ndarray) -> np.ndarray:
        return 2 * (twist @ gradient @ spread + spread @ gradient @ twist)

    def fisher_rao(gradient: np.ndarray, spread: np.ndarray) -> np.ndarray:
        return 2 * spread @ gradient @ spread

    sinkhorn = mf.Sinkhorn(form, identity, form, kernel="dot", tolerance=1e-13)
    return {
        "softmax": Row(mf.Softmax(form, identity, form), of_score(form), bures),
        "softmax, antisymmetric": Row(
            mf.Softmax(turn, identity, turn.T), of_score(turn), bures
        ),
        "linear": Row(mf.Linear(form, identity, form), of_score(form), bures),
        "L2": Row(
            mf.L2(QUERY_RATIO * key, key, VALUE_RATIO * gram),
            of_distance,
            bures,
            VALUE_RATIO,
        ),
        "Sinkhorn": Row(sinkhorn, of_plan, bures, 1 / 2),
        "softmax, twisted": Row(
            mf.Softmax(form, identity, twist @ form), of_score(form), twisted
        ),
        "softmax, Fisher-Rao": Row(
            mf.Softmax(score, identity, identity),
            lambda spread: np.trace(score @ spread),
            fisher_rao,
        ),
    }


def others() -> dict[str, AbstractAttention]:
    """Layers without an energy; the last has an indefinite matrix before its value."""
    kinds = {"softmax": mf.Softmax, "linear": mf.Linear, "L2": mf.L2}
    kinds["Sinkhorn"] = mf.Sinkhorn
    layers = {
        f"{name}, reference matrices": lab.reference_attention(kind)
        for name, kind in kinds.items()
    }
    form = np.array(FORM)
    turned = mf.Softmax(form, np.eye(2), np.array(INDEFINITE) @ form)
    return layers | {"softmax, indefinite": turned}


def gradient_of(energy: Callable[[np.ndarray], float], spread: np.ndarray):
    """The symmetric gradient, by central differences of fourth order."""
    step, gradient = 1e-3, np.zeros((2, 2))
    for row, column in np.ndindex(2, 2):
        unit = np.zeros((2, 2))
        unit[row, column] += 0.5
        unit[column, row] += 0.5
        ahead, behind, farther, rear = (
            energy(spread + shift * step * unit) for shift in (1, -1, 2, -2)
        )
        change = 8 * (ahead - behind) - (farther - rear)
        gradient[row, column] = change / (12 * step)
    return gradient


def gradient_finding(listed: dict[str, Row]):
    """The velocity of the covariance against what the metric makes of the gradient."""
    spread, measured, expected = np.array(SPREAD), [], []
    for row in listed.values():
        slope = np.asarray(mf.gaussian.affine_velocity(row.layer, start())[0])
        measured.append(slope @ spread + spread @ slope.T)
        gradient = row.factor * gradient_of(row.energy, spread)
        expected.append(row.velocity(gradient, spread))
    return GRADIENT.close_to(
        np.stack(measured),
        np.stack(expected),
        tolerance=1e-9,
        source=lab.other_method("the written energies by differences, in $\\dot S$"),
    )


def along(row: Row, path: mf.flows.GaussianTrajectory) -> np.ndarray:
    """The written energy along a flow."""
    return np.array([row.energy(spread) for spread in np.asarray(path.covariances)])


def differences(row: Row, path: mf.flows.GaussianTrajectory) -> np.ndarray:
    """The derivative of the written energy in depth, by sixth-order differences."""
    step = float(path.depths[1] - path.depths[0])
    weights = np.array([-1, 9, -45, 0, 45, -9, 1]) / (60 * step)
    return np.convolve(along(row, path), weights[::-1], mode="valid")


def motion_finding(listed: dict[str, Row], cloud: mf.TokenCloud):
    """The dissipation against the mean square velocity of a cloud."""
    names = ["softmax", "softmax, antisymmetric", "linear", "L2", "Sinkhorn"]
    found, expected = [], []
    for row in (listed[name] for name in names):
        rate = mf.gaussian.dissipation(row.layer, start())
        found.append(row.factor * float(rate))
        squares = jnp.sum(row.layer(cloud, cloud.points) ** 2, axis=1)
        expected.append(float(cloud.weights @ squares))
    return MOTION.close_to(
        found,
        expected,
        tolerance=1e-8,
        source=lab.other_method(f"attention of {cloud.count} tokens to themselves"),
    )


def table(listed: dict[str, Row]) -> lab.Table:
    """Metric, energy and rate of every layer, and why the others have none."""
    lines = []
    for name, row in listed.items():
        structure = mf.gaussian.gradient_structure(row.layer)
        twist = "" if structure.mobility is None else ", twisted"
        energy = float(mf.gaussian.energy(row.layer, start()))
        rate = float(mf.gaussian.dissipation(row.layer, start()))
        lines.append([name, structure.metric + twist, energy, rate])
    for name, layer in others().items():
        lines.append([name, mf.gaussian.gradient_structure(layer).failure, "", ""])
    return lab.Table(
        ["layer", "metric, or what fails", "energy $E(S_0)$", "rate"],
        lines,
        r"Layers that climb an energy, and others that do not.",
    )


def draw_energies(profiles, slopes, fall_depths, falling) -> lab.Picture:
    """Gains of the energies along depth, their rates by two ways, and a fall."""
    figure, (left, middle, right) = style.canvas(3, panel=(3.6, 3.6))
    for (name, profile), colour in zip(profiles.items(), style.PALETTE, strict=False):
        depths, energies = np.asarray(profile.depths), np.asarray(profile.energies)
        gains = (energies - energies[0])[1:]
        # Linear attention moves as softmax does, which is to be seen below it.
        line = {"linestyle": (0, (3, 3))} if name == "linear" else {}
        left.semilogy(depths[1:], gains, color=colour, label=name, **line)
        middle.semilogy(depths, profile.rates, color=colour, **line)
        some = slice(12, None, 62)
        middle.semilogy(depths[3:-3][some], slopes[name][some], "o", color=colour)
    left.set(title="energies that are climbed", ylim=(1e-3, None))
    left.set(xlabel="depth $t$", ylabel="gain of energy $E(S_t) - E(S_0)$")
    middle.set(title="their rates, by two ways")
    middle.set(xlabel="depth $t$", ylabel=r"rate $\mathrm{d}E/\mathrm{d}t$")
    right.plot(fall_depths, falling, color=style.INK)
    right.set(title="not a gradient flow", ylim=(0, None))
    right.set(xlabel="depth $t$", ylabel=r"$\frac{1}{4}\,\mathrm{tr}(SASA)$")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return lab.Picture(
        figure,
        "Left: what seven gradient flows gain from the same first covariance; softmax "
        "and linear attention move a centred Gaussian in the same way. Middle: "
        "rates by the dissipation identity (lines) and by differences of the energy "
        "(dots). Right: the energy of $V = A$ along a flow with an indefinite matrix "
        "in front, which is no gradient flow.",
    )


def landscape_flows() -> list[np.ndarray]:
    """Standard deviations along flows of Sinkhorn attention that start on a circle."""
    form = np.diag(AXES)
    flow = mf.Flow(mf.Sinkhorn(form, np.eye(2), form, kernel="dot"))
    spreads = []
    for angle in np.linspace(0.06, np.pi / 2 - 0.06, 7):
        widths = 0.7 * np.array([np.cos(angle), np.sin(angle)])
        mu = mf.Gaussian(jnp.zeros(2), jnp.diag(jnp.asarray(widths**2)))
        path = mf.solve(flow, mu, 6.0, save=61)
        spreads.append(np.sqrt(np.asarray(path.covariances)[:, [0, 1], [0, 1]]))
    return spreads


def draw_landscape(flows: list[np.ndarray]) -> lab.Picture:
    """Sinkhorn's energy over two standard deviations, with flows."""
    figure, axes = style.canvas(panel=(5.6, 4.6))
    first, second = np.meshgrid(*[np.linspace(0.02, 2.4, 90)] * 2)
    # Uncorrelated: E is a sum over the axes, of the singular values of the form.
    sizes = np.stack([AXES[0] * first**2, AXES[1] * second**2])
    roots = np.sqrt(1 + 4 * sizes**2)
    total = np.sum((roots - 1) / 2 + np.log(2 / (1 + roots)) / 2, axis=0)
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


experiment = lab.Experiment(
    name="gaussian-gradient-flow",
    title="Some flows of Gaussians are gradient flows",
    room="gaussian",
    parameters=Parameters,
    run=run,
    seconds=30,
)
