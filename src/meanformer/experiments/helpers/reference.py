"""Tokens and layers shared by many experiments.

Nothing about the reference tokens and matrices is special, which is the point: no
symmetry, unequal weights, no randomness. Their values under every attention, and the
limits of the six tokens, are tabulated and tested.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import AbstractAttention, Softmax
from meanformer.measures import TokenCloud

POINTS = ((1.0, 0.0), (0.0, 1.0), (-1.0, 0.5), (0.5, -1.0))
WEIGHTS = (0.4, 0.3, 0.2, 0.1)
QUERY = ((0.6, -0.2), (0.3, 0.5))
KEY = ((0.4, 0.1), (-0.3, 0.7))
VALUE = ((0.5, 0.2), (-0.1, 0.8))
SIX = ((1, 0.2), (-0.6, 0.8), (0.3, -1.1), (0.1, 0.15), (-0.4, -0.3), (0.7, 0.6))
THIRD = (0.3, -0.2, 0.5, -0.4, 0.1, 0.2)


def reference_cloud(*, positions: Float[Array, " n"] | None = None) -> TokenCloud:
    """The four reference tokens with their weights."""
    return TokenCloud(jnp.array(POINTS), jnp.array(WEIGHTS), positions=positions)


def reference_attention(
    kind: type[AbstractAttention] = Softmax, **options
) -> AbstractAttention:
    """An attention of this kind with the reference matrices.

    Args:
        kind: the class of the attention.
        **options: passed to it, such as `beta`.
    """
    return kind(jnp.array(QUERY), jnp.array(KEY), jnp.array(VALUE), **options)


def six_tokens(dimension: int = 2) -> TokenCloud:
    """Six tokens of the plane whose limits are tabulated, or of space above them."""
    points = np.column_stack([np.array(SIX), THIRD])
    return TokenCloud(jnp.array(points[:, :dimension]))


def plain_attention(value: Float[np.ndarray, "d d"], **options) -> Softmax:
    """Softmax attention with query and key the identity.

    Args:
        value: the value matrix.
        **options: passed to `Softmax`, such as `beta`.
    """
    identity = np.eye(len(value))
    return Softmax(identity, identity, np.asarray(value, float), **options)


def definite_form(rng: np.random.Generator, dimension: int) -> Float[np.ndarray, "d d"]:
    """A random form, positive definite and not symmetric."""
    factor, twist = rng.normal(size=(2, dimension, dimension))
    symmetric = factor @ factor.T / dimension + 0.3 * np.eye(dimension)
    return symmetric + 0.3 * (twist - twist.T)
