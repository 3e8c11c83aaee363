"""Weighted softmax over a few components, and logarithms without cancellation."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# Below this a logarithm is summed as a series, of so many terms.
SERIES, TERMS = 0.05, 16


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


def log_excess(x: Float[Array, " r"]) -> Float[Array, " r"]:
    r"""Return $x - \log(1 + x)$ without cancellation."""
    small = jnp.abs(x) < SERIES
    near, far = jnp.where(small, x, 0), jnp.where(small, 1, x)
    powers = np.arange(TERMS, 1, -1)
    series = np.concatenate([(-1.0) ** powers / powers, [0.0, 0.0]])
    near = jnp.polyval(jnp.asarray(series, x.dtype), near)
    return jnp.where(small, near, far - jnp.log1p(far))
