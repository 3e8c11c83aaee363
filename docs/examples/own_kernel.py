"""A kernel of one's own: the weight of a token is a power of its score."""

import jax.numpy as jnp
from jaxtyping import Array, Float

import meanformer as mf
from meanformer.attention import AbstractInContextMap
from meanformer.measures import AbstractContext


class PowerAttention(AbstractInContextMap):
    """Attention that weighs a token by a power of its inner product with the query."""

    power: int

    def __call__(
        self, mu: AbstractContext, x: Float[Array, "m d"], *, positions=None
    ) -> Float[Array, "m d"]:
        """Return the weighted sum of the tokens as seen from each query."""
        _, moment = mu.kernel_mean(x, self.weight)
        return moment

    def matrix(self, mu, x: Float[Array, "m d"]) -> Float[Array, "m n"]:
        """Return the weight of each token as seen from each query."""
        return mu.kernel_shares(x, self.weight)

    def energy(self, mu) -> Float[Array, ""]:
        """Return the mean over pairs of the integrated weight, halved."""
        heights, _ = mu.kernel_mean(mu.points, self.integrated_weight)
        return jnp.dot(mu.weights, heights) / 2

    def weight(self, score: Array) -> Array:
        """Return the weight of a token from its score."""
        return score**self.power

    def integrated_weight(self, score: Array) -> Array:
        """Return the function whose derivative is the weight."""
        return score ** (self.power + 1) / (self.power + 1)


attention = PowerAttention(power=2)
cloud = mf.in_order(mf.TokenCloud([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]))
values = attention(cloud, cloud.points)
matrix = mf.attention_matrix(attention, cloud)
causal = mf.attention_matrix(mf.Masked(attention), cloud)
energy = mf.observables.energy(attention, cloud)
