r"""Metastable phases, however long they last.

On the sphere, tokens under softmax attention gather in a few groups, and the groups
then hardly move for a depth that is exponential in $\beta$, until two of them meet: the
energy is a staircase. Between the joins two groups of masses $m_1, m_2$ at the angle
$\varphi$ follow a law of their own,
$\dot\varphi = -\Bigl[\frac{m_2 e^{\beta\cos\varphi}}{m_1 e^\beta + m_2
e^{\beta\cos\varphi}} + \frac{m_1 e^{\beta\cos\varphi}}{m_2 e^\beta + m_1
e^{\beta\cos\varphi}}\Bigr]\sin\varphi$,
whose dwell time is an integral. The flow is walked in a clock of its own
(`LongDepth`), with tokens that met joined, through depths of $10^{20}$ and far more,
and compared with that integral and with an ordinary integrator where one can follow.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np
import scipy.integrate

import meanformer as mf
from meanformer.experiments import (
    Claim,
    Experiment,
    Movie,
    Outcome,
    Picture,
    Table,
    closed_form,
    other_method,
    setting,
    tabulated,
    theory,
)
from meanformer.flows import Merges
from meanformer.observables import greedy_staircase
from meanformer.plotting import CircleFrames, style

FIVE = (0.0621971438, 0.2143229734, 1.8191226208, 2.9110710095, 3.1879369617)
SPACED = 0.5 * np.log(2000) / np.sqrt(2000) * np.array([0, 0.5, 2, 4, 7])
SAVED = 61
CLOSE = (2.78, 4.09, 6.70, 329.87)  # where the five come within 0.01, tabulated
MEETING = 0.1  # the angle up to which a dwell time is taken
DWELL = {4: 10.021878351631, 10: 1129.33847345, 20: 12191759.4252, 40: 2.94602185e15}
UNEQUAL = (0.7, 0.3)


@dataclass(frozen=True)
class Parameters:
    """How far the temperature is lowered."""

    longest: float = setting(
        150.0, full=600.0, help=r"largest $\beta$ of the dwell times", at_least=60
    )
    stairs: int = setting(
        2,
        full=6,
        help=r"staircases, of $\beta = 4000$ and below",
        at_least=1,
        at_most=6,
    )
    rtol: float = setting(1e-10, help="relative tolerance of the walks", above=0)


LAW = Claim(
    id="two-group-law",
    statement=r"Two groups at the angle $\pi/2$ meet at the depth of the two-group "
    r"law, for $\beta = 4$ to $\beta = 40$, equal masses and masses $0.7$ and $0.3$.",
    status="observation",
)
DIGITS = Claim(
    id="dwell-digits",
    statement=r"Equal groups stay apart for $10.021878351631$, $1129.33847345$, "
    r"$12191759.4252$ and $2.94602185\cdot 10^{15}$ at $\beta = 4, 10, 20, 40$.",
    status="observation",
)
EXPONENTIAL = Claim(
    id="exponential",
    statement=r"The dwell time grows like $e^{\beta(1-\cos\varphi_0)}$: between the "
    r"two largest $\beta$ its logarithm, less that of $2\beta\sin^2\varphi_0$, has "
    r"this slope.",
    status="theorem",
    reference="GKPR24, clusters that last for a time exponential in the inverse "
    "temperature",
)
BEYOND = Claim(
    id="beyond-rounding",
    statement=r"Depths beyond $10^{20}$, where velocities are far below rounding, "
    r"agree with the two-group law as well.",
    status="observation",
)
STEPS = Claim(
    id="steps",
    statement=r"The number of steps to a meeting grows at most like the logarithm of "
    r"its depth: steps at the largest $\beta$ over steps at $\beta = 10$, against the "
    r"ratio of the logarithms.",
    status="observation",
)
FIVE_DEPTHS = Claim(
    id="five-tokens",
    statement=r"The five tokens of the published run at $\beta = 4$ come within "
    r"$10^{-2}$ of each other at the depths $2.78$, $4.09$, $6.70$ and $329.87$, where "
    r"an ordinary integrator finds it.",
    status="observation",
    reference="GKPR24, five tokens on the circle",
)
FIVE_ENERGY = Claim(
    id="five-energies",
    statement=r"Their energy along the way is that of an ordinary integrator, with "
    r"the plateau $13/25 = 0.52$ from depth $5$ to $300$.",
    status="observation",
)
RISES = Claim(
    id="energy-rises",
    statement=r"The energy never decreases along the flow.",
    status="theorem",
    reference="GLPR23, the energy is a Lyapunov function of both sphere flows",
)
MEETING_POINT = Claim(
    id="meeting-point",
    statement=r"Groups of masses $0.7$ and $0.3$ meet, for $\beta = 10, 40, 160, 640$, "
    r"where the two-group law says: near the point of squared masses, not at the "
    r"barycentre.",
    status="observation",
)
LEVELS = Claim(
    id="levels",
    statement=r"On the plateaus of the published staircase, $\beta = 4000$, the energy "
    r"$\sum_{ij} w_iw_je^{\beta(\langle x_i, x_j\rangle - 1)}$ of the tokens is "
    r"$\sum_k m_k^2$ of the groups: $0.28$, $0.44$, $0.52$, $1$.",
    status="observation",
    reference="GKPR24, staircase profile of the energy",
)
ARC = Claim(
    id="arc-lengths",
    statement=r"Under unnormalised attention at $\beta = 4000$ the joins happen at the "
    r"arc lengths of the greedy rule, which needs no simulation.",
    status="observation",
)


def run(parameters: Parameters, *, progress) -> Outcome:
    """Walk two groups, five tokens and staircases, each against another method."""
    betas = np.array([*DWELL, 60.0, parameters.longest / 2, parameters.longest])
    dwells = [dwell(beta, parameters.rtol) for beta in progress.over(betas, 0.4)]
    unequal = dwell(10.0, parameters.rtol, UNEQUAL)
    five = five_tokens(parameters.rtol)
    stairs = {
        beta: staircase(beta, "softmax", parameters.rtol)
        for beta in progress.over(staircase_betas(parameters.stairs), 0.3)
    }
    climbed = staircase(4000.0, "unnormalised", parameters.rtol)
    return Outcome(
        findings=[
            *dwell_findings(betas, dwells, unequal),
            *five_findings(five),
            meeting_finding(parameters.rtol),
            levels_finding(stairs[4000.0]),
            arc_finding(climbed),
        ],
        pictures=[draw_stairs(stairs), draw_five(five)],
        tables=[
            Table(
                [r"$\beta$", "depth of the meeting", "two-group law", "steps"],
                [
                    [beta, depth, law(beta, np.pi / 2, MEETING), steps]
                    for beta, (depth, steps) in zip(betas, dwells, strict=True)
                ],
                r"Two equal groups at the angle $\pi/2$, until they are $0.1$ apart.",
            )
        ],
        movies=[
            Movie(
                five,
                "The five tokens of the published run on the circle: two groups form "
                "at once, and meet after depth 329. One frame per saved depth.",
                depths=np.asarray(five.depths),
                draw=CircleFrames(),
                fps=8,
            )
        ],
    )


def on_circle(angles) -> np.ndarray:
    """Points of the plane at these angles."""
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def angles_of(points) -> np.ndarray:
    """Angles of points of the plane, from zero on."""
    return np.arctan2(points[..., 1], points[..., 0]) % (2 * np.pi)


def walk(angles, beta, depths, *, kind="softmax", weights=None, **options):
    """A long walk of at most five tokens; padded, so that one program serves all."""
    missing = 5 - len(angles)
    masses = np.full(len(angles), 1 / len(angles)) if weights is None else weights
    cloud = mf.TokenCloud(
        on_circle(np.append(angles, np.zeros(missing))),
        np.append(masses, np.zeros(missing)),
    )
    attention = mf.identity_attention(kind, 2, float(beta))
    flow = mf.Flow(attention, space=mf.Sphere())
    return mf.solve(
        flow, cloud, depths[-1], save=depths, solver=mf.LongDepth(), **options
    )


def joins(path: mf.Trajectory) -> Merges:
    """The joins of a walk, which always has them."""
    return cast(Merges, path.merges)


def log_depths(last: float, first: float = 1e-2) -> np.ndarray:
    """Zero and logarithmically spaced depths."""
    return np.append(0.0, np.geomspace(first, last, SAVED - 1))


def law(beta: float, start: float, end: float, masses=(0.5, 0.5)) -> float:
    """Time of the two-group law from one angle to another, by quadrature."""
    shift = beta * (1 - np.cos(start))

    def slowness(angle):
        fall = beta * (np.cos(angle) - 1)
        return np.exp(-fall - shift) / (sum(pulls(angle, beta, masses)) * np.sin(angle))

    # The integrand is concentrated near the start: each decade on its own.
    ends = start - (start - end) * np.array([0, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 1])
    parts = [
        scipy.integrate.quad(slowness, low, high, epsabs=0, epsrel=1e-12)[0]
        for high, low in zip(ends[:-1], ends[1:], strict=True)
    ]
    return float(np.exp(shift) * sum(parts))


def pulls(angle, beta, masses):
    """What each group feels of the other, without the common exponential."""
    first, second = masses
    seen = np.exp(beta * (np.cos(angle) - 1))
    return second / (first + second * seen), first / (second + first * seen)


def dwell(beta: float, rtol: float, masses=(0.5, 0.5)) -> tuple[float, int]:
    """Depth at which two groups have met, and the steps taken to it."""
    angles, depths = np.array([0.0, np.pi / 2]), np.append(0, np.geomspace(1, 2, 60))
    # All saved depths but the first lie behind the meeting: its steps are its own.
    depths[1:] *= 10 * law(beta, np.pi / 2, MEETING, masses)
    path = walk(angles, beta, depths, weights=masses, merge=MEETING, rtol=rtol)
    steps = path.accepted_steps[-1] + path.rejected_steps[-1]
    return float(joins(path).depths[0]), int(steps)


def dwell_findings(betas, dwells, unequal):
    """Meetings against quadrature, digits, exponential growth, and steps."""
    depths, steps = (np.array(column) for column in zip(*dwells, strict=True))
    exact = np.array([law(beta, np.pi / 2, MEETING) for beta in betas])
    quadrature = other_method("the integral of the two-group law, by SciPy")
    known = len(DWELL)
    skewed = law(10.0, np.pi / 2, MEETING, UNEQUAL)
    slope = np.diff(np.log(depths[-2:] * 2 * betas[-2:]))[0] / (betas[-1] - betas[-2])
    ratio = (steps[-1] / steps[1]) / (np.log(depths[-1]) / np.log(depths[1]))
    return (
        LAW.close_to(
            [*depths[:known], unequal[0]],
            [*exact[:known], skewed],
            relative_tolerance=1e-8,
            source=quadrature,
        ),
        DIGITS.close_to(
            depths[:known],
            list(DWELL.values()),
            relative_tolerance=1e-8,
            source=tabulated(),
        ),
        EXPONENTIAL.close_to(
            slope, 1.0, tolerance=1e-3, source=theory(r"at $\varphi_0 = \pi/2$")
        ),
        BEYOND.close_to(
            depths[known:], exact[known:], relative_tolerance=1e-6, source=quadrature
        ),
        STEPS.at_most(ratio, 1.0, source=theory("no faster than the logarithm")),
    )


def five_tokens(rtol: float) -> mf.Trajectory:
    """The published run, saved finely around the depths where tokens come close."""
    around = [*(np.linspace(-0.05, 0.05, 8) + np.array(CLOSE)[:, None]).ravel()]
    others = [0, 5, 20, 200, *np.geomspace(0.1, 290, 13), *np.linspace(300, 350, 12)]
    return walk(FIVE, 4.0, np.sort([*around, *others]), rtol=rtol)


def five_findings(five: mf.Trajectory):
    """Meetings and energies against SciPy in angles."""
    depths = np.asarray(five.depths)
    exact = angles_by_scipy(depths)
    meetings = close_depths(depths, np.asarray(five.points), 1e-2)
    energies = energy_of(five, 4.0)
    gram = np.cos(exact[:, :, None] - exact[:, None, :])
    source = other_method("angles, solved by SciPy's DOP853")
    return (
        FIVE_DEPTHS.close_to(
            [*meetings, *meetings],
            [*CLOSE, *first_depths_within(1e-2)],
            tolerance=2e-2,
            source=tabulated("and by SciPy's DOP853 in this run"),
        ),
        FIVE_ENERGY.close_to(
            energies, np.exp(4 * (gram - 1)).mean((1, 2)), tolerance=1e-7, source=source
        ),
        RISES.at_least(np.diff(energies), 0.0, tolerance=1e-12, source=theory()),
    )


def close_depths(depths, points, distance: float) -> np.ndarray:
    """Where neighbouring gaps fall below a distance, between saved depths, in order.

    Gaps close exponentially: their logarithm is interpolated.
    """
    gaps = np.diff(angles_of(points), axis=1)
    found = []
    for gap in gaps.T:
        after = int(np.argmax(gap < distance))
        pair = slice(after - 1, after + 1)
        # Joined tokens have no gap.
        logs = np.log(np.maximum(gap[pair], np.finfo(gap.dtype).tiny))
        share = (logs[0] - np.log(distance)) / (logs[0] - logs[1])
        found.append(depths[after - 1] + share * np.diff(depths[pair])[0])
    return np.sort(found)


def circle_velocity(_, angles):
    """The flow of the five tokens in angles."""
    gaps = angles[None, :] - angles[:, None]
    masses = np.exp(4 * np.cos(gaps))
    return (masses * np.sin(gaps)).sum(1) / masses.sum(1)


def angles_by_scipy(depths) -> np.ndarray:
    """The five angles at these depths."""
    options = {"method": "DOP853", "rtol": 1e-11, "atol": 1e-12}
    ends = depths[0], depths[-1]
    return scipy.integrate.solve_ivp(
        circle_velocity, ends, FIVE, t_eval=depths, **options
    ).y.T


def first_depths_within(distance: float) -> np.ndarray:
    """Where neighbouring gaps fall below a distance, in order."""

    def event(pair):
        return lambda _, angles: angles[pair + 1] - angles[pair] - distance

    found = scipy.integrate.solve_ivp(
        circle_velocity,
        (0, 350),
        FIVE,
        method="DOP853",
        rtol=1e-11,
        atol=1e-12,
        events=[event(pair) for pair in range(4)],
    )
    return np.sort([times[0] for times in found.t_events])


def energy_of(path: mf.Trajectory, beta: float) -> np.ndarray:
    """The energy of five equal tokens, in units of that of one cluster."""
    points = np.asarray(path.points)
    gram = np.einsum("tid,tjd->tij", points, points)
    return np.exp(beta * (gram - 1)).mean((1, 2))


def meeting_finding(rtol: float):
    """Meeting points of unequal groups, against an integral over the angle."""
    betas = 10.0, 40.0, 160.0, 640.0
    found, exact = [], []
    for beta in betas:
        angles = np.array([0.0, np.pi / 2])
        last = 10 * law(beta, np.pi / 2, 1e-6, UNEQUAL)
        path = walk(
            angles, beta, log_depths(last, last / 2), weights=UNEQUAL, rtol=rtol
        )
        point = np.asarray(joins(path).points[0])
        found.append(np.arctan2(point[1], point[0]))
        exact.append(
            scipy.integrate.quad(share_of_first, 0, np.pi / 2, args=(beta,))[0]
        )
    return MEETING_POINT.close_to(
        found,
        exact,
        tolerance=1e-7,
        source=other_method("the share of the first group, integrated over the angle"),
    )


def share_of_first(angle, beta):
    """The part of the closing of the angle that the first group does."""
    first, second = pulls(angle, beta, UNEQUAL)
    return first / (first + second)


def staircase_betas(count: int) -> list[float]:
    """The published temperatures, the lowest first."""
    return [4000.0, 1000.0, 2000.0, 500.0, 3000.0, 1500.0][:count]


def staircase(beta: float, kind: str, rtol: float):
    """The published setting, walked until one cluster is left."""
    return beta, walk(SPACED, beta, log_depths(1e300), kind=kind, rtol=rtol)


def levels_of(path: mf.Trajectory) -> np.ndarray:
    """The sum of squared masses before the first and after each join."""
    masses, levels = np.full(5, 0.2), [0.2]
    for leader, token in zip(joins(path).leaders, joins(path).tokens, strict=True):
        masses[int(leader)] += masses[int(token)]
        masses[int(token)] = 0
        levels.append(np.sum(masses**2))
    return np.array(levels)


def levels_finding(stair):
    """Energies of the tokens in the middle of each plateau, against their levels."""
    beta, path = stair
    depths = np.log(np.asarray(path.depths)[1:])
    ends = np.log([*np.asarray(joins(path).depths), float(path.depths[-1])])
    middles = (ends[:-1] + ends[1:]) / 2
    saved = 1 + np.abs(depths[:, None] - middles[None, :]).argmin(axis=0)
    return LEVELS.close_to(
        energy_of(path, beta)[saved],
        [0.28, 0.44, 0.52, 1.0],
        tolerance=1e-9,
        source=closed_form(r"$\sum_k N_k^2/n^2$"),
    )


def arc_finding(climbed):
    """Arc lengths against the greedy rule."""
    beta, path = climbed
    layer = mf.identity_attention("unnormalised", 2, beta)
    rule = greedy_staircase(layer, mf.TokenCloud(on_circle(SPACED)))
    return ARC.close_to(
        np.asarray(joins(path).arc_lengths),
        np.asarray(rule.arc_lengths),
        relative_tolerance=1e-4,
        source=theory("greedy rule: the closest pair first"),
    )


def draw_stairs(stairs) -> Picture:
    """Energy against depth and against arc length, several temperatures."""
    figure, (left, right) = style.canvas(2, panel=(4.6, 3.4), sharey=True)
    for beta, path in sorted(stairs.values(), key=lambda stair: stair[0]):
        levels = levels_of(path)
        depths = np.asarray(joins(path).depths)
        lengths = np.asarray(joins(path).arc_lengths)
        label = rf"$\beta = {beta:g}$"
        ends = [0.1, *depths, 1e2 * depths[-1]]
        left.stairs(levels, ends, baseline=None, linewidth=1.7)
        ends = [0, *lengths, 1.12 * lengths[-1]]
        right.stairs(levels, ends, baseline=None, label=label, linewidth=1.7)
    rule = greedy_staircase(
        mf.identity_attention("softmax", 2), mf.TokenCloud(on_circle(SPACED))
    )
    for length in np.asarray(rule.arc_lengths):
        right.axvline(length, color=style.INK, linestyle=":", linewidth=1)
    left.set(xscale="log", xlabel="depth $t$", ylabel="energy (one cluster: 1)")
    right.set(xlabel=r"arc length in $\mathbb{R}^{nd}$")
    right.legend(loc="center", bbox_to_anchor=(0.62, 0.72))
    return Picture(
        figure,
        "The staircase of the published setting under softmax attention: energy, as "
        r"the sum $\sum_k m_k^2$ over the groups joined so far, against depth, where a "
        "plateau lasts the longer the lower the temperature (left), and against arc "
        r"length, where all $\beta$ nearly coincide (right; dotted: the greedy rule).",
    )


def draw_five(five: mf.Trajectory) -> Picture:
    """Angles and energy of the five tokens."""
    depths, angles = np.asarray(five.depths)[1:], angles_of(np.asarray(five.points))[1:]
    figure, (above, below) = style.canvas(1, 2, panel=(5.4, 2.4), sharex=True)
    for token in range(5):
        above.plot(depths, angles[:, token], linewidth=1.5)
    below.plot(depths, energy_of(five, 4.0)[1:], color=style.BLUE)
    for axes in (above, below):
        for depth in np.asarray(joins(five).depths):
            axes.axvline(depth, color=style.INK, linestyle=":", linewidth=1)
    above.plot([], [], ":", color=style.INK, linewidth=1, label="tokens are joined")
    above.legend(loc="upper left")
    above.set(ylabel="angle")
    below.set(xscale="log", xlabel="depth $t$", ylabel="energy (one cluster: 1)")
    return Picture(
        figure,
        r"The five tokens of the published run at $\beta = 4$: angles (above) and "
        "energy (below). Dotted: where tokens, by then $10^{-9}$ apart, are joined.",
    )


experiment = Experiment(
    name="metastable-forever",
    title="Metastable phases are walked through, however long",
    room="flows",
    about=__doc__,
    claims=(
        LAW,
        DIGITS,
        EXPONENTIAL,
        BEYOND,
        STEPS,
        FIVE_DEPTHS,
        FIVE_ENERGY,
        RISES,
        MEETING_POINT,
        LEVELS,
        ARC,
    ),
    parameters=Parameters,
    run=run,
    seconds=25,
)
