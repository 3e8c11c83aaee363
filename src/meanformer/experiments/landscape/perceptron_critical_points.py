r"""A perceptron block stops the collapse: critical points of attention's energy.

Unnormalised attention on the sphere with a perceptron whose output weights are
multiples of its input weights climbs $E(\mu) = \frac1{2\beta}\iint e^{\beta\langle
x,y\rangle}\,\mathrm{d}\mu\,\mathrm{d}\mu + \int\Phi\,\mathrm{d}\mu$. Its stable states
are few atoms near peaks of $\Phi$, no longer one point: with two ReLU units at the
angles $0$ and $2\pi/3$ two atoms rest near them. The largest energy still belongs to
one atom, since $E$ is convex in $\mu$.
"""

import jax.numpy as jnp
import numpy as np
import scipy.optimize

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers import circle_atoms
from meanformer.experiments.helpers.circle_atoms import angles_of, pull, turned
from meanformer.experiments.helpers.many_starts import last_points
from meanformer.observables import CriticalPoint, newton_critical_point
from meanformer.plotting import draw_basins, style

UNIT = 2 * np.pi / 3  # the angle of the second unit
STRENGTH = 4.0
LIMITS = ("one atom at $0$", r"one atom at $2\pi/3$", "two atoms", "flat region")


class Parameters(lab.Parameters):
    """Sizes."""

    grid: int = lab.setting(24, full=160, help="starts of each token", at_least=8)
    starts: int = lab.setting(12, full=200, help="starts of a search", at_least=8)
    branches: int = lab.setting(1, full=5, help="temperatures of the folds", at_least=1)
    depth: float = lab.setting(60.0, help="depth of the flows at most", at_least=10)
    seed: int = lab.setting(3, help="seed of the starts", at_least=0)


STATES = lab.observation(
    "two-atom-states",
    "With $c = 4$ two atoms rest near the units: both angles for equal masses and "
    r"$\beta = 0, 1, 2, 3, 4$, and for the masses $0.7, 0.3$ and $\beta = 2$.",
    source=lab.other_method("SciPy's root finder in the angles"),
)
STABLE = lab.observation(
    "two-atom-rates",
    r"The two-atom state at $\beta = 2$ is stable: small motions decay, at the rates "
    "$-3.07$ and $-3.98$.",
    source=lab.closed_form("the Jacobian in the angles"),
)
LOCALISED = lab.observation(
    "localised",
    r"Its atoms sit near the peaks of $\Phi$, the nearer the lower the temperature: "
    r"distance from the peak, $\beta = 1, 2, 3, 4$.",
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
    source=lab.other_method("Newton's method for the states, solves for the flows"),
)


@lab.experiment("A perceptron block keeps atoms apart", room="observables", seconds=15)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Find critical points, and compare with root finders and closed forms."""
    states = {beta: two_atoms(beta) for beta in progress.over(range(5), 0.1)}
    start = {"starts": parameters.starts, "seed": parameters.seed}
    search = circle_atoms.search_of(block_flow(2.0), (0.5, 0.5), **start)
    best, exact = mf.observables.energy_maximiser(block_flow(2.0)), np.exp(2) / 4 + 2
    highest = max(point.energy for point in search)
    largest = [best.energy, max(highest, exact), exact + best.gap]
    betas = (2.0, 1.0, 0.5, 3.0, 4.0)[: parameters.branches]
    folds = [fold_by_newton(beta) for beta in progress.over(betas, 0.3)]
    labels = basins(parameters, states[2])
    return lab.Outcome(
        findings=[
            *state_findings(states),
            MAXIMUM.close_to(largest, exact, tolerance=1e-9),
            FOLD.close_to(folds, list(map(fold_by_formula, betas)), tolerance=2e-3),
            BASINS.close_to(np.mean(labels >= 0), 1.0, tolerance=0.0),
        ],
        pictures=[draw_folds(), draw_basin_picture(labels)],
    )


def block_flow(beta: float, strength: float = STRENGTH) -> mf.Flow:
    """Attention with two ReLU units."""
    attention = mf.identity_attention("unnormalised", 2, float(beta))
    units = mf.TokenCloud.from_angles([0.0, UNIT]).points
    return mf.observables.perceptron_flow(attention, units, strength)


def two_atoms(beta: float, masses=(0.5, 0.5)) -> CriticalPoint:
    """The stable two-atom state."""
    start = mf.TokenCloud.from_angles([0.1, 2.0], masses)
    return newton_critical_point(block_flow(beta), start)


def lift(angle):
    """The slope of the potential of two ReLU units of strength one, in the angle."""
    units = (np.maximum(np.cos(angle - u), 0) * np.sin(u - angle) for u in (0.0, UNIT))
    return sum(units)


def angles_by_scipy(beta: float, masses=(0.5, 0.5)) -> np.ndarray:
    """The two-atom state by a root finder in the angles."""
    others = np.array([masses[1], -masses[0]])

    def slopes(angles):
        return STRENGTH * lift(angles) + others * pull(angles[1] - angles[0], beta)

    return scipy.optimize.root(slopes, [0.1, 2.0], tol=1e-14).x


def state_findings(states):
    """Angles, rates and places against a root finder and formulas."""
    skewed = two_atoms(2.0, (0.7, 0.3))
    found = [angles_of(state.cloud) for state in (*states.values(), skewed)]
    other = [*map(angles_by_scipy, states), angles_by_scipy(2.0, (0.7, 0.3))]
    _, bend, both = branch(other[2][0], 2.0)
    places = [
        mf.observables.localisation(block_flow(beta), states[beta].cloud).radius
        for beta in (1, 2, 3, 4)
    ]
    firsts = [angles[0] for angles in other[1:5]]
    return (
        STATES.close_to(found, other, tolerance=2e-10),
        STABLE.close_to(states[2].eigenvalues, [both, bend], tolerance=5e-10),
        LOCALISED.close_to(places, firsts, tolerance=1e-6),
    )


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


def basins(parameters: Parameters, state: CriticalPoint) -> np.ndarray:
    """Where two tokens end from all pairs of starts: places in the limits."""
    # Not symmetric: tokens on both sides of the valley would meet in it, and stay.
    first, second = (
        2 * np.pi * (np.arange(parameters.grid) + shift) / parameters.grid
        for shift in (0.5, 0.37)
    )
    pairs = np.stack(np.meshgrid(first, second, indexing="ij"), axis=-1)
    starts = np.stack([np.cos(pairs), np.sin(pairs)], axis=-1).reshape(-1, 2, 2)
    flow, weights, tolerances = block_flow(2.0), jnp.full(2, 0.5), (1e-5, 1e-7, 1e-5)
    lasts = last_points(
        flow, jnp.asarray(starts), weights, parameters.depth, tolerances
    )
    ends = np.arctan2(lasts[..., 1], lasts[..., 0]).reshape(pairs.shape) % (2 * np.pi)
    is_one = [turned(ends, unit).max(axis=-1) < 1e-2 for unit in (0.0, UNIT)]
    split = np.sort(ends, axis=-1) - angles_of(state.cloud)
    is_two = np.abs(split).max(axis=-1) < 1e-3
    joined = turned(ends[..., 0], ends[..., 1]) < 1e-2
    is_flat = joined & (np.abs(lift(ends)).max(axis=-1) < 1e-6)
    return np.select([*is_one, is_two, is_flat], [0, 1, 2, 3], -1)


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
