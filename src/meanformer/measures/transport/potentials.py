"""Dual potentials of entropic transport: Sinkhorn rounds, then Newton's method."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from meanformer.measures.transport.atoms import Atoms
from meanformer.numerics.arrays import matmul
from meanformer.numerics.pair_sums.pairs import Pairs
from meanformer.numerics.pair_sums.sums import Blocked

DENSE_LIMIT = 4_000_000
ROUNDS_BEFORE_NEWTON = 100
NEWTON_STEPS = 40
SHORTEST_STEP = 1e-3
LARGE_ERROR = 0.1


class Problem(NamedTuple):
    """An entropic transport problem: two clouds, a temperature and a tolerance."""

    source: Atoms
    target: Atoms
    epsilon: Float[Array, ""]
    tolerance: Float[Array, ""]

    @property
    def is_dense(self) -> bool:
        """Whether all pairs fit comfortably in memory."""
        return len(self.source.masses) * len(self.target.masses) <= DENSE_LIMIT

    def reversed(self) -> "Problem":
        """Return the problem seen from the target."""
        return self._replace(source=self.target, target=self.source)

    def pairs(self, potential: Float[Array, " m"]) -> Pairs:
        r"""Return $(g_j - |x_i - y_j|^2)/\varepsilon$ as scores, less $|x_i|^2$."""
        offsets = (potential - jnp.sum(self.target.points**2, axis=1)) / self.epsilon
        tilts = 2 * self.source.points / self.epsilon
        return Pairs(tilts, self.target.points, self.target.masses, offsets)


def softmin(problem: Problem, potential: Float[Array, " m"]) -> Float[Array, " n"]:
    r"""Potential on the source atoms that is best for one on the target.

    $$f(x) = -\varepsilon \log \sum_j b_j\, e^{(g_j - |x - y_j|^2)/\varepsilon}:$$
    the log-Laplace transform of the target at $2x/\varepsilon$. Absent atoms of the
    target count for nothing, in value and gradient.
    """
    nothing = problem.target.points[:, :0]
    log_mass, _ = Blocked().softmax(problem.pairs(potential), nothing)
    squares = jnp.sum(problem.source.points**2, axis=1)
    return squares - problem.epsilon * log_mass


@eqx.filter_jit
def semi_dual(problem: Problem, potential: Float[Array, " m"]) -> Float[Array, ""]:
    r"""Lower bound $\int f\,\mathrm{d}\mu + \int g\,\mathrm{d}\nu$ of the cost.

    Its error is quadratic in that of $g$, and with $g$ frozen the derivative is that
    of the optimal value.
    """
    source, target = problem.source, problem.target
    partner = softmin(problem, potential)
    return matmul(source.masses, partner) + matmul(target.masses, potential)


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
    return _iterate(problem, partial(softmin, problem), start, 0.5, rounds)


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


class _Evaluation(NamedTuple):
    """The semi-dual at a potential, and the plan given the source atom."""

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
    error = _misplaced_mass(problem, _evaluate(problem, start, jnp.array(0)))
    ratio = jnp.log2(jnp.maximum(scale / problem.epsilon, 1))
    rungs = jnp.where(error > LARGE_ERROR, jnp.ceil(ratio), 0).astype(int)

    def climb(rung, warmer):
        factor = jnp.exp2((rungs - rung).astype(scale.dtype))
        goal = jnp.where(rung == rungs, problem.tolerance, LARGE_ERROR**2)
        at = problem._replace(epsilon=factor * problem.epsilon, tolerance=goal)
        last = _ascend(at, warmer[0])
        return last.potential, _misplaced_mass(at, last)

    first = jnp.where(rungs > 0, 0, start), jnp.ones_like(scale)
    return jax.lax.fori_loop(0, rungs + 1, climb, first)


def _ascend(problem: Problem, start: Float[Array, " m"]) -> _Evaluation:
    """Make damped Newton steps, or Sinkhorn's where those fail, to the tolerance."""

    def is_unfinished(here):
        is_wrong = _misplaced_mass(problem, here) > problem.tolerance
        return is_wrong & (here.count < NEWTON_STEPS)

    def advance(here):
        step, there = _line_search(problem, here, _newton_direction(problem, here))
        return jax.lax.cond(
            step > SHORTEST_STEP, lambda: there, lambda: _sinkhorn_step(problem, here)
        )

    first = _evaluate(problem, start, jnp.array(0))
    return jax.lax.while_loop(is_unfinished, advance, first)


def _evaluate(problem: Problem, potential: Array, count: Array) -> _Evaluation:
    """Evaluate the semi-dual and its plan at a potential."""
    source, target, epsilon, _ = problem
    pairs = problem.pairs(potential)
    scores = jnp.where(pairs.visible(), pairs.scores(), -jnp.inf)
    top = scores.max(axis=1)
    masses = target.masses[None, :] * jnp.exp(scores - top[:, None])
    totals = masses.sum(axis=1)
    partner = jnp.sum(source.points**2, axis=1) - epsilon * (top + jnp.log(totals))
    value = matmul(source.masses, partner) + matmul(target.masses, potential)
    return _Evaluation(potential, value, masses / totals[:, None], count)


def _gradient(problem: Problem, here: _Evaluation) -> Float[Array, " m"]:
    return problem.target.masses - matmul(problem.source.masses, here.plan)


def _misplaced_mass(problem: Problem, here: _Evaluation) -> Float[Array, ""]:
    """Return the total mass that the plan puts in the wrong place."""
    return jnp.abs(_gradient(problem, here)).sum()


def _newton_direction(problem: Problem, here: _Evaluation) -> Float[Array, " m"]:
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
    problem: Problem, here: _Evaluation, direction: Float[Array, " m"]
) -> tuple[Float[Array, ""], _Evaluation]:
    """Halve the step until the semi-dual grows as a concave function must.

    Where rounding hides the growth, a smaller error of the marginals will do.
    """
    slope = matmul(_gradient(problem, here), direction)
    rounding = 8 * jnp.finfo(slope.dtype).eps * jnp.abs(here.value)

    def is_too_long(trial):
        step, there = trial
        gain = there.value - here.value
        is_closer = _misplaced_mass(problem, there) < _misplaced_mass(problem, here) / 2
        is_good = (gain > 1e-4 * step * slope) | (is_closer & (gain > -rounding))
        return ~is_good & (step > SHORTEST_STEP)

    def shorten(trial):
        return at(trial[0] / 2)

    def at(step):
        moved = here.potential + step * direction
        return step, _evaluate(problem, moved, here.count + 1)

    return jax.lax.while_loop(is_too_long, shorten, at(jnp.ones_like(slope)))


def _sinkhorn_step(problem: Problem, here: _Evaluation) -> _Evaluation:
    """Balance the second marginal, which always increases the semi-dual."""
    marginal = matmul(problem.source.masses, here.plan)
    is_present = (problem.target.masses > 0) & (marginal > 0)
    ratio = jnp.where(is_present, problem.target.masses, 1) / jnp.where(
        is_present, marginal, 1
    )
    moved = here.potential + problem.epsilon * jnp.log(ratio)
    return _evaluate(problem, moved, here.count + 1)
