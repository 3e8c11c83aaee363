"""Uniform token measures: on the unit sphere and on a box."""

import operator
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from meanformer.errors import InvalidInput, check
from meanformer.measures.abstract import AbstractMeasure, FeatureMap
from meanformer.measures.box import (
    checked_bounds,
    maximal_mean_of_box,
    required_diagonal,
)
from meanformer.measures.checks import require
from meanformer.measures.truncated import TruncatedNormalBox
from meanformer.numerics.bessel import sphere_transform
from meanformer.numerics.interval import uniform_transform
from meanformer.typing import Key


class UniformSphere(AbstractMeasure):
    r"""The uniform probability on the unit sphere of $\mathbb{R}^d$.

    $$\Lambda(u) = \log\Bigl[\Gamma(\tfrac d2)\,(\tfrac 2r)^{d/2-1}
      I_{d/2-1}(r)\Bigr], \qquad \nabla\Lambda(u) = A(r)\,\frac ur, \qquad
      A = \frac{I_{d/2}}{I_{d/2-1}}, \qquad r = |u|.$$
    In dimension 1 the sphere is $\{-1, 1\}$.

    Args:
        dimension: dimension $d \ge 1$ of the space around the sphere.
        dtype: floating-point type of moments and samples; JAX's default if left out.
            Answers to tilts have the type of the tilts.
    """

    ambient: int = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)

    def __init__(self, dimension: int, *, dtype: Any = None):
        try:
            self.ambient = operator.index(dimension)
        except TypeError:
            raise InvalidInput(
                f"dimension is {dimension!r}; it must be an integer, 1 or more."
            ) from None
        check(self.ambient >= 1, f"dimension is {dimension}; it must be 1 or more.")
        self.dtype = np.dtype(jnp.result_type(float) if dtype is None else dtype)
        check(
            jnp.issubdtype(self.dtype, jnp.floating),
            f"dtype is {self.dtype}; it must be a floating-point type.",
        )

    @property
    def dimension(self) -> int:
        """Dimension of the space around the sphere."""
        return self.ambient

    def mean(self) -> Float[Array, " d"]:
        """Return zero."""
        return jnp.zeros(self.ambient, self.dtype)

    def covariance(self) -> Float[Array, "d d"]:
        """Return the identity divided by the dimension."""
        return jnp.eye(self.ambient, dtype=self.dtype) / self.ambient

    def log_laplace(self, u: Float[Array, "m d"]) -> Float[Array, " m"]:
        """Return the log-Laplace transform; $O(d)$ for each tilt."""
        return self.tilted_mass_and_mean(u)[0]

    def tilted_mean(self, u: Float[Array, "m d"]) -> Float[Array, "m d"]:
        """Return the mean of the von Mises-Fisher law of each tilt."""
        return self.tilted_mass_and_mean(u)[1]

    def tilted_mass_and_mean(
        self, u: Float[Array, "m d"]
    ) -> tuple[Float[Array, " m"], Float[Array, "m d"]]:
        """Return both from one evaluation, to 1e-13 relatively in float64."""
        return sphere_transform(u, self.ambient)

    def linear_mean(
        self, u: Float[Array, "m k"], feature_map: FeatureMap | None = None
    ) -> tuple[Float[Array, " m"], Float[Array, "m d"]]:
        """Return zero and the tilts divided by the dimension."""
        if feature_map is not None:
            raise self._refusal("linear attention with a feature map")
        return jnp.zeros(len(u), u.dtype), u / self.ambient

    def maximal_mean(
        self, u: Float[Array, "m d"], tolerance: float
    ) -> Float[Array, "m d"]:
        """Return the direction of each tilt; zero where all scores tie.

        Scores range over an interval of length $2|u|$; they tie if that is within the
        tolerance.
        """
        largest = jnp.max(jnp.abs(u), axis=1, keepdims=True)
        is_zero = largest == 0
        scaled = u / jnp.where(is_zero, 1, largest)
        squares = jnp.sum(scaled**2, axis=1, keepdims=True)
        norms = jnp.sqrt(jnp.where(is_zero, 1, squares))
        all_tie = is_zero | (2 * largest * norms <= tolerance)
        return jnp.where(all_tie, 0, scaled / norms)

    def sample(self, count: int, *, key: Key) -> Float[Array, "count d"]:
        """Draw normal vectors and project them on the sphere."""
        if self.ambient == 1:
            return jr.rademacher(key, (count, 1), self.dtype)
        noise = jr.normal(key, (count, self.ambient), self.dtype)
        return noise / jnp.linalg.norm(noise, axis=1, keepdims=True)

    def quadratic_tilt(
        self, precision: Float[Array, "d d"]
    ) -> tuple[Float[Array, ""], "UniformSphere"]:
        """Multiply by a constant: a multiple of the identity is the same everywhere."""
        size = jnp.trace(precision) / self.ambient
        excess = precision - size * jnp.eye(self.ambient, dtype=precision.dtype)
        size = require(
            jnp.all(jnp.abs(excess) <= _rounding(precision)),
            size,
            "L2 attention on UniformSphere needs K^T K to be a multiple of the identity",
        )
        return -size / 2, self

    def entropic_tilt(
        self, form: Float[Array, "d d"], precision: Float[Array, "d d"], solver: Any
    ) -> "UniformSphere":
        r"""Return the sphere itself: if $B$ is a multiple of a rotation, $g$ is constant.

        The kernel $e^{\langle y, Bx\rangle}$ has then constant marginals, whatever the
        number of iterations, provided that the start is constant as well.
        """
        check(
            solver.half_steps is None or self.quadratic_tilt(precision) is not None,
            "unreachable",
        )
        return self


def _rounding(matrix: Float[Array, "d d"]) -> Float[Array, ""]:
    """Size of entries that rounding leaves where a product should vanish."""
    return 100 * jnp.finfo(matrix.dtype).eps * jnp.max(jnp.abs(matrix))
