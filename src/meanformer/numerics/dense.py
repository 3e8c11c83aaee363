"""Dense attention weights, for small problems and for looking at."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.numerics.pairs import Pairs


def softmax_shares(pairs: Pairs) -> Float[Array, "m n"]:
    """Return each token's share in each query's average; rows sum to one, or zero."""
    scores = jnp.where(pairs.visible(), pairs.scores(), -jnp.inf)
    top = scores.max(axis=1, keepdims=True)
    masses = pairs.weights[None] * jnp.exp(scores - jnp.where(top > -jnp.inf, top, 0))
    total = masses.sum(axis=1, keepdims=True)
    return masses / jnp.where(total > 0, total, 1)


def kernel_shares(
    pairs: Pairs, profile: Callable[[Array], Array]
) -> Float[Array, "m n"]:
    """Return weight times profile of the score, zero where a token is not seen."""
    shares = pairs.weights[None] * profile(pairs.scores())
    return jnp.where(pairs.visible(), shares, 0)


def hardmax_shares(pairs: Pairs, tolerance: float) -> Float[Array, "m n"]:
    """Return each token's share among those that tie for the largest score."""
    scores = jnp.where(pairs.visible(), pairs.scores(), -jnp.inf)
    ties = pairs.visible() & (scores >= scores.max(axis=1, keepdims=True) - tolerance)
    masses = jnp.where(ties, pairs.weights[None], 0)
    total = masses.sum(axis=1, keepdims=True)
    return masses / jnp.where(total > 0, total, 1)
