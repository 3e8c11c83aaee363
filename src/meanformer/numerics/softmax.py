"""Weighted softmax over a few components, with zero weight as absence."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def weighted_logsumexp(
    scores: Float[Array, "m k"], weights: Float[Array, " k"]
) -> tuple[Float[Array, " m"], Float[Array, "m k"]]:
    r"""Return $\log\sum_k w_k e^{s_k}$ and the shares $w_k e^{s_k}/\sum$ of each row.

    A weight of zero leaves its column out in value and gradient: the scores are
    masked, never the logarithm of the weights taken.
    """
    masked = jnp.where(weights[None, :] > 0, scores, -jnp.inf)
    top = jax.lax.stop_gradient(masked.max(axis=1))
    masses = weights[None, :] * jnp.exp(masked - top[:, None])
    total = masses.sum(axis=1)
    return top + jnp.log(total), masses / total[:, None]
