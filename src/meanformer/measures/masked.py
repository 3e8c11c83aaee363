"""Masked clouds: each query sees a stretch of the sorted tokens."""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from meanformer.errors import Unsupported
from meanformer.measures.abstract import FeatureMap
from meanformer.measures.cloud import (
    AbstractCloud,
    TokenCloud,
    features_of,
    gaussian_log_factor,
)
from meanformer.numerics.pair_sums.dense import kernel_shares
from meanformer.numerics.pair_sums.kernel import identity
from meanformer.numerics.pair_sums.pairs import Pairs
from meanformer.numerics.pair_sums.sums import AbstractPairSums
from meanformer.typing import MassAndMean

NO_PLAN = (
    "Sinkhorn attention cannot be masked: with distinct positions the only plan with "
    "equal marginals on a triangular pattern is the diagonal one, so every token would "
    "see itself alone; use Softmax or L2."
)


class MaskedCloud(AbstractCloud):
    r"""One context for each query: the tokens from `first` to `last`.

    $$\mu_i = \sum_{a_i \le j < b_i} w_j e^{h_j} \delta_{x_j}, \qquad
      a = \mathrm{first}, \quad b = \mathrm{last},$$
    not normalised, unless `divide` asks to divide it by the visible mass
    $\sum_{a_i \le j < b_i} w_j$.

    Every question must be asked with one row for each query, in their order. A query
    that sees nothing gets mean zero and log-mass $-\infty$.
    """

    base: TokenCloud
    first: Int[Array, " m"]
    last: Int[Array, " m"]
    log_density: Float[Array, " n"] | None = None
    divide: bool = eqx.field(default=False, static=True)

    @property
    def points(self) -> Float[Array, "n d"]:
        """The points of the sorted cloud."""
        return self.base.points

    @property
    def sums(self) -> AbstractPairSums:
        """How sums over pairs are computed: as for the cloud."""
        return self.base.sums

    def pairs(
        self, u: Float[Array, "m k"], keys: Float[Array, "n k"] | None = None
    ) -> Pairs:
        """Return the scores of the tilts against the tokens each may see."""
        points, weights = self.points if keys is None else keys, self.base.weights
        return Pairs(u, points, weights, self.log_density, self.first, self.last)

    def kernel_pairs(
        self, u: Float[Array, "m k"], features: Float[Array, "n k"]
    ) -> Pairs:
        """Return the scores against features of the tokens each query may see."""
        weights = self.base.weights
        if self.log_density is not None:
            weights = weights * jnp.exp(jnp.where(weights > 0, self.log_density, 0))
        return Pairs(u, features, weights, first=self.first, last=self.last)

    def seen_by(self, count: int) -> Bool[Array, " m"]:
        """Return whether each query sees a token of positive weight."""
        present = jnp.cumsum(self.base.weights > 0)
        present = jnp.concatenate([jnp.zeros((1,), present.dtype), present])
        return present[self.last] > present[self.first]

    def visible_mass(self) -> Float[Array, " m"]:
        """Return the total weight that each query sees, summed without cancellation."""
        tilts = jnp.zeros((len(self.first), self.dimension), self.points.dtype)
        weights, first, last = self.base.weights, self.first, self.last
        pairs = Pairs(tilts, self.points, weights, first=first, last=last)
        return self.sums.kernel(pairs, self.points[:, :0], jnp.ones_like)[0]

    def averaged(self, pairs: Pairs) -> MassAndMean:
        """Return log-mass and mean of what each query sees under these scores."""
        log_mass, mean = self.sums.softmax(pairs, self.points)
        return log_mass - jnp.log(self._divisor()), mean

    def kernel_mean(
        self, u: Float[Array, "m d"], profile: Callable[[Array], Array]
    ) -> MassAndMean:
        """Return mass and moment of the profile over what each query sees."""
        return self._kernel_mean(u, self.points, profile)

    def linear_mean(
        self, u: Float[Array, "m k"], feature_map: FeatureMap | None = None
    ) -> MassAndMean:
        """Return mass and moment of a linear kernel over what each query sees."""
        return self._kernel_mean(u, features_of(self.base, feature_map), identity)

    def kernel_shares(
        self,
        u: Float[Array, "m k"],
        profile: Callable[[Array], Array],
        features: Float[Array, "n k"] | None = None,
    ) -> Float[Array, "m n"]:
        """Return mass times profile of the score for each pair that is seen."""
        features = self.points if features is None else features
        shares = kernel_shares(self.kernel_pairs(u, features), profile)
        return shares / self._divisor()[:, None]

    def centred(self) -> tuple[Float[Array, " d"], "MaskedCloud"]:
        """Return a point amid the whole cloud, and what is seen as seen from there."""
        origin, near = self.base.centred()
        return origin, eqx.tree_at(lambda cloud: cloud.base, self, near)

    def quadratic_tilt(
        self, precision: Float[Array, "d d"], *, is_positive: bool = False
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
        raise Unsupported(NO_PLAN)

    def _kernel_mean(self, u, features, profile):
        pairs = self.kernel_pairs(u, features)
        mass, moment = self.sums.kernel(pairs, self.points, profile)
        divisor = self._divisor()
        return mass / divisor, moment / divisor[:, None]

    def _divisor(self) -> Float[Array, " m"]:
        """Return what the mass of each context is divided by."""
        if not self.divide:
            return jnp.ones(self.first.shape, self.points.dtype)
        return jnp.where(self.seen_by(len(self.first)), self.visible_mass(), 1)
