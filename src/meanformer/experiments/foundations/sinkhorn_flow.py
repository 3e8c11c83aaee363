r"""Doubly stochastic attention: an exact mean, a contraction and an energy.

Sinkhorn attention replaces the row-normalised matrix by the entropic transport plan of
the tokens onto themselves. Three things follow. The mean of the tokens obeys
$\dot m = V m$ whatever the tokens are. Sinkhorn's algorithm contracts the oscillation
of its potentials by $\kappa^2 = \tanh^2(\eta/4)$ in each round, where $\eta$ is the
oscillation of the score. And with a symmetric form $B$ and $V = cB$ the flow is the
Wasserstein gradient ascent of $\tfrac c2 E_B$, so the energy never decreases.
"""

from typing import cast

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import scipy.linalg

import meanformer as mf
import meanformer.experiments as lab
from meanformer.numerics.sinkhorn.self_transport import SelfTransport
from meanformer.plotting import draw_curves, draw_paths, style

FORM = ((0.8, 0.3), (0.3, -0.4))


class Parameters(lab.Parameters):
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
    source=lab.closed_form(r"relative error against $e^{tV} m_0$ by SciPy's expm"),
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


@lab.experiment(
    "Doubly stochastic attention conserves, contracts and ascends",
    room="attention",
    seconds=25,
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Solve two flows and watch mean, plan and energy along them."""
    cloud, form = random_cloud(parameters), jnp.array(FORM)
    layer = lab.reference_attention(mf.Sinkhorn)
    ascending = mf.Sinkhorn(form, jnp.eye(2), form, kernel="dot", tolerance=1e-12)
    layers = progress.over([layer, ascending])
    path, ascent = (solve(one, cloud, parameters.depth) for one in layers)
    depths, means = np.asarray(path.depths), np.asarray(path.statistics["mean"])
    exponents = depths[:, None, None] * np.asarray(layer.value)
    exact = scipy.linalg.expm(exponents) @ means[0]
    sizes = np.linalg.norm(exact, axis=1, keepdims=True)
    last = path.cloud(-1)
    columns = last.weights @ mf.attention_matrix(layer, last) / last.weights
    errors, ceiling = contraction()
    profile = mf.observables.energy_profile(mf.Flow(ascending), ascent)
    energy = mf.observables.energy(ascending, lab.reference_cloud())
    return lab.Outcome(
        findings=[
            MEAN.at_most(np.abs(means - exact) / sizes, 0.0, tolerance=1e-6),
            DOUBLY.close_to(columns, 1.0, tolerance=1e-8),
            CONTRACTION.at_most(errors[1:] / errors[:-1], ceiling),
            translation_finding(layer, cloud),
            ENERGY.close_to(energy, maximised_energy(), tolerance=1e-9),
            ASCENT.at_most(profile.worst_violation, 0.0, tolerance=1e-10),
            dissipation_finding(ascending, ascent, profile),
        ],
        pictures=[
            draw_laws(depths, means, exact, errors, ceiling),
            draw_ascent(ascent, profile),
        ],
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


def contraction() -> tuple[np.ndarray, float]:
    """The oscillation of the error after each round, and the ceiling of its ratios."""
    cloud = lab.reference_cloud()
    layer = cast(mf.Sinkhorn, lab.reference_attention(mf.Sinkhorn))
    problem = SelfTransport(cloud.points, cloud.weights, 2 * layer.score, cloud.sums)
    potentials = [problem.row_step(jnp.zeros(cloud.count))]
    for _ in range(100):
        potentials.append(problem.row_step(problem.column_step(potentials[-1])))
    errors = [float(jnp.ptp(f - potentials[-1])) for f in potentials[:9]]
    return np.array(errors), float(layer.contraction_ratio(cloud)) ** 2


def translation_finding(layer, cloud: mf.TokenCloud):
    """The output for shifted tokens against the shifted output."""
    shift = jnp.array([[0.7, -1.3]])
    moved = cloud.moved(cloud.points + shift)
    expected = layer(cloud, cloud.points) + shift @ layer.value.T
    return TRANSLATION.close_to(layer(moved, moved.points), expected, tolerance=1e-8)


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
    middle, step = len(path) // 2, 1e-3
    ends = [solve(layer, path.cloud(middle), sign * step) for sign in (1, -1)]
    ahead, behind = (mf.observables.energy(layer, end.cloud(-1)) for end in ends)
    slope = float(ahead - behind) / (2 * step)
    return DISSIPATION.close_to(profile.rates[middle], slope, relative_tolerance=1e-5)


def draw_laws(depths, means, exact, errors, ceiling: float) -> lab.Picture:
    """The mean along depth, and the contraction of the algorithm."""
    figure, (left, right) = style.canvas(2)
    colours = [style.BLUE, style.ORANGE]
    found = {"$m_1$": means[:, 0], "$m_2$": means[:, 1]}
    draw_curves(depths, found, left, marks="o", colours=colours)
    for colour, line in zip(colours, exact.T, strict=True):
        left.plot(depths, line, color=colour, linewidth=1)
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
