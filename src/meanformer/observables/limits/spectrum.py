"""The spectrum of a value matrix: what leads, with which multiplicity and margin."""

from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Complex, Float

# Relative to the norm of the matrix: eigenvalues closer than the first are one
# eigenvalue, and so small a matrix beside it is none; farther apart than the second
# they are two; between, nobody can tell.
SAME, APART = 1e-12, 1e-7
ROUNDINGS = 64
# Left and right eigenvectors with a smaller cosine belong to a matrix that cannot be
# told from one with a Jordan block.
SKEW = 1e-6
# A number below this share of a norm has no clear sign.
CLEAR = 1e-10


class Spectrum(eqx.Module):
    r"""Eigenvalues of a matrix, and the space of the leading one.

    Attributes:
        eigenvalues: all of them, of decreasing modulus.
        leading: the one of largest modulus.
        is_real: whether it is real.
        multiplicity: how many eigenvalues coincide with it.
        gap: its modulus less that of the next eigenvalue; its modulus if there is none.
        is_clear: whether the gap is far above rounding.
        cosine: smallest cosine between its left and right eigenvectors; the eigenvalue
            is known to rounding over this.
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
    cosine: float
    vectors: Float[np.ndarray, "k d"]
    functionals: Float[np.ndarray, "k d"]
    is_diagonal: bool

    @property
    def multiple(self) -> float | None:
        r"""The number $\lambda$ if the matrix is $\lambda I$; else `None`."""
        is_whole = self.is_diagonal and self.multiplicity == len(self.eigenvalues)
        return self.leading.real if is_whole else None

    @property
    def is_defective(self) -> bool:
        """Whether the matrix cannot be told from one with a Jordan block there."""
        return self.cosine < SKEW or (self.is_real and not self.is_diagonal)


def spectrum(matrix: Float[np.ndarray, "d d"]) -> Spectrum:
    """Analyse the leading eigenvalue of a square matrix, on the host."""
    import scipy.linalg

    matrix = np.asarray(matrix)
    # An eigenvalue is known to rounding of the type that the matrix came in.
    eps = float(np.finfo(matrix.dtype).eps)
    matrix = matrix.astype(np.float64)
    size = float(np.linalg.norm(matrix, 2))
    found: Any = scipy.linalg.eig(matrix, left=True, right=True)
    order = np.argsort(-np.abs(found[0]), kind="stable")
    values, left, right = (part[..., order].astype(complex) for part in found)
    same = max(SAME, ROUNDINGS * len(matrix) * eps) * size
    leading = values[0]
    close = np.abs(values - leading) <= same
    multiplicity, is_real = int(close.sum()), bool(abs(leading.imag) <= same)
    vectors, functionals, cosine, defect = _eigenspace(
        matrix, leading.real, multiplicity
    )
    is_diagonal = is_real and defect <= same
    if multiplicity == 1 or not is_diagonal:
        cosine = float(np.abs(np.sum(left.conj() * right, axis=0))[close].min())
    rest = np.abs(values[~close]).max(initial=0.0)
    gap = float(abs(leading) - rest)
    needed = max(APART, ROUNDINGS * eps / max(cosine, SKEW)) * size
    return Spectrum(
        values,
        complex(leading),
        is_real,
        multiplicity,
        gap,
        bool(gap > needed),
        cosine,
        vectors,
        functionals,
        is_diagonal,
    )


def _eigenspace(matrix, value: float, count: int):
    """Vectors nearest to the kernel, their dual, the cosine of both, and the defect."""
    left, sizes, right = np.linalg.svd(matrix - value * np.eye(len(matrix)))
    vectors, functionals = right[-count:], left[:, -count:].T
    # The largest entry of every vector is positive.
    largest = np.abs(vectors).argmax(axis=1)
    vectors = vectors * np.sign(vectors[np.arange(count), largest])[:, None]
    pairing = functionals @ vectors.T
    cosine = float(np.linalg.svd(pairing, compute_uv=False)[-1])
    is_skew = cosine < SKEW
    dual = vectors[:0] if is_skew else np.linalg.solve(pairing, functionals)
    return vectors[: len(dual)], dual, cosine, float(sizes[-count])


def leading_positive(value: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return vectors, functionals and values of the leading positive eigenvalues.

    Those before the first, by modulus, that is not real and positive; none if the
    eigenvectors do not form a basis.
    """
    eps = float(np.finfo(np.asarray(value).dtype).eps)
    clear = max(CLEAR, 1e3 * eps)
    values, vectors = np.linalg.eig(np.asarray(value, np.float64))
    order = np.argsort(-np.abs(values), kind="stable")
    values, vectors = values[order], vectors[:, order]
    size = np.abs(values).max(initial=0)
    is_real = np.abs(np.imag(values)) <= clear * size
    is_positive = is_real & (np.real(values) > clear * size)
    count = int(np.argmin(np.append(is_positive, False)))
    # Ties in modulus with what is not positive do not lead.
    rest = np.abs(values[count:]).max(initial=0)
    count = int((np.abs(values[:count]) > rest + clear * size).sum())
    if np.linalg.cond(vectors) > 1 / SKEW:
        count = 0
    dual = np.linalg.inv(vectors) if count else vectors
    return np.real(vectors[:, :count].T), np.real(dual[:count]), np.real(values[:count])
