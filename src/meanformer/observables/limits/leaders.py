"""Who is attended to: leaders, followers, and the rank of an attention matrix."""

import equinox as eqx
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from meanformer.errors import check

# Rounding of an attention matrix is far below this, and a share that still counts
# far above.
SHARP = 1e-6


class Following(eqx.Module):
    r"""Whom each token attends to most, and how exclusively.

    Attributes:
        follows: for each token the index of the one with the largest share of its row.
        spread: what the row gives to all others, $1 - \max_j P_{ij}$; the distance of
            the row to the closest basis vector, in the largest entry.
        is_leader: tokens that attend to themselves alone, $P_{ii} > 1 - \varepsilon$.
        is_boolean: rows with a single entry, up to $\varepsilon$.
        rank: number of singular values of the matrix above $\varepsilon$.
    """

    follows: Int[np.ndarray, " n"]
    spread: Float[np.ndarray, " n"]
    is_leader: Bool[np.ndarray, " n"]
    is_boolean: Bool[np.ndarray, " n"]
    rank: int

    @property
    def leaders(self) -> Int[np.ndarray, " k"]:
        """Indices of the leaders."""
        return np.flatnonzero(self.is_leader)

    @property
    def chosen(self) -> Int[np.ndarray, " k"]:
        """Indices of the tokens that somebody follows."""
        return np.unique(self.follows)


def find_leaders(
    matrix: Float[Array, "m n"] | np.ndarray, *, tolerance: float = SHARP
) -> Following:
    r"""Read off an attention matrix who follows whom.

    Args:
        matrix: the matrix $P$, one row for each token; `attention_matrix` makes it.
        tolerance: the $\varepsilon$ of `Following`, absolute.

    Returns:
        Followers, leaders and rank. Cost: one singular value decomposition.
    """
    shares = _checked(matrix, tolerance)
    largest = shares.max(axis=1)
    own = np.diagonal(shares)
    return Following(
        shares.argmax(axis=1),
        1 - largest,
        own > 1 - tolerance,
        largest > 1 - tolerance,
        attention_rank(shares, tolerance=tolerance),
    )


def attention_rank(
    matrix: Float[Array, "m n"] | np.ndarray, *, tolerance: float = SHARP
) -> int:
    """Count the singular values of a matrix above an absolute tolerance.

    A relative tolerance near rounding would count noise: the rows of an attention
    matrix sum to one, so that its scale is known.

    Args:
        matrix: the matrix.
        tolerance: the smallest singular value that counts.
    """
    values = np.linalg.svd(np.asarray(matrix, np.float64), compute_uv=False)
    return int((values > tolerance).sum())


def _checked(matrix, tolerance: float) -> np.ndarray:
    shares = np.asarray(matrix, np.float64)
    check(
        shares.ndim == 2 and shares.shape[0] == shares.shape[1],
        f"matrix has shape {shares.shape}; it must be square, one row per token; for "
        "several heads give one of them.",
    )
    check(
        0 < tolerance < 0.5,
        f"tolerance is {tolerance}; it must be between 0 and one half.",
    )
    sums = shares.sum(axis=1)
    check(
        bool(np.abs(sums - 1).max(initial=0) < 1e-3),
        f"a row sums to {sums[np.abs(sums - 1).argmax()] if len(sums) else 0:.4g}; "
        "leaders are read off rows that sum to one.",
    )
    return shares
