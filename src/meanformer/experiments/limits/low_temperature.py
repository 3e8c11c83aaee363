r"""Attention at low temperature keeps to its limit up to depths of order log beta.

The flow is $\dot z_i = \sum_j P_{ij}V(z_j - z_i)$ with softmax weights $P_{ij}$ of
$\beta\langle z_i, z_j\rangle$. At zero temperature each token goes to the one of
largest score; that flow is piecewise linear, and computed exactly, from one change of
leaders to the next. A token that follows another leader costs a distance that does not
fall with $\beta$; beyond the $\beta$ where the last one has changed over, the distance
at a fixed depth is of order $1/\beta$ if some token changes its leader on the way, and
exponentially small if none does. From depths of $\log\beta$ on, followers are as close
as $1/\beta$ to their leaders, and draw them away by $\delta$ with $\langle v,
\delta\rangle = -\log(W/w_v)/\beta$: the log-Laplace transform of the cluster at
$\beta v$ does not change. In the end every finite $\beta$ loses its clusters. A theorem
bounds the distance to the limit at infinite depth by
$\sqrt{\log(\beta+1)/\beta}\,e^{Ct} + e^{-ct}$ [ABRR26], for laws of tokens; its
hypotheses and constants are not checked here, where clouds are finite.
"""

import jax.numpy as jnp
import numpy as np
import scipy.special

import meanformer as mf
import meanformer.experiments as lab
from meanformer.observables import low_temperature_comparison, low_temperature_shift
from meanformer.plotting import style

TOKENS, DEPTHS = 30, np.linspace(0, 12, 25)
CORNERS = np.array([(1.0, 1.0), (1.0, -1.0), (-1.0, -1.0), (-1.0, 1.0)])


class Parameters(lab.Parameters):
    """How many clouds and temperatures."""

    clouds: int = lab.setting(24, full=100, help="random clouds", at_least=20)
    per_decade: int = lab.setting(2, full=4, help="temperatures per decade", at_least=2)
    columns: int = lab.setting(25, full=97, help="temperatures of the map", at_least=9)
    seed: int = lab.setting(0, help="seed of the first random cloud", at_least=0)


EXACT = lab.observation(
    "exact-hardmax",
    "The flow at zero temperature, by exponentials from change to change of leaders, "
    r"is that of softmax at $\beta = 10^6$ up to $10^{-5}$, at depth $2$.",
    "ABRR26, low temperature in finite depth",
    source=lab.other_method("SciPy's LSODA on the softmax flow"),
)
OTHERS = lab.observation(
    "another-leader",
    r"Where a token follows another leader than under hardmax, $\beta$ times the "
    "distance at depth $2$ is much larger than where none does: ratio of the medians "
    r"over clouds and $\beta \ge 100$.",
    source=lab.theory("a change of cell is no small one"),
)
ALGEBRAIC = lab.observation(
    "algebraic",
    "In clouds where tokens change their leader before depth $2$ the distance there "
    r"falls like $1/\beta$ from $10^4$ to $10^5$ (median exponent).",
    source=lab.theory("a change of leaders is smeared over a depth of 1/beta"),
)
EXPONENTIAL = lab.observation(
    "exponential",
    "In clouds where nobody changes its leader it is below $10^{-9}$ at "
    r"$\beta = 10^5$ (median).",
    source=lab.theory("margins stay positive"),
)
SECOND = lab.observation(
    "first-order-shift",
    "The softmax flow is the hardmax flow plus the shift "
    r"$\delta = -\int\sum_k p_k y_k\,\mathrm du$ of each cluster, with an error that "
    r"falls like $\beta^{-2}$, at depth $12$.",
    source=lab.theory("expansion in 1/beta"),
)
LAPLACE = lab.observation(
    "log-laplace",
    "At depth $12$ leaders have come away by "
    r"$\langle v, \delta\rangle = \frac1\beta\Lambda(\beta v) - \lvert "
    r"v\rvert^2$, with $\Lambda$ the log-Laplace transform of their cluster at the "
    r"start, for $\beta = 1280$.",
    source=lab.closed_form(r"$\frac1\beta\Lambda(\beta v) - \lvert v\rvert^2$"),
)
LOG_BETA = lab.observation(
    "log-beta",
    r"At depth $t = \log\beta$ the distance to the limit at infinite depth falls like "
    r"$1/\beta$: tokens have concentrated.",
    "ABRR26, time scales of order log beta (hypotheses not checked)",
    source=lab.theory("both errors are of order 1/beta"),
)


@lab.experiment(
    "Softmax keeps to hardmax up to depth log beta", room="observables", seconds=12
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Random clouds, and a cloud with known leaders."""
    betas = 10.0 ** np.arange(1, 5 + 1e-9, 1 / parameters.per_decade)
    seeds = range(parameters.seed, parameters.seed + parameters.clouds)
    randoms = [
        compared(square_cloud(seed), betas, DEPTHS / 6, rtol=1e-9, atol=1e-12)
        for seed in progress.over(seeds, 0.8)
    ]
    phases = compared(known_cloud(), np.geomspace(0.5, 1e4, parameters.columns))
    return lab.Outcome(
        findings=[
            exact_finding(seeds),
            *leader_findings(randoms, betas),
            *shift_findings(),
            log_beta_finding(),
        ],
        pictures=[draw_betas(randoms, betas), draw_phases(phases)],
    )


def compared(cloud, betas, depths=DEPTHS, **options):
    """Both flows; one shape for all, so that one program serves."""
    layer = lab.plain_attention(np.eye(2))
    return low_temperature_comparison(layer, cloud, depths, betas, **options)


def square_cloud(seed: int) -> mf.TokenCloud:
    """Uniform tokens in the square of side two."""
    return mf.TokenCloud(np.random.default_rng(seed).uniform(-1, 1, (TOKENS, 2)))


def known_cloud() -> mf.TokenCloud:
    """The corners of a square, which lead, and followers far from the boundaries."""
    generator = np.random.default_rng(4)
    count = TOKENS - len(CORNERS)
    signs = generator.choice([-1, 1], (count, 2))
    inside = signs * generator.uniform(0.3, 0.8, (count, 2))
    return mf.TokenCloud(np.concatenate([CORNERS, inside]))


def exact_finding(seeds):
    """The exact path against SciPy on softmax at a very low temperature."""

    def velocity(_, points):
        return scipy.special.softmax(1e6 * points @ points.T, axis=1) @ points - points

    errors, layer = [], lab.plain_attention(np.eye(2))
    options = {"method": "LSODA", "rtol": 1e-9, "atol": 1e-11}
    for cloud in map(square_cloud, seeds[:4]):
        exact = mf.flows.hardmax_flow(layer, cloud, 2.0).points([2.0])[0]
        soft = lab.by_scipy(velocity, cloud.points, [0, 2.0], **options)[-1]
        errors.append(np.abs(exact - soft).max())
    return EXACT.at_most(errors, 1e-5)


def leader_findings(randoms, betas):
    """What another leader costs, and the rates where there is none."""
    coupled = np.array([run.coupled[:, -1] for run in randoms])
    is_same = np.array([run.at(-1).changed[:, 0] == 0 for run in randoms])
    turns = np.array([len(run.limit.changes) > 0 for run in randoms])
    others, is_same = (mask & (betas >= 100) for mask in (~is_same, is_same))
    scaled = betas * coupled
    slopes = np.log10(coupled[:, -1] / coupled[:, np.argmin(np.abs(betas - 1e4))])
    return (
        OTHERS.at_least(np.median(scaled[others]) / np.median(scaled[is_same]), 30.0),
        ALGEBRAIC.close_to(np.median(slopes[turns]), -1.0, tolerance=0.1),
        EXPONENTIAL.at_most(np.median(coupled[~turns, -1]), 1e-9),
    )


def shift_findings():
    """The shift of clusters, in full and along their leaders."""
    cloud, betas = known_cloud(), 20.0 * 2.0 ** np.arange(7)
    known, beta = compared(cloud, betas, rtol=1e-10, atol=1e-13), betas[-1]
    layer = lab.plain_attention(np.eye(2))
    shift = low_temperature_shift(layer, cloud, DEPTHS, betas)
    errors = known.points - known.limit_points[None] - shift
    sizes = np.linalg.norm(errors, axis=3).max(axis=2)[:, -1]
    slopes = np.diff(np.log(sizes)) / np.diff(np.log(betas))
    points, ends = np.asarray(cloud.points), known.points[-1, -1, :4]
    drops = []
    for corner in CORNERS:
        cluster = mf.TokenCloud(points[(np.sign(points) == corner).all(axis=1)])
        tilted = cluster.log_laplace(jnp.asarray(beta * corner)[None])
        drops.append(float(tilted[0]) - beta * corner @ corner)
    away = beta * ((ends - CORNERS) * CORNERS).sum(axis=1)
    return (
        SECOND.close_to(slopes[2:], -2.0, tolerance=0.1),
        LAPLACE.close_to(away, drops, tolerance=0.01),
    )


def log_beta_finding():
    """Distances to the limit at infinite depth, at depth log beta."""
    distances = [
        compared(known_cloud(), [b], np.log(b) * DEPTHS / 12).end_coupled[0, -1]
        for b in (1e2, 1e3, 1e4)
    ]
    return LOG_BETA.close_to(np.diff(np.log10(distances)), -1.0, tolerance=0.05)


def draw_betas(randoms, betas) -> lab.Picture:
    """Distances against the temperature, at depth two."""
    figure, axes = style.canvas(panel=(6.0, 3.7))
    counts = [path.at(-1).changed[:, 0] for path in randoms]
    latest = np.argsort([-(others > 0).sum() for others in counts], kind="stable")
    for colour, index in zip(style.PALETTE, latest[:6], strict=False):
        coupled = np.maximum(randoms[index].coupled[:, -1], 1e-13)
        name = f"cloud {index}: {len(randoms[index].limit.changes)}"
        faces = np.where(counts[index] > 0, "white", colour)
        axes.plot(betas, coupled, color=colour, linewidth=1.2, label=name)
        axes.scatter(betas, coupled, c=faces, edgecolors=colour, s=22, zorder=3)
    axes.plot(betas[4:], 30 / betas[4:], ":", color=style.INK, linewidth=1)
    axes.annotate(r"$\beta^{-1}$", (betas[-2], 60 / betas[-2]))
    axes.set(xscale="log", yscale="log", ylim=(3e-14, 3), xlabel=r"$\beta$")
    axes.set_ylabel("distance to hardmax at depth 2")
    axes.legend(title="changes of leaders\nunder hardmax", loc="lower left")
    return lab.Picture(
        figure,
        r"Softmax beside hardmax: the six clouds whose last token changes over at the "
        r"largest $\beta$. Open marks: a token follows another leader. After that the "
        r"distance drops, and falls like $1/\beta$ if tokens change their leader on "
        r"the way, and exponentially (down to the tolerance) if none does.",
    )


def draw_phases(phases) -> lab.Picture:
    """The distance to the limit over temperature and depth."""
    figure, axes = style.canvas(panel=(6.6, 4.2))
    logs, distances = phases.reach, np.log10(phases.end_coupled).T
    options = {"levels": np.arange(-4, 0.51, 0.25), "extend": "both"}
    options["cmap"] = style.depth_colours()
    image = axes.contourf(logs, DEPTHS, distances, **options)
    axes.plot(logs[logs > 0], logs[logs > 0], "--", color=style.INK, linewidth=1.2)
    axes.text(7.0, 7.25, r"$t = \log\beta$", rotation=38, ha="center", va="bottom")
    figure.colorbar(image, ax=axes, label=r"$\log_{10}$ distance to the limit")
    axes.set(xlabel=r"$\log\beta$", ylabel="depth $t$", xlim=(logs[0], logs[-1]))
    axes.grid(visible=False)
    return lab.Picture(
        figure,
        r"Distance of the softmax flow to the limit of hardmax at infinite depth, for "
        r"the cloud in the square: below the line $t = \log\beta$ like $e^{-t}$ (level "
        r"lines are horizontal), above it like $1/\beta$ (vertical). On the left, at "
        r"$\beta$ of order one, all tokens meet near the origin.",
    )
