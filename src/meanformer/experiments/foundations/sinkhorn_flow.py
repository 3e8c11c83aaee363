r"""Doubly stochastic attention: an exact mean, a contraction and an energy.

Sinkhorn attention replaces the row-normalised matrix by the entropic transport plan of
the tokens onto themselves. Three things follow. The mean of the tokens obeys
$\dot m = V m$ whatever the tokens are. Sinkhorn's algorithm contracts the oscillation
of its potentials by $\kappa^2 = \tanh^2(\eta/4)$ in each round, where $\eta$ is the
oscillation of the score. And with a symmetric form $B$ and $V = cB$ the flow is the
Wasserstein gradient ascent of $\tfrac c2 E_B$, so the energy never decreases.
"""

from dataclasses import dataclass
from typing import cast

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import scipy.linalg

import meanformer as mf
import meanformer.experiments as lab
from meanformer.numerics.sinkhorn.algorithm import alternate
from meanformer.numerics.sinkhorn.self_transport import SelfTransport
from meanformer.plotting import draw_curves, draw_paths, style

FORM = ((0.8, 0.3), (0.3, -0.4))


@dataclass(frozen=True)
class Parameters:
    """Sizes and depth of the flows."""

    count: int = lab.setting(
        24, full=256, help="tokens of the random cloud, $n$", at_least=2
    )
    depth: float = lab.setting(2.0, full=5.0, help="depth of the flows", above=0)
    seed: int = lab.setting(3, help="seed of the random cloud", at_least=0)


MEAN = lab.theorem(
    "mean",
    r"Along the flow the mean is $e^{tV} m_0$, whatever $Q$, $K$ and $\mu_0$.",
    "SABP22, marginals of the plan; CACP25",
)
DOUBLY = lab.theorem(
    "doubly-stochastic",
    "Columns of the plan's density have mean one: "
    r"$\int k(x,y)\,\mathrm{d}\mu(x) = 1$.",
    "SABP22, limit of Sinkhorn's algorithm",
    source=lab.theory(),
)
CONTRACTION = lab.theorem(
    "contraction",
    r"Each round of Sinkhorn's algorithm shrinks the oscillation of $f - f_\infty$ by "
    r"the factor $\kappa^2 = \tanh^2(\eta/4)$ or better.",
    "FL89, contraction in Hilbert's metric",
    source=lab.closed_form(r"$\tanh^2(\eta/4)$"),
)
TRANSLATION = lab.observation(
    "translation",
    "Shifting all tokens by $c$ shifts the output by $Vc$.",
    source=lab.other_method("the output for the tokens in place, plus $Vc$"),
)
ENERGY = lab.observation(
    "energy",
    "The entropic energy of the reference tokens under "
    r"$B = \left(\begin{smallmatrix}0.8 & 0.3\\ 0.3 & "
    r"-0.4\end{smallmatrix}\right)$ is $E_B = \max_\pi \int y^\top B x\,\mathrm{d}\pi "
    r"- \mathrm{KL}(\pi|\mu\otimes\mu)$.",
    source=lab.other_method("the dense plan, scaled by Sinkhorn's algorithm in NumPy"),
)
ASCENT = lab.theorem(
    "ascent",
    "With $B$ symmetric and $V = B$ the energy $E_B$ never decreases.",
    "SABP22, gradient flow interpretation",
    source=lab.theory("largest decrease between two saved depths"),
)
DISSIPATION = lab.theorem(
    "dissipation",
    r"It grows at the rate $2\int |\Gamma|^2\,\mathrm{d}\mu$ exactly.",
    "SABP22, gradient flow interpretation",
    source=lab.other_method("central difference of the energy along the flow"),
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Solve two flows and watch mean, plan and energy along them."""
    cloud = random_cloud(parameters)
    layer = ascending_layer()
    mean_path, ascent = (
        solve(one, cloud, parameters.depth)
        for one in progress.over([lab.reference_attention(mf.Sinkhorn), layer])
    )
    ratios, ceiling, errors = contraction()
    profile = mf.observables.energy_profile(mf.Flow(layer), ascent)
    return lab.Outcome(
        findings=[
            mean_finding(mean_path),
            doubly_finding(mean_path),
            CONTRACTION.at_most(ratios, ceiling),
            translation_finding(cloud),
            energy_finding(),
            ASCENT.at_most(float(profile.worst_violation), 0.0, tolerance=1e-10),
            dissipation_finding(layer, ascent, profile),
        ],
        pictures=[draw_laws(mean_path, errors, ceiling), draw_ascent(ascent, profile)],
    )


def random_cloud(parameters: Parameters) -> mf.TokenCloud:
    """Random tokens with random weights."""
    key_points, key_weights = jr.split(jr.key(parameters.seed))
    centre = jnp.array([[0.5, 0.2]])
    points = centre + 0.8 * jr.normal(key_points, (parameters.count, 2))
    weights = jr.uniform(key_weights, (parameters.count,), minval=0.2)
    return mf.TokenCloud(points, weights, normalize=True)


def solve(layer, cloud: mf.TokenCloud, depth: float) -> mf.Trajectory:
    """The flow of a layer, saved at 21 depths."""
    return mf.solve(mf.Flow(layer), cloud, depth, save=21, rtol=1e-8, atol=1e-10)


def ascending_layer() -> mf.Sinkhorn:
    r"""The layer with $B$ symmetric and $V = B$: $Q = B$, $K = I$, dot product."""
    form = jnp.array(FORM)
    return mf.Sinkhorn(form, jnp.eye(2), form, kernel="dot", tolerance=1e-12)


def exact_means(path: mf.Trajectory) -> np.ndarray:
    """The exponential of the value matrix on the mean at the start, by SciPy."""
    value, depths = np.asarray(lab.reference_attention().value), path.depths[:, None]
    powers = scipy.linalg.expm(np.asarray(depths[..., None]) * value)
    return powers @ np.asarray(path.statistics["mean"][0])


def mean_finding(path: mf.Trajectory):
    """The mean along the flow against the exponential of the value matrix."""
    means, exact = path.statistics["mean"], exact_means(path)
    source = lab.closed_form(r"relative error against $e^{tV} m_0$ by SciPy's expm")
    sizes = np.linalg.norm(exact, axis=1, keepdims=True)
    errors = np.abs(np.asarray(means) - exact) / sizes
    return MEAN.at_most(errors, 0.0, tolerance=1e-6, source=source)


def doubly_finding(path: mf.Trajectory):
    """Column sums of the dense plan at the last depth."""
    cloud = path.cloud(-1)
    matrix = mf.attention_matrix(lab.reference_attention(mf.Sinkhorn), cloud)
    columns = np.asarray(cloud.weights @ matrix / cloud.weights)
    return DOUBLY.close_to(columns, 1.0, tolerance=1e-8)


def contraction() -> tuple[np.ndarray, float, np.ndarray]:
    """Ratios of the oscillation per round, their ceiling, and the errors themselves."""
    cloud = lab.reference_cloud()
    layer = cast(mf.Sinkhorn, lab.reference_attention(mf.Sinkhorn))
    problem = SelfTransport(cloud.points, cloud.weights, 2 * layer.score, cloud.sums)
    limit = alternate(problem, jnp.zeros(cloud.count), half_steps=401).f
    g, errors = jnp.zeros(cloud.count), []
    for _ in range(9):
        f = problem.row_step(g)
        errors.append(float(jnp.ptp(f - limit)))
        g = problem.column_step(f)
    ceiling = float(layer.contraction_ratio(cloud)) ** 2
    return np.array(errors[1:]) / np.array(errors[:-1]), ceiling, np.array(errors)


def translation_finding(cloud: mf.TokenCloud):
    """The output for shifted tokens against the shifted output."""
    layer, shift = lab.reference_attention(mf.Sinkhorn), jnp.array([0.7, -1.3])
    moved = cloud.moved(cloud.points + shift[None])
    measured = layer(moved, moved.points)
    expected = layer(cloud, cloud.points) + (layer.value @ shift)[None]
    return TRANSLATION.close_to(
        np.asarray(measured), np.asarray(expected), tolerance=1e-8
    )


def energy_finding():
    """The energy against a direct maximisation over plans."""
    energy = mf.observables.energy(ascending_layer(), lab.reference_cloud())
    return ENERGY.close_to(float(energy), maximised_energy(), tolerance=1e-9)


def maximised_energy() -> float:
    """The energy of the optimal plan, from the plan itself."""
    cloud = lab.reference_cloud()
    points, weights = np.asarray(cloud.points), np.asarray(cloud.weights)
    scores = points @ np.array(FORM) @ points.T
    rows, columns = np.ones(4), np.ones(4)
    for _ in range(5000):
        rows = 1 / (np.exp(scores) @ (columns * weights))
        columns = 1 / (np.exp(scores).T @ (rows * weights))
    density = rows[:, None] * np.exp(scores) * columns[None, :]
    plan = weights[:, None] * density * weights[None, :]
    return float((plan * scores).sum() - (plan * np.log(density)).sum())


def dissipation_finding(layer, path: mf.Trajectory, profile):
    """The identity for the rate against differences of the energy in depth."""
    cloud, step = path.cloud(len(path) // 2), 1e-3
    ahead, behind = (solve(layer, cloud, sign * step) for sign in (1, -1))
    energies = [mf.observables.energy(layer, end.cloud(-1)) for end in (ahead, behind)]
    slope = float(energies[0] - energies[1]) / (2 * step)
    rate = float(profile.rates[len(path) // 2])
    return DISSIPATION.close_to(rate, slope, relative_tolerance=1e-5)


def draw_laws(path: mf.Trajectory, errors: np.ndarray, ceiling: float) -> lab.Picture:
    """The mean along depth, and the contraction of the algorithm."""
    figure, (left, right) = style.canvas(2)
    means, colours = path.statistics["mean"], [style.BLUE, style.ORANGE]
    found = {"$m_1$": means[:, 0], "$m_2$": means[:, 1]}
    draw_curves(path.depths, found, left, marks="o", colours=colours)
    for colour, exact in zip(colours, exact_means(path).T, strict=True):
        left.plot(path.depths, exact, color=colour, linewidth=1)
    left.set(xlabel="depth $t$", ylabel="mean of the tokens", title="the mean is exact")
    rounds = np.arange(len(errors))
    curves = {"observed": errors, r"bound $\kappa^{2r}$": errors[0] * ceiling**rounds}
    draw_curves(rounds, curves, right, marks=("o-", "--"), yscale="log")
    right.set(xlabel="round $r$", ylabel=r"oscillation of $f - f_\infty$")
    right.set_title("the algorithm contracts")
    return lab.Picture(
        figure,
        "Left: mean of the tokens along the flow (dots) and $e^{tV}m_0$ (lines). "
        "Right: error of the potential after each round of Sinkhorn's algorithm on "
        "the reference tokens, with the bound of Birkhoff's theorem.",
    )


def draw_ascent(path: mf.Trajectory, profile) -> lab.Picture:
    """The tokens of the gradient flow, and its energy."""
    figure, (left, right) = style.canvas(2)
    draw_paths(path, left)
    right.plot(profile.depths, profile.energies, "o-", label="$E_B$")
    right.set(xlabel="depth $t$", ylabel=r"energy $E_B(\mu_t)$")
    right.set_title("gradient ascent")
    return lab.Picture(
        figure,
        "The flow with $V = B$ symmetric, of signature $(1, 1)$: tokens spread along "
        "one eigenvector and gather along the other (left), while the entropic energy "
        "grows (right).",
    )


experiment = lab.experiment(
    run,
    "Doubly stochastic attention conserves, contracts and ascends",
    room="attention",
    seconds=25,
)
