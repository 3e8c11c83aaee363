"""One stretch of depth for a density on the circle."""

from collections.abc import Callable
from typing import Any, cast

import diffrax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from meanformer.flows.dynamics.density_field import DensityProblem, DensityState
from meanformer.flows.dynamics.derivatives import Mode, in_both_modes
from meanformer.flows.dynamics.state import kept_if_finite
from meanformer.flows.dynamics.tokens import (
    OVERFLOWN,
    direction,
    just_inside,
)
from meanformer.flows.methods import Lawson
from meanformer.flows.solvers import AbstractAdaptive, StepSettings
from meanformer.flows.status import AbstractStop, Moment, Status
from meanformer.measures import FourierDensity
from meanformer.numerics.special.trigonometric import on_grid

# How far below zero a density may fall, in units of its largest value.
NEGATIVE = 1e-4


def advance_density(
    problem: DensityProblem, state: DensityState, target: Float[Array, ""]
) -> DensityState:
    """Integrate from the state's depth to the target, unless it has stopped already."""
    return in_both_modes(_advance, problem, state, target)


def _advance(
    problem: DensityProblem, state: DensityState, target: Float[Array, ""], mode: Mode
) -> DensityState:
    running = state.status == Status.reached
    end = jnp.where(running, target, state.depth)
    solution = _diffeqsolve(problem, state, end, mode)
    reached = DensityState(
        cast(Any, solution.ts)[-1],
        cast(Any, solution.ys)[-1],
        _status(problem, solution),
        state.accepted_steps + solution.stats["num_accepted_steps"],
        state.rejected_steps + solution.stats["num_rejected_steps"],
    )
    return kept_if_finite(reached, state, running)


def density_snapshot(
    problem: DensityProblem, state: DensityState
) -> tuple[DensityState, Float[Array, "k 2"]]:
    """Return the state with the rates of its moments."""
    rates = problem.rates(state.depth, state.moments)
    return state, jnp.where(jnp.isfinite(rates), rates, 0)


def _diffeqsolve(
    problem: DensityProblem, state: DensityState, end: Float[Array, ""], mode: Mode
) -> diffrax.Solution:
    method = mode.method(problem.integrator.method_for(False))
    decay = problem.decay(len(state.moments))
    # Diffusion is stiff, and known: explicit adaptive steps do without it.
    is_apart = (
        decay is not None
        and isinstance(problem.integrator, AbstractAdaptive)
        and isinstance(method, diffrax.AbstractERK)
    )
    change = problem.transport if is_apart else problem.rates

    def field(depth, moments, args):
        return change(just_inside(depth, state.depth, end), moments)

    integrator, zero = problem.integrator, jnp.zeros_like(end)
    jumps = problem.flow.velocity.jumps
    settings = StepSettings(problem.rtol, problem.atol, zero, _largest, jumps)
    forward = direction(state.depth, end)
    return diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        Lawson(method, decay) if is_apart else method,
        state.depth,
        end,
        integrator.first_step(state.depth, end),
        state.moments,
        stepsize_controller=integrator.controller(settings),
        event=diffrax.Event(_events(problem, forward)),
        max_steps=problem.max_steps,
        adjoint=mode.adjoint,
        throw=False,
    )


def _events(problem: DensityProblem, forward: Float[Array, ""]) -> list[Callable]:
    """Return what ends a stretch: too few modes, a negative density, stops."""

    def is_sharp(t, y, args, **kwargs):
        return FourierDensity(y).tail() > problem.largest_tail

    def is_negative(t, y, args, **kwargs):
        values = on_grid(y, 2 * len(y) + 2)
        return jnp.min(values) < -NEGATIVE * jnp.max(values)

    def event(stop: AbstractStop) -> Callable:
        def condition(t, y, args, **kwargs):
            return stop(_moment(problem, forward * t, y))

        return condition

    return [is_sharp, is_negative, *map(event, problem.stops)]


def _moment(
    problem: DensityProblem, depth: Float[Array, ""], moments: Float[Array, "k 2"]
) -> Moment:
    """Return what stop conditions may look at."""

    def radius() -> Float[Array, ""]:
        return jnp.ones_like(depth)

    def speed() -> Float[Array, ""]:
        rates = problem.rates(depth, moments)
        degrees = jnp.arange(1, len(moments) + 1, dtype=moments.dtype)
        return jnp.max(jnp.hypot(rates[:, 0], rates[:, 1]) / degrees)

    return Moment(depth, FourierDensity(moments), radius, speed)


def _status(problem: DensityProblem, solution: diffrax.Solution) -> PyTree:
    result, results = solution.result, diffrax.RESULTS
    status = Status.where(
        result == results.successful, Status.reached, Status.solver_failed
    )
    budget = result == results.max_steps_reached
    status = Status.where(budget, Status.step_budget, status)
    is_sharp, is_negative, *met = cast(Any, solution.event_mask)
    status = Status.where(is_negative, Status.negative, status)
    status = Status.where(is_sharp, Status.unresolved, status)
    for stop, is_met in zip(problem.stops, met, strict=True):
        status = Status.where(is_met, stop.status, status)
    return status


def _largest(errors: Float[Array, "k 2"]) -> Float[Array, ""]:
    """Return the largest error; an overflow counts as a very bad one."""
    largest = jnp.max(jnp.abs(errors))
    return jnp.where(jnp.isfinite(largest), largest, OVERFLOWN)
