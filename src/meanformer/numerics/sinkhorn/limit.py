"""The limit of Sinkhorn's algorithm and its implicit derivative."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from meanformer.numerics.sinkhorn.averaging import (
    RoundAverage,
    RowAverage,
    solve_difference,
    solve_sum,
)
from meanformer.numerics.sinkhorn.newton import (
    evaluated,
    log_sums,
    newton_step,
    unevaluated,
)
from meanformer.numerics.sinkhorn.self_transport import (
    SelfTransport,
    is_positive_form,
    oscillation_bound,
    rounding_level,
)

ALTERNATING_ROUNDS = 30
AVERAGED_ROUNDS = 60
LARGE_OSCILLATION = 200.0
LADDER_TOLERANCE = 1e-2


@eqx.filter_custom_jvp
def limit_potential(
    problem: SelfTransport,
    start: Float[Array, " n"],
    *,
    tolerance: Float[Array, ""],
    max_steps: Int[Array, ""],
    has_ladder: Bool[Array, ""],
) -> tuple[Float[Array, " n"], Int[Array, ""]]:
    """Return the token potential of the limit, and how many steps it took.

    Its derivative is that of the limit at present tokens, and zero at absent ones.

    With a ladder, strongly oscillating scores are scaled down and doubled step by
    step. Positive forms need none: the averaged iteration is fast at any scale.
    """
    is_positive = is_positive_form(problem.form)
    rungs = jnp.where(has_ladder & ~is_positive, _count_rungs(problem), 0)

    def climb(rung, below):
        g, count = below
        scale = jnp.exp2((rung - rungs).astype(g.dtype))
        # Potentials grow like the score.
        g *= jnp.where(rung > 0, 2, scale)
        loose = jnp.maximum(tolerance, LADDER_TOLERANCE)
        goal = jnp.where(rung == rungs, tolerance, loose)
        scaled = _with_form(problem, scale * problem.form)
        found = _solve(scaled, g, goal, max_steps, is_positive)
        return _potential_of(scaled, found, is_positive), count + found.count

    return lax.fori_loop(0, rungs + 1, climb, (start, jnp.array(0)))


@limit_potential.def_jvp
def limit_potential_jvp(primals, tangents, **options):
    """Differentiate the fixed point for present tokens; the start has no influence."""
    (problem, start), (moving, _) = primals, tangents
    g, count = limit_potential(problem, start, **options)
    return (g, count), (_tangent(problem, moving, g), None)


@eqx.filter_custom_jvp
def known_potential(
    problem: SelfTransport, potential: Float[Array, " n"]
) -> Float[Array, " n"]:
    """Return a token potential that is the limit's, with the derivative of the limit.

    Nothing is solved: only the derivative has to be compiled.
    """
    return potential


@known_potential.def_jvp
def known_potential_jvp(primals, tangents):
    """Differentiate the fixed point."""
    (problem, potential), (moving, _) = primals, tangents
    g = known_potential(problem, potential)
    return g, _tangent(problem, moving, g)


def _tangent(problem, moving, g):
    return lax.cond(
        is_positive_form(lax.stop_gradient(problem.form)),
        lambda: _positive_tangent(problem, moving, g),
        lambda: _general_tangent(problem, moving, g),
    )


def _count_rungs(problem):
    ratio = oscillation_bound(problem) / LARGE_OSCILLATION
    return jnp.ceil(jnp.log2(jnp.maximum(ratio, 1))).astype(int)


def _solve(problem, start, tolerance, max_steps, is_positive):
    """Iterate at one scale of the score: rounds first, Newton if they do not do."""

    def round_of_steps(at):
        g = jnp.where(is_positive, _mean_potential(problem, at), at.balanced)
        return evaluated(problem, g, at.count + 1)

    def is_far(limit):
        def condition(at):
            goal = jnp.maximum(tolerance, rounding_level(problem.weights, at.f, at.g))
            return (at.error > goal) & (at.count < limit) & ~at.is_stalled

        return condition

    rounds = jnp.where(is_positive, AVERAGED_ROUNDS, ALTERNATING_ROUNDS)
    at = unevaluated(start)
    at = lax.while_loop(is_far(jnp.minimum(rounds, max_steps)), round_of_steps, at)
    return lax.while_loop(is_far(max_steps), lambda at: newton_step(problem, at), at)


def _mean_potential(problem, at):
    """Average both potentials; an absent token gets its extension."""
    return jnp.where(problem.weights > 0, (at.g + at.f) / 2, at.balanced)


def _potential_of(problem, at, is_positive):
    """Return the token potential found, extended to absent tokens.

    A plan close to the identity fixes only the sum of both potentials, and its
    marginals do not see the rest. For a symmetric form they are equal, so that one more
    average makes all of $g$ right, and with it queries off the support.
    """
    extended = jnp.where(problem.weights > 0, at.g, at.balanced)
    return jnp.where(is_positive, _mean_potential(problem, at), extended)


def _general_tangent(problem, moving, g):
    r"""Return $\dot g$ from $(I - CR)\,\dot g = \dot T(g)$ for one round $T$."""

    def both_steps(problem):
        f = problem.row_step(g)
        return f, problem.column_step(f)

    (f, balanced), (_, change) = eqx.filter_jvp(both_steps, (problem,), (moving,))
    masses = problem.weights * jnp.exp(log_sums(problem.weights, g, balanced))
    average = RoundAverage(problem, f, g, masses)
    return solve_difference(average, change, tolerance=_accuracy(g))


def _positive_tangent(problem, moving, g):
    r"""Return $\dot g$ for a symmetric form, where $f = g$.

    A symmetric change of score gives $(I + R)\,\dot g = \dot f(g)$, well conditioned;
    an antisymmetric one gives $\dot f = -\dot g$ and $(I - R)\,\dot g = -\dot f(g)$.
    """
    form = moving.form
    even = moving if form is None else _with_form(moving, (form + form.T) / 2)
    f, change = eqx.filter_jvp(lambda p: p.row_step(g), (problem,), (even,))
    masses = problem.weights * jnp.exp(log_sums(problem.weights, g, f))
    average = RowAverage(problem, f, g, masses)
    moved = solve_sum(average, change, tolerance=_accuracy(g))
    return moved if form is None else moved - _odd_tangent(average, (form - form.T) / 2)


def _odd_tangent(average, moving_form):
    def row_step(form):
        return _with_form(average.problem, form).row_step(average.g)

    _, change = jax.jvp(row_step, (average.problem.form,), (moving_form,))
    return solve_difference(average, change, tolerance=_accuracy(average.g))


def _with_form(problem, form):
    return eqx.tree_at(lambda p: p.form, problem, form)


def _accuracy(g):
    return float(jnp.finfo(g.dtype).eps) ** 0.75
