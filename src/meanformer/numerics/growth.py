"""Exponentials of matrices that grow, with their scale kept as a logarithm."""

import equinox as eqx
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
from jaxtyping import Array, Complex, Float

from meanformer.errors import is_concrete
from meanformer.numerics.arrays import matmul

# Eigenvectors of a larger condition number lose more digits than squaring does.
WORST_CONDITION = 1e3
# Enough to halve any finite exponent below one.
SQUARINGS = 64


class ScaledExponential(eqx.Module):
    r"""The matrices $e^{tV}$ as $e^{\ell t}M(t)$, where $M$ does not overflow.

    $\ell$ is the largest real part of an eigenvalue of $V$. Where the eigenvectors are
    well conditioned $M(t) = W e^{t(\Lambda - \ell)}W^{-1}$ through them; otherwise, and
    for a matrix that is traced, by scaling and squaring.

    Attributes:
        matrix: the matrix $V$.
        rate: the growth rate $\ell$.
        rates: the eigenvalues less $\ell$; `None` without eigenvectors.
        basis: the eigenvectors $W$.
        dual: their inverse.
    """

    matrix: Float[Array, "d d"]
    rate: Float[Array, ""]
    rates: Complex[Array, " d"] | None
    basis: Complex[Array, "d d"] | None
    dual: Complex[Array, "d d"] | None

    def __init__(self, matrix: Float[Array, "d d"]):
        self.matrix = matrix
        self.rates = self.basis = self.dual = None
        if not is_concrete(matrix):
            # The norm bounds the growth rate from above; it need not be sharp.
            self.rate = jnp.linalg.norm(matrix)
            return
        values, vectors = np.linalg.eig(np.asarray(matrix, np.float64))
        rate = np.real(values).max()
        self.rate = jnp.asarray(rate, matrix.dtype)
        if np.linalg.cond(vectors) <= WORST_CONDITION:
            wide = np.result_type(matrix.dtype, np.complex64)
            self.rates = jnp.asarray(values - rate, wide)
            self.basis = jnp.asarray(vectors, wide)
            self.dual = jnp.asarray(np.linalg.inv(vectors), wide)

    def log_scale(self, depth: Float[Array, ""]) -> Float[Array, ""]:
        r"""Return $\ell t$."""
        return self.rate * depth

    def at(self, depth: Float[Array, ""]) -> Float[Array, "d d"]:
        r"""Return $M(t)$. Cost: $O(d^3)$."""
        if self.rates is None or self.basis is None:
            identity = jnp.eye(len(self.matrix), dtype=self.matrix.dtype)
            shifted = self.matrix - self.rate * identity
            exponent = depth.astype(identity.dtype) * shifted
            return jax.scipy.linalg.expm(exponent, max_squarings=SQUARINGS)
        factors = jnp.exp(depth.astype(self.rates.dtype) * self.rates)
        return matmul(self.basis * factors[None, :], self.dual).real
