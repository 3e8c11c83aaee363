r"""For $V = I$ tokens tend to the vertices of a polytope.

With $V = I$ and $\langle Qx, Kx\rangle > 0$ the rescaled tokens $z = e^{-t}x$ move
inside a convex hull that never grows, and each tends to 0 or to a point of the boundary
of a polytope: generically to a vertex. The vertices are leaders, tokens that attend to
themselves alone; every other token attends to one leader and comes closer to it like
$e^{-t}$. The attention matrix is then Boolean, and its rank is the number of leaders.
"""

import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer import plotting
from meanformer.experiments.helpers import limits
from meanformer.observables import find_limit
from meanformer.plotting import style

COMMON = 4  # dimensions in which tokens of a high dimension differ most


class Parameters(lab.Parameters):
    """Sizes of the random clouds."""

    cloud: int = lab.setting(24, full=40, help="tokens in space", at_least=4)
    heat: int = lab.setting(20, full=40, help="tokens of the heat map", at_least=4)
    dimension: int = lab.setting(32, full=80, help="their dimension", at_least=2)
    graph: int = lab.setting(20, help="tokens of the graph of leaders", at_least=3)
    starts: int = lab.setting(8, full=100, help="random planar layers", at_least=2)
    seed: int = lab.setting(3, help="seed of all that is random", at_least=0)
    movie: lab.Movies = lab.movie_setting()


DENSE = lab.observation(
    "dense",
    "At depth $15$ six tokens of the plane, three leaders and three followers, are "
    "where a dense program with SciPy's integrator finds them.",
)
HULL = lab.theorem(
    "hull",
    "The hull of the rescaled tokens never grows: its support function in 256 "
    "directions does not increase along depth.",
    "GLPR23b, convex hull of the rescaled tokens",
    source=lab.theory(),
)
MAXIMUM = lab.theorem(
    "maximum",
    "At every vertex $p$ found from random starts and layers, "
    r"$\langle Qp, Kp\rangle = \max_v\langle Qp, Kv\rangle$ over all vertices $v$.",
    "GLPR23b, Theorem on V = I: the possible limits",
    source=lab.theory(),
)
RATE = lab.observation(
    "rate",
    "Followers come closer to their leader like $e^{-t}$: the exponent between "
    "depths $5$ and $10$.",
    source=lab.theory("the eigenvalue of $V$; measured on the dense program"),
)
RANK = lab.theorem(
    "rank",
    "The rank of the attention matrix is the number of leaders, in every dimension "
    "that was tried.",
    "GLPR23b, Theorem on V = I",
    source=lab.theory("one for each leader"),
)
AGREES = lab.theorem(
    "agrees",
    r"Random layers with $V = \lambda I$ reach the predicted limit: share.",
    "GLPR23b, Theorem on V = I",
)


@lab.experiment(
    "For V = I tokens tend to polytope vertices", room="observables", seconds=12
)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Follow tokens to the vertices, in the plane, in space and in high dimension."""
    rng = np.random.default_rng(parameters.seed)
    six = find_limit(lab.plain_attention(np.eye(2)), lab.six_tokens())
    random = [
        random_limit(rng, parameters)
        for _ in progress.over(range(parameters.starts), 0.3)
    ]
    for _ in progress.over(range(1), 0.7):
        cube = mf.TokenCloud(rng.uniform(-1.2, 1.2, size=(parameters.cloud, 3)))
        space = find_limit(lab.plain_attention(np.eye(3)), cube)
        heat = high_dimension(rng, parameters)
    reports = [six, space, heat, *random]
    ranks = [report.detection.following.rank for report in reports]
    leaders = [len(report.detection.leaders) for report in reports]
    movie = lab.Movie(
        space.continued(np.linspace(0, 8, 161)),
        "Rescaled tokens of a cube under $V = I$, with their convex hull: it never "
        "grows, and ends as the polytope of the leaders.",
        draw=plotting.SpaceFrames(hull=True),
    )
    return lab.Outcome(
        findings=[
            *six_findings(six),
            MAXIMUM.close_to(max(map(excess, reports)), 0.0, tolerance=1e-9),
            RANK.close_to(ranks, leaders, tolerance=0),
            limits.agreement_finding(AGREES, random, share=0.95),
        ],
        pictures=[draw_plane(six, random[0]), draw_space(space)],
        movies=[movie],
    )


def excess(report) -> float:
    """By how much a vertex scores less with itself than with another one, at most."""
    vertices = report.detection.vertices
    if vertices is None:
        return 0.0
    score = np.asarray(report.trajectory.flow.velocity.attention.score)
    pairs = vertices @ score.T @ vertices.T
    return float((pairs.max(axis=1) - np.diag(pairs)).max())


def random_limit(rng, parameters: Parameters):
    """A random layer of the plane with V a multiple of the identity."""
    value = rng.uniform(0.5, 2) * np.eye(2)
    attention = mf.Softmax(lab.definite_form(rng, 2).T, np.eye(2), value)
    return find_limit(attention, mf.TokenCloud(rng.normal(size=(parameters.graph, 2))))


def high_dimension(rng, parameters: Parameters):
    """Tokens in a high dimension, whose scores are of order one."""
    dimension = parameters.dimension
    points = rng.normal(size=(parameters.heat, dimension)) / np.sqrt(dimension)
    # In high dimension tokens are nearly orthogonal, and most would lead: a common
    # part makes them compete.
    common = rng.normal(size=(COMMON, dimension)) / np.sqrt(dimension)
    points = 0.35 * points + rng.normal(size=(parameters.heat, COMMON)) @ common
    return find_limit(lab.plain_attention(np.eye(dimension)), mf.TokenCloud(points))


def six_findings(six):
    """The dense program, the hull and the rate."""
    angles = np.linspace(0, 2 * np.pi, 256, endpoint=False)
    directions = np.stack([np.cos(angles), np.sin(angles)])
    support = (np.asarray(six.trajectory.points) @ directions).max(axis=1)
    functionals, goals = six.prediction.functionals, six.detection.limits
    early, late = (limits.dense_tokens(six, t) @ functionals.T for t in (5.0, 10.0))
    shrinks = np.abs(early - goals).max() / np.abs(late - goals).max()
    return (
        limits.dense_finding(DENSE, six, 15.0, 1e-8),
        HULL.at_most(np.diff(support, axis=0), 0.0, tolerance=1e-9),
        RATE.close_to(np.log(shrinks) / 5, 1.0, tolerance=2e-3),
    )


def draw_plane(six, planar) -> lab.Picture:
    """Paths of the six tokens, and who follows whom under a random layer."""
    figure, (left, right) = style.canvas(2, panel=(4.6, 3.9))
    path = six.continued(np.linspace(0, 8, 161))
    plotting.draw_hull(path.cloud(0), left)
    plotting.draw_hull(path.cloud(-1), left)
    plotting.draw_paths(path, left)
    left.set(xlabel="$z_1$", ylabel="$z_2$", title="rescaled tokens")
    end, found = planar.trajectory, planar.detection
    layer = end.flow.velocity.attention_at(float(end.depths[-1]))
    matrix = mf.attention_matrix(layer, end.cloud(-1))
    plotting.draw_leader_graph(end.points[0], matrix, right, leaders=found.leaders)
    right.set_title("who follows whom, at the first positions")
    return lab.Picture(
        figure,
        "Left: rescaled paths of the six tokens, with the hull at the beginning and at "
        "the end, a triangle. Right: the leaders of random tokens under a random layer "
        "of the plane, drawn where the tokens started.",
    )


def draw_space(space) -> lab.Picture:
    """Tokens of space, and the polytope they tend to."""
    figure, axes = style.canvas(panel=(5.6, 4.6), subplot_kw={"projection": "3d"})
    path = space.continued(np.linspace(0, 8, 121))
    plotting.draw_paths_3d(path, axes)
    plotting.draw_hull(space.detection.vertices, axes)
    axes.set(xlabel="$z_1$", ylabel="$z_2$", zlabel="$z_3$")
    return lab.Picture(
        figure,
        f"{path.points.shape[1]} tokens of a cube under $V = I$: their rescaled paths, "
        f"and the polytope with {len(space.detection.leaders)} vertices they end on.",
    )
