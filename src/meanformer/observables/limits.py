"""From matrices and tokens to their limit: predicted, computed and compared."""

import warnings
from typing import cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import AbstractInContextMap
from meanformer.errors import StoppedEarly, check
from meanformer.flows import (
    BooleanAttention,
    Flow,
    Rescaled,
    Status,
    Switching,
    Trajectory,
    solve,
)
from meanformer.flows.recorder import AbstractProgress
from meanformer.measures import TokenCloud
from meanformer.observables.boolean_phase import BooleanPhase
from meanformer.observables.detection import LimitDetection, detect_limit
from meanformer.observables.prediction import (
    LimitPrediction,
    attention_of,
    predict_limit,
)

# Depths in units of the growth rate, within which rounding does not decide.
GROWTHS = 18.0
DECAY_DEPTH = 1e3
FALLBACK_DEPTH = 20.0


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
        return _continued(self, np.asarray(depths, np.float64))

    def __str__(self) -> str:
        return f"Predicted: {self.prediction}\nFound: {self.detection}"


def find_limit(
    gamma: AbstractInContextMap,
    cloud: TokenCloud,
    *,
    depth: float | None = None,
    save: int = 33,
    rtol: float = 1e-10,
    atol: float = 1e-12,
    progress: bool | AbstractProgress = False,
) -> LimitReport:
    r"""Follow tokens to their limit, and compare it with the predicted one.

    The flow is solved in rescaled coordinates, with implicit steps where it is stiff,
    until every token attends to a single one: the closed form of `BooleanPhase` takes
    over there. For $V = -cI$ the original coordinates are followed, to a depth of a
    thousand at logarithmically spaced depths.

    Args:
        gamma: `Softmax`, the same at all depths.
        cloud: the tokens.
        depth: how far to go at most; by default 18 growth times $1/\lambda$, after
            which rounding would decide.
        save: how many depths to save.
        rtol: relative tolerance of the solve.
        atol: absolute tolerance of the solve.
        progress: show a progress bar; or an object to report to.

    Returns:
        Prediction, detection and trajectory.
    """
    prediction = predict_limit(gamma)
    attention = attention_of(gamma)
    options = {"rtol": rtol, "atol": atol, "progress": progress}
    if prediction.geometry == "origin":
        last = DECAY_DEPTH if depth is None else depth
        depths = np.append(0.0, np.geomspace(last / 1e4, last, save - 1))
        path = solve(Flow(attention), cloud, last, save=depths, **options)
        return LimitReport(prediction, detect_limit(path), path)
    last = _depth_for(prediction) if depth is None else depth
    flow, options = Flow(Rescaled(attention)), {"save": save, **options}
    stop = BooleanAttention(flow.velocity)
    path = _follow(flow, cloud, (0.0, last), stop=stop, **options)
    found = detect_limit(path)
    while _is_passing(found):
        start = float(path.depths[-1])
        further = start + last / GROWTHS
        if further >= last:
            break
        # Boolean, but not for good: go on through the change, and to the next phase.
        path = _joined(path, _follow(flow, path.cloud(-1), (start, further), **options))
        rest = _follow(flow, path.cloud(-1), (further, last), stop=stop, **options)
        path = _joined(path, rest)
        found = detect_limit(path)
    return LimitReport(prediction, found, path)


def _continued(report: LimitReport, depths: np.ndarray) -> Trajectory:
    path, found = report.trajectory, report.detection
    inside = depths <= float(path.depths[-1])
    check(
        found.phase is not None and found.verdict == "reached" or bool(inside.all()),
        f"the limit is {found.verdict}, so that no closed form goes on from depth "
        f"{float(path.depths[-1]):.6g}; ask for depths up to there.",
    )
    clouds = [path.at(depth).points for depth in depths[inside]]
    later = [_closed_form(report, depth) for depth in depths[~inside]]
    points = jnp.stack([jnp.asarray(p, path.points.dtype) for p in (*clouds, *later)])
    places = jnp.asarray(depths, path.depths.dtype)
    flow = cast(Flow, path.flow)
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


def _closed_form(report: LimitReport, depth: float) -> np.ndarray:
    found, last = report.detection, np.asarray(report.trajectory.points[-1])
    places = cast(np.ndarray, found.places)
    moved = cast(BooleanPhase, found.phase).at(depth)
    return np.where(places[:, None] >= 0, moved[places], last)


def _is_passing(found: LimitDetection) -> bool:
    """Whether attention is Boolean, but not for good."""
    following = found.following
    is_boolean = following is not None and bool(following.is_boolean.all())
    return found.verdict == "undecided" and is_boolean


def _joined(first: Trajectory, second: Trajectory) -> Trajectory:
    """Return two stretches of one path as one."""
    counts = tuple(
        earlier[-1] + later
        for earlier, later in zip(_steps(first), _steps(second), strict=True)
    )
    second = eqx.tree_at(_steps, second, counts)
    joined = jax.tree.map(
        lambda a, b: jnp.concatenate([a, b[1:]]),
        first.along_depth(),
        second.along_depth(),
    )
    return eqx.tree_at(
        lambda t: t.along_depth(), second, joined, is_leaf=lambda leaf: leaf is None
    )


def _steps(path: Trajectory) -> tuple:
    return path.accepted_steps, path.rejected_steps


def _follow(flow: Flow, cloud: TokenCloud, depth, **options) -> Trajectory:
    """Solve; again with implicit steps where it is stiff."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoppedEarly)
        path = solve(flow, cloud, depth, **options)
    if bool(path.status == Status.step_budget):
        return solve(flow, cloud, depth, solver=Switching(), **options)
    return path


def _depth_for(prediction: LimitPrediction) -> float:
    rate = prediction.spectrum.leading.real
    return GROWTHS / rate if rate > 0 else FALLBACK_DEPTH
