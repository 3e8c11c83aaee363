r"""Energies with a matrix on the sphere: where tokens spread.

Unnormalised attention with $A = D$, $V = -D$, $D$ symmetric, descends
$E_D(\mu) = \iint e^{\langle x, Dy\rangle}\,\mathrm{d}\mu(x)\,\mathrm{d}\mu(y)$. Its
tokens spread, or hide in the kernel of $D$ where there is one. The limit of four tokens
solves an equation; the best density on the circle is the solution of a convex problem,
and is computed with a certificate.
"""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import scipy.optimize
from scipy.special import iv

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers.many_starts import last_points
from meanformer.observables import matrix_energy_flow, optimal_circle_density
from meanformer.plotting import draw_sphere, style

FOUR = (0.5, 1.0, 2.0, 4.0)
# Second moments of the densities at shifts of the second eigenvalue, as published.
MOMENTS = {-0.05: -0.1064632698, 0.05: 0.1016677357, 0.3: 0.5381581302}
SPREAD = {
    r"$I$": (1.0, 1.0, 1.0),
    r"diag$(1, 0.25, 1)$": (1.0, 0.25, 1.0),
    r"diag$(1, 0, 1)$": (1.0, 0.0, 1.0),
    r"diag$(0, 0, 1)$": (0.0, 0.0, 1.0),
}


class Parameters(lab.Parameters):
    """Sizes."""

    nodes: int = lab.setting(300, full=1000, help="nodes on the circle", at_least=100)
    spread: int = lab.setting(100, full=400, help="tokens that spread on the sphere")
    seed: int = lab.setting(5, help="seed of all starts", at_least=0)


FOUR_TOKENS = lab.theorem(
    "four-tokens",
    "Four tokens that descend from a square with $D = $ diag$(1, d)$ end at "
    r"$(\pm\sqrt u, \pm\sqrt{1-u})$ with $\tanh u = d\tanh(d(1-u))$.",
    "BKKRW25, four particles on the circle",
    source=lab.closed_form("the critical point of a convex function of $u$"),
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


@lab.experiment(
    "Descending an energy with a matrix: tokens spread", room="observables", seconds=8
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Descend, and compare with closed forms and published densities."""
    moments = [
        second_moment(shift, parameters.nodes) for shift in progress.over(MOMENTS, 0.3)
    ]
    spread = {
        name: spread_path(diagonal, parameters)
        for name, diagonal in progress.over(SPREAD.items(), 0.6)
    }
    four = [four_tokens(entry) for entry in progress.over(FOUR, 0.1)]
    slope, exact = (moments[1] - moments[0]) / 0.1, iv(1, 1) / (2 * iv(2, 1))
    return lab.Outcome(
        findings=[
            FOUR_TOKENS.close_to(*np.transpose(four), tolerance=1e-6),
            DENSITY.close_to(slope, exact, relative_tolerance=5e-3),
            DENSITY_PUBLISHED.close_to(moments, [*MOMENTS.values()], tolerance=2e-3),
            minimum_finding(spread),
        ],
        pictures=[draw_spread(spread)],
    )


def four_tokens(entry: float) -> tuple[float, float]:
    """The square of the first coordinate at the end, by the flow and the equation."""
    square = np.array([[[1, 1, 0], [-1, 1, 0], [-1, -1, 0], [1, -1, 0]]]) / np.sqrt(2)
    flow = matrix_energy_flow(np.diag([1.0, entry, 0.0]), ascending=False)
    sharp = 1e-7, 1e-9, 1e-8
    (last,) = last_points(flow, jnp.asarray(square), jnp.full(4, 0.25), 200.0, sharp)
    root = scipy.optimize.brentq(
        lambda u: np.tanh(u) - entry * np.tanh(entry * (1 - u)), 0.0, 1.0
    )
    return float(jnp.mean(last[:, 0] ** 2)), float(root)


def second_moment(shift: float, nodes: int) -> float:
    r"""Twice the mean of $\cos 2\theta$ under the optimal density."""
    form = np.diag([1.0, 1.0 + shift])
    found = optimal_circle_density(form, count=nodes, tolerance=1e-7)
    return 2 * float(found.cloud.weights @ jnp.cos(2 * found.angles))


def spread_path(diagonal, parameters: Parameters) -> mf.Trajectory:
    """Tokens that descend on the sphere."""
    key = jr.key(parameters.seed)
    cloud = mf.TokenCloud(mf.UniformSphere(3).sample(parameters.spread, key=key))
    flow = matrix_energy_flow(np.diag(diagonal), ascending=False)
    depths = np.append(0.0, np.geomspace(0.5, 500.0, 30))
    return mf.solve(flow, cloud, depths[-1], save=depths, rtol=1e-5, atol=1e-7)


def minimum_finding(spread):
    """Energies at the end, dense in NumPy, over the least ones."""
    least = {r"$I$": np.sinh(1.0), r"diag$(1, 0, 1)$": 1.0, r"diag$(0, 0, 1)$": 1.0}
    excess = []
    for name, energy in least.items():
        points = np.asarray(spread[name].points[-1])
        excess.append(np.exp(points * SPREAD[name] @ points.T).mean() - energy)
    return MINIMUM.inside(excess, -1e-9, 1e-3)


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
