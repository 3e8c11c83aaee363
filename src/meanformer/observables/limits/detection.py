"""Whether tokens have reached the limit that the theorems predict."""

from typing import Literal, cast

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from meanformer.attention import AbstractAttention, attention_matrix
from meanformer.errors import InvalidInput, check
from meanformer.flows import Flow, Rescaled, Trajectory
from meanformer.flows.rescaled import BOOLEAN
from meanformer.measures import TokenCloud
from meanformer.numerics.growth import ScaledExponential
from meanformer.numerics.linkage import components
from meanformer.observables.limits.boolean_phase import BooleanPhase, boolean_phase
from meanformer.observables.limits.leaders import SHARP, Following, find_leaders
from meanformer.observables.limits.prediction import (
    Geometry,
    LimitPrediction,
    attention_of,
    predict_limit,
)

# What `detect_limit` allows unless told otherwise.
TOLERANCE, ACCURACY = 1e-3, 1e-8
COINCIDENT = 1e-12
# The slope of a power law is read off the last part of the depths on a log scale.
LAST_PART = 10.0


class LimitDetection(eqx.Module):
    r"""What a trajectory tells of its limit.

    Attributes:
        geometry: the shape that was found; `"unknown"` unless the verdict is reached,
            and where tokens came to rest in another shape than the predicted one.
        verdict: `"reached"`, `"not reached"` at the last depth, or `"undecided"`.
        reason: what the verdict rests on, in one sentence.
        depth: the last depth, where it was looked at.
        prediction: what the matrices of the layer let expect.
        following: who attends to whom there, by index of the tokens of positive weight.
        leaders: indices of the leaders in the trajectory.
        follows: for each token the index of its final leader; -1 where there is none.
        vertices: positions of the leaders, one per row; the limits of all tokens are
            among them, up to the coordinates that are free.
        offsets: the values $\varphi_1^*(z) = c$ of the hyperplanes, increasing.
        limits: for each token its limit in the coordinates that settle, those of
            `prediction.functionals`; zero for tokens of weight zero.
        residual: largest distance of a token to its limit, relative to the diameter of
            the tokens in these coordinates.
        free_dimension: how many coordinates stay free.
        exponent: for the origin, the fitted exponent of depth in the variance.
        phase: the rest of the flow in closed form, where it was taken over; of distinct
            tokens only.
        places: for each token its row in the phase; -1 for those of weight zero.
    """

    geometry: Geometry
    verdict: Literal["reached", "not reached", "undecided"]
    reason: str
    depth: float
    prediction: LimitPrediction
    following: Following | None = None
    leaders: Int[np.ndarray, " k"] = eqx.field(default_factory=lambda: np.arange(0))
    follows: Int[np.ndarray, " n"] | None = None
    vertices: Float[np.ndarray, "k d"] | None = None
    offsets: Float[np.ndarray, " h"] | None = None
    limits: Float[np.ndarray, "n m"] | None = None
    residual: float | None = None
    free_dimension: int = 0
    exponent: float | None = None
    phase: BooleanPhase | None = None
    places: Int[np.ndarray, " n"] | None = None

    @property
    def agrees(self) -> bool | None:
        """Whether the limit is the predicted one; `None` where one of them is open."""
        if self.verdict != "reached" or self.prediction.geometry == "unknown":
            return None
        return self.geometry == self.prediction.geometry

    def __str__(self) -> str:
        shape = f"{self.geometry} " if self.verdict == "reached" else ""
        return f"{shape}{self.verdict} at depth {self.depth:.6g}: {self.reason}."


class Reading(eqx.Module):
    """How a limit is read off: by which layer, in which coordinates, how exactly."""

    attention: AbstractAttention
    prediction: LimitPrediction
    is_rescaled: bool
    tolerance: float
    sharpness: float
    accuracy: float

    def read(self, trajectory: Trajectory) -> LimitDetection:
        """Look at the last depth of a trajectory."""
        prediction = self.prediction
        depth = float(trajectory.depths[-1])
        if prediction.geometry == "origin":
            return _detect_origin(trajectory, self, prediction)
        if prediction.geometry == "unknown":
            return _open(prediction, depth, prediction.reason)
        scene = _Scene(trajectory, self)
        mixed = np.flatnonzero(~scene.following.is_boolean)
        if mixed.size > 0:
            return _not_sharp(scene, prediction, mixed, self.tolerance)
        return _detect_leaders(scene, prediction, self)


def reading_of(
    trajectory: Trajectory,
    flow: Flow | None = None,
    tolerance: float = TOLERANCE,
    sharpness: float = SHARP,
    accuracy: float = ACCURACY,
) -> Reading:
    """Return how a trajectory is read, or raise if it cannot be."""
    check(
        isinstance(trajectory, Trajectory),
        f"trajectory is {type(trajectory).__name__}; it must be the Trajectory of a "
        "solve of tokens.",
    )
    for name, value in (("tolerance", tolerance), ("accuracy", accuracy)):
        check(0 < value < 1, f"{name} is {value}; it must be between 0 and 1.")
    check(
        bool(trajectory.depths[-1] >= trajectory.depths[0]),
        "the trajectory runs backward; limits are those of increasing depth.",
    )
    made_by = _flow_of(trajectory, flow)
    attention = attention_of(made_by)
    dimension = trajectory.points.shape[2]
    check(
        attention.input_dimension == dimension,
        f"the flow is of dimension {attention.input_dimension}, the trajectory of "
        f"dimension {dimension}.",
    )
    rounding = 1e3 * float(jnp.finfo(trajectory.points.dtype).eps)
    return Reading(
        attention,
        predict_limit(attention),
        isinstance(made_by.velocity, Rescaled),
        tolerance,
        sharpness,
        max(accuracy, rounding),
    )


def _flow_of(trajectory: Trajectory, given: Flow | None) -> Flow:
    """Return the flow that a trajectory knows, or the given one."""
    known = trajectory.flow
    if known is None and given is None:
        raise InvalidInput(
            "the trajectory does not know the flow that made it; pass it: "
            "detect_limit(trajectory, flow)."
        )
    check(
        given is None or isinstance(given, Flow),
        f"flow is {type(given).__name__}; it must be the Flow that was solved, such as "
        "Flow(Rescaled(attention)): an attention does not tell the coordinates.",
    )
    check(
        known is None or given is None or bool(eqx.tree_equal(known, given)),
        "the trajectory was made by another flow than the given one; leave it out.",
    )
    return cast(Flow, given if known is None else known)


class _Scene(eqx.Module):
    """Distinct tokens of positive weight at the last depth, and who follows whom."""

    attention: AbstractAttention
    depth: float
    points: np.ndarray
    members: np.ndarray
    labels: np.ndarray
    following: Following
    velocities: np.ndarray

    def __init__(self, trajectory, reading: Reading):
        self.attention, self.depth = reading.attention, float(trajectory.depths[-1])
        cloud = rescaled_cloud(trajectory, reading, -1)
        points = np.asarray(cloud.points, np.float64)
        present = np.asarray(cloud.weights) > 0
        self.labels = _coincident(points, present)
        self.members = np.array(
            [np.flatnonzero(self.labels == c)[0] for c in range(self.labels.max() + 1)],
            int,
        )
        self.points = points[self.members]
        schedule = Rescaled(self.attention)
        layer = schedule.attention_at(self.depth)
        matrix = np.asarray(attention_matrix(layer, cloud), np.float64)
        columns = np.zeros((len(points), len(self.members)))
        columns[present, self.labels[present]] = 1
        self.following = find_leaders(
            (matrix @ columns)[self.members], tolerance=reading.sharpness
        )
        velocity = schedule.velocity(
            jnp.asarray(self.depth, cloud.points.dtype), cloud, cloud.points, None
        )
        self.velocities = np.asarray(velocity, np.float64)[self.members]


def rescaled_cloud(trajectory: Trajectory, reading: Reading, index: int) -> TokenCloud:
    """Return the tokens at a saved depth in rescaled coordinates."""
    cloud, depth = trajectory.cloud(index), trajectory.depths[index]
    if reading.is_rescaled:
        return cloud
    shrinking = ScaledExponential(-reading.attention.value)
    scale = jnp.exp(shrinking.log_scale(depth))
    return cloud.moved(scale * cloud.points @ shrinking.at(depth).T)


def _coincident(points: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Label tokens by place; those of weight zero have the label -1."""
    from scipy.spatial import KDTree

    kept = points[present]
    radius = COINCIDENT * np.ptp(kept, axis=0).max(initial=0)
    pairs = KDTree(kept).query_pairs(radius, output_type="ndarray")
    labels = np.full(len(points), -1)
    labels[present] = components(len(kept), pairs)
    return labels


def _open(prediction, depth, reason, verdict="undecided", **facts) -> LimitDetection:
    return LimitDetection("unknown", verdict, reason, depth, prediction, **facts)


def _not_sharp(scene: _Scene, prediction, mixed, tolerance: float) -> LimitDetection:
    following = scene.following
    if prediction.geometry == "hyperplanes":
        found = _detect_spread(scene, prediction, tolerance)
        if found is not None:
            return found
    worst = int(scene.members[following.spread.argmax()])
    share = following.spread.max()
    if mixed.size == 1 and len(scene.members) > 2:
        reason = (
            f"token {worst} gives {share:.2g} to others than its favourite while all "
            "other rows are Boolean: an exceptional row, or one not settled yet"
        )
        return _open(prediction, scene.depth, reason, following=following)
    reason = (
        f"{mixed.size} rows of the attention matrix are not Boolean yet, that of token "
        f"{worst} by {share:.2g}"
    )
    return _open(prediction, scene.depth, reason, "not reached", following=following)


def _detect_spread(scene: _Scene, prediction, tolerance) -> LimitDetection | None:
    """Hyperplanes by the spread of tokens around them, whoever attends to whom."""
    functional = prediction.functionals[0]
    heights, speeds = scene.points @ functional, scene.velocities @ functional
    extent = np.abs(heights).max(initial=0)
    if extent == 0 or np.abs(speeds).max() * prediction.time_scale > tolerance * extent:
        return None
    sides = np.where(np.abs(heights) <= tolerance * extent, 0, np.sign(heights))
    offsets = np.array([heights[sides == side].mean() for side in np.unique(sides)])
    limits = offsets[np.searchsorted(np.unique(sides), sides)]
    residual = float(np.abs(heights - limits).max() / extent)
    if residual > tolerance:
        return None
    reason = (
        f"tokens are within {residual:.2g} of {len(offsets)} parallel hyperplanes and "
        "rest there"
    )
    return LimitDetection(
        prediction.geometry,
        "reached",
        reason,
        scene.depth,
        prediction,
        following=scene.following,
        offsets=offsets,
        limits=_for_all(limits[:, None], scene.labels),
        residual=residual,
        free_dimension=scene.points.shape[1] - 1,
    )


def _for_all(rows: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Rows of distinct tokens as rows of all tokens; zero for absent ones."""
    return np.where(labels[:, None] >= 0, rows[labels], 0.0)


def _detect_leaders(scene: _Scene, prediction, reading: Reading) -> LimitDetection:
    following, depth = scene.following, scene.depth
    try:
        phase = boolean_phase(
            scene.attention, depth, scene.points, jnp.asarray(following.follows)
        )
    except InvalidInput as circle:
        return _open(prediction, depth, str(circle).rstrip("."), following=following)
    margins = phase.lasts(scene.attention, accuracy=reading.accuracy)
    weakest = int(margins.argmin())
    if margins[weakest] <= reading.accuracy:
        reason = (
            f"token {scene.members[weakest]} will change whom it follows, or is too "
            "close to it to tell"
        )
        return _open(prediction, depth, reason, following=following, phase=phase)
    facts = _facts(scene, prediction, phase)
    is_taken_over = bool(following.spread.max() <= BOOLEAN)
    if facts["residual"] > reading.tolerance and not is_taken_over:
        reason = (
            f"a token is still {facts['residual']:.2g} of the diameter from its leader"
        )
        return _open(prediction, depth, reason, "not reached", **facts)
    contradiction = contradiction_of(prediction, facts["offsets"], phase)
    geometry = "unknown" if contradiction else prediction.geometry
    reason = contradiction or _reason(facts, is_taken_over)
    return LimitDetection(geometry, "reached", reason, depth, prediction, **facts)


def contradiction_of(
    prediction: LimitPrediction,
    offsets: Float[np.ndarray, " h"] | None,
    phase: BooleanPhase,
) -> str:
    """What is wrong with the tokens' limit for the predicted geometry, if anything."""
    if offsets is None:
        return ""
    if (offsets > 0).sum() > 1 or (offsets < 0).sum() > 1:
        return (
            f"tokens come to rest on {len(offsets)} hyperplanes, more than one on a "
            "side of zero"
        )
    if prediction.geometry == "boolean-1d":
        ends = {int(phase.points.argmin()), int(phase.points.argmax())}
        leaders = {int(leader) for leader in np.unique(phase.leaders)}
        if not leaders <= ends:
            return "a token that is neither leftmost nor rightmost leads"
    return ""


def _facts(scene: _Scene, prediction, phase: BooleanPhase) -> dict:
    leaders = np.unique(phase.leaders)
    settled = scene.points @ prediction.functionals.T
    limits = settled[phase.leaders]
    extent = max(float(np.ptp(settled, axis=0).max()), np.finfo(float).tiny)
    follows = np.where(
        scene.labels >= 0, scene.members[phase.leaders][scene.labels], -1
    )
    offsets = None
    if len(prediction.functionals) == 1:
        ordered = np.sort(settled[leaders, 0])
        # Those that agree up to rounding once.
        offsets = ordered[np.append(True, np.diff(ordered) > 1e-9 * extent)]
    return {
        "following": scene.following,
        "leaders": scene.members[leaders],
        "follows": follows,
        "vertices": scene.points[leaders],
        "offsets": offsets,
        "limits": _for_all(limits, scene.labels),
        "residual": float(np.abs(settled - limits).max() / extent),
        "free_dimension": scene.points.shape[1] - len(prediction.functionals),
        "phase": phase,
        "places": scene.labels,
    }


def _reason(facts: dict, is_taken_over: bool) -> str:
    count = len(facts["leaders"])
    leaders = "one leader" if count == 1 else f"{count} leaders"
    rank = facts["following"].rank
    if is_taken_over:
        rest = "every token attends to a single one, for good"
    else:
        rest = f"all are within {facts['residual']:.2g} of the diameter of their limits"
    return f"{leaders}, attention of rank {rank}, and {rest}"


def _detect_origin(trajectory, reading: Reading, prediction) -> LimitDetection:
    depths, means, traces = _moments(trajectory, reading)
    depth = float(depths[-1])
    if traces.max() <= (COINCIDENT * means.max()) ** 2:
        where = f"at the distance {means[-1]:.2g} from zero"
        reason = f"all tokens are in one place, {where}"
        if means[-1] <= reading.tolerance * means[0]:
            return LimitDetection("origin", "reached", reason, depth, prediction)
        return _open(prediction, depth, reason, "not reached")
    late = (depths > 0) & (depths >= depth / LAST_PART)
    if late.sum() < 3 or depths[late][0] > 0.5 * depth:
        reason = "the last decade of depth holds fewer than three saved depths"
        return _open(prediction, depth, reason)
    exponent = float(np.polyfit(np.log(depths[late]), np.log(traces[late]), 1)[0])
    is_centred = means[-1] ** 2 <= 1e-2 * traces[-1]
    reason = (
        f"the variance falls like depth to the power {exponent:.4g}, where -1 is "
        f"expected; the mean is {means[-1]:.2g}"
    )
    if abs(exponent + 1) <= 0.05 and is_centred:
        return LimitDetection(
            "origin", "reached", reason, depth, prediction, exponent=exponent
        )
    return _open(prediction, depth, reason, "not reached", exponent=exponent)


def _moments(trajectory, reading: Reading):
    """Depths, norms of the mean, and traces of the covariance, of original tokens."""
    means, traces = [], []
    rescaled = Rescaled(reading.attention)
    for index in range(len(trajectory)):
        cloud = trajectory.cloud(index)
        if reading.is_rescaled:
            log_scale, points = rescaled.original(
                trajectory.depths[index], cloud.points
            )
            cloud = cloud.moved(jnp.exp(log_scale) * points)
        means.append(float(jnp.linalg.norm(cloud.mean())))
        traces.append(float(jnp.trace(cloud.covariance())))
    # A single token, or equal ones, have no variance.
    smallest = np.finfo(float).tiny
    return np.asarray(trajectory.depths), np.array(means), np.maximum(traces, smallest)
