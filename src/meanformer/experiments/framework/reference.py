"""Four weighted tokens and three matrices in the plane, shared by many experiments.

Nothing about them is special, which is the point: no symmetry, unequal weights, no
randomness. Their values under every attention are tabulated and tested.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.attention import AbstractAttention, Softmax
from meanformer.measures import TokenCloud

POINTS = ((1.0, 0.0), (0.0, 1.0), (-1.0, 0.5), (0.5, -1.0))
WEIGHTS = (0.4, 0.3, 0.2, 0.1)
QUERY = ((0.6, -0.2), (0.3, 0.5))
KEY = ((0.4, 0.1), (-0.3, 0.7))
VALUE = ((0.5, 0.2), (-0.1, 0.8))


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
