"""Quantities of a phase diagram: close pairs, linked groups, or the rank."""

import abc
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from meanformer.numerics.nearest import settled_labels
from meanformer.observables.phases.motions import (
    AbstractMotion,
    State,
    gram_matrices,
    unit_tokens,
)

# Gaps this far (in logarithm) below the level are read by a monotone interpolation:
# their velocities may be those of rounding errors.
DEEP = 1.0


class Interpolated(NamedTuple):
    """Values to interpolate within a step, with their rates; or both at two ends."""

    values: Float[Array, "*e b r c"]
    rates: Float[Array, "*e b r c"]


class AbstractQuantity(eqx.Module):
    """A number for each cloud, at any depth of a step."""

    @abc.abstractmethod
    def interpolated(
        self, motion: AbstractMotion, state: State, rate: State
    ) -> Interpolated:
        """Return what the number is computed from."""

    @abc.abstractmethod
    def slopes(
        self, ends: Interpolated, width: Float[Array, ""]
    ) -> Float[Array, "2 b r c"]:
        """Return the velocities that a cubic over a step has at its ends."""

    @abc.abstractmethod
    def value(self, values: Float[Array, "b r c"]) -> Float[Array, " b"]:
        """Return the number."""

    @abc.abstractmethod
    def is_final(self, seen: Interpolated) -> Bool[Array, " b"]:
        """Say for which clouds the number stays one where tokens gather."""


class AbstractGapQuantity(AbstractQuantity):
    r"""A quantity read from the logarithms of the gaps of pairs, $\log(1 - G_{ij})$.

    Tokens that meet do so exponentially fast, which makes the logarithm nearly linear
    in depth: a cubic is accurate over steps as long as the solver likes.
    """

    gap: eqx.AbstractVar[Float[Array, ""]]

    @abc.abstractmethod
    def arranged(self, gram: Float[Array, "b n n"]) -> Float[Array, "b r c"]:
        """Return the pairs that count."""

    def interpolated(self, motion, state, rate):
        """Return the logarithms of the gaps."""
        gaps = 1 - self.arranged(motion.gram(state))
        gaps = jnp.maximum(gaps, 4 * jnp.finfo(gaps.dtype).eps)
        rates = -self.arranged(motion.gram_rate(state, rate)) / gaps
        return Interpolated(jnp.log(gaps), rates)

    def slopes(self, ends, width):
        """Return the velocities, those of a monotone cubic far below the level."""
        mean = jnp.diff(ends.values, axis=0) / width
        lowest = jnp.min(ends.values, axis=0, keepdims=True)
        ratios = jnp.clip(ends.rates / jnp.where(mean == 0, 1, mean), 0, 3)
        return jnp.where(lowest < jnp.log(self.gap) - DEEP, ratios * mean, ends.rates)


class ClosePairs(AbstractGapQuantity):
    """The fraction of pairs of different tokens whose product is above a level."""

    gap: Float[Array, ""]  # one less the level
    pairs: Float[Array, "b r c"]  # numbers of pairs of tokens, as the gaps are arranged
    inside: Float[Array, " b"]  # number of pairs of tokens that have met
    total: Float[Array, " b"]  # number of all pairs

    @classmethod
    def of(cls, gap: Float[Array, ""], numbers: Float[Array, "b n"]) -> "ClosePairs":
        """Return the quantity for so many tokens at each place."""
        pairs = packed_pairs(numbers[:, :, None] * numbers[:, None, :])
        inside = jnp.sum(numbers * (numbers - 1), axis=1) / 2
        count = jnp.sum(numbers, axis=1)
        return cls(gap, jnp.maximum(pairs, 0), inside, count * (count - 1) / 2)

    def arranged(self, gram):
        """Return each pair once."""
        return packed_pairs(gram)

    def value(self, values):
        """Return the fraction; tokens that have met are close."""
        return self._counted(values, self.gap) / self.total

    def is_final(self, seen):
        """Say where all pairs are close, and no angle is obtuse."""
        return self._counted(seen.values, jnp.minimum(self.gap, 1.0)) == self.total

    def _counted(self, values: Float[Array, "b r c"], gap: Array) -> Float[Array, " b"]:
        # Whole numbers, and exact.
        close = jnp.where(values < jnp.log(gap), self.pairs, 0)
        return self.inside + jnp.sum(close, axis=(1, 2))


class LinkedGroups(AbstractGapQuantity):
    """The number of groups that chains of close pairs link."""

    gap: Float[Array, ""]

    def arranged(self, gram):
        """Return all pairs."""
        return gram

    def value(self, values):
        """Return the number of groups."""
        return components((values < jnp.log(self.gap)).astype(values.dtype))

    def is_final(self, seen):
        """Say where all pairs are close, and no angle is obtuse."""
        least = jnp.log(jnp.minimum(self.gap, 1.0))
        return jnp.all(seen.values < least, axis=(1, 2))


class Rank(AbstractQuantity):
    """The number of eigenvalues of the Gram matrix above a threshold.

    The tokens are interpolated by cubics, and brought back to the sphere.
    """

    threshold: Float[Array, ""]
    cap: int | None = eqx.field(static=True)

    def interpolated(self, motion, state, rate):
        """Return the tokens."""
        return Interpolated(state, rate)

    def slopes(self, ends, width):
        """Return the velocities."""
        return ends.rates

    def value(self, values):
        """Return the rank, at most the cap."""
        tokens = unit_tokens(values)
        if tokens.shape[1] >= tokens.shape[2]:
            tokens = jnp.swapaxes(tokens, 1, 2)
        eigenvalues = jnp.linalg.eigvalsh(gram_matrices(tokens, tokens))
        rank = jnp.sum(eigenvalues > self.threshold, axis=1).astype(values.dtype)
        return rank if self.cap is None else jnp.minimum(rank, self.cap)

    def is_final(self, seen):
        """Say where one eigenvalue takes nearly all of the trace."""
        smallest = gram_matrices(seen.values, seen.values).min(axis=(1, 2))
        others = (seen.values.shape[1] - 1) * (1 - smallest)
        return (others < self.threshold) & (smallest > 0)


def packed_pairs(gram: Float[Array, "b n n"]) -> Float[Array, "b h n"]:
    """Return each pair of different tokens once, filled up with products of -1.

    The rows of the upper half keep what is above the diagonal, and below it take what
    is above the diagonal in the rows of the lower half, turned round: half the memory,
    without a gather.
    """
    count = gram.shape[-1]
    half = (count + 1) // 2
    row = jnp.arange(half)[None, :, None]
    column = jnp.arange(count)[None, None, :]
    turned = gram[:, ::-1, ::-1][:, :half]
    is_turned = (column < row) & (2 * row != count - 1)
    rest = jnp.where(is_turned, turned, -1)
    return jnp.where(column > row, gram[:, :half], rest)


def components(links: Float[Array, "b n n"]) -> Float[Array, " b"]:
    r"""Return the number of connected components of symmetric graphs.

    Each token takes the smallest label among its neighbours (one marks an edge, zero
    none) until nothing changes; the tokens that keep their own are counted. Cost:
    $O(n^2)$ for each link of the longest of all shortest chains.
    """
    count = links.shape[-1]
    own = jnp.arange(count, dtype=links.dtype)
    start = jnp.broadcast_to(own[None, :], links.shape[:2])

    def lowered(labels: Float[Array, "b n"]) -> Float[Array, "b n"]:
        offered = jnp.where(links > 0, labels[:, None, :], count).min(axis=2)
        return jnp.minimum(labels, offered)

    labels = settled_labels(lowered, start)
    return jnp.sum(labels == own[None, :], axis=1).astype(links.dtype)
