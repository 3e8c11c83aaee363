r"""Searching for matrices that do what the low-rank conjecture forbids generic ones.

The conjecture speaks of generic matrices, and a counterexample is known: rotations. So
the question is how far from given matrices the next counterexample lies. Here $Q$ and
$V$ are moved as little as possible until a covariance of too large a rank rests, or
returns. A distance of zero refutes the conjecture; a positive one at every draw says
that counterexamples lie on a set of smaller dimension, as far as the search sees.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optimistix
from jaxtyping import Array, Float

from meanformer.attention import AbstractInContextMap
from meanformer.errors import as_integer, as_key, check
from meanformer.gaussian import stationary
from meanformer.gaussian.conjecture.ensembles import KINDS, Case
from meanformer.gaussian.velocity import affine_velocity, centred, quiet_solve
from meanformer.numerics.arrays import matmul
from meanformer.typing import Key

# Least ratio of the extreme eigenvalues of a covariance whose rank is counted.
LEAST = 0.1
# Least way of a cycle, relative to the covariance that it returns to.
WAY = 0.3
# Largest residual and least ratio of eigenvalues of what is found in the end.
EXACT, SURE = 1e-8, LEAST / 2
# Weights of the equations, beside the distance: more and more.
WEIGHTS = (1.0, 10.0, 1e2, 1e3, 1e4)
# Longest cycle, in units of the time in which a covariance of this size moves.
SHORTEST, LONGEST = 1.0, 30.0
STEPS = 100
# Steps of the flow along one cycle, at most.
BUDGET = 400


@dataclasses.dataclass(frozen=True)
class NearMiss:
    """Matrices near a case that do what the conjecture forbids, as far as is found.

    Attributes:
        distance: the change of $Q$ and $V$ over their size, in the Frobenius norm.
        case: the changed matrices, with the covariance that rests or returns.
        residual: how well it rests or returns, zero in exact arithmetic.
        smallest: the smallest eigenvalue of the covariance over the largest, of those
            that its rank counts.
        period: the depth after which it returns; `None` if it rests.
        multipliers: eigenvalues of the linearised return map on symmetric matrices,
            largest modulus first; `None` if it rests. A cycle that attracts has one
            that is one, for the way along it, and the others inside the unit circle.
    """

    distance: float
    case: Case
    residual: float
    smallest: float
    period: float | None = None
    multipliers: np.ndarray | None = None


class _Unknowns(NamedTuple):
    """The unknowns: changes of two matrices, a factor of a covariance, a period.

    The logarithm of the period is zero for stationary covariances.
    """

    query: Float[Array, "k d"]
    value: Float[Array, "d d"]
    root: Float[Array, "d r"]
    log_period: Float[Array, ""]


class _Near(eqx.Module):
    """The matrices to stay close to."""

    query: Float[Array, "k d"]
    key: Float[Array, "k d"]
    value: Float[Array, "d d"]
    trace: Float[Array, ""]
    beta: float
    kind: str = eqx.field(static=True)

    @property
    def size(self) -> Float[Array, ""]:
        """The size of the matrices that may move."""
        return jnp.sqrt(jnp.sum(self.query**2) + jnp.sum(self.value**2))

    def gamma(self, found: _Unknowns) -> AbstractInContextMap:
        """Return the velocity with the changed matrices."""
        query, value = self.query + found.query, self.value + found.value
        return KINDS[self.kind](query, self.key, value, beta=self.beta)

    def time(self) -> Float[Array, ""]:
        """Return the time in which a covariance of this trace moves."""
        root = jnp.sqrt(self.trace / len(self.value)) * jnp.eye(len(self.value))
        gamma = self.gamma(_unmoved(self, root))
        return 1 / jnp.linalg.norm(affine_velocity(gamma, centred(factor=root))[0])


def nearest_stationary(
    case: Case, rank: int, *, key: Key, starts: int = 16
) -> NearMiss | None:
    r"""Change $Q$ and $V$ as little as possible until a covariance of a rank rests.

    The equations $LS + SL^\top = 0$ are weighed more and more beside the distance
    (Levenberg and Marquardt), then solved alone from there. The eigenvalues of $S$ that
    its rank counts are kept within a factor of ten, and its trace as in the case.

    Args:
        case: the matrices, of a single head without perceptron.
        rank: the rank $r$.
        key: random key for the first covariances.
        starts: how many.

    Returns:
        The nearest that was found; `None` if no start led to one.
    """
    rank = as_integer("rank", rank, least=1)
    check(rank <= case.dimension, f"rank is {rank}; the dimension is {case.dimension}.")
    near = _near(case)
    found = _search(near, _stationary_equations, _starts(near, rank, key, starts))
    return _nearest(case, near, found, _as_stationary)


def nearest_cycle(case: Case, *, key: Key, starts: int = 4) -> NearMiss | None:
    r"""Change $Q$ and $V$ as little as possible until a covariance returns.

    As `nearest_stationary`, with the equations $S(T) = S(0)$ of the flow for a
    covariance of full rank that goes a way of its own size or so, and an unknown $T$.

    Args:
        case: the matrices, of a single head without perceptron.
        key: random key for the first covariances and periods.
        starts: how many.

    Returns:
        The nearest that was found, with its Floquet multipliers; `None` if none was.
    """
    near = _near(case)
    found = _search(near, _return_equations, _starts(near, case.dimension, key, starts))
    return _nearest(case, near, found, _as_cycle)


def _near(case: Case) -> _Near:
    check(
        len(case.heads) == 1 and case.perceptron is None,
        "the search is for a single head without perceptron.",
    )
    query, key, value = (jnp.asarray(matrix, float) for matrix in case.heads[0])
    trace = jnp.asarray(np.trace(case.covariance), float)
    return _Near(query, key, value, trace, case.beta, case.kind)


def _unmoved(near: _Near, root: Float[Array, "d r"]) -> _Unknowns:
    zero = jnp.zeros_like(near.trace)
    return _Unknowns(0 * near.query, 0 * near.value, root, zero)


def _starts(near: _Near, rank: int, key: Key, count: int) -> _Unknowns:
    """Return random factors, periods, and unchanged matrices."""
    count = as_integer("starts", count, least=1)
    for_roots, for_periods = jr.split(as_key(key))
    roots = jr.normal(for_roots, (count, len(near.value), rank))
    roots *= jnp.sqrt(near.trace / jnp.sum(roots**2, axis=(1, 2), keepdims=True))
    bounds = jnp.log(jnp.array([SHORTEST, LONGEST]) * near.time())
    periods = jr.uniform(for_periods, (count,), minval=bounds[0], maxval=bounds[1])
    unmoved = jax.vmap(lambda root: _unmoved(near, root))(roots)
    return unmoved._replace(log_period=periods)


@eqx.filter_jit
def _search(near: _Near, equations: Callable, starts: _Unknowns) -> _Unknowns:
    """Come from the matrices of the case to some that solve the equations."""

    def residual(found: _Unknowns, weight):
        apart = (found.query / near.size, found.value / near.size)
        return jax.tree.map(lambda x: weight * x, equations(near, found)), apart

    def alone(found: _Unknowns, weight):
        return equations(near, found)

    def solved(function, found, weight):
        solver = optimistix.LevenbergMarquardt(rtol=1e-12, atol=1e-12)
        options = {"options": {"jac": "bwd"}, "max_steps": STEPS, "throw": False}
        return optimistix.least_squares(
            function, solver, found, weight, **options
        ).value

    def closer(found: _Unknowns, weight):
        return solved(residual, found, weight), None

    def one(found: _Unknowns):
        found, _ = jax.lax.scan(closer, found, jnp.array(WEIGHTS))
        return solved(alone, found, 1.0)

    return jax.lax.map(one, starts)


def _stationary_equations(near: _Near, found: _Unknowns):
    spread = matmul(found.root, found.root.T)
    change = stationary.covariance_velocity(near.gamma(found), spread, found.root)
    rate = near.time() / jnp.sqrt(jnp.sum(spread**2))
    return stationary.entries_of(rate * change), *_admissible(near, found)


def _return_equations(near: _Near, found: _Unknowns):
    first = matmul(found.root, found.root.T)
    half_way, last = _cycle(near.gamma(found), found.root, jnp.exp(found.log_period))
    size = jnp.linalg.norm(first)
    short = jax.nn.relu(WAY - jnp.linalg.norm(half_way - first) / size)
    long = jax.nn.relu(found.log_period - jnp.log(LONGEST * near.time()))
    return (
        stationary.entries_of((last - first) / size),
        *_admissible(near, found),
        short,
        long,
    )


def _admissible(near: _Near, found: _Unknowns) -> tuple[Array, Array]:
    """Return what is zero for a covariance of the right trace and a clear rank."""
    values = jnp.linalg.eigvalsh(matmul(found.root.T, found.root))
    flat = jax.nn.relu(LEAST - values[0] / values[-1])
    return jnp.sum(found.root**2) / near.trace - 1, flat


def _cycle(gamma, root: Float[Array, "d r"], period: Float[Array, ""]):
    """Return the covariances half way and at the end."""
    start = centred(factor=root)
    path = quiet_solve(gamma, start, period, save=3, rtol=1e-10, steps=BUDGET)
    return path.covariances[1], path.covariances[2]


def _nearest(
    case: Case, near: _Near, found: _Unknowns, read: Callable
) -> NearMiss | None:
    """Return the nearest of those that solve the equations."""
    misses = []
    for index in range(len(found.log_period)):
        one = jax.tree.map(lambda leaf, index=index: leaf[index], found)
        if all(bool(jnp.isfinite(leaf).all()) for leaf in one):
            misses.append(read(case, near, one))
    good = [miss for miss in misses if miss.residual <= EXACT and miss.smallest > SURE]
    return min(good, key=lambda miss: miss.distance, default=None)


def _as_stationary(case: Case, near: _Near, found: _Unknowns) -> NearMiss:
    point = stationary.certified(near.gamma(found), np.asarray(found.root))
    return NearMiss(*_changed(case, near, found), point.residual, point.smallest)


def _as_cycle(case: Case, near: _Near, found: _Unknowns) -> NearMiss:
    gamma, period = near.gamma(found), jnp.exp(found.log_period)
    spread = matmul(found.root, found.root.T)
    values = np.linalg.eigvalsh(np.asarray(spread))
    last, derivative = _return_map(gamma, spread, period)
    # Where it blows up instead of returning there is no derivative.
    derivative = np.nan_to_num(np.asarray(derivative), posinf=0, neginf=0)
    multipliers = np.linalg.eigvals(derivative)
    away = jnp.linalg.norm(stationary.matrix_of(last) - spread) / jnp.linalg.norm(
        spread
    )
    return NearMiss(
        *_changed(case, near, found),
        float(away),
        float(values[0] / values[-1]),
        float(period),
        multipliers[np.argsort(-np.abs(multipliers), kind="stable")],
    )


@eqx.filter_jit
def _return_map(gamma, spread: Float[Array, "d d"], period: Float[Array, ""]):
    """Return where a covariance comes after a period, and the derivative of that."""

    def after(vector: Array) -> tuple[Array, Array]:
        root = jnp.linalg.cholesky(stationary.matrix_of(vector))
        last = stationary.entries_of(_cycle(gamma, root, period)[1])
        return last, last

    derivative, last = jax.jacrev(after, has_aux=True)(stationary.entries_of(spread))
    return last, derivative


def _changed(case: Case, near: _Near, found: _Unknowns) -> tuple[float, Case]:
    """Return how far the matrices were moved, and the case with them."""
    change = jnp.sqrt(jnp.sum(found.query**2) + jnp.sum(found.value**2))
    matrices = near.query + found.query, near.key, near.value + found.value
    head, root = tuple(map(np.asarray, matrices)), np.asarray(found.root)
    moved = case._replace(heads=[head], covariance=root @ root.T)
    return float(change / near.size), moved
