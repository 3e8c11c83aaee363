"""The limit of Sinkhorn's algorithm and its implicit derivative."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meanformer.numerics.averaging import (
    RoundAverage,
    RowAverage,
    solve_difference,
    solve_sum,
)
from meanformer.numerics.self_transport import (
    SelfTransport,
    is_positive_form,
    oscillation_bound,
)
from meanformer.numerics.sinkhorn_newton import Iterate, log_sums, newton_step, visit

ALTERNATING_ROUNDS = 30
AVERAGED_ROUNDS = 60
LARGE_OSCILLATION = 200.0


class Limit(eqx.Module):
    """A token potential, the marginal error it has, and the steps it took."""

    g: Float[Array, " n"]
    error: Float[Array, ""]
    count: Int[Array, ""]


@eqx.filter_custom_jvp
def limit_potential(
    problem: SelfTransport, start: Float[Array, " n"], *, tolerance, max_steps
) -> Limit:
    """Climb a ladder of scaled scores; a single solve when they oscillate little.

    Positive forms need no ladder: the averaged iteration is fast at any scale.
    """
    is_positive = is_positive_form(problem.form)
    rungs = jnp.where(is_positive, 0, _count_rungs(problem))

    def climb(rung, below):
        scale = jnp.exp2((rung - rungs).astype(start.dtype))
        scaled = _with_form(problem, scale * problem.form)
        # Potentials grow like the score.
        g = jnp.where(rung > 0, 2 * below.g, scale * below.g)
        goal = jnp.where(rung == rungs, tolerance, jnp.maximum(tolerance, 1e-2))
        top = _solve(scaled, g, goal.astype(g.dtype), max_steps, is_positive)
        g = jnp.where(problem.weights > 0, top.g, top.balanced)
        return Limit(g, top.error, below.count + top.count)

    nothing = Limit(start, jnp.array(jnp.inf, start.dtype), jnp.array(0))
    return lax.fori_loop(0, rungs + 1, climb, nothing)


@limit_potential.def_jvp
def limit_potential_jvp(primals, tangents, *, tolerance, max_steps):
    """Differentiate the fixed point; the start has no influence."""
    (problem, start), (moving, _) = primals, tangents
    limit = limit_potential(problem, start, tolerance=tolerance, max_steps=max_steps)
    moved_g = lax.cond(
        lax.stop_gradient(is_positive_form(problem.form)),
        lambda: _positive_tangent(problem, moving, limit.g),
        lambda: _general_tangent(problem, moving, limit.g),
    )
    return limit, Limit(moved_g, None, None)


def _count_rungs(problem):
    ratio = oscillation_bound(problem) / LARGE_OSCILLATION
    return jnp.ceil(jnp.log2(jnp.maximum(ratio, 1))).astype(int)


def _solve(problem, start, tolerance, max_steps, is_positive) -> Iterate:
    """Iterate at one scale of the score: rounds first, Newton if they do not do."""

    def round_of_steps(at):
        g = jnp.where(is_positive, (at.g + at.f) / 2, at.balanced)
        return visit(problem, g, at.count + 1)

    def is_far(limit):
        return lambda at: (at.error > tolerance) & (at.count < limit) & ~at.is_stalled

    rounds = jnp.where(is_positive, AVERAGED_ROUNDS, ALTERNATING_ROUNDS)
    at = visit(problem, start, jnp.array(0))
    at = lax.while_loop(is_far(jnp.minimum(rounds, max_steps)), round_of_steps, at)
    at = lax.while_loop(is_far(max_steps), lambda at: newton_step(problem, at), at)
    return lax.cond(is_positive, lambda at: _symmetrise(problem, at), lambda at: at, at)


def _symmetrise(problem, at):
    """Average both potentials once more.

    A plan close to the identity fixes only their sum, and its marginals do not see
    the rest. With $f = g$ all of $g$ is right, and with it queries off the support.
    """
    return visit(problem, (at.g + at.f) / 2, at.count)


def _general_tangent(problem, moving, g):
    r"""Return $\dot g$ from $(I - CR)\,\dot g = \dot T(g)$ for one round $T$."""
    balanced, change = eqx.filter_jvp(lambda p: p.round(g), (problem,), (moving,))
    masses = problem.weights * jnp.exp(log_sums(problem.weights, g, balanced))
    average = RoundAverage(problem, problem.row_step(g), g, masses)
    h = solve_difference(average, change, tolerance=_accuracy(g))
    # One more round carries the derivative over to absent tokens.
    return change + average(h)


def _positive_tangent(problem, moving, g):
    r"""Return $\dot g$ for a symmetric form, where $f = g$.

    A symmetric change of score gives $(I + R)\,\dot g = \dot f(g)$, well conditioned;
    an antisymmetric one gives $\dot f = -\dot g$ and $(I - R)\,\dot g = -\dot f(g)$.
    """
    form = moving.form
    even = moving if form is None else _with_form(moving, (form + form.T) / 2)
    f, change = eqx.filter_jvp(lambda p: p.row_step(g), (problem,), (even,))
    masses = problem.weights * jnp.exp(log_sums(problem.weights, g, f))
    average = RowAverage(problem, g, masses)
    moved = change - average(solve_sum(average, change, tolerance=_accuracy(g)))
    return moved if form is None else moved - _odd_tangent(average, (form - form.T) / 2)


def _odd_tangent(average, moving_form):
    def row_step(form):
        return _with_form(average.problem, form).row_step(average.g)

    _, change = jax.jvp(row_step, (average.problem.form,), (moving_form,))
    h = solve_difference(average, change, tolerance=_accuracy(average.g))
    return change + average(h)


def _with_form(problem, form):
    return eqx.tree_at(lambda p: p.form, problem, form)


def _accuracy(g):
    return float(jnp.finfo(g.dtype).eps) ** 0.75
