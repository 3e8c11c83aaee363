r"""Attention on the sphere for many small clouds at once, as tokens or Gram matrices.

Clouds lie along the first axis. Sums over coordinates are products with a vector of
ones, which compile to faster code than reductions; scores lie within $[-\beta, \beta]$,
so that no largest one has to be looked for.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.numerics.arrays import matmul
from meanformer.numerics.nearest import settled_labels
from meanformer.numerics.pair_sums.exponential import exponent_scale, scaled_exp


def row_sums(matrices: Float[Array, "b n m"]) -> Float[Array, "b n 1"]:
    """Return the sum over the last axis, which stays."""
    return matmul(matrices, jnp.ones((matrices.shape[-1], 1), matrices.dtype))


def unit_tokens(tokens: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
    """Return tokens near the sphere brought back to it."""
    return tokens * jax.lax.rsqrt(row_sums(tokens * tokens))


def gram_matrices(
    tokens: Float[Array, "b n d"], others: Float[Array, "b m d"]
) -> Float[Array, "b n m"]:
    """Return the inner products of tokens with others of the same cloud."""
    return matmul(tokens, jnp.swapaxes(others, 1, 2))


def token_velocities(
    tokens: Float[Array, "b n d"],
    weights: Float[Array, "b n"],
    beta: Float[Array, ""],
    *,
    is_softmax: bool,
) -> Float[Array, "b n d"]:
    r"""Velocities of tokens on the sphere under identity attention.

    $$\dot x_i = (I - \hat x_i\hat x_i^\top)\, s_i \sum_j
      w_j e^{\beta(\langle\hat x_i, \hat x_j\rangle - 1)}\,\hat x_j, \qquad
      \hat x = x/|x|,$$
    with $s_i$ the inverse of the same sum without $\hat x_j$ for softmax, and $e^\beta$
    without normalisation. The field does not see the norms: so an error along the
    radius stays as it is, where in the field without hats it is damped at the rate
    $2\langle x, A\rangle$, which an explicit method
    pays with a third more steps (measured: 37 in place of 28 at $\beta = 9$).

    Cost: $O(n^2 d)$ for each cloud.
    """
    directions = unit_tokens(tokens)
    masses = _masses(gram_matrices(directions, directions), weights, beta)
    pulls = matmul(masses, directions)
    tangent = pulls - row_sums(pulls * directions) * directions
    return tangent * _scale(masses, beta, is_softmax)


def gram_velocities(
    gram: Float[Array, "b n n"],
    weights: Float[Array, "b n"],
    beta: Float[Array, ""],
    *,
    is_softmax: bool,
) -> Float[Array, "b n n"]:
    r"""Velocities of the Gram matrices of tokens under identity attention.

    With $A$ the attention matrix and $m$ the diagonal of $AG$,
    $$\dot G = F + F^\top, \qquad F = AG - \operatorname{diag}(m)\,G :$$
    the dimension of the tokens is gone. Cost: $O(n^3)$ for each cloud.
    """
    masses = _masses(gram, weights, beta)
    pulls = matmul(masses, gram)
    radial = row_sums(pulls * jnp.eye(gram.shape[-1], dtype=gram.dtype)[None])
    half = (pulls - radial * gram) * _scale(masses, beta, is_softmax)
    return half + jnp.swapaxes(half, 1, 2)


def _masses(gram: Array, weights: Array, beta: Array) -> Array:
    exponents = (beta * exponent_scale(gram.dtype)) * (gram - 1)
    return scaled_exp(exponents) * weights[:, None, :]


def _scale(masses: Array, beta: Array, is_softmax: bool) -> Array:
    if is_softmax:
        return 1 / jnp.sum(masses, axis=-1, keepdims=True)
    return jnp.exp(beta)


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

    Each token takes the smallest label among its neighbours until nothing changes; the
    tokens that keep their own are counted.

    Args:
        links: one for an edge, zero for none; the diagonal does not matter.

    Cost: $O(n^2)$ for each link of the longest of all shortest chains.
    """
    count = links.shape[-1]
    own = jnp.arange(count, dtype=links.dtype)
    start = jnp.broadcast_to(own[None, :], links.shape[:2])

    def lowered(labels: Float[Array, "b n"]) -> Float[Array, "b n"]:
        offered = jnp.where(links > 0, labels[:, None, :], count).min(axis=2)
        return jnp.minimum(labels, offered)

    labels = settled_labels(lowered, start)
    return jnp.sum(labels == own[None, :], axis=1).astype(links.dtype)
