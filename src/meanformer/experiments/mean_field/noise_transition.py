r"""Noise holds tokens apart, until attraction wins: continuously, or with a jump.

With noise of strength $\sigma = \sqrt{2/\kappa}$ the uniform measure on the sphere is
stationary for every $\kappa$, and unstable from $\kappa_c = \beta/\kappa_1$ on (for
softmax attention $\beta\kappa_0/\kappa_1$). Under unnormalised attention ordered
states take over continuously up to $\beta_*$, where
$I_{d/2+1}(\beta_*)/I_{d/2}(\beta_*) = 1/d$, and with a jump beyond: the branch of
ordered states turns back, uniform and ordered states coexist, and slow changes of the
noise show hysteresis. Branches are computed by continuation, and compared with other
discretisations, with the Fokker-Planck equation in time and with tokens.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import scipy.linalg
import scipy.special

import meanformer as mf
import meanformer.experiments as lab
from meanformer.flows import GeodesicStep
from meanformer.mean_field import (
    branch_curvature,
    critical_kappa,
    stationary_branch,
    stationary_state,
    tricritical_beta,
)
from meanformer.measures import FourierDensity
from meanformer.plotting import draw_branch, draw_uniform, mark_values, style

GRID = 256  # angles of the independent discretisation
SMOOTH, STEEP = 2.3, 5.0  # on the circle, below and above the tricritical beta
LOOP_DIMENSION, LOOP_BETA = 8, 3.0
STEP = 0.02


@dataclass(frozen=True)
class Parameters:
    """How many tokens, and how slowly the noise changes."""

    count: int = lab.setting(120, full=1000, help="tokens of the loop", at_least=50)
    stops: int = lab.setting(
        5, full=21, help=r"values of $\kappa$ on each way of the loop", at_least=5
    )
    wait: float = lab.setting(5.0, full=12.0, help="depth spent at each", above=0)
    density: bool = lab.setting(
        False, full=True, help="also solve the Fokker-Planck equation by `mf.solve`"
    )
    seed: int = lab.setting(0, help="seed of the noise")


THRESHOLDS = lab.observation(
    "thresholds",
    r"$\kappa_c = \beta/I_1(\beta)$ on the circle, $\beta = 1, 5$, and "
    r"$d\,I_{d/2+1}(\beta_*)/I_{d/2}(\beta_*) = 1$ for $d = 2, 3, 8$.",
    source=lab.closed_form("modified Bessel functions of SciPy"),
)
DICHOTOMY = lab.theorem(
    "global-minimiser",
    r"At $\kappa_c$ an ordered state has less free energy than the uniform one if "
    r"$\beta = 1.2\,\beta_*$; none is found, up to $0.99\,\kappa_c$, if "
    r"$\beta = 0.8\,\beta_*$: signs for $d = 2, 3, 8$.",
    r"MR26, abstract: continuous for $\beta \le \beta_*$, discontinuous beyond",
    source=lab.theory(),
)
BEND = lab.observation(
    "bend",
    r"Near $\kappa_c$ the branch is $\kappa = \kappa_c(1 + b\,r^2)$ in its order $r$, "
    "with $b$ of the expansion, unnormalised and softmax, $d = 2, 8$.",
    source=lab.closed_form(r"expansion to third order; extrapolated to $r = 0$"),
)
FOLD = lab.observation(
    "fold",
    r"On the circle at $\beta = 5$ ordered states end at the fold $\kappa = 0.18430$, "
    r"below $\kappa_c = 0.20546$: order found $0.1\%$ below and above it.",
)
MAXWELL = lab.observation(
    "maxwell",
    r"At the Maxwell point $\kappa = 0.18798$ the ordered state has the free energy "
    "of the uniform one.",
)
RELAXATION = lab.observation(
    "relaxation",
    "In time the Fokker-Planck equation comes to the states of the branch, at "
    r"$\beta = 2.3$ and $5$.",
)
RATE = lab.observation(
    "relaxation-rate",
    "It does so at the rate of the spectrum of the linearised equation.",
)
TOKENS = lab.observation(
    "tokens",
    r"The order of tokens on $\mathbb{S}^7$, $\beta = 3$, is that of the branch "
    "wherever the loop has settled on it.",
    source=lab.other_method("the stationary branch of infinitely many tokens"),
)
HYSTERESIS = lab.observation(
    "hysteresis",
    r"Between the fold and $\kappa_c$ the tokens remember: their order on the way "
    "back exceeds that on the way there by more than a half.",
    source=lab.theory("coexistence"),
)
SOFTMAX = lab.observation(
    "softmax-continuous",
    r"Under softmax attention $\kappa$ grows along the branch: no fold, for "
    r"$\beta = 1, 5, 20$ on the circle.",
    source=lab.theory("positive bend at the bifurcation; beyond, observed"),
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Follow branches, and compare them with grids, time and tokens."""
    circle = {beta: branch_of(2, beta) for beta in progress.over((SMOOTH, STEEP), 0.1)}
    softmax = [
        branch_of(2, beta, "softmax") for beta in progress.over((1.0, 5.0, 20.0), 0.3)
    ]
    for _ in progress.over(range(1), 0.4):
        branch = branch_of(LOOP_DIMENSION, LOOP_BETA)
        loop = walk_loop(parameters)
    for _ in progress.over(range(1), 0.2):
        relaxed = relaxation_findings(parameters)
    return lab.Outcome(
        findings=[
            threshold_finding(),
            dichotomy_finding(),
            bend_finding(),
            *grid_findings(circle[STEEP]),
            *relaxed,
            *loop_findings(loop, branch),
            SOFTMAX.above(
                [np.diff(one.kappas).min() / one.critical for one in softmax], 0.0
            ),
        ],
        pictures=[draw_circle(circle), draw_loop(loop, branch)],
    )


def branch_of(dimension: int, beta: float, kind: str = "unnormalised"):
    """A branch, up to one and a half of its first value of the inverse noise."""
    attention = mf.identity_attention(kind, dimension, beta)
    return stationary_branch(attention, until=1.5 * critical_kappa(attention))


def threshold_finding():
    """Thresholds against Bessel functions of SciPy."""
    betas, sizes = np.array([1.0, 5.0]), np.array([2, 3, 8])
    layers = [mf.identity_attention("unnormalised", 2, float(beta)) for beta in betas]
    roots = np.array([tricritical_beta(int(size)) for size in sizes])
    bessel = scipy.special.ive
    quotients = sizes * bessel(sizes / 2 + 1, roots) / bessel(sizes / 2, roots)
    return THRESHOLDS.close_to(
        [*map(critical_kappa, layers), *quotients],
        [*(betas / scipy.special.iv(1, betas)), 1, 1, 1],
        tolerance=1e-12,
    )


def dichotomy_finding():
    """The sign of the least free energy at the critical noise, or just above it."""
    signs, expected = [], []
    for dimension in (2, 3, 8):
        # At the threshold itself the state below the tricritical beta is degenerate.
        for factor, share, sign in ((0.8, 0.99, 0), (1.2, 1.0, -1)):
            beta = factor * tricritical_beta(dimension)
            attention = mf.identity_attention("unnormalised", dimension, beta)
            kappa = share * critical_kappa(attention)
            state = stationary_state(attention, kappa)
            excess = kappa * (state.free_energy or 0.0)
            signs.append(0 if abs(excess) < 1e-12 else np.sign(excess))
            expected.append(sign)
    return DICHOTOMY.close_to(signs, expected, tolerance=0.0)


def bend_finding():
    """The bend of computed branches, extrapolated to the bifurcation."""
    found, expected = [], []
    for kind in ("unnormalised", "softmax"):
        for dimension in (2, 8):
            attention = mf.identity_attention(kind, dimension, 2.0)
            critical = critical_kappa(attention)
            branch = stationary_branch(attention, until=1.05 * critical, spacing=0.02)
            squares = branch.orders[1:4] ** 2
            bends = (branch.kappas[1:4] / critical - 1) / squares
            found.append(np.polyfit(squares, bends, 2)[-1])
            expected.append(branch_curvature(attention))
    return BEND.close_to(found, expected, relative_tolerance=1e-4)


def grid_state(kappa: float) -> tuple[float, float]:
    """Order and excess energy of the state that sweeps on equispaced angles lead to."""
    cosines = np.cos(2 * np.pi * np.arange(GRID) / GRID)
    kernel = scipy.linalg.circulant(np.exp(STEEP * cosines)) / GRID
    density = GRID * scipy.special.softmax(3 * cosines)
    for _ in range(20_000):
        before = density
        density = GRID * scipy.special.softmax(kappa / STEEP * (kernel @ before))
        if np.abs(density - before).max() < 1e-13:
            break
    energy = (density @ kernel @ density) / GRID - scipy.special.iv(0, STEEP)
    entropy = scipy.special.xlogy(density, density).mean()
    return float(np.mean(density * cosines)), entropy / kappa - energy / (2 * STEEP)


def grid_findings(branch):
    """Fold and Maxwell point against another discretisation and method."""
    (fold,), maxwell = branch.folds, branch.maxwell
    found = [grid_state(factor * fold.kappa)[0] for factor in (0.999, 1.001)]
    attention = mf.identity_attention("unnormalised", 2, STEEP)
    above = stationary_state(attention, 1.001 * fold.kappa).order
    source = lab.other_method(
        "sweeps on equispaced angles, which descend the free energy"
    )
    return (
        FOLD.close_to(
            [*found, round(fold.kappa, 5), round(branch.critical, 5)],
            [0.0, above, 0.18430, 0.20546],
            tolerance=1e-6,
            source=source,
        ),
        MAXWELL.close_to(
            [grid_state(maxwell.kappa)[1], round(maxwell.kappa, 5)],
            [0.0, 0.18798],
            tolerance=1e-9,
            source=source,
        ),
    )


def relaxation_findings(parameters: Parameters):
    """Where the Fokker-Planck equation of even densities comes to, and how fast."""
    modes, ends, orders, rates, growths = np.arange(1, 33), [], [], [], []
    for beta, factor in ((SMOOTH, 1.3), (STEEP, 1.2)):
        attention = mf.identity_attention("unnormalised", 2, beta)
        kappa = factor * critical_kappa(attention)
        state = stationary_state(attention, kappa)
        forces = 2 * modes * scipy.special.iv(modes, beta) / beta

        def velocity(_, moments, forces=forces, kappa=kappa):
            # a_k, the mean of cos k theta: a_k' = -k <v sin k theta> - k^2/kappa a_k.
            padded = np.concatenate([moments[::-1], [1.0], moments, np.zeros(32)])
            places = 32 + modes[:, None] - modes[None, :]
            inner = padded[places] - padded[places + 2 * modes[None, :]]
            return modes * (inner @ (forces * moments)) / 2 - modes**2 / kappa * moments

        times = np.linspace(0, 30 / -state.growth, 61)
        options = {"method": "LSODA", "rtol": 1e-11, "atol": 1e-13}
        start = np.exp(-(modes**2) / 8.0)
        moments = lab.by_scipy(velocity, start, times, **options)[:, 0]
        ends.append(moments[-1])
        orders.append(state.order)
        growths.append(state.growth)
        # Between six and twelve decay times only the slowest mode is left.
        gaps = np.log(np.abs(moments[12:25] - moments[-1]))
        rates.append(np.polyfit(times[12:25], gaps, 1)[0])
        if parameters.density and beta == SMOOTH:
            flow = mf.Flow(attention, space=mf.Sphere(), noise=np.sqrt(2 / kappa))
            density = FourierDensity.from_function(
                lambda angle: jnp.exp(jnp.cos(angle)), 32, normalize=True
            )
            # Saved often: the budget of steps is for each stretch.
            options = {"save": 9, "rtol": 1e-9, "atol": 1e-11}
            path = mf.solve(flow, density, 20 / -state.growth, **options)
            ends.append(float(path.moments[-1, 0, 0]))
            orders.append(state.order)
    source = lab.other_method("moments of the Fokker-Planck equation, solved by SciPy")
    return (
        RELAXATION.close_to(ends, orders, tolerance=1e-7, source=source),
        RATE.close_to(rates, growths, relative_tolerance=1e-3, source=source),
    )


def walk_loop(parameters: Parameters):
    """Lower the noise in steps, and raise it again; one program for all steps."""
    attention = mf.identity_attention("unnormalised", LOOP_DIMENSION, LOOP_BETA)
    critical = critical_kappa(attention)
    way = np.linspace(0.56, 1.4, parameters.stops) * critical
    kappas = np.concatenate([way, way[::-1]])
    key, key_start = jr.split(jr.key(parameters.seed))
    start = mf.UniformSphere(LOOP_DIMENSION).sample(parameters.count, key=key_start)
    depths = np.linspace(0, parameters.wait, 13)

    def stay(points, moment):
        noise, key = moment
        flow = mf.Flow(attention, space=mf.Sphere(), noise=noise)
        options = {"save": depths, "solver": mf.FixedStep(STEP, method=GeodesicStep())}
        cloud = mf.TokenCloud(points)
        path = mf.solve(flow, cloud, parameters.wait, key=key, **options)
        orders = jnp.linalg.norm(path.points.mean(axis=1), axis=1)
        return path.points[-1], orders[7:]

    moments = jnp.sqrt(2 / jnp.asarray(kappas)), jr.split(key, len(kappas))
    orders = jax.jit(lambda: jax.lax.scan(stay, start, moments)[1])()
    return kappas.reshape(2, -1), np.asarray(orders).reshape(2, parameters.stops, -1)


def loop_findings(loop, branch):
    """Orders of tokens against the branch, and between the two ways."""
    kappas, orders = loop
    means = orders.mean(axis=2)
    (fold,) = branch.folds
    down = kappas[1] > 1.05 * fold.kappa
    ordered = [branch.orders_at(kappa).max() for kappa in kappas[1][down]]
    between = (kappas[0] > 1.1 * fold.kappa) & (kappas[0] < 0.95 * branch.critical)
    return (
        TOKENS.close_to(means[1][down], ordered, tolerance=0.03),
        HYSTERESIS.above((means[1][::-1] - means[0])[between], 0.5),
    )


def draw_over_uniform(branch, limits, axes, label=None) -> None:
    """A branch and the uniform state, with the critical noise marked."""
    draw_uniform(branch.critical, *limits, axes)
    draw_branch(branch, axes, label=label)
    mark_values(branch.critical, axes)
    axes.text(branch.critical, 1.02, r"$\kappa_c$", ha="center")
    axes.set(xlim=limits, ylim=(-0.04, 1.0))
    axes.set(xlabel=r"inverse noise $\kappa = 2/\sigma^2$")


def draw_circle(circle) -> lab.Picture:
    """Bifurcation diagrams on the circle, below and above the tricritical beta."""
    figure, panels = style.canvas(2, panel=(4.6, 3.5), sharey=True)
    for axes, (beta, branch) in zip(panels, circle.items(), strict=True):
        draw_over_uniform(branch, (0.8 * branch.critical, 1.5 * branch.critical), axes)
        axes.set(title=rf"$\beta = {beta:g}$", ylabel="")
    panels[0].set(ylabel=r"order $|\int x\,\mathrm{d}\rho|$")
    return lab.Picture(
        figure,
        r"Stationary states of unnormalised attention on the circle, where "
        r"$\beta_* = 2.447$: stable states solid, unstable ones dashed, the uniform "
        r"one in ink. Left: the order sets in continuously at $\kappa_c$. Right: the "
        r"branch leaves backward, turns at a fold (dot), and takes over from the "
        r"uniform state at the Maxwell point (diamond), before $\kappa_c$.",
    )


def draw_loop(loop, branch) -> lab.Picture:
    """The hysteresis loop of tokens, over the branch."""
    figure, axes = style.canvas(panel=(6.2, 3.9))
    kappas, orders = loop
    limits = 0.9 * kappas.min(), 1.02 * kappas.max()
    draw_over_uniform(branch, limits, axes, label="infinitely many tokens")
    ways = (
        ("noise is lowered", "^", style.ORANGE),
        ("noise is raised", "v", style.GREEN),
    )
    for places, heights, (name, mark, colour) in zip(kappas, orders, ways, strict=True):
        looks = {"marker": mark, "color": colour, "linewidth": 0.9, "label": name}
        axes.errorbar(places, heights.mean(axis=1), heights.std(axis=1), **looks)
    axes.set_ylabel(r"order $|\bar x|$, mean of the tokens")
    axes.legend(loc="center right")
    return lab.Picture(
        figure,
        r"Hysteresis of tokens on $\mathbb{S}^7$ at $\beta = 3$, whose noise is "
        r"lowered in steps and raised again (mean and spread over the second half of "
        r"each stay; order that is left at small $\kappa$ is $n^{-1/2}$). They leave "
        r"the uniform state near $\kappa_c$, and fall off the ordered branch at its "
        r"fold (dot).",
    )


experiment = lab.experiment(
    run,
    "Noise against attraction: order sets in continuously, or jumps",
    room="mean_field",
    seconds=20,
)
