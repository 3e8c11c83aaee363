r"""A perceptron block stops the collapse: critical points of attention's energy.

Unnormalised attention on the sphere with a perceptron whose output weights are
multiples of its input weights climbs $E(\mu) = \frac1{2\beta}\iint e^{\beta\langle
x,y\rangle}\,\mathrm{d}\mu\,\mathrm{d}\mu + \int\Phi\,\mathrm{d}\mu$. Its stable states
are few atoms near peaks of $\Phi$, no longer one point: with two ReLU units at the
angles $0$ and $2\pi/3$ two atoms rest near them. The largest energy still belongs to
one atom, since $E$ is convex in $\mu$.
"""

from dataclasses import dataclass
from typing import cast

import jax.numpy as jnp
import numpy as np
import scipy.optimize

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers.circle_atoms import (
    angles_of,
    map_of,
    pull,
    search_of,
    turned,
)
from meanformer.experiments.helpers.many_starts import last_points
from meanformer.observables import (
    CriticalPoint,
    energy_maximiser,
    energy_minimiser,
    first_variation,
    localisation,
    newton_critical_point,
    perceptron_flow,
)
from meanformer.plotting import draw_basins, style

UNIT = 2 * np.pi / 3  # the angle of the second unit
STRENGTH = 4.0
ANGLES = {0: 0.1212819370, 1: 0.0828600340, 2: 0.0502172808, 3: 0.0290768808}
ANGLES |= {4: 0.0167890756}
RATES = (-3.0678405218, -3.9798427505)
ENERGY, SKEWED = 2.9735753953, 3.1133672934
LIMITS = ("one atom at $0$", r"one atom at $2\pi/3$", "two atoms", "flat region")


@dataclass(frozen=True)
class Parameters:
    """Sizes."""

    grid: int = lab.setting(
        24, full=160, help="starts of each token for the basins", at_least=8
    )
    starts: int = lab.setting(
        12, full=200, help="random starts of a search", at_least=8
    )
    branches: int = lab.setting(1, full=5, help="temperatures of the folds", at_least=1)
    depth: float = lab.setting(60.0, help="depth of the flows at most", at_least=10)
    seed: int = lab.setting(3, help="seed of the starts", at_least=0)


STATES = lab.observation(
    "two-atom-states",
    "With $c = 4$ two atoms of mass $1/2$ rest near the units: first angle for "
    r"$\beta = 0, 1, 2, 3, 4$, and both energies at $\beta = 2$ (masses $1/2, 1/2$ "
    "and $0.7, 0.3$).",
    source=lab.tabulated("and SciPy's root finder in the angles, in this run"),
)
STABLE = lab.observation(
    "two-atom-rates",
    r"The two-atom state at $\beta = 2$ is stable: small motions decay at the rates "
    "$-3.0678405218$ and $-3.9798427505$.",
    source=lab.closed_form("the Jacobian in the angles, and tabulated digits"),
)
LOCALISED = lab.observation(
    "localised",
    r"Its atoms sit near the peaks of $\Phi$, the nearer the lower the temperature: "
    r"the distance from the peak, $\beta = 1, 2, 3, 4$.",
    "AGR26, atomic and localised critical points",
    source=lab.other_method("SciPy's root finder; the peaks are at the units"),
)
MAXIMUM = lab.theorem(
    "maximum",
    "The largest energy over all measures is "
    r"$\frac{e^\beta}{2\beta} + \max\Phi = 3.8472640247$, that of one atom; found by "
    "bisection with bounds, and reached by no other state of the search.",
    "BKKRW25, convexity for positive definite kernels",
    source=lab.closed_form(r"$e^2/4 + 2$"),
)
NO_CERTIFICATE = lab.observation(
    "no-certificate",
    "The first variation is no certificate of a maximum: its gap is $0$ at the "
    "two-atom state, which is $0.87$ below the maximum.",
    source=lab.closed_form(r"$e^2/4 + 2$ less the tabulated energy"),
)
MINIMUM = lab.theorem(
    "minimum",
    "Conditional gradients find the least energy over all measures, up to $10^{-6}$: "
    "masses on a grid lie above it, by no more than their certificate.",
    "BKKRW25, convexity for positive definite kernels",
    source=lab.other_method("exponentiated gradients on 360 nodes: difference"),
)
FOLD = lab.observation(
    "fold",
    r"The stable two-atom state exists above a strength $c^*(\beta)$, the smallest on "
    r"the stable part of the branch $c = e^{\beta\cos\varphi}\sin\varphi/\sin 2s$ of "
    r"atoms at $s$ and $2\pi/3 - s$, $\varphi = 2\pi/3 - 2s$.",
    source=lab.closed_form("the branch as a function of one angle"),
)
BASINS = lab.observation(
    "basins",
    "From all starts on a grid two tokens end at one of the critical points of the "
    r"search: one atom, two atoms, or the flat region where $\Phi = 0$.",
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Find critical points, and compare with root finders and closed forms."""
    states = {beta: two_atoms(beta) for beta in progress.over(ANGLES, 0.1)}
    skewed = two_atoms(2.0, masses=(0.7, 0.3))
    search = search_of(
        block_flow(2.0), (0.5, 0.5), starts=parameters.starts, seed=parameters.seed
    )
    betas = (2.0, 1.0, 0.5, 3.0, 4.0)[: parameters.branches]
    folds = [fold_by_newton(beta) for beta in progress.over(betas, 0.3)]
    labels, ends = basins(parameters)
    split = np.sort(ends[labels == 2], axis=1) - angles_of(states[2].cloud)
    wrong = np.abs(split).max(axis=1, initial=0) > 1e-3
    solved = "Newton's method for the states, solves for the flows"
    return lab.Outcome(
        findings=[
            *state_findings(states, skewed),
            *extreme_findings(states[2], search),
            FOLD.close_to(
                folds, [fold_by_formula(beta) for beta in betas], tolerance=2e-3
            ),
            BASINS.close_to(
                ((labels >= 0).sum() - wrong.sum()) / labels.size,
                1.0,
                tolerance=0.0,
                source=lab.other_method(solved),
            ),
        ],
        pictures=[draw_folds(), draw_basin_picture(labels)],
    )


def block_flow(beta: float, strength: float = STRENGTH) -> mf.Flow:
    """Attention with two ReLU units."""
    attention = mf.identity_attention("unnormalised", 2, float(beta))
    return perceptron_flow(
        attention, mf.TokenCloud.from_angles([0.0, UNIT]).points, strength
    )


def two_atoms(beta: float, *, masses=(0.5, 0.5)) -> CriticalPoint:
    """The stable two-atom state."""
    return newton_critical_point(
        block_flow(beta), mf.TokenCloud.from_angles([0.1, 2.0], masses)
    )


def lift(angle):
    """The slope of the potential of two ReLU units of strength one, in the angle."""
    units = (np.maximum(np.cos(angle - u), 0) * np.sin(u - angle) for u in (0.0, UNIT))
    return sum(units)


def angles_by_scipy(beta: float, masses=(0.5, 0.5)) -> np.ndarray:
    """The two-atom state by a root finder in the angles."""

    def slopes(angles):
        gap = angles[1] - angles[0]
        return (
            STRENGTH * lift(angles[0]) + masses[1] * pull(gap, beta),
            STRENGTH * lift(angles[1]) - masses[0] * pull(gap, beta),
        )

    return scipy.optimize.root(slopes, [0.1, 2.0], tol=1e-14).x


def energy_by_hand(angles, beta: float, masses) -> float:
    """The energy of two atoms, from its formula."""
    first, second = masses
    cross = 2 * first * second * np.exp(beta * np.cos(angles[1] - angles[0]))
    pairs = (np.exp(beta) * (first**2 + second**2) + cross) / (2 * beta)
    heights = [
        STRENGTH / 2 * sum(max(np.cos(angle - u), 0) ** 2 for u in (0.0, UNIT))
        for angle in angles
    ]
    return float(pairs + np.dot(masses, heights))


def state_findings(states, skewed: CriticalPoint):
    """Angles, energies, rates and places against a root finder, digits and formulas."""
    state, cold = states[2], (1, 2, 3, 4)
    found = [angles_of(state.cloud)[0] for state in states.values()]
    other = {beta: angles_by_scipy(beta)[0] for beta in states}
    energies = [state.energy, skewed.energy]
    by_hand = [
        energy_by_hand(angles_by_scipy(2.0, masses), 2.0, masses)
        for masses in ((0.5, 0.5), (0.7, 0.3))
    ]
    _, bend, both = branch(angles_of(state.cloud)[0], 2.0)
    places = [localisation(block_flow(beta), states[beta].cloud) for beta in cold]
    return (
        STATES.close_to(
            [*found, *energies, *found, *energies],
            [*ANGLES.values(), ENERGY, SKEWED, *other.values(), *by_hand],
            tolerance=2e-10,
        ),
        STABLE.close_to(
            [*np.asarray(state.eigenvalues), *np.asarray(state.eigenvalues)],
            [both, bend, *RATES],
            tolerance=5e-10,
        ),
        LOCALISED.close_to(
            [place.radius for place in places],
            [other[beta] for beta in cold],
            tolerance=1e-6,
        ),
    )


def extreme_findings(state: CriticalPoint, search):
    """Extremes over measures, and what the first variation can tell."""
    flow = block_flow(2.0)
    layer = map_of(flow)
    best, least = energy_maximiser(flow), energy_minimiser(flow)
    exact = np.exp(2) / 4 + 2
    on_nodes, allowed = energy_on_nodes()
    highest = max(point.energy for point in search)
    turn = mf.TokenCloud.from_angles(2 * np.pi * np.arange(4096) / 4096).points
    top = float(jnp.max(first_variation(layer, state.cloud, turn)))
    atoms = first_variation(layer, state.cloud, state.cloud.points)
    gap = max(top - float(jnp.dot(state.cloud.weights, atoms)), 0.0)
    return (
        MAXIMUM.close_to(
            [best.energy, max(highest, exact), exact + best.gap],
            [exact, exact, exact],
            tolerance=1e-9,
        ),
        NO_CERTIFICATE.close_to(
            [gap, best.energy - cast(float, state.energy)],
            [0.0, exact - ENERGY],
            tolerance=1e-6,
        ),
        MINIMUM.inside(on_nodes - least.energy, -1e-6, allowed),
    )


def energy_on_nodes(count: int = 360, steps: int = 3000) -> tuple[float, float]:
    """The least energy of masses on equal nodes, and how far it may be too high.

    By exponentiated gradients, whose gap is known; between nodes at the distance $h$
    the first variation falls by at most $Lh^2/8$, with $L = 3e^2 + 16$.
    """
    turn = 2 * np.pi * np.arange(count) / count
    kernel = np.exp(2 * np.cos(turn[:, None] - turn[None, :])) / 2
    heights = sum(2 * np.maximum(np.cos(turn - u), 0) ** 2 for u in (0.0, UNIT))
    masses = np.full(count, 1 / count)
    for _ in range(steps):
        slopes = kernel @ masses + heights
        masses = masses * np.exp(-0.5 * (slopes - slopes.min()))
        masses = masses / masses.sum()
    slopes = kernel @ masses + heights
    between = (3 * np.exp(2) + 16) * turn[1] ** 2 / 8
    gap = masses @ slopes - slopes.min() + between
    return float(masses @ kernel @ masses / 2 + masses @ heights), float(gap)


def branch(angle, beta: float):
    """Strength and both rates of the symmetric state with the first atom there."""
    gap = UNIT - 2 * angle
    strength = pull(gap, beta) / np.sin(2 * angle)
    bend = -strength * np.cos(2 * angle)
    steep = np.cos(gap) - beta * np.sin(gap) ** 2
    return strength, bend, bend - np.exp(beta * np.cos(gap)) * steep


def fold_by_formula(beta: float) -> float:
    """The smallest strength on the stable part, before the second unit wakes up."""
    angles = np.linspace(1e-3, np.pi / 6, 200_001)
    strength, *rates = branch(angles, beta)
    return float(strength[np.maximum(*rates) < 0].min())


def fold_by_newton(beta: float) -> float:
    """Follow the stable state to weaker units until it is lost, and bisect."""
    state, kept, step = two_atoms(beta).cloud, STRENGTH, 0.25
    while step > 5e-4:
        found = newton_critical_point(block_flow(beta, kept - step), state)
        if found.is_converged and found.is_stable and found.distance < 0.2:
            state, kept = found.cloud, kept - step
        else:
            step = step / 2
    return kept


def basins(parameters: Parameters) -> tuple[np.ndarray, np.ndarray]:
    """Where two tokens end from all pairs of starts: places in the limits, angles."""
    # Not symmetric: tokens on both sides of the valley would meet in it, and stay.
    first, second = (
        2 * np.pi * (np.arange(parameters.grid) + shift) / parameters.grid
        for shift in (0.5, 0.37)
    )
    pairs = np.stack(np.meshgrid(first, second, indexing="ij"), axis=-1)
    starts = np.stack([np.cos(pairs), np.sin(pairs)], axis=-1)
    rows = jnp.asarray(starts.reshape(-1, 2, 2))
    weights, tolerances = jnp.full(2, 0.5), (1e-5, 1e-7, 1e-5)
    ends = last_points(block_flow(2.0), rows, weights, parameters.depth, tolerances)
    lasts = ends.reshape(starts.shape)
    ends = np.arctan2(lasts[..., 1], lasts[..., 0]) % (2 * np.pi)
    apart = turned(ends[..., 0] - ends[..., 1], 0.0)
    near = [turned(ends, unit).max(axis=-1) < 1e-2 for unit in (0.0, UNIT)]
    flat = np.max(np.abs(lift(ends)), axis=-1) < 1e-6
    choices = [near[0], near[1], flat & (apart < 1e-2), apart > 1.0]
    return np.select(choices, [0, 1, 3, 2], -1), ends


def draw_folds() -> lab.Picture:
    """Branches of two-atom states against the strength."""
    figure, axes = style.canvas(panel=(5.2, 3.5))
    angles, close = np.linspace(5e-3, np.pi / 6, 600), np.linspace(0, np.pi / 3, 100)
    for beta, colour in zip((0.0, 1.0, 2.0, 4.0), style.PALETTE, strict=False):
        strength, *rates = branch(angles, beta)
        stable, gap = np.maximum(*rates) < 0, UNIT - 2 * angles
        name, dotted = rf"$\beta = {beta:g}$", {"linestyle": ":", "color": colour}
        axes.plot(strength, np.where(stable, gap, np.nan), color=colour, label=name)
        axes.plot(strength, np.where(stable, np.nan, gap), **dotted)
        # Both units act on both atoms from here on; never stable.
        axes.plot(np.exp(beta * np.cos(close)), close, **dotted)
    axes.axhline(0, color=style.INK, linewidth=1.2)
    axes.annotate("one atom", (4.6, 0.07))
    axes.set(xlim=(0, 6), ylim=(-0.1, 2.2), xlabel="strength $c$")
    axes.set(ylabel="distance of the two atoms")
    axes.legend(loc="upper left")
    return lab.Picture(
        figure,
        "How strong the perceptron must be to keep two atoms apart: their distance on "
        "the symmetric branch, stable (lines) and unstable (dotted). At $\\pi/3$ each "
        "atom comes into the reach of the other unit; below it, "
        r"$c = e^{\beta\cos\varphi}$ down to one atom in the valley at $c = e^\beta$.",
    )


def draw_basin_picture(labels: np.ndarray) -> lab.Picture:
    """Limits of all pairs of starts."""
    figure, axes = style.canvas(panel=(6.0, 3.9))
    draw_basins(labels, axes, names=LIMITS)
    axes.set_aspect("equal")
    return lab.Picture(
        figure,
        r"Basins of attraction of two equal tokens at $\beta = 2$, $c = 4$: the angles "
        "at which they start, coloured by where they end. Tokens that start on "
        "different sides of the valley between the units stay two.",
    )


experiment = lab.experiment(
    run, "A perceptron block keeps atoms apart", room="observables", seconds=15
)
