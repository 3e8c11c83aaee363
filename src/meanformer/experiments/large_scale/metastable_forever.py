r"""Metastable phases, however long they last.

On the sphere, tokens under softmax attention gather in a few groups, and the groups
then hardly move for a depth that is exponential in $\beta$, until two of them meet. The
flow is walked in a clock of its own (`LongDepth`), with tokens that met joined, through
depths of $10^{20}$ and far more, where velocities are below rounding. Meetings are
compared with the integral of the law of two groups (experiment `dwell-times`), the
published run of five tokens with an ordinary integrator, and steps are counted: they
grow with the logarithm of the depth at most.
"""

import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers.circle_walks import (
    FIVE,
    SAVED,
    attention_on_circle,
    joins_of,
    walk_on_circle,
)
from meanformer.experiments.helpers.dense import dense_angle_flow
from meanformer.geometry.circle import angles_of, on_circle
from meanformer.observables import TwoGroups
from meanformer.plotting import CircleFrames, draw_curves, mark_values, style

MEETING = 0.1  # the angle up to which a dwell time is taken
CLOSE = 1e-2  # the angle between two tokens that are close


class Parameters(lab.Parameters):
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
    source=lab.other_method("events of SciPy's DOP853, in angles"),
)
FIVE_ENERGY = lab.observation(
    "five-energies",
    "Their energy along the way is that of an ordinary integrator, with the plateau "
    "$13/25 = 0.52$ from depth $5$ to $300$.",
    source=lab.other_method("angles, solved by SciPy's DOP853"),
)
RISES = lab.theorem(
    "energy-rises",
    "The energy never decreases along the flow.",
    "GLPR23, the energy is a Lyapunov function of both sphere flows",
    source=lab.theory(),
)


@lab.experiment(
    "Metastable phases are walked through, however long", room="flows", seconds=15
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Walk two groups and five tokens, each against another method."""
    betas = np.append([10.0, 60.0], parameters.longest * np.array([0.5, 0.75, 1]))
    dwells = [dwell(beta, parameters.rtol) for beta in progress.over(betas, 0.7)]
    logs, laws, steps = np.array(dwells).T
    ratio = (steps[-1] / steps[0]) / (logs[-1] / logs[0])
    close = first_depths_within(CLOSE)
    five = five_tokens(close, parameters.rtol)
    depths, points = np.asarray(five.depths), np.asarray(five.points)
    exact = dense_angle_flow(FIVE, 4.0, depths).y.T
    energies, true = energy_of(points), energy_of(on_circle(exact))
    return lab.Outcome(
        findings=[
            BEYOND.close_to(np.exp(logs - laws)[1:], 1.0, tolerance=1e-6),
            STEPS.at_most(ratio, 1.0),
            FIVE_DEPTHS.close_to(close_depths(depths, points), close, tolerance=2e-2),
            FIVE_ENERGY.close_to(energies, true, tolerance=1e-7),
            RISES.at_least(np.diff(energies), 0.0, tolerance=1e-12),
        ],
        pictures=[draw_steps(betas, logs, steps), draw_five(five, energies)],
        movies=[
            lab.Movie(
                five,
                "The five tokens of the published run on the circle: two groups form "
                "at once, and meet after depth 329. One frame per saved depth.",
                depths=depths,
                draw=CircleFrames(),
                fps=8,
            )
        ],
    )


def dwell(beta: float, rtol: float) -> tuple[float, float, int]:
    """Logarithm of the depth at which two groups meet, the law's, and the steps."""
    start = np.pi / 2
    groups = TwoGroups(attention_on_circle("softmax", beta))
    law = groups.log_dwell_time(start, MEETING)
    # All saved depths but the first lie behind the meeting: its steps are its own.
    depths = np.append(0, 10 * np.exp(law) * np.geomspace(1, 2, SAVED - 1))
    path = walk_on_circle([0.0, start], beta, depths, merge=MEETING, rtol=rtol)
    steps = path.accepted_steps[-1] + path.rejected_steps[-1]
    return float(np.log(joins_of(path).depths[0])), law, int(steps)


def first_depths_within(distance: float) -> np.ndarray:
    """Where neighbouring gaps fall below a distance, in order, by SciPy."""
    events = [lambda _, now, k=k: now[k + 1] - now[k] - distance for k in range(4)]
    found = dense_angle_flow(FIVE, 4.0, [0, 350], events=events)
    return np.sort([times[0] for times in found.t_events])


def five_tokens(close: np.ndarray, rtol: float) -> mf.Trajectory:
    """The published run, saved finely around the depths where tokens come close."""
    around = np.linspace(-0.05, 0.05, 8) + close[:, None]
    others = [0, 5, 20, 200, *np.geomspace(0.1, 290, 13), *np.linspace(300, 350, 12)]
    return walk_on_circle(FIVE, 4.0, np.sort([*around.ravel(), *others]), rtol=rtol)


def close_depths(depths, points) -> np.ndarray:
    """Where neighbouring gaps fall below the distance, between saved depths, in order.

    Gaps close exponentially: their logarithm is interpolated.
    """
    gaps = np.diff(angles_of(points), axis=1)
    # Joined tokens have no gap.
    logs = np.log(np.maximum(gaps, np.finfo(gaps.dtype).tiny) / CLOSE)
    found = []
    for log in logs.T:
        after = int(np.argmax(log < 0))
        last = slice(after - 1, after + 1)
        found.append(np.interp(0, -log[last], depths[last]))
    return np.sort(found)


def energy_of(points: np.ndarray) -> np.ndarray:
    """The energy of five equal tokens, in units of that of one cluster."""
    gram = np.einsum("tid,tjd->tij", points, points)
    return np.exp(4 * (gram - 1)).mean((1, 2))


def draw_steps(betas, logs, steps) -> lab.Picture:
    """Steps against the logarithm of the depth of the meeting."""
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


def draw_five(five: mf.Trajectory, energies: np.ndarray) -> lab.Picture:
    """Angles and energy of the five tokens."""
    depths, angles = np.asarray(five.depths)[1:], angles_of(np.asarray(five.points))[1:]
    figure, (above, below) = style.canvas(1, 2, panel=(5.4, 2.4), sharex=True)
    above.plot(depths, angles, linewidth=1.5)
    below.plot(depths, energies[1:], color=style.BLUE)
    for axes in (above, below):
        joins = np.asarray(joins_of(five).depths)
        mark_values(joins, axes, label="tokens are joined")
    above.legend(loc="center left")
    above.set(ylabel="angle")
    below.set(xscale="log", xlabel="depth $t$", ylabel="energy (one cluster: 1)")
    return lab.Picture(
        figure,
        r"The five tokens of the published run at $\beta = 4$: angles (above) and "
        "energy (below). Dotted: where tokens, by then $10^{-9}$ apart, are joined.",
    )
