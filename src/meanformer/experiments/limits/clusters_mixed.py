r"""A polytope in some coordinates, freedom in the others.

If $V$ is $\lambda I$ on an invariant subspace $F$, with a smaller spectral radius on a
complement $G$, and $\langle Qx, Kx\rangle > 0$, then the $F$-part of the rescaled
tokens $z = e^{-tV}x$ tends to a polytope as for $V = I$, and the $G$-part is free. For
$V = \mathrm{diag}(1, 1, -\tfrac12)$ leaders rest in all three coordinates, while
followers stand above their leader in the first two and drift off like $e^{t/2}$ in the
third: a polytope times a line.
"""

from dataclasses import dataclass

import numpy as np

import meanformer as mf
import meanformer.experiments as lab
from meanformer.experiments.helpers.limits import agreement_finding, dense_finding
from meanformer.observables import find_limit
from meanformer.plotting import SpaceFrames, draw_hull, draw_paths_3d, style

VALUE = np.diag([1.0, 1.0, -0.5])
VERTICES = (
    (0.7050803714, 0.2364623656, 0.3935763653),
    (-0.2711699970, 0.5589052422, -0.2475000816),
    (0.2953193951, -0.8403148713, 0.5542206269),
)
FOURTH = {6.0: -11.678, 8.0: -32.421}


@dataclass(frozen=True)
class Parameters:
    """Sizes of the random clouds."""

    tokens: int = lab.setting(
        20, full=40, help="tokens of the random cloud", at_least=4
    )
    layers: int = lab.setting(6, full=100, help="random layers of space", at_least=2)
    seed: int = lab.setting(2, help="seed of all that is random", at_least=0)
    movie: lab.Movies = lab.movie_setting()


LEADERS = lab.observation(
    "leaders",
    "The leaders rest at $(0.7050803714, 0.2364623656, 0.3935763653)$, "
    "$(-0.2711699970, 0.5589052422, -0.2475000816)$ and "
    "$(0.2953193951, -0.8403148713, 0.5542206269)$.",
)
DRIFT = lab.observation(
    "drift",
    "The third coordinate of token four is $-11.678$ at depth $6$ and $-32.421$ at "
    "depth $8$.",
)
EXPONENT = lab.theorem(
    "exponent",
    "Followers drift off in the free coordinate like $e^{t/2}$: exponents of their "
    "distances to the leader, between depths $6$ and $8$.",
    "GLPR23b, Theorem on polytopes times subspaces",
    source=lab.theory("the third eigenvalue; measured on a dense program"),
)
DENSE = lab.observation(
    "dense",
    "At depth $8$ all tokens are where a dense program finds them.",
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


def run(parameters: Parameters, *, progress) -> lab.Outcome:
    """Follow the tabulated tokens, a random cloud, and random layers."""
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
            agreement_finding(AGREES, random, share=0.95),
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
    """Leaders, drift, exponents and the dense program."""
    found, source = six.detection, lab.tabulated()
    fourth = [found.phase.at(depth)[3, 2] for depth in FOURTH]
    attention, cloud = lab.plain_attention(VALUE), lab.six_tokens(3)
    early, late = (lab.dense_rescaled_flow(attention, cloud, t) for t in (6.0, 8.0))
    followers = np.setdiff1d(np.arange(6), found.leaders)
    leaders = found.follows[followers]
    far = [z[followers, 2] - z[leaders, 2] for z in (early, late)]
    exponents = np.log(far[1] / far[0]) / 2
    return (
        LEADERS.close_to(found.vertices, VERTICES, tolerance=1e-8, source=source),
        DRIFT.close_to(fourth, list(FOURTH.values()), tolerance=1e-3, source=source),
        EXPONENT.close_to(exponents, 0.5, tolerance=1e-4),
        dense_finding(DENSE, six, 8.0, 1e-6),
    )


def settled_distance(report) -> float:
    """How far tokens of a dense program are from the leaders that were found."""
    attention = report.trajectory.flow.velocity.attention
    depth = 9 * report.prediction.time_scale
    cloud, functionals = report.trajectory.cloud(0), report.prediction.functionals
    tokens = lab.dense_rescaled_flow(attention, cloud, depth)
    distance = np.abs(tokens @ functionals.T - report.detection.limits).max()
    return float(distance / np.ptp(np.asarray(cloud.points) @ functionals.T))


def draw(shown, six) -> lab.Picture:
    """Paths in space over the polytope, and the free coordinate against depth."""
    figure, _ = style.canvas(2, panel=(4.6, 4.0))
    figure.clear()
    with style.applied():
        left = figure.add_subplot(1, 2, 1, projection="3d")
        right = figure.add_subplot(1, 2, 2)
    draw_paths_3d(shown.continued(np.linspace(0, 5, 121)), left)
    left.set(xlabel="$z_1$", ylabel="$z_2$", zlabel="$z_3$")
    left.set_box_aspect((1, 1, 1.1), zoom=0.9)
    depths = np.linspace(0, 8, 121)
    heights = np.asarray(six.continued(depths).points)[:, :, 2]
    leaders = set(six.detection.leaders.tolist())
    for token, line in enumerate(heights.T):
        is_leader = token in leaders
        colour = style.ORANGE if is_leader else style.BLUE
        name = {0: "leaders", 3: "followers"}.get(token)
        right.plot(depths, line, color=colour, linewidth=1.6, label=name)
    right.set(xlabel="depth $t$", ylabel="free coordinate $z_3$")
    right.set_yscale("symlog", linthresh=1)
    right.legend(loc="lower left")
    return lab.Picture(
        figure,
        r"Left: random tokens under $V = \mathrm{diag}(1, 1, -\tfrac12)$, rescaled: in "
        "the horizontal plane they gather on the vertices of a polygon, vertically "
        "they drift off, on lines over the vertices. Right: the third coordinate of "
        "the six tabulated tokens; leaders rest, followers leave like $e^{t/2}$.",
    )


def shade_polygon(axes, frame) -> None:
    """The hull of the tokens, seen from above, on the floor of the room."""
    axes.set_box_aspect((1, 1, 1.1), zoom=0.9)
    points = np.array(frame.cloud.points)
    points[:, 2] = axes.get_zlim()[0]
    draw_hull(points, axes)


experiment = lab.experiment(
    run,
    "A polytope in some coordinates, freedom in the others",
    room="observables",
    seconds=10,
)
