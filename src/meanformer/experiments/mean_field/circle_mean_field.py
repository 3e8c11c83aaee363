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

import jax.random as jr
import numpy as np
import scipy.special

import meanformer as mf
import meanformer.experiments as lab
from meanformer.flows import FixedStep, Spectral
from meanformer.mean_field import Evolution, evolve, fastest_degree
from meanformer.measures import FourierDensity, circle_moments
from meanformer.numerics.special.trigonometric import on_grid
from meanformer.observables import count_modes
from meanformer.plotting import style

BETA, MODES = 5.0, 256
GRID = 2 * MODES + 2  # angles of the picture and of a check


class Parameters(lab.Parameters):
    """Sizes of the comparison with tokens, and of the picture."""

    batches: int = lab.setting(100, full=20, help="independent clouds", at_least=10)
    tokens: int = lab.setting(1_000, full=100_000, help="tokens of each", at_least=100)
    steep: float = lab.setting(
        25.0, full=81.0, help=r"$\beta$ of the picture of clusters", at_least=5
    )
    seed: int = lab.setting(0, help="seed of all samples", at_least=0)


ORDER = lab.theorem(
    "order-parameter",
    r"At $\beta = 0$ Poisson kernels remain, $R^2 = R_0^2e^t/(1 + R_0^2(e^t - 1))$.",
    "OA08, the manifold of Poisson kernels is invariant",
    source=lab.closed_form(),
)
GROWTH = lab.theorem(
    "growth",
    r"About the uniform density mode $k$ grows at the rate $k^2I_k(\beta)/\beta$, "
    r"divided by $I_0(\beta)$ for softmax: $k = 1, \dots, 5$, over the largest rate.",
    "BPA25, linear stability of the uniform measure",
    source=lab.closed_form("by SciPy's Bessel functions"),
)
POSITIVE = lab.theorem(
    "positive",
    "The density stays positive: its smallest value along depth, over the largest.",
    "GLPR23, continuity equation",
    source=lab.theory(),
)
SPECTRAL = lab.observation(
    "spectral",
    r"Eight more modes divide the error of $\int\cos3\theta$ at depth $3$ by $100$.",
    source=lab.theory("a smooth solution"),
)
NODES = lab.observation(
    "nodes",
    "Tokens at the midpoints of $96$ equal arcs, carried along, have the same moments.",
    source=lab.other_method("the density, by its modes"),
)
TOKENS = lab.theorem(
    "tokens",
    "Random tokens, $10^5$ or more in all, have these moments up to sampling errors.",
    "GLPR23, mean-field limit on the sphere",
    source=lab.other_method("sixteen moments of the density, in standard errors"),
)
ENERGY = lab.theorem(
    "energy",
    r"Unnormalised attention gains energy by $\int|v|^2\varrho\,\mathrm{d}\theta$.",
    "GLPR23, Wasserstein gradient flow",
    source=lab.theory("relative difference from the derivative in the moments"),
)
TAKE_OVER = lab.observation(
    "take-over",
    "Tokens that take over where $256$ modes no longer resolve the density are right.",
    source=lab.other_method("moments of a density with $1024$ modes, a little later"),
)
CLUSTERS = lab.observation(
    "clusters",
    "From smooth perturbations as many clusters emerge as the fastest mode has waves.",
    "BPA25, meta-stable clusters of nearly uniform starts",
    source=lab.theory("fastest mode"),
)


@lab.experiment(
    "The mean field on the circle, mode by mode", room="mean_field", seconds=25
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Solve for densities, each against something else."""
    flow, start = flow_of("softmax"), ripple(0.1)
    path = solved("softmax", start, 3.0)
    smallest = path.statistics["smallest"] / path.on_grid(GRID).max(axis=1)
    third, errors, samples = float(path.moments[-1, 2, 0]), [], []
    for modes in progress.over((8, 16, 24), 0.2):
        solver = Spectral(most_modes=modes, tail=1.0)
        coarse = solved("softmax", start.resized(modes), 3.0, save=2, solver=solver)
        errors.append(abs(float(coarse.moments[-1, 2, 0]) - third))
    carried = solved("softmax", mf.quadrature(start, 96), 3.0, solver=None, save=2)
    miss = abs(float(circle_moments(carried.cloud(-1), 3)[2, 0]) - third)
    for batch in progress.over(range(parameters.batches), 0.4):
        key = jr.fold_in(jr.key(parameters.seed), batch)
        cloud = mf.TokenCloud(start.resized(3).sample(parameters.tokens, key=key))
        # The error of such steps, 2e-4, is far below that of the sample.
        end = mf.solve(flow, cloud, 3.0, save=2, solver=FixedStep(0.6)).cloud(-1)
        samples.append(np.ravel(circle_moments(end, 8)))
    gaps = np.mean(samples, axis=0) - np.ravel(path.moments[-1, :8])
    deviations = np.std(samples, axis=0, ddof=1) / np.sqrt(len(samples))
    for _ in progress.over(range(1), 0.3):
        evolution = evolve(flow, seeds(BETA), 14.0, save=57)
        loose, beta = {"save": 49, "rtol": 1e-6, "atol": 1e-8}, parameters.steep
        shown = evolve(flow_of("softmax", beta), seeds(beta), 12.0, **loose)
    # Modes, since a few light tokens are still between the clusters.
    clusters = count_modes(evolution.measure(-1), BETA, space=mf.Sphere()).count
    return lab.Outcome(
        findings=[
            order_finding(),
            growth_finding(),
            POSITIVE.at_least(smallest, 0.0),
            SPECTRAL.at_least(np.divide(errors[:-1], errors[1:]), 100.0),
            NODES.at_most(miss, 1e-9),
            TOKENS.at_most(np.abs(gaps / deviations), 6.0),
            energy_finding(),
            take_over_finding(evolution),
            CLUSTERS.close_to(clusters, fastest(BETA), tolerance=0),
        ],
        pictures=[draw_space_time({BETA: evolution, beta: shown})],
    )


def flow_of(kind: str, beta: float = BETA) -> mf.Flow:
    """The flow on the circle with identity matrices."""
    return mf.Flow(mf.identity_attention(kind, 2, beta), space=mf.Sphere())


def fastest(beta: float) -> int | None:
    """The mode that grows fastest."""
    return fastest_degree(mf.identity_attention("softmax", 2, beta)).degree


def ripple(size: float, degree: int = 3) -> FourierDensity:
    """The uniform density with a cosine added."""
    moments = np.zeros((MODES, 2))
    moments[degree - 1, 0] = size / 2
    return FourierDensity(moments)


def solved(kind: str, start, depth: float, *, beta: float = BETA, **options):
    """The tight solution, with all modes unless another solver is given."""
    tight = {"solver": Spectral(most_modes=MODES), "rtol": 1e-12, "atol": 1e-13}
    return mf.solve(flow_of(kind, beta), start, depth, **(tight | options))


def seeds(beta: float) -> FourierDensity:
    """Small perturbations of many modes at once, of no symmetry."""
    degrees = np.arange(1, MODES + 1)
    turns = 3 * np.cos(1.7 * degrees**2)
    size = 1e-3 * (degrees <= 2 * np.sqrt(2 * beta))
    return FourierDensity(size[:, None] * np.stack([np.cos(turns), np.sin(turns)], 1))


def order_finding():
    """The order parameter of Kuramoto's model, from a Poisson kernel."""
    first, powers = 0.3, 0.3 ** np.arange(1, MODES + 1)
    start = FourierDensity(np.stack([powers, 0 * powers], axis=1))
    path = solved("unnormalised", start, 2.0, beta=0.0)
    grown = first**2 * np.exp(np.asarray(path.depths))
    exact = np.sqrt(grown / (1 + grown - first**2))
    return ORDER.close_to(path.moments[:, 0, 0], exact, tolerance=1e-10)


def growth_finding():
    """Rates of small modes over a short depth, against their closed form."""
    found, exact, degrees = np.zeros((2, 5)), np.zeros((2, 5)), np.arange(1, 6)
    for row, (kind, depth) in enumerate((("softmax", 0.5), ("unnormalised", 0.02))):
        exact[row] = degrees**2 * scipy.special.iv(degrees, BETA) / BETA
        exact[row] /= scipy.special.iv(0, BETA) if kind == "softmax" else 1
        for degree in degrees:
            path = solved(kind, ripple(2e-6, degree), depth, save=2, atol=1e-15)
            first, last = np.asarray(path.moments[:, degree - 1, 0])
            found[row, degree - 1] = np.log(last / first) / depth
    scale = exact.max(axis=1, keepdims=True)
    return GROWTH.close_to(found / scale, exact / scale, tolerance=1e-8)


def energy_finding():
    """The dissipation identity, between moments and velocities."""
    layer = mf.identity_attention("unnormalised", 2, BETA)
    path = solved("unnormalised", ripple(0.1), 0.1)
    weights = scipy.special.iv(np.arange(1, MODES + 1), BETA) / BETA
    first, last = (mf.observables.energy(layer, path.density(i)) for i in (0, -1))
    errors = []
    for index in range(len(path)):
        density = path.density(index)
        growth = 2 * np.sum(weights[:, None] * density.moments * path.rates[index])
        nodes = mf.quadrature(density, 4 * MODES)
        vectors = layer(density, nodes.points)
        speeds = np.linalg.det(np.stack([nodes.points, vectors], axis=1))
        errors.append(abs(growth / np.sum(nodes.weights * speeds**2) - 1))
    return ENERGY.at_most(errors if last > first else np.inf, 1e-10)


def take_over_finding(evolution: Evolution):
    """Moments of tokens against those of a density, soon after tokens took over."""
    later, solver = len(evolution.densities) + 1, Spectral(most_modes=1024)
    options = {"solver": solver, "save": 2, "rtol": 1e-9, "atol": 1e-11}
    start, depth = seeds(BETA).resized(1024), float(evolution.depths[later])
    finer = solved("softmax", start, depth, **options).density(-1)
    tokens = circle_moments(evolution.measure(later), 8)
    return TAKE_OVER.close_to(tokens, circle_moments(finer, 8), tolerance=1e-6)


def draw_space_time(evolutions: dict[float, Evolution]) -> lab.Picture:
    """Densities over angle and depth, those of the tokens behind the hand-over."""
    figure, panels = style.canvas(2, panel=(4.6, 3.8))
    angles, degrees = 2 * np.pi * np.arange(GRID) / GRID, np.arange(1, MODES + 1)
    # Both kinds of measure are smoothed alike, over a sixtieth of a radian.
    blur = np.exp(-((degrees / 60) ** 2) / 2)[:, None]
    for axes, (beta, path) in zip(panels, evolutions.items(), strict=True):
        measures = [path.measure(index) for index in range(len(path.depths))]
        blurred = [on_grid(blur * circle_moments(one, MODES), GRID) for one in measures]
        logs = np.log10(np.maximum(blurred, 1e-9))
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
