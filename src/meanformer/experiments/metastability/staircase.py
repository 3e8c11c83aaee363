r"""The staircase of energy, and the rule that predicts it.

At low temperature tokens on the circle meet pair by pair, and between the meetings the
energy, in units of that of one cluster, is the sum $\sum_k m_k^2$ over the groups:
plateaus at rational levels. The published staircase divides the velocity by its norm,
so that its abscissa is arc length over $\log\beta$. Where the jumps are needs no
simulation: the closest pair meets first, at the barycentre under unnormalised attention
and near the point of squared masses under softmax. Each plateau is then set against the
critical point of the energy that belongs to it, if there is one.
"""

import numpy as np
import scipy.integrate

import meanformer as mf
import meanformer.experiments as lab
from meanformer import observables
from meanformer.experiments.helpers import circle_walks as walks
from meanformer.experiments.helpers.circle_walks import joins_of, walk_on_circle
from meanformer.geometry.circle import angles_of
from meanformer.plotting import draw_saddles, mark_values, style

SPACED = 0.5 * np.log(2000) / np.sqrt(2000) * np.array([0, 0.5, 2, 4, 7])
BETAS = (500.0, 1000.0, 1500.0, 2000.0, 3000.0, 4000.0)
LOWEST = BETAS[-1]
LEVELS_OF_FIVE = (0.28, 0.44, 0.52, 1.0)
STEP = 1e-5  # of the published scheme, in its own abscissa
SMALL, NEAR = 1e-5, 1e-3  # where it puts tokens on top of each other
AROUND = 2 * np.pi * np.arange(5) / 5 + np.array([0.10, -0.14, 0.05, 0.10, -0.02])


class Parameters(lab.Parameters):
    """How accurately, and how far the published scheme is followed."""

    rtol: float = lab.setting(1e-10, full=1e-12, help="tolerance of the walks", above=0)
    published_steps: int = lab.setting(
        10_000, full=1_000_000, help="steps of the published scheme", at_least=9_500
    )


LEVELS = lab.observation(
    "levels",
    r"On the plateaus, $\beta = 4000$, both flows, the energy of the tokens is "
    r"$\sum_k m_k^2$: $0.28$, $0.44$, $0.52$, $1$.",
    "GKPR24, staircase profile of the energy",
    source=lab.closed_form(r"$\sum_k N_k^2/n^2$"),
)
ARC = lab.observation(
    "unnormalised-arc",
    r"Without normalisation, $\beta = 4000$, jumps are at the arc lengths of the rule.",
    source=lab.theory("greedy rule: the closest pair first"),
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
    "A walk that ends at depth $10^{15}$, after one join of four, is continued by the "
    r"rule: order, levels and $\log_{10}$ of the depths of the three other joins.",
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


@lab.experiment(
    "The energy climbs a staircase that a greedy rule predicts",
    room="observables",
    seconds=28,
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Walk all staircases, and set them against the rule and the published scheme."""
    rtol, long = parameters.rtol, walks.long_depths(1e300)
    free = {"kind": "unnormalised", "rtol": rtol}
    climbs = {b: walk_on_circle(SPACED, b, long, **free) for b in progress.over(BETAS)}
    soft = walk_on_circle(SPACED, LOWEST, long, rtol=rtol)
    short = walk_on_circle(SPACED, LOWEST, walks.long_depths(1e15), **free)
    around = walk_on_circle(AROUND, 20.0, walks.long_depths(1e22), rtol=rtol)
    ladder, joins = observables.saddles(around), np.asarray(joins_of(around).depths)
    closely = walks.depths_around(joins, 1e3 * joins[-1])
    angles = walk_on_circle(AROUND, 20.0, closely, rtol=rtol)
    scheme = published_scheme(LOWEST, parameters.published_steps)
    attention = walks.attention_on_circle("unnormalised", LOWEST)
    start = mf.TokenCloud.from_angles(SPACED)
    rule = np.asarray(observables.greedy_staircase(attention, start).arc_lengths)
    lengths = {b: np.asarray(joins_of(path).arc_lengths) for b, path in climbs.items()}
    return lab.Outcome(
        findings=[
            *rule_findings(lengths, rule, soft, scheme),
            *plateau_findings(climbs[LOWEST], soft, short, ladder),
        ],
        pictures=[draw_published(lengths, rule, scheme), draw_ladder(angles, ladder)],
    )


def finite_rule(beta: float) -> np.ndarray:
    """The rule with meetings at finite beta under softmax, by SciPy, on a line."""
    places, counts, lengths = list(SPACED), [1.0] * 5, []
    options = {"epsabs": 1e-12, "points": [1 / np.sqrt(beta)], "limit": 200}
    while len(places) > 1:
        pair = int(np.argmin(np.diff(places)))
        gap, masses = np.diff(places)[pair], counts[pair : pair + 2]

        def share(angle, masses=masses):
            fall = np.exp(beta * (np.cos(angle) - 1))
            first, second = masses
            one, two = second / (first + second * fall), first / (second + first * fall)
            return one / (one + two)

        def speed(angle, masses=masses, share=share):
            return np.sqrt(np.dot(masses, [share(angle) ** 2, (1 - share(angle)) ** 2]))

        place = places[pair] + scipy.integrate.quad(share, 0, gap, **options)[0]
        lengths.append(scipy.integrate.quad(speed, 0, gap, **options)[0])
        places[pair : pair + 2], counts[pair : pair + 2] = [place], [sum(masses)]
    return np.cumsum(lengths)


def published_scheme(beta: float, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Abscissas and energies of the published scheme, until its velocity is zero."""
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


def rule_findings(lengths, rule, soft: mf.Trajectory, scheme):
    """Arc lengths of the jumps: of the rule, the flows and the published scheme."""
    found, (abscissas, energies) = np.asarray(joins_of(soft).arc_lengths), scheme
    last = [climbed[-1] for climbed in lengths.values()]
    end = abscissas[np.argmax(energies > 1 - 1e-4)]
    return (
        ARC.close_to(lengths[LOWEST], rule, relative_tolerance=1e-6),
        FINITE.close_to(found, finite_rule(LOWEST), relative_tolerance=1e-5),
        COINCIDE.at_most(np.ptp(last) / max(last), 0.01),
        SCHEME.close_to(last[-1] / np.log(LOWEST), end, tolerance=2e-4),
    )


def plateau_findings(climb: mf.Trajectory, soft: mf.Trajectory, short, ladder):
    """Levels, the joins predicted from depth 1e15 on, and saddles of the plateaus."""
    steps = [list(observables.plateaus(path))[1:] for path in (soft, climb)]
    energies = [[step.energy for step in several] for several in steps]
    whole, rest = joins_of(climb), observables.predicted_staircase(short)
    found = [*np.asarray(rest.tokens), *np.asarray(rest.levels)[1:]]
    found += list(np.asarray(rest.log_depths) / np.log(10))
    expected = [*np.asarray(whole.tokens), *LEVELS_OF_FIVE, *np.log10(whole.depths)]
    indices = [-1 if step.index is None else step.index for step in ladder]
    counts = np.array([step.plateau.count for step in ladder])
    on_arc = [step.point is not None for step in observables.saddles(soft)]
    return (
        LEVELS.close_to(energies, [LEVELS_OF_FIVE] * 2, tolerance=1e-9),
        CONTINUED.close_to(found, expected, tolerance=1e-3),
        LADDER.close_to(indices, counts - 1, tolerance=0.0),
        NO_SADDLE.close_to(sum(on_arc[:-1]), 0, tolerance=0.0),
    )


def draw_published(lengths, rule, scheme) -> lab.Picture:
    """Staircases in two abscissas."""
    figure, (left, right) = style.canvas(2, panel=(4.6, 3.3))
    levels = [0.2, *LEVELS_OF_FIVE]
    for colour, (beta, jumps) in zip(style.shades(6), lengths.items(), strict=True):
        line = {"baseline": None, "color": colour, "linewidth": 1.5}
        left.stairs(levels, [0, *(jumps / np.log(beta)), 0.135], **line)
        right.stairs(levels, [0, *jumps, 0.86], label=rf"$\beta = {beta:g}$", **line)
    left.plot(*scheme, ":", color=style.INK, linewidth=1.6, label="published scheme")
    mark_values(rule, right)
    left.set(xlabel=r"arc length over $\log\beta$", ylabel="energy (one cluster: 1)")
    right.set(xlabel="arc length")
    left.legend(loc="upper left")
    right.legend(loc="upper left", bbox_to_anchor=(0.42, 0.98), fontsize=8.5)
    return lab.Picture(
        figure,
        r"Levels $\sum_km_k^2$ under unnormalised attention against the published "
        r"abscissa (left; dotted: the published scheme at $\beta = 4000$), and against "
        "arc length, where the spread is gone (right; dotted: the greedy rule).",
    )


def draw_ladder(path: mf.Trajectory, ladder: observables.Saddles) -> lab.Picture:
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
        "Newton's method finds from each, and how far its farthest group is from it.",
    )
