"""Newton's method for the potentials of Sinkhorn attention."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from meanformer.numerics.sinkhorn.averaging import RoundAverage, solve_difference
from meanformer.numerics.sinkhorn.self_transport import (
    SelfTransport,
    marginal_error,
    rounding_level,
)

SHORTEST_STEP = 1e-12


class Iterate(eqx.Module):
    """A token potential on its way to the limit.

    Attributes:
        g: the token potential.
        f: the row step of g.
        balanced: the column step of f; g is the limit when both agree.
        error: largest distance of the column sums from one.
        count: how many steps have been made.
        is_stalled: whether rounding has ended the progress.
    """

    g: Float[Array, " n"]
    f: Float[Array, " n"]
    balanced: Float[Array, " n"]
    error: Float[Array, ""]
    count: Int[Array, ""]
    is_stalled: Bool[Array, ""]


def unevaluated(start: Float[Array, " n"]) -> Iterate:
    """Return the iterate whose first round of steps leads to the start itself."""
    error = jnp.array(jnp.inf, start.dtype)
    return Iterate(start, start, start, error, jnp.array(-1), jnp.array(False))


def evaluated(
    problem: SelfTransport, g: Float[Array, " n"], count: Int[Array, ""]
) -> Iterate:
    """Evaluate both steps at a token potential."""
    f = problem.row_step(g)
    balanced = problem.column_step(f)
    error = marginal_error(problem.weights, g, balanced)
    return Iterate(g, f, balanced, error, count, jnp.array(False))


def log_sums(
    weights: Float[Array, " n"],
    potential: Float[Array, " n"],
    balanced: Float[Array, " n"],
) -> Float[Array, " n"]:
    """Return the logarithms of the plan's column sums, zero for absent tokens.

    Sums beyond exp(30) or below exp(-30) carry no digits; the bound keeps what follows
    finite. The same holds for rows, with the other potential.
    """
    return jnp.clip(jnp.where(weights > 0, potential - balanced, 0), -30, 30)


def newton_step(problem: SelfTransport, at: Iterate) -> Iterate:
    r"""Make a damped Newton step on the concave semi-dual function.

    $$J(g) = \sum_j w_j g_j + \sum_i w_i f_i(g), \qquad
      \partial_j J = w_j \Big(1 - \sum_i w_i k_{ij}\Big).$$
    """
    direction, slope = _ascent_direction(problem, at)
    new, length = _line_search(problem, at, direction, slope)
    rounding = rounding_level(problem.weights, at.f, at.g)
    is_lost = (at.error < 16 * rounding) & ~(new.error < at.error / 2)
    best = jax.tree.map(lambda a, b: jnp.where(is_lost, a, b), at, new)
    is_stalled = is_lost | (length < SHORTEST_STEP)
    return Iterate(best.g, best.f, best.balanced, best.error, at.count + 1, is_stalled)


def _ascent_direction(problem, at):
    """Return Newton's direction and its slope; a round of steps where it fails."""
    logs = log_sums(problem.weights, at.g, at.balanced)
    gradient = _gradient(problem, at)
    average = RoundAverage(problem, at.f, at.g, problem.weights * jnp.exp(logs))
    accuracy = jnp.clip(at.error, 1e-6, 0.1)
    newton = solve_difference(average, jnp.expm1(-logs), tolerance=accuracy)
    is_ascent = jnp.isfinite(newton).all() & (jnp.dot(gradient, newton) > 0)
    direction = jnp.where(is_ascent, newton, at.balanced - at.g)
    return direction, jnp.dot(gradient, direction)


def _gradient(problem, at):
    logs = log_sums(problem.weights, at.g, at.balanced)
    return -problem.weights * jnp.expm1(logs)


def _line_search(problem, at, direction, slope):
    """Halve the step until the slope along it has not clearly changed its sign.

    The semi-dual is concave, so this is an increase; slopes keep their digits near
    the limit, where differences of values are lost in rounding.
    """

    def shorten(trial):
        _, longer = trial
        return evaluated(problem, at.g + longer / 2 * direction, at.count), longer / 2

    def is_too_long(trial):
        new, length = trial
        new_slope = jnp.dot(_gradient(problem, new), direction)
        is_past_top = ~(new_slope >= -slope / 10)
        return (length > 1) | is_past_top & (length >= SHORTEST_STEP)

    return lax.while_loop(is_too_long, shorten, (at, jnp.full_like(slope, 2)))
