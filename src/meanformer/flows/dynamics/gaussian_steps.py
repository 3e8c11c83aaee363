"""One stretch of depth for a Gaussian: in depth itself, or in a clock of its own."""

from collections.abc import Callable
from typing import Any, NamedTuple
from typing import cast as typed

import diffrax
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from meanformer.flows.dynamics.derivatives import (
    BACKWARD,
    Mode,
    in_both_modes,
    without_derivative,
)
from meanformer.flows.dynamics.event_search import FirstZero
from meanformer.flows.dynamics.gaussian_state import (
    Carried,
    GaussianProblem,
    GaussianState,
)
from meanformer.flows.dynamics.state import kept_if_finite
from meanformer.flows.dynamics.tokens import (
    OVERFLOWN,
    direction,
    just_inside,
)
from meanformer.flows.schedule import AbstractSchedule
from meanformer.flows.solvers import (
    AbstractAdaptive,
    LongDepth,
    RescaledErrors,
    Splitting,
    StepSettings,
)
from meanformer.flows.status import AbstractStop, Moment, Status
from meanformer.numerics.matrices import matmul
from meanformer.numerics.precision import cast

NO_DERIVATIVE = (
    "LongDepth() has no derivative: it locates the end of a stretch in its clock; use "
    "Adaptive() to differentiate."
)
ROUNDINGS = 64
# Roundings of the error that a method of high order estimates.
ESTIMATE = 1024
# Share of the tolerance; where less of the depth is left to a blow-up, it is reached.
RESOLVED = 1e-3
FIRST_STEP = 0.01
# Largest relative change of a point in one step: before a pole it is larger.
FARTHEST = 1.0


class Clocked(NamedTuple):
    """What is integrated in a clock: the Gaussian, and its depth."""

    carried: Carried
    depth: Float[Array, ""]


def advance_gaussian(
    problem: GaussianProblem, state: GaussianState, target: Float[Array, ""]
) -> GaussianState:
    """Integrate from the state's depth to the target, unless it has stopped already."""
    if isinstance(problem.integrator, LongDepth):
        return _advance(problem, state, target, BACKWARD)
    return in_both_modes(_advance, problem, state, target)


def _advance(
    problem: GaussianProblem, state: GaussianState, target: Float[Array, ""], mode: Mode
) -> GaussianState:
    running = state.status == Status.reached
    end = jnp.where(running, target, state.depth)
    if isinstance(problem.integrator, LongDepth):
        # Diffrax mixes no other type with the default one in its events.
        wide = jnp.result_type(float)
        told = without_derivative((problem, state, end), NO_DERIVATIVE)
        solution, last = _in_clock(*cast(told, wide))
        located = solution.event_mask[0]
        depth = jnp.where(located, end, last.depth.astype(end.dtype))
        fired = solution.event_mask[1:]
        moved = jax.tree.map(
            lambda new, old: new.astype(old.dtype), last.carried, state.carried
        )
    else:
        solution = _in_depth(problem, state, end, mode)
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


def _in_depth(problem: GaussianProblem, state: GaussianState, end, mode: Mode) -> Any:
    """Integrate with depth as time; its adaptive steps shrink towards a blow-up."""
    integrator = problem.integrator

    def term(schedule: AbstractSchedule) -> diffrax.ODETerm:
        def field(depth, carried, args):
            inside = just_inside(depth, state.depth, end)
            return problem.velocity(schedule, inside, carried)

        return diffrax.ODETerm(field)

    schedule, forward = problem.flow.velocity, direction(state.depth, end)
    is_split = isinstance(integrator, Splitting)
    terms = [term(part) for part in (schedule.terms() if is_split else (schedule,))]
    return diffrax.diffeqsolve(
        diffrax.MultiTerm(*terms) if is_split else terms[0],
        mode.method(integrator.method_for(False)),
        state.depth,
        end,
        integrator.first_step(state.depth, end),
        state.carried,
        stepsize_controller=_controller(
            problem, schedule.jumps, lambda carried: carried
        ),
        event=diffrax.Event(_events(problem, lambda t, y: (forward * t, y))),
        max_steps=problem.max_steps,
        adjoint=mode.adjoint,
        throw=False,
    )


def _in_clock(
    problem: GaussianProblem, state: GaussianState, end: Float[Array, ""]
) -> tuple[Any, Clocked]:
    r"""Integrate in the clock $\mathrm{d}s = (|LS|/|S| + 1/T)\,\mathrm{d}t$.

    $T$ is the length of the stretch. The clock is the logarithm of depth where the
    covariance decays algebraically, and that of the depth left before a blow-up.
    """
    span = jnp.where(end == state.depth, 1, end - state.depth)
    one = jnp.ones_like(end)

    def field(s, y: Clocked, args) -> Clocked:
        slope, drift = problem.slope_and_drift(
            problem.flow.velocity, y.depth, y.carried
        )
        moving = problem.moving(slope, drift, y.carried)
        speed = problem.relative_speed(slope, drift, y.carried)
        rate = jnp.sign(span) * speed + 1 / span
        return Clocked(jax.tree.map(lambda leaf: leaf / rate, moving), 1 / rate)

    def missing(t, y: Clocked, args, **kwargs):
        share = (end - y.depth) / span
        near = jnp.abs(end - y.depth) <= ROUNDINGS * _rounding(end)
        return jnp.where(near, 0, share)

    stops = _events(problem, lambda s, y: (y.depth, y.carried))
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
        mean, linear, log_volume = carried_in(end)
        wrong_mean, wrong_linear, wrong_volume = carried_in(error)
        # In units of the largest entry, so that nothing underflows.
        size = jnp.abs(linear).max()
        linear, wrong_linear = linear / size, wrong_linear / size
        inverse = jnp.linalg.inv(linear)
        # What rounding does to the smallest eigenvalue cannot be asked for.
        condition = jnp.linalg.norm(linear) * jnp.linalg.norm(inverse)
        rounding = ROUNDINGS * jnp.finfo(linear.dtype).eps
        rtol = problem.rtol + rounding
        noise = ESTIMATE * jnp.finfo(linear.dtype).eps * condition
        relative = matmul(inverse, wrong_linear) / (rtol + noise)
        # The largest is accurate also where the smallest is lost.
        large = wrong_linear / rtol
        allowed = problem.atol + rtol * jnp.abs(mean).max()
        errors = Carried(
            wrong_mean / allowed,
            jnp.where(jnp.isfinite(relative), jnp.hypot(relative, large), large),
            wrong_volume / (rtol * (1 + jnp.abs(log_volume))),
        )
        if isinstance(end, Clocked):
            late = jnp.abs(end.depth - problem.first_depth)
            allowed = problem.rtol * late + rounding * jnp.abs(end.depth)
            errors = Clocked(errors, error.depth / allowed)
        return errors

    def is_too_far(start, end):
        """Whether points move so much that a pole may have been stepped over.

        As seen from where they are and from where they departed: each of the two
        norms may be large without need, where the map is far from normal.
        """
        before, after = carried_in(start).linear, carried_in(end).linear
        size = jnp.abs(before).max()
        before, after = before / size, after / size
        inverse, change = jnp.linalg.inv(before), after - before
        moved = jnp.minimum(
            _norm_bound(matmul(change, inverse)), _norm_bound(matmul(inverse, change))
        )
        condition = jnp.linalg.norm(before) * jnp.linalg.norm(inverse)
        rounding = ROUNDINGS * jnp.finfo(before.dtype).eps
        return moved > FARTHEST + rounding * condition

    settings = StepSettings(zero, one, zero, _largest, jumps)
    return RescaledErrors(integrator.controller(settings), rescale, is_too_far)


def _norm_bound(matrix: Float[Array, "d d"]) -> Float[Array, ""]:
    """Return a bound of the largest singular value, from sums of rows and columns."""
    rows, columns = (jnp.abs(matrix).sum(axis=axis).max() for axis in (0, 1))
    return jnp.sqrt(rows * columns)


def _largest(errors: PyTree) -> Float[Array, ""]:
    """Return the largest error; an overflow counts as a very bad one."""
    leaves = [jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(errors)]
    largest = jnp.max(jnp.stack(leaves))
    return jnp.where(jnp.isfinite(largest), largest, OVERFLOWN)


def _events(problem: GaussianProblem, view: Callable) -> list[Callable]:
    """Return what ends a solve early: the own condition first, then those asked for."""

    def blows_up(t, y, args, **kwargs):
        depth, carried = view(t, y)
        found = problem.slope_and_drift(problem.flow.velocity, depth, carried)
        speed = problem.relative_speed(*found, carried)
        # The depth that is left is of the order of one over the speed.
        rounding = ROUNDINGS * jnp.finfo(depth.dtype).eps
        resolved = jnp.maximum(rounding, RESOLVED * problem.rtol)
        gone = jnp.abs(depth - problem.first_depth)
        return speed * gone * resolved > 1

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
        drift, moving, _ = problem.velocity(problem.flow.velocity, depth, carried)
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
    blows_up, *met = typed(Any, fired)
    status = Status.where(blows_up, Status.blow_up_suspected, status)
    for stop, is_met in zip(problem.stops, met, strict=True):
        status = Status.where(is_met, stop.status, status)
    return status
