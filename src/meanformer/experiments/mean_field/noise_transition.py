r"""Noise holds tokens apart, until attraction wins: continuously, or with a jump.

With noise of strength $\sigma = \sqrt{2/\kappa}$ the uniform measure on the sphere is
stationary for every $\kappa$, and unstable from $\kappa_c = \beta/\kappa_1$ on (for
softmax attention $\beta\kappa_0/\kappa_1$). Under unnormalised attention ordered
states take over continuously up to $\beta_*$, where
$I_{d/2+1}(\beta_*)/I_{d/2}(\beta_*) = 1/d$, and with a jump beyond: the branch of
ordered states turns back, uniform and ordered states coexist, and slow changes of the
noise show hysteresis. Branches are computed by continuation, and compared with another
discretisation, with expansions and with tokens.
"""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import scipy.linalg
from scipy.special import iv, ive, softmax, xlogy

import meanformer as mf
import meanformer.experiments as lab
from meanformer.flows import GeodesicStep
from meanformer.mean_field import critical_kappa, stationary_branch, stationary_state
from meanformer.plotting import draw_branch, draw_uniform, mark_values, style

GRID = 256  # angles of the independent discretisation
SMOOTH, STEEP = 2.3, 5.0  # on the circle, below and above the tricritical beta
LOOP_DIMENSION, LOOP_BETA = 8, 3.0


class Parameters(lab.Parameters):
    """How many tokens, and how slowly the noise changes."""

    count: int = lab.setting(120, full=1000, help="tokens of the loop", at_least=50)
    stops: int = lab.setting(
        5, full=21, help=r"values of $\kappa$ on each way of the loop", at_least=5
    )
    wait: float = lab.setting(5.0, full=12.0, help="depth spent at each", above=0)
    seed: int = lab.setting(0, help="seed of the noise")


THRESHOLDS = lab.observation(
    "thresholds",
    r"On the circle $\kappa_c = \beta/I_1(\beta)$, and "
    r"$d\,I_{d/2+1}(\beta_*) = I_{d/2}(\beta_*)$ in all dimensions.",
    source=lab.closed_form(r"SciPy's Bessel functions, $\beta = 1, 5$, $d = 2, 3, 8$"),
)
DICHOTOMY = lab.theorem(
    "global-minimiser",
    r"At $\kappa_c$ an ordered state has less free energy than the uniform one if "
    r"$\beta = 1.2\,\beta_*$; none is found, to $0.99\,\kappa_c$, at $0.8\,\beta_*$.",
    r"MR26, abstract: continuous for $\beta \le \beta_*$, discontinuous beyond",
    source=lab.theory("signs for $d = 2, 3, 8$"),
)
BEND = lab.observation(
    "bend",
    r"Near $\kappa_c$ the branch is $\kappa = \kappa_c(1 + b\,r^2)$ in its order $r$, "
    "with $b$ of the expansion, unnormalised and softmax, $d = 2, 8$.",
    source=lab.closed_form(r"expansion to third order; extrapolated to $r = 0$"),
)
FOLD = lab.observation(
    "fold",
    r"On the circle at $\beta = 5$ ordered states end at a fold below $\kappa_c$.",
    source=lab.other_method("order $0.1$% off it, by sweeps on equispaced angles"),
)
MAXWELL = lab.observation(
    "maxwell",
    "At the Maxwell point the ordered state has the free energy of the uniform one.",
    source=lab.other_method("sweeps on equispaced angles that descend the free energy"),
)
TOKENS = lab.observation(
    "tokens",
    r"The order of tokens on $\mathbb{S}^7$ is that of the branch once it has settled.",
    source=lab.other_method("the stationary branch of infinitely many tokens"),
)
HYSTERESIS = lab.observation(
    "hysteresis",
    r"Between the fold and $\kappa_c$ the tokens remember: their order on the way "
    "back exceeds that on the way there by more than a half.",
    source=lab.theory("coexistence"),
)
SOFTMAX = lab.observation(
    "softmax-continuous",
    r"Under softmax attention $\kappa$ grows along the branch of the circle: no fold.",
    source=lab.theory(r"least step of $\kappa/\kappa_c$ for $\beta = 1, 5, 20$"),
)


@lab.experiment(
    "Noise: order sets in continuously, or jumps", room="mean_field", seconds=20
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Follow branches, and compare them with expansions, grids and tokens."""
    smooth, steep = (branch_of(2, beta) for beta in progress.over((SMOOTH, STEEP), 0.1))
    plain = [branch_of(2, b, "softmax") for b in progress.over((1.0, 5.0, 20.0), 0.3)]
    for _ in progress.over(range(1), 0.6):
        branch, loop = branch_of(LOOP_DIMENSION, LOOP_BETA), walk_loop(parameters)
    return lab.Outcome(
        findings=[
            threshold_finding(),
            dichotomy_finding(),
            bend_finding(),
            *grid_findings(steep),
            *loop_findings(loop, branch),
            SOFTMAX.above([np.diff(b.kappas).min() / b.critical for b in plain], 0.0),
        ],
        pictures=[draw_transitions(smooth, branch, loop)],
    )


def layer(dimension: int, beta: float, kind: str = "unnormalised"):
    """Attention with matrices that are the identity."""
    return mf.identity_attention(kind, dimension, float(beta))


def branch_of(dimension: int, beta: float, kind: str = "unnormalised"):
    """A branch, up to one and a half of its first value of the inverse noise."""
    attention = layer(dimension, beta, kind)
    return stationary_branch(attention, until=1.5 * critical_kappa(attention))


def threshold_finding():
    """Thresholds against Bessel functions of SciPy."""
    betas, sizes = np.array([1.0, 5.0]), np.array([2, 3, 8])
    criticals = [critical_kappa(layer(2, beta)) for beta in betas]
    roots = np.array([mf.mean_field.tricritical_beta(int(size)) for size in sizes])
    quotients = sizes * ive(sizes / 2 + 1, roots) / ive(sizes / 2, roots)
    expected = [*(betas / iv(1, betas)), 1, 1, 1]
    return THRESHOLDS.close_to([*criticals, *quotients], expected, tolerance=1e-12)


def dichotomy_finding():
    """The sign of the least free energy at the critical noise, or just above it."""
    signs = []
    for dimension in (2, 3, 8):
        # At the threshold itself the state below the tricritical beta is degenerate.
        for factor, share in ((0.8, 0.99), (1.2, 1.0)):
            beta = factor * mf.mean_field.tricritical_beta(dimension)
            kappa = share * critical_kappa(layer(dimension, beta))
            energy = stationary_state(layer(dimension, beta), kappa).free_energy or 0.0
            signs.append(0 if abs(kappa * energy) < 1e-12 else np.sign(energy))
    return DICHOTOMY.close_to(signs, [0, -1] * 3, tolerance=0.0)


def bend_finding():
    """The bend of computed branches, extrapolated to the bifurcation."""
    found, expected = [], []
    for kind in ("unnormalised", "softmax"):
        for attention in (layer(2, 2.0, kind), layer(8, 2.0, kind)):
            critical = critical_kappa(attention)
            branch = stationary_branch(attention, until=1.05 * critical, spacing=0.02)
            squares = branch.orders[1:4] ** 2
            bends = (branch.kappas[1:4] / critical - 1) / squares
            found.append(np.polyfit(squares, bends, 2)[-1])
            expected.append(mf.mean_field.branch_curvature(attention))
    return BEND.close_to(found, expected, relative_tolerance=1e-4)


def grid_state(kappa: float) -> tuple[float, float]:
    """Order and excess energy of the state that sweeps on equispaced angles lead to."""
    cosines = np.cos(2 * np.pi * np.arange(GRID) / GRID)
    kernel = scipy.linalg.circulant(np.exp(STEEP * cosines)) / GRID
    density = GRID * softmax(3 * cosines)
    for _ in range(20_000):
        before = density
        density = GRID * softmax(kappa / STEEP * (kernel @ before))
        if np.abs(density - before).max() < 1e-13:
            break
    energy = (density @ kernel @ density) / GRID - iv(0, STEEP)
    entropy = xlogy(density, density).mean()
    return float(np.mean(density * cosines)), entropy / kappa - energy / (2 * STEEP)


def grid_findings(branch):
    """Fold and Maxwell point against another discretisation and method."""
    (fold,), excess = branch.folds, grid_state(branch.maxwell.kappa)[1]
    found = [grid_state(factor * fold.kappa)[0] for factor in (0.999, 1.001)]
    above = stationary_state(layer(2, STEEP), 1.001 * fold.kappa).order
    is_below = float(fold.kappa < branch.critical)
    return (
        FOLD.close_to([*found, is_below], [0.0, above, 1.0], tolerance=1e-6),
        MAXWELL.close_to(excess, 0.0, tolerance=1e-9),
    )


def walk_loop(parameters: Parameters):
    """Lower the noise in steps, and raise it again; one program for all steps."""
    attention = layer(LOOP_DIMENSION, LOOP_BETA)
    way = np.linspace(0.56, 1.4, parameters.stops) * critical_kappa(attention)
    kappas, wait = np.stack([way, way[::-1]]), parameters.wait
    key, key_start = jr.split(jr.key(parameters.seed))
    start = mf.UniformSphere(LOOP_DIMENSION).sample(parameters.count, key=key_start)
    solver = mf.FixedStep(0.02, method=GeodesicStep())
    options = {"save": np.linspace(0, wait, 13), "solver": solver}

    def stay(points, moment):
        noise, key = moment
        flow = mf.Flow(attention, space=mf.Sphere(), noise=noise)
        path = mf.solve(flow, mf.TokenCloud(points), wait, key=key, **options)
        orders = jnp.linalg.norm(path.points.mean(axis=1), axis=1)
        return path.points[-1], orders[7:]

    moments = jnp.sqrt(2 / jnp.ravel(kappas)), jr.split(key, kappas.size)
    orders = jax.jit(lambda: jax.lax.scan(stay, start, moments)[1])()
    return kappas, np.asarray(orders).reshape(*kappas.shape, -1)


def loop_findings(loop, branch):
    """Orders of tokens against the branch, and between the two ways."""
    (there, back), orders = loop
    up, down = orders.mean(axis=2)
    (fold,) = branch.folds
    is_ordered = back > 1.05 * fold.kappa
    expected = [branch.orders_at(kappa).max() for kappa in back[is_ordered]]
    between = (there > 1.1 * fold.kappa) & (there < 0.95 * branch.critical)
    return (
        TOKENS.close_to(down[is_ordered], expected, tolerance=0.03),
        HYSTERESIS.above((down[::-1] - up)[between], 0.5),
    )


def draw_transitions(smooth, branch, loop) -> lab.Picture:
    """A continuous transition, and the hysteresis loop of tokens around a jump."""
    figure, panels = style.canvas(2, panel=(4.8, 3.7), sharey=True)
    for axes, one in zip(panels, (smooth, branch), strict=True):
        limits = 0.5 * one.critical, 1.45 * one.critical
        draw_uniform(one.critical, *limits, axes)
        draw_branch(one, axes, label="infinitely many tokens")
        mark_values(one.critical, axes)
        axes.text(one.critical, 1.02, r"$\kappa_c$", ha="center")
        axes.set(xlim=limits, xlabel=r"inverse noise $\kappa = 2/\sigma^2$")
    panels[0].set(ylabel=r"order $|\int x\,\mathrm{d}\rho|$", ylim=(-0.04, 1.0))
    looks = ("noise is lowered", style.ORANGE), ("noise is raised", style.GREEN)
    for kappas, orders, (name, colour) in zip(*loop, looks, strict=True):
        means, spreads = orders.mean(axis=1), orders.std(axis=1)
        panels[1].errorbar(kappas, means, spreads, marker="o", color=colour, label=name)
    panels[1].legend(loc="center right")
    return lab.Picture(
        figure,
        r"Stationary states of unnormalised attention, stable ones solid. Left: circle "
        r"$\beta = 2.3 < \beta_*$, order sets in continuously. Right: $\mathbb{S}^7$, "
        r"$\beta = 3$, the branch turns back to a fold (dot); tokens leave the uniform "
        r"state near $\kappa_c$ and fall off the branch at its fold.",
    )
