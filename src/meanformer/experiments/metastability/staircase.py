r"""The staircase of energy, and the rule that predicts it.

At low temperature tokens on the circle meet pair by pair, and between the meetings the
energy, in units of that of one cluster, is the sum $\sum_k m_k^2$ over the groups:
plateaus at rational levels. The published staircase divides the velocity by its norm,
so that its abscissa is arc length over $\log\beta$; one million Euler steps were taken
for each of six temperatures. Here the same setting, five tokens at $0.5\log(2000)/
\sqrt{2000}$ times $0, 0.5, 2, 4, 7$, is walked to its end in some hundred steps, under
both flows. Where the jumps are needs no simulation: the closest pair meets first, at
the barycentre under unnormalised attention and near the point of squared masses under
softmax. Each plateau is then set against the critical point of the energy that belongs
to it, if there is one.
"""

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
from meanformer.observables import (
    Saddles,
    greedy_staircase,
    plateaus,
    predicted_staircase,
    saddles,
)
from meanformer.plotting import draw_saddles, mark_values, style

SPACED = 0.5 * np.log(2000) / np.sqrt(2000) * np.array([0, 0.5, 2, 4, 7])
BETAS = (500.0, 1000.0, 1500.0, 2000.0, 3000.0, 4000.0)
LOWEST = BETAS[-1]
KINDS = ("softmax", "unnormalised")
LEVELS_OF_FIVE = (0.28, 0.44, 0.52, 1.0)
RULES = {
    "unnormalised": (0.03004521, 0.15147146, 0.33174269, 0.76617045),
    "softmax": (0.03004521, 0.15623507, 0.33650630, 0.80068215),
}
ABSCISSAS = (0.003622, 0.018261, 0.039995, 0.092372)
ENDS = {500.0: 0.12236, 1000.0: 0.110888}
WALKED = (0.030, 0.155, 0.336, 0.796)  # under softmax
STEP = 1e-5  # of the published scheme, in its own abscissa
SMALL, NEAR = 1e-5, 1e-3  # where it puts tokens on top of each other
HORIZON = 1e15
# Around the whole circle, and the inverse temperature there.
AROUND = 2 * np.pi * np.arange(5) / 5 + np.array([0.10, -0.14, 0.05, 0.10, -0.02])
AROUND_BETA = 20.0


@dataclass(frozen=True)
class Parameters:
    """How accurately, and how far the published scheme is followed."""

    rtol: float = lab.setting(
        1e-10, full=1e-12, help="relative tolerance of the walks", above=0
    )
    published_steps: int = lab.setting(
        10_000,
        full=1_000_000,
        help="Euler steps of the published scheme; it is at its end after some 10,000",
        at_least=9_500,
    )


LEVELS = lab.observation(
    "levels",
    r"On the plateaus, $\beta = 4000$, both flows, the energy of the tokens is "
    r"$\sum_k m_k^2$: $0.28$, $0.44$, $0.52$, $1$.",
    "GKPR24, staircase profile of the energy",
    source=lab.closed_form(r"$\sum_k N_k^2/n^2$"),
)
RULE = lab.observation(
    "greedy-rule",
    "The greedy rule puts the jumps at the arc lengths $0.03004521$, $0.15147146$, "
    "$0.33174269$, $0.76617045$ (unnormalised) and $0.03004521$, $0.15623507$, "
    "$0.33650630$, $0.80068215$ (softmax).",
    source=lab.tabulated(),
)
ARC = lab.observation(
    "unnormalised-arc",
    r"Under unnormalised attention the flow at $\beta = 4000$ jumps at the arc "
    "lengths of the greedy rule.",
    source=lab.theory("greedy rule: the closest pair first"),
)
ABSCISSA = lab.observation(
    "published-abscissa",
    "In the published abscissa that is $0.003622$, $0.018261$, $0.039995$, "
    r"$0.092372$; the last jump is at $0.110888$ for $\beta = 1000$ and at $0.12236$ "
    r"for $\beta = 500$.",
    source=lab.tabulated("with a merge threshold that costs some $10^{-4}$"),
)
SOFTMAX = lab.observation(
    "softmax-arc",
    r"Under softmax the jumps at $\beta = 4000$ are at the arc lengths $0.030$, "
    "$0.155$, $0.336$, $0.796$.",
    source=lab.tabulated(),
)
FINITE = lab.observation(
    "finite-beta-rule",
    r"At finite $\beta$ the rule is right to five digits if pairs meet where the law "
    r"of two groups says: softmax, $\beta = 4000$.",
    source=lab.other_method("two-group law on each gap, by SciPy's quadrature"),
)
COINCIDE = lab.observation(
    "coincide",
    r"Against arc length the staircases of $\beta = 500$ to $4000$ coincide: under "
    "unnormalised attention the last jumps differ by at most one per cent.",
    source=lab.theory("no dependence in the limit"),
)
SCHEME = lab.observation(
    "published-scheme",
    r"The published scheme, Euler steps of length $10^{-5}\log\beta$ along the "
    r"normalised velocity, ends at the same place at $\beta = 4000$.",
    "GKPR24, staircase profile of the energy",
    source=lab.other_method("Euler steps in NumPy, as published"),
)
CONTINUED = lab.observation(
    "continued",
    "A walk that ends at depth $10^{15}$, after one join of four, is continued by "
    r"the rule: order, levels and $\log_{10}$ of the depths of the three other joins "
    r"are those of the whole walk (unnormalised, $\beta = 4000$).",
    source=lab.other_method("the walk to depth $10^{300}$"),
)
LADDER = lab.observation(
    "saddle-ladder",
    r"Five tokens around the whole circle, $\beta = 20$: to each plateau of $k$ "
    "groups belongs a critical point, whose index is $k - 1$.",
    source=lab.closed_form("$k - 1$"),
)
NO_SADDLE = lab.theorem(
    "no-saddle",
    "In the published setting, on an arc below a half circle, no plateau but the "
    "last belongs to a critical point: there is none but the collapse.",
    "GLPR23, tokens in an open half sphere collapse exponentially",
    source=lab.theory(),
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Walk all staircases, and set them against the rule and the published scheme."""
    cases = [(kind, beta) for kind in KINDS for beta in BETAS]
    rtol = parameters.rtol
    paths = {
        (kind, beta): walk_on_circle(
            SPACED, beta, long_depths(1e300), kind=kind, rtol=rtol
        )
        for kind, beta in progress.over(cases, 0.8)
    }
    short = walk_on_circle(
        SPACED, LOWEST, long_depths(HORIZON), kind="unnormalised", rtol=rtol
    )
    around = walk_on_circle(AROUND, AROUND_BETA, long_depths(1e22), rtol=rtol)
    ladder, joins = saddles(around), np.asarray(joins_of(around).depths)
    closely = depths_around(joins, 1e3 * joins[-1])
    angles = walk_on_circle(AROUND, AROUND_BETA, closely, rtol=rtol)
    scheme = published_scheme(LOWEST, parameters.published_steps)
    return lab.Outcome(
        findings=[
            *rule_findings(paths, scheme),
            *plateau_findings(paths, predicted_staircase(short), ladder),
        ],
        pictures=[draw_published(paths, scheme), draw_ladder(angles, ladder)],
    )


def lengths_of(path: mf.Trajectory) -> np.ndarray:
    """The arc lengths of the joins."""
    return np.asarray(joins_of(path).arc_lengths)


def rule_of(kind: str) -> np.ndarray:
    """The arc lengths of the greedy rule."""
    cloud = mf.TokenCloud.from_angles(SPACED)
    rule = greedy_staircase(attention_on_circle(kind, LOWEST), cloud)
    return np.asarray(rule.arc_lengths)


def finite_rule(beta: float) -> np.ndarray:
    """The rule with meetings at finite beta under softmax, by SciPy, on a line."""
    places, counts, lengths = list(SPACED), [1.0] * 5, []
    while len(places) > 1:
        pair = int(np.argmin(np.diff(places)))
        gap, (first, second) = np.diff(places)[pair], counts[pair : pair + 2]

        def share(angle, first=first, second=second):
            fall = np.exp(beta * (np.cos(angle) - 1))
            one, two = second / (first + second * fall), first / (second + first * fall)
            return one / (one + two)

        def speed(angle, first=first, second=second, share=share):
            return np.sqrt(first * share(angle) ** 2 + second * (1 - share(angle)) ** 2)

        options = {"epsabs": 1e-12, "points": [1 / np.sqrt(beta)], "limit": 200}
        place = places[pair] + scipy.integrate.quad(share, 0, gap, **options)[0]
        lengths.append(scipy.integrate.quad(speed, 0, gap, **options)[0])
        places[pair : pair + 2] = [place]
        counts[pair : pair + 2] = [first + second]
    return np.cumsum(lengths)


def published_scheme(beta: float, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Abscissas and energies of the published scheme, until all tokens are one.

    Tokens are put on top of each other as it does, where the velocity is small. Then
    the velocity is zero, and the scheme divides by it: here it ends instead.
    """
    angles, energies = SPACED.copy(), []
    for _ in range(count):
        energy, following = published_step(angles, beta)
        if following is None:
            break
        energies.append(energy)
        angles = following
    return STEP * np.arange(len(energies)), np.array(energies)


def published_step(angles: np.ndarray, beta: float) -> tuple[float, np.ndarray | None]:
    """The energy, and the angles after one step; nothing where the velocity is zero."""
    gaps = angles[:, None] - angles[None, :]
    kernel = np.exp(beta * (np.cos(gaps) - 1))
    velocity = -(np.sin(gaps) * kernel).sum(axis=1) / len(angles) ** 2
    speed = np.linalg.norm(velocity)
    if speed == 0:
        return kernel.mean(), None
    angles = angles + STEP * np.log(beta) * velocity / speed
    for first in range(len(angles) if speed < SMALL else 0):
        later = angles[first:]
        later[np.abs(later - later[0]) < NEAR] = later[0]
    return kernel.mean(), angles


def rule_findings(paths, scheme):
    """Arc lengths of the jumps: of the rule, the flows and the published scheme."""
    climbed, soft = (lengths_of(paths[kind, LOWEST]) for kind in KINDS[::-1])
    ends = {beta: lengths_of(paths["unnormalised", beta])[-1] for beta in BETAS}
    last = np.array(list(ends.values()))
    abscissas, energies = scheme
    return (
        RULE.close_to(
            np.concatenate([rule_of(kind) for kind in RULES]),
            np.concatenate([*RULES.values()]),
            tolerance=2e-8,
        ),
        ARC.close_to(climbed, rule_of("unnormalised"), relative_tolerance=1e-6),
        ABSCISSA.close_to(
            [*climbed / np.log(LOWEST), *(ends[beta] / np.log(beta) for beta in ENDS)],
            [*ABSCISSAS, *ENDS.values()],
            relative_tolerance=2e-4,
        ),
        SOFTMAX.close_to(soft, WALKED, tolerance=6e-4),
        FINITE.close_to(soft, finite_rule(LOWEST), relative_tolerance=1e-5),
        COINCIDE.at_most(np.ptp(last) / last.max(), 0.01),
        SCHEME.close_to(
            climbed[-1] / np.log(LOWEST),
            abscissas[np.argmax(energies > 1 - 1e-4)],
            tolerance=2e-4,
        ),
    )


def plateau_findings(paths, rest, ladder: Saddles):
    """Levels, the joins predicted from depth 1e15 on, and saddles of the plateaus."""
    flows = [plateaus(paths[kind, LOWEST]) for kind in KINDS]
    whole = joins_of(paths["unnormalised", LOWEST])
    logs = np.asarray(rest.log_depths) / np.log(10)
    on_arc = list(saddles(paths["softmax", LOWEST]))[:-1]
    return (
        LEVELS.close_to(
            [step.energy for flow in flows for step in list(flow)[1:]],
            LEVELS_OF_FIVE * len(KINDS),
            tolerance=1e-9,
        ),
        CONTINUED.close_to(
            [*np.asarray(rest.tokens), *np.asarray(rest.levels)[1:], *logs],
            [*np.asarray(whole.tokens), *LEVELS_OF_FIVE, *np.log10(whole.depths)],
            tolerance=1e-3,
        ),
        LADDER.close_to(
            [-1 if step.index is None else step.index for step in ladder],
            np.array([step.plateau.count for step in ladder]) - 1,
            tolerance=0.0,
        ),
        NO_SADDLE.close_to(
            sum(step.point is not None for step in on_arc), 0, tolerance=0.0
        ),
    )


def draw_published(paths, scheme) -> lab.Picture:
    """Staircases in two abscissas."""
    figure, (left, right) = style.canvas(2, panel=(4.6, 3.3))
    for colour, beta in zip(style.shades(len(BETAS)), BETAS, strict=True):
        lengths = lengths_of(paths["unnormalised", beta])
        levels, name = [0.2, *LEVELS_OF_FIVE], rf"$\beta = {beta:g}$"
        line = {"baseline": None, "color": colour, "linewidth": 1.5}
        left.stairs(levels, [0, *(lengths / np.log(beta)), 0.135], **line)
        right.stairs(levels, [0, *lengths, 0.86], label=name, **line)
    left.plot(*scheme, ":", color=style.INK, linewidth=1.6, label="published scheme")
    mark_values(rule_of("unnormalised"), right)
    left.set(xlabel=r"arc length over $\log\beta$", ylabel="energy (one cluster: 1)")
    right.set(xlabel="arc length")
    left.legend(loc="upper left")
    right.legend(loc="upper left", bbox_to_anchor=(0.42, 0.98), fontsize=8.5)
    return lab.Picture(
        figure,
        "The published setting under unnormalised attention. Left: the level $\\sum_k "
        "m_k^2$ against the published abscissa; dotted: the published scheme at "
        r"$\beta = 4000$, whose energy rises before groups have met. Right: against "
        "arc length the spread is gone; dotted: the greedy rule.",
    )


def draw_ladder(path: mf.Trajectory, ladder: Saddles) -> lab.Picture:
    """Angles along depth, and the graph of saddles."""
    figure, (left, right) = style.canvas(2, panel=(4.8, 3.5))
    depths = np.asarray(path.depths)[1:]
    angles = angles_of(np.asarray(path.points))[1:]
    angles = (angles - angles[-1, 0] + np.pi) % (2 * np.pi) - np.pi
    left.plot(depths, angles, linewidth=1.4)
    mark_values(np.asarray(joins_of(path).depths), left)
    left.set(xscale="log", xlabel="depth $t$", xlim=(1e-1, depths[-1]))
    left.set(ylabel="angle from the last meeting point")
    draw_saddles(ladder, right)
    return lab.Picture(
        figure,
        r"Five tokens around the circle at $\beta = 20$. Left: angles along depth; "
        "dotted: joins. Right: the plateaus, with the index of the critical point that "
        "Newton's method finds from each, and how far its farthest group is from it: "
        "from saddle to saddle in energy, but not through the saddles.",
    )


experiment = lab.experiment(
    run,
    "The energy climbs a staircase that a greedy rule predicts",
    room="observables",
    seconds=28,
)
