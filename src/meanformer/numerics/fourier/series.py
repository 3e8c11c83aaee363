"""Fourier series with few terms, summed as they stand."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from meanformer.numerics.arrays import matmul

# Cosine and sine of a multiple of each angle.
Wave = Float[Array, "2 n"]


def few_terms(
    factors: Float[Array, " modes"],
    queries: Float[Array, "m 1"],
    tokens: Float[Array, "n 1"],
    columns: Float[Array, "n c"],
    axis: str | None,
) -> Float[Array, "m c"]:
    r"""Return $\sum_j \sum_k f_k \cos(k(a_i - z_j))\, c_j$ by a recurrence in $k$.

    Args:
        factors: the even coefficients $f_k$, from $-N/2$ on.
        queries: the angles $a_i$.
        tokens: the angles $z_j$.
        columns: the numbers $c_j$, one column per sum.
        axis: the axis of devices that share the tokens, if they do.
    """
    half = factors[len(factors) // 2 :]
    # Terms at k and -k are equal.
    half = jnp.concatenate([half[:1], 2 * half[1:]])
    turn, query_turn = wave(tokens[:, 0]), wave(queries[:, 0])

    def transform(current: Wave, _):
        return rotated(current, turn), matmul(current, columns)

    def evaluate(carry, term):
        current, total = carry
        factor, coefficients = term
        total = total + factor * matmul(current.T, coefficients)
        return (rotated(current, query_turn), total), None

    _, sums = lax.scan(transform, standing(turn), None, length=len(half))
    if axis is not None:
        sums = lax.psum(sums, axis)
    nothing = jnp.zeros((len(queries), columns.shape[1]), columns.dtype)
    return lax.scan(evaluate, (standing(query_turn), nothing), (half, sums))[0][1]


def wave(angles: Float[Array, " n"]) -> Wave:
    """Return cosine and sine of each angle."""
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def standing(turn: Wave) -> Wave:
    """Return cosine and sine of zero for each angle."""
    return jnp.stack([jnp.ones_like(turn[0]), jnp.zeros_like(turn[1])])


def rotated(current: Wave, turn: Wave) -> Wave:
    """Turn each wave by its angle."""
    cosine, sine = current
    return jnp.stack(
        [cosine * turn[0] - sine * turn[1], cosine * turn[1] + sine * turn[0]]
    )
