"""Matrices that agree, or are multiples of one another, up to rounding."""

import numpy as np
from jaxtyping import Array, Float

# Roundings of one entry, for every row.
ROUNDINGS = 16


def agree(first: np.ndarray, second: np.ndarray, tolerance: float) -> bool:
    """Whether two matrices agree, relative to the largest entry of the first."""
    apart = np.abs(first - second).max(initial=0)
    return bool(apart <= tolerance * np.abs(first).max(initial=0))


def multiple_of(base: np.ndarray, other: np.ndarray, tolerance: float) -> float | None:
    """Return the factor $c$ if the other matrix is $c$ times the base.

    The only multiple of zero is zero, with the factor zero.
    """
    if base.shape != other.shape:
        return None
    square = np.sum(base * base)
    factor = float(np.sum(base * other) / square) if square > 0 else 0.0
    return factor if agree(other, factor * base, tolerance) else None


def multiple_of_identity(matrix: Float[Array, "d e"] | np.ndarray) -> float | None:
    """Return the factor $c$ if a matrix is $cI$ up to rounding."""
    known = np.asarray(matrix, np.float64)
    if known.shape[0] != known.shape[1]:
        return None
    rounding = ROUNDINGS * len(known) * float(np.finfo(np.asarray(matrix).dtype).eps)
    return multiple_of(np.eye(len(known)), known, rounding)


def definite_quotient(
    base: np.ndarray, other: np.ndarray, tolerance: float
) -> np.ndarray | None:
    """Return the symmetric definite $P$ with other $= P$ base, if there is one."""
    if base.shape != other.shape or base.shape[0] != base.shape[1]:
        return None
    condition = np.linalg.cond(base)
    if condition * tolerance > 1:
        return None
    quotient = np.linalg.solve(base.T, other.T).T
    if not agree(quotient, quotient.T, tolerance * condition):
        return None
    symmetric = (quotient + quotient.T) / 2
    signs = np.linalg.eigvalsh(symmetric)
    return symmetric if signs[0] * signs[-1] > 0 else None
