r"""On the line, attention becomes Boolean.

For tokens on the line with $V > 0$ and $QK > 0$ the attention matrix tends to one whose
rows are basis vectors: every token ends up attending to the leftmost or to the
rightmost one alone, but for at most one exceptional row. So its rank is one or two.
The rescaled tokens $z = e^{-tV}x$ tend to their leader. Which of the two it is depends
on the whole context, not on a token's sign; where the choice tips over, a token stays
near zero with a row that is not Boolean. It is unstable, and found by bisection.
"""

from dataclasses import dataclass

import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.observables import find_leaders, find_limit
from meanformer.plotting import draw_attention, style

FIVE = (-1.0, -0.3, 0.1, 0.4, 1.2)
FIVE_AT_8 = (-0.7020423162, -0.7014797633, 0.9828397078, 0.9831251823, 0.9835792313)
NAMED = (FIVE, (0.2, 0.5, 0.9), (-0.8, -0.5, 0.05, 0.07))
TIPPING = -0.05837211652778  # of the middle token between -1 and 1.2
EXACT = {"rtol": 1e-12, "atol": 1e-14}


@dataclass(frozen=True)
class Parameters:
    """How many starts."""

    tokens: int = lab.setting(20, full=40, help="tokens of a random start", at_least=2)
    starts: int = lab.setting(12, full=300, help="random starts", at_least=2)
    bisections: int = lab.setting(
        40, full=48, help="bisections of the tipping point", at_least=20, at_most=50
    )
    seed: int = lab.setting(0, help="seed of the random starts", at_least=0)


ROWS = lab.observation(
    "rows",
    "The tokens $(-1, -0.3, 0.1, 0.4, 1.2)$ end with the rows "
    "$e_1, e_1, e_5, e_5, e_5$; $(0.2, 0.5, 0.9)$ all with $e_3$; "
    "$(-0.8, -0.5, 0.05, 0.07)$ all with $e_1$, though two of them are positive.",
    source=lab.tabulated("tokens counted from zero"),
)
POSITIONS = lab.observation(
    "positions",
    "At depth $8$ the five tokens are, rescaled, at "
    "$-0.7020423162, -0.7014797633, 0.9828397078, 0.9831251823, 0.9835792313$.",
    source=lab.tabulated(),
)
DENSE = lab.observation(
    "dense",
    "They are where a dense program with SciPy's integrator finds them.",
    source=lab.other_method("SciPy's DOP853"),
)
RANK = lab.theorem(
    "rank",
    "From random starts the attention matrix tends to rank one or two.",
    "GLPR23b, Theorem on the line: limit of the attention matrix",
    source=lab.theory("one for each leader"),
)
EXTREMES = lab.theorem(
    "extremes",
    "The leaders are the leftmost or the rightmost token, never another: share of "
    "random starts.",
    "GLPR23b, Theorem on the line: limit of the attention matrix",
    source=lab.theory("all of them"),
)
TIPS = lab.observation(
    "tipping-point",
    "A token between $-1$ and $1.2$ goes left or right according to which side of "
    "$a = -0.05837211652778$ it starts on.",
    source=lab.tabulated("by bisection in arithmetic of thirty digits"),
)
EXCEPTIONAL = lab.observation(
    "exceptional-row",
    "Started there its row at depth $2$ is still mixed, about $(0.375, 0.335, 0.290)$.",
    source=lab.other_method("SciPy's DOP853"),
)


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Follow given and random tokens to their leaders, bisect the tipping point."""
    rng = np.random.default_rng(parameters.seed)
    random = rng.normal(size=(parameters.starts, parameters.tokens))
    reports = [limit(starts) for starts in progress.over(NAMED, 0.3)]
    randoms = [limit(starts) for starts in progress.over(random, 0.4)]
    tipping = bisect(progress.over(range(parameters.bisections), 0.3))
    middles = tipping + np.outer([-1, 1], [1e-1, 1e-2, 1e-3, 1e-4]).ravel()
    hesitating = [limit((-1.0, a, 1.2), second_look=False) for a in middles]
    row, expected = rows_at_tipping()
    return lab.Outcome(
        findings=[
            *named_findings(reports),
            *random_findings(randoms),
            TIPS.close_to(tipping, TIPPING, tolerance=1e-11),
            EXCEPTIONAL.close_to(row, expected, tolerance=1e-3),
        ],
        pictures=[draw_lines(reports[0], hesitating), draw_matrices(reports[0])],
    )


def padded(starts, count: int) -> mf.TokenCloud:
    """Tokens of the line; padded, so that one program serves all."""
    missing = count - len(starts)
    points = np.append(starts, np.zeros(missing))[:, None]
    weights = np.append(np.full(len(starts), 1 / len(starts)), np.zeros(missing))
    return mf.TokenCloud(points, weights)


def limit(starts, **options):
    """Prediction, limit and path of tokens on the line."""
    return find_limit(
        lab.plain_attention(np.eye(1)), padded(starts, max(len(starts), 5)), **options
    )


def named_findings(reports):
    """Rows, positions and the dense program."""
    follows = [
        report.detection.follows[: len(starts)]
        for report, starts in zip(reports, NAMED, strict=True)
    ]
    late = reports[0].detection.phase.at(8.0)[:, 0]
    layer = lab.plain_attention(np.eye(1))
    dense = lab.dense_rescaled_flow(layer, padded(FIVE, 5), 8.0)[:, 0]
    return (
        ROWS.close_to(
            np.concatenate(follows), [0, 0, 4, 4, 4, 2, 2, 2, 0, 0, 0, 0], tolerance=0
        ),
        POSITIONS.close_to(late, FIVE_AT_8, tolerance=1e-9),
        DENSE.close_to(late, dense, tolerance=1e-8),
    )


def random_findings(reports):
    """Ranks and leaders of random starts."""
    reached = [one for one in reports if one.detection.verdict == "reached"]
    extremes = []
    for report in reached:
        first = np.asarray(report.trajectory.points[0, :, 0])
        ends = {int(first.argmin()), int(first.argmax())}
        extremes.append(set(report.detection.leaders.tolist()) <= ends)
    return (
        RANK.inside([report.detection.following.rank for report in reached], 1, 2),
        EXTREMES.close_to(np.mean(extremes), 1.0, tolerance=0),
    )


def bisect(rounds) -> float:
    """The start of a middle token that goes neither left nor right."""
    left, right = -1.0, 1.2
    for _ in rounds:
        middle = (left + right) / 2
        # So close to the tie that a second look could not agree.
        found = limit((-1.0, middle, 1.2), second_look=False, save=3).detection
        follows = found.follows
        goes_left = follows is not None and follows[1] == 0
        left, right = (middle, right) if goes_left else (left, middle)
    return (left + right) / 2


def rows_at_tipping() -> tuple[np.ndarray, np.ndarray]:
    """What the middle token attends to at depth 2: here, and by a dense program."""
    schedule = mf.Rescaled(lab.plain_attention(np.eye(1)))
    cloud = mf.TokenCloud(np.array([-1.0, TIPPING, 1.2])[:, None])
    path = mf.solve(mf.Flow(schedule), cloud, 2.0, save=2, **EXACT)
    matrix = mf.attention_matrix(schedule.attention_at(2.0), path.cloud(-1))
    rescaled = lab.dense_rescaled_flow(schedule.attention, cloud, 2.0)[:, 0]
    tokens = np.exp(2.0) * rescaled
    masses = np.exp(tokens[1] * tokens)
    return np.asarray(matrix)[1], masses / masses.sum()


def draw_lines(report, hesitating) -> lab.Picture:
    """Rescaled tokens against depth, and where a middle token goes."""
    figure, (left, right) = style.canvas(2, panel=(4.4, 3.4))
    depths = np.linspace(0, 6, 121)
    path = np.asarray(report.continued(depths).points)[:, :, 0]
    follows = report.detection.follows
    for token, line in enumerate(path.T):
        colour = style.BLUE if follows[token] == 0 else style.ORANGE
        is_leader = follows[token] == token
        left.plot(depths, line, color=colour, linewidth=2.2 if is_leader else 1.2)
    left.set(xlabel="depth $t$", ylabel="rescaled tokens $z_i(t)$")
    left.set_title("five tokens and their two leaders")
    shown = np.linspace(0, 3, 61)
    for index, near in enumerate(hesitating):
        middle = near.continued(shown).points[:, 1, 0]
        colour = style.BLUE if index < len(hesitating) / 2 else style.ORANGE
        right.plot(shown, middle, color=colour, linewidth=1.2)
    right.set(xlabel="depth $t$", ylabel="middle token $z_2(t)$")
    right.set_title("either side of the tipping point")
    return lab.Picture(
        figure,
        r"Left: the rescaled tokens of the first start; leaders, drawn thick, attract "
        r"the tokens of their colour. Right: a token between $-1$ and $1.2$, started "
        r"$10^{-1}$ to $10^{-4}$ left (blue) and right (orange) of the tipping point: "
        "the closer, the longer it hesitates.",
    )


def draw_matrices(report) -> lab.Picture:
    """The attention matrix along depth."""
    figure, panels = style.canvas(3, panel=(3.2, 3.2))
    depths = np.array([0.0, 1.5, 5.0])
    path = report.continued(depths)
    schedule = mf.Rescaled(lab.plain_attention(np.eye(1)))
    for axes, depth, index in zip(panels, depths, range(3), strict=True):
        attention = schedule.attention_at(depth)
        matrix = mf.attention_matrix(attention, path.cloud(index))
        rank = find_leaders(matrix).rank
        draw_attention(matrix, axes, order=None, rank=rank)
        axes.set_title(f"depth {depth:g}, rank {rank}", pad=16)
    return lab.Picture(
        figure,
        "The attention matrix of the first start: full rank at first, Boolean of rank "
        "two at the end. The rank counts singular values above $10^{-6}$.",
    )


experiment = lab.experiment(
    run, "On the line attention becomes Boolean", room="observables", seconds=8
)
