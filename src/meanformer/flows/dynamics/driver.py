"""Visiting depths in turn: in one compiled loop, or one by one with a report of each.

Tokens and Gaussians differ in what moves and in how a stretch of depth is integrated,
not in how the stretches follow each other.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.flows.dynamics.recorder import AbstractProgress, AbstractRecorder
from meanformer.flows.schedule import stack_flows
from meanformer.flows.status import Status


class Way(NamedTuple):
    """How something moves through depth.

    Attributes:
        advance: takes a problem, a state and a depth, returns the state there.
        snapshot: takes a problem and a state, returns the state to save, and more.
        resumed: takes a saved state, returns the one to go on from.
    """

    advance: Callable
    snapshot: Callable
    resumed: Callable


@eqx.filter_jit
def visit_all(way: Way, problem: Any, state: Any, depths: Float[Array, " t"]) -> Any:
    """Visit all depths in one compiled loop; gradients redo a stretch at a time."""
    problem = stack_flows(problem)

    def stretch(state, target: Float[Array, ""]):
        moved = way.advance(problem, state, target)
        return moved, moved

    _, later = jax.lax.scan(stretch, state, depths[1:])
    states = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), state, later)
    return jax.lax.map(lambda state: way.snapshot(problem, state), states)


def visit_each(
    way: Way,
    problem: Any,
    state: Any,
    depths: Float[Array, " t"],
    progress: AbstractProgress,
    store: AbstractRecorder | None,
) -> Any:
    """Visit the depths one by one, reporting and writing each as it comes."""
    # A mistake that only tracing shows must be told before the store is touched.
    eqx.filter_eval_shape(_advance, way, problem, state, depths[-1])
    try:
        snapshots = []
        if store is not None:
            snapshots += store.begin(depths, problem, state)
        with progress:
            for index in range(len(snapshots), len(depths)):
                if index > 0:
                    state = way.resumed(snapshots[-1][0])
                    if not bool(state.status == Status.reached):
                        break
                    state = _advance(way, problem, state, depths[index])
                snapshots.append(_snapshot(way, problem, state))
                if store is not None:
                    store.append(index, *snapshots[-1])
                progress.update(index, len(depths) - 1)
    finally:
        if store is not None:
            store.end()
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *snapshots)


@eqx.filter_jit
def _advance(way: Way, problem, state, target):
    return way.advance(stack_flows(problem), state, target)


@eqx.filter_jit
def _snapshot(way: Way, problem, state):
    return way.snapshot(problem, state)
