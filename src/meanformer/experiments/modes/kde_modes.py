r"""The number of modes of the kernel density of random tokens.

For $n$ standard normal tokens and the bandwidth $\beta^{-1/2}$ the expected number of
modes of $\sum_i e^{-\beta(t - X_i)^2/2}$ is of the order of $\sqrt{\beta\log\beta}$
whenever $n^c \le \beta \le n^{2-c}$: a theorem. Here modes are counted exactly, with a
certificate, and compared with the formula of Kac and Rice, whose Gaussian form diverges
in the empty tails and is right once it is corrected by the mode density $F(\lambda)$ of
a Poisson process. That density is computed in two ways that share nothing: by counting,
and by quadrature of a characteristic function.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import scipy.optimize

import meanformer as mf
import meanformer.experiments as lab
from meanformer.observables import (
    convex_angle,
    count_modes,
    expected_circle_modes,
    expected_modes,
    mode_constant,
    mode_rate,
    mode_window,
    poisson_mode_integral,
    sample_modes,
    sample_poisson_modes,
)
from meanformer.plotting import style

FORMULA = {
    (100, 10): 1.6244,
    (1000, 10): 1.0985,
    (100, 100): 9.886,
    (400, 100): 10.091,
    (1000, 100): 8.702,
    (1000, 1000): 37.311,
    (4000, 400): 22.650,
}
EXPONENTS = 0.75, 1.0, 1.5
SIZES = 100, 300, 1000
CIRCLE = 5.0, 25.0, 100.0


@dataclass(frozen=True)
class Parameters:
    """How much is counted."""

    samples: int = lab.setting(
        16, full=400, help="clouds of tokens for each setting", at_least=10
    )
    length: float = lab.setting(
        2.4e4, full=2e6, help="bandwidths of the Poisson processes", at_least=8000
    )
    rates: int = lab.setting(
        4, full=9, help="rates of Poisson processes", at_least=2, at_most=9
    )
    cutoff: float = lab.setting(
        210.0, full=400.0, help="radius of the quadrature", above=200
    )
    seed: int = lab.setting(0, help="seed of all tokens", at_least=0)


WINDOW = lab.observation(
    "window",
    r"The mean number of modes over $\sqrt{\beta\log\beta}$ stays between two "
    r"positive constants: for $\beta = n^a$, $a = 0.75, 1, 1.5$ and $n$ from $100$ to "
    "$1000$ it lies in $[0.1, 0.6]$.",
    "GRS24, expected number of modes (the constants are ours)",
    source=lab.theory("of one order"),
)
COUNTED = lab.observation(
    "corrected-formula",
    "The corrected formula is right to one tenth of its value, or four standard "
    "errors of what is counted, for $n$ from $100$ to $4000$.",
    source=lab.other_method("exact counting"),
)
DIGITS = lab.observation(
    "formula-digits",
    "The corrected formula has the values of an independent program, whose "
    r"$F(\lambda)$ was counted.",
    source=lab.tabulated(),
)
TAILS = lab.observation(
    "divergence",
    "Without the correction the integral grows with its range: $29.6$ over "
    r"$|t| \le 8$ and $36.6$ over $|t| \le 10$ for $n = \beta = 100$.",
    source=lab.tabulated(),
)
POISSON = lab.observation(
    "poisson-density",
    "Counting the modes of Poisson processes gives the quadrature of the formula of "
    "Kac and Rice for shot noise, at rates of $0.5$ tokens per bandwidth and more, "
    "in units of the standard error.",
    source=lab.other_method("characteristic function of $(f', f'')$, four errors"),
)
THRESHOLD = lab.observation(
    "two-tokens",
    "Two tokens are two modes beyond two bandwidths on the line, and on the circle "
    r"at $\beta = 5$ beyond the half-angle with $\beta\sin^2 a = \cos a$.",
    source=lab.closed_form(),
)
ROUND = lab.observation(
    "circle-formula",
    r"Uniform tokens on the circle have $\sqrt{\sum k^4I_k^2/\sum k^2I_k^2}$ modes on "
    "average, in units of the standard error: no logarithm.",
)
MONOTONE = lab.theorem(
    "monotone",
    r"On the line the number of modes never decreases with $\beta$.",
    "Sil81, the number of maxima decreases with the bandwidth",
    source=lab.theory(),
)
CERTIFIED = lab.observation(
    "certified",
    "Every count is proved by bounds of all errors.",
    source=lab.theory("all intervals decided"),
)
CONSTANT = lab.observation(
    "constant",
    r"With $\beta = n^a$, $a = 1, 1.5$, the formula over $\sqrt{\beta\log\beta}$ has "
    r"come within two percent of $\tfrac{\sqrt3}\pi\sqrt{1/a - 1/2}$, its heuristic "
    "limit, at $n = 10^{60}$.",
    source=lab.closed_form(r"$\tfrac{\sqrt3}\pi\sqrt{1/a - 1/2}$"),
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Count, integrate, compare."""
    seed = parameters.seed
    first, second = jr.split(jr.key(seed))
    counted = count_all(FORMULA, parameters, progress, key=first)
    grid = [(n, float(n) ** a) for a in EXPONENTS for n in SIZES]
    window = count_all(grid, parameters, progress, key=second)
    around = {}
    for index, beta in enumerate(progress.over(CIRCLE, 0.2)):
        options = {"space": mf.Sphere(), "key": jr.fold_in(jr.key(seed + 2), index)}
        around[beta] = sample_modes(400, beta, parameters.samples, **options)
    cloud = normal_cloud(100, seed)
    found = {beta: count_modes(cloud, beta) for beta in (10.0, 100.0, 1000.0)}
    samples = [*counted.values(), *window.values(), *around.values()]
    four_errors = r"of $n \to \infty$, at $n = 400$; four standard errors"
    return lab.Outcome(
        findings=[
            WINDOW.inside(
                [found.mean / mode_window(beta) for (_, beta), found in window.items()],
                0.1,
                0.6,
            ),
            *formula_findings(counted),
            POISSON.close_to(poisson_errors(parameters, progress), 0.0, tolerance=4.0),
            threshold_finding(),
            ROUND.close_to(
                [
                    (found.mean - expected_circle_modes(beta)) / found.standard_error
                    for beta, found in around.items()
                ],
                0.0,
                tolerance=4.0,
                source=lab.closed_form(four_errors),
            ),
            CERTIFIED.close_to(
                [sample.is_certified for sample in samples], 1.0, tolerance=0
            ),
            *line_findings(normal_cloud(60, seed)),
        ],
        pictures=[draw_densities(cloud, found), draw_window(window)],
    )


def count_all(settings, parameters: Parameters, progress, *, key) -> dict:
    """Samples of the numbers of modes, for each number of tokens and temperature."""
    keys = jr.split(key, len(settings))
    return {
        (count, beta): sample_modes(count, beta, parameters.samples, key=one)
        for (count, beta), one in zip(
            progress.over(list(settings), 0.25), keys, strict=True
        )
    }


def formula_findings(counted):
    """The corrected formula against counting and digits, the other one's divergence."""
    formula = np.array([float(expected_modes(*place)) for place in counted])
    means = np.array([sample.mean for sample in counted.values()])
    errors = np.array([sample.standard_error for sample in counted.values()])
    ranges = [
        np.trapezoid(mode_rate(places, 100, 100, corrected=False), places)
        for places in (np.linspace(-end, end, 4001) for end in (8, 10))
    ]
    return (
        COUNTED.at_most(
            np.abs(means - formula) / np.maximum(0.1 * formula, 4 * errors), 1.0
        ),
        DIGITS.close_to(formula, list(FORMULA.values()), relative_tolerance=1e-3),
        TAILS.close_to(ranges, [29.6, 36.6], tolerance=0.05),
    )


def poisson_errors(parameters: Parameters, progress) -> np.ndarray:
    """Counted modes of Poisson processes less their integral, in standard errors."""
    rates = np.array([1.5, 0.1, 3.0, 0.3, 1.0, 0.5, 0.2, 0.7, 2.0])
    rates = np.sort(rates[: parameters.rates])
    samples = []
    for index, rate in enumerate(progress.over(rates, 0.2)):
        key = jr.fold_in(jr.key(parameters.seed + 3), index)
        if rate >= 0.5:
            samples.append(sample_poisson_modes(rate, parameters.length, key=key))
    for _ in progress.over(range(1), 0.1):
        many = rates[rates >= 0.5]
        integral = poisson_mode_integral(many, cutoff=parameters.cutoff)
    means = np.array([sample.mean for sample in samples])
    return (means - integral) / [sample.standard_error for sample in samples]


def threshold_finding():
    """The smallest distance of two tokens with two modes, by bisection."""

    def line(gap):
        return count_modes(mf.TokenCloud(jnp.array([[0.0], [gap]])), 1.0).count - 1.5

    def circle(angle):
        cloud = mf.TokenCloud.from_angles(np.array([angle, -angle]))
        return count_modes(cloud, 5.0, space=mf.Sphere()).count - 1.5

    found = [
        scipy.optimize.bisect(line, 1.0, 3.0, xtol=1e-7),
        scipy.optimize.bisect(circle, 0.2, 1.0, xtol=1e-7),
    ]
    return THRESHOLD.close_to(found, [2.0, convex_angle(5.0)], tolerance=1e-6)


def normal_cloud(count: int, seed: int) -> mf.TokenCloud:
    """Standard normal tokens."""
    return mf.TokenCloud(jr.normal(jr.key(seed), (count, 1)))


def line_findings(cloud: mf.TokenCloud):
    """Counts as the bandwidth shrinks, and the formula far beyond any computer."""
    counts = [count_modes(cloud, beta).count for beta in np.geomspace(1, 1e6, 25)]
    exponents, count = (1.0, 1.5), 1e60
    ratios = [
        float(expected_modes(count, count**a) / mode_window(count**a))
        for a in exponents
    ]
    return (
        MONOTONE.at_least(np.diff(counts), 0.0),
        CONSTANT.close_to(
            ratios, [mode_constant(a) for a in exponents], relative_tolerance=0.02
        ),
    )


def draw_densities(cloud: mf.TokenCloud, found) -> lab.Picture:
    """One cloud at three bandwidths, with its modes and valleys."""
    figure, panels = style.canvas(1, 3, panel=(7.0, 1.7), sharex=True)
    tokens = np.asarray(cloud.points)[:, 0]
    places = np.linspace(tokens.min() - 0.4, tokens.max() + 0.4, 1500)

    def density(points, beta):
        gaps = np.asarray(points)[:, None] - tokens[None, :]
        return np.sqrt(beta / 2 / np.pi) * np.exp(-beta * gaps**2 / 2).mean(1)

    for axes, (beta, modes) in zip(panels, found.items(), strict=True):
        peaks, valleys = modes.positions, modes.valleys
        axes.fill_between(places, density(places, beta), color=style.BLUE, alpha=0.25)
        axes.plot(peaks, density(peaks, beta), "o", color=style.ORANGE, ms=4.5)
        axes.plot(valleys, density(valleys, beta), "o", color=style.INK, ms=2.5)
        axes.plot(tokens, np.zeros_like(tokens), "|", color=style.INK, alpha=0.4)
        title = rf"$\beta = {beta:g}$, modes: {modes.count}"
        axes.set(ylabel="density", ylim=(0, None), title=title)
    panels[-1].set(xlabel="$t$")
    return lab.Picture(
        figure,
        "The same 100 normal tokens (ticks) at three bandwidths: modes in orange, "
        "valleys in black. The modes spread into the tails, where tokens stand alone.",
    )


def draw_window(window) -> lab.Picture:
    """Modes over the window, counted and expected."""
    figure, axes = style.canvas(panel=(6.4, 4.0))
    sizes = np.geomspace(30, 1e12, 60)
    # Apart, where curves are close.
    shifts = 0.92, 1.08, 1.0
    for exponent, colour, shift in zip(EXPONENTS, style.PALETTE, shifts, strict=False):
        curve = [
            expected_modes(n, n**exponent) / mode_window(n**exponent) for n in sizes
        ]
        axes.plot(sizes, curve, color=colour, label=rf"$\beta = n^{{{exponent:g}}}$")
        axes.axhline(mode_constant(exponent), color=colour, linestyle=":", linewidth=1)
        samples = [window[n, float(n) ** exponent] for n in SIZES]
        units = np.array([float(mode_window(float(n) ** exponent)) for n in SIZES])
        axes.errorbar(
            shift * np.array(SIZES),
            [sample.mean for sample in samples] / units,
            [2 * sample.standard_error for sample in samples] / units,
            fmt="o",
            color=colour,
        )
    axes.set(xscale="log", xlabel="tokens $n$", ylim=(0, 0.65))
    axes.set(ylabel=r"modes over $\sqrt{\beta\log\beta}$")
    axes.legend(ncols=3, loc="lower center")
    return lab.Picture(
        figure,
        r"Expected modes of normal tokens in units of $\sqrt{\beta\log\beta}$: counted "
        r"(dots, two standard errors), the corrected formula (lines), and the constant "
        r"that it tends to, logarithmically slowly (dotted).",
    )


experiment = lab.experiment(
    run,
    "How many modes the density of random tokens has",
    room="observables",
    seconds=15,
)
