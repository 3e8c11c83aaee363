r"""A polytope in some coordinates, freedom in the others.

If $V$ is $\lambda I$ on an invariant subspace $F$, with a smaller spectral radius on a
complement $G$, and $\langle Qx, Kx\rangle > 0$, then the $F$-part of the rescaled
tokens $z = e^{-tV}x$ tends to a polytope as for $V = I$, and the $G$-part is free. For
$V = \mathrm{diag}(1, 1, -\tfrac12)$ leaders rest in all three coordinates, while
followers stand above their leader in the first two and drift off like $e^{t/2}$ in the
third: a polytope times a line.
"""

import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers import limits
from meanformer.observables import find_limit
from meanformer.plotting import SpaceFrames, draw_hull, draw_paths_3d, style

VALUE = np.diag([1.0, 1.0, -0.5])


class Parameters(lab.Parameters):
    """Sizes of the random clouds."""

    tokens: int = lab.setting(20, full=40, help="tokens of the cloud", at_least=4)
    layers: int = lab.setting(6, full=100, help="random layers of space", at_least=2)
    seed: int = lab.setting(2, help="seed of all that is random", at_least=0)
    movie: lab.Movies = lab.movie_setting()


EXPONENT = lab.theorem(
    "exponent",
    "Followers drift off in the free coordinate like $e^{t/2}$: exponents of their "
    "distances to the leader, between depths $6$ and $8$.",
    "GLPR23b, Theorem on polytopes times subspaces",
    source=lab.theory("the third eigenvalue; measured on a dense program"),
)
DENSE = lab.observation(
    "dense", "At depth $8$ leaders and followers are where a dense program finds them."
)
AGREES = lab.theorem(
    "agrees",
    "Random layers with a double leading eigenvalue and a third one of either sign "
    "reach the predicted limit: share.",
    "GLPR23b, Theorem on polytopes times subspaces",
)
SETTLED = lab.theorem(
    "settled",
    "In the two leading coordinates their tokens come to rest on the leaders found: "
    r"largest distance at depth $9/\lambda$, relative to the diameter at first.",
    "GLPR23b, Theorem on polytopes times subspaces",
    source=lab.theory(r"about $e^{-\lambda t}$; measured on a dense program"),
)


@lab.experiment("A polytope times a free subspace", room="observables", seconds=10)
def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Follow six tokens, a random cloud, and random layers."""
    rng = np.random.default_rng(parameters.seed)
    six = find_limit(lab.plain_attention(VALUE), lab.six_tokens(3))
    for _ in progress.over(range(1), 0.4):
        cloud = mf.TokenCloud(rng.uniform(-1.2, 1.2, size=(parameters.tokens, 3)))
        shown = find_limit(lab.plain_attention(VALUE), cloud)
    random = [random_limit(rng) for _ in progress.over(range(parameters.layers), 0.6)]
    movie = lab.Movie(
        shown.continued(np.linspace(0, 5, 121)),
        "Rescaled tokens on their way to the lines over the vertices of a polygon.",
        draw=SpaceFrames(follows=True, decorate=shade_polygon),
    )
    return lab.Outcome(
        findings=[
            *six_findings(six),
            limits.agreement_finding(AGREES, random, share=0.95),
            SETTLED.at_most([settled_distance(report) for report in random], 1e-2),
        ],
        pictures=[draw(shown, six)],
        movies=[movie],
    )


def random_limit(rng):
    """A random layer with a double leading eigenvalue."""
    leading = rng.uniform(0.5, 2)
    values = leading * np.array([1, 1, rng.uniform(-0.7, 0.7)])
    vectors = np.linalg.qr(rng.normal(size=(3, 3)))[0] + 0.2 * rng.normal(size=(3, 3))
    value = (vectors * values) @ np.linalg.inv(vectors)
    attention = mf.Softmax(lab.definite_form(rng, 3).T, np.eye(3), value)
    return find_limit(attention, mf.TokenCloud(rng.normal(size=(6, 3))))


def six_findings(six):
    """Exponents of the drift, and the dense program."""
    found = six.detection
    followers = np.setdiff1d(np.arange(6), found.leaders)
    heights = [limits.dense_tokens(six, depth)[:, 2] for depth in (6.0, 8.0)]
    far = [z[followers] - z[found.follows[followers]] for z in heights]
    exponents = np.log(far[1] / far[0]) / 2
    return (
        EXPONENT.close_to(exponents, 0.5, tolerance=1e-4),
        limits.dense_finding(DENSE, six, 8.0, 1e-6),
    )


def settled_distance(report) -> float:
    """How far tokens of a dense program are from the leaders that were found."""
    functionals = report.prediction.functionals
    tokens = (
        limits.dense_tokens(report, 9 * report.prediction.time_scale) @ functionals.T
    )
    distance = np.abs(tokens - report.detection.limits).max()
    return float(distance / np.ptp(report.trajectory.points[0] @ functionals.T))


def draw(shown, six) -> lab.Picture:
    """Paths in space over the polytope, and the free coordinate against depth."""
    figure, (left, right) = style.canvas(2, panel=(4.6, 4.0))
    left.remove()
    with style.applied():
        left = figure.add_subplot(1, 2, 1, projection="3d")
    draw_paths_3d(shown.continued(np.linspace(0, 5, 121)), left)
    left.set(xlabel="$z_1$", ylabel="$z_2$", zlabel="$z_3$")
    left.set_box_aspect((1, 1, 1.1), zoom=0.9)
    depths = np.linspace(0, 8, 121)
    heights = np.asarray(six.continued(depths).points)[:, :, 2]
    is_leader = np.isin(np.arange(6), six.detection.leaders)
    leaders = right.plot(depths, heights[:, is_leader], color=style.ORANGE)
    others = right.plot(depths, heights[:, ~is_leader], color=style.BLUE)
    right.set(xlabel="depth $t$", ylabel="free coordinate $z_3$")
    right.set_yscale("symlog", linthresh=1)
    right.legend([leaders[0], others[0]], ["leaders", "followers"], loc="lower left")
    return lab.Picture(
        figure,
        r"Left: random tokens under $V = \mathrm{diag}(1, 1, -\tfrac12)$, rescaled: in "
        "the horizontal plane they gather on the vertices of a polygon, vertically "
        "they drift off, on lines over the vertices. Right: the third coordinate of "
        "six given tokens; leaders rest, followers leave like $e^{t/2}$.",
    )


def shade_polygon(axes, frame) -> None:
    """The hull of the tokens, seen from above, on the floor of the room."""
    axes.set_box_aspect((1, 1, 1.1), zoom=0.9)
    points = np.array(frame.cloud.points)
    points[:, 2] = axes.get_zlim()[0]
    draw_hull(points, axes)
