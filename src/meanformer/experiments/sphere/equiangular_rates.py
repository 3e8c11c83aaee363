r"""Tokens at equal angles cluster in a time that is an integral.

If all tokens on the sphere have one inner product $\rho$ with each other, they keep
having one, and attention is an equation for a single number,
$\dot\rho = 2e^{\beta\rho}(1-\rho)\bigl((n-1)\rho+1\bigr)/\bigl(e^\beta +
(n-1)e^{\beta\rho}\bigr)$
for softmax. The time to a level is an integral, its inverse in $\beta$ the boundary of
the clustered phase, and independent tokens in high dimension, which are nearly
orthogonal, follow the same curve.
"""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import scipy.optimize
import scipy.special

import meanformer as mf
import meanformer.experiments as lab
from meanformer.observables import Equiangular, critical_beta, mean_cosine, phase_curve
from meanformer.plotting import style

LEVEL = 0.999
KINDS = ("softmax", "unnormalised")
SAVED = 41


class Parameters(lab.Parameters):
    """Sizes of the random start."""

    count: int = lab.setting(32, help="random tokens", at_least=8)
    dimension: int = lab.setting(256, full=1024, help="their dimension", at_least=32)
    clouds: int = lab.setting(4, full=12, help="independent clouds", at_least=2)
    seed: int = lab.setting(0, help="seed of the clouds", at_least=0)


INTEGRALS = lab.observation(
    "exponential-integrals",
    "The times of softmax attention are a sum of exponential integrals and "
    r"logarithms, up to $\beta = 300$.",
    source=lab.closed_form(r"partial fractions: $\mathrm{Ei}$, $E_1$ of SciPy"),
)
FULL = lab.theorem(
    "full-flow",
    "Orthonormal tokens under the full flow reach the level at the time of the "
    "integral, all pairs at once: softmax and unnormalised, $n = 32$.",
    "GLPR23, the equation of orthogonal tokens",
    source=lab.closed_form("the integral of the time, at its end"),
)
INVERSE = lab.observation(
    "phase-curve",
    r"The boundary of the clustered phase is the inverse of the time in $\beta$, for "
    "$n = 32$ and $128$ at the depths $10$, $20$ and $30$.",
    source=lab.other_method("Brent's method on the exponential integrals, by SciPy"),
)
EMPTY = lab.observation(
    "no-curve",
    "For $n = 32$ softmax attention has no curve before the depth "
    r"$\frac12\log(999n+1)$ of $\beta = 0$, and unnormalised attention none after it: "
    "so many depths of $200$ are on the curves.",
    source=lab.closed_form(r"the time at $\beta = 0$"),
)
RATES = lab.theorem(
    "rates",
    r"In the end the gap $1 - \rho$ falls like $e^{-2t}$ under softmax and like "
    r"$e^{-2te^\beta}$ under unnormalised attention.",
    "GLPR23, exponential rate of clustering in a hemisphere",
    source=lab.theory(r"$2$, $2e^\beta$"),
)
RANDOM = lab.observation(
    "random-tokens",
    "Independent uniform tokens in high dimension have average cosines that follow "
    r"the curve of orthogonal tokens, for $\beta = 1$ and $4$: distance over what "
    "chance and curvature allow.",
    "GLPR23, the high-dimensional case",
    source=lab.theory(
        "three standard errors of the mean over clouds, carried along the curve, "
        r"and a bias of order $1/d$"
    ),
)


@lab.experiment(
    "Orthogonal tokens cluster at a time given by an integral",
    room="observables",
    seconds=12,
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Compare integrals, curves, full flows and networks."""
    full = [full_gap(kind) for kind in progress.over(KINDS, 0.5)]
    paths = {
        beta: random_paths(beta, parameters) for beta in progress.over((1.0, 4.0), 0.5)
    }
    cases = [(2, 3.0), (32, 1.0), (32, 30.0), (1000, 100.0), (5, 300.0)]
    return lab.Outcome(
        findings=[
            INTEGRALS.close_to(
                [Equiangular(*case).time_to(LEVEL) for case in cases],
                [exponential_integrals(*case) for case in cases],
                relative_tolerance=1e-11,
            ),
            FULL.close_to(np.array(full) / (1 - LEVEL), 1.0, tolerance=1e-7),
            *curve_findings(),
            rate_finding(),
            random_finding(paths, parameters),
        ],
        pictures=[draw_boundaries(), draw_paths(paths, parameters)],
    )


def full_gap(kind: str) -> np.ndarray:
    """Gaps of all pairs of 32 orthonormal tokens at the time of the integral."""
    flow = mf.Flow(mf.identity_attention(kind, 32, 1.0), space=mf.Sphere())
    cloud, time = mf.TokenCloud(jnp.eye(32)), Equiangular(32, 1.0, kind=kind).time_to()
    points = mf.solve(flow, cloud, time, save=2, rtol=1e-11, atol=1e-13).points[-1]
    return np.asarray(1 - points @ points.T)[np.triu_indices(32, 1)]


def exponential_integrals(count: int, beta: float) -> float:
    """The time from orthogonal tokens to the level, by partial fractions in the gap."""
    ratio, low = count / (count - 1), 1 - LEVEL
    integral, far = scipy.special.expi, scipy.special.exp1
    near = integral(beta) - integral(beta * low) - (count - 1) * np.log(low)
    rest = far(beta * (ratio - 1)) - far(beta * (ratio - low))
    logarithm = (count - 1) * np.log((ratio - low) / (ratio - 1))
    return (near + np.exp(beta * ratio) * rest + logarithm) / (2 * count)


def curve_findings():
    """The curve against bracketing, and where it exists."""
    cases = [(count, depth) for count in (32, 128) for depth in (10, 20, 30)]
    bracketed = [
        scipy.optimize.brentq(
            lambda b, n=n, t=t: exponential_integrals(n, b) - t, 0.1, 20
        )
        for n, t in cases
    ]
    end = 0.5 * np.log((31 * LEVEL + 1) / (1 - LEVEL))
    depths = np.linspace(0.1, 30, 200)
    return (
        INVERSE.close_to(
            [critical_beta(*case) for case in cases], bracketed, tolerance=6e-8
        ),
        EMPTY.close_to(
            [len(phase_curve(32, depths, kind=kind).betas) for kind in KINDS],
            [(depths >= end).sum(), (depths <= end).sum()],
            tolerance=0,
        ),
    )


def rate_finding():
    """Rates at the end, from two gaps far below rounding of the inner product."""
    rates = []
    for kind, depth in (("softmax", 40.0), ("unnormalised", 15.0)):
        depths = depth + np.linspace(0, 1, SAVED)
        gaps = np.asarray(Equiangular(32, 1.0, kind=kind).gap(depths))
        rates.append(np.log(gaps[0] / gaps[-1]))
    return RATES.close_to(rates, [2, 2 * np.e], relative_tolerance=1e-8)


def random_paths(beta: float, parameters: Parameters):
    """Average cosines of random clouds along depth, and the curve of the model."""
    dimension, model = parameters.dimension, Equiangular(parameters.count, beta)
    depths = np.linspace(0, 2 * model.time_to(0.5), SAVED)
    attention = mf.identity_attention("softmax", dimension, beta)
    flow, law = mf.Flow(attention, space=mf.Sphere()), mf.UniformSphere(dimension)
    cosines = []
    for key in jr.split(jr.key(parameters.seed), parameters.clouds):
        cloud = mf.TokenCloud(law.sample(parameters.count, key=key))
        path = mf.solve(flow, cloud, depths[-1], save=depths)
        cosines.append(jax.vmap(mean_cosine, (0, None))(path.points, cloud.weights))
    return depths, np.array(cosines), np.asarray(model.solve(depths))


def random_finding(paths, parameters: Parameters):
    """Means over clouds against the curve, over what chance and curvature allow.

    The average cosine of a cloud has the variance 2/(n(n-1)d) at the start, and a small
    change of it grows like the velocity of the curve. Inner products of variance 1/d
    change the mean of an exponential by a share of beta^2/(2d), so the curve is late
    or early by that share of the depth.
    """
    pairs, dimension = parameters.count * (parameters.count - 1), parameters.dimension
    error = np.sqrt(2 / (pairs * dimension * parameters.clouds))
    apart = []
    for beta, (depths, cosines, curve) in paths.items():
        speed = np.asarray(Equiangular(parameters.count, beta).velocity(curve))
        bias = (1 + beta**2 / 2 * depths * speed) / dimension
        allowed = 3 * error * speed / speed[0] + bias
        apart.append(np.abs(cosines.mean(0) - curve) / allowed)
    return RANDOM.at_most(np.max(apart), 1.0)


def draw_boundaries() -> lab.Picture:
    """Boundaries of the clustered phase, for both kinds."""
    figure, (left, right) = style.canvas(2, panel=(4.6, 3.6))
    betas = np.linspace(0, 12, 121)
    for count in (2, 8, 32, 128, 1024):
        first = Equiangular(count, 0.0).time_to(LEVEL)
        curve = phase_curve(count, first * np.geomspace(1 + 1e-12, 200, 400))
        left.plot(curve.depths, curve.betas, label=f"$n = {count}$")
        laws = [Equiangular(count, beta, kind="unnormalised") for beta in betas]
        right.plot([law.time_to(LEVEL) for law in laws], betas)
    left.set(xscale="log", xlabel="depth $t$", ylabel=r"$\beta$", title="softmax")
    right.set(xscale="log", xlabel="depth $t$", title="unnormalised", ylim=(0, 12))
    left.text(130, 6.0, "one cluster", fontsize=10)
    right.text(4.0, 9.0, "one\ncluster", fontsize=10)
    left.legend(loc="lower right", ncols=2)
    return lab.Picture(
        figure,
        r"The curves on which orthogonal tokens reach $\rho = 0.999$. Softmax attention"
        " (left) has clustered below and right of its curve, and the depth grows "
        r"exponentially with $\beta$; unnormalised attention (right) above. Both meet "
        r"$\beta = 0$ at the depth $\frac12\log\frac{(n-1)\rho+1}{1-\rho}$.",
    )


def draw_paths(paths, parameters: Parameters) -> lab.Picture:
    """Average cosines of random clouds with the curve of the model."""
    figure, axes = style.canvas(panel=(5.6, 3.8))
    for beta, (depths, cosines, curve) in paths.items():
        name = rf"mean of random tokens, $\beta = {beta:g}$"
        (mean,) = axes.plot(depths, cosines.mean(0), label=name)
        axes.plot(depths, cosines.T, color=mean.get_color(), alpha=0.35, linewidth=1)
        (last,) = axes.plot(depths, curve, "--", color=style.INK, linewidth=1.4)
    last.set_label("orthogonal tokens, one equation")
    axes.set(xlabel="depth $t$", ylabel="average cosine of two tokens")
    axes.legend(loc="lower right")
    return lab.Picture(
        figure,
        f"Average cosine of {parameters.count} independent tokens in dimension "
        f"{parameters.dimension}, one pale line for each cloud, and the curve that "
        r"starts at $\rho = 0$ (dashed).",
    )
