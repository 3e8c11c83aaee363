"""From matrices and tokens to their limit: predicted, computed and compared."""

import dataclasses
from typing import cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import AbstractInContextMap
from meanformer.errors import InvalidInput, as_integer, check
from meanformer.flows import Flow, Status, Trajectory
from meanformer.flows.dynamics.recorder import AbstractProgress
from meanformer.measures import TokenCloud
from meanformer.observables.limits.boolean_phase import BooleanPhase
from meanformer.observables.limits.detection import (
    ACCURACY,
    TOLERANCE,
    LimitDetection,
    Reading,
    reading_of,
    rescaled_cloud,
)
from meanformer.observables.limits.leaders import SHARP
from meanformer.observables.limits.prediction import (
    LimitPrediction,
    attention_of,
    predict_limit,
)
from meanformer.observables.limits.search import SAVED, LimitSearch


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
    reading = reading_of(trajectory, flow, tolerance, sharpness, accuracy)
    found = reading.read(trajectory)
    if not second_look:
        return found
    return _confirmed(found, reading, trajectory)


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
    if not isinstance(cloud, TokenCloud):
        raise InvalidInput(f"cloud is {type(cloud).__name__}; it must be a TokenCloud.")
    save = as_integer("save", save, least=3)
    check(depth is None or depth > 0, f"depth is {depth}; it must be positive.")
    prediction, attention = predict_limit(gamma), attention_of(gamma)
    search = LimitSearch(
        attention, prediction, cloud, depth, save, rtol, atol, progress
    )
    path, reading, found = search.run()
    if second_look:
        found = _confirmed(found, reading, path)
    return LimitReport(prediction, found, path)


def _confirmed(
    found: LimitDetection, reading: Reading, trajectory: Trajectory
) -> LimitDetection:
    """Follow tokens moved to either side, and keep the verdict if they agree."""
    if found.verdict != "reached" or found.limits is None:
        return found
    first = rescaled_cloud(trajectory, reading, 0)
    start = float(trajectory.depths[0])
    if start != 0:
        return found
    extent = max(float(np.abs(found.limits).max(initial=0)), 1e-300)
    for side in (1.0, -1.0):
        moved = _moved(first, side * reading.accuracy)
        other = LimitSearch(reading.attention, found.prediction, moved).run().found
        apart = np.inf
        if other.verdict == "reached" and other.limits is not None:
            apart = float(np.abs(other.limits - found.limits).max()) / extent
        is_same = np.array_equal(other.follows, found.follows)
        if apart > reading.tolerance or not is_same:
            return _unconfirmed(found, reading, apart)
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


def _unconfirmed(found, reading: Reading, apart: float) -> LimitDetection:
    if np.isfinite(apart):
        what = f"changes whom they follow; limits move by {apart:.2g} of their size"
    else:
        what = "leaves the limit open"
    reason = (
        f"a second look disagrees: moving the tokens by {reading.accuracy:.2g} of "
        f"their diameter {what}; a tie, an exceptional row or errors of the solve "
        "decide"
    )
    return dataclasses.replace(
        found, geometry="unknown", verdict="undecided", reason=reason
    )


def _continued(report: LimitReport, depths: np.ndarray) -> Trajectory:
    path, found = report.trajectory, report.detection
    check(
        depths.ndim == 1 and len(depths) > 0 and bool((np.diff(depths) > 0).all()),
        "depths must be a list of at least one depth, increasing.",
    )
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
