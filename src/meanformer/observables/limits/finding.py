"""From matrices and tokens to their limit: predicted, computed and compared."""

import dataclasses
import math
import warnings
from typing import cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer import flows
from meanformer.attention import AbstractAttention, AbstractInContextMap
from meanformer.errors import StoppedEarly, as_integer, as_number, check
from meanformer.flows import Flow, Rescaled, Status, Trajectory
from meanformer.flows.dynamics.recorder import AbstractProgress
from meanformer.measures import TokenCloud
from meanformer.measures.cloud import check_cloud
from meanformer.observables.limits import prediction as predicting
from meanformer.observables.limits.detection import (
    ACCURACY,
    TOLERANCE,
    LimitDetection,
    LimitDetector,
    detector_for,
)
from meanformer.observables.limits.leaders import SHARP, BooleanPhase
from meanformer.observables.limits.prediction import LimitPrediction

# Depth in units of the decay rate, for limits at the origin.
DECAYS = 1e3
# Depths to save: the same for both looks, so that one program serves them.
SAVED = 33

_PathAndLimit = tuple[Trajectory, LimitDetector, LimitDetection]


class LimitReport(eqx.Module):
    """A limit predicted from the matrices, and the one that tokens went to.

    Attributes:
        prediction: from query, key and value alone.
        detection: from the tokens.
        trajectory: the tokens along depth, in rescaled coordinates but for the origin.
    """

    prediction: LimitPrediction
    detection: LimitDetection
    trajectory: Trajectory

    @property
    def agrees(self) -> bool | None:
        """Whether they agree; `None` where one of them is open."""
        return self.detection.agrees

    def continued(self, depths: Float[Array, " t"] | np.ndarray) -> Trajectory:
        """Return the trajectory at these depths, beyond its end by the closed form.

        Up to its end it is interpolated between the saved depths. Tokens of weight
        zero rest beyond the end.

        Args:
            depths: increasing depths, from the first one of the trajectory on.
        """
        depths = np.asarray(depths, np.float64)
        path, found = self.trajectory, self.detection
        check(
            depths.ndim == 1 and len(depths) > 0 and bool((np.diff(depths) > 0).all()),
            "depths must be a list of at least one depth, increasing.",
        )
        inside = depths <= float(path.depths[-1])
        check(
            found.phase is not None and found.verdict == "reached" or inside.all(),
            f"the limit is {found.verdict}, so that no closed form goes on from depth "
            f"{float(path.depths[-1]):.6g}; ask for depths up to there.",
        )
        clouds = [path.at(depth).points for depth in depths[inside]]
        clouds += [self._closed_form(depth) for depth in depths[~inside]]
        points = jnp.stack([jnp.asarray(cloud, path.points.dtype) for cloud in clouds])
        places, flow = jnp.asarray(depths, path.depths.dtype), cast(Flow, path.flow)
        velocities = jax.vmap(lambda t, x: flow.field(t, path.cloud(0).moved(x), x))
        counts = np.minimum(np.searchsorted(path.depths, depths), len(path) - 1)
        return Trajectory(
            places,
            points,
            velocities(places, points),
            path.weights,
            path.positions,
            None,
            Status.reached,
            path.accepted_steps[counts],
            path.rejected_steps[counts],
            flow=flow,
        )

    def _closed_form(self, depth: float) -> np.ndarray:
        found, last = self.detection, np.asarray(self.trajectory.points[-1])
        places = cast(np.ndarray, found.places)
        moved = cast(BooleanPhase, found.phase).at(depth)
        return np.where(places[:, None] >= 0, moved[places], last)

    def __str__(self) -> str:
        return f"Predicted: {self.prediction}\nFound: {self.detection}"


def detect_limit(
    trajectory: Trajectory,
    flow: Flow | None = None,
    *,
    tolerance: float = TOLERANCE,
    sharpness: float = SHARP,
    accuracy: float = ACCURACY,
    second_look: bool = True,
) -> LimitDetection:
    r"""Look whether the tokens of a trajectory have reached their limit, and which.

    The last depth is looked at, in rescaled coordinates $z = e^{-tV}x$. A limit is
    reached if

    - every row of the attention matrix gives all but `sharpness` to one token, the
      choices lead to leaders (tokens that attend to themselves alone), and they stand
      at all later depths: in the closed form that the flow has from here on;
    - the tokens are within `tolerance` of their leaders in the coordinates that settle,
      or the rows are so sharp ($10^{-12}$) that the closed form has taken over;
    - a second look agrees: tokens moved to either side by `accuracy` times their
      diameter at first, and followed anew, tend to the same limits. Where rounding
      decided (ties, exceptional rows, a solve that was not accurate) they do not.

    Which coordinates settle is read off the spectrum of $V$. The tokens must have the
    shape that belongs to it: at most one hyperplane on each side of zero, leaders on
    the line that are leftmost or rightmost. A leader is a vertex of the hull of all
    tokens by itself: it alone has the largest $\langle Qz, Ky\rangle$ over all $y$.
    Hyperplanes are also reached if tokens rest on them, whoever attends to whom. A row
    that stays mixed while all others are sharp is exceptional, and the answer is
    undecided. For $V = -cI$ the limit is the origin, where the variance decays like
    $1/t$: its exponent is fitted over the last decade of depth and must be within 0.05
    of $-1$.

    Args:
        trajectory: of `Flow(attention)` or, better, of `Flow(Rescaled(attention))`,
            which does not overflow.
        flow: the flow that was solved, where the trajectory does not know it: one that
            was read from a file.
        tolerance: largest distance of a token from its limit, relative to the diameter.
        sharpness: what a row of the attention matrix may give to others.
        accuracy: relative error of the tokens, below which choices are not trusted.
        second_look: whether to follow moved tokens before saying that a limit is
            reached: two solves more.

    Returns:
        The verdict with all that it rests on. Cost: the attention matrix, $O(n^2 d)$
        for each of 82 later depths, and the second look; on the host, not under `jit`.
    """
    detector = detector_for(trajectory, flow, tolerance, sharpness, accuracy)
    found = detector.detect(trajectory)
    return _confirmed(found, detector, trajectory) if second_look else found


def find_limit(
    gamma: AbstractInContextMap,
    cloud: TokenCloud,
    *,
    depth: float | None = None,
    save: int = SAVED,
    rtol: float | None = None,
    atol: float | None = None,
    second_look: bool = True,
    progress: bool | AbstractProgress = False,
) -> LimitReport:
    r"""Follow tokens to their limit, and compare it with the predicted one.

    The flow is solved in rescaled coordinates, with implicit steps where it is stiff,
    until every token attends to a single one, for good: the closed form of
    `BooleanPhase` takes over there. For $V = -cI$ the original coordinates are
    followed, to a depth of $1000/c$ at logarithmically spaced depths.

    Args:
        gamma: `Softmax`, the same at all depths.
        cloud: the tokens.
        depth: how far to go at most; by default as many growth times $1/\lambda$ as the
            tolerance allows before errors decide (18 in double precision), and those
            before scores are of order one.
        save: how many depths to save.
        rtol: relative tolerance of the solve; $10^{-10}$, or $10^{-5}$ in single
            precision, by default.
        atol: absolute tolerance; a hundredth of `rtol` by default.
        second_look: as for `detect_limit`.
        progress: show a progress bar; or an object to report to.

    Returns:
        Prediction, detection and trajectory.
    """
    check_cloud("cloud", cloud)
    save = as_integer("save", save, least=3)
    if depth is not None:
        depth = as_number("depth", depth, "positive", above=0)
    attention = predicting.attention_of(gamma)
    prediction = predicting.predict_limit(attention)
    path, detector, found = _search(
        attention, prediction, cloud, depth, save, rtol, atol, progress
    )
    if second_look:
        found = _confirmed(found, detector, path)
    return LimitReport(prediction, found, path)


def _search(
    attention: AbstractAttention,
    prediction: LimitPrediction,
    cloud: TokenCloud,
    depth: float | None = None,
    save: int = SAVED,
    rtol: float | None = None,
    atol: float | None = None,
    progress: bool | AbstractProgress = False,
) -> _PathAndLimit:
    """Follow tokens until their limit can be detected; options as `find_limit`."""
    rate, dtype = prediction.spectrum.leading.real, cloud.points.dtype
    if rtol is None:
        rtol = 1e-10 if dtype == jnp.float64 else 1e-5
    atol = rtol / 100 if atol is None else atol
    options = {"rtol": rtol, "atol": atol, "progress": progress}
    if prediction.geometry == "origin":
        # Original tokens, on a logarithmic scale of depth.
        last = -DECAYS / rate if depth is None else depth
        depths = np.append(0.0, np.geomspace(last / 1e4, last, save - 1))
        saved = jnp.asarray(depths, dtype)
        path = _solve(Flow(attention), cloud, saved[-1], save=saved, **options)
        detector = detector_for(path)
        return path, detector, detector.detect(path)
    unit = 1 / rate if rate > 0 else 1.0
    if depth is None:
        scale = float(jnp.max(cloud.radius())) ** 2 * prediction.size
        before = max(0.0, -math.log(max(scale, 1e-300)) / 2)
        # Errors are amplified like e^{2 lambda t} against gaps like e^{-lambda t}.
        depth = (0.8 * math.log(1 / rtol) + before) * unit
    flow = Flow(Rescaled(attention))
    return _to_the_last_phase(flow, cloud, depth, unit, {"save": save, **options})


def _to_the_last_phase(
    flow: Flow, cloud: TokenCloud, last: float, unit: float, options: dict
) -> _PathAndLimit:
    """Follow rescaled tokens until attention is Boolean for good."""
    stop = flows.BooleanAttention(flow.velocity)
    path = _solve(flow, cloud, (0.0, last), stop=stop, **options)
    detector = detector_for(path)
    found = detector.detect(path)
    while _is_passing(found, path) and float(path.depths[-1]) + unit < last:
        # Boolean, but not for good: through the change, and to the next phase.
        start = float(path.depths[-1])
        ends = (start, start + unit), (start + unit, last)
        path = _joined(path, _solve(flow, path.cloud(-1), ends[0], **options))
        rest = _solve(flow, path.cloud(-1), ends[1], stop=stop, **options)
        path = _joined(path, rest)
        found = detector.detect(path)
    if _gave_up(path) and found.verdict != "reached":
        reason = f"{found.reason}; the solve gave up there, too stiff"
        found = dataclasses.replace(found, reason=reason)
    return path, detector, found


def _is_passing(found: LimitDetection, path: Trajectory) -> bool:
    """Whether attention is Boolean, but not for good."""
    following = found.following
    is_boolean = following is not None and bool(following.is_boolean.all())
    return found.verdict == "undecided" and is_boolean and not _gave_up(path)


def _gave_up(path: Trajectory) -> bool:
    return bool(path.status == Status.step_budget)


def _joined(first: Trajectory, second: Trajectory) -> Trajectory:
    """Return two stretches of one path as one, with the status of the second."""
    before, after = first.along_depth(), second.along_depth()
    for name in ("accepted_steps", "rejected_steps"):
        after[name] = before[name][-1] + after[name]
    del before["status"], after["status"]
    whole = jax.tree.map(lambda a, b: jnp.concatenate([a, b[1:]]), before, after)
    return dataclasses.replace(second, **whole)


def _solve(flow: Flow, cloud: TokenCloud, depth, **options) -> Trajectory:
    """Solve; again with implicit steps where it is stiff."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoppedEarly)
        path = flows.solve(flow, cloud, depth, **options)
        if _gave_up(path):
            return flows.solve(flow, cloud, depth, solver=flows.Switching(), **options)
    return path


def _confirmed(
    found: LimitDetection, detector: LimitDetector, trajectory: Trajectory
) -> LimitDetection:
    """Follow tokens moved to either side, and keep the verdict if they agree."""
    if found.verdict != "reached" or found.limits is None or trajectory.depths[0] != 0:
        return found
    first = detector.rescaled_cloud(trajectory, 0)
    extent = max(float(np.abs(found.limits).max(initial=0)), 1e-300)
    for side in (1.0, -1.0):
        moved = _moved(first, side * detector.accuracy)
        other = _search(detector.attention, found.prediction, moved)[2]
        apart = np.inf
        if other.verdict == "reached" and other.limits is not None:
            apart = float(np.abs(other.limits - found.limits).max()) / extent
        is_same = np.array_equal(other.follows, found.follows)
        if apart <= detector.tolerance and is_same:
            continue
        what = "leaves the limit open"
        if np.isfinite(apart):
            what = f"changes whom they follow; limits move by {apart:.2g} of their size"
        reason = (
            f"a second look disagrees: moving the tokens by {detector.accuracy:.2g} of "
            f"their diameter {what}; a tie, an exceptional row or errors of the solve "
            "decide"
        )
        return dataclasses.replace(
            found, geometry="unknown", verdict="undecided", reason=reason
        )
    return found


def _moved(cloud: TokenCloud, share: float) -> TokenCloud:
    """Tokens moved in fixed directions by a share of their diameter."""
    points = np.asarray(cloud.points)
    present = np.asarray(cloud.weights) > 0
    diameter = np.ptp(points[present], axis=0).max(initial=0)
    size = diameter if diameter > 0 else np.abs(points).max(initial=0)
    directions = np.random.default_rng(0).normal(size=points.shape)
    shift = jnp.asarray(share * size * directions, cloud.points.dtype)
    return cloud.moved(cloud.points + shift)
