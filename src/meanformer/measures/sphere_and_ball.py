"""Uniform laws on a sphere and on a ball."""

import abc
from collections.abc import Callable
from typing import Any, SupportsIndex

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, ScalarLike

from meanformer.errors import as_finite_array, as_integer, as_key, check, is_concrete
from meanformer.measures.abstract import AbstractMeasure, FeatureMap
from meanformer.measures.box import rounding_of
from meanformer.measures.checks import require
from meanformer.numerics.arrays import matmul, safe_norm, unit_rows
from meanformer.numerics.special.bessel import sphere_transform
from meanformer.typing import Key, MassAndMean


class AbstractRotationInvariant(AbstractMeasure):
    r"""A law that rotations around the origin of $\mathbb{R}^d$ leave as it is.

    It is the image of the uniform law on the sphere of a space of $D \ge d$ dimensions,
    its last $D - d$ coordinates forgotten: the sphere itself for $D = d$, and the ball
    for $D = d + 2$.
    """

    radius: eqx.AbstractVar[Float[Array, ""]]
    ambient: eqx.AbstractVar[int]

    @property
    @abc.abstractmethod
    def sphere_dimension(self) -> int:
        """Dimension $D$ of the space around the sphere it is an image of."""

    @property
    def dimension(self) -> int:
        """Dimension of the space."""
        return self.ambient

    def mean(self) -> Float[Array, " d"]:
        """Return zero."""
        return jnp.zeros(self.ambient, self.radius.dtype)

    def covariance(self) -> Float[Array, "d d"]:
        r"""Return $r^2/D$ times the identity, for the radius $r$."""
        identity = jnp.eye(self.ambient, dtype=self.radius.dtype)
        return self.radius**2 / self.sphere_dimension * identity

    def diameter(self) -> Float[Array, ""]:
        """Return twice the radius."""
        return 2 * self.radius

    def tilted_mass_and_mean(self, u: Float[Array, "m d"]) -> MassAndMean:
        """Return both from one evaluation, exact to rounding."""
        u = as_finite_array("u", u, (None, self.dimension))
        radius = self.radius.astype(u.dtype)
        log_laplace, mean = sphere_transform(radius * u, self.sphere_dimension)
        return log_laplace, radius * mean

    def linear_mean(
        self, u: Float[Array, "m k"], feature_map: FeatureMap | None = None
    ) -> MassAndMean:
        """Return zero and a multiple of the tilts."""
        if feature_map is not None:
            raise self._refusal("linear attention with a feature map")
        scale = self.radius.astype(u.dtype) ** 2 / self.sphere_dimension
        return jnp.zeros(len(u), u.dtype), scale * u

    def maximal_mean(
        self, u: Float[Array, "m d"], tolerance: float
    ) -> Float[Array, "m d"]:
        r"""Return the point in the direction of each tilt; zero where all scores tie.

        Scores cover an interval of length $2r|u|$, for the radius $r$; they tie if that
        is within the tolerance.
        """
        radius = self.radius.astype(u.dtype)
        all_tie = 2 * radius * safe_norm(u) <= tolerance
        return jnp.where(all_tie[:, None], 0, radius * unit_rows(u))

    def sample(self, count: int, *, key: Key) -> Float[Array, "count d"]:
        """Draw normal vectors, project them on the sphere, and forget coordinates."""
        count, key = as_integer("count", count, least=0), as_key(key)
        shape, dtype = (count, self.sphere_dimension), self.radius.dtype
        if self.sphere_dimension == 1:
            return self.radius * jr.rademacher(key, shape, dtype)
        points = self.radius * unit_rows(jr.normal(key, shape, dtype))
        return points[:, : self.ambient]


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
        self.ambient = as_integer("dimension", dimension, least=1)
        self.radius = _checked_radius(radius)

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
        self.ambient = as_integer("dimension", dimension, least=1)
        self.radius = _checked_radius(radius)

    @property
    def sphere_dimension(self) -> int:
        """Dimension of the space around the sphere it is an image of."""
        return self.ambient + 2


def _checked_radius(radius: Any) -> Float[Array, ""]:
    """Return a positive radius, or raise."""
    array = as_finite_array("radius", radius, ())
    if is_concrete(array):
        check(float(array) > 0, f"radius is {radius}; it must be positive.")
    return array
