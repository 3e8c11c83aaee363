"""Following tokens until attention is Boolean for good, or they have decayed."""

import dataclasses
import math
import warnings
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from meanformer.attention import AbstractAttention
from meanformer.errors import StoppedEarly
from meanformer.flows import (
    BooleanAttention,
    Flow,
    Rescaled,
    Status,
    Switching,
    Trajectory,
    solve,
)
from meanformer.flows.dynamics.recorder import AbstractProgress
from meanformer.measures import TokenCloud
from meanformer.observables.limits.detection import LimitDetection, Reading, reading_of
from meanformer.observables.limits.prediction import LimitPrediction

# Depth in units of the decay rate, for limits at the origin.
DECAYS = 1e3
# Depths to save: the same for both looks, so that one program serves them.
SAVED = 33


@dataclasses.dataclass
class LimitSearch:
    """Tokens followed until their limit can be read off; options as `find_limit`."""

    attention: AbstractAttention
    prediction: LimitPrediction
    cloud: TokenCloud
    depth: float | None = None
    save: int = SAVED
    rtol: float | None = None
    atol: float | None = None
    progress: bool | AbstractProgress = False

    def __post_init__(self) -> None:
        is_double = self.cloud.points.dtype == jnp.float64
        rtol = (1e-10 if is_double else 1e-5) if self.rtol is None else self.rtol
        atol = rtol / 100 if self.atol is None else self.atol
        self.options = {"rtol": rtol, "atol": atol, "progress": self.progress}
        # Errors are amplified like e^{2 lambda t} against gaps like e^{-lambda t}.
        self.growths = 0.8 * math.log(1 / rtol)

    def run(self) -> "SearchResult":
        """Follow the tokens."""
        if self.prediction.geometry == "origin":
            return self._to_the_origin()
        return self._to_the_last_phase()

    def _to_the_origin(self) -> "SearchResult":
        """Follow original tokens on a logarithmic scale of depth."""
        rate = -self.prediction.spectrum.leading.real
        last = DECAYS / rate if self.depth is None else self.depth
        depths = np.append(0.0, np.geomspace(last / 1e4, last, self.save - 1))
        saved = jnp.asarray(depths, self.cloud.points.dtype)
        flow = Flow(self.attention)
        path = _solve(flow, self.cloud, saved[-1], save=saved, **self.options)
        reading = reading_of(path)
        return SearchResult(path, reading, reading.read(path))

    def _to_the_last_phase(self) -> "SearchResult":
        """Follow rescaled tokens until attention is Boolean for good."""
        last, unit = self._depth(), self._unit()
        flow = Flow(Rescaled(self.attention))
        options = {"save": self.save, **self.options}
        stop = BooleanAttention(flow.velocity)
        path = _solve(flow, self.cloud, (0.0, last), stop=stop, **options)
        reading = reading_of(path)
        found = reading.read(path)
        while _is_passing(found, path) and float(path.depths[-1]) + unit < last:
            # Boolean, but not for good: through the change, and to the next phase.
            start = float(path.depths[-1])
            ends = (start, start + unit), (start + unit, last)
            path = _joined(path, _solve(flow, path.cloud(-1), ends[0], **options))
            rest = _solve(flow, path.cloud(-1), ends[1], stop=stop, **options)
            path = _joined(path, rest)
            found = reading.read(path)
        if _gave_up(path) and found.verdict != "reached":
            reason = f"{found.reason}; the solve gave up there, too stiff"
            found = dataclasses.replace(found, reason=reason)
        return SearchResult(path, reading, found)

    def _unit(self) -> float:
        rate = self.prediction.spectrum.leading.real
        return 1 / rate if rate > 0 else 1.0

    def _depth(self) -> float:
        if self.depth is not None:
            return self.depth
        scale = float(jnp.max(self.cloud.radius())) ** 2 * self.prediction.size
        before = max(0.0, -math.log(max(scale, 1e-300)) / 2)
        return (self.growths + before) * self._unit()


class SearchResult(NamedTuple):
    """A path, how it is read, and what is read off it."""

    path: Trajectory
    reading: Reading
    found: LimitDetection


def _is_passing(found: LimitDetection, path: Trajectory) -> bool:
    """Whether attention is Boolean, but not for good."""
    following = found.following
    is_boolean = following is not None and bool(following.is_boolean.all())
    return found.verdict == "undecided" and is_boolean and not _gave_up(path)


def _gave_up(path: Trajectory) -> bool:
    return bool(path.status == Status.step_budget)


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


def _solve(flow: Flow, cloud: TokenCloud, depth, **options) -> Trajectory:
    """Solve; again with implicit steps where it is stiff."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoppedEarly)
        path = solve(flow, cloud, depth, **options)
        if _gave_up(path):
            return solve(flow, cloud, depth, solver=Switching(), **options)
    return path
