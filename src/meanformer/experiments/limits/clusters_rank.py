r"""Attention loses its rank along depth.

Under a generic value matrix $V$ with a positive leading eigenvalue tokens end up
attending to one leader or two, and the attention matrix, of full rank at first, has
rank one or two. In high dimension, where the eigenvalues of a random positive definite
$V$ are close, that takes long, and the rank falls in steps. In the coordinates of the
eigenvectors of $V$ the rescaled tokens come closer to what they attend to like
$e^{-\lambda t}$ where $\lambda > 0$, and move away from it where $\lambda < 0$.
"""

import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.observables import attention_rank, find_leaders, find_limit
from meanformer.plotting import draw_attention, draw_leader_graph, style

COUNTED = 1e-2  # singular values above it make the rank
HEAT_DEPTHS, COORDINATE_DEPTHS = 45, 49


class Parameters(lab.Parameters):
    """Sizes of the random clouds."""

    graph: int = lab.setting(20, help="tokens of the graph of leaders", at_least=3)
    heat: int = lab.setting(20, full=40, help="tokens of the heat map", at_least=8)
    dimension: int = lab.setting(32, full=80, help="their dimension", at_least=4)
    wide: int = lab.setting(24, full=128, help="tokens and dimension", at_least=8)
    density: float = lab.setting(0.1, help="filled share of V", above=0, at_most=1)
    seed: int = lab.setting(1, help="seed of all that is random", at_least=0)


LEADERS = lab.theorem(
    "leaders",
    "Under a random positive definite $V$ of the plane and random positive definite "
    "scores tokens follow one leader or two.",
    "GLPR23b, Theorem on hyperplanes",
    source=lab.theory("at most one on each side"),
)
ONE_EACH = lab.theorem(
    "rank-of-leaders",
    "Attention between them has, at last, as much rank as there are leaders.",
    "GLPR23b, Theorem on hyperplanes",
    source=lab.theory("one for each"),
)
FALLS = lab.observation(
    "rank-falls",
    "In high dimension attention loses rank along depth: rank at depth "
    r"$11/\lambda_1$ over that at depth 0, singular values above $10^{-2}$ counted.",
    source=lab.theory("at most two at last"),
)
COORDINATES = lab.observation(
    "coordinates",
    "In high dimension the distance of the median token to the mean that it attends "
    "to shrinks along eigenvectors with positive eigenvalues and grows along the "
    r"others, like $e^{-\lambda t}$: exponents over the last third of depth.",
    source=lab.theory("minus the eigenvalues"),
)


@lab.experiment("Attention loses its rank along depth", room="observables", seconds=10)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Follow tokens of the plane and of high dimension under random matrices."""
    rng = np.random.default_rng(parameters.seed)
    steps = progress.over((planar_limit, high_dimension, wide_flow))
    graph, heat, wide = (step(rng, parameters) for step in steps)
    matrices = [attention_at(heat, index) for index in range(len(heat))]
    ranks = [attention_rank(matrix, tolerance=COUNTED) for matrix in matrices]
    leaders, last = len(graph.detection.leaders), attention_at(graph.trajectory, -1)
    return lab.Outcome(
        findings=[
            LEADERS.inside(leaders, 1, 2),
            ONE_EACH.close_to(attention_rank(last), leaders, tolerance=0),
            FALLS.at_most(ranks[-1] / ranks[0], 0.5),
            coordinates_finding(wide),
        ],
        pictures=[draw_ranks(graph, last, heat, matrices[-1], ranks), draw_wide(wide)],
    )


def definite_value(rng, dimension: int) -> np.ndarray:
    """A random positive definite matrix with leading eigenvalue one."""
    factor = rng.normal(size=(dimension, dimension))
    value = factor @ factor.T
    return value / np.linalg.eigvalsh(value)[-1]


def sparse_value(rng, parameters: Parameters) -> np.ndarray:
    """A sparse symmetric matrix with eigenvalues of modulus one to two."""
    size = (parameters.wide, parameters.wide)
    entries = rng.normal(size=size) * (rng.random(size) < parameters.density)
    values, vectors = np.linalg.eigh(entries + entries.T)
    moduli = np.abs(values)
    pushed = 1 + (moduli - moduli.min()) / max(np.ptp(moduli), 1e-12)
    signs = np.where(values >= 0, 1.0, -1.0)
    # The leading eigenvalue is positive, so that the theorem applies.
    signs[moduli.argmax()] = 1.0
    return (vectors * signs * pushed) @ vectors.T


def planar_limit(rng, parameters: Parameters):
    """Tokens of the plane under random positive definite scores and value."""
    scores, value = definite_value(rng, 2), definite_value(rng, 2)
    tokens = mf.TokenCloud(rng.normal(size=(parameters.graph, 2)))
    return find_limit(mf.Softmax(scores, np.eye(2), value), tokens)


def high_dimension(rng, parameters: Parameters) -> mf.Trajectory:
    """Tokens of a high dimension under a random positive definite value matrix."""
    dimension = parameters.dimension
    flow = mf.Flow(mf.Rescaled(lab.plain_attention(definite_value(rng, dimension))))
    tokens = mf.TokenCloud(rng.normal(size=(parameters.heat, dimension)))
    return mf.solve(flow, tokens, 11.0, save=HEAT_DEPTHS)


def attention_at(path, index: int) -> np.ndarray:
    """The attention matrix between rescaled tokens at a saved depth."""
    layer = path.flow.velocity.attention_at(path.depths[index])
    return np.asarray(mf.attention_matrix(layer, path.cloud(index)))


def wide_flow(rng, parameters: Parameters) -> mf.Trajectory:
    """As many tokens as dimensions, under a sparse symmetric value matrix."""
    flow = mf.Flow(mf.Rescaled(lab.plain_attention(sparse_value(rng, parameters))))
    points = rng.normal(size=(parameters.wide, parameters.wide))
    # Longer tokens attend to themselves alone for long.
    cloud = mf.TokenCloud(points / np.sqrt(parameters.wide))
    return mf.solve(flow, cloud, 8.0, save=COORDINATE_DEPTHS, rtol=1e-7)


def typical_distances(path) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues, and median distances of tokens to the means that they attend to."""
    # The rescaled flow moves tokens by these distances, times the value matrix.
    values, vectors = np.linalg.eigh(np.asarray(path.flow.velocity.attention.value))
    distances = np.abs(np.asarray(path.velocities) @ vectors / values)
    return values, np.median(distances, axis=1)


def coordinates_finding(wide):
    """Exponents along all eigenvectors, over the last third of depth."""
    values, distances = typical_distances(wide)
    first, last = 2 * COORDINATE_DEPTHS // 3, COORDINATE_DEPTHS - 1
    between = float(wide.depths[last] - wide.depths[first])
    exponents = np.log(distances[last] / distances[first]) / between
    return COORDINATES.close_to(exponents, -values, tolerance=0.2)


def draw_ranks(graph, boolean, heat, sharpened, ranks) -> lab.Picture:
    """Who follows whom in the plane; attention in high dimension and its rank."""
    figure, (left, middle, right) = style.canvas(3, panel=(4.0, 3.8))
    leaders = graph.detection.leaders
    draw_leader_graph(graph.trajectory.points[0], boolean, left, leaders=leaders)
    left.set_title("who follows whom, at the start")
    leaders = find_leaders(sharpened).leaders
    draw_attention(sharpened, middle, leaders=leaders, rank=ranks[-1])
    right.plot(heat.depths, ranks, color=style.BLUE)
    right.set(xlabel=r"depth $t$, in units of $1/\lambda_1$", ylabel="rank")
    right.set_title("rank of attention")
    right.set_ylim(0, None)
    right.yaxis.get_major_locator().set_params(integer=True)
    return lab.Picture(
        figure,
        f"Random positive definite $V$. Left: {graph.trajectory.points.shape[1]} "
        "tokens of the plane, drawn where they start, and whom they follow in the end. "
        f"Middle and right: {heat.points.shape[1]} tokens in dimension "
        f"{heat.points.shape[2]}: attention at depth {float(heat.depths[-1]):.3g}, and "
        f"the number of its singular values above {COUNTED:g}.",
    )


def draw_wide(wide) -> lab.Picture:
    """Settled and free coordinates in high dimension."""
    figure, axes = style.canvas(panel=(6.0, 3.8))
    values, distances = typical_distances(wide)
    for mine, colour, label in (
        (values > 0, style.BLUE, r"$\lambda > 0$: settled"),
        (values < 0, style.ORANGE, r"$\lambda < 0$: free"),
    ):
        middle = np.median(distances[:, mine], axis=1)
        low, high = np.quantile(distances[:, mine], (0.05, 0.95), axis=1)
        axes.fill_between(wide.depths, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(wide.depths, middle, color=colour, label=label)
    axes.set(xlabel="depth $t$", ylabel="distance to what is attended to")
    axes.set_yscale("log")
    axes.legend()
    return lab.Picture(
        figure,
        f"{len(wide.weights)} tokens in as many dimensions under a sparse "
        "symmetric $V$ with eigenvalues of modulus one to two: distance of the median "
        "token to the mean that it attends to in each eigencoordinate, median and 90% "
        "of the coordinates.",
    )
