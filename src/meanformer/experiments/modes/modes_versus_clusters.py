r"""The modes of the density at the start foretell the clusters.

Softmax attention on the circle moves each token up the gradient of the logarithm of
$\sum_j e^{\beta\cos(\theta - \theta_j)}$, the density of the tokens at the bandwidth
$\beta^{-1/2}$. So the first clusters should form at its modes. For uniform tokens their
number tends to $\sqrt{3\beta/2}$; the mode of the uniform density that grows fastest
has the degree $k^* \sim \sqrt{2\beta}$ instead. The flow is run from random starts, the
clusters are counted by single linkage at the angle $\tfrac12\beta^{-1/2}$, and the
three curves compared.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import jax.random as jr
import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.mean_field import fastest_degree
from meanformer.observables import (
    count_clusters,
    count_modes,
    expected_circle_modes,
    sample_modes,
)
from meanformer.plotting import style

BETAS = 9.0, 25.0, 81.0
DEPTHS = 10.0, 30.0, 100.0
# Means of six starts, each known to about 0.5: modes, and clusters at the depths.
SIX = np.array([[3.3, 4.0, 3.3, 3.0], [5.7, 5.7, 5.3, 5.3], [10.5, 10.8, 9.8, 9.0]])
FASTEST = 4, 7, 13


@dataclass(frozen=True)
class Parameters:
    """Tokens and starts."""

    count: int = lab.setting(200, help="tokens", at_least=20)
    starts: int = lab.setting(12, full=100, help="random starts", at_least=6)
    temperatures: int = lab.setting(
        3, full=8, help=r"values of $\beta$, the three tabulated first", at_least=3
    )
    samples: int = lab.setting(
        60, full=1000, help="clouds whose modes are counted", at_least=50
    )
    seed: int = lab.setting(0, help="seed of the starts", at_least=0)


MODES = lab.observation(
    "modes-formula",
    "The mean number of modes of uniform tokens is "
    r"$\sqrt{\sum k^4 I_k^2/\sum k^2 I_k^2}$, in units of its standard error.",
    source=lab.closed_form(r"$n \to \infty$; four standard errors"),
)
DIGITS = lab.observation(
    "six-starts",
    "Modes at depth $0$ and clusters at depths $10$, $30$ and $100$ are, for "
    r"$\beta = 9, 25, 81$, those of six starts of an independent program.",
    source=lab.tabulated("six starts, known to 0.5; twice that"),
)
EARLY = lab.observation(
    "modes-foretell",
    "The mean number of clusters at depth $10$ over that of modes of such tokens at "
    "the start lies between $0.8$ and $1.25$.",
    source=lab.theory("each token climbs the density"),
)
FASTER = lab.observation(
    "fastest-degree",
    r"The degree that grows fastest is $4$, $7$ and $13$ for $\beta = 9, 25, 81$.",
    source=lab.closed_form(r"the largest $k^2I_k(\beta)$, tabulated"),
)
OVER = lab.observation(
    "fastest-overestimates",
    "At depth $30$ there are fewer clusters than the degree $k^*$ that grows fastest "
    r"about the uniform density, for every $\beta$.",
    source=lab.closed_form(r"$k^*$ maximises $k^2I_k(\beta)$"),
)
COARSENS = lab.observation(
    "clusters-join",
    "From depth $10$ on the mean number of clusters never grows.",
    source=lab.theory("clusters join and do not split"),
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Count modes, run the flow, count clusters."""
    betas = temperatures(parameters.temperatures)
    counts, starts = {}, range(parameters.starts)
    for beta in progress.over(betas, 0.8):
        rows = [start_counts(beta, k, parameters) for k in progress.over(starts)]
        counts[beta] = np.array(rows)
    sampled = [
        sample_modes(
            parameters.count,
            beta,
            parameters.samples,
            space=mf.Sphere(),
            key=jr.key(parameters.seed + 1),
        )
        for beta in progress.over(betas, 0.2)
    ]
    return lab.Outcome(
        findings=findings(betas, counts, sampled),
        pictures=[draw_curves(betas, counts, sampled)],
        tables=[table(betas, counts, sampled)],
    )


def temperatures(count: int) -> list[float]:
    """Inverse temperatures in order, the tabulated ones among them."""
    return sorted([*BETAS, 16.0, 49.0, 4.0, 121.0, 64.0][:count])


def degree(beta: float) -> int:
    """The degree that grows fastest about the uniform density."""
    return fastest_degree(mf.identity_attention("softmax", 2, beta)).degree or 0


def start_counts(beta: float, index: int, parameters: Parameters) -> list[int]:
    """Modes at the start and clusters at the depths, for one random start."""
    key = jr.fold_in(jr.key(parameters.seed), index)
    angles = 2 * jnp.pi * jr.uniform(key, (parameters.count,))
    cloud = mf.TokenCloud.from_angles(angles)
    attention = mf.identity_attention("softmax", 2, beta)
    flow = mf.Flow(attention, space=mf.Sphere())
    path = mf.solve(flow, cloud, DEPTHS[-1], save=jnp.array([0, *DEPTHS]), rtol=1e-6)
    clusters = [
        count_clusters(path.cloud(place), space=mf.Sphere(), beta=beta).count
        for place in range(1, len(DEPTHS) + 1)
    ]
    return [count_modes(cloud, beta, space=mf.Sphere()).count, *map(int, clusters)]


def mean_and_error(counts) -> tuple[np.ndarray, np.ndarray]:
    """Mean over the starts and its standard error, for each column."""
    return counts.mean(0), counts.std(0, ddof=1) / np.sqrt(len(counts))


def findings(betas, counts, sampled):
    """Modes, clusters and degrees against formula and table."""
    means = {beta: mean_and_error(counts[beta])[0] for beta in betas}
    errors = np.array([sample.standard_error for sample in sampled])
    formula = np.array([float(expected_circle_modes(beta)) for beta in betas])
    sample_means = np.array([sample.mean for sample in sampled])
    degrees = np.array([degree(beta) for beta in betas])
    return [
        MODES.close_to((sample_means - formula) / errors, 0.0, tolerance=4.0),
        DIGITS.close_to([means[beta] for beta in BETAS], SIX, tolerance=1.0),
        EARLY.inside([means[beta][1] for beta in betas] / sample_means, 0.8, 1.25),
        FASTER.close_to([degree(beta) for beta in BETAS], FASTEST, tolerance=0.0),
        OVER.below([means[beta][2] for beta in betas], degrees),
        COARSENS.at_most([np.diff(means[beta][1:]) for beta in betas], 0.0),
    ]


def table(betas, counts, sampled) -> lab.Table:
    """All numbers with their errors."""
    rows = []
    for beta, sample in zip(betas, sampled, strict=True):
        means, errors = mean_and_error(counts[beta])
        texts = [f"{a:.2f} ± {b:.2f}" for a, b in zip(means, errors, strict=True)]
        formula = float(expected_circle_modes(beta))
        rows.append([beta, sample.mean, formula, *texts, degree(beta)])
    columns = [r"$\beta$", "modes, many clouds", "formula", "modes at the starts"]
    columns += [f"clusters at depth {depth:g}" for depth in DEPTHS] + ["$k^*$"]
    return lab.Table(
        columns, rows, "Modes at depth zero, clusters later, fastest degree."
    )


def draw_curves(betas, counts, sampled) -> lab.Picture:
    """Modes, clusters and the fastest degree against the root of beta."""
    figure, axes = style.canvas(panel=(6.4, 4.2))
    roots = np.sqrt(betas)
    fine = np.linspace(1.5, 1.05 * roots.max(), 120)
    curve = [float(expected_circle_modes(root**2)) for root in fine[::8]]
    axes.plot(fine[::8], curve, color=style.BLUE, label="modes, formula")
    degrees = [degree(root**2) for root in fine]
    grey = {"color": style.GREY, "linewidth": 1.2}
    axes.step(fine, degrees, where="mid", label="fastest degree $k^*$", **grey)
    axes.plot(fine, np.sqrt(2) * fine, ":", label=r"$\sqrt{2\beta}$", **grey)
    means, bars = zip(*((s.mean, 2 * s.standard_error) for s in sampled), strict=True)
    axes.errorbar(roots, means, bars, fmt="o", color=style.BLUE, label="modes, counted")
    starts = [mean_and_error(counts[beta]) for beta in betas]
    means, errors = np.moveaxis(np.array(starts), 1, 0)
    for place, colour in enumerate((style.ORANGE, style.ROSE, style.VIOLET)):
        axes.errorbar(
            roots + 0.05 * (place + 0.5),
            means[:, place + 1],
            2 * errors[:, place + 1],
            fmt="s--",
            linewidth=1,
            color=colour,
            label=f"clusters, depth {DEPTHS[place]:g}",
        )
    axes.set(xlabel=r"$\sqrt{\beta}$", ylabel="number", ylim=(0, None))
    axes.legend(loc="upper left")
    return lab.Picture(
        figure,
        r"Uniform tokens on the circle under softmax attention, against "
        r"$\sqrt\beta$. The clusters of depth 10 (orange) are as many as the modes of "
        r"the density at the start (blue); the degree that grows fastest (grey) is an "
        r"overestimate. Bars: two standard errors.",
    )


experiment = lab.experiment(
    run,
    "The modes of the density at the start foretell the clusters",
    room="observables",
    seconds=15,
)
