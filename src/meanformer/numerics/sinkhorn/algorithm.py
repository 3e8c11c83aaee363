r"""Sinkhorn's algorithm for a token cloud transported onto itself.

The limit depends on the score alone; a fixed number of half-steps also depends on
the start. Both end in a token potential $g$, which is all that attention needs: the
average of tokens with weights $w_j e^{\langle Bx, x_j\rangle + g_j}$ does the last
row step by itself, at any query.
"""

from typing import Literal

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from meanformer.errors import as_integer, check, check_choice
from meanformer.numerics.sinkhorn.limit import known_potential, limit_potential
from meanformer.numerics.sinkhorn.self_transport import (
    SelfTransport,
    marginal_error,
    rounding_level,
)


class EntropicPotentials(eqx.Module):
    r"""The result of Sinkhorn's algorithm: the plan $k_{ij} = e^{s_{ij} + f_i + g_j}$.

    Attributes:
        f: query potential, the row step of `previous`.
        g: token potential.
        previous: the token potential behind `f`; equals `g` unless the last half-step
            was a column step. Off the support, $f(x) = -\log\sum_j w_j
            e^{s(x, x_j) + \mathrm{previous}_j}$.
        marginal_error: largest distance from one of the sums that the last half-step
            did not enforce, over present tokens.
        iterations: half-steps, or steps of the solver.
        converged: whether the error is within the tolerance, or within rounding for
            potentials of this size.
    """

    f: Float[Array, " n"]
    g: Float[Array, " n"]
    previous: Float[Array, " n"]
    marginal_error: Float[Array, ""]
    iterations: Int[Array, ""]
    converged: Bool[Array, ""]


def default_tolerance(dtype: jnp.dtype) -> float:
    """Return the marginal error to reach: 1e-10 in double, 5e-6 in single precision."""
    return max(1e-10, 40 * float(jnp.finfo(dtype).eps))


@eqx.filter_jit
def alternate(
    problem: SelfTransport,
    start: Float[Array, " n"],
    *,
    half_steps: int = 1,
    end_on: Literal["row", "column"] = "row",
) -> EntropicPotentials:
    r"""Make a fixed number of half-steps: row, column, row, ...

    Differentiable by unrolling. From $g = -\beta|Kx|^2$ with $B = 2\beta K^\top Q$,
    one half-step is L2 attention. Ended on a column step the rows do not sum to one:
    $\sum_j w_j k(x, x_j) = e^{f(x)} \sum_j w_j e^{s(x, x_j) + g_j}$.

    Args:
        problem: the cloud and the score.
        start: token potential before the first row step.
        half_steps: how many; odd to end on a row step, even on a column step.
        end_on: which marginal is exact at the end.

    Returns:
        The potentials. Cost: one pair sum per half-step and one for the error.
    """
    check_half_steps(half_steps, end_on)

    def round_of_steps(g, _):
        return problem.both_steps(g), None

    rounds = (half_steps - 1) // 2
    previous = lax.scan(round_of_steps, start, None, length=rounds)[0]
    f = problem.row_step(previous)
    g = previous if end_on == "row" else problem.column_step(f)
    error = _free_marginal_error(problem, f, g, end_on)
    tolerance = default_tolerance(start.dtype)
    return _report(problem, f, g, previous, error, half_steps, tolerance)


def check_half_steps(half_steps: int | None, end_on: str) -> None:
    """Raise unless so many half-steps end where they are said to; `None`: the limit."""
    check_choice("end_on", end_on, ("row", "column"))
    if half_steps is None:
        return
    half_steps = as_integer("half_steps", half_steps, least=1)
    remainder, parity = (1, "odd") if end_on == "row" else (0, "even")
    check(
        half_steps % 2 == remainder,
        f"half_steps is {half_steps}; to end on a {end_on} step it must be {parity}.",
    )


def _free_marginal_error(problem, f, g, end_on):
    if end_on == "row":
        return marginal_error(problem.weights, g, problem.column_step(f))
    return marginal_error(problem.weights, f, problem.row_step(g))


def _report(problem, f, g, previous, error, count, tolerance) -> EntropicPotentials:
    """Judge the error, which is outside of differentiation."""
    rounding = rounding_level(problem.weights, f, g)
    error, rounding = lax.stop_gradient((error, rounding))
    converged = error <= jnp.maximum(tolerance, rounding)
    return EntropicPotentials(f, g, previous, error, jnp.asarray(count), converged)


def balance(
    problem: SelfTransport,
    *,
    start: Float[Array, " n"] | None = None,
    tolerance: float | None = None,
    max_steps: int = 200,
) -> EntropicPotentials:
    r"""Solve for the limit of Sinkhorn's algorithm, to a tolerance on the column sums.

    For symmetric positive semi-definite $B$ by the averaged iteration
    $g \leftarrow (g + f(g))/2$, whose asymptotic ratio is at most one half; otherwise
    by up to 30 alternating rounds and then Newton's method, after a ladder of smaller
    scores when their oscillation exceeds 200. The rows sum to one by construction. The
    free constant is chosen so that $\sum_i w_i f_i = \sum_j w_j g_j$.

    The derivative in points, weights and form is implicit, forward and reverse: with
    the row averages $R$ and the column averages $C$ of the plan,
    $(I - CR)\,\dot g = \dot T(g)$ for one round $T$. The start has no influence.

    What the plan does on the tokens is as exact as the tolerance. Off the support, a
    plan that falls into almost separate parts leaves the constants between them poorly
    determined, in value and derivative; not so for symmetric positive $B$.

    Args:
        problem: the cloud and the score.
        start: token potential of a nearby problem; it replaces the ladder. If absent,
            the resting potential of the cloud.
        tolerance: largest marginal error to accept; `default_tolerance` if absent.
        max_steps: largest number of rounds and Newton steps, per rung of the ladder; 0
            takes the start for the limit.

    Returns:
        The potentials; if not converged, with the error reached. Always finite.
        Cost: two pair sums per round; a Newton step adds two per step of the
        conjugate gradients (up to 256 tokens: a direct solve).
    """
    check(
        max_steps > 0 or (max_steps == 0 and start is not None),
        f"max_steps is {max_steps}; it must be positive, or 0 if start is the limit.",
    )
    dtype = problem.points.dtype
    if tolerance is None:
        tolerance = default_tolerance(dtype)
    check(tolerance > 0, f"tolerance is {tolerance}; it must be positive.")
    # Arrays, so that one compiled program serves all their values.
    goal = jnp.asarray(tolerance, dtype)
    if max_steps == 0:
        return _known(problem, start, tolerance=goal)
    return _balance(
        problem,
        problem.resting_potential() if start is None else start,
        tolerance=goal,
        max_steps=jnp.asarray(max_steps),
        has_ladder=jnp.asarray(start is None),
    )


@eqx.filter_jit
def _known(problem, start, *, tolerance):
    g = known_potential(problem, lax.stop_gradient(start))
    return _finished(problem, g, 0, tolerance)


@eqx.filter_jit
def _balance(problem, start, *, tolerance, max_steps, has_ladder):
    g, count = limit_potential(
        problem,
        lax.stop_gradient(start),
        tolerance=tolerance,
        max_steps=max_steps,
        has_ladder=has_ladder,
    )
    return _finished(problem, g, count, tolerance)


def _finished(problem, g, count, tolerance) -> EntropicPotentials:
    """Return both potentials from that of the tokens, of equal means."""
    f = problem.row_step(g)
    balanced = problem.column_step(f)
    error = marginal_error(problem.weights, g, balanced)
    shift = jnp.dot(problem.weights, f - g) / (2 * problem.weights.sum())
    g = jnp.where(problem.weights > 0, g, balanced) + shift
    return _report(problem, f - shift, g, g, error, count, tolerance)


def entropic_energy(
    weights: Float[Array, " n"], potentials: EntropicPotentials
) -> Float[Array, ""]:
    r"""Value of the entropic self-transport, whose gradient is Sinkhorn attention.

    $$E_B(\mu) = \max_{\pi \in \Pi(\mu, \mu)} \int y^\top B x \,\mathrm{d}\pi
      - \mathrm{KL}(\pi | \mu \otimes \mu) = -\sum_i w_i (f_i + g_i).$$

    Args:
        weights: the masses of the tokens.
        potentials: what `balance` returned for the cloud.

    Returns:
        The energy, a scalar; its error is of second order in the marginal error.
    """
    return -jnp.dot(weights, potentials.f + potentials.g)
