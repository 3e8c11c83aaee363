"""Attention matrices on request: who sees whom, as one dense array."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.attention.abstract import AbstractInContextMap, checked_range
from meanformer.attention.composition import MultiHead, Residual
from meanformer.attention.masked import Masked
from meanformer.errors import Unsupported, check_kind
from meanformer.measures import TokenCloud
from meanformer.measures.cloud import AbstractCloud
from meanformer.numerics.arrays import widened


def attention_matrix(
    gamma: AbstractInContextMap, mu: TokenCloud
) -> Float[Array, "n n"] | Float[Array, "h n n"]:
    r"""Return $P_{ij}$, the weight of token $j$ as seen from token $i$.

    The weight $w_j$ is included, so rows sum to one for the row-normalised kinds;
    $P_{ij}/w_j$ is the density with respect to the context. Half precision is computed
    in single; what is too large for the floating-point type raises `Overflow`.

    Args:
        gamma: an attention, masked or not, or a map of one's own that has a `matrix`;
            several heads give a leading axis; a residual gives the matrix of its
            velocity.
        mu: the token cloud, queries and context alike.

    Returns:
        The matrix. Cost: $O(n^2)$ memory.
    """
    check_kind("mu", mu, TokenCloud, "a TokenCloud")
    if isinstance(gamma, Residual):
        return attention_matrix(gamma.gamma, mu)
    if isinstance(gamma, MultiHead):
        return jnp.stack([attention_matrix(head, mu) for head in gamma.heads])
    if isinstance(gamma, Masked):
        return _masked_matrix(gamma, mu)
    if isinstance(gamma, AbstractInContextMap):
        return _matrix(gamma, mu, mu.points)
    raise Unsupported(
        f"{type(gamma).__name__} has no attention matrix; a schedule has one at each "
        "depth, Rescaled(attention) that of attention_at(depth)."
    )


def _matrix(
    attention: AbstractInContextMap, context: AbstractCloud, x: Float[Array, "m d"]
) -> Float[Array, "m n"]:
    wide, context, queries = widened((attention, context, x))
    return checked_range(attention, wide.matrix(context, queries).astype(x.dtype))


def _masked_matrix(gamma: Masked, mu: TokenCloud) -> Array:
    view, order = gamma.view(mu, mu.points, mu.positions)
    inner = gamma.attention
    heads = inner.heads if isinstance(inner, MultiHead) else (inner,)
    back = jnp.argsort(order)
    matrices = [_matrix(head, view, mu.points)[:, back] for head in heads]
    return jnp.stack(matrices) if isinstance(inner, MultiHead) else matrices[0]
