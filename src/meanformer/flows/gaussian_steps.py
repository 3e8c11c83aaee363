"""One stretch of depth for a Gaussian: in depth itself, or in a clock of its own."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import diffrax
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from meanformer.flows.gaussian_state import (
    Carried,
    GaussianProblem,
    GaussianState,
)
from meanformer.flows.integrate import CHECKPOINTS, OVERFLOWN, just_inside
from meanformer.flows.locate import FirstZero
from meanformer.flows.schedule import AbstractSchedule
from meanformer.flows.solvers import (
    AbstractAdaptive,
    LongDepth,
    Rescaled,
    Splitting,
    StepSettings,
)
from meanformer.flows.state import kept_if_finite
from meanformer.flows.status import AbstractStop, Moment, Status
from meanformer.numerics.matrices import matmul

ROUNDINGS = 64
# Share of the tolerance; where less of the depth is left to a blow-up, it is reached.
RESOLVED = 1e-3
FIRST_STEP = 0.01


class Clocked(NamedTuple):
    """What is integrated in a clock: the Gaussian, and its depth."""

    carried: Carried
    depth: Float[Array, ""]


def advance_gaussian(
    problem: GaussianProblem, state: GaussianState, target: Float[Array, ""]
) -> GaussianState:
    """Integrate from the state's depth to the target, unless it has stopped already."""
    running = state.status == Status.reached
    end = jnp.where(running, target, state.depth)
    if isinstance(problem.integrator, LongDepth):
        solution, last = _in_clock(problem, state, end)
        located = solution.event_mask[0]
        depth = jnp.where(located, end, last.depth)
        moved, fired = last.carried, solution.event_mask[1:]
    else:
        solution = _in_depth(problem, state, end)
        moved = jax.tree.map(lambda leaf: leaf[-1], solution.ys)
        depth, fired, located = solution.ts[-1], solution.event_mask, jnp.array(False)
    reached = GaussianState(
        depth,
        moved,
        _status(problem, solution, located, fired),
        state.accepted_steps + solution.stats["num_accepted_steps"],
        state.rejected_steps + solution.stats["num_rejected_steps"],
    )
    return kept_if_finite(reached, state, running)


def _in_depth(problem: GaussianProblem, state: GaussianState, end) -> Any:
    """Integrate with depth as time; its adaptive steps shrink towards a blow-up."""
    integrator = problem.integrator

    def term(schedule: AbstractSchedule) -> diffrax.ODETerm:
        def field(depth, carried, args):
            inside = just_inside(depth, state.depth, end)
            return problem.velocity(schedule, inside, carried)

        return diffrax.ODETerm(field)

    schedule = problem.flow.velocity
    is_split = isinstance(integrator, Splitting)
    terms = [term(part) for part in (schedule.terms() if is_split else (schedule,))]
    return diffrax.diffeqsolve(
        diffrax.MultiTerm(*terms) if is_split else terms[0],
        integrator.method_for(False),
        state.depth,
        end,
        integrator.first_step(state.depth, end),
        state.carried,
        stepsize_controller=_controller(
            problem, schedule.jumps, lambda carried: carried
        ),
        event=diffrax.Event(_events(problem, lambda t, y: (t, y))),
        max_steps=problem.max_steps,
        adjoint=diffrax.RecursiveCheckpointAdjoint(checkpoints=CHECKPOINTS),
        throw=False,
    )


def _in_clock(
    problem: GaussianProblem, state: GaussianState, end: Float[Array, ""]
) -> tuple[Any, Clocked]:
    r"""Integrate in the clock $\mathrm{d}s = (|\Phi^{-1}L\Phi| + 1/T)\,\mathrm{d}t$.

    $T$ is the length of the stretch. The clock is the logarithm of depth where the
    covariance decays algebraically, and that of the depth left before a blow-up. It
    looks at the slope from the points of departure, where directions that have shrunk
    count as much as the others.
    """
    span = jnp.where(end == state.depth, 1, end - state.depth)

    def field(s, y: Clocked, args) -> Clocked:
        schedule = problem.flow.velocity
        moving = problem.velocity(schedule, y.depth, y.carried)
        relative = jnp.linalg.solve(y.carried.linear, moving.linear)
        rate = jnp.sign(span) * jnp.linalg.norm(relative) + 1 / span
        return Clocked(jax.tree.map(lambda leaf: leaf / rate, moving), 1 / rate)

    def missing(t, y: Clocked, args, **kwargs):
        share = (end - y.depth) / span
        near = jnp.abs(end - y.depth) <= ROUNDINGS * _rounding(end)
        return jnp.where(near, 0, share)

    stops = _events(problem, lambda s, y: (y.depth, y.carried))
    one = jnp.ones_like(end)
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        problem.integrator.method_for(False),
        0 * one,
        jnp.inf * one,
        FIRST_STEP * one,
        Clocked(state.carried, state.depth),
        stepsize_controller=_controller(problem, None, lambda y: y.carried),
        event=diffrax.Event([missing, *stops], FirstZero()),
        max_steps=problem.max_steps,
        throw=False,
    )
    return solution, jax.tree.map(lambda leaf: leaf[-1], solution.ys)


def _controller(
    problem: GaussianProblem, jumps: Array | None, carried_in: Callable
) -> diffrax.AbstractStepSizeController:
    r"""Return a controller that keeps every eigenvalue accurate relatively.

    An error $E$ of $\Phi$ is a perturbation $\Phi(I + \Phi^{-1}E)$, as if the flow had
    begun with other points. If they differ by the factor $I + \delta$ it changes every
    eigenvalue of $S$, however small, by at most the factor $(1 \pm |\delta|)^2$
    (Ostrowski). The mean is measured against its size.
    """
    integrator = problem.integrator
    zero, one = jnp.zeros_like(problem.rtol), jnp.ones_like(problem.rtol)
    if not isinstance(integrator, AbstractAdaptive):
        return integrator.controller(StepSettings(zero, one, zero, None, None))

    def rescale(end, error):
        mean, linear = carried_in(end)
        wrong_mean, wrong_linear = carried_in(error)
        inverse = jnp.linalg.inv(linear)
        relative = matmul(inverse, wrong_linear)
        # What rounding does to the smallest eigenvalue cannot be asked for.
        condition = jnp.linalg.norm(linear) * jnp.linalg.norm(inverse)
        rounding = ROUNDINGS * jnp.finfo(linear.dtype).eps
        rtol = problem.rtol + rounding * condition
        allowed = problem.atol + (problem.rtol + rounding) * jnp.abs(mean).max()
        errors = Carried(wrong_mean / allowed, relative / rtol)
        if isinstance(end, Clocked):
            late = error.depth / (problem.rtol * jnp.abs(end.depth))
            errors = Clocked(errors, late)
        return errors

    settings = StepSettings(zero, one, zero, _largest, jumps)
    return Rescaled(integrator.controller(settings), rescale)


def _largest(errors: PyTree) -> Float[Array, ""]:
    """Return the largest error; an overflow counts as a very bad one."""
    leaves = [jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(errors)]
    largest = jnp.max(jnp.stack(leaves))
    return jnp.where(jnp.isfinite(largest), largest, OVERFLOWN)


def _events(problem: GaussianProblem, view: Callable) -> list[Callable]:
    """Return what ends a solve early: the own condition first, then those asked for."""

    def blows_up(t, y, args, **kwargs):
        depth, carried = view(t, y)
        slope, _ = problem.slope_and_drift(problem.flow.velocity, depth, carried)
        # The depth that is left is of the order of one over the slope.
        rounding = ROUNDINGS * jnp.finfo(depth.dtype).eps
        resolved = jnp.maximum(rounding, RESOLVED * problem.rtol)
        return jnp.linalg.norm(slope) * jnp.abs(depth) * resolved > 1

    def event(stop: AbstractStop) -> Callable:
        def condition(t, y, args, **kwargs):
            return stop(gaussian_moment(problem, *view(t, y)))

        return condition

    return [blows_up, *map(event, problem.stops)]


def gaussian_moment(
    problem: GaussianProblem, depth: Float[Array, ""], carried: Carried
) -> Moment:
    """Return what stop conditions may look at."""
    mu = problem.gaussian(carried)

    def radius() -> Float[Array, ""]:
        return jnp.sqrt(jnp.sum(mu.mean() ** 2) + jnp.trace(mu.covariance()))

    def speed() -> Float[Array, ""]:
        drift, moving = problem.velocity(problem.flow.velocity, depth, carried)
        spread = matmul(moving, problem.root)
        return jnp.sqrt(jnp.sum(drift**2) + jnp.sum(spread**2))

    return Moment(depth, mu, radius, speed)


def _rounding(depth: Float[Array, ""]) -> Float[Array, ""]:
    return jnp.finfo(depth.dtype).eps * jnp.abs(depth)


def _status(
    problem: GaussianProblem, solution: Any, located: Bool[Array, ""], fired: Any
) -> PyTree:
    result, results = solution.result, diffrax.RESULTS
    successful = (result == results.successful) | located
    status = Status.where(successful, Status.reached, Status.solver_failed)
    budget = result == results.max_steps_reached
    status = Status.where(budget, Status.step_budget, status)
    blows_up, *met = cast(Any, fired)
    status = Status.where(blows_up, Status.blow_up_suspected, status)
    for stop, is_met in zip(problem.stops, met, strict=True):
        status = Status.where(is_met, stop.status, status)
    return status
