r"""Infinitely many tokens on the circle, without the chance of a sample.

The measure of the tokens solves the continuity equation
$\partial_t\varrho + \partial_\theta(\varrho v) = 0$, with
$v = \tfrac1\beta\partial_\theta\log(e^{\beta\cos} * \varrho)$ for softmax attention and
$v = \tfrac1\beta\partial_\theta(e^{\beta\cos} * \varrho)$ without the denominator.
Its moments $\int e^{-ik\theta}\,\mathrm{d}\mu$ obey a closed system, in which the
kernel is a multiplication by Bessel functions $I_k(\beta)$. The solution is compared
with closed forms, with weighted nodes that are carried along, and with $10^5$ random
tokens. While clusters form, the density steepens, until tokens take over from it.
"""

from dataclasses import dataclass

import jax.random as jr
import numpy as np
import scipy.special

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers.circle_rates import BETA, RATES, SIXTH, THIRD
from meanformer.flows import DensityTrajectory, FixedStep, Spectral
from meanformer.geometry.circle import angles_of
from meanformer.mean_field import Evolution, evolve
from meanformer.measures import FourierDensity, circle_moments
from meanformer.numerics.special.trigonometric import on_grid
from meanformer.observables import count_modes, energy
from meanformer.plotting import style

MODES = 256
TIGHT = {"rtol": 1e-12, "atol": 1e-13}
KURAMOTO = 0.6497905376
SMALL = 1e-6  # of a perturbation whose growth is measured
SHOWN_AT = (0.0, 1.8, 3.0)  # depths of the snapshots
SHOWN = 8  # moments that are compared with tokens
GRID = 2 * MODES + 2  # angles of pictures and checks


@dataclass(frozen=True)
class Parameters:
    """Sizes of the comparison with tokens, and of the picture."""

    batches: int = lab.setting(
        100, full=20, help="independent clouds, for the sampling error", at_least=10
    )
    tokens: int = lab.setting(
        1_000, full=100_000, help="tokens in each cloud", at_least=100
    )
    steep: float = lab.setting(
        25.0, full=81.0, help=r"$\beta$ of the picture of clusters", at_least=5
    )
    seed: int = lab.setting(0, help="seed of all samples", at_least=0)


ORDER = lab.theorem(
    "order-parameter",
    r"At $\beta = 0$ (Kuramoto's model) a Poisson kernel stays one, with "
    "$R(t)^2 = R_0^2e^t/(1 + R_0^2(e^t - 1))$.",
    "OA08, the manifold of Poisson kernels is invariant",
    source=lab.closed_form("and the tabulated value at depth 2"),
)
NONLINEAR = lab.observation(
    "nonlinear",
    r"For $\beta = 5$ and $\varrho_0 = (1 + 0.1\cos3\theta)/2\pi$ the moments at "
    r"depth $3$ are $\int\cos3\theta = 0.3660580605$ and "
    r"$\int\cos6\theta = 0.0978164714$.",
    source=lab.tabulated(),
)
GROWTH = lab.theorem(
    "growth",
    r"About the uniform density mode $k$ grows at the rate $k^2I_k(\beta)/\beta$, "
    r"divided by $I_0(\beta)$ for softmax: both flows, $\beta = 5$, "
    r"$k = 1, \dots, 5$, relative to the largest rate.",
    "BPA25, linear stability of the uniform measure",
    source=lab.closed_form("by SciPy's Bessel functions, and tabulated"),
)
POSITIVE = lab.theorem(
    "positive",
    "The density stays positive: its smallest value along depth, over the largest.",
    "GLPR23, continuity equation",
    source=lab.theory(),
)
SPECTRAL = lab.observation(
    "spectral",
    "The error falls exponentially with the number of modes: eight more divide the "
    r"error of $\int\cos3\theta$ at depth $3$ at least by this.",
    source=lab.theory("a smooth solution"),
)
NODES = lab.observation(
    "nodes",
    "Weighted tokens at the midpoints of $96$ equal arcs, carried along, have the "
    "same moments.",
    source=lab.other_method("the density, by its modes"),
)
TOKENS = lab.theorem(
    "tokens",
    "Random tokens, $10^5$ in all or more, have the same moments up to their "
    "sampling error: largest difference of sixteen moments at depth $3$, in standard "
    "errors.",
    "GLPR23, mean-field limit on the sphere",
    source=lab.other_method("the density, by its modes; six standard errors"),
)
ENERGY = lab.theorem(
    "energy",
    "Along the unnormalised flow the energy grows by "
    r"$\int|v|^2\varrho\,\mathrm{d}\theta$: largest relative difference from the "
    "derivative of the energy in the moments.",
    "GLPR23, Wasserstein gradient flow",
    source=lab.theory("the two are equal"),
)
TAKE_OVER = lab.observation(
    "take-over",
    "Where $256$ modes no longer resolve the density, tokens take over: a little "
    "later they have the moments of a density with $1024$ modes.",
    source=lab.other_method("a density with more modes"),
)
CLUSTERS = lab.observation(
    "clusters",
    "From a small smooth perturbation of the uniform density as many clusters emerge "
    r"as the fastest mode $k^*$ has periods, $\beta = 5$.",
    "BPA25, meta-stable clusters of nearly uniform starts",
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Solve for densities, each against something else."""
    path = solved("softmax", ripple(0.1))
    smallest = np.asarray(path.statistics["smallest"])
    highest = np.asarray(path.on_grid(GRID)).max(axis=1)
    third, flow = float(path.moments[-1, 2, 0]), flow_of("softmax")
    errors = []
    for modes in progress.over((8, 16, 24), 0.2):
        start, solver = ripple(0.1).resized(modes), Spectral(most_modes=modes, tail=1.0)
        coarse = mf.solve(flow, start, 3.0, save=2, solver=solver, **TIGHT)
        errors.append(abs(float(coarse.moments[-1, 2, 0]) - third))
    carried = mf.solve(flow, mf.quadrature(ripple(0.1), 96), 3.0, save=2, **TIGHT)
    carried_third = float(circle_moments(carried.cloud(-1), 3)[2, 0])
    clouds = []
    for batch in progress.over(range(parameters.batches), 0.4):
        key = jr.fold_in(jr.key(parameters.seed), batch)
        points = ripple(0.1).resized(3).sample(parameters.tokens, key=key)
        # The error of such steps, 2e-4, is far below that of the sample.
        options = {"save": SHOWN_AT, "solver": FixedStep(0.6)}
        clouds.append(mf.solve(flow, mf.TokenCloud(points), 3.0, **options))
    for _ in progress.over(range(1), 0.3):
        evolution = evolve(flow, seeds(BETA), 14.0, save=57)
        # It is only looked at.
        loose, beta = {"save": 49, "rtol": 1e-6, "atol": 1e-8}, parameters.steep
        steep = evolve(flow_of("softmax", beta), seeds(beta), 12.0, **loose)
    return lab.Outcome(
        findings=[
            order_finding(),
            NONLINEAR.close_to(
                np.asarray(path.moments[-1, [2, 5], 0]), [THIRD, SIXTH], tolerance=1e-10
            ),
            POSITIVE.at_least((smallest / highest).min(), 0.0),
            SPECTRAL.at_least(np.divide(errors[:-1], errors[1:]), 100.0),
            growth_finding(),
            NODES.at_most(abs(carried_third - third), 1e-9),
            tokens_finding(path, clouds),
            energy_finding(),
            take_over_finding(evolution),
            CLUSTERS.close_to(
                # Modes, since a few light tokens are still between the clusters.
                count_modes(evolution.measure(-1), BETA, space=mf.Sphere()).count,
                fastest(BETA),
                tolerance=0,
                source=lab.theory("fastest mode"),
            ),
        ],
        pictures=[
            draw_space_time({BETA: evolution, parameters.steep: steep}),
            draw_snapshots(path, clouds),
        ],
    )


def flow_of(kind: str, beta: float = BETA) -> mf.Flow:
    """The flow on the circle with identity matrices."""
    return mf.Flow(mf.identity_attention(kind, 2, beta), space=mf.Sphere())


def fastest(beta: float) -> int | None:
    """The mode that grows fastest."""
    attention = mf.identity_attention("softmax", 2, beta)
    return mf.mean_field.fastest_degree(attention).degree


def ripple(size: float, degree: int = 3) -> FourierDensity:
    """The uniform density with a cosine added."""
    moments = np.zeros((MODES, 2))
    moments[degree - 1, 0] = size / 2
    return FourierDensity(moments)


def solved(
    kind: str, start: FourierDensity, depth: float = 3.0, *, beta: float = BETA
) -> DensityTrajectory:
    """The tight solution with all modes."""
    solver = Spectral(most_modes=MODES)
    return mf.solve(flow_of(kind, beta), start, depth, solver=solver, **TIGHT)


def seeds(beta: float) -> FourierDensity:
    """Small perturbations of many modes at once, of no symmetry."""
    degrees = np.arange(1, MODES + 1)
    phases = np.cos(1.7 * degrees**2)
    size = 1e-3 * (degrees <= 2 * np.sqrt(2 * beta))
    return FourierDensity(
        size[:, None] * np.stack([np.cos(3 * phases), np.sin(3 * phases)], 1)
    )


def order_finding():
    """The order parameter of Kuramoto's model, from a Poisson kernel."""
    first, depths = 0.3, np.linspace(0, 2, 11)
    powers = first ** np.arange(1, MODES + 1)
    start = FourierDensity(np.stack([powers, 0 * powers], axis=1))
    path = solved("unnormalised", start, 2.0, beta=0.0)
    grown = first**2 * np.exp(depths)
    exact = np.sqrt(grown / (1 + grown - first**2))
    found = np.asarray(path.moments[:, 0, 0])
    return ORDER.close_to([*found, found[-1]], [*exact, KURAMOTO], tolerance=1e-10)


def growth_finding():
    """Rates of small modes over a short depth against closed form and table."""
    found, exact, degrees = np.zeros((2, 5)), np.zeros((2, 5)), np.arange(1, 6)
    for row, (kind, depth) in enumerate((("softmax", 0.5), ("unnormalised", 0.02))):
        exact[row] = degrees**2 * scipy.special.iv(degrees, BETA) / BETA
        exact[row] /= scipy.special.iv(0, BETA) if kind == "softmax" else 1
        for degree in degrees:
            start = ripple(2 * SMALL, degree)
            options = {"save": 2, "solver": Spectral(most_modes=MODES)}
            tight = {"rtol": 1e-12, "atol": 1e-15}
            path = mf.solve(flow_of(kind), start, depth, **options, **tight)
            first, last = np.asarray(path.moments[:, degree - 1, 0])
            found[row, degree - 1] = np.log(last / first) / depth
    scale = RATES.max(axis=1, keepdims=True)
    return GROWTH.close_to(
        found / scale, np.stack([exact, RATES]) / scale, tolerance=1e-8
    )


def tokens_finding(path: DensityTrajectory, clouds: list[mf.Trajectory]):
    """The mean of the samples against the density, in standard errors."""
    exact = np.ravel(path.moments[-1, :SHOWN])
    samples = np.array(
        [np.ravel(circle_moments(one.cloud(-1), SHOWN)) for one in clouds]
    )
    error = samples.std(axis=0, ddof=1) / np.sqrt(len(samples))
    return TOKENS.at_most(np.abs((samples.mean(axis=0) - exact) / error).max(), 6.0)


def energy_finding():
    """The dissipation identity, between moments and velocities."""
    layer = mf.identity_attention("unnormalised", 2, BETA)
    path = solved("unnormalised", ripple(0.1), 0.1)
    weights = scipy.special.iv(np.arange(1, MODES + 1), BETA) / BETA
    errors, energies = [], []
    for index in range(len(path)):
        density = path.density(index)
        energies.append(float(energy(layer, density)))
        growth = 2 * np.sum(weights[:, None] * density.moments * path.rates[index])
        nodes = mf.quadrature(density, 4 * MODES)
        vectors = layer(density, nodes.points)
        speeds = np.linalg.det(np.stack([nodes.points, vectors], axis=1))
        errors.append(abs(growth / np.sum(nodes.weights * speeds**2) - 1))
    return ENERGY.at_most(errors if energies[-1] > energies[0] else np.inf, 1e-10)


def take_over_finding(evolution: Evolution):
    """Moments of tokens against those of a density, soon after tokens took over."""
    later = len(evolution.densities) + 1
    options = {"solver": Spectral(most_modes=1024), "rtol": 1e-9, "atol": 1e-11}
    start, depth = seeds(BETA).resized(1024), float(evolution.depths[later])
    finer = mf.solve(flow_of("softmax"), start, depth, save=2, **options).density(-1)
    return TAKE_OVER.close_to(
        np.ravel(circle_moments(evolution.measure(later), 8)),
        np.ravel(circle_moments(finer, 8)),
        tolerance=1e-6,
    )


def draw_space_time(evolutions: dict[float, Evolution]) -> lab.Picture:
    """Densities over angle and depth, those of the tokens behind the hand-over."""
    figure, panels = style.canvas(2, panel=(4.6, 3.8))
    angles, degrees = 2 * np.pi * np.arange(GRID) / GRID, np.arange(1, MODES + 1)
    # Both kinds of measure are smoothed alike, over a sixtieth of a radian.
    blur = np.exp(-((degrees / 60) ** 2) / 2)[:, None]
    for axes, (beta, path) in zip(panels, evolutions.items(), strict=True):
        measures = [path.measure(index) for index in range(len(path.depths))]
        blurred = [blur * circle_moments(measure, MODES) for measure in measures]
        densities = [on_grid(moments, GRID) for moments in blurred]
        logs = np.log10(np.maximum(densities, 1e-9))
        looks = {"cmap": "viridis", "vmin": -2.5, "vmax": 1, "rasterized": True}
        mesh = axes.pcolormesh(angles, path.depths, logs, shading="nearest", **looks)
        if path.hand_over is not None:
            axes.axhline(float(path.hand_over), color="white", linewidth=1)
        axes.set(xlabel=r"angle $\theta$", ylabel="depth $t$", xlim=(0, 2 * np.pi))
        axes.set_title(rf"$\beta = {beta:g}$, fastest mode: {fastest(beta)}")
        axes.grid(visible=False)
    figure.colorbar(mesh, ax=panels, label=r"$\log_{10}\varrho$")
    return lab.Picture(
        figure,
        "The density of infinitely many tokens under softmax attention, from a "
        "perturbation of one in a thousand of the uniform density. Above the white "
        "line it is too sharp for 256 modes, and weighted tokens go on.",
    )


def draw_snapshots(path: DensityTrajectory, clouds: list[mf.Trajectory]) -> lab.Picture:
    """The density at three depths with a histogram of random tokens."""
    figure, panels = style.canvas(3, panel=(3.3, 2.8), sharey=True)
    angles = np.linspace(0, 2 * np.pi, 400)
    for index, (axes, depth) in enumerate(zip(panels, SHOWN_AT, strict=True)):
        tokens = np.concatenate([np.asarray(one.points[index]) for one in clouds])
        turned = angles_of(tokens) % (2 * np.pi)
        axes.hist(turned, 90, density=True, color=style.GREY, alpha=0.5)
        axes.plot(angles, np.asarray(path.at(depth).density(angles)))
        axes.set(title=f"depth {depth:.2g}", xlabel=r"angle $\theta$")
    panels[0].set(ylabel=r"density $\varrho$")
    return lab.Picture(
        figure,
        r"The density (line) at three depths, $\beta = 5$, and a histogram of "
        f"{len(clouds)} clouds of {clouds[0].points.shape[1]} random tokens (grey).",
    )


experiment = lab.experiment(
    run, "The mean field on the circle, mode by mode", room="mean_field", seconds=25
)
