"""One stretch of depth: from one saved depth to the next."""

from collections.abc import Callable
from typing import cast

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax
from jaxtyping import Array, Bool, Float, PyTree

from meanformer.flows.flow import Flow, field_of
from meanformer.flows.methods import Retracted
from meanformer.flows.schedule import AbstractSchedule
from meanformer.flows.solvers import AbstractIntegrator, Splitting, StepSettings
from meanformer.flows.state import Moving, State
from meanformer.flows.status import AbstractStop, Status
from meanformer.measures import TokenCloud
from meanformer.typing import Key

# States kept for the gradient of one stretch. Where there are more steps between two
# saved depths, they are computed again: 561 steps at most twice.
CHECKPOINTS = 32
OVERFLOWN = 1e10


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


def advance(problem: Problem, state: State, target: Float[Array, ""]) -> State:
    """Integrate from the state's depth to the target, unless it has stopped already."""
    running = state.status == Status.reached
    end = jnp.where(running, target, state.depth)
    solution = _diffeqsolve(problem, state, end)
    points, probes = jax.tree.map(lambda leaf: leaf[-1], solution.ys)
    moved = State(
        cast(Array, solution.ts)[-1],
        points,
        probes,
        _status(problem, solution),
        state.accepted_steps + solution.stats["num_accepted_steps"],
        state.rejected_steps + solution.stats["num_rejected_steps"],
        state.stretch + 1,
    )
    kept = eqx.tree_at(lambda s: s.status, state, Status.not_finite)
    moved = _choose(moved.is_finite() & jnp.isfinite(moved.depth), moved, kept)
    return _choose(running, moved, state)


def _diffeqsolve(problem: Problem, state: State, end: Float[Array, ""]):
    flow, integrator = problem.flow, problem.integrator
    method = integrator.method_for(flow.noise is not None)
    settings = StepSettings(
        problem.rtol,
        problem.atol,
        _smallest_step(state.depth, end),
        problem.error_norm,
        flow.velocity.jumps,
    )
    return diffrax.diffeqsolve(
        _terms(problem, state, end),
        Retracted(method, flow.space),
        state.depth,
        end,
        integrator.first_step(state.depth, end),
        state.moving,
        stepsize_controller=integrator.controller(settings),
        event=diffrax.Event([_event(problem, stop) for stop in problem.stops]),
        max_steps=problem.max_steps,
        adjoint=diffrax.RecursiveCheckpointAdjoint(checkpoints=CHECKPOINTS),
        throw=False,
    )


def _terms(problem: Problem, state: State, end: Float[Array, ""]):
    def term(schedule: AbstractSchedule) -> diffrax.ODETerm:
        def field(depth, moving, args):
            inside = _just_inside(depth, state.depth, end)
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
    """Return independent Brownian motions, numbered by the stretch of depth."""
    moving = jax.eval_shape(lambda: state.moving)
    step = cast(Array, problem.integrator.first_step(state.depth, end))
    path = diffrax.VirtualBrownianTree(
        state.depth,
        end,
        tol=jnp.abs(step) / 4,
        shape=moving,
        key=jr.fold_in(problem.key, state.stretch),
    )

    def diffusion(depth, points, args):
        def push(increment):
            strength = jnp.asarray(problem.flow.noise, state.points.dtype)
            project = problem.flow.space.project
            return jax.tree.map(
                lambda x, dw: strength * project(x, dw), points, increment
            )

        return lineax.FunctionLinearOperator(push, moving)

    return diffrax.ControlTerm(diffusion, path)


def _just_inside(
    depth: Float[Array, ""], start: Float[Array, ""], end: Float[Array, ""]
) -> Float[Array, ""]:
    """Return the depth, moved off the upper end of the stretch.

    A schedule that jumps there belongs to the next stretch already.
    """
    low, high = jnp.minimum(start, end), jnp.maximum(start, end)
    return jnp.minimum(depth, jnp.maximum(jnp.nextafter(high, low), low))


def _event(problem: Problem, stop: AbstractStop) -> Callable:
    def condition(t, y, args, **kwargs):
        cloud = problem.cloud.moved(y[0])
        return stop(t, cloud, lambda: problem.velocity(problem.flow.velocity, t, y)[0])

    return condition


def _smallest_step(start: Float[Array, ""], end: Float[Array, ""]) -> Float[Array, ""]:
    largest = jnp.maximum(jnp.abs(start), jnp.abs(end))
    return 16 * jnp.finfo(largest.dtype).eps * largest


def _status(problem: Problem, solution: diffrax.Solution) -> PyTree:
    result, results = solution.result, diffrax.RESULTS
    status = Status.where(
        result == results.successful, Status.reached, Status.solver_failed
    )
    status = Status.where(
        result == results.max_steps_reached, Status.step_budget, status
    )
    status = Status.where(
        result == results.dt_min_reached, Status.blow_up_suspected, status
    )
    for stop, fired in zip(problem.stops, solution.event_mask, strict=True):
        status = Status.where(fired, stop.status, status)
    return status


def _choose(condition: Bool[Array, ""], first: State, second: State) -> State:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), first, second)
