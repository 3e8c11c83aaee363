"""Uniform token measures: on a sphere and on a box."""

import operator
from collections.abc import Callable
from typing import SupportsIndex

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, ScalarLike

from meanformer.errors import (
    InvalidInput,
    as_float_array,
    check,
    check_finite,
    check_shape,
    is_concrete,
)
from meanformer.measures.abstract import AbstractMeasure, FeatureMap
from meanformer.measures.box import (
    AbstractBox,
    TruncatedNormalBox,
    checked_bounds,
    require,
    required_diagonal,
    rounding_of,
)
from meanformer.numerics.bessel import sphere_transform
from meanformer.numerics.interval import uniform_transform
from meanformer.typing import ArrayLike, Key


class UniformSphere(AbstractMeasure):
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
        try:
            self.ambient = operator.index(dimension)
        except TypeError:
            raise InvalidInput(
                f"dimension is {dimension!r}; it must be an integer, 1 or more."
            ) from None
        check(self.ambient >= 1, f"dimension is {dimension}; it must be 1 or more.")
        self.radius = as_float_array("radius", radius)
        check_shape("radius", self.radius, ())
        check_finite("radius", self.radius)
        if is_concrete(self.radius):
            check(float(self.radius) > 0, f"radius is {radius}; it must be positive.")

    @property
    def dimension(self) -> int:
        """Dimension of the space around the sphere."""
        return self.ambient

    def mean(self) -> Float[Array, " d"]:
        """Return zero."""
        return jnp.zeros(self.ambient, self.radius.dtype)

    def covariance(self) -> Float[Array, "d d"]:
        """Return the identity times the squared radius over the dimension."""
        identity = jnp.eye(self.ambient, dtype=self.radius.dtype)
        return self.radius**2 / self.ambient * identity

    def log_laplace(self, u: Float[Array, "m d"]) -> Float[Array, " m"]:
        """Return the log-Laplace transform; $O(d)$ for each tilt."""
        return self.tilted_mass_and_mean(u)[0]

    def tilted_mean(self, u: Float[Array, "m d"]) -> Float[Array, "m d"]:
        """Return the mean of the von Mises-Fisher law of each tilt."""
        return self.tilted_mass_and_mean(u)[1]

    def tilted_mass_and_mean(
        self, u: Float[Array, "m d"]
    ) -> tuple[Float[Array, " m"], Float[Array, "m d"]]:
        """Return both from one evaluation, exact to rounding."""
        radius = self.radius.astype(u.dtype)
        log_laplace, mean = sphere_transform(radius * u, self.ambient)
        return log_laplace, radius * mean

    def linear_mean(
        self, u: Float[Array, "m k"], feature_map: FeatureMap | None = None
    ) -> tuple[Float[Array, " m"], Float[Array, "m d"]]:
        """Return zero and a multiple of the tilts."""
        if feature_map is not None:
            raise self._refusal("linear attention with a feature map")
        scale = self.radius.astype(u.dtype) ** 2 / self.ambient
        return jnp.zeros(len(u), u.dtype), scale * u

    def maximal_mean(
        self, u: Float[Array, "m d"], tolerance: float
    ) -> Float[Array, "m d"]:
        r"""Return the point in the direction of each tilt; zero where all scores tie.

        Scores cover an interval of length $2r|u|$, for a sphere of radius $r$; they
        tie if that is within the tolerance.
        """
        radius = self.radius.astype(u.dtype)
        largest = jnp.max(jnp.abs(u), axis=1, keepdims=True)
        is_zero = largest == 0
        scaled = jnp.where(is_zero, 1, u) / jnp.where(is_zero, 1, largest)
        norms = jnp.linalg.norm(scaled, axis=1, keepdims=True)
        all_tie = 2 * radius * largest * norms <= tolerance
        return jnp.where(is_zero | all_tie, 0, radius * scaled / norms)

    def sample(self, count: int, *, key: Key) -> Float[Array, "count d"]:
        """Draw normal vectors and project them on the sphere."""
        if self.ambient == 1:
            return self.radius * jr.rademacher(key, (count, 1), self.radius.dtype)
        noise = jr.normal(key, (count, self.ambient), self.radius.dtype)
        return self.radius * noise / jnp.linalg.norm(noise, axis=1, keepdims=True)

    def quadratic_tilt(
        self, precision: Float[Array, "d d"]
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
        return self._if_isotropic(form.T @ form, need)

    def _if_isotropic(self, matrix: Float[Array, "d d"], need: str) -> "UniformSphere":
        size = jnp.trace(matrix) / self.ambient
        rest = jnp.abs(matrix - size * jnp.eye(self.ambient, dtype=matrix.dtype))
        holds = jnp.all(rest <= rounding_of(matrix))
        radius = require(holds, self.radius, need)
        return eqx.tree_at(lambda sphere: sphere.radius, self, radius)


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
        parts, means = uniform_transform(u, self.low[None, :], self.high[None, :])
        return jnp.sum(parts, axis=1), means

    def sample(self, count: int, *, key: Key) -> Float[Array, "count d"]:
        """Draw each coordinate uniformly."""
        fractions = jr.uniform(key, (count, self.dimension), self.low.dtype)
        points = self.low[None, :] + fractions * (self.high - self.low)[None, :]
        return jnp.minimum(points, self.high[None, :])

    def quadratic_tilt(
        self, precision: Float[Array, "d d"]
    ) -> tuple[Float[Array, ""], TruncatedNormalBox]:
        """Multiply by a Gaussian with diagonal precision: a truncated normal law."""
        tilted = TruncatedNormalBox(self.low, self.high, required_diagonal(precision))
        return tilted.log_mass(), tilted
