"""Product measures on a box: the uniform law and the truncated normal law."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from meanformer.errors import as_finite_array, as_integer, as_key, check, is_concrete
from meanformer.measures.abstract import AbstractMeasure
from meanformer.measures.checks import require
from meanformer.numerics.arrays import safe_norm
from meanformer.numerics.special.interval import (
    quadratic_moments,
    quadratic_window,
    uniform_transform,
)
from meanformer.numerics.special.quadrature import gauss_legendre
from meanformer.typing import ArrayLike, Key, MassAndMean

# The density varies by a factor below 2 on a cell, so that few nodes and few steps of
# Newton's method are exact to rounding.
_CELLS = 128
_NODES = 8
_NEWTON_STEPS = 4


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


class UniformBox(AbstractBox):
    r"""The uniform probability on a box $\prod_i [a_i, b_i]$.

    With centre $c$, half-lengths $h$ and $z_i = h_i u_i$,
    $$\Lambda(u) = \langle c, u\rangle + \sum_i \log\frac{\sinh z_i}{z_i}, \qquad
      \partial_i\Lambda(u) = c_i + h_i \Bigl(\coth z_i - \frac{1}{z_i}\Bigr).$$

    Args:
        low: lower corner $a$.
        high: upper corner $b$, larger in each coordinate.
    """

    low: Float[Array, " d"]
    high: Float[Array, " d"]

    def __init__(self, low: ArrayLike, high: ArrayLike):
        self.low, self.high = _checked_bounds(low, high)

    def mean(self) -> Float[Array, " d"]:
        """Return the centre."""
        return (self.low + self.high) / 2

    def variances(self) -> Float[Array, " d"]:
        """Return a twelfth of the squared lengths."""
        return (self.high - self.low) ** 2 / 12

    def tilted_mass_and_mean(self, u: Float[Array, "m d"]) -> MassAndMean:
        """Return the log-Laplace transform and the tilted mean, to rounding."""
        u = as_finite_array("u", u, (None, self.dimension))
        parts, means = uniform_transform(u, self.low[None, :], self.high[None, :])
        return jnp.sum(parts, axis=1), means

    def sample(self, count: int, *, key: Key) -> Float[Array, "count d"]:
        """Draw each coordinate uniformly."""
        count, key = as_integer("count", count, least=0), as_key(key)
        fractions = jr.uniform(key, (count, self.dimension), self.low.dtype)
        points = self.low[None, :] + fractions * (self.high - self.low)[None, :]
        return jnp.minimum(points, self.high[None, :])

    def quadratic_tilt(
        self, precision: Float[Array, "d d"], *, is_positive: bool = False
    ) -> tuple[Float[Array, ""], "TruncatedNormalBox"]:
        """Multiply by a Gaussian with diagonal precision: a truncated normal law."""
        tilted = TruncatedNormalBox(self.low, self.high, _required_diagonal(precision))
        return tilted.log_mass(), tilted


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
        self.low, self.high = _checked_bounds(low, high)
        precision = as_finite_array("precision", precision, self.low.shape)
        self.precision = precision.astype(self.low.dtype)

    def mean(self) -> Float[Array, " d"]:
        """Return the mean."""
        return self._moments(jnp.zeros_like(self.low))[1]

    def variances(self) -> Float[Array, " d"]:
        """Return the variance of each coordinate."""
        return self._moments(jnp.zeros_like(self.low))[2]

    def tilted_mass_and_mean(self, u: Float[Array, "m d"]) -> MassAndMean:
        """Return the log-Laplace transform and the tilted mean."""
        u = as_finite_array("u", u, (None, self.dimension))
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
        total = self.precision + _required_diagonal(precision)
        tilted = TruncatedNormalBox(self.low, self.high, total)
        return tilted.log_mass() - self.log_mass(), tilted

    def sample(self, count: int, *, key: Key) -> Float[Array, "count d"]:
        """Draw by inverting the distribution function; not differentiable."""
        count, key = as_integer("count", count, least=0), as_key(key)
        shape, dtype = (count, self.dimension), self.low.dtype
        choices, fractions = (jr.uniform(k, shape, dtype) for k in jr.split(key))
        parameters = (self.precision, self.low, self.high, self._origin())
        draw = jax.vmap(_draw_quadratic, in_axes=(1, 1, 0, 0, 0, 0), out_axes=1)
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


def _checked_bounds(
    low: ArrayLike, high: ArrayLike
) -> tuple[Float[Array, " d"], Float[Array, " d"]]:
    """Return the corners of a box as arrays of one type, or raise."""
    low = as_finite_array("low", low, (None,))
    high = as_finite_array("high", high, (None,))
    check(
        0 < low.size == high.size,
        f"low has shape {low.shape} and high {high.shape}; both must have one number "
        "for each coordinate.",
    )
    dtype = jnp.promote_types(low.dtype, high.dtype)
    low, high = low.astype(dtype), high.astype(dtype)
    if is_concrete(low) and is_concrete(high):
        # Numbers of NumPy: under `jit` those of JAX are not known any more.
        lower, upper = np.asarray(low), np.asarray(high)
        place = int(np.argmin(lower < upper))
        check(
            lower[place] < upper[place],
            f"low is {lower[place]} and high {upper[place]} at index {place}; low must "
            "be smaller than high in every coordinate.",
        )
    return low, high


def _required_diagonal(matrix: Float[Array, "d d"]) -> Float[Array, " d"]:
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


@jax.jit
def _draw_quadratic(
    choices: Float[Array, " n"],
    fractions: Float[Array, " n"],
    precision: Float[Array, ""],
    low: Float[Array, ""],
    high: Float[Array, ""],
    origin: Float[Array, ""],
) -> Float[Array, " n"]:
    r"""Points of the law with density proportional to $e^{-Py^2/2}$ on an interval.

    One uniform number chooses a cell by its mass, another the place in the cell, where
    Newton's method inverts the distribution function to rounding.
    About 50 exponentials for each point.
    """
    nodes, shares = (jnp.asarray(t, low.dtype) for t in gauss_legendre(_NODES))

    def density(y):
        return jnp.exp(-precision * (y - origin) * (y + origin) / 2)

    def mass(start, width):
        points = start[:, None] + jnp.outer(width, (nodes + 1) / 2)
        return width * (density(points) @ shares)

    # The windows that matter, cut into cells: where they start, and signed widths.
    ends = jnp.stack([low, high])
    windows, reaches = quadratic_window(precision, jnp.zeros_like(low), *ends, ends)
    places = jnp.arange(_CELLS, dtype=low.dtype) / _CELLS
    starts = (windows[:, None] + jnp.outer(reaches, places)).ravel()
    widths = jnp.repeat(reaches / _CELLS, _CELLS)
    totals = jnp.cumsum(jnp.abs(mass(starts, widths)))
    cell = jnp.searchsorted(totals, totals[-1] * choices, side="right")
    start, width = starts[cell], widths[cell]
    target = fractions * mass(start, width)
    step = fractions * width
    for _ in range(_NEWTON_STEPS):
        step = step - (mass(start, step) - target) / density(start + step)
    return jnp.clip(start + step, low, high)
