"""The attention variants by name, and the simplest one of each."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.attention.abstract import AbstractAttention
from meanformer.attention.kernels import Hardmax, Linear, Sigmoid, Unnormalised
from meanformer.attention.sinkhorn import Sinkhorn
from meanformer.attention.softmax import L2, Softmax
from meanformer.errors import InvalidInput, as_integer

KINDS: dict[str, type[AbstractAttention]] = {
    "softmax": Softmax,
    "l2": L2,
    "sinkhorn": Sinkhorn,
    "linear": Linear,
    "unnormalised": Unnormalised,
    "sigmoid": Sigmoid,
    "hardmax": Hardmax,
}


def identity_attention(
    kind: str | type[AbstractAttention],
    dimension: int,
    beta: float | Float[Array, ""] = 1.0,
) -> AbstractAttention:
    """Return the attention of a kind with query, key and value the identity.

    Args:
        kind: a class such as `Softmax`, or its name in small letters.
        dimension: dimension of the tokens.
        beta: inverse temperature.
    """
    dimension = as_integer("dimension", dimension, least=1)
    if isinstance(kind, str):
        kind = KINDS.get(kind.lower(), kind)
    if not (isinstance(kind, type) and issubclass(kind, AbstractAttention)):
        raise InvalidInput(
            f"kind is {kind!r}; it must be one of {sorted(KINDS)}, or a class of "
            "attention."
        )
    identity = jnp.eye(dimension)
    return kind(identity, identity, identity, beta=beta)
