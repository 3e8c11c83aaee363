"""Newton's method for entropic transport, with all pairs in memory."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meanformer.measures.transport.problem import Problem
from meanformer.numerics.arrays import matmul

STEPS = 40
SHORTEST_STEP = 1e-3
LARGE_ERROR = 0.1


class Iterate(NamedTuple):
    """A potential, the semi-dual there, and the plan given the source atom."""

    potential: Float[Array, " m"]
    value: Float[Array, ""]
    plan: Float[Array, "n m"]
    count: Int[Array, ""]


def maximise(
    problem: Problem, start: Float[Array, " m"], scale: Float[Array, ""]
) -> tuple[Float[Array, " m"], Float[Array, ""]]:
    """Maximise the semi-dual; return the potential and its marginal error.

    A start with a small error is improved at once. Otherwise the temperature is lowered
    from the scale of the cost by halves, each solution being the start of the next.
    """
    is_poor = _error(problem, _visit(problem, start, jnp.array(0))) > LARGE_ERROR
    ratio = jnp.log2(jnp.maximum(scale / problem.epsilon, 1))
    rungs = jnp.where(is_poor, jnp.ceil(ratio), 0).astype(int)

    def climb(rung, warmer):
        factor = jnp.exp2((rungs - rung).astype(scale.dtype))
        goal = jnp.where(rung == rungs, problem.tolerance, LARGE_ERROR**2)
        at = problem._replace(epsilon=factor * problem.epsilon, tolerance=goal)
        last = _ascend(at, warmer[0])
        return last.potential, _error(at, last)

    first = jnp.where(rungs > 0, 0, start), jnp.ones_like(scale)
    return jax.lax.fori_loop(0, rungs + 1, climb, first)


def _ascend(problem: Problem, start: Float[Array, " m"]) -> Iterate:
    """Make damped Newton steps, or Sinkhorn's where those fail, to the tolerance."""

    def is_unfinished(here):
        return (_error(problem, here) > problem.tolerance) & (here.count < STEPS)

    def advance(here):
        step, there = _line_search(problem, here, _newton_direction(problem, here))
        return jax.lax.cond(
            step > SHORTEST_STEP, lambda: there, lambda: _sinkhorn_step(problem, here)
        )

    first = _visit(problem, start, jnp.array(0))
    return jax.lax.while_loop(is_unfinished, advance, first)


def _visit(problem: Problem, potential: Array, count: Array) -> Iterate:
    """Evaluate the semi-dual and its plan at a potential."""
    source, target, epsilon, _ = problem
    pairs = problem.pairs(potential)
    scores = jnp.where(pairs.visible(), pairs.scores(), -jnp.inf)
    top = scores.max(axis=1)
    masses = target.masses[None, :] * jnp.exp(scores - top[:, None])
    totals = masses.sum(axis=1)
    partner = jnp.sum(source.points**2, axis=1) - epsilon * (top + jnp.log(totals))
    value = matmul(source.masses, partner) + matmul(target.masses, potential)
    return Iterate(potential, value, masses / totals[:, None], count)


def _gradient(problem: Problem, here: Iterate) -> Float[Array, " m"]:
    return problem.target.masses - matmul(problem.source.masses, here.plan)


def _error(problem: Problem, here: Iterate) -> Float[Array, ""]:
    """Return the total mass that the plan puts in the wrong place."""
    return jnp.abs(_gradient(problem, here)).sum()


def _newton_direction(problem: Problem, here: Iterate) -> Float[Array, " m"]:
    r"""Solve $(I - B^\top B) z = \varepsilon (b - c)/\sqrt c$ and return $z/\sqrt c$.

    Here $B_{ij} = \sqrt{a_i} P_{ij} / \sqrt{c_j}$ for the plan $P$ given the source and
    its second marginal $c$. Constants, which the system cannot see, are lifted to
    eigenvalue one.
    """
    marginal = matmul(problem.source.masses, here.plan)
    is_present = marginal > 0
    roots = jnp.sqrt(jnp.where(is_present, marginal, 1))
    scaled = jnp.sqrt(problem.source.masses)[:, None] * here.plan / roots[None, :]
    constants = jnp.where(is_present, roots, 0)
    shift = 1 + 4 * jnp.finfo(roots.dtype).eps
    identity = jnp.eye(len(roots), dtype=roots.dtype)
    system = shift * identity - matmul(scaled.T, scaled)
    system += jnp.outer(constants, constants)
    right = problem.epsilon * _gradient(problem, here) / roots
    direction = jax.scipy.linalg.solve(system, right, assume_a="pos") / roots
    return jnp.where(is_present, direction, 0)


def _line_search(
    problem: Problem, here: Iterate, direction: Float[Array, " m"]
) -> tuple[Float[Array, ""], Iterate]:
    """Halve the step until the semi-dual grows as a concave function must.

    Where rounding hides the growth, a smaller error of the marginals will do.
    """
    slope = matmul(_gradient(problem, here), direction)
    rounding = 8 * jnp.finfo(slope.dtype).eps * jnp.abs(here.value)

    def is_too_long(trial):
        step, there = trial
        gain = there.value - here.value
        is_closer = _error(problem, there) < _error(problem, here) / 2
        is_good = (gain > 1e-4 * step * slope) | (is_closer & (gain > -rounding))
        return ~is_good & (step > SHORTEST_STEP)

    def shorten(trial):
        return at(trial[0] / 2)

    def at(step):
        moved = here.potential + step * direction
        return step, _visit(problem, moved, here.count + 1)

    return jax.lax.while_loop(is_too_long, shorten, at(jnp.ones_like(slope)))


def _sinkhorn_step(problem: Problem, here: Iterate) -> Iterate:
    """Balance the second marginal, which always increases the semi-dual."""
    marginal = matmul(problem.source.masses, here.plan)
    is_present = (problem.target.masses > 0) & (marginal > 0)
    ratio = jnp.where(is_present, problem.target.masses, 1) / jnp.where(
        is_present, marginal, 1
    )
    moved = here.potential + problem.epsilon * jnp.log(ratio)
    return _visit(problem, moved, here.count + 1)
