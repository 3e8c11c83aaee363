r"""Polynomials by their coefficients in Bernstein's basis, which bound them.

A polynomial on a cell lies between its least and its largest coefficient, and those
of its two halves are averages of its own. So an error of the coefficients never grows,
and a cell is cut until the signs tell where the polynomial changes its sign.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

_EPSILON = float(np.finfo(np.float64).eps)
# Halvings of a cell after which what is left is undecided.
_DEEPEST = 45


class Cells(NamedTuple):
    """Functions on intervals: polynomials and how wrong they may be.

    Attributes:
        low: left ends.
        high: right ends.
        coefficients: those of Bernstein's basis, one row for each cell.
        errors: bound of the error of all coefficients, derivative included.
    """

    low: np.ndarray
    high: np.ndarray
    coefficients: np.ndarray
    errors: np.ndarray

    def chosen(self, where: np.ndarray) -> "Cells":
        """Some of the cells."""
        return Cells(*(part[where] for part in self))


class Leaves(NamedTuple):
    """Intervals on which the behaviour of a function is known, in order.

    Attributes:
        low: left ends.
        high: right ends.
        sign: the sign all over it, zero if it changes or is not known.
        trend: 1 if the function increases all over it, -1 if it decreases, else 0.
        ends: signs at the two ends, zero where they are not known.
    """

    low: np.ndarray
    high: np.ndarray
    sign: np.ndarray
    trend: np.ndarray
    ends: np.ndarray

    def chosen(self, where: np.ndarray) -> "Leaves":
        """Some of the leaves."""
        return Leaves(*(part[where] for part in self))

    def joined(self, *others: "Leaves") -> "Leaves":
        """These and others, from left to right."""
        parts = zip(self, *others, strict=True)
        whole = Leaves(*(np.concatenate(part) for part in parts))
        return whole.chosen(np.argsort(whole.low, kind="stable"))


def from_powers(rows: np.ndarray) -> np.ndarray:
    r"""Coefficients on a cell from those of the powers $(\tau/r)^k$, $|\tau| \le r$.

    No entry of the matrix exceeds one, so that nothing is lost.
    """
    return rows @ _power_matrix(rows.shape[1] - 1)


def isolate(cells: Cells) -> Leaves:
    """Cut cells until each has one sign, or one trend, or is only rounding."""
    found = []
    for depth in range(_DEEPEST + 1):
        leaves, is_open = _known(cells)
        if depth == _DEEPEST:
            is_open[:] = False
        found.append(leaves.chosen(~is_open))
        cells = _halves(cells.chosen(is_open))
        if len(cells.low) == 0:
            break
    return found[0].joined(*found[1:])


def _known(cells: Cells) -> tuple[Leaves, np.ndarray]:
    coefficients, errors = cells.coefficients, cells.errors[:, None]
    signs = _certain_signs(coefficients, errors)
    trends = _certain_signs(np.diff(coefficients, axis=1), 2 * errors)
    sign, trend = _common(signs), _common(trends)
    is_noise = np.abs(coefficients).max(axis=1) <= 4 * cells.errors
    leaves = Leaves(cells.low, cells.high, sign, trend, signs[:, [0, -1]])
    return leaves, (sign == 0) & (trend == 0) & ~is_noise


def _certain_signs(values: np.ndarray, errors: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) > errors, np.sign(values), 0).astype(np.int64)


def _common(signs: np.ndarray) -> np.ndarray:
    """The sign that all of a row have, or zero."""
    return np.where((signs == signs[:, :1]).all(axis=1), signs[:, 0], 0)


def _halves(cells: Cells) -> Cells:
    degree = cells.coefficients.shape[1] - 1
    middle = 0.5 * (cells.low + cells.high)
    left, right = (cells.coefficients @ half for half in _half_matrices(degree))
    rounding = (degree + 2) * _EPSILON * np.abs(cells.coefficients).max(axis=1)
    errors = cells.errors + rounding
    return Cells(
        np.concatenate([cells.low, middle]),
        np.concatenate([middle, cells.high]),
        np.concatenate([left, right]),
        np.concatenate([errors, errors]),
    )


@functools.cache
def _power_matrix(degree: int) -> np.ndarray:
    """Row k holds the coefficients of the power k of 2x - 1 on the unit interval."""
    # Those of degree k are alternating ones; raising the degree averages them.
    return np.array(
        [
            [
                sum(
                    (-1) ** (k - i) * math.comb(j, i) * math.comb(degree - j, k - i)
                    for i in range(max(0, k - degree + j), min(j, k) + 1)
                )
                / math.comb(degree, k)
                for j in range(degree + 1)
            ]
            for k in range(degree + 1)
        ]
    )


@functools.cache
def _half_matrices(degree: int) -> tuple[np.ndarray, np.ndarray]:
    left = np.array(
        [[math.comb(j, i) / 2**j for j in range(degree + 1)] for i in range(degree + 1)]
    )
    return left, np.ascontiguousarray(left[::-1, ::-1])
