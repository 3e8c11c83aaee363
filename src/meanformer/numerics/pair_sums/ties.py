"""Ties for the largest score: what counts as equal when scores are rounded."""

import jax.numpy as jnp
from jaxtyping import Array, Float, ScalarLike

ROUNDINGS = 8


def tie_margin(
    best_size: Float[Array, "m 1"],
    sizes: Float[Array, "m n"],
    tolerance: ScalarLike,
) -> Float[Array, "m n"]:
    r"""How far below the best score a score may be and still tie with it.

    A score $\sum_k u_k y_k + b$ is rounded relative to its size
    $\sum_k |u_k y_k| + |b|$, which says more than its value: terms may cancel. Two
    scores that differ by rounding tie whatever the tolerance.

    Args:
        best_size: the size of each query's best score.
        sizes: the sizes of all scores.
        tolerance: the margin asked for.
    """
    # Each on its own: the sum of two sizes may be no number where they are.
    unit = ROUNDINGS * jnp.finfo(sizes.dtype).eps
    return jnp.maximum(tolerance, unit * sizes + unit * best_size)
