"""Dual potentials of entropic transport: Sinkhorn rounds, then Newton's method."""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from meanformer.measures.transport.newton import maximise
from meanformer.measures.transport.problem import Problem, softmin

ROUNDS_BEFORE_NEWTON = 100


class Potential(NamedTuple):
    """A function on the target, and whether its plan has the right marginals."""

    values: Float[Array, " m"]
    has_converged: Bool[Array, ""]


@eqx.filter_jit
def self_potential(problem: Problem, rounds: int) -> Potential:
    r"""Solve the transport of a cloud to itself by averaged rounds.

    $f \leftarrow (f + Tf)/2$, with $T$ the soft minimum, contracts by one half where
    plain alternation stalls because the plan is close to the identity [FSVATP19].
    """
    start = jnp.zeros_like(problem.target.masses)

    def balance(potential):
        return softmin(problem, potential)

    return _iterate(problem, balance, start, 0.5, rounds)


@eqx.filter_jit
def cross_potential(
    problem: Problem, start: Float[Array, " m"], scale: Float[Array, ""], rounds: int
) -> Potential:
    """Solve the transport between two clouds by alternating rounds.

    If the rounds stall and all pairs fit in memory, Newton's method finishes.
    """

    def balance(potential):
        return softmin(problem.reversed(), softmin(problem, potential))

    if not problem.is_dense:
        return _iterate(problem, balance, start, 1.0, rounds)
    count = min(rounds, ROUNDS_BEFORE_NEWTON)
    potential = _iterate(problem, balance, start, 1.0, count)
    values, error = maximise(problem, potential.values, scale)
    return Potential(values, error <= problem.tolerance)


class _Iterate(NamedTuple):
    potential: Float[Array, " m"]
    balanced: Float[Array, " m"]
    count: Int[Array, ""]


def _iterate(
    problem: Problem,
    balance: Callable[[Array], Array],
    start: Float[Array, " m"],
    share: float,
    rounds: int,
) -> Potential:
    """Move a share of the way to the balanced potential until the marginals agree."""

    def is_unfinished(here):
        return (_error(problem, here) > problem.tolerance) & (here.count < rounds)

    def advance(here):
        moved = (1 - share) * here.potential + share * here.balanced
        return _Iterate(moved, balance(moved), here.count + 1)

    first = _Iterate(start, balance(start), jnp.array(0))
    last = jax.lax.while_loop(is_unfinished, advance, first)
    return Potential(last.potential, _error(problem, last) <= problem.tolerance)


def _error(problem: Problem, here: _Iterate) -> Float[Array, ""]:
    r"""Return $\int |e^{(g - g')/\varepsilon} - 1|\,\mathrm{d}\nu$: misplaced mass."""
    masses = problem.target.masses
    excess = jnp.expm1((here.potential - here.balanced) / problem.epsilon)
    return jnp.sum(masses * jnp.abs(jnp.where(masses > 0, excess, 0)))
