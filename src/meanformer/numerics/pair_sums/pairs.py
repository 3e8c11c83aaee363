"""Every query against every token: the scores behind all attention variants."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from meanformer.numerics.arrays import matmul


class Pairs(eqx.Module):
    r"""Queries and tokens whose scores are asked for, without the scores.

    $$s_{ij} = \langle u_i, y_j\rangle + b_j, \qquad
      j \in \{\mathrm{first}_i, \dots, \mathrm{last}_i - 1\}.$$

    A mask is a range of indices per query: tokens are sorted by position first, and
    what a query sees is then contiguous. A token of weight zero is absent.
    """

    tilts: Float[Array, "m k"]
    points: Float[Array, "n k"]
    weights: Float[Array, " n"]
    offsets: Float[Array, " n"] | None = None
    first: Int[Array, " m"] | None = None
    last: Int[Array, " m"] | None = None

    def scores(self) -> Float[Array, "m n"]:
        """Return all scores as one dense array; for small problems only."""
        scores = matmul(self.tilts, self.points.T)
        return scores if self.offsets is None else scores + self.offsets[None, :]

    def sizes(self) -> Float[Array, "m n"]:
        """Return the sums of the absolute terms of the scores, which set rounding."""
        sizes = matmul(jnp.abs(self.tilts), jnp.abs(self.points).T)
        return sizes if self.offsets is None else sizes + jnp.abs(self.offsets)[None, :]

    def visible(self) -> Bool[Array, "m n"]:
        """Return which tokens each query sees, as one dense array."""
        seen = jnp.broadcast_to(self.weights > 0, (len(self.tilts), len(self.points)))
        if self.first is None or self.last is None:
            return seen
        index = jnp.arange(len(self.points))[None, :]
        return seen & (index >= self.first[:, None]) & (index < self.last[:, None])


def thinned(
    pairs: Pairs, values: Float[Array, "n v"], count: int = 1024
) -> tuple[Pairs, Float[Array, "n_thin v"]]:
    """Return about so many of the tokens, evenly chosen; masks keep their share."""
    stride = max(1, len(pairs.points) // count)
    first, last = (
        None if bound is None else -(-bound // stride)
        for bound in (pairs.first, pairs.last)
    )
    offsets = None if pairs.offsets is None else pairs.offsets[::stride]
    points, weights = pairs.points[::stride], pairs.weights[::stride]
    few = Pairs(pairs.tilts, points, weights, offsets, first, last)
    return few, values[::stride]
