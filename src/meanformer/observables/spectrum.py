"""The spectrum of a value matrix: what leads, with which multiplicity and margin."""

import equinox as eqx
import numpy as np
from jaxtyping import Complex, Float

# Relative to the norm of the matrix: eigenvalues closer than the first are one
# eigenvalue; farther apart than the second they are two; between, nobody can tell.
SAME, APART = 1e-12, 1e-7
ROUNDINGS = 64


class Spectrum(eqx.Module):
    r"""Eigenvalues of a matrix, and the space of the leading one.

    Attributes:
        eigenvalues: all of them, of decreasing modulus.
        leading: the one of largest modulus.
        is_real: whether it is real.
        multiplicity: how many eigenvalues coincide with it.
        gap: its modulus less that of the next eigenvalue; its modulus if there is none.
        is_clear: whether the gap is far above rounding.
        vectors: a basis of its eigenspace, one per row; $\varphi_1$ if it is simple.
        functionals: the dual basis of left eigenvectors, $\langle\varphi_i^*,
            \varphi_j\rangle = \delta_{ij}$.
        is_diagonal: whether the matrix is a multiple of the identity on the space of
            the leading eigenvalue: no Jordan block.
    """

    eigenvalues: Complex[np.ndarray, " d"]
    leading: complex
    is_real: bool
    multiplicity: int
    gap: float
    is_clear: bool
    vectors: Float[np.ndarray, "k d"]
    functionals: Float[np.ndarray, "k d"]
    is_diagonal: bool


def spectrum(matrix: Float[np.ndarray, "d d"]) -> Spectrum:
    """Analyse the leading eigenvalue of a square matrix, on the host."""
    matrix = np.asarray(matrix)
    # An eigenvalue is known to rounding of the type that the matrix came in.
    rounding = ROUNDINGS * len(matrix) * float(np.finfo(matrix.dtype).eps)
    matrix = matrix.astype(np.float64)
    size = np.linalg.norm(matrix, 2)
    values = np.linalg.eigvals(matrix)
    values = values[np.argsort(-np.abs(values), kind="stable")].astype(complex)
    same, apart = max(SAME, rounding) * size, max(APART, rounding) * size
    leading = values[0]
    is_real = bool(abs(leading.imag) <= same)
    close = np.abs(values - leading) <= same
    rest = values[~close]
    gap = float(abs(leading) - (np.abs(rest).max() if len(rest) else 0.0))
    vectors, functionals = _eigenspace(matrix, leading.real, same)
    multiplicity = int(close.sum())
    return Spectrum(
        values,
        complex(leading),
        is_real,
        multiplicity,
        gap,
        bool(gap > apart),
        vectors,
        functionals,
        is_real and len(vectors) == multiplicity,
    )


def _eigenspace(matrix, value: float, tolerance: float):
    """Null space of the matrix less the eigenvalue, and its dual."""
    left, sizes, right = np.linalg.svd(matrix - value * np.eye(len(matrix)))
    # An eigenvalue is accurate to rounding times the conditioning of its vectors.
    kernel = sizes <= 1e3 * tolerance
    vectors, functionals = right[kernel], left[:, kernel].T
    vectors = vectors * _signs(vectors)
    pairing = functionals @ vectors.T
    if len(vectors) == 0 or np.linalg.cond(pairing) > 1e8:
        return np.zeros((0, len(matrix))), np.zeros((0, len(matrix)))
    return vectors, np.linalg.solve(pairing, functionals)


def _signs(vectors: np.ndarray) -> np.ndarray:
    """Make the largest entry of every vector positive."""
    if len(vectors) == 0:
        return np.ones((0, 1))
    largest = np.abs(vectors).argmax(axis=1)
    return np.sign(vectors[np.arange(len(vectors)), largest])[:, None]
