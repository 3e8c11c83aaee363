"""Whether tokens have reached the limit that the theorems predict."""

from typing import Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from meanformer.attention import (
    AbstractAttention,
    AbstractInContextMap,
    attention_matrix,
)
from meanformer.errors import InvalidInput, Unsupported, check
from meanformer.flows import Flow, Rescaled, Trajectory
from meanformer.flows.schedule import AbstractSchedule
from meanformer.geometry import Euclidean
from meanformer.measures import TokenCloud
from meanformer.numerics.growth import ScaledExponential
from meanformer.numerics.linkage import components
from meanformer.observables.boolean_phase import BooleanPhase, boolean_phase
from meanformer.observables.leaders import SHARP, Following, find_leaders
from meanformer.observables.prediction import (
    Geometry,
    LimitPrediction,
    attention_of,
    predict_limit,
)

# A share this small changes nothing that numbers hold: the closed form takes over.
HAND_OVER = 1e-12
COINCIDENT = 1e-12
# The slope of a power law is read off the last part of the depths on a log scale.
LAST_PART = 10.0


class LimitDetection(eqx.Module):
    r"""What a trajectory tells of its limit.

    Attributes:
        geometry: the shape that was found; `"unknown"` unless the verdict is reached.
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
        residual: largest distance of a token to its limit, in the coordinates that
            settle, relative to the diameter of the tokens in these.
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


def detect_limit(
    trajectory: Trajectory,
    gamma: AbstractInContextMap | Flow | AbstractSchedule | None = None,
    *,
    tolerance: float = 1e-3,
    sharpness: float = SHARP,
    accuracy: float = 1e-8,
) -> LimitDetection:
    r"""Look whether the tokens of a trajectory have reached their limit, and which.

    The last depth is looked at, in rescaled coordinates $z = e^{-tV}x$. A limit is
    reached if

    - every row of the attention matrix gives all but `sharpness` to one token, the
      choices lead to leaders (tokens that attend to themselves alone), and they stand
      at all later depths: in the closed form that the flow has from here on;
    - the tokens are within `tolerance` of their leaders in the coordinates that settle,
      or the rows are so sharp ($10^{-12}$) that the closed form has taken over.

    Which coordinates settle is read off the spectrum of $V$, and names the geometry. A
    leader is a vertex of the hull of all tokens by itself: it alone has the largest
    $\langle Qz, Ky\rangle$ over all $y$. A row that stays mixed while all others are
    sharp is exceptional, and the answer is undecided. For $V = -cI$ the limit is the
    origin, where the variance decays like $1/t$: its exponent is fitted over the last
    decade of depth and must be within 0.05 of $-1$.

    Args:
        trajectory: of `Flow(attention)` or, better, of `Flow(Rescaled(attention))`,
            which does not overflow.
        gamma: the flow or the attention, where the trajectory does not know it
            (`trajectory.flow`).
        tolerance: largest distance of a token from its limit, relative to the diameter.
        sharpness: what a row of the attention matrix may give to others.
        accuracy: relative error of the tokens, below which choices are not trusted.

    Returns:
        The verdict with all that it rests on. Cost: the attention matrix, and
        $O(n^2 d)$ for each of 62 later depths; on the host, not under `jit`.
    """
    attention, is_rescaled = _layer(trajectory, gamma)
    prediction = predict_limit(attention)
    depth = float(trajectory.depths[-1])
    if prediction.geometry == "origin":
        return _detect_origin(trajectory, attention, is_rescaled, prediction)
    if prediction.geometry == "unknown":
        return _open(prediction, depth, prediction.reason)
    scene = _Scene(trajectory, attention, is_rescaled, sharpness)
    mixed = np.flatnonzero(~scene.following.is_boolean)
    if mixed.size > 0:
        return _not_sharp(scene, prediction, mixed)
    return _detect_leaders(scene, prediction, tolerance, accuracy)


class _Scene(eqx.Module):
    """Distinct tokens of positive weight at the last depth, and who follows whom."""

    attention: AbstractAttention
    depth: float
    points: np.ndarray
    members: np.ndarray
    labels: np.ndarray
    following: Following

    def __init__(self, trajectory, attention, is_rescaled, sharpness):
        self.attention, self.depth = attention, float(trajectory.depths[-1])
        cloud = _rescaled_cloud(trajectory, attention, is_rescaled)
        points = np.asarray(cloud.points, np.float64)
        present = np.asarray(cloud.weights) > 0
        self.labels = _coincident(points, present)
        self.members = np.array(
            [np.flatnonzero(self.labels == c)[0] for c in range(self.labels.max() + 1)],
            int,
        )
        self.points = points[self.members]
        layer = Rescaled(attention).attention_at(self.depth)
        matrix = np.asarray(attention_matrix(layer, cloud), np.float64)
        columns = np.zeros((len(points), len(self.members)))
        columns[present, self.labels[present]] = 1
        self.following = find_leaders(
            (matrix @ columns)[self.members], tolerance=sharpness
        )


def _layer(trajectory, gamma) -> tuple[AbstractAttention, bool]:
    check(
        isinstance(trajectory, Trajectory),
        f"trajectory is {type(trajectory).__name__}; it must be the Trajectory of a "
        "solve of tokens.",
    )
    made_by = trajectory.flow if gamma is None else gamma
    if made_by is None:
        raise InvalidInput(
            "the trajectory does not know the flow that made it; pass it: "
            "detect_limit(trajectory, flow)."
        )
    if isinstance(made_by, Flow):
        if not isinstance(made_by.space, Euclidean):
            raise Unsupported(
                f"the flow is on {type(made_by.space).__name__}(); these limits are of "
                "tokens in R^d; on the sphere count_clusters tells."
            )
        check(made_by.noise is None, "limits are known for flows without noise.")
        made_by = made_by.velocity
    return attention_of(made_by), isinstance(made_by, Rescaled)


def _rescaled_cloud(trajectory, attention, is_rescaled: bool) -> TokenCloud:
    cloud = trajectory.cloud(-1)
    if is_rescaled:
        return cloud
    shrinking = ScaledExponential(-attention.value)
    scale = jnp.exp(shrinking.log_scale(trajectory.depths[-1]))
    points = scale * cloud.points @ shrinking.at(trajectory.depths[-1]).T
    return cloud.moved(points)


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


def _not_sharp(scene: _Scene, prediction, mixed: np.ndarray) -> LimitDetection:
    following = scene.following
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


def _detect_leaders(scene: _Scene, prediction, tolerance, accuracy) -> LimitDetection:
    following, depth = scene.following, scene.depth
    try:
        phase = boolean_phase(
            scene.attention, depth, scene.points, jnp.asarray(following.follows)
        )
    except InvalidInput as circle:
        return _open(prediction, depth, str(circle).rstrip("."), following=following)
    margins = phase.lasts(scene.attention, accuracy=accuracy)
    weakest = int(margins.argmin())
    if margins[weakest] <= accuracy:
        reason = (
            f"token {scene.members[weakest]} will change whom it follows, or is too "
            "close to it to tell"
        )
        return _open(prediction, depth, reason, following=following, phase=phase)
    settled = scene.points @ prediction.functionals.T
    limits = settled[phase.leaders]
    extent = max(float(np.ptp(settled, axis=0).max()), np.finfo(float).tiny)
    residual = float(np.abs(settled - limits).max() / extent)
    facts = _facts(scene, prediction, phase, residual)
    is_taken_over = bool(following.spread.max() <= HAND_OVER)
    if residual > tolerance and not is_taken_over:
        reason = f"a token is still {residual:.2g} of the diameter from its leader"
        return _open(prediction, depth, reason, "not reached", **facts)
    reason = _reason(prediction, facts, residual, is_taken_over)
    return LimitDetection(
        prediction.geometry, "reached", reason, depth, prediction, **facts
    )


def _facts(scene: _Scene, prediction, phase: BooleanPhase, residual: float) -> dict:
    leaders = np.unique(phase.leaders)
    follows = np.where(
        scene.labels >= 0, scene.members[phase.leaders][scene.labels], -1
    )
    offsets = None
    if len(prediction.functionals) == 1:
        offsets = np.unique(scene.points[leaders] @ prediction.functionals[0])
    return {
        "following": scene.following,
        "leaders": scene.members[leaders],
        "follows": follows,
        "vertices": scene.points[leaders],
        "offsets": offsets,
        "residual": residual,
        "free_dimension": scene.points.shape[1] - len(prediction.functionals),
        "phase": phase,
        "places": scene.labels,
    }


def _reason(prediction, facts: dict, residual: float, is_taken_over: bool) -> str:
    count = len(facts["leaders"])
    leaders = "one leader" if count == 1 else f"{count} leaders"
    kept = "the closed form has taken over" if is_taken_over else "all are close"
    return (
        f"{leaders}, attention of rank {facts['following'].rank}, tokens within "
        f"{residual:.2g} of the diameter of their limits, and {kept}"
    )


def _detect_origin(trajectory, attention, is_rescaled, prediction) -> LimitDetection:
    depths, means, traces = _moments(trajectory, attention, is_rescaled)
    depth = float(depths[-1])
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


def _moments(trajectory, attention, is_rescaled):
    """Depths, norms of the mean, and traces of the covariance, of original tokens."""
    means, traces = [], []
    rescaled = Rescaled(attention)
    for index in range(len(trajectory)):
        cloud = trajectory.cloud(index)
        if is_rescaled:
            log_scale, points = rescaled.original(
                trajectory.depths[index], cloud.points
            )
            cloud = cloud.moved(jnp.exp(log_scale) * points)
        means.append(float(jnp.linalg.norm(cloud.mean())))
        traces.append(float(jnp.trace(cloud.covariance())))
    # A single token, or equal ones, have no variance.
    smallest = np.finfo(float).tiny
    return np.asarray(trajectory.depths), np.array(means), np.maximum(traces, smallest)
