r"""The uniform measure is unstable: which modes grow, how fast, how many clusters.

On the sphere $\mathbb{S}^{d-1}$ a uniform cloud of tokens does not move, but a small
wave of degree $l$ on it grows, under softmax attention at the rate
$\lambda_l = l(l+d-2)\,\frac{\kappa_l}{\beta\kappa_0}$ with
$\kappa_l \propto \beta^{1-d/2}I_{l+d/2-1}(\beta)$, and under unnormalised attention at
$\kappa_0$ times it. The fastest wave $k^* \approx \sqrt{2\beta}$ of the circle sets the
number of clusters that emerge from a small smooth perturbation; random tokens excite
all waves at once by $n^{-1/2}$, and make fewer. The rates are compared with integrals
of Funk and Hecke, with the derivative of the velocity of weighted nodes, with flows of
small waves, and with many random tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

import meanformer as mf
import meanformer.experiments as lab
from meanformer.geometry.circle import angles_of
from meanformer.mean_field import Axisymmetric, circle_nodes, growth_rates, ring_nodes
from meanformer.measures import circle_moments
from meanformer.numerics.special.zonal import zonal_polynomials
from meanformer.plotting import draw_angles, mark_values, style

BETA, MODES = 5.0, np.arange(1, 6)
TOKENS = 192  # of all walks on the circle: one program for all
LAST, COUNTED = 40.0, (5.0, 9.0, 25.0)
# Dimensions and temperatures of the integrals; attentions that are linearised.
CASES = [(d, beta) for d in (2, 3, 8, 128) for beta in (1.0, 5.0, 25.0)]
LINEAR = [("softmax", 3), ("unnormalised", 8)]


class Parameters(lab.Parameters):
    """How many tokens, how often."""

    tokens: int = lab.setting(10_000, full=100_000, help="random tokens", at_least=2000)
    repeats: int = lab.setting(3, full=12, help="clouds of random tokens", at_least=2)
    starts: int = lab.setting(3, full=20, help="random starts to count", at_least=1)
    seed: int = lab.setting(0, help="seed of all random tokens", at_least=0)


INTEGRALS = lab.theorem(
    "funk-hecke",
    r"The closed rates are those of integrals of $e^{\beta z}P_l(z)$ over the sphere.",
    "BPA25, linearisation around the uniform measure",
    source=lab.other_method(r"a Gauss rule, $d = 2$ to $128$, $\beta = 1$ to $25$"),
)
LINEARISED = lab.theorem(
    "linearised",
    "The derivative of the velocity of weighted rings, at the uniform measure in the "
    r"direction of $P_l$, is $\lambda_l P_l$.",
    "BPA25, linearisation around the uniform measure",
    source=lab.closed_form(
        "softmax in $d = 3$, unnormalised in $d = 8$, $l = 1, 2, 3$"
    ),
)
GROWN = lab.observation(
    "flow",
    r"Small waves of weighted nodes have grown by $e^{\lambda_k}$ at depth $1$.",
    source=lab.closed_form("of the rates"),
)
ROOT = lab.observation(
    "square-root",
    r"The fastest wave of the circle is at most $1$ away from $\sqrt{2\beta}$.",
    source=lab.theory(r"the maximum of $k^2e^{-k^2/2\beta}$; $\beta = 1$ to $10^6$"),
)
PARTICLES = lab.observation(
    "particles",
    "In clouds of random tokens waves of $1$ to $5$ periods grow at the closed rates.",
    source=lab.closed_form("largest difference, in standard errors"),
)
CLUSTERS = lab.observation(
    "clusters",
    "From $10^{-6}$ of all waves as many clusters emerge as the fastest has periods.",
    "BPA25, structure of the metastable manifold",
    source=lab.closed_form(r"$k^*$, the fastest wave"),
)
FEWER = lab.observation(
    "random-starts",
    "From random tokens there are no more than that at depth $40$, on average.",
    source=lab.closed_form(r"$k^*$, the fastest wave"),
)


@lab.experiment(
    "Waves on the uniform measure have closed rates", room="mean_field", seconds=30
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Rates by five methods, then clusters from smooth and from random starts."""
    integrals = [integral_rates(d, b) for d, b in progress.over(CASES, 0.1)]
    linear = [linear_rates(*case) for case in progress.over(LINEAR, 0.2)]
    grown, growth = grown_rates(), particle_growth(parameters, progress)
    found, counts, predicted = [], [], []
    for beta in progress.over(COUNTED, 0.5):
        most = int(2 * np.sqrt(2 * beta)) + 1
        smooth = walk(wavy(most, 1e-6 / most), beta, LAST)
        random = np.random.default_rng([parameters.seed, int(beta)])
        angles = random.uniform(0, 2 * np.pi, (parameters.starts, TOKENS))
        chance = [walk(mf.TokenCloud.from_angles(one), beta, LAST) for one in angles]
        found.append(clusters(smooth, beta))
        counts.append(np.mean([clusters(one, beta) for one in chance]))
        predicted.append(closed(range(1, 31), beta=beta).argmax() + 1)
    of_spheres = [closed(range(1, 7), beta=b, dimension=d) for d, b in CASES]
    of_rings = [closed([1, 2, 3], kind=kind, dimension=d) for kind, d in LINEAR]
    betas = np.geomspace(1, 1e6, 25)
    tops = [closed(range(1, 1601), beta=beta).argmax() + 1 for beta in betas]
    return lab.Outcome(
        findings=[
            INTEGRALS.close_to(of_spheres, integrals, tolerance=1e-9),
            LINEARISED.close_to(linear, of_rings, relative_tolerance=1e-8),
            GROWN.close_to(grown, closed(MODES), tolerance=1e-8),
            ROOT.at_most(np.abs(tops - np.sqrt(2 * betas)), 1.0),
            PARTICLES.at_most(np.abs(growth[0] - closed(MODES)) / growth[1], 5.0),
            CLUSTERS.close_to(found, predicted, tolerance=0),
            FEWER.at_most(np.subtract(counts, predicted), 0.0),
        ],
        pictures=[draw_rates(grown, growth), draw_walks(smooth, chance[0])],
    )


def closed(degrees, *, beta=BETA, kind="softmax", dimension=2) -> np.ndarray:
    """The closed growth rates."""
    layer = mf.identity_attention(kind, 2, float(beta))
    return np.asarray(growth_rates(layer, degrees, dimension=dimension))


def integral_rates(dimension: int, beta: float) -> np.ndarray:
    """Rates of degrees 1 to 6 from integrals over the angle to the axis."""
    nodes, masses = np.polynomial.legendre.leggauss(160)
    angles, degrees = np.pi * (nodes + 1) / 2, np.arange(7)
    kernel = np.exp(beta * (np.cos(angles) - 1)) * np.sin(angles) ** (dimension - 2)
    powers = (dimension - 3) / 2, (dimension - 3) / 2
    heights = np.append(np.cos(angles), 1.0)
    waves = scipy.special.eval_jacobi(degrees[:, None], *powers, heights)
    factors = (waves[:, :-1] / waves[:, -1:]) @ (masses * kernel)
    return (degrees * (degrees + dimension - 2) * factors / (beta * factors[0]))[1:]


def linear_rates(kind: str, dimension: int) -> np.ndarray:
    """Rates of degrees 1 to 3 from the derivative of the velocity in the weights."""
    layer = Axisymmetric(mf.identity_attention(kind, 2, BETA), dimension)
    uniform = ring_nodes(jnp.ones_like, 40, dimension=dimension)
    points, masses = uniform.points, uniform.weights
    field = mf.Flow(layer, space=mf.Sphere()).field

    def waves(heights):
        return zonal_polynomials(dimension, heights, 4)[1:]

    def velocity(weights):
        return field(jnp.zeros(()), mf.TokenCloud(points, weights), points)[:, 1]

    heights = points[:, 1]
    table, slopes = jax.jvp(waves, (heights,), (jnp.ones_like(heights),))
    _, push = jax.linearize(jax.jit(velocity), masses)
    pushed = jnp.stack([push(masses * wave) for wave in table])
    return np.asarray((slopes * pushed) @ masses / (table**2 @ masses))


def walk(cloud: mf.TokenCloud, beta: float, depth: float) -> mf.Trajectory:
    """The flow of tokens on the circle."""
    flow = mf.Flow(mf.identity_attention("softmax", 2, beta), space=mf.Sphere())
    return mf.solve(flow, cloud, depth, save=33, rtol=1e-10, atol=1e-13)


def wavy(most: int, size: float) -> mf.TokenCloud:
    """Weighted nodes of the uniform density plus all waves up to so many periods."""
    k = jnp.arange(1.0, most + 1)
    return circle_nodes(lambda a: 1 + size * jnp.cos(jnp.outer(k, a)).sum(0), TOKENS)


def grown_rates() -> np.ndarray:
    """Rates from flows of small waves, all modes at once, with two sizes."""

    def grown(size):
        path = walk(wavy(MODES[-1], size), BETA, 1.0)
        return np.asarray(circle_moments(path.cloud(-1), MODES[-1]))[:, 0]

    # Odd parts have no even orders; Richardson takes the third order away.
    coarse, fine = ((grown(e) - grown(-e)) / e for e in (2e-3, 1e-3))
    return np.log((4 * fine - coarse) / 3)


def particle_growth(parameters: Parameters, progress) -> tuple[np.ndarray, np.ndarray]:
    """Rates of the waves that chance has put into clouds, and their errors."""
    flow = mf.Flow(mf.identity_attention("softmax", 2, BETA), space=mf.Sphere())
    random, series = np.random.default_rng(parameters.seed), []
    for _ in progress.over(range(parameters.repeats), 0.2):
        angles = random.uniform(0, 2 * np.pi, parameters.tokens)
        cloud = mf.TokenCloud.from_angles(angles)
        path = mf.solve(flow, cloud, 1.0, save=3, solver=mf.FixedStep(0.5))
        phases = angles_of(np.asarray(path.points[::2]))
        series.append([np.exp(1j * k * phases).mean(axis=1) for k in MODES])
    start, end = np.moveaxis(np.array(series), 2, 0)
    # The part in phase with the start, weighted by it, so that no start is too small.
    sizes = np.linalg.norm(start, axis=0)
    gains = np.real(end * np.conj(start)).sum(axis=0) / sizes**2
    # What the gains leave unexplained, in any phase: waves act on each other.
    scatter = np.linalg.norm(end - gains * start, axis=0) / np.sqrt(2 * len(start) - 1)
    return np.log(gains), scatter / (sizes * gains)


def clusters(path: mf.Trajectory, beta: float) -> int:
    """How many groups of tokens there are at the end."""
    found = mf.observables.count_clusters(path.cloud(-1), space=mf.Sphere(), beta=beta)
    return found.count or 0


def draw_rates(grown, growth) -> lab.Picture:
    """Growth rates against the number of periods."""
    figure, axes = style.canvas(panel=(5.6, 3.8))
    degrees = np.arange(1, 31)
    for beta in (1.0, 5.0, 9.0, 25.0, 81.0):
        rates = closed(degrees, beta=beta)
        looks = {"marker": "o", "markersize": 6, "markevery": [rates.argmax()]}
        axes.plot(degrees, rates, label=rf"$\beta = {beta:g}$", **looks)
    ink, name = {"color": style.INK, "markersize": 5}, r"random tokens, $\beta = 5$"
    axes.errorbar(MODES, *growth, fmt="s", capsize=2.5, label=name, **ink)
    axes.plot(MODES, grown, "x", label=r"weighted nodes, $\beta = 5$", **ink)
    mark_values(2 / np.e, axes, axis="y")
    axes.text(29.5, 2 / np.e + 0.012, r"$2/e$", ha="right")
    axes.set(xlabel="periods $k$", ylabel=r"growth rate $\lambda_k$", ylim=(0, 0.82))
    axes.legend(loc="upper right", bbox_to_anchor=(1.0, 0.88))
    return lab.Picture(
        figure,
        "Growth rates of waves on the uniform circle under softmax attention; discs "
        "mark the fastest. The lower the temperature, the flatter the top.",
    )


def draw_walks(smooth: mf.Trajectory, chance: mf.Trajectory) -> lab.Picture:
    """Angles of tokens along depth, from a smooth and from a random start."""
    figure, panels = style.canvas(2, panel=(4.2, 3.4), sharey=True)
    titles = (r"$10^{-6}$ of all waves in phase", "random tokens")
    for axes, path, title in zip(panels, (smooth, chance), titles, strict=True):
        draw_angles(path, axes)
        axes.set(title=f"{title}: {clusters(path, COUNTED[-1])} clusters")
    panels[1].set(ylabel="")
    return lab.Picture(
        figure,
        r"192 tokens on the circle at $\beta = 25$, where the fastest wave has seven "
        "periods. From a tiny smooth perturbation it wins, and seven clusters emerge "
        "(left); random tokens gather at once, where chance has put more (right).",
    )
