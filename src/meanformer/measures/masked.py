"""What each query sees of a cloud through a mask: a stretch of its sorted tokens."""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meanformer.errors import Unsupported
from meanformer.measures.abstract import FeatureMap
from meanformer.measures.cloud import AbstractCloud, TokenCloud, gaussian_log_factor
from meanformer.numerics.pair_sums import AbstractPairSums
from meanformer.numerics.pairs import Pairs


class MaskedCloud(AbstractCloud):
    r"""One context for each query: the tokens from `first` to `last`, not normalised.

    $$\mu_i = \sum_{\mathrm{first}_i \le j < \mathrm{last}_i} w_j e^{h_j} \delta_{x_j}.$$

    Every question must be asked with one row for each query, in their order. A query
    that sees nothing gets mean zero and log-mass $-\infty$.
    """

    base: TokenCloud
    first: Int[Array, " m"]
    last: Int[Array, " m"]
    log_density: Float[Array, " n"] | None = None

    @property
    def points(self) -> Float[Array, "n d"]:
        """The points of the sorted cloud."""
        return self.base.points

    @property
    def sums(self) -> AbstractPairSums:
        """How sums over pairs are computed: as for the cloud."""
        return self.base.sums

    def pairs(self, u: Float[Array, "m d"]) -> Pairs:
        """Return the scores of the tilts against the tokens each may see."""
        return self._pairs(u, self.points)

    def _pairs(self, u: Float[Array, "m k"], features: Float[Array, "n k"]) -> Pairs:
        weights = self.base.weights
        return Pairs(u, features, weights, self.log_density, self.first, self.last)

    def visible_mass(self) -> Float[Array, " m"]:
        """Return the total weight that each query sees."""
        zero = jnp.zeros((1,), self.base.weights.dtype)
        cumulative = jnp.concatenate([zero, jnp.cumsum(self.base.weights)])
        return cumulative[self.last] - cumulative[self.first]

    def linear_mean(
        self, u: Float[Array, "m k"], feature_map: FeatureMap | None = None
    ) -> tuple[Float[Array, " m"], Float[Array, "m d"]]:
        """Return mass and moment of a linear kernel over what each query sees."""
        features = self.points if feature_map is None else feature_map(self.points)
        return self.sums.kernel(self._pairs(u, features), self.points, _identity)

    def quadratic_tilt(
        self, precision: Float[Array, "d d"]
    ) -> tuple[Float[Array, ""], "MaskedCloud"]:
        """Multiply by a Gaussian factor; the log-mass is left in the density."""
        factor = gaussian_log_factor(self.points, precision)
        zero = jnp.zeros((), factor.dtype)
        return zero, eqx.tree_at(
            lambda cloud: cloud.log_density,
            self,
            factor,
            is_leaf=lambda leaf: leaf is None,
        )

    def entropic_tilt(
        self, form: Float[Array, "d d"], potential: Callable
    ) -> "MaskedCloud":
        """Refuse: a triangular pattern leaves only the diagonal plan."""
        raise Unsupported(
            "Sinkhorn attention cannot be masked: with distinct positions the only "
            "plan with equal marginals supported on a triangular pattern is the "
            "diagonal one, so every token would see itself alone; use Softmax or L2."
        )


def _identity(score: Array) -> Array:
    return score
