r"""The number of modes of the kernel density of random tokens.

For $n$ standard normal tokens and the bandwidth $\beta^{-1/2}$ the expected number of
modes of $\sum_i e^{-\beta(t - X_i)^2/2}$ is of the order of $\sqrt{\beta\log\beta}$
whenever $n^c \le \beta \le n^{2-c}$: a theorem. Here modes are counted exactly, with a
certificate, and compared with the formula of Kac and Rice, whose Gaussian form diverges
in the empty tails and is right once it is corrected by the mode density $F(\lambda)$ of
a Poisson process. That density is computed in two ways that share nothing: by counting,
and by quadrature of a characteristic function.
"""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import scipy.optimize

import meanformer as mf
import meanformer.experiments as lab
from meanformer.observables import (
    convex_angle,
    count_modes,
    expected_modes,
    mode_constant,
    mode_window,
    poisson_mode_integral,
    sample_modes,
    sample_poisson_modes,
)
from meanformer.plotting import style

# Numbers of tokens and inverse temperatures at which the formula is put to the test.
CASES = [(100, 10), (1000, 10), (100, 100), (400, 100), (1000, 100)]
CASES += [(1000, 1000), (4000, 400)]
EXPONENTS = 0.75, 1.0, 1.5
SIZES = 100, 300, 1000
RATES = 1.5, 3.0, 1.0, 0.5, 0.7, 2.0


class Parameters(lab.Parameters):
    """How much is counted."""

    samples: int = lab.setting(
        16, full=400, help="clouds of tokens for each setting", at_least=10
    )
    length: float = lab.setting(
        2.4e4, full=2e6, help="bandwidths of the Poisson processes", at_least=8000
    )
    rates: int = lab.setting(
        2, full=6, help="rates of Poisson processes", at_least=1, at_most=6
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


@lab.experiment(
    "How many modes the density of random tokens has", room="observables", seconds=15
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Count, integrate, compare."""
    first, second = jr.split(jr.key(parameters.seed))
    counted = count_all(CASES, parameters, progress, key=first)
    means, errors = np.array([(s.mean, s.standard_error) for s in counted.values()]).T
    formula = np.array([float(expected_modes(*case)) for case in CASES])
    allowed = np.maximum(0.1 * formula, 4 * errors)
    grid = [(n, float(n) ** a) for a in EXPONENTS for n in SIZES]
    window = count_all(grid, parameters, progress, key=second)
    normal = jr.normal(jr.key(parameters.seed), (100, 1))
    cloud, fewer = mf.TokenCloud(normal), mf.TokenCloud(normal[:60])
    found = {beta: count_modes(cloud, beta) for beta in (10.0, 100.0, 1000.0)}
    rising = [count_modes(fewer, beta).count for beta in np.geomspace(1, 1e6, 25)]
    shares = [one.mean / mode_window(beta) for (_, beta), one in window.items()]
    certified = [one.is_certified for one in [*counted.values(), *window.values()]]
    far = [expected_share(1e60, exponent) for exponent in EXPONENTS[1:]]
    limits = [mode_constant(exponent) for exponent in EXPONENTS[1:]]
    return lab.Outcome(
        findings=[
            WINDOW.inside(shares, 0.1, 0.6),
            COUNTED.at_most(np.abs(means - formula) / allowed, 1.0),
            POISSON.close_to(poisson_errors(parameters, progress), 0.0, tolerance=4.0),
            threshold_finding(),
            MONOTONE.at_least(np.diff(rising), 0.0),
            CERTIFIED.close_to(certified, 1.0, tolerance=0),
            CONSTANT.close_to(far, limits, relative_tolerance=0.02),
        ],
        pictures=[draw_densities(cloud, found), draw_window(window)],
    )


def count_all(settings, parameters: Parameters, progress, *, key) -> dict:
    """Samples of the numbers of modes, for each number of tokens and temperature."""
    keys = iter(jr.split(key, len(settings)))
    return {
        (count, beta): sample_modes(count, beta, parameters.samples, key=next(keys))
        for count, beta in progress.over(settings, 0.35)
    }


def expected_share(count: float, exponent: float) -> float:
    """The formula over the window, at a power of the number of tokens."""
    beta = count**exponent
    return float(expected_modes(count, beta) / mode_window(beta))


def poisson_errors(parameters: Parameters, progress) -> np.ndarray:
    """Counted modes of Poisson processes less their integral, in standard errors."""
    rates, samples = np.array(RATES[: parameters.rates]), []
    for index, rate in enumerate(progress.over(rates, 0.2)):
        key = jr.fold_in(jr.key(parameters.seed + 3), index)
        samples.append(sample_poisson_modes(rate, parameters.length, key=key))
    for _ in progress.over(range(1), 0.1):
        integral = poisson_mode_integral(rates, cutoff=parameters.cutoff)
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
        curve = [expected_share(n, exponent) for n in sizes]
        axes.plot(sizes, curve, color=colour, label=rf"$\beta = n^{{{exponent:g}}}$")
        axes.axhline(mode_constant(exponent), color=colour, linestyle=":", linewidth=1)
        places = [(n, float(n) ** exponent) for n in SIZES]
        samples = [(window[p].mean, 2 * window[p].standard_error) for p in places]
        units = np.asarray(mode_window([beta for _, beta in places]))
        means, bars = np.array(samples).T / units
        axes.errorbar(shift * np.array(SIZES), means, bars, fmt="o", color=colour)
    axes.set(xscale="log", xlabel="tokens $n$", ylim=(0, 0.65))
    axes.set_ylabel(r"modes over $\sqrt{\beta\log\beta}$")
    axes.legend(ncols=3, loc="lower center")
    return lab.Picture(
        figure,
        r"Expected modes of normal tokens in units of $\sqrt{\beta\log\beta}$: counted "
        r"(dots, two standard errors), the corrected formula (lines), and the constant "
        r"that it tends to, logarithmically slowly (dotted).",
    )
