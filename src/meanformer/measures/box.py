"""Product measures on a box: what they share, and the truncated normal law."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from meanformer.errors import (
    as_finite_array,
    as_float_array,
    as_integer,
    as_key,
    check,
    check_finite,
    is_concrete,
)
from meanformer.measures.abstract import AbstractMeasure
from meanformer.measures.checks import checked_tilts, require
from meanformer.measures.interval_draws import draw_quadratic
from meanformer.numerics.arrays import safe_norm
from meanformer.numerics.special.interval import quadratic_moments
from meanformer.typing import ArrayLike, Key


class AbstractBox(AbstractMeasure):
    r"""A product of laws on the intervals $[a_i, b_i]$."""

    low: eqx.AbstractVar[Float[Array, " d"]]
    high: eqx.AbstractVar[Float[Array, " d"]]

    @abc.abstractmethod
    def variances(self) -> Float[Array, " d"]:
        """Return the variance of each coordinate."""

    @property
    def dimension(self) -> int:
        """Dimension of the space."""
        return self.low.shape[0]

    def covariance(self) -> Float[Array, "d d"]:
        """Return the diagonal matrix of the variances."""
        return jnp.diag(self.variances())

    def diameter(self) -> Float[Array, ""]:
        """Return the length of the diagonal."""
        return safe_norm((self.high - self.low)[None, :])[0]

    def maximal_mean(
        self, u: Float[Array, "m d"], tolerance: float
    ) -> Float[Array, "m d"]:
        """Return the corner of largest score, or the mean of the face that ties for it.

        A coordinate ties if going along it changes the score by no more than the
        tolerance.
        """
        spread_of_scores = jnp.abs(u) * (self.high - self.low)[None, :]
        corner = jnp.where(u > 0, self.high[None, :], self.low[None, :])
        return jnp.where(spread_of_scores <= tolerance, self.mean()[None, :], corner)


class TruncatedNormalBox(AbstractBox):
    r"""A centred normal law with independent coordinates, cut to a box.

    $$\mu(\mathrm{d}y) \propto \prod_i e^{-P_i y_i^2/2}\,
      \mathbf{1}_{[a_i, b_i]}(y_i)\,\mathrm{d}y_i.$$
    It is what L2 attention makes of a uniform box. A precision may be zero (uniform)
    or negative (the repulsive kernel: the ends of the interval are favoured).

    Args:
        low: lower corner $a$.
        high: upper corner $b$.
        precision: $P_i$, of any sign.
    """

    low: Float[Array, " d"]
    high: Float[Array, " d"]
    precision: Float[Array, " d"]

    def __init__(self, low: ArrayLike, high: ArrayLike, precision: ArrayLike):
        self.low, self.high = checked_bounds(low, high)
        precision = as_finite_array("precision", precision, self.low.shape)
        self.precision = precision.astype(self.low.dtype)

    def mean(self) -> Float[Array, " d"]:
        """Return the mean."""
        return self._moments(jnp.zeros_like(self.low))[1]

    def variances(self) -> Float[Array, " d"]:
        """Return the variance of each coordinate."""
        return self._moments(jnp.zeros_like(self.low))[2]

    def tilted_mass_and_mean(
        self, u: Float[Array, "m d"]
    ) -> tuple[Float[Array, " m"], Float[Array, "m d"]]:
        """Return the log-Laplace transform and the tilted mean."""
        u = checked_tilts(self.dimension, u)
        log_masses, means, _ = self._moments(u)
        untilted = self._moments(jnp.zeros_like(self.low))[0]
        return jnp.sum(log_masses - untilted[None, :], axis=1), means

    def log_mass(self) -> Float[Array, ""]:
        r"""Return $\log\int e^{-\sum_i P_i y_i^2/2}$ under the uniform law."""
        log_masses = self._moments(jnp.zeros_like(self.low))[0]
        return jnp.sum(log_masses - self.precision * self._origin() ** 2 / 2)

    def quadratic_tilt(
        self, precision: Float[Array, "d d"], *, is_positive: bool = False
    ) -> tuple[Float[Array, ""], "TruncatedNormalBox"]:
        """Add a diagonal precision."""
        total = self.precision + required_diagonal(precision)
        tilted = TruncatedNormalBox(self.low, self.high, total)
        return tilted.log_mass() - self.log_mass(), tilted

    def sample(self, count: int, *, key: Key) -> Float[Array, "count d"]:
        """Draw by inverting the distribution function; not differentiable."""
        count, key = as_integer("count", count, least=0), as_key(key)
        shape, dtype = (count, self.dimension), self.low.dtype
        choices, fractions = (jr.uniform(k, shape, dtype) for k in jr.split(key))
        parameters = (self.precision, self.low, self.high, self._origin())
        draw = jax.vmap(draw_quadratic, in_axes=(1, 1, 0, 0, 0, 0), out_axes=1)
        return lax.stop_gradient(draw(choices, fractions, *parameters))

    def _moments(self, u: Float[Array, "*m d"]) -> tuple[Array, Array, Array]:
        parameters = (self.low, self.high, self._origin(), self.precision)
        low, high, origin, precision = (
            jnp.broadcast_to(array, u.shape) for array in parameters
        )
        return quadratic_moments(precision, u, low, high, origin)

    def _origin(self) -> Float[Array, " d"]:
        """Return where the density is largest."""
        nearest = jnp.clip(jnp.zeros_like(self.low), self.low, self.high)
        farthest = jnp.where(-self.low > self.high, self.low, self.high)
        return lax.stop_gradient(jnp.where(self.precision < 0, farthest, nearest))


def checked_bounds(
    low: ArrayLike, high: ArrayLike
) -> tuple[Float[Array, " d"], Float[Array, " d"]]:
    """Return the corners of a box as arrays of one type, or raise."""
    low, high = as_float_array("low", low), as_float_array("high", high)
    check(
        low.ndim == 1 and low.size > 0 and low.shape == high.shape,
        f"low has shape {low.shape} and high {high.shape}; both must be (d,), one "
        "number for each coordinate.",
    )
    check_finite("low", low)
    check_finite("high", high)
    dtype = jnp.promote_types(low.dtype, high.dtype)
    low, high = low.astype(dtype), high.astype(dtype)
    if is_concrete(low) and is_concrete(high):
        _check_order(np.asarray(low), np.asarray(high))
    return low, high


def _check_order(low: np.ndarray, high: np.ndarray) -> None:
    place = int(np.argmin(low < high))
    check(
        bool(low[place] < high[place]),
        f"low is {low[place]} and high {high[place]} at index {place}; low must be "
        "smaller than high in every coordinate.",
    )


def required_diagonal(matrix: Float[Array, "d d"]) -> Float[Array, " d"]:
    """Return the diagonal of a matrix that has nothing else, or refuse."""
    diagonal = jnp.diag(matrix)
    rest = jnp.abs(matrix - jnp.diag(diagonal))
    return require(
        jnp.all(rest <= rounding_of(matrix)),
        diagonal,
        "L2 attention on a box needs K^T K to be diagonal",
    )


def rounding_of(matrix: Float[Array, "d d"]) -> Float[Array, ""]:
    """Return the size of what rounding leaves where entries should vanish."""
    resolution = 100 * float(jnp.finfo(matrix.dtype).eps)
    return resolution * jnp.max(jnp.abs(matrix))
