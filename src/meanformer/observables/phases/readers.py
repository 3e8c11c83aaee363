"""What a phase diagram reads from the clouds, between the steps of the solver."""

import abc
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.observables.phases.sphere_batches import (
    components,
    gram_matrices,
    packed_pairs,
    unit_tokens,
)
from meanformer.observables.phases.systems import AbstractSystem, State

# Gaps this far (in logarithm) below the level are read by a monotone interpolation:
# their velocities may be those of rounding errors.
DEEP = 1.0


class Seen(NamedTuple):
    """What is interpolated, and its velocity."""

    values: Float[Array, "b r c"]
    rates: Float[Array, "b r c"]


class Cubic(NamedTuple):
    """Coefficients of a cubic in the share of a step that is past."""

    constant: Float[Array, "b r c"]
    linear: Float[Array, "b r c"]
    square: Float[Array, "b r c"]
    cube: Float[Array, "b r c"]

    def at(self, share: Float[Array, ""]) -> Float[Array, "b r c"]:
        """Return the value."""
        inner = self.square + share * self.cube
        return self.constant + share * (self.linear + share * inner)


def hermite(before: Seen, after: Seen, width: Float[Array, ""]) -> Cubic:
    """Return the cubic with given values and velocities at both ends of a step."""
    rise = after.values - before.values
    first, last = width * before.rates, width * after.rates
    return Cubic(
        before.values, first, 3 * rise - 2 * first - last, first + last - 2 * rise
    )


class AbstractReader(eqx.Module):
    """A number for each cloud, at any depth of a step."""

    @abc.abstractmethod
    def look(self, system: AbstractSystem, state: State, rate: State) -> Seen:
        """Return what will be interpolated."""

    @abc.abstractmethod
    def between(self, before: Seen, after: Seen, width: Float[Array, ""]) -> Cubic:
        """Return the interpolation over a step."""

    @abc.abstractmethod
    def value(self, seen: Float[Array, "b r c"]) -> Float[Array, " b"]:
        """Return the number for what is seen."""

    @abc.abstractmethod
    def is_final(self, seen: Seen) -> Float[Array, " b"]:
        """Return one for clouds whose number stays one where tokens gather."""


class AbstractGapReader(AbstractReader):
    r"""Reads pairs of tokens by the logarithm of their gap, $\log(1 - G_{ij})$.

    Tokens that meet do so exponentially fast, which makes the logarithm nearly linear
    in depth: a cubic is accurate over steps as long as the solver likes.
    """

    gap: eqx.AbstractVar[Float[Array, ""]]

    @abc.abstractmethod
    def arranged(self, gram: Float[Array, "b n n"]) -> Float[Array, "b r c"]:
        """Return the pairs that count."""

    def look(self, system, state, rate):
        """Return the logarithms of the gaps."""
        gaps = 1 - self.arranged(system.gram(state))
        gaps = jnp.maximum(gaps, 4 * jnp.finfo(gaps.dtype).eps)
        return Seen(jnp.log(gaps), -self.arranged(system.gram_rate(state, rate)) / gaps)

    def between(self, before, after, width):
        """Return a cubic, a monotone one for gaps far below the level."""
        slope = (after.values - before.values) / width
        lowest = jnp.minimum(before.values, after.values)
        is_deep = lowest < jnp.log(self.gap) - DEEP

        def limited(seen: Seen) -> Seen:
            ratio = jnp.clip(seen.rates / jnp.where(slope == 0, 1, slope), 0, 3)
            return Seen(seen.values, jnp.where(is_deep, ratio * slope, seen.rates))

        return hermite(limited(before), limited(after), width)

    def close(self, seen: Float[Array, "b r c"]) -> Float[Array, "b r c"]:
        """Return one for each pair closer than the level, zero for the others."""
        return (seen < jnp.log(self.gap)).astype(seen.dtype)


class ClosePairs(AbstractGapReader):
    """The fraction of pairs of different tokens whose product is above a level.

    Attributes:
        gap: one less the level.
        pairs: numbers of pairs of tokens, as the gaps are arranged.
        inside: number of pairs of tokens that have met.
        total: number of all pairs.
    """

    gap: Float[Array, ""]
    pairs: Float[Array, "b r c"]
    inside: Float[Array, " b"]
    total: Float[Array, " b"]

    @classmethod
    def of(cls, gap: Float[Array, ""], numbers: Float[Array, "b n"]) -> "ClosePairs":
        """Return the reader for so many tokens at each place."""
        pairs = packed_pairs(numbers[:, :, None] * numbers[:, None, :])
        inside = jnp.sum(numbers * (numbers - 1), axis=1) / 2
        count = jnp.sum(numbers, axis=1)
        return cls(gap, jnp.maximum(pairs, 0), inside, count * (count - 1) / 2)

    def arranged(self, gram):
        """Return each pair once."""
        return packed_pairs(gram)

    def value(self, seen):
        """Return the fraction; tokens that have met are close."""
        return self._counted(seen, self.gap) / self.total

    def is_final(self, seen):
        """Say where all pairs are close, and no angle is obtuse."""
        return self._counted(seen.values, jnp.minimum(self.gap, 1.0)) == self.total

    def _counted(self, seen: Float[Array, "b r c"], gap: Array) -> Float[Array, " b"]:
        # Whole numbers, and exact.
        close = jnp.where(seen < jnp.log(gap), self.pairs, 0)
        return self.inside + jnp.sum(close, axis=(1, 2))


class LinkedGroups(AbstractGapReader):
    """The number of groups that chains of close pairs link."""

    gap: Float[Array, ""]

    def arranged(self, gram):
        """Return all pairs."""
        return gram

    def value(self, seen):
        """Return the number of groups."""
        return components(self.close(seen))

    def is_final(self, seen):
        """Say where all pairs are close, and no angle is obtuse."""
        least = jnp.log(jnp.minimum(self.gap, 1.0))
        return jnp.all(seen.values < least, axis=(1, 2))


class Rank(AbstractReader):
    """The number of eigenvalues of the Gram matrix above a threshold.

    The tokens are interpolated by cubics, and brought back to the sphere.
    """

    threshold: Float[Array, ""]
    cap: int | None = eqx.field(static=True)

    def look(self, system, state, rate):
        """Return the tokens."""
        return Seen(state, rate)

    def between(self, before, after, width):
        """Return a cubic."""
        return hermite(before, after, width)

    def value(self, seen):
        """Return the rank, at most the cap."""
        tokens = unit_tokens(seen)
        short = (
            tokens if tokens.shape[1] < tokens.shape[2] else jnp.swapaxes(tokens, 1, 2)
        )
        values = jnp.linalg.eigvalsh(gram_matrices(short, short))
        rank = jnp.sum(values > self.threshold, axis=1).astype(seen.dtype)
        return rank if self.cap is None else jnp.minimum(rank, self.cap)

    def is_final(self, seen):
        """Say where one eigenvalue takes nearly all of the trace."""
        smallest = gram_matrices(seen.values, seen.values).min(axis=(1, 2))
        others = (seen.values.shape[1] - 1) * (1 - smallest)
        return (others < self.threshold) & (smallest > 0)
