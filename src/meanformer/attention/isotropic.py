"""Attention that sees tokens through their inner products alone."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.attention.abstract import AbstractInContextMap
from meanformer.attention.exponential import AbstractExponential
from meanformer.errors import Overflow, Unsupported, is_concrete
from meanformer.numerics.multiples import multiple_of_identity


def isotropic_factors(
    layer: AbstractInContextMap,
    topic: str,
    *,
    is_attracting: bool = False,
    with_flat: bool = False,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    r"""Return $b$ and $c$ of scores $b\langle x,y\rangle$ and values $cy$.

    Softmax and unnormalised attention have them if $\beta A = bI$, $V = cI$ and there
    are no biases; on the sphere their flows commute with rotations.

    Args:
        layer: the attention; anything else is refused. Traced matrices are trusted.
        topic: what needs it, in the plural, for the message: "growth rates".
        is_attracting: require both numbers to be positive.
        with_flat: allow $b = 0$ all the same.
    """
    if not isinstance(layer, AbstractExponential):
        raise Unsupported(
            f"layer is {type(layer).__name__}; {topic} are for Softmax and "
            "Unnormalised attention."
        )
    if layer.query_bias is not None or layer.value_bias is not None:
        raise Unsupported(f"{topic} are for attention without biases; leave them out.")
    scores = layer.temperature * layer.score
    score = _factor("beta times the score", scores, topic, is_attracting, with_flat)
    if is_concrete(score) and not bool(jnp.isfinite(score**2)):
        raise Overflow(
            f"beta times the score is {float(score):.6g}, whose square is not a "
            f"number; {topic} need a smaller one."
        )
    return score, _factor("value", layer.value, topic, is_attracting)


def _factor(
    name: str,
    matrix: Float[Array, "e d"],
    topic: str,
    is_attracting: bool,
    with_flat: bool = False,
) -> Float[Array, ""]:
    is_known = is_concrete(matrix)
    factor = multiple_of_identity(matrix) if is_known else 1.0
    if (
        matrix.shape[0] != matrix.shape[1]
        or factor is None
        or (is_attracting and not (factor > 0 or (with_flat and factor == 0)))
    ):
        which = "positive multiple" if is_attracting else "multiple"
        raise Unsupported(
            f"{name} is not a {which} of the identity; {topic} are for scores b <x, y> "
            f"and values c x{' with b, c > 0' if is_attracting else ''}: solve the "
            "flow instead."
        )
    return jnp.trace(matrix) / len(matrix)
