"""Base class of dynamics, and the loop that advances their state through depth.

All that changes is a `State`, all that stays the same is an `AbstractDynamics`.
"""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from meanformer.attention.abstract import stack_maps
from meanformer.errors import check, check_kind, is_concrete
from meanformer.flows.dynamics.recorder import (
    AbstractProgress,
    AbstractRecorder,
    bar_for,
)
from meanformer.flows.status import Status
from meanformer.flows.trajectories.abstract import AbstractTrajectory, cut_off, joined


class State(eqx.Module):
    """Everything that changes along depth; a solve can restart from it alone.

    Attributes:
        depth: where it is.
        moving: what is integrated, a tree of arrays.
        status: `reached` while all is well, otherwise why it stopped.
        accepted_steps: steps taken so far.
        rejected_steps: steps tried and refused so far.
        stretch: how many saved depths lie behind; it numbers the noise.
        record: what is noted on the way, such as which tokens have joined; or `None`.
    """

    depth: Float[Array, ""]
    moving: PyTree
    status: PyTree
    accepted_steps: Int[Array, ""]
    rejected_steps: Int[Array, ""]
    stretch: Int[Array, ""]
    record: PyTree = None

    @classmethod
    def first(cls, depth: Float[Array, ""], moving: PyTree, record: PyTree = None):
        """Return the state at the first depth."""
        none = jnp.zeros((), jnp.result_type(int))
        return cls(depth, moving, Status.reached, none, none, none, record)

    @classmethod
    def at_end_of(cls, trajectory: Any, moving: PyTree, record: PyTree = None):
        """Return the state at the last depth of a trajectory.

        Args:
            trajectory: has depths, statuses and steps, one for each depth.
            moving: what moved, along depth.
            record: what was noted on the way, along depth; or `None`.
        """
        steps = (trajectory.accepted_steps, trajectory.rejected_steps)
        given = (trajectory.depths, moving, trajectory.status, *steps, record)
        *last, record = jax.tree.map(lambda leaf: leaf[-1], given)
        return cls(*last, jnp.asarray(len(trajectory) - 1), record)

    @property
    def is_running(self) -> Bool[Array, ""]:
        """Whether it has not stopped."""
        return self.status == Status.reached


class AbstractDynamics(eqx.Module):
    """Base class of dynamics: how a state moves through depth, and what is saved.

    It holds all that stays the same; what changes is a `State`.
    """

    @abc.abstractmethod
    def advance(self, state: State, target: Float[Array, ""]) -> State:
        """Go from the state's depth to the target, unless it has stopped already."""

    @abc.abstractmethod
    def rates(self, state: State) -> PyTree:
        """Return what is saved beside a state: how fast it changes there."""

    @abc.abstractmethod
    def trajectory(self, states: State, rates: PyTree) -> AbstractTrajectory:
        """Return states and rates, stacked along depth, as a trajectory."""

    @abc.abstractmethod
    def resumed(self, trajectory: Any) -> State:
        """Return the state at the last depth of a trajectory, to go on from."""

    @abc.abstractmethod
    def request(self, start: State) -> dict[str, Any]:
        """Return everything that tells one run from another, by the words for it."""


def kept_if_finite(
    moved: State,
    state: State,
    running: Bool[Array, ""],
    is_finite: bool | Bool[Array, ""] = True,
) -> State:
    """Return the new state; the old one if it had stopped or the new is not finite.

    Args:
        moved: the new state.
        state: the old one.
        running: whether the old one had not stopped.
        is_finite: whether what follows from the new state is finite too.
    """
    kept = eqx.tree_at(lambda s: s.status, state, Status.not_finite)
    leaves = jax.tree.leaves((moved.depth, moved.moving))
    all_finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()
    moved = choose(all_finite & is_finite, moved, kept)
    return choose(running, moved, state)


def choose(condition: Bool[Array, ""], first: Any, second: Any) -> Any:
    """Return one of two states."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), first, second)


def drive(
    dynamics: AbstractDynamics,
    state: State,
    depths: Float[Array, " t"],
    progress: bool | AbstractProgress = False,
    store: AbstractRecorder | None = None,
    refine: Callable[[State], State | None] | None = None,
) -> Any:
    """Carry what moves through all depths; return its trajectory.

    It is cut off where it ended. Where it reports to nobody it is one compiled loop.

    Args:
        dynamics: what moves, and how.
        state: where it is at the first depth.
        depths: the depths to save, the first one included.
        progress: show a progress bar; or an object to report to.
        store: where to write each depth as it comes; a run that is there goes on.
        refine: takes a state that has stopped, returns a finer one to go on from, or
            `None` if there is none.
    """
    is_known = is_concrete(depths) and all(map(is_concrete, jax.tree.leaves(state)))
    if store is None and progress is False and not (refine and is_known):
        return cut_off(dynamics.trajectory(*visit_all(dynamics, state, depths)))
    allowed = "meanformer.storage.RunStore(folder)"
    check_kind("store", store, AbstractRecorder | None, allowed)
    check(
        is_known, "store and progress need concrete tokens; leave them out under jit."
    )
    bar = bar_for(progress)
    return cut_off(_visit_each(dynamics, state, depths, bar, store, refine))


@eqx.filter_jit
def visit_all(
    dynamics: AbstractDynamics, state: State, depths: Float[Array, " t"]
) -> tuple[State, Any]:
    """Return states and rates at all depths; gradients redo a stretch at a time."""
    dynamics = stack_maps(dynamics)

    def stretch(state: State, target: Float[Array, ""]):
        moved = dynamics.advance(state, target)
        return moved, moved

    _, later = jax.lax.scan(stretch, state, depths[1:])
    states = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), state, later)
    return states, jax.lax.map(dynamics.rates, states)


def _visit_each(
    dynamics: AbstractDynamics,
    state: State,
    depths: Float[Array, " t"],
    progress: AbstractProgress,
    store: AbstractRecorder | None,
    refine: Callable[[State], State | None] | None,
) -> AbstractTrajectory:
    # A mistake that only tracing shows must be told before the store is touched.
    eqx.filter_eval_shape(_advance, dynamics, state, depths[-1])
    rows, done = [], 0
    try:
        if store is not None:
            request, empty = dynamics.request(state), _empty_row(dynamics, state)
            kept = store.begin(depths, request, empty)
            if kept is not None:
                rows, done, state = [kept], len(kept), dynamics.resumed(kept)
        with progress:
            for index in range(done, len(depths)):
                if not bool(state.is_running):
                    break
                if index > 0:
                    state = _refining(dynamics, state, depths[index], refine)
                rows.append(dynamics.trajectory(*_snapshot(dynamics, state)))
                if store is not None:
                    store.append(index, rows[-1])
                progress.tell(rows[-1].caption)
                progress.update(index, len(depths) - 1)
    finally:
        if store is not None:
            store.end()
    return joined(rows)


def _refining(dynamics, state: State, target: Float[Array, ""], refine) -> State:
    """Advance; whenever a finer state is needed, go on with that."""
    while True:
        state = _advance(dynamics, state, target)
        finer = None if refine is None else refine(state)
        if finer is None:
            return state
        state = finer


def _empty_row(dynamics: AbstractDynamics, state: State) -> AbstractTrajectory:
    """Return a trajectory of one depth whose rates are zero, without computing any."""
    shapes = eqx.filter_eval_shape(dynamics.rates, state)
    nothing = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    row = jax.tree.map(lambda leaf: leaf[None], (state, nothing))
    return dynamics.trajectory(*row)


@eqx.filter_jit
def _advance(dynamics, state, target):
    return stack_maps(dynamics).advance(state, target)


@eqx.filter_jit
def _snapshot(dynamics, state):
    return jax.tree.map(lambda leaf: leaf[None], (state, dynamics.rates(state)))
