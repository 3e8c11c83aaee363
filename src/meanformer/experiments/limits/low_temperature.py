r"""Attention at low temperature keeps to its limit up to depths of order log beta.

The flow is $\dot z_i = \sum_j P_{ij}V(z_j - z_i)$ with softmax weights $P_{ij}$ of
$\beta\langle z_i, z_j\rangle$. At zero temperature each token goes to the one of
largest score; that flow is piecewise linear, and computed exactly, from one change of
leaders to the next. Three things set the distance between the two:

- a token that follows another leader costs a distance that does not fall with $\beta$;
- beyond the $\beta$ where the last one has changed over, the distance at a fixed depth
  is of order $1/\beta$ if some token changes its leader on the way, and exponentially
  small in $\beta$ if none does;
- from depths of $\log\beta$ on, followers are as close as $1/\beta$ to their leaders,
  and draw them away by $\delta$ with
  $\langle v, \delta\rangle = -\log(W/w_v)/\beta$: the log-Laplace transform of the
  cluster at $\beta v$ does not change.

In the end every finite $\beta$ loses its clusters, at the rates of the spectrum of $V$.
A theorem bounds the distance to the limit at infinite depth by
$\sqrt{\log(\beta+1)/\beta}\,e^{Ct} + e^{-ct}$ [ABRR26], for laws of tokens; its
hypotheses and constants are not checked here, where clouds are finite.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from scipy.special import expi

import meanformer as mf
import meanformer.experiments as lab
from meanformer.observables import (
    LowTemperature,
    low_temperature_comparison,
    low_temperature_shift,
)
from meanformer.plotting import style

TOKENS, DEPTHS = 30, np.linspace(0, 12, 25)
CORNERS = np.array([(1.0, 1.0), (1.0, -1.0), (-1.0, -1.0), (-1.0, 1.0)])
SHIFT_BETAS = 20.0 * 2.0 ** np.arange(7)
RATES = (1.0, 0.3)
TERMINAL_BETAS = (1.0, 2.0, 3.0, 4.0)
SHARP = {"rtol": 1e-10, "atol": 1e-13}


@dataclass(frozen=True)
class Parameters:
    """How many clouds and temperatures."""

    clouds: int = lab.setting(
        24, full=100, help="random clouds in the square", at_least=20
    )
    per_decade: int = lab.setting(2, full=4, help="temperatures per decade", at_least=2)
    columns: int = lab.setting(25, full=97, help="temperatures of the map", at_least=9)
    seed: int = lab.setting(0, help="seed of the first random cloud", at_least=0)


EXACT = lab.observation(
    "exact-hardmax",
    "The flow at zero temperature, by exponentials from change to change of leaders, "
    r"is that of softmax at $\beta = 10^6$ up to $10^{-5}$, at depth $2$.",
    "ABRR26, low temperature in finite depth",
)
OTHERS = lab.observation(
    "another-leader",
    r"Where a token follows another leader than under hardmax, $\beta$ times the "
    "distance at depth $2$ is much larger than where none does: the medians over "
    r"clouds and $\beta \ge 100$ differ by a factor of $30$ or more.",
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
)
PAIR = lab.observation(
    "pair",
    r"Two opposite tokens $\pm a$, $s = \lvert a\rvert^2$, reach $s$ at depth "
    r"$t = \frac14(\log\frac{s_0}s + \mathrm{Ei}(2\beta s_0) - \mathrm{Ei}(2\beta "
    r"s))$: their clusters last for $e^{2\beta s_0}/(8\beta s_0)$.",
    source=lab.closed_form("an exponential integral"),
)
TERMINAL = lab.observation(
    "terminal-phase",
    r"At $\beta = 1$ and $V = \mathrm{diag}(1, 0.3)$ tokens collapse at the rates $1$ "
    "and $0.3$ along the two axes.",
    "ABRR26, terminal phase",
    source=lab.theory("linearised at one point"),
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Random clouds, a cloud with known leaders, pairs, and a value with a spectrum."""
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
            *shift_findings(compared(known_cloud(), SHIFT_BETAS, **SHARP)),
            log_beta_finding(),
            pair_finding(),
            terminal_finding(),
        ],
        pictures=[picture_of_betas(randoms, betas), picture_of_phases(phases)],
    )


def softmax(value=None) -> mf.Softmax:
    """Identity query and key; a value."""
    return mf.Softmax(np.eye(2), np.eye(2), np.eye(2) if value is None else value)


def compared(cloud, betas, depths=DEPTHS, value=None, **options) -> LowTemperature:
    """Both flows; one shape for all, so that one program serves."""
    return low_temperature_comparison(softmax(value), cloud, depths, betas, **options)


def square_cloud(seed: int) -> mf.TokenCloud:
    """Uniform tokens in the square of side two."""
    generator = np.random.default_rng(seed)
    return mf.TokenCloud(generator.uniform(-1, 1, (TOKENS, 2)))


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
        scores = 1e6 * points @ points.T
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        return shares @ points / shares.sum(axis=1, keepdims=True) - points

    errors, options = [], {"method": "LSODA", "rtol": 1e-9, "atol": 1e-11}
    for seed in seeds[:4]:
        cloud = square_cloud(seed)
        path = mf.flows.hardmax_flow(softmax(), cloud, 2.0)
        soft = lab.by_scipy(velocity, cloud.points, [0, 2.0], **options)[-1]
        errors.append(np.abs(path.points([2.0])[0] - soft).max())
    source = lab.other_method("SciPy's LSODA on the softmax flow")
    return EXACT.at_most(errors, 1e-5, source=source)


def leader_findings(randoms, betas):
    """What another leader costs, and the rates where there is none."""
    coupled = np.array([run.coupled[:, -1] for run in randoms])
    is_same = np.array([run.at(-1).changed[:, 0] == 0 for run in randoms])
    turns = np.array([len(run.limit.changes) > 0 for run in randoms])
    scaled, is_cold = betas * coupled, (betas >= 100)[None, :]
    ratio = np.median(scaled[~is_same & is_cold]) / np.median(scaled[is_same & is_cold])
    before = np.argmin(np.abs(betas - 1e4))
    slopes = np.log10(coupled[:, -1] / coupled[:, before])
    return (
        OTHERS.at_least(ratio, 30.0),
        ALGEBRAIC.close_to(np.median(slopes[turns]), -1.0, tolerance=0.1),
        EXPONENTIAL.at_most(np.median(coupled[~turns, -1]), 1e-9),
    )


def shift_findings(known: LowTemperature):
    """The shift of clusters, in full and along their leaders."""
    cloud, beta = known_cloud(), known.betas[-1]
    shift = low_temperature_shift(softmax(), cloud, DEPTHS, known.betas)
    errors = known.points - known.limit_points[None] - shift
    sizes = np.linalg.norm(errors, axis=3).max(axis=2)[:, -1]
    slopes = np.diff(np.log(sizes)) / np.diff(np.log(known.betas))
    points, ends = np.asarray(cloud.points), known.points[-1, -1, :4]
    drops = []
    for corner in CORNERS:
        cluster = mf.TokenCloud(points[(np.sign(points) == corner).all(axis=1)])
        tilted = cluster.log_laplace(jnp.asarray(beta * corner)[None])
        drops.append(float(tilted[0]) - beta * corner @ corner)
    return (
        SECOND.close_to(slopes[2:], -2.0, tolerance=0.1),
        LAPLACE.close_to(
            beta * np.einsum("kd,kd->k", CORNERS, ends - CORNERS), drops, tolerance=0.01
        ),
    )


def log_beta_finding():
    """Distances to the limit at infinite depth, at depth log beta."""
    distances = [
        compared(known_cloud(), [b], np.log(b) * DEPTHS / 12).end_coupled[0, -1]
        for b in (1e2, 1e3, 1e4)
    ]
    slopes, source = np.diff(np.log10(distances)), "both errors are of order 1/beta"
    return LOG_BETA.close_to(slopes, -1.0, tolerance=0.05, source=lab.theory(source))


def pair_finding():
    """Two opposite tokens; padded, to have the shape of the others."""
    pair = mf.TokenCloud(np.array([(0.6, 0.8), (-0.6, -0.8)]))
    betas = np.array([0.5, 1.0, 1.5, 2.0])
    pairs = compared(mf.pad(pair, TOKENS), betas, **SHARP)
    squares = (pairs.points[:, 1:, 0] ** 2).sum(axis=2)
    twice = 2 * betas[:, None]
    depths = (expi(twice) - np.log(squares) - expi(twice * squares)) / 4
    return PAIR.close_to(
        depths, np.broadcast_to(DEPTHS[1:], depths.shape), tolerance=1e-6
    )


def terminal_finding():
    """Rates of the collapse under a value with two, over the last depths."""
    value = np.diag(RATES)
    path = compared(known_cloud(), TERMINAL_BETAS, 2 * DEPTHS, value, **SHARP)
    late = np.ptp(path.points[0, [-6, -1]], axis=1)
    rates = np.log(late[0] / late[1]) / np.diff(path.depths[[-6, -1]])
    return TERMINAL.close_to(rates, RATES, tolerance=1e-3)


def picture_of_betas(randoms, betas) -> lab.Picture:
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
        r"Softmax beside hardmax for random clouds of 30 tokens, of all those the six "
        r"whose last token changes over at the largest $\beta$. Open marks: a token "
        r"follows another leader, and the distance does not fall. When the last one "
        r"has changed over, it drops at once, and then falls like $1/\beta$ in clouds "
        r"where tokens change their leader on the way, and exponentially where none "
        r"does (down to the tolerance of the solver).",
    )


def picture_of_phases(phases: LowTemperature) -> lab.Picture:
    """The distance to the limit over temperature and depth."""
    figure, axes = style.canvas(panel=(6.6, 4.2))
    logs, distances = phases.reach, np.log10(phases.end_coupled).T
    options = {"levels": np.arange(-4, 0.51, 0.25), "extend": "both"}
    image = axes.contourf(
        logs, DEPTHS, distances, cmap=style.depth_colours(), **options
    )
    axes.plot(logs[logs > 0], logs[logs > 0], "--", color=style.INK, linewidth=1.2)
    axes.text(7.0, 7.25, r"$t = \log\beta$", rotation=38, ha="center", va="bottom")
    figure.colorbar(image, ax=axes, label=r"$\log_{10}$ distance to the limit")
    axes.set(xlabel=r"$\log\beta$", ylabel="depth $t$", xlim=(logs[0], logs[-1]))
    axes.grid(visible=False)
    return lab.Picture(
        figure,
        r"Distance of the softmax flow to the limit of hardmax at infinite depth, for "
        r"the cloud in the square. Below the line $t = \log\beta$ it depends on depth "
        r"alone ($e^{-t}$: level lines are horizontal), above it on the temperature "
        r"alone ($1/\beta$: vertical). On the left, at $\beta$ of order one, the "
        r"corners have lost their clusters, and all tokens meet near the origin.",
    )


experiment = lab.experiment(
    run,
    "Low temperature keeps to hardmax up to depths of order log beta",
    room="observables",
    seconds=12,
)
