"""An attention of one's own: softmax that only sees the direction of the query."""

import jax.numpy as jnp
from jaxtyping import Array, Float

import meanformer as mf
from meanformer.attention import AbstractInContextMap
from meanformer.measures import AbstractContext


class DirectionalSoftmax(AbstractInContextMap):
    """Softmax attention of the normalised query."""

    beta: float

    def __call__(
        self, mu: AbstractContext, x: Float[Array, "m d"], *, positions=None
    ) -> Float[Array, "m d"]:
        """Return the tilted mean of the context in the direction of each query."""
        return mu.tilted_mean(self.tilts(x))

    def matrix(self, mu, x: Float[Array, "m d"]) -> Float[Array, "m n"]:
        """Return the share of each token in what each query sees."""
        return mu.tilted_shares(self.tilts(x))

    def tilts(self, x: Float[Array, "m d"]) -> Float[Array, "m d"]:
        """Return the direction of each query, as long as beta says."""
        return self.beta * x / jnp.linalg.norm(x, axis=1, keepdims=True)


attention = DirectionalSoftmax(beta=0.5)
context = mf.Gaussian(mean=jnp.zeros(2), covariance=jnp.eye(2))
values = attention(context, jnp.array([[2.0, 0.0]]))
