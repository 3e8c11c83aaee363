"""An attention of one's own: softmax that only sees the direction of the query."""

import jax.numpy as jnp
from jaxtyping import Array, Float

import meanformer as mf


class DirectionalSoftmax(mf.AbstractInContextMap):
    """Softmax attention of the normalised query."""

    beta: float

    def __call__(
        self, mu: mf.AbstractMeasure, x: Float[Array, "m d"], *, positions=None
    ) -> Float[Array, "m d"]:
        """Return the tilted mean of the context in the direction of each query."""
        directions = x / jnp.linalg.norm(x, axis=1, keepdims=True)
        return mu.tilted_mean(self.beta * directions)
