"""Matrices: products, square roots with a safe derivative, checks of covariances."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from meanformer.errors import PrecisionWarning, check, is_concrete, warn
from meanformer.numerics.arrays import matmul

NEGATIVE_TOLERANCE = 1e-8
# Beside one, the square of a matrix of this trace loses no more than four digits.
SMALL_SQUARE = 1e4


@jax.custom_jvp
def sqrt_psd(matrix: Float[Array, "d d"]) -> Float[Array, "d d"]:
    r"""Symmetric square root of a positive semi-definite matrix.

    $$R = U \operatorname{diag}(\sqrt{\lambda^+})\, U^\top, \qquad
      S = U \operatorname{diag}(\lambda)\, U^\top.$$

    The derivative solves $R\dot R + \dot R R = \dot S$, which needs no gap between
    eigenvalues. On a common kernel, where the root is not differentiable, it is taken
    as zero, so that derivatives of any order stay finite.

    Args:
        matrix: the matrix $S$; only its symmetric part counts, and eigenvalues that
            rounding made negative are taken as zero.

    Returns:
        The root $R$. Cost: one symmetric eigendecomposition, $O(d^3)$.
    """
    eigenvalues, vectors = jnp.linalg.eigh(matrix)
    roots = jnp.sqrt(jnp.maximum(eigenvalues, 0))
    return matmul(vectors * roots[None, :], vectors.T)


@sqrt_psd.defjvp
def _sqrt_psd_jvp(primals, tangents):
    (matrix,), (moving,) = primals, tangents
    root = sqrt_psd(matrix)
    return root, solve_sylvester(root, (moving + moving.T) / 2)


@jax.custom_jvp
def sqrt_one_plus_square(matrix: Float[Array, "d d"]) -> Float[Array, "d d"]:
    r"""Return $(I + XX^\top)^{1/2}$.

    Where $X$ is large through its singular values, which take longer: in the square
    small ones drown beside large ones. The derivative is that of `sqrt_psd`.
    """
    square = matmul(matrix, matrix.T)

    def by_eigenvalues():
        squares, vectors = jnp.linalg.eigh(square)
        return jnp.maximum(squares, 0), vectors

    def by_singular_values():
        vectors, values, _ = jnp.linalg.svd(matrix, full_matrices=False)
        return values**2, vectors

    is_small = jnp.trace(square) < SMALL_SQUARE
    squares, vectors = lax.cond(is_small, by_eigenvalues, by_singular_values)
    identity = jnp.eye(len(matrix), dtype=matrix.dtype)
    excess = squares / (1 + jnp.sqrt(1 + squares))
    return identity + matmul(vectors * excess[None, :], vectors.T)


@sqrt_one_plus_square.defjvp
def _sqrt_one_plus_square_jvp(primals, tangents):
    (matrix,), (moving,) = primals, tangents
    root, half = sqrt_one_plus_square(matrix), matmul(moving, matrix.T)
    return root, solve_sylvester(root, half + half.T)


@jax.custom_jvp
def solve_sylvester(
    root: Float[Array, "d d"], right: Float[Array, "d d"]
) -> Float[Array, "d d"]:
    r"""Solution of $RX + XR = C$ for a positive semi-definite $R$.

    Where a sum of two eigenvalues of $R$ is below what rounding of $R^2$ resolves,
    the component of $X$ is zero: the pseudo-inverse instead of a division by zero.

    Args:
        root: the symmetric matrix $R$.
        right: the right-hand side $C$.

    Returns:
        The solution $X$. Cost: one symmetric eigendecomposition, $O(d^3)$.
    """
    eigenvalues, vectors = jnp.linalg.eigh(root)
    sums = eigenvalues[:, None] + eigenvalues[None, :]
    resolution = np.sqrt(len(root) * jnp.finfo(root.dtype).eps).astype(root.dtype)
    is_resolved = sums > resolution * jnp.abs(eigenvalues).max()
    rotated = matmul(matmul(vectors.T, right), vectors)
    solved = jnp.where(is_resolved, rotated / jnp.where(is_resolved, sums, 1), 0)
    return matmul(matmul(vectors, solved), vectors.T)


@solve_sylvester.defjvp
def _solve_sylvester_jvp(primals, tangents):
    (root, right), (moving_root, moving_right) = primals, tangents
    solution = solve_sylvester(root, right)
    moved = matmul(moving_root, solution) + matmul(solution, moving_root)
    return solution, solve_sylvester(root, moving_right - moved)


def checked_covariance(name: str, matrix: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """Return a covariance that is symmetric and positive semi-definite, or raise.

    Rounding is forgiven: an asymmetry below 1e-8 of the largest eigenvalue is averaged
    away, and a negative eigenvalue that small is clipped, with a warning if it is
    larger than rounding explains. A traced matrix is returned as it is.

    Args:
        name: what to call the matrix in messages.
        matrix: the candidate.

    Returns:
        The matrix itself whenever nothing had to be repaired.
    """
    if not is_concrete(matrix):
        return matrix
    exact = np.asarray(matrix, np.float64)
    eigenvalues, vectors = np.linalg.eigh((exact + exact.T) / 2)
    scale = float(np.abs(eigenvalues).max())
    rounding = 8 * len(matrix) * float(jnp.finfo(matrix.dtype).eps)
    tolerance = max(NEGATIVE_TOLERANCE, rounding) * scale
    _check_symmetric(name, exact, tolerance)
    lowest = float(eigenvalues[0])
    check(
        lowest >= -tolerance,
        f"{name} has the eigenvalue {lowest:.6g}; it must be positive semi-definite.",
    )
    if lowest < -rounding * scale:
        advice = f"{name} has the eigenvalue {lowest:.3g}, which is taken as zero."
        warn(advice, PrecisionWarning)
        exact = (vectors * np.maximum(eigenvalues, 0)) @ vectors.T
        return jnp.asarray(exact, matrix.dtype)
    return matrix if (exact == exact.T).all() else (matrix + matrix.T) / 2


def _check_symmetric(name: str, matrix: np.ndarray, tolerance: float) -> None:
    asymmetry = float(np.abs(matrix - matrix.T).max())
    check(
        asymmetry <= tolerance,
        f"{name} differs from its transpose by {asymmetry:.3g}; it must be symmetric: "
        "pass (S + S.T) / 2 if that is what you mean.",
    )
