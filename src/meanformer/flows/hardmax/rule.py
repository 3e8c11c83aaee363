"""Who follows whom at zero temperature: the tokens of largest score, and their ties."""

from collections.abc import Iterator
from typing import NamedTuple

import equinox as eqx
import numpy as np
from jaxtyping import Bool, Float, Int

from meanformer.measures.operations import group_labels
from meanformer.numerics.arrays import norms_of

PAIRS_AT_ONCE = 2_000_000
# A follower stops to count beside its leader a thousand tolerances away from it:
# before a tie could notice it.
ABSORPTION = 1000.0
SEVERAL = -1

Points = Float[np.ndarray, "n d"]
Masses = Float[np.ndarray, " n"]


class Representatives(NamedTuple):
    """Tokens that may be followed, each standing for those that have come to it.

    Attributes:
        heads: the token that stands for each token: itself, an equal one, or the
            leader that it has come to.
        masses: the weight with which each head counts; zero for other tokens.
        is_absorbed: which tokens have come to their leader since the start.
    """

    heads: Int[np.ndarray, " n"]
    masses: Masses
    is_absorbed: Bool[np.ndarray, " n"]


class Choice(NamedTuple):
    """Whom each token follows at one moment, and where those stand on average.

    Attributes:
        targets: mean of the points followed.
        followed: the head followed, -1 for several.
        is_leader: whether a token follows itself alone.
    """

    targets: Float[np.ndarray, "n d"]
    followed: Int[np.ndarray, " n"]
    is_leader: Bool[np.ndarray, " n"]


class HardmaxRule(eqx.Module):
    r"""The sets $C_i = \{j : \langle Az_i, z_j\rangle \ge \max_l - \delta\}$.

    Attributes:
        score: the matrix $A$.
        ties: `"merged"`, `"exact"` or `"lowest"`; see `run_hardmax`.
        width: the width $\delta$.
        tolerance: relative tolerance of ties and of equal points.
    """

    score: Float[np.ndarray, "d d"]
    ties: str = eqx.field(static=True)
    width: float = eqx.field(static=True)
    tolerance: float = eqx.field(static=True)

    def chosen(
        self, x: Float[np.ndarray, "m d"], points: Points, masses: Masses
    ) -> Iterator[tuple[slice, Bool[np.ndarray, "_ k"]]]:
        """Yield blocks of queries, and which tokens that have a mass each follows."""
        queries, scale = of_size_one(x @ self.score.T)
        keys, key_scale = of_size_one(points[masses > 0])
        width = self.width / scale / key_scale
        rows = max(1, PAIRS_AT_ONCE // len(keys))
        for start in range(0, len(x), rows):
            block = slice(start, start + rows)
            yield block, self._winners(queries[block], keys, width)

    def sets(
        self, x: Float[np.ndarray, "m d"], points: Points, masses: Masses
    ) -> Bool[np.ndarray, "m n"]:
        """Return which tokens each query follows, as one table."""
        table = np.zeros((len(x), len(points)), bool)
        for block, is_chosen in self.chosen(x, points, masses):
            table[block, masses > 0] = is_chosen
        return table

    def choose(self, points: Points, standing: Representatives) -> Choice:
        """Return what each token follows; $O(n^2 d)$ time, two million pairs."""
        heads = np.flatnonzero(standing.masses > 0)
        keys, masses = points[heads], standing.masses[heads]
        targets, followed = np.empty_like(points), np.empty(len(points), int)
        for block, is_chosen in self.chosen(points, points, standing.masses):
            first = is_chosen.argmax(axis=1)
            is_single = is_chosen.sum(axis=1) == 1
            shares = np.where(is_chosen, masses[None], 0)
            mean = (shares / shares.sum(axis=1, keepdims=True)) @ keys
            # A single point is met exactly: a leader must not move at all.
            targets[block] = np.where(is_single[:, None], keys[first], mean)
            followed[block] = np.where(is_single, heads[first], SEVERAL)
        is_own = (followed == standing.heads) & ~standing.is_absorbed
        return Choice(targets, followed, is_own & (standing.masses[standing.heads] > 0))

    def first_representatives(self, points: Points, weights: Masses) -> Representatives:
        """Return who stands for whom at the start: equal tokens are one."""
        present, is_absorbed = np.flatnonzero(weights > 0), np.zeros(len(points), bool)
        heads = np.arange(len(points))
        if self.ties == "lowest":
            return Representatives(heads, weights, is_absorbed)
        tolerance = self.tolerance if self.ties == "merged" else 0.0
        scaled, _ = of_size_one(points)
        reach = tolerance * norms_of(scaled).max()
        labels = group_labels(scaled[present], None, reach)
        heads[present] = present[np.unique(labels, return_index=True)[1][labels]]
        masses = np.bincount(heads, weights, minlength=len(points))
        return Representatives(heads, masses, is_absorbed)

    def later_representatives(
        self, standing: Representatives, choice: Choice, points: Points
    ) -> Representatives:
        """Return who stands for whom after a move: those at their leader count no more.

        In exact arithmetic a follower never gets there. Rounded, it would share ties
        with its leader, and pull whoever is tied between that leader and another one.
        """
        if self.ties != "merged" or self.width > 0:
            return standing
        goes = (choice.followed != SEVERAL) & (choice.followed != standing.heads)
        goal = np.where(goes, choice.followed, standing.heads)
        distance = norms_of(points - points[goal])
        reach = self.reach(points)
        # Not two that follow each other: one of them has to stay.
        stays = choice.is_leader[goal]
        arrived = goes & stays & (distance <= reach)
        heads = np.where(arrived, goal, standing.heads)
        masses = np.where(arrived, 0.0, standing.masses)
        return Representatives(heads, masses, standing.is_absorbed | arrived)

    def reach(self, points: Points) -> float:
        """Return the distance at which a token counts as having come to another."""
        return ABSORPTION * self.tolerance * float(norms_of(points).max())

    def _winners(
        self,
        queries: Float[np.ndarray, "m d"],
        keys: Float[np.ndarray, "k d"],
        width: float,
    ) -> Bool[np.ndarray, "m k"]:
        if self.ties == "merged":
            scores = queries @ keys.T
        else:
            # One order of summation for all pairs, so that equal sums are equal.
            scores = np.zeros((len(queries), len(keys)))
            for query, key in zip(queries.T, keys.T, strict=True):
                scores += np.multiply.outer(query, key)
        best = scores.argmax(axis=1)
        if self.ties == "lowest":
            return best[:, None] == np.arange(len(keys))[None, :]
        margin = width
        if self.ties == "merged":
            lengths = np.linalg.norm(keys, axis=1)
            longer = np.maximum(lengths[None, :], lengths[best][:, None])
            sizes = np.linalg.norm(queries, axis=1)[:, None] * longer
            margin = width + self.tolerance * sizes
        top = np.take_along_axis(scores, best[:, None], axis=1)
        return top - scores <= margin


def of_size_one(
    vectors: Float[np.ndarray, "n d"],
) -> tuple[Float[np.ndarray, "n d"], float]:
    """Divide by a power of two, which rounds nothing, so that products stay in range.

    Powers of two reach from 2e-308 to 9e307, so a cloud may be of any size.
    """
    exponent = int(np.frexp(np.abs(vectors).max(initial=0.0))[1])
    return np.ldexp(vectors, -exponent), float(np.ldexp(1.0, min(exponent, 1023)))
