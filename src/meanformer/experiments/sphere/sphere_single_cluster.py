r"""All tokens on the sphere merge into one cluster.

Softmax attention (SA) and unnormalised attention (USA) with identity matrices,
projected on the unit sphere, climb the energy
$E_\beta = \frac{1}{2\beta}\iint e^{\beta\langle x, y\rangle}$, whose largest value
$e^\beta/2\beta$ belongs to a single point. In dimension 3 and more almost every start
ends there at every $\beta \ge 0$; on the circle at every $\beta \ge -0.16$, but not
below $-2/3$, where a triangle resists. From a hemisphere the approach is exponential.
"""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import scipy.optimize

import meanformer as mf
import meanformer.experiments as lab
from meanformer.observables import count_clusters, energy_profile, stationary_report
from meanformer.plotting import SphereFrames, draw_curves, draw_sphere, style

KINDS = {"SA": mf.Softmax, "USA": mf.Unnormalised}
BETAS = (0.5, 1.0, 2.0)
COLD, SAVED = 9.0, 61
LONG = {"SA": 200.0, "USA": 1500.0}  # in units of the rate at the end
CASES = [(name, beta) for name in KINDS for beta in BETAS]


class Parameters(lab.Parameters):
    """Sizes."""

    tokens: int = lab.setting(32, full=64, help="tokens on the sphere", at_least=16)
    starts: int = lab.setting(4, full=64, help="starts of each kind", at_least=2)
    depth: float = lab.setting(15.0, help="of the pictures", at_least=10, at_most=40)
    seed: int = lab.setting(3, help="seed of all starts", at_least=0)
    movie: lab.Movies = lab.movie_setting()


SINGLE = lab.theorem(
    "single-cluster",
    "In dimension 3 all starts end in one cluster, for SA and USA at "
    r"$\beta = 0.5, 1, 2$: the smallest inner product tends to 1.",
    "GLPR23, single cluster for almost every start; CRMB24, dimension three and more",
    source=lab.theory("one cluster has no gap"),
)
CIRCLE_SINGLE = lab.theorem(
    "circle",
    r"So do they on the circle, at $\beta = -0.15, 0, 1, 2$.",
    "PRY25, synchronisation for inverse temperatures of -0.16 and more",
    source=lab.theory("one cluster has no gap"),
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


@lab.experiment(
    "On the sphere all tokens become one cluster", room="observables", seconds=15
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Solve both flows from random starts, and compare with what is proved."""
    law, count, seed = mf.UniformSphere(3), parameters.tokens, parameters.seed
    keys = jr.split(jr.key(seed + 1), parameters.starts)
    starts = [law.sample(count, key=key) for key in keys]
    # A great circle, which no flow leaves, is the circle in dimension 3.
    angles = 2 * jnp.pi * jr.uniform(jr.key(seed + 2), (parameters.starts, count))
    circles = jnp.stack([jnp.cos(angles), jnp.sin(angles), 0 * angles], axis=2)
    ends = [last_gaps(*case, starts) for case in progress.over(LONG.items(), 0.4)]
    on_circle = last_gaps("SA", 600.0, circles, (-0.15, 0.0, 1.0, 2.0))
    start = mf.TokenCloud(law.sample(count, key=jr.key(seed)))
    upper = mf.TokenCloud(start.points.at[:, 2].set(jnp.abs(start.points[:, 2])))
    paths = {
        case: path_of(*case, upper, parameters.depth, 1e-10)
        for case in progress.over(CASES, 0.4)
    }
    whole = {
        beta: path_of("SA", beta, start, parameters.depth)
        for beta in progress.over((1.0, COLD), 0.2)
    }
    depths = np.linspace(0, parameters.depth, SAVED)
    gaps = {case: gaps_of(path) for case, path in paths.items()}
    caption = r"Uniform tokens on the sphere under SA at $\beta = {:g}$."
    return lab.Outcome(
        findings=[
            SINGLE.at_most(ends, 0.0, tolerance=1e-6),
            CIRCLE_SINGLE.at_most(on_circle, 0.0, tolerance=1e-6),
            triangle_finding(),
            *energy_findings(paths),
            hemisphere_finding(depths, gaps),
        ],
        pictures=[draw_snapshots(whole), draw_collapse(depths, gaps)],
        movies=[
            lab.Movie(path, caption.format(beta), draw=SphereFrames())
            for beta, path in whole.items()
        ],
    )


def flow_of(name: str, beta: float, dimension: int = 3) -> mf.Flow:
    """Identity attention on the sphere; negative temperatures for one program."""
    matrices = [jnp.eye(dimension)] * 3
    layer = KINDS[name](*matrices, beta=beta, allow_negative_beta=True)
    return mf.Flow(layer, space=mf.Sphere())


def path_of(name, beta, cloud, depth, rtol=1e-8) -> mf.Trajectory:
    """A path whose depth is measured in units of the rate near one cluster."""
    unit = np.exp(-beta) if name == "USA" else 1.0
    depths = unit * np.linspace(0, depth, SAVED)
    options = {"save": depths, "rtol": rtol, "atol": 1e-11}
    return mf.solve(flow_of(name, beta), cloud, depths[-1], **options)


def gaps_of(path: mf.Trajectory) -> np.ndarray:
    r"""The largest $1 - \langle x, y\rangle = |x - y|^2/2$ at each depth."""
    points = np.asarray(path.points)
    differences = points[:, :, None] - points[:, None]
    return np.sum(differences**2, axis=3).max(axis=(1, 2)) / 2


def last_gaps(name: str, depth: float, starts, betas=BETAS) -> list[float]:
    """The gaps of all tokens after a long depth, for each temperature and start."""
    cases = [(beta, mf.TokenCloud(start)) for beta in betas for start in starts]
    return [gaps_of(path_of(name, *case, depth, 1e-6))[-1] for case in cases]


def triangle_finding():
    """Bisect for the temperature at which a triangle becomes stable."""
    cloud = mf.TokenCloud.from_angles(2 * np.pi * np.arange(3) / 3)

    def largest(beta: float) -> float:
        report = stationary_report(flow_of("USA", beta, 2), cloud)
        # Turning the whole triangle costs nothing: that rate is zero.
        rates = sorted(np.asarray(report.eigenvalues), key=abs)
        return float(max(rates[1:]))

    turns = scipy.optimize.brentq(largest, -0.9, -0.4, xtol=1e-12)
    return TRIANGLE_TURNS.close_to(turns, -2 / 3, tolerance=1e-9)


def energy_findings(paths):
    """Monotone energies, their bound, and the identity against finite differences."""
    profiles = [energy_profile(flow_of(*case), path) for case, path in paths.items()]
    bounds = np.array([np.exp(beta) / (2 * beta) for _, beta in paths])
    falls = [float(profile.worst_violation) for profile in profiles]
    last = [float(profile.energies[-1]) for profile in profiles]
    rates = [float(profile.rates[2]) for profile in profiles]
    slopes = [energy_slope(path, 2, beta) for (_, beta), path in paths.items()]
    return (
        RISES.at_most(falls / bounds, 0.0, tolerance=1e-12),
        BOUND.close_to(last, bounds, relative_tolerance=1e-6),
        DISSIPATION.close_to(rates, slopes, relative_tolerance=1e-7),
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


def hemisphere_finding(depths, gaps):
    """Fitted rates over those of the linearised flow at one cluster."""
    ratios = []
    for gap in gaps.values():
        used = (gap < 1e-3) & (gap > 1e-11)
        ratios.append(-np.polyfit(depths[used], np.log(gap[used]), 1)[0] / 2)
    return HEMISPHERE.close_to(ratios, 1.0, tolerance=5e-3)


def draw_snapshots(paths: dict[float, mf.Trajectory]) -> lab.Picture:
    """The sphere at four depths, one row for each temperature."""
    options, space = {"subplot_kw": {"projection": "3d"}}, mf.Sphere()
    figure, axes = style.canvas(4, len(paths), panel=(2.4, 2.75), **options)
    for row, (beta, path) in zip(axes, paths.items(), strict=True):
        for panel, index in zip(row, (0, 6, 15, SAVED - 1), strict=True):
            draw_sphere(path, panel, index=index, tail=10)
            found = count_clusters(path.cloud(index), space=space, beta=COLD)
            depth = f"$\\beta = {beta:g}$, depth {float(path.depths[index]):.3g}"
            panel.set_title(f"{depth}\nclusters: {found.count}")
    return lab.Picture(
        figure,
        rf"{path.points.shape[1]} uniform tokens under softmax attention, with the "
        r"tails of their last steps. At $\beta = 1$ all tokens meet; at $\beta = 9$ "
        "they gather in groups first, which stay apart for long.",
    )


def draw_collapse(depths, gaps) -> lab.Picture:
    """The largest gap, with the rate of the linearised flow."""
    figure, axes = style.canvas(panel=(6.0, 3.9))
    late = np.array([7.0, 12.0])
    axes.plot(late, 3 * np.exp(8 - 2 * late), ":", color=style.INK, label="$e^{-2t}$")
    curves = {
        rf"{name}, $\beta = {beta:g}$": np.where(gap > 1e-14, gap, np.nan)
        for (name, beta), gap in gaps.items()
    }
    look = {"marks": ["-"] * 3 + ["--"] * 3, "colours": [*style.PALETTE[:3]] * 2}
    draw_curves(depths, curves, axes, **look, yscale="log")
    axes.set(xlabel=r"depth $t$ (SA), $e^\beta$ times depth (USA)")
    axes.set(ylabel=r"largest $1 - \langle x_i, x_j\rangle$")
    return lab.Picture(
        figure,
        "From a half-sphere the largest gap between tokens falls at last like "
        r"$e^{-2t}$ (dotted), under USA with depth in units of $e^{-\beta}$: all six "
        "curves become parallel.",
    )
