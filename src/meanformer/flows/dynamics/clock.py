"""A phase of exponentially long depth, walked in the tokens' own clock."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from meanformer.attention.log_domain import (
    ScaledVelocity,
    check_resting,
    scaled_field,
    scaled_velocity,
)
from meanformer.errors import Unsupported
from meanformer.flows.bounds.rates import internal_rate, largest_rate
from meanformer.flows.dynamics.event_search import FirstZero
from meanformer.flows.dynamics.merging import Atoms
from meanformer.flows.dynamics.state import State, choose, kept_if_finite
from meanformer.flows.dynamics.tokens import (
    OVERFLOWN,
    Problem,
    grown,
    saved_steps,
)
from meanformer.flows.flow import Flow
from meanformer.flows.methods import Retracted
from meanformer.flows.schedule import Constant
from meanformer.flows.solvers import ROUNDINGS, RescaledErrors, StepSettings, gap_error
from meanformer.flows.status import AbstractStop, Status, moment_of
from meanformer.geometry import Sphere
from meanformer.measures import TokenCloud

POWER = 4
FIRST_STEP = 0.02
SMALLEST_STEP = 1e-12


class Walk(NamedTuple):
    """What a phase integrates: tokens, logarithm of depth in its unit, arc length."""

    points: Float[Array, "n d"]
    log_depth: Float[Array, ""]
    arc_length: Float[Array, ""]


class Pace(NamedTuple):
    """Velocities per unit of the clock, and the clock's rate in depth."""

    velocities: Float[Array, "n d"]
    log_rate: Float[Array, ""]
    rests: Bool[Array, ""]


class Phase(eqx.Module):
    r"""One phase: a flow with fixed atoms, from one depth on.

    Depth is $t = t_0 + \Lambda_0^{-1}(e^u - 1)$ with the rate $\Lambda_0$ of the clock
    at the start, so that $u$ and $\Lambda/\Lambda_0$ are numbers of ordinary size.
    """

    flow: Flow
    cloud: TokenCloud
    counts: Float[Array, " n"]
    are_several: Bool[Array, " n"]
    start: Float[Array, ""]
    target: Float[Array, ""]
    log_unit: Float[Array, ""]

    def pulls(self, points: Float[Array, "n d"]) -> ScaledVelocity:
        """Return the velocities with their scale."""
        schedule = cast(Constant, self.flow.velocity)
        unit = self.flow.space.retract(points)
        return scaled_velocity(schedule.gamma, unit, self.cloud.weights)

    def pace(self, points: Float[Array, "n d"]) -> Pace:
        """Return the velocities in the clock, whose rate is the attention to others."""
        pull = self.pulls(points)
        rests = jnp.all(pull.velocities == 0)
        safe = jnp.where(rests, 1, _clock_rate(pull.attention))
        log_rate = pull.log_scale + jnp.log(safe)
        return Pace(pull.velocities / safe, log_rate, rests)

    def field(self, s: Float[Array, ""], walk: Walk, args: PyTree) -> Walk:
        """Return the change of all unknowns with the clock."""
        pace = self.pace(walk.points)
        log_depth = jnp.exp(-self.log_unit - pace.log_rate - walk.log_depth)
        speeds = jnp.sum(pace.velocities**2, axis=1)
        return Walk(pace.velocities, log_depth, jnp.sqrt(self.counts @ speeds))

    def depth(self, walk: Walk) -> Float[Array, ""]:
        """Return the depth of a walk."""
        return self.start + jnp.exp(self.log_unit + jnp.log(jnp.expm1(walk.log_depth)))

    def missing(self, walk: Walk) -> Float[Array, ""]:
        """Return the share of the way to the target that is left; zero at the end."""
        ratio = jnp.exp(jnp.log(self.target - self.start) - self.log_unit)
        whole = jnp.maximum(jnp.log1p(ratio), jnp.finfo(ratio.dtype).tiny)
        share = 1 - walk.log_depth / whole
        near = jnp.abs(share) < 64 * jnp.finfo(share.dtype).eps
        return jnp.where(near, 0, share)

    def rate(
        self, s: Float[Array, ""], points: Float[Array, "n d"]
    ) -> Float[Array, ""]:
        """Return the largest rate of growth of a perturbation, in the clock."""
        rate = _clock_rate(self.pulls(points).attention)
        growth = largest_rate(
            lambda tokens: self.pulls(tokens).velocities,
            self.cloud.moved(points),
            self.flow.space,
        )
        growth = jnp.maximum(growth, self.internal_rate(points))
        return growth / jnp.where(rate > 0, rate, 1)

    def internal_rate(self, points: Float[Array, "n d"]) -> Float[Array, ""]:
        """Return the rate inside of atoms, in the unit of the velocities."""
        gamma, weights = cast(Constant, self.flow.velocity).gamma, self.cloud.weights
        return internal_rate(
            lambda queries: scaled_field(gamma, points, weights, queries),
            points,
            self.are_several,
            self.flow.space,
        )


def check_long_depth(flow: Flow, has_probes: bool) -> None:
    """Raise unless `LongDepth` can follow this flow, with the reason."""
    if not isinstance(flow.velocity, Constant):
        raise Unsupported(
            "LongDepth() needs the same map at every depth; use Adaptive() for a "
            "schedule."
        )
    if not isinstance(flow.space, Sphere):
        raise Unsupported(
            f"LongDepth() is for Sphere(), where a lone token rests; on "
            f"{type(flow.space).__name__}() use Adaptive() or Stiff()."
        )
    if has_probes:
        raise Unsupported(
            "probes move even where the tokens rest, so LongDepth() cannot carry "
            "them; leave out probes, or use Adaptive()."
        )
    check_resting(flow.velocity.gamma)


def long_velocity(problem: Problem, state: State) -> Float[Array, "n d"]:
    """Return the velocities at a state, zero where they are below all numbers."""
    pull = _phase(problem, state, state.depth).pulls(state.points)
    velocities = jnp.exp(pull.log_scale) * pull.velocities
    return velocities[cast(Atoms, state.atoms).leaders]


def walk_phase(problem: Problem, state: State, target: Float[Array, ""]) -> State:
    """Walk to the target, or to the next meeting of tokens if that comes first.

    Args:
        problem: the problem, with the tokens' own masses.
        state: where the phase begins, its close tokens joined.
        target: the depth to reach.
    """
    phase = _phase(problem, state, target)
    pace = phase.pace(state.points)
    phase = eqx.tree_at(lambda p: p.log_unit, phase, -pace.log_rate)
    solution = _diffeqsolve(problem, phase, state)
    walk = jax.tree.map(lambda leaf: leaf[-1], cast(Any, solution.ys)[0])
    atoms = grown(cast(Atoms, state.atoms), solution, phase.rate)
    moved = State(
        jnp.where(phase.missing(walk) <= 0, target, phase.depth(walk)),
        walk.points,
        None,
        _status(problem, solution),
        state.accepted_steps + solution.stats["num_accepted_steps"],
        state.rejected_steps + solution.stats["num_rejected_steps"],
        state.stretch + 1,
        eqx.tree_at(lambda a: a.arc_length, atoms, walk.arc_length),
    )
    moved = choose(pace.rests, _resting(phase, state), moved)
    return kept_if_finite(moved, state, state.status == Status.reached)


def _resting(phase: Phase, state: State) -> State:
    """Return where tokens that rest end: a lone atom at the target, others here."""
    alone = jnp.sum(phase.cloud.weights > 0) == 1
    depth = jnp.where(alone, phase.target, state.depth)
    status = Status.where(alone, Status.reached, Status.steady)
    state = eqx.tree_at(lambda s: s.atoms, state, _grown_alone(phase, state, alone))
    return eqx.tree_at(
        lambda s: (s.depth, s.status, s.stretch),
        state,
        (depth, status, state.stretch + 1),
    )


def _grown_alone(phase: Phase, state: State, alone: Bool[Array, ""]) -> Atoms:
    """Return the atoms of a lone one that rests, where its own tokens may part."""
    atoms = cast(Atoms, state.atoms)
    if atoms.log_bound is None:
        return atoms
    # The atom itself is free to turn: its rate is zero. The unit of a lone atom is one.
    rate = jnp.maximum(phase.internal_rate(state.points), 0)
    growth = jnp.where(rate > 0, rate * (phase.target - state.depth), 0)
    grows = alone & (atoms.jumps > 0)
    bound = atoms.log_bound + jnp.where(grows, growth, 0)
    return eqx.tree_at(lambda a: a.log_bound, atoms, bound)


def _phase(problem: Problem, state: State, target: Float[Array, ""]) -> Phase:
    """Return the phase that begins at a state, in units of depth."""
    atoms, cloud = cast(Atoms, state.atoms), problem.seen_at(state).cloud
    counts, zero = atoms.counts(problem.cloud), jnp.zeros_like(state.depth)
    cloud, several = cloud.moved(state.points), atoms.are_several()
    return Phase(problem.flow, cloud, counts, several, state.depth, target, zero)


def _diffeqsolve(problem: Problem, phase: Phase, state: State) -> diffrax.Solution:
    integrator, space = problem.integrator, problem.flow.space
    zero, one = jnp.zeros_like(state.depth), jnp.ones_like(state.depth)
    # The errors are rescaled by the tolerances already.
    settings = StepSettings(zero, one, SMALLEST_STEP * one, _largest, None)

    def retract(walk: Walk) -> Walk:
        return walk._replace(points=space.retract(walk.points))

    # What is smaller than rounding cannot be asked for.
    rtol = problem.rtol + ROUNDINGS * jnp.finfo(state.points.dtype).eps

    def rescale(end: Walk, error: Walk) -> Walk:
        cloud = phase.cloud.moved(end.points)
        # One number for all tokens: what counts is what an error does to the gaps.
        gaps = gap_error(cloud, error.points, problem.rtol)
        return Walk(
            jnp.maximum(jnp.abs(error.points) / rtol, gaps),
            error.log_depth / (rtol * (1 + end.log_depth)),
            error.arc_length / (rtol * (1 + end.arc_length)),
        )

    return diffrax.diffeqsolve(
        diffrax.ODETerm(phase.field),
        Retracted(integrator.method_for(False), retract),
        zero,
        jnp.inf * one,
        FIRST_STEP * one,
        Walk(state.points, zero, cast(Atoms, state.atoms).arc_length),
        stepsize_controller=RescaledErrors(integrator.controller(settings), rescale),
        event=diffrax.Event(_events(problem, phase), FirstZero()),
        saveat=saved_steps(state, lambda s, y, args: y.points),
        max_steps=problem.max_steps,
        throw=False,
    )


def _events(problem: Problem, phase: Phase) -> list[Callable]:
    """Return what ends a phase: meeting or target, whichever is first; rest; stops."""

    def meeting_or_target(t, y, args, **kwargs):
        gap = problem.gap.log_excess(phase.cloud.moved(y.points))
        return jnp.minimum(gap, phase.missing(y))

    def rest(t, y, args, **kwargs):
        return phase.pace(y.points).rests

    def event(stop: AbstractStop) -> Callable:
        def condition(t, y, args, **kwargs):
            def velocity():
                pull = phase.pulls(y.points)
                return jnp.exp(pull.log_scale) * pull.velocities

            cloud = phase.cloud.moved(y.points)
            return stop(moment_of(phase.depth(y), cloud, velocity))

        return condition

    return [meeting_or_target, rest, *[event(stop) for stop in problem.stops]]


def _status(problem: Problem, solution: diffrax.Solution) -> PyTree:
    result, results = solution.result, diffrax.RESULTS
    ended, rests, *fired = cast(Any, solution.event_mask)
    located = ended & (result == results.event_occurred)
    status = Status.where(located, Status.reached, Status.solver_failed)
    stuck = result == results.dt_min_reached
    budget = stuck | (result == results.max_steps_reached)
    status = Status.where(budget, Status.step_budget, status)
    status = Status.where(rests, Status.steady, status)
    for stop, is_met in zip(problem.stops, fired, strict=True):
        status = Status.where(is_met, stop.status, status)
    return status


def _largest(errors: Walk) -> Float[Array, ""]:
    leaves = [jnp.max(jnp.abs(leaf)) for leaf in errors]
    largest = jnp.max(jnp.stack(leaves))
    return jnp.where(jnp.isfinite(largest), largest, OVERFLOWN)


def _clock_rate(attention: Float[Array, "n n"]) -> Float[Array, ""]:
    r"""Return $(\sum_{i \ne j} p_{ij}^4)^{1/4}$, a smooth largest attention."""
    largest = jnp.max(attention)
    shares = attention / jnp.where(largest > 0, largest, 1)
    return largest * jnp.sum(shares**POWER) ** (1 / POWER)
