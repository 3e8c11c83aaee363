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
import scipy.integrate
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
from meanformer.plotting import draw_branch, draw_uniform, style

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
)
DICHOTOMY = lab.theorem(
    "global-minimiser",
    r"At $\kappa_c$ an ordered state has less free energy than the uniform one if "
    r"$\beta = 1.2\,\beta_*$; none is found, up to $0.99\,\kappa_c$, if "
    r"$\beta = 0.8\,\beta_*$: signs for $d = 2, 3, 8$.",
    r"MR26, abstract: continuous for $\beta \le \beta_*$, discontinuous beyond",
)
BEND = lab.observation(
    "bend",
    r"Near $\kappa_c$ the branch is $\kappa = \kappa_c(1 + b\,r^2)$ in its order $r$, "
    "with $b$ of the expansion, unnormalised and softmax, $d = 2, 8$.",
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
)
HYSTERESIS = lab.observation(
    "hysteresis",
    r"Between the fold and $\kappa_c$ the tokens remember: their order on the way "
    "back exceeds that on the way there by more than a half.",
)
SOFTMAX = lab.observation(
    "softmax-continuous",
    r"Under softmax attention $\kappa$ grows along the branch: no fold, for "
    r"$\beta = 1, 5, 20$ on the circle.",
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Follow branches, and compare them with grids, time and tokens."""
    branches = {
        name: branch_of(*case) for name, case in progress.over(CASES.items(), 0.4)
    }
    for _ in progress.over(range(1), 0.4):
        loop = walk_loop(parameters)
    for _ in progress.over(range(1), 0.2):
        relaxed = [relaxation(SMOOTH, 1.3), relaxation(STEEP, 1.2)]
    densities = by_solve(parameters) if parameters.density else []
    steep = branches["circle, steep"]
    return lab.Outcome(
        findings=[
            threshold_finding(),
            dichotomy_finding(),
            bend_finding(),
            *grid_findings(steep),
            *relaxation_findings(relaxed, densities),
            *loop_findings(loop, branches["loop"]),
            softmax_finding(branches),
        ],
        pictures=[
            draw_circle(branches),
            draw_loop(loop, branches["loop"]),
            draw_tricritical(),
            draw_densities(steep),
            draw_softmax(branches),
        ],
        tables=[table(branches)],
    )


CASES = {
    "circle, smooth": ("unnormalised", 2, SMOOTH, 1),
    "circle, steep": ("unnormalised", 2, STEEP, 1),
    "two clusters": ("unnormalised", 2, STEEP, 2),
    "three clusters": ("unnormalised", 2, STEEP, 3),
    "loop": ("unnormalised", LOOP_DIMENSION, LOOP_BETA, 1),
    "softmax 1": ("softmax", 2, 1.0, 1),
    "softmax 5": ("softmax", 2, 5.0, 1),
    "softmax 20": ("softmax", 2, 20.0, 1),
}


def branch_of(kind: str, dimension: int, beta: float, degree: int):
    """A branch, up to one and a half of its first value of the inverse noise."""
    attention = mf.identity_attention(kind, dimension, beta)
    until = 1.5 * critical_kappa(attention, degree=degree)
    return stationary_branch(attention, degree=degree, until=until)


def threshold_finding():
    """Thresholds against Bessel functions of SciPy."""
    betas = np.array([1.0, 5.0])
    kappas = [
        critical_kappa(mf.identity_attention("unnormalised", 2, float(beta)))
        for beta in betas
    ]
    sizes = np.array([2, 3, 8])
    roots = np.array([tricritical_beta(int(size)) for size in sizes])
    bessel = scipy.special.ive
    quotients = sizes * bessel(sizes / 2 + 1, roots) / bessel(sizes / 2, roots)
    return THRESHOLDS.close_to(
        [*kappas, *quotients],
        [*(betas / scipy.special.iv(1, betas)), 1, 1, 1],
        tolerance=1e-12,
        source=lab.closed_form("modified Bessel functions of SciPy"),
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
    return DICHOTOMY.close_to(signs, expected, tolerance=0.0, source=lab.theory())


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
    return BEND.close_to(
        found,
        expected,
        relative_tolerance=1e-4,
        source=lab.closed_form(r"expansion to third order; extrapolated to $r = 0$"),
    )


def grid_state(beta: float, kappa: float, start: float, sweeps: int = 20_000):
    """The state that sweeps on equispaced angles lead to, and its excess energy."""
    angles = 2 * np.pi * np.arange(GRID) / GRID
    kernel = np.exp(beta * np.cos(angles[:, None] - angles[None, :])) / GRID
    density = np.exp(start * np.cos(angles))
    density /= density.mean()
    for _ in range(sweeps):
        logarithm = kappa / beta * (kernel @ density)
        following = np.exp(logarithm - logarithm.max())
        following /= following.mean()
        change = np.abs(following - density).max()
        density = following
        if change < 1e-13:
            break
    energy = (density @ kernel @ density) / GRID - scipy.special.iv(0, beta)
    entropy = np.mean(density * np.log(np.maximum(density, 1e-300)))
    return density, entropy / kappa - energy / (2 * beta)


def grid_findings(branch):
    """Fold and Maxwell point against another discretisation and method."""
    (fold,), maxwell = branch.folds, branch.maxwell
    cosines = np.cos(2 * np.pi * np.arange(GRID) / GRID)
    found = [
        float(np.mean(grid_state(STEEP, factor * fold.kappa, 3.0)[0] * cosines))
        for factor in (0.999, 1.001)
    ]
    attention = mf.identity_attention("unnormalised", 2, STEEP)
    above = stationary_state(attention, 1.001 * fold.kappa).order
    source = lab.other_method(
        "sweeps on equispaced angles, which descend the free energy"
    )
    excess = grid_state(STEEP, maxwell.kappa, 3.0)[1]
    return (
        FOLD.close_to(
            [*found, round(fold.kappa, 5), round(branch.critical, 5)],
            [0.0, above, 0.18430, 0.20546],
            tolerance=1e-6,
            source=source,
        ),
        MAXWELL.close_to(
            [excess, round(maxwell.kappa, 5)],
            [0.0, 0.18798],
            tolerance=1e-9,
            source=source,
        ),
    )


def relaxation(beta: float, factor: float):
    """Relax the Fokker-Planck equation of even densities by SciPy, in moments."""
    attention = mf.identity_attention("unnormalised", 2, beta)
    kappa = factor * critical_kappa(attention)
    state = stationary_state(attention, kappa)
    modes = np.arange(1, 33)
    bessel = scipy.special.iv(modes, beta)

    def velocity(_, moments):
        # With a_k the mean of cos k theta: a_k' = -k <v sin k theta> - k^2/kappa a_k.
        padded = np.concatenate([moments[::-1], [1.0], moments, np.zeros(32)])
        slopes = 2 * modes * bessel * moments / beta
        places = 32 + modes[:, None] - modes[None, :]
        inner = padded[places] - padded[places + 2 * modes[None, :]]
        return modes * (inner @ slopes) / 2 - modes**2 / kappa * moments

    times = np.linspace(0, 30 / -state.growth, 61)
    start = np.exp(-(modes**2) / 8.0)
    moments = scipy.integrate.solve_ivp(
        velocity, (0, times[-1]), start, "LSODA", times, rtol=1e-11, atol=1e-13
    ).y[0]
    # Between six and twelve decay times only the slowest mode is left.
    gaps = np.log(np.abs(moments[12:25] - moments[-1]))
    rate = np.polyfit(times[12:25], gaps, 1)[0]
    return beta, kappa, state, float(moments[-1]), float(rate)


def by_solve(parameters: Parameters) -> list[tuple[float, float]]:
    """The order that the spectral solver of densities comes to, and that expected."""
    attention = mf.identity_attention("unnormalised", 2, SMOOTH)
    kappa = 1.3 * critical_kappa(attention)
    state = stationary_state(attention, kappa)
    flow = mf.Flow(attention, space=mf.Sphere(), noise=float(np.sqrt(2 / kappa)))
    start = FourierDensity.from_function(
        lambda angle: jnp.exp(jnp.cos(angle)), 32, normalize=True
    )
    # Saved often: the budget of steps is for each stretch.
    path = mf.solve(flow, start, 20 / -state.growth, save=9, rtol=1e-9, atol=1e-11)
    return [(float(path.moments[-1, 0, 0]), state.order)]


def relaxation_findings(relaxed, densities):
    """Where the equation in time comes to, and how fast."""
    ends = [(end, state.order) for _, _, state, end, _ in relaxed] + densities
    measured, expected = zip(*ends, strict=True)
    source = lab.other_method("moments of the Fokker-Planck equation, solved by SciPy")
    return (
        RELAXATION.close_to(measured, expected, tolerance=1e-7, source=source),
        RATE.close_to(
            [rate for *_, rate in relaxed],
            [state.growth for _, _, state, _, _ in relaxed],
            relative_tolerance=1e-3,
            source=source,
        ),
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
        path = mf.solve(
            flow,
            mf.TokenCloud(points),
            parameters.wait,
            save=depths,
            solver=mf.FixedStep(STEP, method=GeodesicStep()),
            key=key,
        )
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
        TOKENS.close_to(
            means[1][down],
            ordered,
            tolerance=0.03,
            source=lab.other_method("the stationary branch of infinitely many tokens"),
        ),
        HYSTERESIS.above(
            (means[1][::-1] - means[0])[between], 0.5, source=lab.theory("coexistence")
        ),
    )


def softmax_finding(branches):
    """No fold on the branches of softmax attention."""
    least = [
        np.diff(branch.kappas).min() / branch.critical
        for name, branch in branches.items()
        if name.startswith("softmax")
    ]
    return SOFTMAX.above(
        least,
        0.0,
        source=lab.theory("positive bend at the bifurcation; beyond, observed"),
    )


def table(branches) -> lab.Table:
    """Thresholds, folds and Maxwell points."""
    rows = []
    for name, branch in branches.items():
        kind, dimension, beta, degree = CASES[name]
        folds = ", ".join(f"{fold.kappa:.8g}" for fold in branch.folds) or "none"
        equal = "none" if branch.maxwell is None else f"{branch.maxwell.kappa:.8g}"
        growth = float(branch.growths[-1])
        rows.append(
            [kind, dimension, beta, degree, branch.critical, folds, equal, growth]
        )
    columns = [
        "attention",
        "$d$",
        r"$\beta$",
        "clusters",
        r"$\kappa_c$",
        "fold",
        "Maxwell point",
        r"growth rate at $1.5\,\kappa_c$",
    ]
    return lab.Table(
        columns,
        rows,
        "Branches of stationary states. Two and three clusters are unstable, the "
        "slower the less noise there is: they are the metastable states of the flow.",
    )


def draw_circle(branches) -> lab.Picture:
    """Bifurcation diagrams on the circle, below and above the tricritical beta."""
    figure, panels = style.canvas(2, panel=(4.6, 3.5), sharey=True)
    cases = ("circle, smooth", SMOOTH), ("circle, steep", STEEP)
    for axes, (name, beta) in zip(panels, cases, strict=True):
        branch = branches[name]
        low, high = 0.8 * branch.critical, 1.5 * branch.critical
        draw_uniform(branch.critical, low, high, axes)
        draw_branch(branch, axes, label="one cluster")
        axes.axvline(branch.critical, color=style.INK, linestyle=":", linewidth=1)
        kappas, orders = relaxed_orders(beta, branch)
        axes.plot(
            kappas, orders, "s", color=style.GREEN, markersize=4, label="grid, relaxed"
        )
        axes.set(
            xlim=(low, high),
            xlabel=r"inverse noise $\kappa = 2/\sigma^2$",
            title=rf"$\beta = {beta:g}$",
        )
    name_marks(branch, panels[1])
    for axes, name in zip(panels, ("circle, smooth", "circle, steep"), strict=True):
        axes.text(branches[name].critical, 1.02, r"$\kappa_c$", ha="center")
    panels[0].set(ylabel=r"order $|\int x\,\mathrm{d}\rho|$", ylim=(-0.04, 1.0))
    panels[1].set_ylabel("")
    panels[0].legend(loc="lower right", bbox_to_anchor=(1, 0.1))
    return lab.Picture(
        figure,
        r"Stationary states of unnormalised attention on the circle, where "
        r"$\beta_* = 2.447$: stable states solid, unstable ones dashed, the uniform "
        r"one in ink. Left: the order sets in continuously at $\kappa_c$. Right: the "
        r"branch leaves backward, turns at a fold, and takes over from the uniform "
        r"state at the Maxwell point, before $\kappa_c$. Squares: where sweeps on a "
        r"grid of angles come to, from an ordered start.",
    )


def name_marks(branch, axes) -> None:
    """Name the fold and the Maxwell point, to the left of them."""
    (fold,) = branch.folds
    marks = (fold, "fold", "center"), (branch.maxwell, "Maxwell\npoint", "bottom")
    for state, text, side in marks:
        axes.annotate(
            text,
            (state.kappa, state.order),
            (-9, 0),
            textcoords="offset points",
            ha="right",
            va=side,
            linespacing=1,
        )


def relaxed_orders(beta: float, branch):
    """Orders that the independent grid comes to."""
    kappas = np.linspace(0.86, 1.46, 9) * branch.critical
    cosines = np.cos(2 * np.pi * np.arange(GRID) / GRID)
    orders = [
        np.mean(grid_state(beta, kappa, 3.0, 3000)[0] * cosines) for kappa in kappas
    ]
    return kappas, orders


def draw_loop(loop, branch) -> lab.Picture:
    """The hysteresis loop of tokens, over the branch."""
    figure, axes = style.canvas(panel=(6.2, 3.9))
    kappas, orders = loop
    low, high = 0.9 * kappas.min(), 1.02 * kappas.max()
    draw_uniform(branch.critical, low, high, axes)
    draw_branch(branch, axes, label="infinitely many tokens")
    name_marks(branch, axes)
    for row, (color, marker, name) in enumerate(
        ((style.ORANGE, "^", "noise is lowered"), (style.GREEN, "v", "noise is raised"))
    ):
        axes.errorbar(
            kappas[row],
            orders[row].mean(axis=1),
            orders[row].std(axis=1),
            color=color,
            marker=marker,
            linewidth=0.9,
            capsize=2,
            label=name,
        )
    axes.axvline(branch.critical, color=style.INK, linestyle=":", linewidth=1)
    axes.text(branch.critical, 1.02, r"$\kappa_c$", ha="center")
    axes.set(
        xlim=(low, high),
        ylim=(-0.04, 1.0),
        xlabel=r"inverse noise $\kappa = 2/\sigma^2$",
        ylabel=r"order $|\bar x|$, mean of the tokens",
    )
    axes.legend(loc="center right")
    return lab.Picture(
        figure,
        r"Hysteresis of tokens on $\mathbb{S}^7$ at $\beta = 3$, whose noise is "
        r"lowered in steps and raised again (mean and spread over the second half of "
        r"each stay; order that is left at small $\kappa$ is $n^{-1/2}$). They leave "
        r"the uniform state near $\kappa_c$, and fall off the ordered branch at its "
        r"fold.",
    )


def draw_tricritical() -> lab.Picture:
    """The tricritical inverse temperature against the dimension."""
    figure, axes = style.canvas(panel=(5.2, 3.4))
    sizes = np.array([2, 3, 4, 5, 6, 8, 11, 16, 23, 32])
    roots = [tricritical_beta(int(size)) for size in sizes]
    axes.fill_between(sizes, roots, 2.6, color=style.ORANGE, alpha=0.12, linewidth=0)
    axes.fill_between(sizes, 0.8, roots, color=style.BLUE, alpha=0.12, linewidth=0)
    axes.plot(sizes, roots, "o-", label=r"$\beta_*$")
    axes.plot(sizes, 1 + 2 / sizes, "--", color=style.GREY, label=r"$1 + 2/d$")
    axes.text(9, 2.0, "the order jumps")
    axes.text(2.3, 0.95, "the order sets in continuously")
    axes.set(
        xscale="log",
        xlim=(2, 32),
        ylim=(0.8, 2.6),
        xlabel="dimension $d$",
        ylabel=r"inverse temperature $\beta$",
    )
    axes.set_xticks([2, 3, 4, 8, 16, 32], ["2", "3", "4", "8", "16", "32"])
    axes.xaxis.minorticks_off()
    axes.legend()
    return lab.Picture(
        figure,
        r"How order sets in under unnormalised attention as noise falls: with a jump "
        r"above $\beta_*$, which falls to one in high dimension.",
    )


def draw_densities(branch) -> lab.Picture:
    """Stationary densities along the steep branch."""
    figure, axes = style.canvas(panel=(5.6, 3.6))
    angles = np.linspace(-np.pi, np.pi, 401)
    colours = style.depth_colours()
    (fold,), maxwell = branch.folds, branch.maxwell
    attention = mf.identity_attention("unnormalised", 2, STEEP)
    later = [stationary_state(attention, k * branch.critical) for k in (1.0, 1.3, 2.0)]
    states = [fold, maxwell, *later]
    names = ["fold", "Maxwell point", r"$\kappa_c$"]
    names += [r"$1.3\,\kappa_c$", r"$2\,\kappa_c$"]
    for place, (state, name) in enumerate(zip(states, names, strict=True)):
        values = state.density(np.cos(angles)) / (2 * np.pi)
        label = rf"$\kappa = {state.kappa:.4f}$, {name}"
        axes.plot(angles, values, color=colours(place / 4), label=label)
    axes.axhline(1 / (2 * np.pi), color=style.INK, linestyle=":", linewidth=1)
    axes.set_xticks(
        [-np.pi, -np.pi / 2, 0, np.pi / 2, np.pi],
        [r"$-\pi$", r"$-\pi/2$", "0", r"$\pi/2$", r"$\pi$"],
    )
    axes.set(xlabel=r"angle $\theta$", ylabel=r"density $\rho(\theta)$")
    axes.legend(loc="upper left", fontsize=8.5)
    return lab.Picture(
        figure,
        r"Ordered stationary densities on the circle at $\beta = 5$, from the fold on. "
        r"Dotted: the uniform density.",
    )


def draw_softmax(branches) -> lab.Picture:
    """Branches of softmax attention, all of them continuous."""
    figure, axes = style.canvas(panel=(5.6, 3.6))
    rows = [(beta, branches[f"softmax {beta}"]) for beta in (1, 5, 20)]
    for color, (beta, branch) in zip(style.PALETTE, rows, strict=False):
        draw_branch(
            branch,
            axes,
            color=color,
            label=rf"$\beta = {beta}$, $\kappa_c = {branch.critical:.3f}$",
            unit=branch.critical,
        )
        bend = branch_curvature(mf.identity_attention("softmax", 2, float(beta)))
        orders = np.linspace(0, 0.5, 50)
        axes.plot(1 + bend * orders**2, orders, ":", color=style.INK, linewidth=1.2)
    draw_uniform(1.0, 0.9, 1.5, axes)
    axes.plot([], [], ":", color=style.INK, label="expansion at $\\kappa_c$")
    axes.set(
        xlim=(0.9, 1.5),
        xlabel=r"inverse noise $\kappa/\kappa_c$",
        ylabel=r"order $|\int x\,\mathrm{d}\rho|$",
    )
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.08))
    return lab.Picture(
        figure,
        r"Softmax attention on the circle: order sets in continuously at every "
        r"$\beta$, the more steeply the larger $\beta$ is.",
    )


experiment = lab.Experiment(
    name="noise-transition",
    title="Noise against attraction: order sets in continuously, or jumps",
    room="mean_field",
    parameters=Parameters,
    run=run,
    seconds=20,
)
