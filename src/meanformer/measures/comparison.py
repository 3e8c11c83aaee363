"""Atoms that are the same up to order and rounding; on the host, in NumPy."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from meanformer.measures.operations import group_labels

MOST_ATOMS = 4096  # of a convolution that is looked at
# The group of points at zero, which are on every line.
ZERO = -1


class Atoms(NamedTuple):
    """Atoms with masses, and the distance up to which they are the same."""

    points: Float[np.ndarray, "n d"]
    masses: Float[np.ndarray, " n"]
    slack: float

    @property
    def joined(self) -> "Atoms":
        """The same with atoms that have met as one."""
        labels = group_labels(self.points, None, self.slack)
        first = np.unique(labels, return_index=True)[1]
        masses = np.bincount(labels, self.masses)
        return Atoms(self.points[first], masses, self.slack)

    @property
    def radius(self) -> float:
        """The root mean square of the distance from zero."""
        return float(np.sqrt(self.masses @ np.sum(self.points**2, axis=1)))

    def scaled(self, factor: float) -> "Atoms":
        """Return the atoms at multiples of their places."""
        return Atoms(factor * self.points, self.masses, abs(factor) * self.slack)

    def is_same(self, other: "Atoms", allowance: float = 1.0) -> bool:
        """Return whether these are the same atoms, in any order, up to both slacks.

        Args:
            other: other atoms; like these, they are apart from each other.
            allowance: multiplies the larger slack.
        """
        if len(self.points) != len(other.points):
            return False
        slack = allowance * max(self.slack, other.slack)
        gaps = np.linalg.norm(self.points[:, None] - other.points[None], axis=2)
        nearest = gaps.argmin(axis=1)
        is_onto = len(set(nearest)) == len(nearest)
        moved = np.abs(self.masses - other.masses[nearest]).max()
        moved = max(gaps.min(axis=1).max(), moved * np.abs(self.points).max())
        return bool(is_onto and moved <= slack)


def is_convolution(factors: Sequence[Atoms], whole: Atoms) -> bool:
    """Return whether some atoms are the convolution of others."""
    points, masses, slack = np.zeros((1, whole.points.shape[1])), np.ones(1), 0.0
    for one in factors:
        if len(points) * len(one.points) > MOST_ATOMS:
            return False
        sums = points[:, None] + one.points[None]
        points = sums.reshape(-1, points.shape[1])
        masses, slack = np.outer(masses, one.masses).ravel(), slack + one.slack
    slack += whole.slack
    return Atoms(points, masses, slack).joined.is_same(whole, 4)


def lines_through_zero(
    points: Float[np.ndarray, "n d"],
) -> tuple[Int[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Number the lines through zero that points are on, with coordinates on them."""
    norms = np.linalg.norm(points, axis=1)
    groups, factors = np.full(len(points), ZERO), np.ones(len(points))
    there = norms > 1e-12 * norms.max(initial=0)
    if there.any():
        units = points[there] / norms[there, None]
        both = group_labels(np.concatenate([units, -units]), None, 1e-9)
        ahead, behind = np.split(both, 2)
        groups[there] = np.minimum(ahead, behind)
        factors[there] = np.where(ahead < behind, 1, -1) * norms[there]
    return groups, factors
