r"""Joining tokens that have met changes nothing that matters, and how little.

Tokens of one cluster approach each other exponentially and never meet. Joining two of
them at the distance $r$, masses $w_1$ and $w_2$, moves the measure by
$\sqrt{w_1w_2/(w_1+w_2)}\,r$ in $W_2$, and from then on the cluster moves as one
token. How far is the merged flow from the true one? At most of the order of $r$, which
is reached at the moment of the join; later the true tokens come together as well, and
what lasts is of the order of $r^2$ at most, because the mean of a pair is kept. Along
the path the jumps are carried by the rate at which small perturbations grow, which
bounds the error for small $r$. Five tokens on the circle are compared with an ordinary
integrator in angles.
"""

import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers.circle_walks import FIVE, joins_of
from meanformer.experiments.helpers.dense import dense_angle_flow
from meanformer.geometry.circle import on_circle
from meanformer.plotting import draw_rate, mark_sizes, style

WEIGHTS = np.array([0.25, 0.15, 0.2, 0.3, 0.1])
PAIRS = ((0, 1), (3, 4))  # the closest tokens, in the order in which they meet


class Parameters(lab.Parameters):
    """The flow, and how far the distance of a join is lowered."""

    halvings: int = lab.setting(
        4, full=8, help=r"distances $0.08, 0.04, \dots$, so many of them", at_least=3
    )
    beta: float = lab.setting(
        4.0, help=r"inverse temperature, $\beta$", at_least=1, at_most=8
    )
    depth: float = lab.setting(20.0, help="last depth", at_least=15, at_most=25)


FIRST_ORDER = lab.observation(
    "first-order",
    "The largest distance of the merged from the true flow along depth is of first "
    "order in the distance $r$ of a join.",
    source=lab.theory("fitted to the three smallest distances"),
)
LASTING = lab.observation(
    "second-order",
    "What is left of it when the true clusters have come together is of second order "
    "in $r$ or higher.",
    source=lab.theory("fitted to distances down to $0.01$"),
)
BOUND = lab.observation(
    "bound",
    "The distance stays below the jumps carried along the path, at all depths and "
    "all $r$: the largest ratio.",
    source=lab.theory("linearised: it holds for small distances"),
)
JUMPS = lab.observation(
    "jumps",
    "The two closest pairs, joined at the prescribed distance $r$, move the measure "
    r"by $\sqrt{w_1w_2/(w_1+w_2)}\,r$ each.",
    source=lab.closed_form("two points joined at their mean, located as an event"),
)
EVENT = lab.observation(
    "event",
    "The first join happens at the depth where an ordinary integrator sees the gap "
    "fall below $r$.",
    source=lab.other_method("event of SciPy's DOP853, in angles"),
)
ENERGY = lab.observation(
    "energy",
    "The energy at the last depth is that of the true flow, up to an error of second "
    "order in $r$ or higher.",
    source=lab.theory("fitted to distances down to $0.01$"),
)


@lab.experiment(
    "Joining tokens that have met costs no more than their distance",
    room="flows",
    seconds=12,
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Merge at smaller and smaller distances, against the flow without merging."""
    beta, depths = parameters.beta, np.linspace(0, parameters.depth, 161)
    distances = 0.08 / 2 ** np.arange(parameters.halvings)
    gaps = [lambda _, angles, r=r: np.diff(angles).min() - r for r in distances]
    true = dense_angle_flow(FIVE, beta, depths, weights=WEIGHTS, events=gaps)
    exact = on_circle(true.y.T)
    paths = [merged(beta, float(r), depths) for r in progress.over(distances)]
    points = np.array([path.points for path in paths])
    # Token by token, which is no less than the distance of the measures.
    errors = np.sqrt(((points - exact) ** 2).sum(-1) @ WEIGHTS)
    bounds = np.array([10 ** path.statistics["log10_merge_bound"] for path in paths])
    sums = np.array([path.statistics["merge_error"] for path in paths])
    largest, ratios = errors.max(axis=1), errors[sums > 0] / bounds[sums > 0]
    # Below $0.01$ the true tokens are not yet closer than what is left.
    lasting = fitted_order(distances[:4], errors[:4, -1])
    energies = [energy(end, beta) for end in points[:4, -1]]
    lost = np.abs(np.array(energies) - energy(exact[-1], beta))
    joins = [joins_of(path).depths[0] for path in paths]
    crossings = [times[0] for times in true.t_events]
    return lab.Outcome(
        findings=[
            FIRST_ORDER.close_to(fitted_order(distances, largest), 1, tolerance=0.1),
            LASTING.at_least(lasting, 2, tolerance=0.1),
            BOUND.at_most(ratios, 1.0, tolerance=1e-3),
            jump_finding(distances, sums),
            EVENT.close_to(joins, crossings, tolerance=1e-6),
            ENERGY.at_least(fitted_order(distances[:4], lost), 2, tolerance=0.1),
        ],
        pictures=[draw(depths, distances, errors, bounds)],
    )


def merged(beta: float, distance: float, depths) -> mf.Trajectory:
    """The flow with tokens joined at a distance."""
    return mf.solve(
        mf.Flow(mf.identity_attention("softmax", 2, beta), space=mf.Sphere()),
        mf.TokenCloud.from_angles(FIVE, WEIGHTS),
        depths[-1],
        save=depths,
        merge=mf.flows.Merge(distance),
        rtol=1e-10,
        atol=1e-12,
    )


def energy(points: np.ndarray, beta: float) -> float:
    """The energy, in units of that of one cluster."""
    return float(WEIGHTS @ np.exp(beta * (points @ points.T - 1)) @ WEIGHTS)


def fitted_order(distances, errors) -> float:
    """The exponent of the three smallest distances."""
    return float(np.polyfit(np.log(distances[-3:]), np.log(errors[-3:]), 1)[0])


def jump_finding(distances, sums):
    """The first two jumps, against the prescribed distance and masses of the pairs."""
    first, second = WEIGHTS[np.array(PAIRS)].T
    shares = np.sqrt(first * second / (first + second))
    # Depths are saved finely enough that every join is a step of its own.
    steps = [np.unique(row)[: 1 + len(PAIRS)] for row in sums]
    jumps = np.diff(steps, axis=1) / distances[:, None]
    return JUMPS.close_to(jumps, shares, relative_tolerance=1e-6)


def draw(depths, distances, errors, bounds) -> lab.Picture:
    """Errors against the distance, and along depth with the bound."""
    figure, (left, right) = style.canvas(2, panel=(4.4, 3.4))
    draw_rate(distances, errors.max(axis=1), left, label="largest", slope=1)
    draw_rate(distances[:4], errors[:4, -1], left, label="at the last depth", slope=3)
    mark_sizes(distances, left)
    left.set(xlabel="distance of a join $r$", ylabel="distance to the true flow")
    left.legend()
    for index, color in ((0, style.BLUE), (len(distances) - 1, style.ORANGE)):
        label = f"$r = {distances[index]:.3g}$"
        right.plot(depths, errors[index], color=color, label=label)
        began, bound = bounds[index] > 1e-30, f"its bound, {label}"
        line = {"color": color, "linewidth": 1.2, "label": bound}
        right.plot(depths[began], bounds[index][began], "--", **line)
    right.set(yscale="log", ylim=(1e-7, 1), xlabel="depth $t$")
    right.set_ylabel("distance to the true flow")
    right.legend()
    return lab.Picture(
        figure,
        "How far the merged flow is from the true one. Left: against the distance of "
        "a join, with slopes 1 and 3 (dashed). Right: along depth, with the jumps "
        "carried along the path (dashed).",
    )
