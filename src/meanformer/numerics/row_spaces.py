"""Null spaces and spans of rows, on the host, in NumPy."""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Float


def null_rows(
    table: Float[np.ndarray, "m n"], tolerance: float
) -> Float[np.ndarray, "r n"]:
    """Return rows that span the null space, reduced."""
    _, sizes, rows = np.linalg.svd(table, full_matrices=True)
    rank = np.sum(sizes > tolerance * sizes.max(initial=0)) if sizes.size else 0
    return reduced(rows[rank:])


def reduced(rows: Float[np.ndarray, "r n"]) -> Float[np.ndarray, "r n"]:
    """Return the reduced echelon form of independent rows, from the last column on."""
    rows, done = rows.copy(), 0
    for column in range(rows.shape[1])[::-1]:
        below = np.abs(rows[done:, column])
        if below.max(initial=0) > 1e-7:
            rows[[done, done + below.argmax()]] = rows[[done + below.argmax(), done]]
            rows[done] /= rows[done, column]
            others = np.arange(len(rows)) != done
            rows[others] -= np.outer(rows[others, column], rows[done])
            done += 1
    return np.where(np.abs(rows) > 1e-9, rows, 0)


def spanned(rows: Iterable[np.ndarray], count: int) -> Float[np.ndarray, "r n"]:
    """Return orthonormal rows, of so many entries, with the same span."""
    units = [row / np.linalg.norm(row) for row in rows]
    _, sizes, basis = np.linalg.svd(np.reshape(units, (-1, count)), full_matrices=False)
    return basis[sizes > 1e-6]


def small_integers(row: Float[np.ndarray, " N"]) -> tuple[int, ...] | None:
    """Return the row as small integers, if it is one up to a factor."""
    row = row / np.abs(row[np.abs(row) > 1e-7]).min()
    for multiple in range(1, 13):
        near = np.round(multiple * row)
        if np.abs(multiple * row - near).max() < 1e-6:
            return tuple(int(one) for one in near)
    return None
