"""One stretch of depth: from one saved depth to the next, by one call of diffrax."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from equinox.internal import prevbefore
from jaxtyping import Array, Bool, Float, PyTree

from meanformer.flows.dynamics.derivatives import (
    BACKWARD,
    Mode,
    in_both_modes,
    without_derivative,
)
from meanformer.flows.dynamics.driver import AbstractDynamics, State, kept_if_finite
from meanformer.flows.dynamics.event_search import FirstZero
from meanformer.flows.inputs import Settings
from meanformer.flows.solvers import (
    AbstractIntegrator,
    Adaptive,
    LongDepth,
    StepSettings,
    Stiff,
    Switching,
)
from meanformer.flows.status import Condition, Status
from meanformer.numerics.arrays import cast

OVERFLOWN = 1e10

NO_DERIVATIVE = (
    "LongDepth() has no derivative: it locates the end of a stretch in its clock; use "
    "Adaptive() to differentiate."
)


class Stretch(NamedTuple):
    """A problem for diffrax: what to integrate, with depth as time or in a clock.

    Attributes:
        terms: the equation.
        method: the single step.
        times: where the solver's time begins and ends.
        first_step: the first step in it; `None` leaves it to the controller.
        start: the unknown at the start.
        controller: what chooses the steps.
        events: conditions on time and unknown that end it, each with the status to end
            with; `None` for a condition that is located, after which all goes on.
        read: takes time and unknown at the end, and which events were met; returns
            depth and what moves there.
        stuck: the status where no step is small enough.
        path: takes the unknown, returns what to keep of every step; or `None`.
        record: takes the unknown at the end, and times and values along the path if it
            was kept; returns the record of the new state.
    """

    terms: Any
    method: diffrax.AbstractSolver
    times: tuple[Float[Array, ""], Float[Array, ""]]
    first_step: Float[Array, ""] | None
    start: PyTree
    controller: diffrax.AbstractStepSizeController
    events: Sequence[Condition]
    read: Callable[..., tuple[Float[Array, ""], PyTree]]
    stuck: PyTree = Status.blow_up_suspected
    path: Callable[[Any], PyTree] | None = None
    record: Callable[..., PyTree] | None = None


class AbstractIntegrated(AbstractDynamics):
    """Base class of dynamics that diffrax integrates, a stretch of depth at a time.

    Attributes:
        settings: steps, tolerances, and conditions that end it.
    """

    settings: eqx.AbstractVar[Settings]

    @abc.abstractmethod
    def stretch(self, state: State, end: Float[Array, ""], mode: Mode) -> Stretch:
        """Return what to integrate from a state to a depth; see `in_depth`."""

    def advance(self, state: State, target: Float[Array, ""]) -> State:
        """Integrate; differentiable in all ways, but for `LongDepth()`."""
        if isinstance(self.settings.integrator, LongDepth):
            return in_wide(integrate, NO_DERIVATIVE, self, state, target)
        return in_both_modes(integrate, self, state, target)


def in_depth(
    state: State,
    end: Float[Array, ""],
    terms: Any,
    settings: Settings,
    mode: Mode,
    conditions: Sequence[Condition] = (),
    *,
    method: diffrax.AbstractSolver | None = None,
    controller: diffrax.AbstractStepSizeController | None = None,
) -> Stretch:
    """Return a stretch with depth as time.

    Args:
        state: where it begins.
        end: the depth where it ends.
        terms: the equation for what moves; see `term`.
        settings: those of the solve.
        mode: how the steps are to be differentiated.
        conditions: what ends it early.
        method: the single step; that of the integrator by default.
        controller: what chooses the steps; by default the integrator's, which keeps the
            largest error of a number below the tolerances.
    """
    integrator = settings.integrator
    if method is None:
        method = mode.method(integrator.method_for(False))
    if controller is None:
        tolerances = (settings.rtol, settings.atol, jnp.zeros_like(end))
        steps = StepSettings(*tolerances, largest_error, None)
        controller = integrator.controller(steps)
    # Diffrax runs backward solves in negated time, and shows it to events.
    forward = jnp.where(state.depth < end, 1, -1).astype(end.dtype)
    return Stretch(
        terms,
        method,
        (state.depth, end),
        integrator.first_step(state.depth, end),
        state.moving,
        controller,
        as_events(conditions, lambda t, y: (forward * t, y)),
        lambda time, last, met: (time, last),
    )


def in_clock(
    field: Callable,
    start: Any,
    first_step: float,
    method: diffrax.AbstractSolver,
    controller: diffrax.AbstractStepSizeController,
    conditions: Sequence[Condition],
    view: Callable,
    read: Callable,
) -> Stretch:
    """Return a stretch in a clock that never ends, with depth among the unknowns.

    Args:
        field: takes the clock and the unknown, returns its change.
        start: the unknown at the start.
        first_step: the first step of the clock.
        method: the single step.
        controller: what chooses the steps.
        conditions: what ends it, the target or a meeting first.
        view: takes the unknown, returns what the conditions look at.
        read: takes the unknown at the end and which conditions were met; returns depth
            and what moves there.
    """
    zero = jnp.zeros((), jax.tree.leaves(start)[0].dtype)
    return Stretch(
        diffrax.ODETerm(lambda s, y, args: field(s, y)),
        method,
        (zero, zero + jnp.inf),
        zero + first_step,
        start,
        controller,
        as_events(conditions, lambda s, y: view(y)),
        lambda time, last, met: read(last, met),
        Status.step_budget,
    )


def term(field: Callable, state: State, end: Float[Array, ""]) -> diffrax.ODETerm:
    """Return a function of depth and what moves as a term of diffrax.

    At the upper end of the stretch a schedule that jumps belongs to the next one
    already: there the depth just before is taken.
    """
    low, high = jnp.minimum(state.depth, end), jnp.maximum(state.depth, end)

    def just_inside(depth: Float[Array, ""]) -> Float[Array, ""]:
        inside = jnp.minimum(depth, jnp.maximum(prevbefore(high), low))
        # The derivative is that of the depth itself, also where it is looked for.
        return depth + jax.lax.stop_gradient(inside - depth)

    return diffrax.ODETerm(lambda t, y, args: field(just_inside(t), y))


def as_events(conditions: Sequence[Condition], view: Callable) -> list[Condition]:
    """Return conditions on depth and what moves as events of a solver.

    Args:
        conditions: the conditions.
        view: takes the solver's time and unknown, returns depth and what moves.
    """

    def event(holds: Callable) -> Callable:
        # Root finders call it with t by name.
        return lambda t, y, args, **kwargs: holds(*view(t, y))

    return [(event(holds), status) for holds, status in conditions]


def integrate(
    dynamics: Any, state: State, target: Float[Array, ""], mode: Mode = BACKWARD
) -> State:
    """Integrate from the state's depth to the target, unless it has stopped already.

    Args:
        dynamics: has `settings` and a `stretch`.
        state: where to begin.
        target: where to end.
        mode: how it can be differentiated.
    """
    if isinstance(dynamics.settings.integrator, Switching):
        return _switching(dynamics, state, target, mode)
    running = state.is_running
    end = jnp.where(running, target, state.depth)
    stretch = dynamics.stretch(state, end, mode)
    moved = run_stretch(stretch, state, dynamics.settings.max_steps, mode)
    return kept_if_finite(moved, state, running)


def _switching(
    dynamics: Any, state: State, target: Float[Array, ""], mode: Mode
) -> State:
    """Integrate by explicit steps; by implicit ones from where those were too many."""
    settings = dynamics.settings
    switching = settings.integrator

    def by(integrator: AbstractIntegrator, max_steps: int) -> Any:
        own = dataclasses.replace(settings, integrator=integrator, max_steps=max_steps)
        return dataclasses.replace(dynamics, settings=own)

    budget = min(switching.budget, settings.max_steps)
    explicit = by(Adaptive(switching.method), budget)
    stiff = by(Stiff(switching.stiff), settings.max_steps)

    def go_on(reached: State) -> State:
        going = eqx.tree_at(lambda s: s.status, reached, Status.reached)
        end = integrate(stiff, going, target, mode)
        return eqx.tree_at(lambda s: s.stretch, end, reached.stretch)

    moved = integrate(explicit, state, target, mode)
    ran_out = (moved.status == Status.step_budget) & state.is_running
    return jax.lax.cond(ran_out, go_on, lambda reached: reached, moved)


def run_stretch(
    stretch: Stretch, state: State, max_steps: int, mode: Mode = BACKWARD
) -> State:
    """Integrate a stretch by diffrax; return the state at its end.

    Args:
        stretch: what to integrate.
        state: where it begins.
        max_steps: most steps.
        mode: how it can be differentiated.
    """
    conditions = [holds for holds, _ in stretch.events]
    is_located = any(status is None for _, status in stretch.events)
    event = diffrax.Event(conditions, FirstZero() if is_located else None)
    last = diffrax.SubSaveAt(t1=True)
    subs = [last]
    if stretch.path is not None:
        path = stretch.path
        kept = diffrax.SubSaveAt(t0=True, steps=True, fn=lambda t, y, args: path(y))
        subs = [last, kept]
    solution: Any = diffrax.diffeqsolve(
        stretch.terms,
        stretch.method,
        *stretch.times,
        stretch.first_step,
        stretch.start,
        stepsize_controller=stretch.controller,
        event=event if conditions else None,
        saveat=diffrax.SaveAt(subs=subs),
        max_steps=max_steps,
        adjoint=mode.adjoint,
        throw=False,
    )
    (times, *kept_times), (values, *kept_values) = solution.ts, solution.ys
    time, last = times[-1], jax.tree.map(lambda leaf: leaf[-1], values)
    depth, moving = stretch.read(time, last, solution.event_mask)
    record = state.record
    if stretch.record is not None:
        record = stretch.record(last, *kept_times, *kept_values)
    return State(
        depth,
        moving,
        _status(stretch, solution, time == stretch.times[1]),
        state.accepted_steps + solution.stats["num_accepted_steps"],
        state.rejected_steps + solution.stats["num_rejected_steps"],
        state.stretch + 1,
        record,
    )


def _status(stretch: Stretch, solution: Any, has_arrived: Bool[Array, ""]) -> PyTree:
    result, results = solution.result, diffrax.RESULTS
    is_stuck = result == results.dt_min_reached
    # A last step that only makes up for rounding is smaller than the smallest.
    is_well = (result == results.successful) | (is_stuck & has_arrived)
    status = Status.where(is_well, Status.reached, Status.solver_failed)
    ran_out = result == results.max_steps_reached
    status = Status.where(ran_out, Status.step_budget, status)
    status = Status.where(is_stuck & ~has_arrived, stretch.stuck, status)
    for (_, ending), is_met in zip(
        stretch.events, solution.event_mask or (), strict=True
    ):
        if ending is None:
            is_met &= result == results.event_occurred
            ending = Status.reached
        status = Status.where(is_met, ending, status)
    return status


def in_wide(
    step: Callable, reason: str, dynamics: Any, state: State, target: Float[Array, ""]
) -> State:
    """Return `step(dynamics, state, target)`, computed in the widest type there is.

    Diffrax locates events in that type, whatever what moves is. There is no derivative.

    Args:
        step: goes to the target.
        reason: why there is no derivative, the error where one is asked for.
        dynamics: what moves.
        state: where it is.
        target: where to go.
    """
    given = without_derivative((dynamics, state, target), reason)
    moved = cast(step(*cast(given, jnp.result_type(float))), state.depth.dtype)
    # What is finite in the wide type may not be in that of the state.
    return kept_if_finite(moved, state, state.is_running)


def largest_error(errors: PyTree) -> Float[Array, ""]:
    """Return the largest error of a step; an overflow counts as a very bad one.

    With NaN as its error a step would not be tried again smaller.
    """
    leaves = [jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(errors)]
    largest = jnp.max(jnp.stack(leaves))
    return jnp.where(jnp.isfinite(largest), largest, OVERFLOWN)
