"""Gaussian token measures: every tilt is again a Gaussian."""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import (
    Unsupported,
    as_float_array,
    check,
    check_finite,
    check_shape,
    is_concrete,
)
from meanformer.measures.abstract import AbstractMeasure
from meanformer.numerics.matrices import checked_covariance, sqrt_psd
from meanformer.typing import ArrayLike, Key


class Gaussian(AbstractMeasure):
    r"""The normal law $\mathcal{N}(m, S)$; $S$ may be singular.

    Tilting by $e^{\langle u,y\rangle}$ shifts the mean to $m + Su$ and keeps $S$, so
    softmax attention is affine in the query.

    Args:
        mean: the mean $m$, a vector.
        covariance: the covariance $S$, symmetric and positive semi-definite.
    """

    location: Float[Array, " d"]
    spread: Float[Array, "d d"]

    def __init__(self, mean: ArrayLike, covariance: ArrayLike):
        self.location = as_float_array("mean", mean)
        check(
            self.location.ndim == 1 and self.location.size > 0,
            f"mean has shape {self.location.shape}; it must be (d,).",
        )
        check_finite("mean", self.location)
        spread = as_float_array("covariance", covariance).astype(self.location.dtype)
        check_shape("covariance", spread, (self.dimension, self.dimension))
        check_finite("covariance", spread)
        self.spread = checked_covariance("covariance", spread)

    @property
    def dimension(self) -> int:
        """Dimension of the space."""
        return self.location.shape[0]

    def mean(self) -> Float[Array, " d"]:
        """Return the mean."""
        return self.location

    def covariance(self) -> Float[Array, "d d"]:
        """Return the covariance."""
        return self.spread

    def log_laplace(self, u: Float[Array, "m d"]) -> Float[Array, " m"]:
        r"""Return $\langle u, m\rangle + \tfrac12 u^\top S u$."""
        return u @ self.location + 0.5 * jnp.sum((u @ self.spread) * u, axis=1)

    def tilted_mean(self, u: Float[Array, "m d"]) -> Float[Array, "m d"]:
        r"""Return $m + S u$."""
        return self.location[None, :] + u @ self.spread

    def sample(self, count: int, *, key: Key) -> Float[Array, "count d"]:
        """Draw points through the symmetric square root of the covariance."""
        noise = jr.normal(key, (count, self.dimension), self.location.dtype)
        return self.location[None, :] + noise @ sqrt_psd(self.spread)

    def quadratic_tilt(
        self, precision: Float[Array, "d d"]
    ) -> tuple[Float[Array, ""], "Gaussian"]:
        r"""Return $\mathcal{N}(Nm, NS)$ with $N = (I + SP)^{-1}$, and its log-mass."""
        system = (
            jnp.eye(self.dimension, dtype=precision.dtype) + self.spread @ precision
        )
        self._check_integrable(precision)
        log_determinant = jnp.linalg.slogdet(system)[1]
        solved = jnp.linalg.solve(
            system, jnp.concatenate([self.location[:, None], self.spread], axis=1)
        )
        location, spread = solved[:, 0], solved[:, 1:]
        exponent = self.location @ precision @ location
        return -0.5 * (log_determinant + exponent), self._at(location, spread)

    def maximal_mean(self, u, tolerance):
        """Refuse: a Gaussian has no point of largest score."""
        raise Unsupported(
            "hardmax attention on a Gaussian has no value: its support is unbounded; "
            "use a TokenCloud, UniformBox or UniformSphere."
        )

    def entropic_tilt(
        self, form: Float[Array, "d d"], potential: Callable
    ) -> "Gaussian":
        r"""Return the Gaussian $e^g\mu$ of the entropic self-plan, in closed form.

        Its covariance $M$, the conditional covariance of the plan, solves
        $M + M B S B^\top M = S$; its mean is $m - MBm$.
        """
        conditional = entropic_covariance(self.spread, form)
        return self._at(self.location - conditional @ form @ self.location, conditional)

    def _at(
        self, location: Float[Array, " d"], spread: Float[Array, "d d"]
    ) -> "Gaussian":
        """Return another Gaussian; its covariance is symmetrised, not checked."""
        symmetric = (spread + spread.T) / 2
        return eqx.tree_at(
            lambda gaussian: (gaussian.location, gaussian.spread),
            self,
            (location, symmetric),
        )

    def _check_integrable(self, precision: Float[Array, "d d"]) -> None:
        if not (is_concrete(self.spread) and is_concrete(precision)):
            return
        values, vectors = np.linalg.eigh(np.asarray(self.spread))
        root = vectors * np.sqrt(np.clip(values, 0, None))
        lowest = np.linalg.eigvalsh(root.T @ np.asarray(precision) @ root)[0]
        if not lowest > -1:
            raise Unsupported(
                "the repulsive L2 kernel is not integrable against this Gaussian; "
                "it needs I + 2 beta S K^T K to stay positive: move beta towards zero."
            )


def entropic_covariance(
    covariance: Float[Array, "d d"], form: Float[Array, "d d"]
) -> Float[Array, "d d"]:
    r"""Conditional covariance of the entropic self-transport of a Gaussian.

    $$M = S^{1/2} Y S^{1/2}, \quad Y = 2\bigl(I + (I + 4H)^{1/2}\bigr)^{-1}, \quad
      H = S^{1/2} B S B^\top S^{1/2},$$
    the positive semi-definite solution of $M + M B S B^\top M = S$. No inverse of $S$
    or $B$ is taken, so both may be singular.
    """
    identity = jnp.eye(covariance.shape[0], dtype=covariance.dtype)
    root = sqrt_psd(covariance)
    half = root @ form @ root
    inner = sqrt_psd(identity + 4 * half @ half.T)
    return root @ jnp.linalg.solve((identity + inner) / 2, root)
