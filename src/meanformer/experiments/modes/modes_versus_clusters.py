r"""The modes of the density at the start foretell the clusters.

Softmax attention on the circle moves each token up the gradient of the logarithm of
$\sum_j e^{\beta\cos(\theta - \theta_j)}$, the density of the tokens at the bandwidth
$\beta^{-1/2}$. So the first clusters should form at its modes. For uniform tokens their
number tends to $\sqrt{3\beta/2}$; the mode of the uniform density that grows fastest
has the degree $k^* \sim \sqrt{2\beta}$ instead. The flow is run from random starts, the
clusters are counted by single linkage at the angle $\tfrac12\beta^{-1/2}$, and the
three curves compared.
"""

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

BETAS = 9.0, 25.0, 81.0, 16.0, 49.0, 4.0, 121.0, 64.0
DEPTHS = 10.0, 30.0, 100.0


class Parameters(lab.Parameters):
    """Tokens and starts."""

    count: int = lab.setting(200, help="tokens", at_least=20)
    starts: int = lab.setting(12, full=100, help="random starts", at_least=6)
    temperatures: int = lab.setting(
        3, full=8, help=r"values of $\beta$", at_least=3, at_most=8
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
EARLY = lab.observation(
    "modes-foretell",
    "The mean number of clusters at depth $10$ over that of modes of such tokens at "
    "the start lies between $0.8$ and $1.25$.",
    source=lab.theory("each token climbs the density"),
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


@lab.experiment(
    "The modes of the density at the start foretell the clusters",
    room="observables",
    seconds=15,
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Count modes, run the flow, count clusters."""
    betas = sorted(BETAS[: parameters.temperatures])
    starts, counts = range(parameters.starts), []
    for beta in progress.over(betas, 0.8):
        rows = [start_counts(beta, k, parameters) for k in progress.over(starts)]
        counts.append(np.array(rows))
    options = {"space": mf.Sphere(), "key": jr.key(parameters.seed + 1)}
    sampled = [
        sample_modes(parameters.count, beta, parameters.samples, **options)
        for beta in progress.over(betas, 0.2)
    ]
    # Modes at the starts and clusters at the depths, one row for each temperature.
    means = np.array([rows.mean(0) for rows in counts])
    errors = np.array([rows.std(0, ddof=1) for rows in counts]) / len(starts) ** 0.5
    formula = np.array([float(expected_circle_modes(beta)) for beta in betas])
    modes, spread = np.array([(one.mean, one.standard_error) for one in sampled]).T
    degrees = [degree(beta) for beta in betas]
    columns = {"modes, many clouds": modes, "formula": formula, "$k^*$": degrees}
    return lab.Outcome(
        findings=[
            MODES.close_to((modes - formula) / spread, 0.0, tolerance=4.0),
            EARLY.inside(means[:, 1] / modes, 0.8, 1.25),
            OVER.below(means[:, 2], degrees),
            COARSENS.at_most(np.diff(means[:, 1:]), 0.0),
        ],
        pictures=[draw(betas, modes, spread, means, errors)],
        tables=[table(betas, columns, means, errors)],
    )


def degree(beta: float) -> int:
    """The degree that grows fastest about the uniform density."""
    return fastest_degree(mf.identity_attention("softmax", 2, beta)).degree or 0


def start_counts(beta: float, index: int, parameters: Parameters) -> list[int]:
    """Modes at the start and clusters at the depths, for one random start."""
    key = jr.fold_in(jr.key(parameters.seed), index)
    angles = 2 * jnp.pi * jr.uniform(key, (parameters.count,))
    cloud = mf.TokenCloud.from_angles(angles)
    flow = mf.Flow(mf.identity_attention("softmax", 2, beta), space=mf.Sphere())
    path = mf.solve(flow, cloud, DEPTHS[-1], save=jnp.array([0, *DEPTHS]), rtol=1e-6)
    clusters = [
        count_clusters(path.cloud(place), space=mf.Sphere(), beta=beta).count
        for place in range(1, len(DEPTHS) + 1)
    ]
    return [count_modes(cloud, beta, space=mf.Sphere()).count, *map(int, clusters)]


def table(betas, columns, means, errors) -> lab.Table:
    """All numbers with their errors."""
    names = ["modes at the starts", *[f"clusters at depth {t:g}" for t in DEPTHS]]
    for name, mean, error in zip(names, means.T, errors.T, strict=True):
        columns[name] = [f"{a:.2f} ± {b:.2f}" for a, b in zip(mean, error, strict=True)]
    return lab.Table(
        [r"$\beta$", *columns],
        list(zip(betas, *columns.values(), strict=True)),
        "Modes at depth zero, clusters later, fastest degree.",
    )


def draw(betas, modes, spread, means, errors) -> lab.Picture:
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
    counted = {"fmt": "o", "color": style.BLUE, "label": "modes, counted"}
    axes.errorbar(roots, modes, 2 * spread, **counted)
    for k, colour in enumerate((style.ORANGE, style.ROSE, style.VIOLET)):
        label = f"clusters, depth {DEPTHS[k]:g}"
        look = {"fmt": "s--", "linewidth": 1, "color": colour, "label": label}
        places, bars = roots + 0.05 * (k + 0.5), 2 * errors[:, k + 1]
        axes.errorbar(places, means[:, k + 1], bars, **look)
    axes.set(xlabel=r"$\sqrt{\beta}$", ylabel="number", ylim=(0, None))
    axes.legend(loc="upper left")
    return lab.Picture(
        figure,
        r"Uniform tokens on the circle under softmax attention, against "
        r"$\sqrt\beta$. The clusters of depth 10 (orange) are as many as the modes of "
        r"the density at the start (blue); the degree that grows fastest (grey) is an "
        r"overestimate. Bars: two standard errors.",
    )
