r"""How long groups of tokens stay apart.

Two groups of masses $m_1, m_2$ on the sphere at the angle $\varphi$ follow a law of
their own, under softmax attention
$\dot\varphi = -\Bigl[\frac{m_2 e^{\beta\cos\varphi}}{m_1 e^\beta + m_2
e^{\beta\cos\varphi}} + \frac{m_1 e^{\beta\cos\varphi}}{m_2 e^\beta + m_1
e^{\beta\cos\varphi}}\Bigr]\sin\varphi$,
so that the time they stay apart is an integral, which grows like
$e^{\beta(1-\cos\varphi_0)}/(2\beta\sin^2\varphi_0)$ for equal masses. It is computed in
logarithms, compared with SciPy, with its asymptotic formula, and with the flow itself,
walked through depths of $10^{15}$ (`LongDepth`). Groups of several tokens first tighten
and then wait in the same way. Where unequal groups meet is another integral: near the
point of squared masses, not at the barycentre.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import scipy.integrate

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers.circle_walks import (
    attention_on_circle,
    depths_around,
    joins_of,
    long_depths,
    walk_on_circle,
)
from meanformer.geometry.circle import angles_of
from meanformer.observables import TwoGroups, separation
from meanformer.plotting import mark_values, style

RIGHT = np.pi / 2
MEETING = 0.1  # the angle up to which a dwell time is taken
DWELL = {4: 10.021878351631, 10: 1129.33847345, 20: 12191759.4252, 40: 2.94602185e15}
UNEQUAL = (0.7, 0.3)
SKEWED = 818.7785778  # dwell time of these masses at beta = 10
STARTS = (0.6, 1.0, RIGHT, 2.2)
POINTS = {10: 0.3116278, 40: 0.2772760, 160: 0.2604620, 640: 0.2520972}
CLOSED = 0.8, 0.1  # from one gap to another in the clocks
CLOCK = {10: 0.2156, 20: 0.0631, 40: 0.0263}
GROUPS = (-0.05, 0.0, 0.06, 1.23, 1.29)  # three tokens and two
TIGHT = 1e-6  # tokens so close count as one


@dataclass(frozen=True)
class Parameters:
    """How far the temperature is lowered."""

    largest: float = lab.setting(
        400.0, full=4000.0, help=r"$\beta$ of the asymptotic formula", at_least=100
    )
    groups: int = lab.setting(
        3,
        full=6,
        help=r"temperatures of groups of several tokens",
        at_least=2,
        at_most=6,
    )
    rtol: float = lab.setting(1e-12, help="relative tolerance of the walks", above=0)


DIGITS = lab.observation(
    "dwell-digits",
    r"Equal groups stay apart, from $\pi/2$ to $0.1$, for $10.021878351631$, "
    r"$1129.33847345$, $12191759.4252$ and $2.94602185\cdot 10^{15}$ at "
    r"$\beta = 4, 10, 20, 40$; groups of masses $0.7$ and $0.3$ for $818.7785778$ at "
    r"$\beta = 10$.",
    source=lab.tabulated(),
)
INTEGRAL = lab.observation(
    "integral",
    "The dwell times of both flows, equal and unequal masses, four angles, are those "
    "of SciPy's quadrature.",
    source=lab.other_method("quadrature of the law by SciPy, in logarithms"),
)
FLOW = lab.observation(
    "flow",
    "The flow itself brings two groups together at these depths, up to "
    r"$3\cdot 10^{15}$.",
    source=lab.other_method("quadrature of the two-group law by SciPy"),
)
EXPONENTIAL = lab.theorem(
    "exponential",
    r"The dwell time grows exponentially: $\log(T\beta)$ has the slope "
    r"$1 - \cos\varphi_0 - 2\cos\varphi_0/(\beta\sin\varphi_0)^2$ in $\beta$ up to "
    r"$O(\beta^{-3})$, for softmax, at four angles.",
    "GKPR24, clusters that last for a time exponential in the inverse temperature",
    source=lab.theory("two terms of Laplace's method"),
)
ASYMPTOTIC = lab.observation(
    "asymptotic",
    r"At the largest $\beta$ the time is "
    r"$\frac{m_1m_2}{m_1^2+m_2^2}\,e^{\beta(1-\cos\varphi_0)}/(\beta\sin^2\varphi_0)$ "
    r"times $1 + 2\cos\varphi_0/(\beta\sin^2\varphi_0) + O(\beta^{-2})$, for softmax.",
    source=lab.other_method("SciPy's quadrature, over the formula"),
)
MEETING_POINT = lab.observation(
    "meeting-point",
    r"Groups of masses $0.7$ and $0.3$ meet, for $\beta = 10, 40, 160, 640$, at "
    "$0.3116278$, $0.2772760$, $0.2604620$, $0.2520972$: near the point of squared "
    "masses $0.2437443$, not at the barycentre $0.4712389$.",
    source=lab.tabulated("by the flow, and by the integral over the angle"),
)
CLOCKS = lab.observation(
    "initial-clock",
    r"In the clock $e^{\beta(1-\langle x_1,x_2\rangle)}$ with the initial inner "
    "product equal groups close from $0.8$ to $0.1$ within $0.2156$, $0.0631$, "
    r"$0.0263$ at $\beta = 10, 20, 40$: of order $1/\beta$, not of order one.",
    source=lab.tabulated(),
)
TIGHTEN = lab.observation(
    "tighten",
    "Separated groups of three and two tokens have tightened to $10^{-6}$ at a depth "
    r"$T_1 \le \beta$.",
    "GKPR24, first phase",
)
STAY = lab.observation(
    "stay",
    "They then stay apart until a depth $T_2$ whose logarithm is that of two groups "
    "at their means, to two per cent.",
    "GKPR24, second phase",
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Compare integrals with tables, SciPy, asymptotics and flows."""
    rtol = parameters.rtol
    equal = [(beta, (0.5, 0.5)) for beta in DWELL]
    dwells = {
        case: pair_walk(*case, rtol, merge=MEETING)
        for case in progress.over([*equal, (10, UNEQUAL)], 0.3)
    }
    met = [pair_walk(beta, UNEQUAL, rtol) for beta in progress.over(POINTS, 0.2)]
    betas = np.linspace(20, 45, parameters.groups)
    several = [groups_walk(beta, rtol) for beta in progress.over(betas, 0.2)]
    joins = np.asarray(joins_of(several[-1]).depths)[2:]
    closely = groups_walk(betas[-1], rtol, depths_around(joins, 1e3 * joins[-1]))
    return lab.Outcome(
        findings=[
            *dwell_findings(dwells),
            *growth_findings(parameters.largest),
            *meeting_findings(met),
            *groups_findings(betas, several),
        ],
        pictures=[draw_times(), draw_groups(closely, betas[-1])],
    )


def two_groups(beta: float, masses=(0.5, 0.5), kind: str = "softmax") -> TwoGroups:
    """The law of two groups."""
    return TwoGroups(attention_on_circle(kind, beta), masses)


def by_scipy(beta, start, masses=(0.5, 0.5), kind="softmax") -> float:
    """Logarithm of the dwell time by SciPy's quadrature, the law written out."""
    first, second = masses

    def slowness(angle):
        fall = np.exp(beta * (np.cos(angle) - 1))
        pulls = second / (first + second * fall) + first / (second + first * fall)
        pulls = first + second if kind == "unnormalised" else pulls
        growth = np.exp(beta * (np.cos(start) - np.cos(angle)))
        return growth / (pulls * np.sin(angle))

    # The integrand is concentrated near the start: each decade on its own.
    ends = start - (start - MEETING) * np.array([0, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 1])
    parts = [
        scipy.integrate.quad(slowness, low, high, epsabs=0, epsrel=1e-12)[0]
        for high, low in itertools.pairwise(ends)
    ]
    return float(beta * (1 - np.cos(start)) + np.log(sum(parts)))


def pair_walk(beta: float, masses, rtol: float, merge=None) -> mf.Trajectory:
    """Two groups at a right angle, walked until they are joined."""
    last = 10 * two_groups(beta, masses).dwell_time(RIGHT, merge or TIGHT)
    depths = long_depths(last, last / 2)
    options = {"weights": masses, "merge": merge, "rtol": rtol}
    return walk_on_circle((0.0, RIGHT), beta, depths, **options)


def dwell_findings(dwells):
    """Dwell times by the law against digits and SciPy, and the flow against SciPy."""
    kinds, masses = ("softmax", "unnormalised"), ((0.5, 0.5), UNEQUAL)
    cases = list(itertools.product((2.0, 30.0, 300.0), STARTS, masses, kinds))
    return (
        DIGITS.close_to(
            [two_groups(*case).dwell_time(RIGHT, MEETING) for case in dwells],
            [*DWELL.values(), SKEWED],
            relative_tolerance=2e-9,
        ),
        INTEGRAL.close_to(
            [two_groups(b, m, k).log_dwell_time(s, MEETING) for b, s, m, k in cases],
            [by_scipy(*case) for case in cases],
            tolerance=1e-9,
        ),
        FLOW.close_to(
            [float(joins_of(path).depths[0]) for path in dwells.values()],
            np.exp([by_scipy(beta, RIGHT, masses) for beta, masses in dwells]),
            relative_tolerance=1e-8,
        ),
    )


def growth_findings(largest: float):
    r"""Slopes in beta, and the leading term; twice the next term is allowed.

    In $c = \cos\varphi$ the integrand is $e^{-\beta c}/(1 - c^2)$, so that the next
    terms of Laplace's method are two derivatives of $1/(1 - c^2)$ over itself.
    """
    betas = largest * np.array([0.98, 1.02])
    logs = [
        [two_groups(beta).log_dwell_time(start, MEETING) for beta in betas]
        for start in STARTS
    ]
    slopes = np.diff(np.array(logs) + np.log(betas), axis=1)[:, 0] / np.diff(betas)
    ratios = [
        by_scipy(largest, start, masses)
        - two_groups(largest, masses).asymptotic_log_dwell_time(start)
        for start in STARTS
        for masses in ((0.5, 0.5), UNEQUAL)
    ]
    cosine, square = np.cos(STARTS), np.sin(STARTS) ** 2
    first, second = 2 * cosine / square, (2 + 6 * cosine**2) / square**2
    return (
        EXPONENTIAL.close_to(
            slopes,
            1 - cosine - first / largest**2,
            tolerance=2 * np.abs(first**2 - 2 * second).max() / largest**3,
        ),
        ASYMPTOTIC.close_to(
            np.exp(ratios),
            np.repeat(1 + first / largest, 2),
            tolerance=2 * second.max() / largest**2,
        ),
    )


def meeting_findings(met):
    """Where unequal groups meet, and how long equal ones take in an initial clock."""
    points = [angles_of(np.asarray(joins_of(path).points[0])) for path in met]
    law = [two_groups(beta, UNEQUAL).meeting_point(RIGHT) for beta in POINTS]
    start, end = CLOSED
    waits = [two_groups(b).log_dwell_time(start, end) for b in CLOCK]
    return (
        MEETING_POINT.close_to(
            [*points, *law], [*POINTS.values(), *POINTS.values()], tolerance=2e-7
        ),
        CLOCKS.close_to(
            np.exp(waits - np.array(list(CLOCK)) * (1 - np.cos(start))),
            list(CLOCK.values()),
            tolerance=6e-5,
        ),
    )


def groups_walk(beta: float, rtol: float, depths=None) -> mf.Trajectory:
    """Groups of three and two tokens, until all are one."""
    depths = long_depths(1e20) if depths is None else depths
    return walk_on_circle(GROUPS, beta, depths, merge=TIGHT, rtol=rtol)


def groups_findings(betas, several):
    """When groups have tightened, and when they meet."""
    joins = np.array([joins_of(path).depths for path in several])
    cloud = mf.TokenCloud.from_angles(GROUPS)
    laws = [
        two_groups(beta, (0.6, 0.4)).log_dwell_time(
            separation(cloud, beta).separation, TIGHT
        )
        for beta in betas
    ]
    means = lab.closed_form("the law of two groups, from the means at the start")
    order = lab.theory(r"$T_1$ of order $\beta$ at most")
    return (
        TIGHTEN.at_most(joins[:, 2], betas, source=order),
        STAY.close_to(np.log(joins[:, 3]), laws, relative_tolerance=2e-2, source=means),
    )


def draw_times() -> lab.Picture:
    """Dwell times against beta, with the asymptotic formula."""
    figure, axes = style.canvas(panel=(6.4, 3.5))
    betas = np.linspace(1, 60, 119)
    pairs = [two_groups(beta) for beta in betas]
    for start in STARTS:
        times = np.array([law.log_dwell_time(start, MEETING) for law in pairs])
        formula = np.array([law.asymptotic_log_dwell_time(start) for law in pairs])
        axes.plot(betas, times / np.log(10), label=rf"$\varphi_0 = {start:.3g}$")
        axes.plot(betas, formula / np.log(10), "--", color=style.INK, linewidth=0.9)
    axes.plot(list(DWELL), np.log10(list(DWELL.values())), "o", color=style.INK)
    axes.set(xlabel=r"$\beta$", ylabel=r"$\log_{10}$ of the dwell time")
    axes.legend()
    return lab.Picture(
        figure,
        r"How long two equal groups stay apart, from $\varphi_0$ to $0.1$, by the "
        "integral; dashed: the asymptotic formula; dots: the tabulated values.",
    )


def draw_groups(path: mf.Trajectory, beta: float) -> lab.Picture:
    """Groups of several tokens: angles and widths against depth."""
    figure, (above, below) = style.canvas(1, 2, panel=(6.0, 2.3), sharex=True)
    depths = np.asarray(path.depths)[1:]
    angles = (angles_of(np.asarray(path.points))[1:] + np.pi) % (2 * np.pi) - np.pi
    first, last = np.asarray(joins_of(path).depths)[2:]
    above.plot(depths, angles, linewidth=1.4)
    for name, group in {"three tokens": angles[:, :3], "two": angles[:, 3:]}.items():
        width = np.ptp(group, axis=1)
        shown = (width > 0) & (depths < first)
        below.plot(depths[shown], width[shown], label=name)
    for axes in (above, below):
        mark_values([first, last], axes)
    above.text(first, 0.65, " $T_1$", ha="left")
    above.text(last, 0.65, "$T_2$ ", ha="right")
    above.set(ylabel="angle")
    below.set(xscale="log", yscale="log", xlabel="depth $t$", ylabel="width of a group")
    below.legend(loc="upper center")
    return lab.Picture(
        figure,
        rf"Groups of three and two tokens at $\beta = {beta:g}$: they tighten (below) "
        "by the depth $T_1$, then wait, and meet at $T_2$ (above).",
    )


experiment = lab.experiment(
    run,
    "Groups stay apart for a time exponential in beta",
    room="observables",
    seconds=14,
)
