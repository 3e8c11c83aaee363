r"""On the line, attention becomes Boolean.

For tokens on the line with $V > 0$ and $QK > 0$ the attention matrix tends to one whose
rows are basis vectors: every token ends up attending to the leftmost or to the
rightmost one alone, but for at most one exceptional row. So its rank is one or two.
The rescaled tokens $z = e^{-tV}x$ tend to their leader. Which of the two it is depends
on the whole context, not on a token's sign; where the choice tips over, a token stays
near zero with a row that is not Boolean. It is unstable, and found by bisection.
"""

import numpy as np
import scipy.optimize

import meanformer as mf
import meanformer.experiments as lab
from meanformer.observables import find_leaders, find_limit
from meanformer.plotting import draw_attention, style

NAMED = ((-1.0, -0.3, 0.1, 0.4, 1.2), (0.2, 0.5, 0.9), (-0.8, -0.5, 0.05, 0.07))


class Parameters(lab.Parameters):
    """How many starts."""

    tokens: int = lab.setting(20, full=40, help="tokens of a random start", at_least=2)
    starts: int = lab.setting(12, full=300, help="random starts", at_least=2)
    seed: int = lab.setting(0, help="seed of the random starts", at_least=0)


ROWS = lab.observation(
    "rows",
    "The tokens $(-1, -0.3, 0.1, 0.4, 1.2)$ end with the rows "
    "$e_1, e_1, e_5, e_5, e_5$; $(0.2, 0.5, 0.9)$ all with $e_3$; "
    "$(-0.8, -0.5, 0.05, 0.07)$ all with $e_1$, though two of them are positive.",
    source=lab.other_method("largest scores at depth 8, by SciPy's DOP853"),
)
DENSE = lab.observation(
    "dense",
    "At depth $8$ they are where a dense program with SciPy's integrator finds them.",
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
    r"$a \approx -0.058$ it starts on: its sign, $10^{-11}$ to either side of the "
    "point found by bisection.",
    source=lab.other_method("sign at depth 4, by SciPy's DOP853"),
)
EXCEPTIONAL = lab.observation(
    "exceptional-row",
    "Started there its row at depth $2$ is still mixed, about $(0.375, 0.335, 0.290)$.",
    source=lab.other_method("SciPy's DOP853"),
)


@lab.experiment("On the line attention becomes Boolean", room="observables", seconds=8)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Follow given and random tokens to their leaders, bisect the tipping point."""
    rng = np.random.default_rng(parameters.seed)
    random = rng.normal(size=(parameters.starts, parameters.tokens))
    reports = [limit(starts) for starts in progress.over(NAMED, 0.4)]
    randoms = [limit(starts) for starts in progress.over(random, 0.6)]
    tipping = scipy.optimize.root_scalar(
        side_of_middle, bracket=(-1.0, 1.2), method="bisect", xtol=1e-12
    ).root
    middles = tipping + np.outer([-1, 1], [1e-1, 1e-2, 1e-3, 1e-4]).ravel()
    hesitating = [limit((-1.0, a, 1.2), second_look=False) for a in middles]
    return lab.Outcome(
        findings=[
            *named_findings(reports),
            *random_findings(randoms),
            *tipping_findings(tipping),
        ],
        pictures=[draw_lines(reports[0], hesitating), draw_matrices(reports[0])],
    )


def layer() -> mf.Softmax:
    """Attention on the line with query, key and value one."""
    return lab.plain_attention(np.eye(1))


def line(starts) -> mf.TokenCloud:
    """Tokens of the line."""
    return mf.TokenCloud(np.asarray(starts)[:, None])


def limit(starts, **options):
    """Prediction, limit and path; padded, so that one program serves all."""
    return find_limit(layer(), mf.pad(line(starts), max(len(starts), 5)), **options)


def side_of_middle(start: float) -> float:
    """On which side a token between -1 and 1.2 ends: -1 or 1."""
    # So close to the tie that a second look could not agree.
    found = limit((-1.0, start, 1.2), second_look=False, save=3).detection
    return -1.0 if found.follows is not None and found.follows[1] == 0 else 1.0


def named_findings(reports):
    """Rows and positions against the dense program."""
    follows, rows, late, dense = [], [], [], []
    for report, starts in zip(reports, NAMED, strict=True):
        count, found = len(starts), report.detection
        tokens = lab.dense_rescaled_flow(layer(), line(starts), 8.0)[:, 0]
        follows.extend(found.follows[:count])
        rows.extend(np.outer(tokens, tokens).argmax(axis=1))
        late.extend(found.phase.at(8.0)[:count, 0])
        dense.extend(tokens)
    return (
        ROWS.close_to(follows, rows, tolerance=0),
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


def tipping_findings(tipping: float):
    """Either side of the tipping point, and the row of a token that starts there."""
    middles = [tipping - 1e-11, tipping + 1e-11]
    lines = [line([-1.0, middle, 1.2]) for middle in middles]
    dense = [lab.dense_rescaled_flow(layer(), cloud, 4.0)[1, 0] for cloud in lines]
    schedule, cloud = mf.Rescaled(layer()), line([-1.0, tipping, 1.2])
    path = mf.solve(mf.Flow(schedule), cloud, 2.0, save=2, rtol=1e-12, atol=1e-14)
    matrix = mf.attention_matrix(schedule.attention_at(2.0), path.cloud(-1))
    tokens = np.exp(2.0) * lab.dense_rescaled_flow(layer(), cloud, 2.0)[:, 0]
    masses = np.exp(tokens[1] * tokens)
    return (
        TIPS.close_to(list(map(side_of_middle, middles)), np.sign(dense), tolerance=0),
        EXCEPTIONAL.close_to(matrix[1], masses / masses.sum(), tolerance=1e-3),
    )


def draw_lines(report, hesitating) -> lab.Picture:
    """Rescaled tokens against depth, and where a middle token goes."""
    figure, (left, right) = style.canvas(2, panel=(4.4, 3.4))
    depths, shown = np.linspace(0, 6, 121), np.linspace(0, 3, 61)
    path = np.asarray(report.continued(depths).points)[:, :, 0]
    follows, sides = report.detection.follows, (style.BLUE, style.ORANGE)
    colours = np.where(follows == 0, *sides)
    widths = np.where(follows == np.arange(5), 2.2, 1.2)
    for token, colour, width in zip(path.T, colours, widths, strict=True):
        left.plot(depths, token, color=colour, linewidth=width)
    left.set(xlabel="depth $t$", ylabel="rescaled tokens $z_i(t)$")
    left.set_title("five tokens and their two leaders")
    for near, colour in zip(hesitating, np.repeat(sides, 4), strict=True):
        right.plot(shown, near.continued(shown).points[:, 1, 0], color=colour)
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
    path = report.continued(np.array([0.0, 1.5, 5.0]))
    for index, (axes, depth) in enumerate(zip(panels, path.depths, strict=True)):
        attention = mf.Rescaled(layer()).attention_at(depth)
        matrix = mf.attention_matrix(attention, path.cloud(index))
        rank = find_leaders(matrix).rank
        draw_attention(matrix, axes, order=None, rank=rank)
        axes.set_title(f"depth {depth:g}, rank {rank}", pad=16)
    return lab.Picture(
        figure,
        "The attention matrix of the first start: full rank at first, Boolean of rank "
        "two at the end. The rank counts singular values above $10^{-6}$.",
    )
