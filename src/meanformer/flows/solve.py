"""Solving a flow: tokens from one depth to another, saved on the way."""

import dataclasses
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.errors import InvalidInput, check, is_concrete
from meanformer.flows.flow import Flow
from meanformer.flows.inputs import (
    check_flow,
    checked_probes,
    saved_depths,
    sorted_stops,
)
from meanformer.flows.integrate import Problem
from meanformer.flows.long_depth import check_long_depth
from meanformer.flows.merging import Merge, as_merge, check_mergeable, initial_atoms
from meanformer.flows.phases import advance, velocities_at
from meanformer.flows.recorder import AbstractProgress, AbstractRecorder, bar_for
from meanformer.flows.solvers import AbstractIntegrator, Adaptive, LongDepth
from meanformer.flows.state import State, initial_state
from meanformer.flows.status import AbstractStop, Status, StepBudget
from meanformer.flows.sums import summary_of
from meanformer.flows.trajectory import Trajectory, as_trajectory
from meanformer.measures import TokenCloud
from meanformer.numerics.watched import Watched
from meanformer.typing import ArrayLike, Key


def solve(
    flow: Flow,
    mu: TokenCloud,
    depth: float | tuple[float, float] | Float[Array, ""],
    *,
    save: int | ArrayLike = 11,
    solver: AbstractIntegrator | None = None,
    rtol: float = 1e-6,
    atol: float = 1e-9,
    probes: ArrayLike | TokenCloud | None = None,
    merge: Merge | float | None = None,
    stop: AbstractStop | StepBudget | Sequence[AbstractStop | StepBudget] = (),
    key: Key | None = None,
    progress: bool | AbstractProgress = False,
    store: AbstractRecorder | None = None,
) -> Trajectory:
    r"""Flow a token cloud through depth.

    Each stretch between two saved depths is integrated on its own, so what is saved is
    on the path and a run can restart from any of them. The error of a step is the
    largest over tokens of positive weight and probes. Differentiable in both modes
    (the backward pass keeps checkpoints, not steps), and usable under `jit` and `vmap`.

    Never raises because of the flow's behaviour: a solve that cannot reach the depth
    ends with the last good state, a `status` that says why, and a warning
    (`StoppedEarly`) unless it came to rest or met a condition of yours. Under `jit`
    nothing is cut off: the states after the end repeat the last one.

    Args:
        flow: the flow.
        mu: the tokens at the first depth.
        depth: the last depth (the first is 0; negative runs backward), or a pair of
            first and last depth.
        save: how many equally spaced depths to save, both ends included; or the
            depths themselves, the first one included.
        solver: `Adaptive()` (the default), `Stiff()`, `FixedStep(h)`, `Splitting(h)`,
            `LongDepth()`.
        rtol: relative tolerance of the adaptive solvers.
        atol: absolute tolerance of the adaptive solvers.
        probes: points carried along without being part of the measure; a `TokenCloud`
            to give them positions (at the end of the sequence otherwise).
        merge: join tokens that have met: `Merge(distance)`, or the distance. Such a
            solve has no derivative. `LongDepth()` always merges.
        stop: conditions that end the solve, and `StepBudget(count)`.
        key: random key, for a flow with noise only.
        progress: show a progress bar on standard error; or an object to report to.
        store: where to write the trajectory while it is computed; a run that is there
            already is continued.

    Returns:
        The trajectory. Cost for each evaluation of the velocity: that of its sums,
        $O(n^2 d)$ where they are exact.
    """
    problem, state, depths = _set_up(
        flow, mu, depth, save, solver, rtol, atol, probes, merge, stop, key
    )
    if store is None and progress is False:
        states = _scan(problem, state, depths)
    else:
        check(
            is_concrete(state.points),
            "store and progress need concrete tokens; leave them out under jit.",
        )
        states = _walk(problem, state, depths, bar_for(progress), store)
    return as_trajectory(mu, *states)


@eqx.filter_jit
def _scan(
    problem: Problem, state: State, depths: Float[Array, " t"]
) -> tuple[State, Array]:
    """Visit all depths in one compiled loop; gradients redo a stretch at a time."""

    @eqx.filter_checkpoint
    def stretch(state: State, target: Float[Array, ""]):
        moved = advance(problem, state, target)
        return moved, moved

    _, later = jax.lax.scan(stretch, state, depths[1:])
    states = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), state, later)
    return jax.lax.map(lambda state: _snapshot(problem, state), states)


def _walk(
    problem: Problem,
    state: State,
    depths: Float[Array, " t"],
    progress: AbstractProgress,
    store: AbstractRecorder | None,
) -> tuple[State, Array]:
    """Visit the depths one by one, reporting and writing each as it comes."""
    # A mistake that only tracing shows must be told before the store is touched.
    eqx.filter_eval_shape(_jitted_advance, problem, state, depths[-1])
    try:
        snapshots = []
        if store is not None:
            snapshots += store.begin(depths, problem, state)
        with progress:
            for index in range(len(snapshots), len(depths)):
                if index > 0:
                    state = dataclasses.replace(snapshots[-1][0], sums=None)
                    if not bool(state.status == Status.reached):
                        break
                    state = _jitted_advance(problem, state, depths[index])
                snapshots.append(_jitted_snapshot(problem, state))
                if store is not None:
                    store.append(index, *snapshots[-1])
                progress.update(index, len(depths) - 1)
    finally:
        if store is not None:
            store.end()
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *snapshots)


def _snapshot(problem: Problem, state: State) -> tuple[State, Float[Array, "n d"]]:
    watched = Watched(problem.cloud.sums)
    seen = eqx.tree_at(lambda p: p.cloud.sums, problem, watched)
    velocity = velocities_at(seen, state)
    state = dataclasses.replace(state, sums=summary_of(watched.reports))
    return state, jnp.where(jnp.isfinite(velocity), velocity, 0)


_jitted_advance = eqx.filter_jit(advance)
_jitted_snapshot = eqx.filter_jit(_snapshot)


def _set_up(flow, mu, depth, save, solver, rtol, atol, probes, merge, stop, key):
    check_flow(flow, mu)
    check(
        rtol > 0 and atol > 0, f"rtol is {rtol}, atol is {atol}; both must be positive."
    )
    depths = saved_depths(depth, save, mu.points.dtype)
    integrator = Adaptive() if solver is None else solver
    if not isinstance(integrator, AbstractIntegrator):
        raise InvalidInput(
            f"solver is {solver!r}; it must be Adaptive(…), Stiff(…), FixedStep(…), "
            "Splitting(…) or LongDepth(…)."
        )
    if (flow.noise is None) != (key is None):
        raise InvalidInput(
            "a flow with noise needs key=jax.random.key(seed)."
            if key is None
            else "key is given but the flow has no noise; leave it out."
        )
    passive, places = checked_probes(flow, mu, probes)
    is_long = isinstance(integrator, LongDepth)
    if is_long:
        check_long_depth(flow, passive is not None)
    merging = as_merge(merge, is_long, mu.points.dtype)
    atoms = None
    if merging is not None:
        check_mergeable(mu, flow.noise is not None, _is_forward(depths))
        atoms = initial_atoms(depths[0], mu.points, is_long)
    budget, stops = sorted_stops(stop, mu.points.dtype)
    tolerances = (jnp.asarray(tol, mu.points.dtype) for tol in (rtol, atol))
    problem = Problem(
        flow,
        mu,
        places,
        integrator.prepared(mu.points.dtype),
        stops,
        *tolerances,
        budget.count,
        key,
        merging,
    )
    return problem, initial_state(depths[0], mu.points, passive, atoms), depths


def _is_forward(depths: Float[Array, " t"]) -> bool:
    return not is_concrete(depths) or bool(depths[-1] > depths[0])
