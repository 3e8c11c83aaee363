"""The attention variants by name, and the simplest one of each."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.attention.abstract import AbstractAttention
from meanformer.attention.kernels import Hardmax, Linear, Sigmoid, Unnormalised
from meanformer.attention.sinkhorn import Sinkhorn
from meanformer.attention.softmax import L2, Softmax
from meanformer.errors import as_integer, check_choice

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
    is_class = isinstance(kind, type) and issubclass(kind, AbstractAttention)
    if not is_class:
        kind = kind.lower() if isinstance(kind, str) else kind
        check_choice("kind", kind, sorted(KINDS), ", or a class of attention")
    identity = jnp.eye(dimension)
    attention = kind if is_class else KINDS[kind]
    return attention(identity, identity, identity, beta=beta)
