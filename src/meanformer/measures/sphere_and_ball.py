"""What the uniform laws on a sphere and on a ball share."""

import abc
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from meanformer.errors import as_finite_array, as_integer, as_key, check, is_concrete
from meanformer.measures.abstract import AbstractMeasure, FeatureMap
from meanformer.measures.checks import checked_tilts
from meanformer.numerics.arrays import safe_norm, unit_rows
from meanformer.numerics.special.bessel import sphere_transform
from meanformer.typing import Key


class AbstractRotationInvariant(AbstractMeasure):
    r"""A law that rotations around the origin of $\mathbb{R}^d$ leave as it is.

    It is the image of the uniform law on the sphere of a space of $D \ge d$ dimensions,
    its last $D - d$ coordinates forgotten: the sphere itself for $D = d$, and the ball
    for $D = d + 2$. Answers to tilts have the type of the tilts; moments and samples
    that of the radius.
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

    def tilted_mass_and_mean(
        self, u: Float[Array, "m d"]
    ) -> tuple[Float[Array, " m"], Float[Array, "m d"]]:
        """Return both from one evaluation, exact to rounding."""
        u = checked_tilts(self.dimension, u)
        radius = self.radius.astype(u.dtype)
        log_laplace, mean = sphere_transform(radius * u, self.sphere_dimension)
        return log_laplace, radius * mean

    def linear_mean(
        self, u: Float[Array, "m k"], feature_map: FeatureMap | None = None
    ) -> tuple[Float[Array, " m"], Float[Array, "m d"]]:
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


def checked_ambient(dimension: Any) -> int:
    """Return the dimension of a space, or raise."""
    return as_integer("dimension", dimension, least=1)


def checked_radius(radius: Any) -> Float[Array, ""]:
    """Return a positive radius, or raise."""
    array = as_finite_array("radius", radius, ())
    if is_concrete(array):
        check(float(array) > 0, f"radius is {radius}; it must be positive.")
    return array
