r"""How long groups of tokens stay apart.

Two groups of masses $m_1, m_2$ on the sphere at the angle $\varphi$ follow a law of
their own, under softmax attention
$\dot\varphi = -\Bigl[\frac{m_2 e^{\beta\cos\varphi}}{m_1 e^\beta + m_2
e^{\beta\cos\varphi}} + \frac{m_1 e^{\beta\cos\varphi}}{m_2 e^\beta + m_1
e^{\beta\cos\varphi}}\Bigr]\sin\varphi$,
so that the time they stay apart is an integral, which grows like
$e^{\beta(1-\cos\varphi_0)}/(2\beta\sin^2\varphi_0)$ for equal masses. Groups of several
tokens first tighten and then wait in the same way. All is walked by `LongDepth`.
"""

import itertools

import numpy as np
import scipy.integrate

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers import circle_walks as walks
from meanformer.geometry.circle import angles_of
from meanformer.observables import TwoGroups, separation
from meanformer.plotting import mark_values, style

RIGHT, MEETING = np.pi / 2, 0.1  # the angles from and up to which groups stay apart
EQUAL, UNEQUAL = (0.5, 0.5), (0.7, 0.3)
PAIRS = [(4, EQUAL), (10, EQUAL), (20, EQUAL), (40, EQUAL), (10, UNEQUAL)]
COLDER = (10, 40, 160, 640)
STARTS = (0.6, 1.0, RIGHT, 2.2)
GROUPS = (-0.05, 0.0, 0.06, 1.23, 1.29)  # three tokens and two
TIGHT = 1e-6  # tokens so close count as one


class Parameters(lab.Parameters):
    """How far the temperature is lowered."""

    largest: float = lab.setting(
        400.0, full=4000.0, help=r"$\beta$ of the asymptotic formula", at_least=100
    )
    groups: int = lab.setting(3, full=6, help="temperatures", at_least=2, at_most=6)
    rtol: float = lab.setting(1e-12, help="relative tolerance of the walks", above=0)


INTEGRAL = lab.observation(
    "integral",
    "The dwell times of both flows, two pairs of masses, four angles, are an integral.",
    source=lab.other_method("quadrature of the law by SciPy, in logarithms"),
)
FLOW = lab.observation(
    "flow",
    r"The flow brings two groups together at these depths, up to $3\cdot 10^{15}$.",
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
    r"Groups of masses $0.7$ and $0.3$ meet, at $\beta = 10, 40, 160, 640$, where an "
    "integral says; its limit is the point of squared masses, not the barycentre.",
    source=lab.other_method("the integral over the angle, not the flow"),
)
TIGHTEN = lab.observation(
    "tighten",
    r"Groups of three and two tokens tighten to $10^{-6}$ by a depth $T_1 \le \beta$.",
    "GKPR24, first phase",
    source=lab.theory(r"$T_1$ of order $\beta$ at most"),
)
STAY = lab.observation(
    "stay",
    "They then stay apart until a depth $T_2$ whose logarithm is that of two groups "
    "at their means, to two per cent.",
    "GKPR24, second phase",
    source=lab.closed_form("the law of two groups, from the means at the start"),
)


@lab.experiment(
    "Groups stay apart for a time exponential in beta", room="observables", seconds=14
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Compare integrals with SciPy, asymptotics and flows."""
    rtol, betas = parameters.rtol, np.linspace(20, 45, parameters.groups)
    dwells = [first_join(*case, rtol, MEETING) for case in progress.over(PAIRS, 0.4)]
    met = [first_join(beta, UNEQUAL, rtol) for beta in progress.over(COLDER, 0.3)]
    several = [groups_walk(beta, rtol) for beta in progress.over(betas, 0.3)]
    joins = np.array([walks.joins_of(path).depths for path in several])
    closely = walks.depths_around(joins[-1, 2:], 1e3 * joins[-1, -1])
    seen = groups_walk(betas[-1], rtol, closely)
    times, points = [depth for depth, _ in dwells], [angle for _, angle in met]
    integrals = [two_groups(beta, UNEQUAL).meeting_point(RIGHT) for beta in COLDER]
    return lab.Outcome(
        findings=[
            *dwell_findings(times),
            *growth_findings(parameters.largest),
            MEETING_POINT.close_to(points, integrals, tolerance=2e-7),
            *groups_findings(betas, joins),
        ],
        pictures=[draw_times(times), draw_groups(seen, betas[-1])],
    )


def two_groups(beta: float, masses=EQUAL, kind: str = "softmax") -> TwoGroups:
    """The law of two groups."""
    return TwoGroups(walks.attention_on_circle(kind, beta), masses)


def by_scipy(beta, start, masses=EQUAL, kind="softmax") -> float:
    """Logarithm of the dwell time by SciPy's quadrature, the law written out."""
    first, second = masses

    def slowness(angle):
        fall = np.exp(beta * (np.cos(angle) - 1))
        pulls = second / (first + second * fall) + first / (second + first * fall)
        pulls = first + second if kind == "unnormalised" else pulls
        growth = np.exp(beta * (np.cos(start) - np.cos(angle)))
        return growth / (pulls * np.sin(angle))

    # The integrand is concentrated near the start: each decade on its own.
    ends = start - (start - MEETING) * np.array([1e-4, 1e-3, 1e-2, 0.1, 0.3])
    options = {"points": ends, "epsabs": 0, "epsrel": 1e-12, "limit": 200}
    integral = scipy.integrate.quad(slowness, MEETING, start, **options)[0]
    return float(beta * (1 - np.cos(start)) + np.log(integral))


def first_join(beta: float, masses, rtol: float, merge=None) -> tuple[float, float]:
    """Two groups at a right angle, walked until they are joined: depth and angle."""
    last = 10 * two_groups(beta, masses).dwell_time(RIGHT, merge or TIGHT)
    options = {"weights": masses, "merge": merge, "rtol": rtol}
    depths = walks.long_depths(last, last / 2)
    joins = walks.joins_of(walks.walk_on_circle((0.0, RIGHT), beta, depths, **options))
    return float(joins.depths[0]), float(angles_of(np.asarray(joins.points[0])))


def dwell_findings(times):
    """Dwell times by the law and by the flow, against SciPy."""
    kinds, masses = ("softmax", "unnormalised"), (EQUAL, UNEQUAL)
    cases = list(itertools.product((2.0, 30.0, 300.0), STARTS, masses, kinds))
    laws = [two_groups(b, m, k).log_dwell_time(s, MEETING) for b, s, m, k in cases]
    exact = np.exp([by_scipy(beta, RIGHT, masses) for beta, masses in PAIRS])
    return (
        INTEGRAL.close_to(laws, [by_scipy(*case) for case in cases], tolerance=1e-9),
        FLOW.close_to(times, exact, relative_tolerance=1e-8),
    )


def growth_findings(largest: float):
    r"""Slopes in beta, and the leading term; twice the next term is allowed.

    Laplace's method: derivatives of $1/(1 - c^2)$ over itself, with $c = \cos\varphi$.
    """
    betas = largest * np.array([0.98, 1.02])
    logs = [[two_groups(b).log_dwell_time(s, MEETING) for b in betas] for s in STARTS]
    slopes = np.diff(np.array(logs) + np.log(betas), axis=1)[:, 0] / np.diff(betas)
    ratios = [
        by_scipy(largest, start, masses)
        - two_groups(largest, masses).asymptotic_log_dwell_time(start)
        for start in STARTS
        for masses in (EQUAL, UNEQUAL)
    ]
    cosine, square = np.cos(STARTS), np.sin(STARTS) ** 2
    first, second = 2 * cosine / square, (2 + 6 * cosine**2) / square**2
    slope, ratio = 1 - cosine - first / largest**2, np.repeat(1 + first / largest, 2)
    second_term = 2 * second.max() / largest**2
    third_term = 2 * np.abs(first**2 - 2 * second).max() / largest**3
    return (
        EXPONENTIAL.close_to(slopes, slope, tolerance=third_term),
        ASYMPTOTIC.close_to(np.exp(ratios), ratio, tolerance=second_term),
    )


def groups_walk(beta: float, rtol: float, depths=None) -> mf.Trajectory:
    """Groups of three and two tokens, until all are one."""
    depths = walks.long_depths(1e20) if depths is None else depths
    return walks.walk_on_circle(GROUPS, beta, depths, merge=TIGHT, rtol=rtol)


def groups_findings(betas, joins):
    """When groups have tightened, and when they meet."""
    cloud, laws = mf.TokenCloud.from_angles(GROUPS), []
    for beta in betas:
        apart = separation(cloud, beta).separation
        laws.append(two_groups(beta, (0.6, 0.4)).log_dwell_time(apart, TIGHT))
    return (
        TIGHTEN.at_most(joins[:, 2], betas),
        STAY.close_to(np.log(joins[:, 3]), laws, relative_tolerance=2e-2),
    )


def draw_times(walked) -> lab.Picture:
    """Dwell times against beta, with the asymptotic formula and those of the flow."""
    figure, axes = style.canvas(panel=(6.4, 3.5))
    betas = np.linspace(1, 60, 119)
    pairs = [two_groups(beta) for beta in betas]
    for start in STARTS:
        times = np.array([law.log_dwell_time(start, MEETING) for law in pairs])
        formula = np.array([law.asymptotic_log_dwell_time(start) for law in pairs])
        axes.plot(betas, times / np.log(10), label=rf"$\varphi_0 = {start:.3g}$")
        axes.plot(betas, formula / np.log(10), "--", color=style.INK, linewidth=0.9)
    axes.plot([beta for beta, _ in PAIRS], np.log10(walked), "o", color=style.INK)
    axes.set(xlabel=r"$\beta$", ylabel=r"$\log_{10}$ of the dwell time")
    axes.legend()
    return lab.Picture(
        figure,
        r"How long two equal groups stay apart, from $\varphi_0$ to $0.1$, by the "
        "integral; dashed: the asymptotic formula; dots: the flow (one pair unequal).",
    )


def draw_groups(path: mf.Trajectory, beta: float) -> lab.Picture:
    """Groups of several tokens: angles and widths against depth."""
    figure, (above, below) = style.canvas(1, 2, panel=(6.0, 2.3), sharex=True)
    depths = np.asarray(path.depths)[1:]
    angles = (angles_of(np.asarray(path.points))[1:] + np.pi) % (2 * np.pi) - np.pi
    first, last = np.asarray(walks.joins_of(path).depths)[2:]
    above.plot(depths, angles, linewidth=1.4)
    early = depths < first
    for name, group in {"three tokens": angles[:, :3], "two": angles[:, 3:]}.items():
        below.plot(depths[early], np.ptp(group[early], axis=1), label=name)
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
