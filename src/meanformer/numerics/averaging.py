"""Averages over tokens as self-adjoint operators, and the systems they enter."""

import abc
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.sparse.linalg import cg
from jaxtyping import Array, Float

from meanformer.numerics.self_transport import SelfTransport

DENSE_LIMIT = 256
CG_LIMIT = 500


class AbstractAveraging(eqx.Module):
    """An average $S$ over tokens, self-adjoint for some masses; it keeps constants."""

    problem: eqx.AbstractVar[SelfTransport]
    masses: eqx.AbstractVar[Float[Array, " n"]]

    @abc.abstractmethod
    def __call__(self, h: Float[Array, " n"]) -> Float[Array, " n"]:
        """Return $Sh$, as a function of $h$ that can be transposed."""

    @abc.abstractmethod
    def average(self, values: Float[Array, "n v"]) -> Float[Array, "n v"]:
        """Return $S$ applied to columns: cheaper, and without a transpose."""


class RoundAverage(AbstractAveraging):
    r"""Row average, then column average: the derivative of one round of steps.

    With $f$ the row step of $g$, it is self-adjoint and nonnegative for the masses
    that the plan gives to its columns.
    """

    problem: SelfTransport
    f: Float[Array, " n"]
    g: Float[Array, " n"]
    masses: Float[Array, " n"]

    def __call__(self, h):
        """Return the derivative of a round in the direction $h$."""
        return jax.jvp(self.problem.round, (self.g,), (h,))[1]

    def average(self, values):
        """Average over rows and then over columns."""
        seen = self.problem.row_average(self.g, values)
        return self.problem.column_average(self.f, seen)


class RowAverage(AbstractAveraging):
    r"""Row average alone, for a symmetric form: minus the derivative of a row step.

    It is self-adjoint for the masses $w_i e^{g_i - f_i}$, with $f$ the row step of $g$.
    """

    problem: SelfTransport
    g: Float[Array, " n"]
    masses: Float[Array, " n"]

    def __call__(self, h):
        """Return minus the derivative of a row step in the direction $h$."""
        return -jax.jvp(self.problem.row_step, (self.g,), (h,))[1]

    def average(self, values):
        """Average over rows."""
        return self.problem.row_average(self.g, values)


def solve_sum(
    average: AbstractAveraging, right: Float[Array, " n"], *, tolerance
) -> Float[Array, " n"]:
    """Solve $h + Sh = r$ for a nonnegative average; absent tokens get zero.

    The condition number is at most two, so a few conjugate gradient steps do.
    """
    roots, inverse_roots = _scaling(average)

    def operator(derivative, z):
        return z + roots * derivative(inverse_roots * z)

    def solve(_, b):
        fast = partial(operator, _of_vectors(average))
        return cg(fast, b, tol=tolerance, maxiter=CG_LIMIT)[0]

    matvec = partial(operator, average)
    z = lax.custom_linear_solve(matvec, roots * right, solve, symmetric=True)
    return inverse_roots * z


def solve_difference(
    average: AbstractAveraging, right: Float[Array, " n"], *, tolerance
) -> Float[Array, " n"]:
    r"""Solve $h - Sh = r$ for $h$ and $r$ of mean zero; absent tokens get zero.

    The constants, which $I - S$ cannot see, are lifted to eigenvalue one, and a shift
    of the size of rounding bounds what noise can become. Up to `DENSE_LIMIT` tokens
    the solve is direct, beyond it is at most `CG_LIMIT` conjugate gradient steps, until
    the residual is the tolerance times $r$.
    """
    roots, inverse_roots = _scaling(average)
    unit = roots / jnp.linalg.norm(roots)

    def operator(derivative, z):
        moved = roots * derivative(inverse_roots * z)
        return _shift(z) + z - moved + unit * jnp.dot(unit, z)

    def direct(_, b):
        return jnp.linalg.solve(_dense_difference(average, roots, inverse_roots), b)

    def iterative(_, b):
        fast = partial(operator, _of_vectors(average))
        return cg(fast, b, tol=tolerance, maxiter=CG_LIMIT)[0]

    method = direct if len(right) <= DENSE_LIMIT else iterative
    scaled = roots * right
    scaled -= unit * jnp.dot(unit, scaled)
    matvec = partial(operator, average)
    z = lax.custom_linear_solve(matvec, scaled, method, symmetric=True)
    return inverse_roots * (z - unit * jnp.dot(unit, z))


def _scaling(average):
    """Return the roots of the masses and their inverses, zero for absent tokens."""
    present = average.problem.weights > 0
    roots = jnp.sqrt(jnp.where(present, average.masses, 1))
    return jnp.where(present, roots, 0), jnp.where(present, 1 / roots, 0)


def _of_vectors(average):
    return lambda h: average.average(h[:, None])[:, 0]


def _shift(z):
    return 2 * jnp.finfo(z.dtype).eps * z


def _dense_difference(average, roots, inverse_roots):
    """Return the matrix of `solve_difference`, its diagonal free of cancellation."""
    identity = jnp.eye(len(roots), dtype=roots.dtype)
    moved = (1 - identity) * average.average(identity)
    stays = moved.sum(axis=1) + jnp.where(roots > 0, _shift(jnp.ones_like(roots)), 1)
    moved = roots[:, None] * moved * inverse_roots[None, :]
    unit = roots / jnp.linalg.norm(roots)
    return jnp.diag(stays) - (moved + moved.T) / 2 + jnp.outer(unit, unit)
