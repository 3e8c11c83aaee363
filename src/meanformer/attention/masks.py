"""Masks: which stretch of the sequence a query sees, from positions alone."""

import abc
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meanformer.attention.abstract import number, parameter
from meanformer.errors import check, check_shape, is_concrete

Stretch = tuple[Int[Array, " m"], Int[Array, " m"]]


class AbstractMask(eqx.Module):
    """A rule for the places a query sees: always a stretch of the sequence.

    Tokens are sorted by place once; what a query sees is then a range of indices, so
    ties are exact and nothing of the size of all pairs is stored.

    Attributes:
        may_be_empty: whether some token of a cloud may see nothing; its output is then
            zero. Not so where a token always sees itself.
    """

    may_be_empty: ClassVar[bool] = False

    @abc.abstractmethod
    def stretch(
        self, places: Float[Array, " n"], queries: Float[Array, " m"]
    ) -> Stretch:
        """Return first and one-past-last index into the sorted places, per query."""


class Causal(AbstractMask):
    r"""A query at $s$ sees the places $\tau \le s$: the past and itself, ties included.

    Args:
        tolerance: places up to this far ahead still count as ties; 0 compares exactly.
    """

    tolerance: float = number("tolerance", least=0, default=0.0)

    def stretch(
        self, places: Float[Array, " n"], queries: Float[Array, " m"]
    ) -> Stretch:
        """Return the places up to the query's."""
        return _start(queries), _until(places, queries + self.tolerance)


class StrictCausal(AbstractMask):
    r"""A query at $s$ sees the places $\tau < s$; the first token sees nothing.

    Args:
        tolerance: places less than this far behind count as ties, hence unseen.
    """

    may_be_empty: ClassVar[bool] = True

    tolerance: float = number("tolerance", least=0, default=0.0)

    def stretch(
        self, places: Float[Array, " n"], queries: Float[Array, " m"]
    ) -> Stretch:
        """Return the places before the query's."""
        return _start(queries), _before(places, queries - self.tolerance)


class Window(AbstractMask):
    r"""A query at $s$ sees the places $s - \ell \le \tau \le s$.

    The far end includes places that miss it by the rounding of $s - \ell$.

    Args:
        length: $\ell \ge 0$, in units of position.
        tolerance: places up to this far beyond either end are still seen.
    """

    length: float = number("length", least=0)
    tolerance: float = number("tolerance", least=0, default=0.0)

    def stretch(
        self, places: Float[Array, " n"], queries: Float[Array, " m"]
    ) -> Stretch:
        """Return the places of the window that ends at the query."""
        rounding = 4 * float(jnp.finfo(places.dtype).eps)
        start = queries - (self.length + max(self.tolerance, rounding))
        return _before(places, start), _until(places, queries + self.tolerance)


class Prefix(AbstractMask):
    r"""The places $\tau \le p$ are seen by all; beyond them the mask is causal.

    Args:
        end: the end $p$ of the prefix.
    """

    end: float = number("end")

    def __check_init__(self):
        check(0 <= self.end <= 1, f"end is {self.end}; it must lie in [0, 1].")

    def stretch(
        self, places: Float[Array, " n"], queries: Float[Array, " m"]
    ) -> Stretch:
        """Return the prefix and the places up to the query's."""
        return _start(queries), _until(places, jnp.maximum(queries, self.end))


class Blocks(AbstractMask):
    r"""The sequence is cut into blocks; a query sees its own, and all before it.

    Block $k$ is $(b_k, b_{k+1}]$. With `isolated` a query sees its own block alone, as
    when several documents share one sequence.

    Args:
        boundaries: the increasing cuts $b_1 < b_2 < \dots$ inside [0, 1].
        isolated: hide the blocks before the query's.
    """

    boundaries: Float[Array, " _b"] = parameter("boundaries")
    isolated: bool = eqx.field(default=False, kw_only=True, static=True)

    def __check_init__(self):
        check_shape("boundaries", self.boundaries, (None,))
        if is_concrete(self.boundaries):
            cuts = np.asarray(self.boundaries)
            is_inside = bool(((cuts >= 0) & (cuts <= 1)).all())
            check(
                is_inside and bool((np.diff(cuts) > 0).all()),
                f"boundaries is {cuts}; it must increase within [0, 1].",
            )

    def stretch(
        self, places: Float[Array, " n"], queries: Float[Array, " m"]
    ) -> Stretch:
        """Return the query's block, with or without the blocks before it."""
        cuts = self.boundaries.astype(places.dtype)
        low = jnp.full((1,), -jnp.inf, places.dtype)
        edges = jnp.concatenate([low, cuts, -low])
        block = jnp.searchsorted(cuts, queries, side="left")
        last = _until(places, edges[block + 1])
        return _until(places, edges[block]) if self.isolated else _start(queries), last


def _start(queries: Float[Array, " m"]) -> Int[Array, " m"]:
    return jnp.zeros(queries.shape, int)


def _until(places: Float[Array, " n"], bound: Float[Array, " m"]) -> Int[Array, " m"]:
    """Count the places at most the bound."""
    return jnp.searchsorted(places, bound, side="right").astype(int)


def _before(places: Float[Array, " n"], bound: Float[Array, " m"]) -> Int[Array, " m"]:
    """Count the places below the bound."""
    return jnp.searchsorted(places, bound, side="left").astype(int)
