r"""The velocity of softmax heads that are averaged, and its transpose, densely.

The points that move are $n$ tokens followed by $m$ queries, one row each; queries read
the tokens and nobody reads them.
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


class Seen(NamedTuple):
    r"""What each head makes of the context, as seen from each point.

    Attributes:
        tilts: the gradients $\beta Ax$ of the scores in the token.
        densities: the density $\kappa$ of the tilted context; zero at absent tokens.
        means: the mean of the tilted context.
    """

    tilts: Float[Array, "h r d"]
    densities: Float[Array, "h r n"]
    means: Float[Array, "h r d"]


def look(
    heads: Heads,
    beta: Float[Array, ""],
    points: Float[Array, "r d"],
    weights: Float[Array, " n"],
) -> Seen:
    r"""Return what the heads see.

    $$\kappa(x, y) = \frac{e^{\beta\langle Ax, y\rangle}}
      {\int e^{\beta\langle Ax, y'\rangle}\,\mathrm d\mu(y')}, \qquad
      m(x) = \int y\,\kappa(x, y)\,\mathrm d\mu(y).$$

    Args:
        heads: the heads.
        beta: the inverse temperature.
        points: tokens and queries.
        weights: the masses of the tokens.
    """
    tokens = points[: len(weights)]
    tilts = beta * matmul(matmul(points, heads.query.mT), heads.key)
    scores = jnp.where(weights[None, None] > 0, matmul(tilts, tokens.T), -jnp.inf)
    powers = jnp.exp(scores - scores.max(axis=2, keepdims=True))
    densities = powers / matmul(powers, weights)[:, :, None]
    means = matmul(densities, weights[:, None] * tokens)
    return Seen(tilts, densities, means)


def velocity(
    heads: Heads,
    beta: Float[Array, ""],
    points: Float[Array, "r d"],
    weights: Float[Array, " n"],
) -> Float[Array, "r d"]:
    r"""Return the mean over heads of $V m(x) + v_0$ at every point."""
    means = _glance(heads, beta, points, weights).means
    values = matmul(means.reshape(len(points), -1), _rows(heads.value).T)
    values = values / len(heads.value)
    if heads.value_bias is None:
        return values
    return values + heads.value_bias.mean(axis=0)[None]


def transposed(
    heads: Heads,
    beta: Float[Array, ""],
    points: Float[Array, "r d"],
    weights: Float[Array, " n"],
    adjoint: Float[Array, "r d"],
) -> tuple[Float[Array, "r d"], Heads]:
    r"""Return how an adjoint changes backward, and the derivative in every head.

    With $u = V^\top a$, $s(x, y) = \langle y - m(x), u(x)\rangle$ and
    $g = \int y\,s\,\kappa\,\mathrm d\mu(y)$ at each point $x$ with its adjoint $a$, and
    the measure $\bar\mu$ of the tokens with mass one on each query, it is the mean over
    heads of
    $$\beta A^\top g(x) + \int \kappa(x', x)\,[u(x') + \beta Ax'\,s(x', x)]
      \,\mathrm d\bar\mu(x'),$$
    the second part for tokens alone. The derivatives are
    $$G_V = \int a m^\top\mathrm d\bar\mu, \quad
      G_A = \beta\!\int g x^\top\mathrm d\bar\mu, \quad
      G_Q = K G_A, \quad G_K = Q G_A^\top, \quad
      G_{v_0} = \int a\,\mathrm d\bar\mu.$$

    Args:
        heads: the heads.
        beta: the inverse temperature.
        points: tokens and queries.
        weights: the masses of the tokens.
        adjoint: the adjoint of each token divided by its mass, and of each query.

    Returns:
        The mean over heads, for each point; and the derivative in each head, not
        divided by their number. Cost: $O(h(n+m)nd)$ time, $O(h(n+m)n)$ memory.
    """
    count, size = len(weights), len(heads.query)
    seen = _glance(heads, beta, points, weights)
    tilts, powers, totals, means = seen
    masses = jnp.append(weights, jnp.ones(len(points) - count, weights.dtype))[:, None]
    weighed = jnp.repeat(masses, size, axis=0) / totals
    pulls = matmul(adjoint, _rows(heads.value)).reshape(means.shape)
    levels = jnp.sum(pulls * means, axis=1, keepdims=True)
    slopes = powers * matmul(points[:count], pulls.T)
    spread = matmul(_columns(points, weights), slopes).T / totals - levels * means
    read = matmul(powers, weighed * (pulls - levels * tilts))
    read = (read + matmul(slopes, weighed * tilts)) / size
    spread = spread.reshape(len(points), -1)
    own = matmul(spread, _scores(heads, beta).T) / size
    of_score = beta * matmul((masses * points).T, spread)
    of_value = matmul((masses * adjoint).T, means.reshape(len(points), -1))
    of_score, of_value = (
        one.reshape(len(one), size, -1).swapaxes(0, 1) for one in (of_score, of_value)
    )
    bias = heads.value_bias
    if bias is not None:
        bias = jnp.broadcast_to(matmul(masses[:, 0], adjoint), bias.shape)
    derivative = Heads(
        matmul(heads.key, of_score.mT),
        matmul(heads.query, of_score),
        of_value,
        bias,
    )
    return own.at[:count].add(read), derivative


class _Glance(NamedTuple):
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


def _glance(heads: Heads, beta, points, weights) -> _Glance:
    tilts = matmul(points, _scores(heads, beta)).reshape(-1, points.shape[1])
    absent = jnp.where(weights > 0, 0, -jnp.inf).astype(points.dtype)
    scores = matmul(points[: len(weights)], tilts.T) + absent[:, None]
    powers = jnp.exp(scores - scores.max(axis=0)[None])
    totals = matmul(weights[None], powers).T
    means = matmul(_columns(points, weights), powers).T / totals
    return _Glance(tilts, powers, totals, means)


def _scores(heads: Heads, beta) -> Float[Array, "d hd"]:
    r"""Return the matrices $\beta A^\top$ side by side."""
    return beta * _rows(matmul(heads.key.mT, heads.query).mT)


def _rows(matrices: Float[Array, "h d d"]) -> Float[Array, "d hd"]:
    """Return the matrices of all heads side by side."""
    return matrices.swapaxes(0, 1).reshape(matrices.shape[1], -1)


def _columns(points, weights) -> Float[Array, "d n"]:
    """Return the tokens as columns, times their masses."""
    columns = (weights[:, None] * points[: len(weights)]).T
    # Laid out like this before the product, which is slow otherwise.
    return jax.lax.optimization_barrier(columns)
