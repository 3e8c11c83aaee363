r"""The least energy of attention with a perceptron, proved by its first variation.

The kernel $e^{\beta\langle x,y\rangle}$ is positive definite, so that the energy
$E(\mu) = \frac1{2\beta}\iint e^{\beta\langle x,y\rangle}\,\mathrm{d}\mu\,\mathrm{d}\mu
+ \int\Phi\,\mathrm{d}\mu$ is convex in the measure. It lies above its tangents: with
the first variation $W(x) = \frac1\beta\int e^{\beta\langle x,y\rangle}
\,\mathrm{d}\mu(y) + \Phi(x)$ every measure $\nu$ has $E(\nu) \ge E(\mu) + \int
W\,\mathrm{d}(\nu - \mu)$, so that $E(\mu) - \min E \le \int W\,\mathrm{d}\mu - \min W$.
The right-hand side is the certificate, which vanishes at the minimiser only. Here
$\beta = 2$ on the circle, and $\Phi$ is that of two ReLU units of strength $4$ at the
angles $0$ and $2\pi/3$.
"""

import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers.circle_atoms import angles_of
from meanformer.observables import energy_minimiser, perceptron_flow
from meanformer.plotting import draw_circle, style
from meanformer.plotting.circles import quarter_ticks

UNITS = (0.0, 2 * np.pi / 3)  # the angles of the units
TURN = np.linspace(0, 2 * np.pi, 20_001)  # where the first variation is looked at


class Parameters(lab.Parameters):
    """Sizes."""

    nodes: int = lab.setting(360, full=720, help="nodes on the circle", at_least=60)
    steps: int = lab.setting(3000, help="exponentiated gradients", at_least=100)


MINIMUM = lab.theorem(
    "minimum",
    "Conditional gradients find the least energy over all measures, up to $10^{-6}$: "
    "masses on a grid lie above it, by no more than their certificate.",
    "BKKRW25, convexity for positive definite kernels",
    source=lab.other_method("exponentiated gradients on equal nodes: difference"),
)
VARIATION = lab.observation(
    "first-variation",
    "The first variation is constant on the atoms of the minimiser and nowhere "
    "smaller, up to the certificate.",
    "BKKRW25, convexity for positive definite kernels",
    source=lab.theory("less the certificate; the first variation from its formula"),
)


@lab.experiment("The least energy, with a certificate", room="observables", seconds=5)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Minimise by conditional gradients, and compare with masses on nodes."""
    units = mf.TokenCloud.from_angles(UNITS).points
    attention = mf.identity_attention("unnormalised", 2, 2.0)
    least = energy_minimiser(perceptron_flow(attention, units, 4.0))
    on_nodes, allowed = energy_on_nodes(parameters, progress)
    angles, masses = angles_of(least.cloud), np.asarray(least.cloud.weights)
    heights = variation(TURN, angles, masses)
    at_atoms = variation(angles, angles, masses)
    level = masses @ at_atoms
    excess = [heights.min() - level, -np.abs(at_atoms - level).max()]
    return lab.Outcome(
        findings=[
            MINIMUM.inside(on_nodes - least.energy, -1e-6, allowed),
            VARIATION.at_least(excess, -least.gap),
        ],
        pictures=[draw_minimiser(least.cloud, heights, at_atoms)],
    )


def potential(angle):
    """The potential of the ReLU units."""
    return sum(2 * np.maximum(np.cos(angle - unit), 0) ** 2 for unit in UNITS)


def variation(where, angles, masses) -> np.ndarray:
    """The first variation of the energy of atoms, from its formula."""
    kernel = np.exp(2 * np.cos(np.subtract.outer(where, angles))) / 2
    return kernel @ masses + potential(where)


def energy_on_nodes(parameters: Parameters, progress) -> tuple[float, float]:
    """The least energy of masses on equal nodes, and how far it may be too high.

    By exponentiated gradients, whose gap is known; between nodes at the distance $h$
    the first variation falls by at most $Lh^2/8$, with $L = 3e^2 + 16$.
    """
    turn = 2 * np.pi * np.arange(parameters.nodes) / parameters.nodes
    kernel = np.exp(2 * np.cos(turn[:, None] - turn[None, :])) / 2
    heights = potential(turn)
    masses = np.full(len(turn), 1 / len(turn))
    for _ in progress.over(range(parameters.steps)):
        slopes = kernel @ masses + heights
        masses = masses * np.exp(-0.5 * (slopes - slopes.min()))
        masses = masses / masses.sum()
    slopes = kernel @ masses + heights
    between = (3 * np.exp(2) + 16) * turn[1] ** 2 / 8
    gap = masses @ slopes - slopes.min() + between
    return float(masses @ kernel @ masses / 2 + masses @ heights), float(gap)


def draw_minimiser(cloud: mf.TokenCloud, heights, at_atoms) -> lab.Picture:
    """The atoms on the circle, and the first variation with its level."""
    figure, (left, right) = style.canvas(2, panel=(4.4, 3.4))
    draw_circle(cloud, left)
    for (x, y), mass in zip(cloud.points, cloud.weights, strict=True):
        left.annotate(f"{mass:.3f}", (0.78 * x, 0.78 * y), ha="center", va="center")
    left.plot(np.cos(UNITS), np.sin(UNITS), "^", color=style.PALETTE[1], label="units")
    left.legend(loc="center")
    right.plot(TURN, heights, color=style.INK, label="first variation $W$")
    right.plot(TURN, potential(TURN), ":", color=style.PALETTE[1], label=r"$\Phi$")
    right.axhline(at_atoms.min(), color=style.GREY, linewidth=0.9, linestyle="--")
    right.plot(angles_of(cloud), at_atoms, "o", color=style.PALETTE[0], label="atoms")
    quarter_ticks(right, "x")
    right.set(xlabel="angle", ylim=(-0.1, 3.6))
    right.legend(loc="upper right")
    return lab.Picture(
        figure,
        "The measure of least energy: its atoms on the circle with their masses, away "
        "from the two units (left), and its first variation, which touches its "
        "smallest value (dashed) at the atoms and lies above it elsewhere (right).",
    )
