"""Going from one saved depth to the next: in one compiled loop, or one by one."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.errors import check, is_concrete
from meanformer.flows.dynamics.abstract import AbstractDynamics, State
from meanformer.flows.dynamics.recorder import (
    AbstractProgress,
    AbstractRecorder,
    bar_for,
)
from meanformer.flows.schedule import stack_flows
from meanformer.flows.trajectories.abstract import AbstractTrajectory, cut_off, joined


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
    check(
        store is None or isinstance(store, AbstractRecorder),
        f"store is {store!r}; it must be meanformer.storage.RunStore(folder).",
    )
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
    dynamics = stack_flows(dynamics)

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
                rows.append(_row(dynamics, state))
                if store is not None:
                    store.append(index, rows[-1])
                progress.update(index, len(depths) - 1)
    finally:
        if store is not None:
            store.end()
    return joined(rows)


def _refining(dynamics, state: State, target: Float[Array, ""], refine) -> State:
    """Advance; again from where it came to, as often as a finer state may go on."""
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


def _row(dynamics: AbstractDynamics, state: State) -> AbstractTrajectory:
    """Return a trajectory of one depth."""
    return dynamics.trajectory(*_snapshot(dynamics, state))


@eqx.filter_jit
def _advance(dynamics, state, target):
    return stack_flows(dynamics).advance(state, target)


@eqx.filter_jit
def _snapshot(dynamics, state):
    return jax.tree.map(lambda leaf: leaf[None], (state, dynamics.rates(state)))
