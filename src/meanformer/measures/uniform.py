"""Uniform token measures: on a sphere, on a ball and on a box."""

from collections.abc import Callable
from typing import SupportsIndex

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, ScalarLike

from meanformer.errors import as_integer, as_key
from meanformer.measures.box import (
    AbstractBox,
    TruncatedNormalBox,
    checked_bounds,
    required_diagonal,
    rounding_of,
)
from meanformer.measures.checks import checked_tilts, require
from meanformer.measures.sphere_and_ball import (
    AbstractRotationInvariant,
    checked_ambient,
    checked_radius,
)
from meanformer.numerics.arrays import matmul
from meanformer.numerics.special.interval import uniform_transform
from meanformer.typing import ArrayLike, Key


class UniformSphere(AbstractRotationInvariant):
    r"""The uniform probability on a sphere around the origin of $\mathbb{R}^d$.

    For radius 1,
    $$\Lambda(u) = \log\Bigl[\Gamma(\tfrac d2)\,(\tfrac 2r)^{d/2-1}
      I_{d/2-1}(r)\Bigr], \qquad \nabla\Lambda(u) = A(r)\,\frac ur, \qquad
      A = \frac{I_{d/2}}{I_{d/2-1}}, \qquad r = |u|.$$
    In dimension 1 the sphere is $\{-1, 1\}$. Answers to tilts have the type of the
    tilts; moments and samples that of the radius.

    Args:
        dimension: dimension $d \ge 1$ of the space around the sphere.
        radius: radius, positive; root-mean-square norms put tokens at $\sqrt d$.
    """

    radius: Float[Array, ""]
    ambient: int = eqx.field(static=True)

    def __init__(self, dimension: SupportsIndex, *, radius: ScalarLike = 1.0):
        self.ambient = checked_ambient(dimension)
        self.radius = checked_radius(radius)

    @property
    def sphere_dimension(self) -> int:
        """Dimension of the space around the sphere."""
        return self.ambient

    def quadratic_tilt(
        self, precision: Float[Array, "d d"], *, is_positive: bool = False
    ) -> tuple[Float[Array, ""], "UniformSphere"]:
        """Multiply by a constant: a multiple of the identity is one on the sphere."""
        need = "L2 attention on UniformSphere needs K^T K to be a multiple of I"
        tilted = self._if_isotropic(precision, need)
        mean_square = tilted.radius.astype(precision.dtype) ** 2
        return -0.5 * mean_square * jnp.trace(precision) / self.ambient, tilted

    def entropic_tilt(
        self, form: Float[Array, "d d"], potential: Callable
    ) -> "UniformSphere":
        r"""Return the sphere itself: the entropic potentials are constant.

        For $B$ a multiple of a rotation, the integral of $e^{\langle y, Bx\rangle}$
        over $x$ or over $y$ does not depend on the other.
        """
        need = "Sinkhorn attention on UniformSphere needs K^T Q to be a scaled rotation"
        return self._if_isotropic(matmul(form.T, form), need)

    def _if_isotropic(self, matrix: Float[Array, "d d"], need: str) -> "UniformSphere":
        size = jnp.trace(matrix) / self.ambient
        rest = jnp.abs(matrix - size * jnp.eye(self.ambient, dtype=matrix.dtype))
        holds = jnp.all(rest <= rounding_of(matrix))
        radius = require(holds, self.radius, need)
        return eqx.tree_at(lambda sphere: sphere.radius, self, radius)


class UniformBall(AbstractRotationInvariant):
    r"""The uniform probability on a ball around the origin of $\mathbb{R}^d$.

    It is the image of the uniform law on the sphere of $\mathbb{R}^{d+2}$ when two
    coordinates are forgotten, so that for radius 1
    $$\Lambda(u) = \log\Bigl[\Gamma(\tfrac d2 + 1)\,(\tfrac 2r)^{d/2}
      I_{d/2}(r)\Bigr] = \log {}_0F_1\bigl(\tfrac d2 + 1;\, \tfrac{r^2}4\bigr), \qquad
      \nabla\Lambda(u) = \frac{I_{d/2+1}(r)}{I_{d/2}(r)}\,\frac ur, \qquad r = |u|.$$
    Answers to tilts have the type of the tilts; moments and samples that of the radius.

    Args:
        dimension: dimension $d \ge 1$ of the space; an interval in dimension 1.
        radius: radius, positive.
    """

    radius: Float[Array, ""]
    ambient: int = eqx.field(static=True)

    def __init__(self, dimension: SupportsIndex, radius: ScalarLike = 1.0):
        self.ambient = checked_ambient(dimension)
        self.radius = checked_radius(radius)

    @property
    def sphere_dimension(self) -> int:
        """Dimension of the space around the sphere it is an image of."""
        return self.ambient + 2


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
        self.low, self.high = checked_bounds(low, high)

    def mean(self) -> Float[Array, " d"]:
        """Return the centre."""
        return (self.low + self.high) / 2

    def variances(self) -> Float[Array, " d"]:
        """Return a twelfth of the squared lengths."""
        return (self.high - self.low) ** 2 / 12

    def tilted_mass_and_mean(
        self, u: Float[Array, "m d"]
    ) -> tuple[Float[Array, " m"], Float[Array, "m d"]]:
        """Return the log-Laplace transform and the tilted mean, to rounding."""
        u = checked_tilts(self.dimension, u)
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
    ) -> tuple[Float[Array, ""], TruncatedNormalBox]:
        """Multiply by a Gaussian with diagonal precision: a truncated normal law."""
        tilted = TruncatedNormalBox(self.low, self.high, required_diagonal(precision))
        return tilted.log_mass(), tilted
