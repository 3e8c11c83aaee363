"""Averages over tokens as self-adjoint operators, and the systems they enter."""

import abc
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.sparse.linalg import cg
from jaxtyping import Array, Float

from meanformer.numerics.arrays import matmul
from meanformer.numerics.sinkhorn.self_transport import SelfTransport

DENSE_LIMIT = 256
CG_LIMIT = 500


class AbstractAveraging(eqx.Module):
    r"""An average $S$ over the tokens of a plan, self-adjoint for some masses $m$.

    $$\sum_i m_i h_i (S h')_i = \sum_i m_i (S h)_i h'_i, \qquad S 1 = 1.$$

    Attributes:
        problem: the cloud and the score.
        f: the row step of g.
        g: the token potential.
        masses: $m$, zero for absent tokens.
    """

    problem: eqx.AbstractVar[SelfTransport]
    f: eqx.AbstractVar[Float[Array, " n"]]
    g: eqx.AbstractVar[Float[Array, " n"]]
    masses: eqx.AbstractVar[Float[Array, " n"]]

    @abc.abstractmethod
    def derivative(self, h: Float[Array, " n"]) -> Float[Array, " n"]:
        """Return $Sh$ as a derivative, which can be transposed."""

    @abc.abstractmethod
    def average(self, h: Float[Array, " n"]) -> Float[Array, " n"]:
        """Return $Sh$ as an average, which is cheaper."""

    @abc.abstractmethod
    def matrix(self) -> Float[Array, "n n"]:
        """Return $S$ as a dense array, zero for absent tokens."""


class RoundAverage(AbstractAveraging):
    """Row average, then column average: the derivative of one round of steps.

    It is nonnegative, and self-adjoint for the masses that the plan gives to columns.
    """

    problem: SelfTransport
    f: Float[Array, " n"]
    g: Float[Array, " n"]
    masses: Float[Array, " n"]

    def derivative(self, h):
        """Differentiate a round of steps in the direction $h$."""
        return jax.jvp(self.problem.both_steps, (self.g,), (h,))[1]

    def average(self, h):
        """Average over rows and then over columns."""
        seen = self.problem.row_average(self.g, h[:, None])
        return self.problem.column_average(self.f, seen)[:, 0]

    def matrix(self):
        """Multiply the matrices of both averages."""
        weights, rows = self.problem.weights, _row_matrix(self)
        moved = matmul(weights[None, :] * rows.T, rows)
        return _zero_where_absent(self, moved / _nonzero(self.masses)[:, None])


class RowAverage(AbstractAveraging):
    r"""Row average alone, for a symmetric form: minus the derivative of a row step.

    It is self-adjoint for the masses $w_i e^{g_i - f_i}$.
    """

    problem: SelfTransport
    f: Float[Array, " n"]
    g: Float[Array, " n"]
    masses: Float[Array, " n"]

    def derivative(self, h):
        """Differentiate a row step in the direction $-h$."""
        return jax.jvp(self.problem.row_step, (self.g,), (-h,))[1]

    def average(self, h):
        """Average over rows."""
        return self.problem.row_average(self.g, h[:, None])[:, 0]

    def matrix(self):
        """Return the weights of the averages over rows."""
        return _row_matrix(self)


def solve_sum(
    average: AbstractAveraging, right: Float[Array, " n"], *, tolerance
) -> Float[Array, " n"]:
    """Solve $h + Sh = r$ for a nonnegative average; absent tokens get zero.

    The condition number is at most two.
    """
    return _solve(average, right, 1, jnp.zeros_like(right), tolerance)


def solve_difference(
    average: AbstractAveraging, right: Float[Array, " n"], *, tolerance
) -> Float[Array, " n"]:
    """Solve $h - Sh = r$ for $h$ and $r$ of mean zero; absent tokens get zero.

    The constants, which $I - S$ cannot see, are lifted to eigenvalue one, and a shift
    of the size of rounding bounds what noise can become.
    """
    roots, _ = _scaling(average)
    return _solve(average, right, -1, roots / jnp.linalg.norm(roots), tolerance)


def _solve(average, right, sign, lifted, tolerance):
    """Solve $h + sign Sh = r$, symmetrised with the roots of the masses.

    Up to `DENSE_LIMIT` tokens directly, beyond by at most `CG_LIMIT` conjugate gradient
    steps, until the residual is the tolerance times $r$.
    """
    roots, inverse_roots = _scaling(average)

    def operator(apply, z):
        moved = roots * apply(inverse_roots * z)
        return z + _shift(z) + sign * moved + lifted * jnp.dot(lifted, z)

    def direct(_, b):
        return jnp.linalg.solve(_dense(average, sign, lifted), b)

    def iterative(_, b):
        fast = partial(operator, average.average)
        return cg(fast, b, tol=tolerance, maxiter=CG_LIMIT)[0]

    def without_lifted(z):
        return z - lifted * jnp.dot(lifted, z)

    z = lax.custom_linear_solve(
        partial(operator, average.derivative),
        without_lifted(roots * right),
        direct if len(right) <= DENSE_LIMIT else iterative,
        symmetric=True,
    )
    return inverse_roots * without_lifted(z)


def _dense(average, sign, lifted):
    """Return the symmetrised matrix; that of $I - S$ free of cancellation."""
    roots, inverse_roots = _scaling(average)
    moved = average.matrix()
    identity = jnp.eye(len(roots), dtype=roots.dtype)
    if sign < 0:
        moved *= 1 - identity
        stays = jnp.where(roots > 0, moved.sum(axis=1), 1)
    else:
        stays = jnp.ones_like(roots)
    moved = roots[:, None] * moved * inverse_roots[None, :]
    diagonal = jnp.diag(stays + _shift(jnp.ones_like(stays)))
    return diagonal + sign * (moved + moved.T) / 2 + jnp.outer(lifted, lifted)


def _row_matrix(average):
    density = average.problem.density(average.f, average.g)
    return _zero_where_absent(average, density * average.problem.weights[None, :])


def _zero_where_absent(average, matrix):
    present = average.problem.weights > 0
    return jnp.where(present[:, None] & present[None, :], matrix, 0)


def _nonzero(masses):
    return jnp.where(masses > 0, masses, 1)


def _scaling(average):
    """Return the roots of the masses and their inverses, zero for absent tokens."""
    present = average.problem.weights > 0
    roots = jnp.sqrt(jnp.where(present, average.masses, 1))
    return jnp.where(present, roots, 0), jnp.where(present, 1 / roots, 0)


def _shift(z):
    return 2 * jnp.finfo(z.dtype).eps * z
