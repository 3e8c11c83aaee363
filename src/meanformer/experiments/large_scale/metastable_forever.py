r"""Metastable phases, however long they last.

On the sphere, tokens under softmax attention gather in a few groups, and the groups
then hardly move for a depth that is exponential in $\beta$, until two of them meet. The
flow is walked in a clock of its own (`LongDepth`), with tokens that met joined, through
depths of $10^{20}$ and far more, where velocities are below rounding. Meetings are
compared with the integral of the law of two groups (experiment `dwell-times`), the
published run of five tokens with an ordinary integrator, and steps are counted: they
grow with the logarithm of the depth at most.
"""

from dataclasses import dataclass

import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers.circle_walks import (
    SAVED,
    attention_on_circle,
    joins_of,
    walk_on_circle,
)
from meanformer.experiments.helpers.dense_angles import dense_angle_flow
from meanformer.geometry.circle import angles_of
from meanformer.observables import TwoGroups
from meanformer.plotting import CircleFrames, draw_curves, mark_values, style

FIVE = (0.0621971438, 0.2143229734, 1.8191226208, 2.9110710095, 3.1879369617)
CLOSE = (2.78, 4.09, 6.70, 329.87)  # where the five come within 0.01, tabulated
MEETING = 0.1  # the angle up to which a dwell time is taken
RIGHT = np.pi / 2


@dataclass(frozen=True)
class Parameters:
    """How far the temperature is lowered."""

    longest: float = lab.setting(
        300.0, full=600.0, help=r"largest $\beta$ of the meetings", at_least=60
    )
    rtol: float = lab.setting(1e-10, help="relative tolerance of the walks", above=0)


BEYOND = lab.observation(
    "beyond-rounding",
    "Depths beyond $10^{20}$, where velocities are far below rounding, agree with "
    "the two-group law as well.",
    source=lab.other_method("the integral of the two-group law; ratio of depths"),
)
STEPS = lab.observation(
    "steps",
    "The number of steps to a meeting grows at most like the logarithm of its depth: "
    r"steps at the largest $\beta$ over steps at $\beta = 10$, against the ratio of "
    "the logarithms.",
    source=lab.theory("no faster than the logarithm"),
)
FIVE_DEPTHS = lab.observation(
    "five-tokens",
    r"The five tokens of the published run at $\beta = 4$ come within $10^{-2}$ of "
    "each other at the depths $2.78$, $4.09$, $6.70$ and $329.87$, where an ordinary "
    "integrator finds it.",
    "GKPR24, five tokens on the circle",
    source=lab.tabulated("and by SciPy's DOP853 in this run"),
)
FIVE_ENERGY = lab.observation(
    "five-energies",
    "Their energy along the way is that of an ordinary integrator, with the plateau "
    "$13/25 = 0.52$ from depth $5$ to $300$.",
)
RISES = lab.theorem(
    "energy-rises",
    "The energy never decreases along the flow.",
    "GLPR23, the energy is a Lyapunov function of both sphere flows",
    source=lab.theory(),
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Walk two groups and five tokens, each against another method."""
    betas = np.append([10.0, 60.0], parameters.longest * np.array([0.5, 0.75, 1]))
    dwells = [dwell(beta, parameters.rtol) for beta in progress.over(betas, 0.7)]
    five = five_tokens(parameters.rtol)
    return lab.Outcome(
        findings=[*dwell_findings(betas, dwells), *five_findings(five)],
        pictures=[draw_steps(betas, dwells), draw_five(five)],
        movies=[
            lab.Movie(
                five,
                "The five tokens of the published run on the circle: two groups form "
                "at once, and meet after depth 329. One frame per saved depth.",
                depths=np.asarray(five.depths),
                draw=CircleFrames(),
                fps=8,
            )
        ],
    )


def log_law(beta: float) -> float:
    """Logarithm of the time of the two-group law, by quadrature."""
    return TwoGroups(attention_on_circle("softmax", beta)).log_dwell_time(
        RIGHT, MEETING
    )


def dwell(beta: float, rtol: float) -> tuple[float, int]:
    """Logarithm of the depth at which two groups have met, and the steps to it."""
    angles = np.array([0.0, RIGHT])
    # All saved depths but the first lie behind the meeting: its steps are its own.
    depths = np.append(0, 10 * np.exp(log_law(beta)) * np.geomspace(1, 2, SAVED - 1))
    path = walk_on_circle(angles, beta, depths, merge=MEETING, rtol=rtol)
    steps = path.accepted_steps[-1] + path.rejected_steps[-1]
    return float(np.log(joins_of(path).depths[0])), int(steps)


def dwell_findings(betas, dwells):
    """Meetings against quadrature, and steps against logarithms."""
    logs, steps = (np.array(column) for column in zip(*dwells, strict=True))
    exact = np.array([log_law(beta) for beta in betas])
    ratio = (steps[-1] / steps[0]) / (logs[-1] / logs[0])
    return (
        BEYOND.close_to(
            np.exp(logs - exact)[1:], np.ones(len(betas) - 1), tolerance=1e-6
        ),
        STEPS.at_most(ratio, 1.0),
    )


def five_tokens(rtol: float) -> mf.Trajectory:
    """The published run, saved finely around the depths where tokens come close."""
    around = [*(np.linspace(-0.05, 0.05, 8) + np.array(CLOSE)[:, None]).ravel()]
    others = [0, 5, 20, 200, *np.geomspace(0.1, 290, 13), *np.linspace(300, 350, 12)]
    return walk_on_circle(FIVE, 4.0, np.sort([*around, *others]), rtol=rtol)


def five_findings(five: mf.Trajectory):
    """Meetings and energies against SciPy in angles."""
    depths = np.asarray(five.depths)
    exact = dense_angle_flow(FIVE, 4.0, depths).y.T
    meetings = close_depths(depths, np.asarray(five.points), 1e-2)
    energies = energy_of(five, 4.0)
    gram = np.cos(exact[:, :, None] - exact[:, None, :])
    source = lab.other_method("angles, solved by SciPy's DOP853")
    return (
        FIVE_DEPTHS.close_to(
            [*meetings, *meetings], [*CLOSE, *first_depths_within(1e-2)], tolerance=2e-2
        ),
        FIVE_ENERGY.close_to(
            energies, np.exp(4 * (gram - 1)).mean((1, 2)), tolerance=1e-7, source=source
        ),
        RISES.at_least(np.diff(energies), 0.0, tolerance=1e-12),
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


def first_depths_within(distance: float) -> np.ndarray:
    """Where neighbouring gaps fall below a distance, in order."""
    events = [lambda _, now, k=k: now[k + 1] - now[k] - distance for k in range(4)]
    found = dense_angle_flow(FIVE, 4.0, [0, 350], events=events)
    return np.sort([times[0] for times in found.t_events])


def energy_of(path: mf.Trajectory, beta: float) -> np.ndarray:
    """The energy of five equal tokens, in units of that of one cluster."""
    points = np.asarray(path.points)
    gram = np.einsum("tid,tjd->tij", points, points)
    return np.exp(beta * (gram - 1)).mean((1, 2))


def draw_steps(betas, dwells) -> lab.Picture:
    """Steps against the logarithm of the depth of the meeting."""
    logs, steps = (np.array(column) for column in zip(*dwells, strict=True))
    figure, axes = style.canvas(panel=(5.4, 3.0))
    tens = logs / np.log(10)
    axes.plot(tens, steps, "o-", label="steps of the walk")
    bound = {"growth with the logarithm": steps[0] * logs / logs[0]}
    draw_curves(tens, bound, axes, marks=":", colours=style.INK, legend="upper right")
    below = {"xytext": (0, -14), "textcoords": "offset points", "ha": "center"}
    for beta, place, count in zip(betas, tens, steps, strict=True):
        axes.annotate(rf"$\beta = {beta:g}$", (place, count), **below)
    axes.set(xlabel=r"$\log_{10}$ of the depth of the meeting", ylabel="steps")
    axes.set_ylim(0, 2.2 * steps.max())
    return lab.Picture(
        figure,
        "Steps until two groups have met, against the number of digits of the depth at "
        "which they do: hardly more for a hundred digits than for three.",
    )


def draw_five(five: mf.Trajectory) -> lab.Picture:
    """Angles and energy of the five tokens."""
    depths, angles = np.asarray(five.depths)[1:], angles_of(np.asarray(five.points))[1:]
    figure, (above, below) = style.canvas(1, 2, panel=(5.4, 2.4), sharex=True)
    for token in range(5):
        above.plot(depths, angles[:, token], linewidth=1.5)
    below.plot(depths, energy_of(five, 4.0)[1:], color=style.BLUE)
    for axes in (above, below):
        depths = np.asarray(joins_of(five).depths)
        mark_values(depths, axes, label="tokens are joined")
    above.legend(loc="center left")
    above.set(ylabel="angle")
    below.set(xscale="log", xlabel="depth $t$", ylabel="energy (one cluster: 1)")
    return lab.Picture(
        figure,
        r"The five tokens of the published run at $\beta = 4$: angles (above) and "
        "energy (below). Dotted: where tokens, by then $10^{-9}$ apart, are joined.",
    )


experiment = lab.experiment(
    run, "Metastable phases are walked through, however long", room="flows", seconds=15
)
