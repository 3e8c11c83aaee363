r"""The velocity of softmax heads that are averaged, and its transpose, densely.

Points ask and tokens are asked: the tokens themselves move, and so do queries, which
nobody asks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.numerics.arrays import matmul


class Heads(NamedTuple):
    """Heads side by side: matrices with one more axis; also gradients of them."""

    query: Float[Array, "h k d"]
    key: Float[Array, "h k d"]
    value: Float[Array, "h d d"]
    value_bias: Float[Array, "h d"] | None = None

    def balanced(self) -> "Heads":
        r"""Return heads that act alike with queries and keys of the same size.

        A head acts through $A = K^\top Q = U S W^\top$ alone; here
        $Q = S^{1/2}W^\top$ and $K = S^{1/2}U^\top$, so that $QQ^\top = KK^\top = S$;
        no other $Q$ and $K$ of this product have a smaller norm. What is left is an
        orthogonal matrix on the left of both. It is fixed by the order of singular
        values and by signs (the largest entry of each row of $Q$ is positive), but for
        values that are equal: close to these, close heads may become distant.

        Returns:
            The heads, with as many rows as before; those beyond the dimension are zero.
            Cost: a singular value decomposition for each head.
        """
        left, sizes, right = jnp.linalg.svd(matmul(self.key.mT, self.query))
        rows, size = self.query.shape[-2:]
        rank = min(rows, size)
        roots = jnp.sqrt(sizes[..., :rank, None])
        query, key = roots * right[..., :rank, :], roots * left.mT[..., :rank, :]
        largest = jnp.argmax(jnp.abs(query), axis=-1, keepdims=True)
        signs = jnp.where(jnp.take_along_axis(query, largest, axis=-1) < 0, -1, 1)
        missing = [(0, 0)] * (query.ndim - 2) + [(0, rows - rank), (0, 0)]
        query, key = (
            jnp.pad(signs.astype(side.dtype) * side, missing) for side in (query, key)
        )
        return self._replace(query=query, key=key)


def velocity(
    heads: Heads,
    beta: Float[Array, ""],
    points: Float[Array, "r d"],
    tokens: Float[Array, "n d"],
    weights: Float[Array, " n"],
    *,
    is_explicit: bool = False,
) -> Float[Array, "r d"]:
    r"""Return the mean over heads of $V m(x) + v_0$ at every point.

    $$m(x) = \int y\,\kappa(x, y)\,\mathrm d\mu(y), \qquad
      \kappa(x, y) = \frac{e^{\beta\langle Ax, y\rangle}}
      {\int e^{\beta\langle Ax, y'\rangle}\,\mathrm d\mu(y')}, \qquad A = K^\top Q.$$

    The explicit derivative, which is backward alone, is written out by hand; it takes
    weights for constant.
    """
    # From matrices to scores and back is done once for all contexts of a batch.
    scores = beta * _rows(matmul(heads.key.mT, heads.query).mT)
    read = _explicitly_read if is_explicit else _read
    values = read(scores, _rows(heads.value), points, tokens, weights)
    values = values / len(heads.value)
    if heads.value_bias is None:
        return values
    return values + heads.value_bias.mean(axis=0)[None]


def _read(
    scores: Float[Array, "d hd"],
    values: Float[Array, "d hd"],
    points: Float[Array, "r d"],
    tokens: Float[Array, "n d"],
    weights: Float[Array, " n"],
) -> Float[Array, "r d"]:
    r"""Return the sum over heads of $V m(x)$, with $\beta A^\top$ and $V$ of all."""
    means = _seen(scores, points, tokens, weights).means
    return matmul(means.reshape(len(points), -1), values.T)


_explicitly_read = jax.custom_vjp(_read)


def _backward(given, adjoint: Float[Array, "r d"]):
    r"""Return what scores, values, points and tokens have of an adjoint.

    With $u = V^\top a$, $s(x, y) = \langle y - m(x), u(x)\rangle$ and
    $g = \int y\,s\,\kappa\,\mathrm d\mu(y)$ at each point $x$ with its adjoint $a$,
    points have $\beta A^\top g(x)$, and tokens
    $$w\sum_x\kappa(x, y)\,[u(x) + \beta Ax\,s(x, y)],$$
    both summed over heads; $\beta A^\top$ has $\sum_x x\,g(x)^\top$, and $V$ has
    $\sum_x a\,m^\top$. Cost: $O(hrnd)$ time, $O(hrn)$ memory.
    """
    scores, values, points, tokens, weights = given
    tilts, powers, totals, means = _seen(scores, points, tokens, weights)
    pulls = matmul(adjoint, values).reshape(means.shape)
    slopes = powers * matmul(tokens, pulls.T)
    levels, spread = (part / totals for part in _summed(slopes, tokens, weights))
    spread = spread - levels * means
    read = matmul(powers, (pulls - levels * tilts) / totals)
    read = weights[:, None] * (read + matmul(slopes, tilts / totals))
    spread = spread.reshape(len(points), -1)
    own = matmul(spread, scores.T)
    of_values = matmul(adjoint.T, means.reshape(len(points), -1))
    return matmul(points.T, spread), of_values, own, read, None


_explicitly_read.defvjp(lambda *given: (_read(*given), given), _backward)


class _Seen(NamedTuple):
    r"""What heads see, one row or column for each pair of a point and a head.

    Products of large matrices are fastest where nothing has to be transposed: tokens
    are rows, and what points see of them are columns.

    Attributes:
        tilts: the gradients $\beta Ax$ of the scores.
        powers: exponentials of scores less the largest one; zero at absent tokens.
        totals: their sums, weighed.
        means: the mean of the tilted context.
    """

    tilts: Float[Array, "rh d"]
    powers: Float[Array, "n rh"]
    totals: Float[Array, "rh 1"]
    means: Float[Array, "rh d"]


def _seen(scores, points, tokens, weights) -> _Seen:
    tilts = matmul(points, scores).reshape(-1, points.shape[1])
    absent = jnp.where(weights > 0, 0, -jnp.inf).astype(points.dtype)
    heights = matmul(tokens, tilts.T) + absent[:, None]
    powers = jnp.exp(heights - heights.max(axis=0)[None])
    totals, means = _summed(powers, tokens, weights)
    means = means / totals
    return _Seen(tilts, powers, totals, means)


def _rows(matrices: Float[Array, "h d d"]) -> Float[Array, "d hd"]:
    """Return the matrices of all heads side by side."""
    return matrices.swapaxes(0, 1).reshape(matrices.shape[1], -1)


def _summed(factors: Float[Array, "n rh"], tokens, weights):
    """Return the sums of masses, and of tokens times masses, with factors."""
    rows = jnp.concatenate([jnp.ones_like(weights)[None], tokens.T])
    # Laid out like this before and after the product, which is slow otherwise.
    held = jax.lax.optimization_barrier
    sums = held(matmul(held(weights[None] * rows), factors)).T
    return sums[:, :1], sums[:, 1:]
