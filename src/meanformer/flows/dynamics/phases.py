"""One stretch of depth: in one piece, or phase by phase where tokens are joined."""

from typing import cast as typed

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from meanformer.flows.dynamics.clock import long_velocity, walk_phase
from meanformer.flows.dynamics.derivatives import in_both_modes, without_derivative
from meanformer.flows.dynamics.merging import Atoms, join
from meanformer.flows.dynamics.state import State
from meanformer.flows.dynamics.tokens import Problem, integrate
from meanformer.flows.solvers import LongDepth
from meanformer.flows.status import Status
from meanformer.numerics.precision import cast

NO_DERIVATIVE = (
    "a solve with merge has no derivative: the joins jump; leave merge out to "
    "differentiate."
)


def advance(problem: Problem, state: State, target: Float[Array, ""]) -> State:
    """Integrate from the state's depth to the target, unless it has stopped already."""
    if problem.merge is None:
        return in_both_modes(integrate, problem, state, target)
    # The event finder computes in the widest type there is, whatever the tokens are.
    wide = jnp.result_type(float)
    problem, start, target = without_derivative(
        cast((problem, state, target), wide), NO_DERIVATIVE
    )

    def is_unfinished(state: State) -> Bool[Array, ""]:
        # Every phase but the last joins two atoms at least.
        is_possible = state.stretch - start.stretch <= len(state.points)
        return is_possible & (state.status == Status.reached) & (state.depth < target)

    def phase(state: State) -> State:
        return _phase(problem, _joined(problem, state), target)

    end = jax.lax.while_loop(is_unfinished, phase, start)
    unfinished = (end.status == Status.reached) & (end.depth < target)
    status = Status.where(unfinished, Status.solver_failed, end.status)
    end = eqx.tree_at(lambda s: (s.status, s.stretch), end, (status, start.stretch + 1))
    return cast(end, state.points.dtype)


def velocities_at(problem: Problem, state: State) -> Float[Array, "n d"]:
    """Return the velocity of each token at a state."""
    if isinstance(problem.integrator, LongDepth):
        return long_velocity(problem, state)
    seen = problem if problem.merge is None else problem.seen_at(state)
    velocity, _ = seen.velocity(seen.flow.velocity, state.depth, state.moving)
    return velocity


def _phase(problem: Problem, state: State, target: Float[Array, ""]) -> State:
    if isinstance(problem.integrator, LongDepth):
        moved = walk_phase(problem, state, target)
    else:
        moved = integrate(problem.seen_at(state), state, target)
    # Joined tokens stand where their leader does, not where rounding took them.
    leaders = typed(Atoms, moved.atoms).leaders
    return eqx.tree_at(lambda s: s.points, moved, moved.points[leaders])


def _joined(problem: Problem, state: State) -> State:
    """Join what is close, again and again: a new atom may be close to a third token."""

    def once(carry: tuple[State, Array]) -> tuple[State, Array]:
        state, before = carry[0], typed(Atoms, carry[0].atoms)
        cloud = problem.cloud.moved(state.points)
        points, atoms = join(problem.gap, cloud, state.depth, before)
        has_joined = jnp.any(atoms.leaders != before.leaders)
        joined = eqx.tree_at(lambda s: (s.points, s.atoms), state, (points, atoms))
        return joined, has_joined

    return jax.lax.while_loop(lambda carry: carry[1], once, (state, jnp.array(True)))[0]
