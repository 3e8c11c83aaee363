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
) -> Float[Array, "r d"]:
    r"""Return the mean over heads of $V m(x) + v_0$ at every point.

    $$m(x) = \int y\,\kappa(x, y)\,\mathrm d\mu(y), \qquad
      \kappa(x, y) = \frac{e^{\beta\langle Ax, y\rangle}}
      {\int e^{\beta\langle Ax, y'\rangle}\,\mathrm d\mu(y')}, \qquad A = K^\top Q.$$
    """
    means = _seen(heads, beta, points, tokens, weights).means
    values = matmul(means.reshape(len(points), -1), _rows(heads.value).T)
    values = values / len(heads.value)
    if heads.value_bias is None:
        return values
    return values + heads.value_bias.mean(axis=0)[None]


@jax.custom_vjp
def explicit_velocity(heads, beta, points, tokens, weights):
    """Return the velocity, whose derivative backward is written out by hand.

    It has none in beta and in the weights, and none forward.
    """
    return velocity(heads, beta, points, tokens, weights)


def _backward(given, adjoint: Float[Array, "r d"]):
    r"""Return what heads, points and tokens have of an adjoint.

    With $u = V^\top a$, $s(x, y) = \langle y - m(x), u(x)\rangle$ and
    $g = \int y\,s\,\kappa\,\mathrm d\mu(y)$ at each point $x$ with its adjoint $a$,
    points have $\beta A^\top g(x)$, and tokens
    $$w\sum_x\kappa(x, y)\,[u(x) + \beta Ax\,s(x, y)],$$
    both averaged over heads. With $G_A = \beta\sum_x g(x)\,x^\top$, heads have
    $$G_V = \sum_x a\,m^\top, \quad G_Q = K G_A, \quad G_K = Q G_A^\top, \quad
      G_{v_0} = \sum_x a,$$
    divided by their number. Cost: $O(hrnd)$ time, $O(hrn)$ memory.
    """
    heads, beta, points, tokens, weights = given
    size = len(heads.query)
    adjoint = adjoint / size
    tilts, powers, totals, means = _seen(*given)
    pulls = matmul(adjoint, _rows(heads.value)).reshape(means.shape)
    levels = jnp.sum(pulls * means, axis=1, keepdims=True)
    slopes = powers * matmul(tokens, pulls.T)
    spread = matmul(_columns(tokens, weights), slopes).T / totals - levels * means
    read = matmul(powers, (pulls - levels * tilts) / totals)
    read = weights[:, None] * (read + matmul(slopes, tilts / totals))
    spread = spread.reshape(len(points), -1)
    own = matmul(spread, _scores(heads, beta).T)
    of_score = beta * matmul(points.T, spread)
    of_value = matmul(adjoint.T, means.reshape(len(points), -1))
    of_score, of_value = (
        one.reshape(len(one), size, -1).swapaxes(0, 1) for one in (of_score, of_value)
    )
    bias = heads.value_bias
    if bias is not None:
        bias = jnp.broadcast_to(adjoint.sum(axis=0), bias.shape)
    of_key, of_query = matmul(heads.query, of_score), matmul(heads.key, of_score.mT)
    return Heads(of_query, of_key, of_value, bias), None, own, read, None


explicit_velocity.defvjp(lambda *given: (velocity(*given), given), _backward)


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


def _seen(heads: Heads, beta, points, tokens, weights) -> _Seen:
    tilts = matmul(points, _scores(heads, beta)).reshape(-1, points.shape[1])
    absent = jnp.where(weights > 0, 0, -jnp.inf).astype(points.dtype)
    scores = matmul(tokens, tilts.T) + absent[:, None]
    powers = jnp.exp(scores - scores.max(axis=0)[None])
    totals = matmul(weights[None], powers).T
    means = matmul(_columns(tokens, weights), powers).T / totals
    return _Seen(tilts, powers, totals, means)


def _scores(heads: Heads, beta) -> Float[Array, "d hd"]:
    r"""Return the matrices $\beta A^\top$ side by side."""
    return beta * _rows(matmul(heads.key.mT, heads.query).mT)


def _rows(matrices: Float[Array, "h d d"]) -> Float[Array, "d hd"]:
    """Return the matrices of all heads side by side."""
    return matrices.swapaxes(0, 1).reshape(matrices.shape[1], -1)


def _columns(tokens, weights) -> Float[Array, "d n"]:
    """Return the tokens as columns, times their masses."""
    # Laid out like this before the product, which is slow otherwise.
    return jax.lax.optimization_barrier((weights[:, None] * tokens).T)
