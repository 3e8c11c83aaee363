"""One stretch of depth: from one saved depth to the next."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax
from equinox.internal import prevbefore
from jaxtyping import Array, Bool, Float, PyTree

from meanformer.flows.bounds.rates import internal_rate, largest_rate
from meanformer.flows.dynamics.derivatives import BACKWARD, Mode
from meanformer.flows.dynamics.event_search import FirstZero
from meanformer.flows.dynamics.merging import Atoms, Gap, Merge
from meanformer.flows.dynamics.state import Moving, State, kept_if_finite
from meanformer.flows.flow import Flow, field_of
from meanformer.flows.geodesic import check_geodesic
from meanformer.flows.methods import Retracted
from meanformer.flows.schedule import AbstractSchedule
from meanformer.flows.solvers import (
    AbstractIntegrator,
    Adaptive,
    Splitting,
    StepSettings,
    Stiff,
    Switching,
)
from meanformer.flows.status import AbstractStop, Status, moment_of
from meanformer.measures import TokenCloud
from meanformer.typing import Key

OVERFLOWN = 1e10
# Places on a path of noise, in steps, that differ by rounding only.
ALIKE = 1e-3


class Problem(eqx.Module):
    """Everything that stays the same along depth."""

    flow: Flow
    cloud: TokenCloud
    probe_positions: Float[Array, " p"] | None
    integrator: AbstractIntegrator
    stops: tuple[AbstractStop, ...]
    rtol: float | Float[Array, ""]
    atol: float | Float[Array, ""]
    max_steps: int = eqx.field(static=True)
    key: Key | None = None
    merge: Merge | None = None

    def velocity(
        self, schedule: AbstractSchedule, depth: Float[Array, ""], moving: Moving
    ) -> Moving:
        """Return the velocity of tokens and probes in the tokens' measure."""
        points, probes = moving
        cloud = self.cloud.moved(points)
        queries, places = points, cloud.positions
        if probes is not None:
            queries = jnp.concatenate([points, probes])
            if places is not None:
                places = jnp.concatenate([places, self.probe_positions])
        field = field_of(schedule, self.flow.space, depth, cloud, queries, places)
        return field[: len(points)], None if probes is None else field[len(points) :]

    @property
    def gap(self) -> Gap:
        """The gap that a solve with `merge` watches."""
        return Gap(cast(Merge, self.merge), self.flow.space)

    def seen_at(self, state: State) -> "Problem":
        """Return the same with the masses that the atoms of a state have."""
        weights = cast(Atoms, state.atoms).weights(self.cloud)
        return eqx.tree_at(lambda p: p.cloud.weights, self, weights)

    def error_norm(self, errors: Moving) -> Float[Array, ""]:
        """Return the largest error, leaving out tokens of weight zero.

        A step that overflows counts as a very bad one, so that it is tried again
        smaller; with NaN as its error it would not be.
        """
        points, probes = errors
        absent = (self.cloud.weights == 0)[:, None]
        largest = jnp.max(jnp.where(absent, 0, jnp.abs(points)))
        if probes is not None and probes.size > 0:
            largest = jnp.maximum(largest, jnp.max(jnp.abs(probes)))
        return jnp.where(jnp.isfinite(largest), largest, OVERFLOWN)


def integrate(
    problem: Problem, state: State, target: Float[Array, ""], mode: Mode = BACKWARD
) -> State:
    """Integrate from the state's depth to the target, unless it has stopped already.

    With `merge` it ends at the next meeting of two tokens, if that comes first.
    """
    if isinstance(problem.integrator, Switching):
        return _switching(problem, problem.integrator, state, target, mode)
    running = state.status == Status.reached
    end = jnp.where(running, target, state.depth)
    solution = _diffeqsolve(problem, state, end, mode)
    saved, depths, atoms = _results(problem, state, solution)
    points, probes = jax.tree.map(lambda leaf: leaf[-1], saved)
    moved = State(
        depths[-1],
        points,
        probes,
        _status(problem, solution, depths[-1] == end),
        state.accepted_steps + solution.stats["num_accepted_steps"],
        state.rejected_steps + solution.stats["num_rejected_steps"],
        state.stretch + 1,
        atoms,
    )
    return kept_if_finite(moved, state, running)


def _switching(
    problem: Problem,
    integrator: Switching,
    state: State,
    target: Float[Array, ""],
    mode: Mode,
) -> State:
    """Integrate by explicit steps; by implicit ones from where those were too many."""
    explicit = dataclasses.replace(
        problem,
        integrator=Adaptive(integrator.method),
        max_steps=min(integrator.budget, problem.max_steps),
    )
    stiff = dataclasses.replace(problem, integrator=Stiff(integrator.stiff))

    def go_on(reached: State) -> State:
        going = eqx.tree_at(lambda s: s.status, reached, Status.reached)
        end = integrate(stiff, going, target, mode)
        return eqx.tree_at(lambda s: s.stretch, end, reached.stretch)

    moved = integrate(explicit, state, target, mode)
    ran_out = (moved.status == Status.step_budget) & (state.status == Status.reached)
    return jax.lax.cond(ran_out, go_on, lambda reached: reached, moved)


def _diffeqsolve(problem: Problem, state: State, end: Float[Array, ""], mode: Mode):
    flow, integrator = problem.flow, problem.integrator
    method = mode.method(integrator.method_for(flow.noise is not None))
    check_geodesic(method, flow.space, flow.noise is not None)
    settings = StepSettings(
        problem.rtol,
        problem.atol,
        _smallest_step(state.depth, end),
        problem.error_norm,
        flow.velocity.jumps,
    )
    return diffrax.diffeqsolve(
        _terms(problem, state, end),
        Retracted(method, lambda y: jax.tree.map(flow.space.retract, y)),
        state.depth,
        end,
        integrator.first_step(state.depth, end),
        state.moving,
        max_steps=problem.max_steps,
        adjoint=mode.adjoint,
        throw=False,
        **_options(problem, state, end, settings),
    )


def _options(
    problem: Problem, state: State, end: Float[Array, ""], settings: StepSettings
) -> dict[str, Any]:
    """Return what differs between a solve that merges and one that does not."""
    controller = problem.integrator.controller(settings)
    forward = direction(state.depth, end)
    stops = [_event(problem, stop, forward) for stop in problem.stops]
    if problem.merge is None:
        return {
            "stepsize_controller": controller,
            "event": diffrax.Event(stops),
        }
    gap = problem.gap

    def meeting(t, y, args, **kwargs):
        return gap.log_excess(problem.cloud.moved(y[0]))

    return {
        "stepsize_controller": problem.integrator.watching_gaps(
            controller, settings, lambda y: problem.cloud.moved(y[0])
        ),
        # The meeting comes first: a stop that fires in the same step can wait for it.
        "event": diffrax.Event([meeting, *stops], FirstZero()),
        "saveat": saved_steps(state, lambda t, y, args: y[0]),
    }


def saved_steps(state: State, points_of: Callable) -> diffrax.SaveAt:
    """Ask for the end of a solve, and for its steps where a bound is carried along."""
    end = diffrax.SubSaveAt(t1=True)
    if cast(Atoms, state.atoms).log_bound is None:
        return diffrax.SaveAt(subs=[end])
    path = diffrax.SubSaveAt(t0=True, steps=True, fn=points_of)
    return diffrax.SaveAt(subs=[end, path])


def grown(
    atoms: Atoms, solution: diffrax.Solution, rate: Callable[[Array, Array], Array]
) -> Atoms:
    """Return the atoms with their error carried along a solve, by a trapezoidal sum.

    Args:
        atoms: the atoms at its start.
        solution: what came of `saved_steps`.
        rate: the rate of growth at a time and points, of atoms and inside of them.
    """
    if atoms.log_bound is None:
        return atoms
    times, paths = cast(Any, solution.ts)[1], cast(Any, solution.ys)[1]

    def add(index, carry):
        total, before = carry
        now = rate(times[index], paths[index])
        width = times[index] - times[jnp.maximum(index - 1, 0)]
        return total + width * (before + now) / 2, now

    zero = jnp.zeros((), paths.dtype)
    # Before the first join there is no error to carry, and no rate is computed.
    count = jnp.where(atoms.jumps > 0, jnp.sum(jnp.isfinite(times)), 0)
    growth, _ = jax.lax.fori_loop(0, count, add, (zero, zero))
    return eqx.tree_at(lambda a: a.log_bound, atoms, atoms.log_bound + growth)


def _results(problem: Problem, state: State, solution: diffrax.Solution):
    """Return what was saved of tokens and probes, the depths, and the atoms there."""
    saved, depths = cast(Any, solution.ys), cast(Any, solution.ts)
    if problem.merge is None:
        return saved, depths, None

    flow, atoms = problem.flow, cast(Atoms, state.atoms)

    def rate(depth, points):
        cloud = problem.cloud.moved(points)

        def own_field(tokens):
            return flow.field(depth, cloud.moved(tokens), tokens)

        def field(queries):
            return flow.field(depth, cloud, queries)

        return jnp.maximum(
            largest_rate(own_field, cloud, flow.space),
            internal_rate(field, points, atoms.are_several(), flow.space),
        )

    return saved[0], depths[0], grown(atoms, solution, rate)


def _terms(problem: Problem, state: State, end: Float[Array, ""]):
    def term(schedule: AbstractSchedule) -> diffrax.ODETerm:
        def field(depth, moving, args):
            inside = just_inside(depth, state.depth, end)
            return problem.velocity(schedule, inside, moving)

        return diffrax.ODETerm(field)

    schedule = problem.flow.velocity
    if isinstance(problem.integrator, Splitting):
        return diffrax.MultiTerm(*[term(part) for part in schedule.terms()])
    if problem.flow.noise is None:
        return term(schedule)
    return diffrax.MultiTerm(term(schedule), _noise_term(problem, state, end))


def _noise_term(
    problem: Problem, state: State, end: Float[Array, ""]
) -> diffrax.ControlTerm:
    """Return independent Brownian motions, numbered by the stretch of depth.

    They are paths over the number of steps, scaled to the step: a depth that is off by
    rounding sees the same path, and a longer stretch the same one, stretched.
    """
    moving = jax.eval_shape(lambda: state.moving)
    step = cast(Array, problem.integrator.first_step(state.depth, end))
    step = eqx.error_if(step, step < 0, "a flow with noise must be run forward.")
    start, size = jax.lax.stop_gradient((state.depth, step))
    count = jnp.maximum(jnp.round((jax.lax.stop_gradient(end) - start) / size), 1)
    path = diffrax.VirtualBrownianTree(
        jnp.zeros_like(count),
        count,
        tol=0.25,
        shape=moving,
        key=jr.fold_in(problem.key, state.stretch),
    )

    def place(depth):
        passed = (jax.lax.stop_gradient(depth) - start) / size
        whole = jnp.round(passed)
        passed = jnp.where(jnp.abs(passed - whole) < ALIKE, whole, passed)
        return jnp.clip(passed, 0, count)

    def increment(before, after):
        drawn = path.evaluate(place(before), place(after))
        return jax.tree.map(lambda dw: jnp.sqrt(step) * dw, drawn)

    def diffusion(depth, points, args):
        def push(increment):
            strength = jnp.asarray(problem.flow.noise, state.points.dtype)
            project = problem.flow.space.project
            return jax.tree.map(
                lambda x, dw: strength * project(x, dw), points, increment
            )

        return lineax.FunctionLinearOperator(push, moving)

    return diffrax.ControlTerm(diffusion, increment)


def just_inside(
    depth: Float[Array, ""], start: Float[Array, ""], end: Float[Array, ""]
) -> Float[Array, ""]:
    """Return the depth, moved off the upper end of the stretch.

    A schedule that jumps there belongs to the next stretch already.
    """
    low, high = jnp.minimum(start, end), jnp.maximum(start, end)
    inside = jnp.minimum(depth, jnp.maximum(prevbefore(high), low))
    # The derivative is that of the depth itself, also where depths are differentiated.
    return depth + jax.lax.stop_gradient(inside - depth)


def direction(start: Float[Array, ""], end: Float[Array, ""]) -> Float[Array, ""]:
    """Return the sign by which an event's time is to be multiplied to be the depth.

    Diffrax runs backward solves in negated time, and shows it to events.
    """
    return jnp.where(start < end, 1, -1).astype(start.dtype)


def _event(problem: Problem, stop: AbstractStop, forward: Float[Array, ""]) -> Callable:
    def condition(t, y, args, **kwargs):
        # Root finders call it with t by name.
        depth = forward * t
        cloud = problem.cloud.moved(y[0])
        schedule = problem.flow.velocity
        return stop(
            moment_of(depth, cloud, lambda: problem.velocity(schedule, depth, y)[0])
        )

    return condition


def _smallest_step(start: Float[Array, ""], end: Float[Array, ""]) -> Float[Array, ""]:
    largest = jnp.maximum(jnp.abs(start), jnp.abs(end))
    return 16 * jnp.finfo(largest.dtype).eps * largest


def _status(
    problem: Problem, solution: diffrax.Solution, has_arrived: Bool[Array, ""]
) -> PyTree:
    result, results = solution.result, diffrax.RESULTS
    # A last step that only makes up for rounding is smaller than the smallest.
    made_up = has_arrived & (result == results.dt_min_reached)
    status = Status.where(
        (result == results.successful) | made_up, Status.reached, Status.solver_failed
    )
    status = Status.where(
        result == results.max_steps_reached, Status.step_budget, status
    )
    status = Status.where(
        (result == results.dt_min_reached) & ~has_arrived,
        Status.blow_up_suspected,
        status,
    )
    fired = cast(Any, solution.event_mask)
    if problem.merge is not None:
        met, *fired = fired
        located = result == results.event_occurred
        status = Status.where(met & located, Status.reached, status)
    for stop, is_met in zip(problem.stops, fired, strict=True):
        status = Status.where(is_met, stop.status, status)
    return status
