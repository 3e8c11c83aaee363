"""Whether tokens have reached the limit that the theorems predict."""

import dataclasses
from typing import Literal, cast

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from meanformer.attention import AbstractAttention, attention_matrix
from meanformer.errors import InvalidInput, as_number, check
from meanformer.flows import Flow, Rescaled, Trajectory
from meanformer.flows.rescaled import BOOLEAN
from meanformer.measures import TokenCloud
from meanformer.numerics.growth import ScaledExponential
from meanformer.numerics.linkage import components
from meanformer.observables.limits import leaders
from meanformer.observables.limits import prediction as predicting
from meanformer.observables.limits.leaders import SHARP, BooleanPhase, Following
from meanformer.observables.limits.prediction import Geometry, LimitPrediction
from meanformer.observables.order import check_trajectory

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


class LimitDetector(eqx.Module):
    """A layer, its prediction, and the options of `detect_limit`."""

    attention: AbstractAttention
    prediction: LimitPrediction
    is_rescaled: bool
    tolerance: float
    sharpness: float
    accuracy: float

    def detect(self, trajectory: Trajectory) -> LimitDetection:
        """Look at the last depth of a trajectory."""
        if self.prediction.geometry == "origin":
            return self._at_origin(trajectory)
        if self.prediction.geometry == "unknown":
            depth = float(trajectory.depths[-1])
            return self._found("undecided", depth, self.prediction.reason)
        tokens = _DistinctTokens(trajectory, self)
        mixed = np.flatnonzero(~tokens.following.is_boolean)
        if mixed.size > 0:
            return self._mixed(tokens, mixed)
        return self._with_leaders(tokens)

    def rescaled_cloud(self, trajectory: Trajectory, index: int) -> TokenCloud:
        """Return the tokens at a saved depth in rescaled coordinates."""
        cloud, depth = trajectory.cloud(index), trajectory.depths[index]
        if self.is_rescaled:
            return cloud
        shrinking = ScaledExponential(-self.attention.value)
        scale = jnp.exp(shrinking.log_scale(depth))
        return cloud.moved(scale * cloud.points @ shrinking.at(depth).T)

    def _found(self, verdict, depth: float, reason: str, **facts) -> LimitDetection:
        known = self.prediction.geometry if verdict == "reached" else "unknown"
        return LimitDetection(known, verdict, reason, depth, self.prediction, **facts)

    def _mixed(self, tokens: "_DistinctTokens", mixed: np.ndarray) -> LimitDetection:
        """Say what is known where rows of the attention matrix are not Boolean."""
        following = tokens.following
        if self.prediction.geometry == "hyperplanes":
            found = self._by_spread(tokens)
            if found is not None:
                return found
        worst = int(tokens.members[following.spread.argmax()])
        share = following.spread.max()
        verdict = "not reached"
        reason = (
            f"{mixed.size} rows of the attention matrix are not Boolean yet, that of "
            f"token {worst} by {share:.2g}"
        )
        if mixed.size == 1 and len(tokens.members) > 2:
            verdict = "undecided"
            reason = (
                f"token {worst} gives {share:.2g} to others than its favourite while "
                "all other rows are Boolean: an exceptional row, or one not settled yet"
            )
        return self._found(verdict, tokens.depth, reason, following=following)

    def _by_spread(self, tokens: "_DistinctTokens") -> LimitDetection | None:
        """Detect hyperplanes by how tokens spread around them, whoever is attended."""
        functional = self.prediction.functionals[0]
        heights, speeds = tokens.points @ functional, tokens.velocities @ functional
        extent, most = np.abs(heights).max(initial=0), self.tolerance
        time_scale = cast(float, self.prediction.time_scale)
        if extent == 0 or np.abs(speeds).max() * time_scale > most * extent:
            return None
        sides = np.where(np.abs(heights) <= most * extent, 0, np.sign(heights))
        offsets = np.array([heights[sides == side].mean() for side in np.unique(sides)])
        limits = offsets[np.searchsorted(np.unique(sides), sides)]
        residual = float(np.abs(heights - limits).max() / extent)
        if residual > most:
            return None
        return self._found(
            "reached",
            tokens.depth,
            f"tokens are within {residual:.2g} of {len(offsets)} parallel hyperplanes "
            "and rest there",
            following=tokens.following,
            offsets=offsets,
            limits=tokens.for_all(limits[:, None]),
            residual=residual,
            free_dimension=tokens.points.shape[1] - 1,
        )

    def _with_leaders(self, tokens: "_DistinctTokens") -> LimitDetection:
        """Detect the limit where every token attends to a single one."""
        following, depth = tokens.following, tokens.depth
        try:
            phase = leaders.boolean_phase(
                self.attention, depth, tokens.points, following.follows
            )
        except InvalidInput as circle:
            reason = str(circle).rstrip(".")
            return self._found("undecided", depth, reason, following=following)
        margins = phase.lasts(self.attention, accuracy=self.accuracy)
        weakest = int(margins.argmin())
        if margins[weakest] <= self.accuracy:
            reason = (
                f"token {tokens.members[weakest]} will change whom it follows, or is "
                "too close to it to tell"
            )
            return self._found(
                "undecided", depth, reason, following=following, phase=phase
            )
        facts = tokens.facts(self.prediction.functionals, phase)
        residual, offsets = facts["residual"], facts["offsets"]
        is_taken_over = bool(following.spread.max() <= BOOLEAN)
        if residual > self.tolerance and not is_taken_over:
            reason = f"a token is still {residual:.2g} of the diameter from its leader"
            return self._found("not reached", depth, reason, **facts)
        contradiction = contradiction_of(self.prediction, offsets, phase)
        if contradiction:
            found = self._found("reached", depth, contradiction, **facts)
            return dataclasses.replace(found, geometry="unknown")
        count = len(facts["leaders"])
        noun = "one leader" if count == 1 else f"{count} leaders"
        if is_taken_over:
            rest = "every token attends to a single one, for good"
        else:
            rest = f"all are within {residual:.2g} of the diameter of their limits"
        reason = f"{noun}, attention of rank {following.rank}, and {rest}"
        return self._found("reached", depth, reason, **facts)

    def _at_origin(self, trajectory: Trajectory) -> LimitDetection:
        depths, means, traces = self._moments(trajectory)
        depth = float(depths[-1])
        if traces.max() <= (COINCIDENT * means.max()) ** 2:
            reason = f"all tokens are in one place, {means[-1]:.2g} from zero"
            if means[-1] <= self.tolerance * means[0]:
                return self._found("reached", depth, reason)
            return self._found("not reached", depth, reason)
        late = (depths > 0) & (depths >= depth / LAST_PART)
        if late.sum() < 3 or depths[late][0] > 0.5 * depth:
            reason = "the last decade of depth holds fewer than three saved depths"
            return self._found("undecided", depth, reason)
        exponent = float(np.polyfit(np.log(depths[late]), np.log(traces[late]), 1)[0])
        is_centred = means[-1] ** 2 <= 1e-2 * traces[-1]
        reason = (
            f"the variance falls like depth to the power {exponent:.4g}, where -1 is "
            f"expected; the mean is {means[-1]:.2g}"
        )
        if abs(exponent + 1) <= 0.05 and is_centred:
            return self._found("reached", depth, reason, exponent=exponent)
        return self._found("not reached", depth, reason, exponent=exponent)

    def _moments(self, trajectory: Trajectory) -> tuple[np.ndarray, ...]:
        """Depths, norms of the mean, traces of the covariance, of original tokens."""
        means, traces = [], []
        rescaled = Rescaled(self.attention)
        for index, depth in enumerate(trajectory.depths):
            cloud = trajectory.cloud(index)
            if self.is_rescaled:
                log_scale, points = rescaled.original(depth, cloud.points)
                cloud = cloud.moved(jnp.exp(log_scale) * points)
            means.append(float(jnp.linalg.norm(cloud.mean())))
            traces.append(float(jnp.trace(cloud.covariance())))
        # A single token, or equal ones, have no variance.
        traces = np.maximum(traces, np.finfo(float).tiny)
        return np.asarray(trajectory.depths), np.array(means), traces


def detector_for(
    trajectory: Trajectory,
    flow: Flow | None = None,
    tolerance: float = TOLERANCE,
    sharpness: float = SHARP,
    accuracy: float = ACCURACY,
) -> LimitDetector:
    """Return what detects the limit of a trajectory, or raise if nothing can."""
    check_trajectory(trajectory)
    for name, value in (("tolerance", tolerance), ("accuracy", accuracy)):
        as_number(name, value, "between 0 and 1", above=0, below=1)
    check(
        bool(trajectory.depths[-1] >= trajectory.depths[0]),
        "the trajectory runs backward; limits are those of increasing depth.",
    )
    known = trajectory.flow
    made_by = cast(Flow, flow if known is None else known)
    check(
        made_by is not None,
        "the trajectory does not know the flow that made it; pass it: "
        "detect_limit(trajectory, flow).",
    )
    check(
        flow is None or isinstance(flow, Flow),
        f"flow is {type(flow).__name__}; it must be the Flow that was solved, such as "
        "Flow(Rescaled(attention)): an attention does not tell the coordinates.",
    )
    check(
        flow is None or bool(eqx.tree_equal(made_by, flow)),
        "the trajectory was made by another flow than the given one; leave it out.",
    )
    attention = predicting.attention_of(made_by)
    dimension = trajectory.points.shape[2]
    check(
        attention.input_dimension == dimension,
        f"the flow is of dimension {attention.input_dimension}, the trajectory of "
        f"dimension {dimension}.",
    )
    rounding = 1e3 * float(jnp.finfo(trajectory.points.dtype).eps)
    return LimitDetector(
        attention,
        predicting.predict_limit(attention),
        isinstance(made_by.velocity, Rescaled),
        tolerance,
        sharpness,
        max(accuracy, rounding),
    )


class _DistinctTokens(eqx.Module):
    """Distinct tokens of positive weight at the last depth, and who follows whom."""

    depth: float
    points: np.ndarray
    members: np.ndarray  # their indices in the trajectory
    labels: np.ndarray  # which of them a token of the trajectory is; -1 if absent
    following: Following
    velocities: np.ndarray

    def __init__(self, trajectory: Trajectory, detector: LimitDetector):
        cloud, depth = detector.rescaled_cloud(trajectory, -1), trajectory.depths[-1]
        points = np.asarray(cloud.points, np.float64)
        present = np.asarray(cloud.weights) > 0
        self.depth, self.labels = float(depth), _coincident(points, present)
        labels, firsts = np.unique(self.labels, return_index=True)
        self.members = firsts[labels >= 0]
        self.points = points[self.members]
        schedule = Rescaled(detector.attention)
        matrix = attention_matrix(schedule.attention_at(self.depth), cloud)
        columns = np.zeros((len(points), len(self.members)))
        columns[present, self.labels[present]] = 1
        self.following = leaders.find_leaders(
            (np.asarray(matrix, np.float64) @ columns)[self.members],
            tolerance=detector.sharpness,
        )
        velocity = schedule.velocity(
            jnp.asarray(depth, cloud.points.dtype), cloud, cloud.points, None
        )
        self.velocities = np.asarray(velocity, np.float64)[self.members]

    def for_all(self, rows: np.ndarray) -> np.ndarray:
        """Return rows of distinct tokens as rows of all; zero for absent ones."""
        return np.where(self.labels[:, None] >= 0, rows[self.labels], 0.0)

    def facts(self, functionals: np.ndarray, phase: BooleanPhase) -> dict:
        """Return what `LimitDetection` tells of leaders, in these coordinates."""
        chosen = np.unique(phase.leaders)
        settled = self.points @ functionals.T
        limits = settled[phase.leaders]
        extent = max(float(np.ptp(settled, axis=0).max()), np.finfo(float).tiny)
        final = self.members[phase.leaders][self.labels]
        offsets = None
        if len(functionals) == 1:
            ordered = np.sort(settled[chosen, 0])
            # Those that agree up to rounding once.
            offsets = ordered[np.append(True, np.diff(ordered) > 1e-9 * extent)]
        return {
            "following": self.following,
            "leaders": self.members[chosen],
            "follows": np.where(self.labels >= 0, final, -1),
            "vertices": self.points[chosen],
            "offsets": offsets,
            "limits": self.for_all(limits),
            "residual": float(np.abs(settled - limits).max() / extent),
            "free_dimension": self.points.shape[1] - len(functionals),
            "phase": phase,
            "places": self.labels,
        }


def _coincident(points: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Label tokens by place; those of weight zero have the label -1."""
    from scipy.spatial import KDTree

    kept = points[present]
    radius = COINCIDENT * np.ptp(kept, axis=0).max(initial=0)
    pairs = KDTree(kept).query_pairs(radius, output_type="ndarray")
    labels = np.full(len(points), -1)
    labels[present] = components(len(kept), pairs)
    return labels


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
        if not set(phase.leaders.tolist()) <= ends:
            return "a token that is neither leftmost nor rightmost leads"
    return ""
