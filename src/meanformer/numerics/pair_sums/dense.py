"""Dense attention weights, for small problems and for looking at."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.numerics.pair_sums.kernel import profiled, tie_margin
from meanformer.numerics.pair_sums.pairs import Pairs


def softmax_shares(pairs: Pairs) -> Float[Array, "m n"]:
    """Return each token's share in each query's average; rows sum to one, or zero."""
    scores = jnp.where(pairs.visible(), pairs.scores(), -jnp.inf)
    top = scores.max(axis=1, keepdims=True)
    masses = pairs.weights[None] * jnp.exp(scores - jnp.where(top > -jnp.inf, top, 0))
    return _shares(masses)


def kernel_shares(
    pairs: Pairs, profile: Callable[[Array], Array]
) -> Float[Array, "m n"]:
    """Return weight times profile of the score, zero where a token is not seen."""
    visible = pairs.visible()
    shares = pairs.weights[None] * profiled(profile, pairs.scores(), visible)
    return jnp.where(visible, shares, 0)


def hardmax_shares(pairs: Pairs, tolerance: float) -> Float[Array, "m n"]:
    """Return each token's share among those that tie for the largest score."""
    visible, sizes = pairs.visible(), pairs.sizes()
    scores = jnp.where(visible, pairs.scores(), -jnp.inf)
    best = scores.max(axis=1, keepdims=True)
    is_best = visible & (scores == best)
    best_size = jnp.where(is_best, sizes, 0).max(axis=1, keepdims=True)
    is_tie = visible & (best - scores <= tie_margin(best_size, sizes, tolerance))
    return _shares(jnp.where(is_tie, pairs.weights[None], 0))


def _shares(masses: Float[Array, "m n"]) -> Float[Array, "m n"]:
    total = masses.sum(axis=1, keepdims=True)
    return masses / jnp.where(total > 0, total, 1)
