r"""Energies with a matrix on the sphere: who attracts, who splits, who spreads.

Unnormalised attention with $A = V = \pm D$, $D$ symmetric, climbs or descends
$E_D(\mu) = \iint e^{\langle x, Dy\rangle}\,\mathrm{d}\mu(x)\,\mathrm{d}\mu(y)$. For
positive definite $D$ the largest value $e^{\lambda_1}$ belongs to one point at a
leading eigenvector $\pm v$. But runs of the ascent may end in two clusters, at $v$ and
at $-v$: equal ones resist small perturbations exactly if
$\lambda_1\tanh\lambda_1 > \lambda_2$, which explains the published counts. Minimisers
spread; their density on the circle is the solution of a convex problem, and is computed
with a certificate.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import scipy.optimize
from scipy.special import iv

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers.many_starts import last_points
from meanformer.observables import (
    count_clusters,
    matrix_energy_flow,
    optimal_circle_density,
    stationary_report,
)
from meanformer.plotting import draw_sphere, mark_values, style

ENTRIES = np.linspace(0.0, 1.5, 20)
# Runs of one hundred that ended in one cluster, as published with the code.
PUBLISHED = np.array([0, 1, 0, 1, 2, 2, 5, 8, 16, 50, *[100] * 6, 45, 6, 3, 1])
RELABELLED = 20_000  # draws of a permutation test
SHARP = 1e-7, 1e-9, 1e-8  # tolerances, and the speed of tokens at rest
FOUR = (0.5, 1.0, 2.0, 4.0)
SHIFTS = (-0.05, 0.05, 0.3)
SPREAD = {
    r"$I$": (1.0, 1.0, 1.0),
    r"diag$(1, 0.25, 1)$": (1.0, 0.25, 1.0),
    r"diag$(1, 0, 1)$": (1.0, 0.0, 1.0),
    r"diag$(0, 0, 1)$": (0.0, 0.0, 1.0),
}


@dataclass(frozen=True)
class Parameters:
    """Sizes."""

    tokens: int = lab.setting(100, help="tokens of the runs", at_least=20)
    repeats: int = lab.setting(8, full=100, help="runs for each matrix", at_least=4)
    solid: int = lab.setting(
        4, full=20, help="matrices in dimension 3", at_least=2, at_most=100
    )
    depth: float = lab.setting(150.0, help="depth of the runs at most", at_least=50)
    nodes: int = lab.setting(300, full=1000, help="nodes on the circle", at_least=100)
    spread: int = lab.setting(100, full=400, help="tokens that spread on the sphere")
    seed: int = lab.setting(5, help="seed of all starts", at_least=0)


MAXIMUM = lab.theorem(
    "maximum",
    r"No run of the ascent passes $e^{\lambda_1}$, and those that end in one cluster "
    r"reach it, where other eigenvalues are less than $\lambda_1$ by $0.05$ or more "
    r"so that the cluster turns to $\pm v$ in time: largest difference.",
    "BKKRW25, maximisers for positive definite matrices",
    source=lab.closed_form(r"$e^{\lambda_1}$"),
)
THRESHOLD = lab.observation(
    "split-threshold",
    r"Two equal clusters at $\pm v$ turn stable at "
    r"$\lambda_1\tanh\lambda_1 = \lambda_2$: for diag$(d_1, 1)$ below $d_1 = \tanh 1$ "
    r"and above the root of $d\tanh d = 1$, for diag$(d_1, d_1, 1)$ below $\tanh 1$.",
    source=lab.closed_form(r"$\tanh 1$, and the root of $d\tanh d = 1$"),
)
CURVE = lab.observation(
    "split-curve",
    "The share of runs with $D = $ diag$(d_1, 1)$ that end in one cluster is the "
    "published one for all 20 values of $d_1$: how probable it is that two samples "
    "of the same shares differ as much or more, by sums of squares.",
    "BKKRW25, Figure 2 and its code",
    source=lab.published("100 runs for each matrix, counts stored with the code"),
)
ONE_BETWEEN = lab.observation(
    "one-cluster-between",
    "Between the two thresholds all runs end in one cluster; in dimension 3 with "
    "diag$(d_1, d_1, 1)$ all above the first one.",
    source=lab.theory("the split is unstable"),
)
FOUR_TOKENS = lab.theorem(
    "four-tokens",
    "Four tokens that descend from a square with $D = $ diag$(1, d)$ end at "
    r"$(\pm\sqrt u, \pm\sqrt{1-u})$ with $\tanh u = d\tanh(d(1-u))$.",
    "BKKRW25, four particles on the circle",
)
DENSITY = lab.observation(
    "density-slope",
    r"The optimal density for diag$(1, 1+\varepsilon)$ is "
    r"$\frac{1}{2\pi}(1 + \varepsilon\frac{I_1(1)}{2I_2(1)}\cos "
    r"2\theta)$ to first order: the slope of its second moment.",
    source=lab.closed_form("perturbation of the uniform density"),
)
DENSITY_PUBLISHED = lab.observation(
    "density-published",
    r"Its second moments at $\varepsilon = -0.05, 0.05, 0.3$ are those of the "
    "published densities.",
    "BKKRW25, Figure 5 and its code",
    source=lab.published("densities on 1000 nodes, stored with the code"),
)
MINIMUM = lab.observation(
    "minimum",
    r"Descending tokens on the sphere approach the least energy: $\sinh 1$ of the "
    "uniform law for $D = I$, and $1$ where $D$ has a kernel to hide in.",
    source=lab.closed_form(r"$\sinh 1$ and $1$: differences"),
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Climb and descend, and compare with closed forms and published runs."""
    runs = [split_runs(entry, 2, parameters) for entry in progress.over(ENTRIES, 0.4)]
    entries = np.linspace(0.25, 1.45, parameters.solid)
    solid = [split_runs(entry, 3, parameters) for entry in progress.over(entries, 0.1)]
    densities = [
        optimal_circle_density(
            np.diag([1.0, 1.0 + shift]), count=parameters.nodes, tolerance=1e-7
        )
        for shift in progress.over(SHIFTS, 0.1)
    ]
    spread = {
        name: spread_path(diagonal, parameters)
        for name, diagonal in progress.over(SPREAD.items(), 0.3)
    }
    singles, in_space = share_of_one(runs), share_of_one(solid)
    convex = lab.closed_form("the critical point of a convex function of $u$")
    return lab.Outcome(
        findings=[
            maximum_finding([r for row in (*runs, *solid) for r in row]),
            threshold_finding(),
            *share_findings(singles, entries, in_space, parameters),
            FOUR_TOKENS.close_to(
                [four_tokens(entry) for entry in FOUR],
                [four_by_equation(entry) for entry in FOUR],
                tolerance=1e-6,
                source=convex,
            ),
            *density_findings(densities),
            minimum_finding(spread),
        ],
        pictures=[
            draw_curve(singles, entries, in_space, parameters.repeats),
            draw_spread(spread),
        ],
    )


@dataclass(frozen=True)
class Run:
    """How one run ended: energy less its bound, clusters, and gap of eigenvalues.

    The gap is from the largest eigenvalue to the next other one; infinite without.
    """

    excess: float
    count: int | None
    gap: float


def form_of(entry: float, dimension: int) -> np.ndarray:
    """The matrix of a run; that of the plane acts on a great circle of the sphere."""
    return np.diag([entry, 1.0, 0.0] if dimension == 2 else [entry, entry, 1.0])


def split_runs(entry: float, dimension: int, parameters: Parameters) -> list[Run]:
    """Runs of the ascent from uniform tokens on the circle or sphere."""
    key = jr.fold_in(jr.key(parameters.seed), round(1000 * entry))
    shape = parameters.repeats, parameters.tokens, dimension
    normal = np.asarray(jr.normal(key, shape))
    starts = np.zeros((*shape[:2], 3))
    starts[..., :dimension] = normal / np.linalg.norm(normal, axis=2, keepdims=True)
    flow = matrix_energy_flow(form_of(entry, dimension))
    weights = jnp.full(parameters.tokens, 1 / parameters.tokens)
    ends = last_points(flow, jnp.asarray(starts), weights, parameters.depth, SHARP)
    form = form_of(entry, dimension)[:dimension, :dimension]
    return [run_of(form, points[:, :dimension]) for points in ends]


def energy_of(form: np.ndarray, points) -> float:
    """The energy of equal tokens, dense in NumPy."""
    return float(np.exp(np.asarray(points) @ form @ np.asarray(points).T).mean())


def run_of(form: np.ndarray, points) -> Run:
    """How a run ended."""
    cloud = mf.TokenCloud(points)
    clusters = count_clusters(cloud, space=mf.Sphere(), threshold=0.1)
    values = np.diag(form)
    gaps = values.max() - values
    excess = energy_of(form, points) - np.exp(values.max())
    gap = np.min(gaps[gaps > 0], initial=np.inf)
    return Run(float(excess), clusters.count, float(gap))


def share_of_one(runs) -> np.ndarray:
    """The share of runs that ended in one cluster, for each matrix."""
    return np.array([np.mean([r.count == 1 for r in row]) for row in runs])


def maximum_finding(runs):
    """Energies against their bound, where one cluster was reached."""
    reached = [r.excess for r in runs if r.count == 1 and r.gap > 0.05]
    highest = max(r.excess for r in runs)
    return MAXIMUM.close_to([*reached, max(highest, 0.0)], 0.0, tolerance=1e-10)


def threshold_finding():
    """Bisect for the matrices at which two opposite clusters turn stable."""

    def largest(entry: float, dimension: int) -> float:
        form = form_of(entry, dimension)
        axis = np.eye(3)[[np.diag(form).argmax()]]
        cloud = mf.TokenCloud(np.concatenate([axis, axis, -axis, -axis]))
        return float(stationary_report(matrix_energy_flow(form), cloud).eigenvalues[0])

    found = [
        scipy.optimize.brentq(largest, *ends, args=(dimension,), xtol=1e-10)
        for *ends, dimension in ((0.5, 0.95, 2), (1.05, 1.5, 2), (0.5, 0.95, 3))
    ]
    return THRESHOLD.close_to(found, [*thresholds(), np.tanh(1.0)], tolerance=1e-7)


def thresholds() -> tuple[float, float]:
    """The two values of the entry at which the largest eigenvalue is just enough."""
    upper = scipy.optimize.brentq(lambda d: d * np.tanh(d) - 1, 1.0, 2.0)
    return float(np.tanh(1.0)), float(upper)


def share_findings(singles, entries, in_space, parameters: Parameters):
    """Shares of one cluster as published, and where the split is unstable enough."""
    ours = np.round(singles * parameters.repeats).astype(int)
    low, high = thresholds()
    between = (low + 0.02 < ENTRIES) & (high - 0.02 > ENTRIES)
    return (
        CURVE.at_least(
            same_shares(ours, parameters.repeats, seed=parameters.seed), 1e-3
        ),
        ONE_BETWEEN.close_to(
            [*singles[between], *in_space[entries > low + 0.02]], 1.0, tolerance=0.0
        ),
    )


def same_shares(ours: np.ndarray, repeats: int, *, seed: int) -> float:
    """Probability that relabelled runs differ from the published ones as much or more.

    Given how many of all runs ended in one cluster, those among ours are
    hypergeometric if nothing but chance tells the two apart.
    """
    both = PUBLISHED + ours
    drawn = np.random.default_rng(seed).hypergeometric(
        both, 100 + repeats - both, repeats, size=(RELABELLED, len(both))
    )
    mean = both * repeats / (100 + repeats)
    variance = np.maximum(mean * (1 - both / (100 + repeats)), 1e-9)
    differences = ((np.vstack([ours, drawn]) - mean) ** 2 / variance).sum(axis=1)
    return float(np.mean(differences >= differences[0] * (1 - 1e-9)))


def four_tokens(entry: float) -> float:
    """The square of the first coordinate of tokens that descend from a square."""
    angles = np.pi / 4 + np.pi / 2 * np.arange(4)
    square = np.stack([np.cos(angles), np.sin(angles), 0 * angles], axis=1)
    flow = matrix_energy_flow(np.diag([1.0, entry, 0.0]), ascending=False)
    weights = jnp.full(4, 0.25)
    (last,) = last_points(flow, jnp.asarray(square[None]), weights, 200.0, SHARP)
    return float(jnp.mean(last[:, 0] ** 2))


def four_by_equation(entry: float) -> float:
    """The same by the equation of the critical point."""
    root = scipy.optimize.brentq(
        lambda u: np.tanh(u) - entry * np.tanh(entry * (1 - u)), 0.0, 1.0
    )
    return float(root)


def density_findings(densities):
    r"""Slope and published values of twice the mean of $\cos 2\theta$."""
    moments = [
        2 * float(found.cloud.weights @ jnp.cos(2 * found.angles))
        for found in densities
    ]
    return (
        DENSITY.close_to(
            (moments[1] - moments[0]) / 0.1,
            iv(1, 1) / (2 * iv(2, 1)),
            relative_tolerance=5e-3,
        ),
        DENSITY_PUBLISHED.close_to(
            moments, [-0.1064632698, 0.1016677357, 0.5381581302], tolerance=2e-3
        ),
    )


def spread_path(diagonal, parameters: Parameters) -> mf.Trajectory:
    """Tokens that descend on the sphere."""
    key = jr.key(parameters.seed)
    cloud = mf.TokenCloud(mf.UniformSphere(3).sample(parameters.spread, key=key))
    flow = matrix_energy_flow(np.diag(diagonal), ascending=False)
    depths = np.append(0.0, np.geomspace(0.5, 500.0, 30))
    return mf.solve(flow, cloud, depths[-1], save=depths, rtol=1e-5, atol=1e-7)


def minimum_finding(spread):
    """Energies at the end over the least ones."""
    least = {r"$I$": np.sinh(1.0), r"diag$(1, 0, 1)$": 1.0, r"diag$(0, 0, 1)$": 1.0}
    excess = [
        energy_of(np.diag(SPREAD[name]), spread[name].points[-1]) - energy
        for name, energy in least.items()
    ]
    return MINIMUM.inside(excess, -1e-9, 1e-3)


def draw_curve(singles, entries, in_space, repeats: int) -> lab.Picture:
    """Shares of single clusters, and where the split is stable."""
    figure, axes = style.canvas(panel=(6.4, 3.6))
    low, high = thresholds()
    for ends in ((-0.03, low), (high, 1.53)):
        axes.axvspan(*ends, color=style.ORANGE, alpha=0.12, linewidth=0)
    errors = np.sqrt(np.maximum(singles * (1 - singles), 1 / repeats / 4) / repeats)
    published = "published, 100 runs"
    here = {"fmt": "s", "capsize": 2, "label": f"here, {repeats} runs"}
    axes.plot(ENTRIES, PUBLISHED / 100, "o", color=style.INK, label=published)
    axes.errorbar(ENTRIES, singles, errors, **here)
    axes.plot(entries, in_space, "^", color=style.GREEN, label="dimension 3", zorder=0)
    mark_values([low, high], axes)
    axes.text(low + 0.02, 0.72, r"$\tanh 1$")
    axes.text(high + 0.02, 0.72, r"$d\tanh d = 1$")
    axes.set(xlabel="$d_1$", xlim=(-0.03, 1.53), ylim=(-0.05, 1.08))
    axes.set_ylabel("share of runs with one cluster")
    axes.legend(loc="center left")
    return lab.Picture(
        figure,
        r"Runs of the ascent with $D = $ diag$(d_1, 1)$ from random starts, and in "
        r"dimension 3 with diag$(d_1, d_1, 1)$. Shaded: two equal opposite clusters "
        "are stable in the plane, by the linearised flow; there most runs end in two, "
        "and between the dotted lines all end in one.",
    )


def draw_spread(spread) -> lab.Picture:
    """Where descending tokens go on the sphere."""
    options = {"subplot_kw": {"projection": "3d"}}
    figure, axes = style.canvas(len(spread), panel=(2.4, 2.6), **options)
    for panel, (name, path) in zip(axes, spread.items(), strict=True):
        draw_sphere(path, panel, tail=12, view=(24.0, -35.0))
        panel.set_title(f"$D = $ {name}")
    return lab.Picture(
        figure,
        "Tokens that descend the energy, with their tails: all over the sphere for the "
        "identity, pushed towards the axis of a smaller eigenvalue, and into the "
        "kernel where there is one (two poles, then a great circle).",
    )


experiment = lab.experiment(
    run,
    "Energies with a matrix: one cluster, two, or spread",
    room="observables",
    seconds=15,
)
