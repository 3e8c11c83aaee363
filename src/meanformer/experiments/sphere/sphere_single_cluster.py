r"""All tokens on the sphere merge into one cluster.

Softmax attention (SA) and unnormalised attention (USA) with identity matrices,
projected on the unit sphere, climb the energy
$E_\beta = \frac{1}{2\beta}\iint e^{\beta\langle x, y\rangle}$, whose largest value
$e^\beta/2\beta$ belongs to a single point. In dimension 3 and more almost every start
ends there at every $\beta \ge 0$; on the circle at every $\beta \ge -0.16$, but not
below $-2/3$, where a triangle resists. From a hemisphere the approach is exponential.
At $\beta = 0$ this is the model of Kuramoto, which can be solved. Opposite tokens rest,
and the Hessian says that they are a saddle, without waiting for rounding to leave it.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import scipy.optimize

import meanformer as mf
import meanformer.experiments as lab
from meanformer.observables import (
    count_clusters,
    energy_profile,
    order_parameter,
    stationary_report,
)
from meanformer.plotting import SphereFrames, draw_sphere, style

KINDS = {"SA": mf.Softmax, "USA": mf.Unnormalised}
BETAS = (0.5, 1.0, 2.0)
COLD = 9.0
CIRCLE = (-0.15, 0.0, 1.0, 2.0)
SAVED = 61
LONG = {"SA": 200.0, "USA": 1500.0}  # in units of the rate at the end
TRIANGLE = -2 / 3  # below this inverse temperature three equal gaps are stable


@dataclass(frozen=True)
class Parameters:
    """Sizes."""

    tokens: int = lab.setting(32, full=64, help="tokens on the sphere", at_least=16)
    starts: int = lab.setting(
        4, full=64, help="random starts for each temperature and flow", at_least=2
    )
    depth: float = lab.setting(
        15.0, help="depth of the pictures", at_least=10, at_most=40
    )
    seed: int = lab.setting(3, help="seed of all starts", at_least=0)
    movie: lab.Movies = lab.movie_setting()


SINGLE = lab.theorem(
    "single-cluster",
    "In dimension 3 all starts end in one cluster, for SA and USA at "
    r"$\beta = 0.5, 1, 2$: the smallest inner product tends to 1.",
    "GLPR23, single cluster for almost every start; CRMB24, dimension three and more",
)
CIRCLE_SINGLE = lab.theorem(
    "circle",
    r"So do they on the circle, at $\beta = -0.15, 0, 1, 2$.",
    "PRY25, synchronisation for inverse temperatures of -0.16 and more",
)
TRIANGLE_TURNS = lab.theorem(
    "triangle",
    r"Three tokens at equal angles turn from unstable to stable as $\beta$ falls "
    "below $-2/3$, so that not all starts end in one cluster there.",
    "PRY25, no synchronisation below -2/3",
    source=lab.closed_form(r"$\cos\frac{2\pi}3 = \beta\sin^2\frac{2\pi}3$"),
)
RISES = lab.theorem(
    "energy-rises",
    "The energy never falls along SA and USA.",
    "GLPR23, the energy is a Lyapunov function of both sphere flows",
    source=lab.theory("relative falls"),
)
BOUND = lab.theorem(
    "energy-bound",
    r"It reaches $e^\beta/2\beta$, the energy of one cluster.",
    "GLPR23, the maximisers of the energy are single points",
    source=lab.closed_form(r"$e^\beta/2\beta$"),
)
DISSIPATION = lab.theorem(
    "dissipation",
    r"$\dot E = \sum_i w_i|\dot x_i|^2$ for USA, and $\sum_i w_iZ_i|\dot x_i|^2$ for "
    r"SA, with the masses $Z_i = \sum_j w_je^{\beta\langle x_i, x_j\rangle}$.",
    "GLPR23, gradient structure of both sphere flows",
    source=lab.other_method("differences of the energy, dense in NumPy"),
)
HEMISPHERE = lab.theorem(
    "hemisphere-rate",
    r"From a hemisphere $1 - \langle x_i, x_j\rangle$ decays like $e^{-2t}$ under SA, "
    r"and like $e^{-2te^\beta}$ under USA: fitted rates over these.",
    "GLPR23, exponential collapse from a hemisphere",
    source=lab.theory("fit over gaps below 1e-3"),
)
KURAMOTO = lab.theorem(
    "kuramoto",
    r"At $\beta = 0$ tokens with the masses of a Poisson kernel of radius $R_0 = 0.3$ "
    "keep one, with $R^2 = R_0^2e^t/(1 + R_0^2(e^t - 1))$; $R(2) = 0.6497905376$.",
    "OA08, invariance of Poisson kernels",
    source=lab.closed_form("and its tabulated value at depth 2"),
)
SADDLE = lab.observation(
    "saddle",
    "Two opposite tokens are stationary and leave it in $d - 1$ directions, at the "
    r"rate $e^{-\beta}$ under USA and $e^{-\beta}/\cosh\beta$ under SA.",
    source=lab.closed_form(r"index $d-1$ and the rates of the two-token law"),
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Solve both flows from random starts, and compare with what is proved."""
    keys = jr.split(jr.key(parameters.seed + 1), parameters.starts)
    law, count = mf.UniformSphere(3), parameters.tokens
    starts = [law.sample(count, key=key) for key in keys]
    key, shape = jr.key(parameters.seed + 2), (parameters.starts, count)
    angles = jr.uniform(key, shape, maxval=2 * jnp.pi)
    ends = [
        last_gaps(name, BETAS, starts, LONG[name])
        for name in progress.over(KINDS, share=0.4)
    ]
    circle = last_gaps("SA", CIRCLE, [equator(row) for row in angles], 600.0)
    start = mf.TokenCloud(law.sample(count, key=jr.key(parameters.seed)))
    upper = start.points.at[:, 2].set(jnp.abs(start.points[:, 2]))
    cases = [(name, beta) for name in KINDS for beta in BETAS]
    paths = {
        case: path_of(*case, mf.TokenCloud(upper), parameters.depth, 1e-10)
        for case in progress.over(cases, share=0.3)
    }
    whole = {
        beta: path_of("SA", beta, start, parameters.depth)
        for beta in progress.over((1.0, COLD), share=0.1)
    }
    no_gap = lab.theory("one cluster has no gap")
    return lab.Outcome(
        findings=[
            SINGLE.at_most(ends, 0.0, tolerance=1e-6, source=no_gap),
            CIRCLE_SINGLE.at_most(circle, 0.0, tolerance=1e-6, source=no_gap),
            triangle_finding(),
            *energy_findings(paths),
            hemisphere_finding(paths),
            kuramoto_finding(parameters),
            saddle_finding(),
        ],
        pictures=[draw_snapshots(whole), draw_collapse(paths)],
        movies=[
            lab.Movie(
                path,
                rf"Uniform tokens on the sphere under SA at $\beta = {beta:g}$.",
                draw=SphereFrames(),
            )
            for beta, path in whole.items()
        ],
    )


def flow_of(name: str, beta: float, dimension: int = 3) -> mf.Flow:
    """Identity attention on the sphere; negative temperatures for one program."""
    matrices = [jnp.eye(dimension)] * 3
    layer = KINDS[name](*matrices, beta=beta, allow_negative_beta=True)
    return mf.Flow(layer, space=mf.Sphere())


def unit_of(name: str, beta: float) -> float:
    """The time that distances need to fall by a factor e, near one cluster."""
    return float(np.exp(-beta)) if name == "USA" else 1.0


def path_of(name, beta, cloud, depth, rtol=1e-8):
    """A path whose depth is measured in units of the rate at the end."""
    depths = unit_of(name, beta) * np.linspace(0, depth, SAVED)
    return mf.solve(
        flow_of(name, beta), cloud, depths[-1], save=depths, rtol=rtol, atol=1e-11
    )


def gap_of(points) -> jax.Array:
    r"""The largest $1 - \langle x, y\rangle = |x - y|^2/2$, without cancellation."""
    differences = points[:, None, :] - points[None, :, :]
    return jnp.max(jnp.sum(differences**2, axis=2)) / 2


def equator(angles) -> jax.Array:
    """Tokens on a great circle, which no flow leaves: the circle in dimension 3."""
    return jnp.stack([jnp.cos(angles), jnp.sin(angles), 0 * angles], axis=1)


def last_gaps(name: str, betas, starts, depth: float) -> list[float]:
    """The gaps of all tokens after a long depth, for each temperature and start."""
    ends = [
        path_of(name, beta, mf.TokenCloud(points), depth, 1e-6).points[-1]
        for beta in betas
        for points in starts
    ]
    return [float(gap_of(points)) for points in ends]


def triangle_finding():
    """Bisect for the temperature at which a triangle becomes stable."""
    angles = 2 * np.pi * np.arange(3) / 3
    cloud = mf.TokenCloud.from_angles(angles)

    def largest(beta: float) -> float:
        rates = stationary_report(flow_of("USA", beta, 2), cloud).eigenvalues
        # Turning the whole triangle costs nothing: that rate is zero.
        rates = np.asarray(rates)
        return float(rates[np.argsort(np.abs(rates))][1:].max())

    turns = scipy.optimize.brentq(largest, -0.9, -0.4, xtol=1e-12)
    return TRIANGLE_TURNS.close_to(turns, TRIANGLE, tolerance=1e-9)


def energy_findings(paths):
    """Monotone energies, their bound, and the identity against finite differences."""
    profiles = {
        case: energy_profile(flow_of(*case), path) for case, path in paths.items()
    }
    bounds = np.array([np.exp(beta) / (2 * beta) for _, beta in paths])
    falls = [float(profile.worst_violation) for profile in profiles.values()]
    slopes = [energy_slope(path, 2, beta) for (_, beta), path in paths.items()]
    return (
        RISES.at_most(falls / bounds, 0.0, tolerance=1e-12),
        BOUND.close_to(
            [float(profile.energies[-1]) for profile in profiles.values()],
            bounds,
            relative_tolerance=1e-6,
        ),
        DISSIPATION.close_to(
            [float(profile.rates[2]) for profile in profiles.values()],
            slopes,
            relative_tolerance=1e-7,
        ),
    )


def energy_slope(path: mf.Trajectory, index: int, beta: float) -> float:
    """The derivative of the energy along the velocity, by central differences."""
    points, velocities = np.asarray(path.points[index]), path.velocities[index]
    step = 1e-5 / float(jnp.abs(velocities).max())

    def energy_at(t):
        moved = points + t * np.asarray(velocities)
        moved /= np.linalg.norm(moved, axis=1, keepdims=True)
        return np.exp(beta * (moved @ moved.T)).mean() / (2 * beta)

    return (energy_at(step) - energy_at(-step)) / (2 * step)


def hemisphere_finding(paths):
    """Fitted rates over those of the linearised flow at one cluster."""
    ratios = []
    for (name, beta), path in paths.items():
        gaps = np.asarray(jax.vmap(gap_of)(path.points))
        used = (gaps < 1e-3) & (gaps > 1e-11)
        depths = np.asarray(path.depths)[used] / unit_of(name, beta)
        ratios.append(-np.polyfit(depths, np.log(gaps[used]), 1)[0] / 2)
    return HEMISPHERE.close_to(ratios, 1.0, tolerance=5e-3)


def kuramoto_finding(parameters: Parameters):
    """The order of equally spaced tokens with the masses of a Poisson kernel."""
    angles = 2 * np.pi * np.arange(parameters.tokens) / parameters.tokens
    masses = (1 - 0.09) / (1 - 0.6 * np.cos(angles) + 0.09)
    cloud = mf.TokenCloud(equator(jnp.asarray(angles)), masses / masses.sum())
    path = path_of("SA", 0.0, cloud, 2.0, 1e-10)
    growth = np.exp(np.asarray(path.depths))
    exact = 0.3 * np.sqrt(growth / (1 + 0.09 * (growth - 1)))
    measured = [float(order_parameter(path.cloud(k))) for k in range(len(path))]
    return KURAMOTO.close_to(
        [*measured, measured[-1]], [*exact, 0.6497905376], tolerance=1e-7
    )


def saddle_finding():
    """Index and rate of two opposite tokens in three dimensions."""
    cloud = mf.TokenCloud([[0.0, 0.0, 1.0], [0.0, 0.0, -1.0]])
    measured, exact = [], []
    for name in KINDS:
        for beta in BETAS:
            report = stationary_report(flow_of(name, beta), cloud)
            measured += [report.index or 0, float(report.eigenvalues[0])]
            mass = np.cosh(beta) if name == "SA" else 1.0
            exact += [2, np.exp(-beta) / mass]
    return SADDLE.close_to(measured, exact, tolerance=1e-12)


def draw_snapshots(paths: dict[float, mf.Trajectory]) -> lab.Picture:
    """The sphere at four depths, one row for each temperature."""
    options = {"subplot_kw": {"projection": "3d"}}
    figure, axes = style.canvas(4, len(paths), panel=(2.4, 2.75), **options)
    for row, (beta, path) in zip(axes, paths.items(), strict=True):
        for panel, share in zip(row, (0.0, 0.1, 0.25, 1.0), strict=True):
            index = round(share * (len(path) - 1))
            draw_sphere(path, panel, index=index, tail=10)
            cloud = path.cloud(index)
            groups = count_clusters(cloud, space=mf.Sphere(), beta=COLD).count
            depth = float(path.depths[index])
            noun = "cluster" if groups == 1 else "clusters"
            panel.set_title(f"$\\beta = {beta:g}$, depth {depth:.3g}\n{groups} {noun}")
    return lab.Picture(
        figure,
        rf"{path.points.shape[1]} uniform tokens under softmax attention, with the "
        "tails of their last steps; those behind the sphere are pale. Clusters are "
        r"counted at the angle $1/6$. At $\beta = 1$ all tokens meet; at $\beta = 9$ "
        "they gather in groups first, which stay apart for long.",
    )


def draw_collapse(paths) -> lab.Picture:
    """The largest gap, with the rate of the linearised flow."""
    figure, axes = style.canvas(panel=(6.0, 3.9))
    for colour, beta in zip(style.PALETTE, BETAS, strict=False):
        for name, line in (("SA", "-"), ("USA", "--")):
            path = paths[name, beta]
            gaps = np.asarray(jax.vmap(gap_of)(path.points))
            depths = np.asarray(path.depths) / unit_of(name, beta)
            used = gaps > 1e-14
            label = rf"{name}, $\beta = {beta:g}$"
            axes.plot(depths[used], gaps[used], line, color=colour, label=label)
    late = np.array([7.0, 12.0])
    axes.plot(late, 3 * np.exp(8 - 2 * late), ":", color=style.INK, label="$e^{-2t}$")
    axes.set(yscale="log", xlabel=r"depth $t$ (SA), $e^\beta$ times depth (USA)")
    axes.set_ylabel(r"largest $1 - \langle x_i, x_j\rangle$")
    axes.legend(ncols=2)
    return lab.Picture(
        figure,
        "From a half-sphere the largest gap between tokens falls at last like "
        r"$e^{-2t}$ (dotted), under USA with depth in units of $e^{-\beta}$: all six "
        "curves become parallel.",
    )


experiment = lab.experiment(
    run, "On the sphere all tokens become one cluster", room="observables", seconds=15
)
