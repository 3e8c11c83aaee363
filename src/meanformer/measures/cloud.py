"""Token clouds: finitely many weighted points, as measures and as contexts."""

import abc
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from meanformer.errors import (
    InvalidInput,
    as_finite_array,
    as_float_array,
    as_integer,
    as_key,
    check,
    check_finite,
    check_kind,
)
from meanformer.geometry.circle import on_circle
from meanformer.measures.abstract import AbstractContext, AbstractMeasure, FeatureMap
from meanformer.measures.checks import checked_positions, checked_weights
from meanformer.numerics.arrays import held, matmul, safe_norm
from meanformer.numerics.fourier.sums import Auto
from meanformer.numerics.nearest import farthest_pair
from meanformer.numerics.pair_sums.dense import kernel_shares, softmax_shares
from meanformer.numerics.pair_sums.pairs import Pairs
from meanformer.numerics.pair_sums.sums import AbstractPairSums
from meanformer.typing import ArrayLike, Key, MassAndMean


class AbstractCloud(AbstractContext):
    """A context made of points: all its answers are sums over pairs.

    Concrete clouds say which pairs (`pairs`) and how to sum them (`sums`).
    """

    points: eqx.AbstractVar[Float[Array, "n d"]]
    sums: eqx.AbstractVar[AbstractPairSums]

    @abc.abstractmethod
    def pairs(
        self, u: Float[Array, "m k"], keys: Float[Array, "n k"] | None = None
    ) -> Pairs:
        """Return the scores of the tilts against the points, densities as offsets.

        Keys stand for the points in the scores, if they are given.
        """

    @abc.abstractmethod
    def averaged(self, pairs: Pairs) -> MassAndMean:
        """Return log-mass and mean of the points under these scores."""

    @abc.abstractmethod
    def centred(self) -> tuple[Float[Array, " d"], "AbstractCloud"]:
        """Return an origin amid the tokens, and the cloud as seen from there."""

    @abc.abstractmethod
    def kernel_pairs(
        self, u: Float[Array, "m k"], features: Float[Array, "n k"]
    ) -> Pairs:
        """Return the scores against features of the points, densities in the weights.

        This is what functions of the score other than its exponential need.
        """

    @abc.abstractmethod
    def kernel_shares(
        self,
        u: Float[Array, "m k"],
        profile: Callable[[Array], Array],
        features: Float[Array, "n k"] | None = None,
    ) -> Float[Array, "m n"]:
        """Return mass times profile of the score for each pair, as a dense array.

        Features stand for the points in the scores, if they are given.
        """

    def tilted_shares(self, u: Float[Array, "m d"]) -> Float[Array, "m n"]:
        """Return each point's share in the tilted mean, as a dense array."""
        return softmax_shares(self.pairs(u))

    @property
    def dimension(self) -> int:
        """Dimension of the space the points live in."""
        return self.points.shape[1]

    @property
    def count(self) -> int:
        """Number of points, padding included."""
        return self.points.shape[0]

    def tilted_mass_and_mean(self, u: Float[Array, "m d"]) -> MassAndMean:
        """Return the log-Laplace transform and the tilted mean from one pass."""
        return self._tilted(as_finite_array("u", u, (None, self.dimension)), None)

    def tilted_through(
        self, queries: Float[Array, "m k"], key: Float[Array, "k d"]
    ) -> MassAndMean:
        """Return the same with scores between queries and keys, if that is cheaper."""
        if len(key) >= self.dimension:
            return self.tilted_mass_and_mean(matmul(queries, key))
        return self._tilted(queries, key)

    def _tilted(
        self, queries: Float[Array, "m k"], key: Float[Array, "k d"] | None
    ) -> MassAndMean:
        r"""Return log-mass and mean at the tilts $K^\top q$, seen from amid the tokens.

        Derivatives are covariances: as differences of second moments about a far
        origin they would lose digits with the square of its distance.
        """
        origin, near = self.centred()
        keys, end = near.points, origin
        if key is not None:
            keys, end = matmul(keys, key.T), matmul(key, origin)
        log_mass, mean = near.averaged(near.pairs(queries, keys))
        sees = log_mass != -jnp.inf
        log_mass = jnp.where(sees, log_mass + matmul(queries, end), -jnp.inf)
        return log_mass, jnp.where(sees[:, None], mean + origin[None, :], 0)

    def kernel_mean(
        self, u: Float[Array, "m d"], profile: Callable[[Array], Array]
    ) -> MassAndMean:
        """Return the profile's mass and first moment; $O(mnd)$ time."""
        return self.sums.kernel(self.kernel_pairs(u, self.points), self.points, profile)

    def maximal_mean(
        self, u: Float[Array, "m d"], tolerance: float
    ) -> Float[Array, "m d"]:
        """Return the weighted mean of the points that tie for the largest score."""
        pairs = self.kernel_pairs(u, self.points)
        return self.sums.hardmax(pairs, self.points, tolerance)[1]


class AbstractWeightedCloud(AbstractCloud, AbstractMeasure):
    """A cloud that is a measure: points with masses of total one."""

    weights: eqx.AbstractVar[Float[Array, " n"]]

    def averaged(self, pairs: Pairs) -> MassAndMean:
        """Return log-mass and mean of the points under these scores."""
        return self.sums.softmax(pairs, self.points)

    def kernel_shares(
        self,
        u: Float[Array, "m k"],
        profile: Callable[[Array], Array],
        features: Float[Array, "n k"] | None = None,
    ) -> Float[Array, "m n"]:
        """Return mass times profile of the score for each pair, as a dense array."""
        features = self.points if features is None else features
        return kernel_shares(self.kernel_pairs(u, features), profile)

    def mean(self) -> Float[Array, " d"]:
        """Return the weighted mean of the points."""
        return matmul(self.weights, self.points)

    def covariance(self) -> Float[Array, "d d"]:
        """Return the weighted covariance of the points (divided by the mass, 1)."""
        centred = self.points - self.mean()[None, :]
        return matmul((self.weights[:, None] * centred).T, centred)

    def radius(self) -> Float[Array, ""]:
        """Return the largest norm of a point of positive weight."""
        squares = jnp.where(self.weights > 0, jnp.sum(self.points**2, axis=1), 0)
        largest = squares.max()
        # A root has no derivative at zero: all tokens at the origin give zero instead.
        return jnp.where(largest > 0, jnp.sqrt(jnp.where(largest > 0, largest, 1)), 0)

    def diameter(self) -> Float[Array, ""]:
        """Return the largest distance between two points of positive weight.

        Cost: $O(n^2 d)$ time, one block of memory. The derivative is that of the
        distance of one farthest pair.
        """
        # An absent point stands where a present one does, which changes no distance.
        present = self.weights > 0
        points = jnp.where(present[:, None], self.points, self.points[present.argmax()])
        first, second = farthest_pair(points - self.mean()[None, :])
        return safe_norm(points[first][None, :] - points[second][None, :])[0]

    def sample(self, count: int, *, key: Key) -> Float[Array, "count d"]:
        """Draw points with their weights as probabilities."""
        count, key = as_integer("count", count, least=0), as_key(key)
        return self.points[jr.choice(key, self.count, (count,), p=self.weights)]

    def linear_mean(
        self, u: Float[Array, "m k"], feature_map: FeatureMap | None = None
    ) -> MassAndMean:
        """Return mass and moment of a linear kernel; $O((m+n)kd)$, no pair formed."""
        weighted = self.weights[:, None] * features_of(self, feature_map)
        moments = matmul(weighted.T, held(self.points, (self.weights > 0)[:, None]))
        return matmul(u, weighted.sum(0)), matmul(u, moments)


class TokenCloud(AbstractWeightedCloud):
    r"""Finitely many tokens with masses: $\mu = \sum_i w_i \delta_{x_i}$.

    A token of weight zero is absent from every context, exactly, in value and in
    gradient, but still moves: that is how clouds of unequal size are padded.

    Args:
        points: positions $x_i$, one row per token, finite.
        weights: masses $w_i \ge 0$ of total 1 (to 1e-6); equal masses by default.
        positions: places $s_i \in [0,1]$ of the tokens in the sequence, for masks.
        sums: how sums over pairs of tokens are computed; `Auto()` by default.
        normalize: divide the weights by their total instead of requiring 1.
    """

    points: Float[Array, "n d"]
    weights: Float[Array, " n"]
    positions: Float[Array, " n"] | None
    sums: AbstractPairSums

    def __init__(
        self,
        points: ArrayLike,
        weights: ArrayLike | None = None,
        *,
        positions: ArrayLike | None = None,
        sums: AbstractPairSums | None = None,
        normalize: bool = False,
    ):
        self.points = as_float_array("points", points)
        check(
            self.points.ndim == 2 and 0 not in self.points.shape,
            f"points has shape {self.points.shape}; it must be (n, d), one row for "
            "each of at least one token.",
        )
        check_finite("points", self.points)
        self.weights = checked_weights(self.points, weights, normalize=normalize)
        self.positions = checked_positions(self.points, positions)
        allowed = "Auto(…), Blocked(…), Fourier(…) or Sharded(…)"
        check_kind("sums", sums, AbstractPairSums | None, allowed)
        self.sums = Auto() if sums is None else sums

    @classmethod
    def from_angles(
        cls,
        angles: ArrayLike,
        weights: ArrayLike | None = None,
        *,
        positions: ArrayLike | None = None,
        sums: AbstractPairSums | None = None,
        normalize: bool = False,
    ) -> "TokenCloud":
        r"""Put tokens on the unit circle of the plane: $x_i = (\cos a_i, \sin a_i)$.

        Args:
            angles: the angles $a_i$ in radians, one per token.
            weights: as for any cloud.
            positions: as for any cloud.
            sums: as for any cloud.
            normalize: as for any cloud.
        """
        turns = as_finite_array("angles", angles, (None,))
        options = dict(positions=positions, sums=sums, normalize=normalize)
        return cls(on_circle(turns), weights, **options)

    def pairs(
        self, u: Float[Array, "m k"], keys: Float[Array, "n k"] | None = None
    ) -> Pairs:
        """Return the scores of the tilts against the points, or their keys."""
        return self.kernel_pairs(u, self.points if keys is None else keys)

    def kernel_pairs(
        self, u: Float[Array, "m k"], features: Float[Array, "n k"]
    ) -> Pairs:
        """Return the scores of the tilts against features of the points."""
        return Pairs(u, features, self.weights)

    def centred(self) -> tuple[Float[Array, " d"], "TokenCloud"]:
        """Return a point amid the tokens, and the cloud as seen from there.

        It is the mean, but in no coordinate further from zero than twice the nearest
        token: from there, no token loses digits to one far away. Derivatives hold it
        fixed.
        """
        near = self.without_harm()
        points, present = lax.stop_gradient(near.points), (self.weights > 0)[:, None]
        heaviest = points[jnp.argmax(self.weights)]
        inside = jnp.where(present, points, heaviest[None, :])
        low, high = inside.min(axis=0), inside.max(axis=0)
        twice = 2 * (jnp.maximum(low, 0) + jnp.minimum(high, 0))
        mean = matmul(lax.stop_gradient(self.weights), points)
        origin = jnp.clip(mean, jnp.minimum(twice, 0), jnp.maximum(twice, 0))
        return origin, near.moved(near.points - origin[None, :])

    def without_harm(self) -> "TokenCloud":
        """Return the same context with absent tokens held where they do no harm."""
        return self.moved(held(self.points, (self.weights > 0)[:, None]))

    def moved(self, points: Float[Array, "n e"]) -> "TokenCloud":
        """Return the same masses and places at other points."""
        return eqx.tree_at(lambda cloud: cloud.points, self, points)

    def quadratic_tilt(
        self, precision: Float[Array, "d d"], *, is_positive: bool = False
    ) -> tuple[Float[Array, ""], "TiltedCloud"]:
        """Multiply by a Gaussian factor, kept as a logarithm so nothing underflows."""
        return tilt(self, gaussian_log_factor(self.points, precision))

    def entropic_tilt(
        self,
        form: Float[Array, "d d"],
        potential: Callable[["TokenCloud"], Float[Array, " n"]],
    ) -> "TiltedCloud":
        """Return the cloud weighted by its entropic potential."""
        return tilt(self, potential(self))[1]


class TiltedCloud(AbstractWeightedCloud):
    r"""A token cloud with a density: $\sum_i w_i e^{h_i} \delta_{x_i}$, of mass one.

    The density is kept as a logarithm relative to the masses, so that a token that
    is negligible on the whole can still dominate where a query looks. `tilt` makes it.
    """

    base: TokenCloud
    log_density: Float[Array, " n"]

    @property
    def points(self) -> Float[Array, "n d"]:
        """The points of the cloud."""
        return self.base.points

    @property
    def weights(self) -> Float[Array, " n"]:
        """The masses times the density."""
        log_density = jnp.where(self.base.weights > 0, self.log_density, 0)
        return self.base.weights * jnp.exp(log_density)

    @property
    def sums(self) -> AbstractPairSums:
        """How sums over pairs are computed: as for the cloud."""
        return self.base.sums

    def centred(self) -> tuple[Float[Array, " d"], "TiltedCloud"]:
        """Return a point amid the tokens, and the cloud as seen from there."""
        origin, near = self.base.centred()
        return origin, TiltedCloud(near, self.log_density)

    def pairs(
        self, u: Float[Array, "m k"], keys: Float[Array, "n k"] | None = None
    ) -> Pairs:
        """Return the scores of the tilts, with the log-density as an offset."""
        points = self.points if keys is None else keys
        return Pairs(u, points, self.base.weights, self.log_density)

    def kernel_pairs(
        self, u: Float[Array, "m k"], features: Float[Array, "n k"]
    ) -> Pairs:
        """Return the scores of the tilts, with the density in the weights."""
        return Pairs(u, features, self.weights)


def check_cloud(name: str, value: object) -> None:
    """Raise unless the value is a token cloud."""
    if isinstance(value, TokenCloud):
        return
    how = (
        "use quadrature(measure, order) to turn a measure into one"
        if isinstance(value, AbstractContext)
        else "TokenCloud(points)"
    )
    is_array = isinstance(value, jax.Array | np.ndarray)
    what = "an array" if is_array else f"a {type(value).__name__}"
    raise InvalidInput(f"{name} is {what}; it must be a TokenCloud: {how}.")


def tilt(
    cloud: TokenCloud, log_factor: Float[Array, " n"]
) -> tuple[Float[Array, ""], TiltedCloud]:
    r"""Multiply a cloud by a factor: return its log-mass and the normalised rest."""
    # One query without a score: only the factor counts.
    here = jnp.zeros((1, 0), cloud.points.dtype)
    pairs = Pairs(here, cloud.points[:, :0], cloud.weights, log_factor)
    log_mass = cloud.sums.softmax(pairs, cloud.points)[0][0]
    return log_mass, TiltedCloud(cloud, log_factor - log_mass)


def features_of(
    cloud: AbstractWeightedCloud, feature_map: FeatureMap | None
) -> Float[Array, "n k"]:
    """Return features of the points, by default the points themselves.

    Features of an absent token must not do harm: they have no derivative in the point,
    and zero stands for what is not finite.
    """
    present = (cloud.weights > 0)[:, None]
    points = held(cloud.points, present)
    return points if feature_map is None else held(feature_map(points), present)


def gaussian_log_factor(
    points: Float[Array, "n d"], precision: Float[Array, "d d"]
) -> Float[Array, " n"]:
    r"""Return $-\tfrac12 y^\top P y$ for each point."""
    return -0.5 * jnp.sum(matmul(points, precision) * points, axis=1)
