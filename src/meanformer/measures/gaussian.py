"""Gaussian token measures: every tilt is again a Gaussian."""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float

from meanformer.errors import (
    Unsupported,
    as_finite_array,
    as_integer,
    as_key,
    check,
    is_concrete,
)
from meanformer.measures.abstract import AbstractMeasure
from meanformer.numerics.arrays import matmul, widened
from meanformer.numerics.matrices import (
    checked_covariance,
    sqrt_one_plus_square,
    sqrt_psd,
)
from meanformer.numerics.softmax import log_excess
from meanformer.typing import ArrayLike, Key, MassAndMean


class Gaussian(AbstractMeasure):
    r"""The normal law $\mathcal{N}(m, S)$; $S$ may be singular.

    Tilting by $e^{\langle u,y\rangle}$ shifts the mean to $m + Su$ and keeps $S$, so
    softmax attention is affine in the query.

    Args:
        mean: the mean $m$, a vector.
        covariance: the covariance $S$, symmetric and positive semi-definite.
        factor: instead of the covariance, a matrix $F$ of shape (d, r) with
            $S = FF^\top$, which fixes its rank to at most $r$.
    """

    location: Float[Array, " d"]
    spread: Float[Array, "d d"]
    factor: Float[Array, "d r"] | None

    def __init__(
        self,
        mean: ArrayLike,
        covariance: ArrayLike | None = None,
        *,
        factor: ArrayLike | None = None,
    ):
        self.location = as_finite_array("mean", mean, (None,))
        d, dtype = len(self.location), self.location.dtype
        check(d > 0, "mean has shape (0,); it must have at least one coordinate.")
        check(
            (covariance is None) != (factor is None),
            "a Gaussian needs either its covariance or a factor of it.",
        )
        if covariance is not None:
            spread = as_finite_array("covariance", covariance, (d, d), dtype)
            self.factor, self.spread = None, checked_covariance("covariance", spread)
        else:
            self.factor = as_finite_array("factor", factor, (d, None), dtype)
            self.spread = matmul(self.factor, self.factor.T)

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

    def root(self) -> Float[Array, "d r"]:
        r"""Return $F$ with $S = FF^\top$: the factor, or the symmetric root."""
        return sqrt_psd(self.spread) if self.factor is None else self.factor

    def tilted_mass_and_mean(self, u: Float[Array, "m d"]) -> MassAndMean:
        r"""Return $\langle u, m\rangle + \tfrac12 u^\top S u$ and $m + S u$."""
        u = as_finite_array("u", u, (None, self.dimension))
        if self.factor is None:
            moved = matmul(u, self.spread)
            variances = jnp.sum(moved * u, axis=1)
        else:
            # Small eigenvalues are lost in the covariance, not in its factor.
            shares = matmul(u, self.factor)
            moved, variances = matmul(shares, self.factor.T), jnp.sum(shares**2, axis=1)
        log_laplace = matmul(u, self.location) + 0.5 * variances
        return log_laplace, self.location[None, :] + moved

    def diameter(self) -> Float[Array, ""]:
        """Refuse: the support of a Gaussian is unbounded."""
        raise Unsupported(
            "a Gaussian has no diameter: its support is unbounded; use a TokenCloud, "
            "such as TokenCloud(measure.sample(count, key=key))."
        )

    def sample(self, count: int, *, key: Key) -> Float[Array, "count d"]:
        """Draw points through a root of the covariance."""
        count, key = as_integer("count", count, least=0), as_key(key)
        wide = widened(self)
        root = wide.root()
        noise = jr.normal(key, (count, root.shape[1]), root.dtype)
        points = wide.location[None, :] + matmul(noise, root.T)
        return points.astype(self.location.dtype)

    def quadratic_tilt(
        self, precision: Float[Array, "d d"], *, is_positive: bool = False
    ) -> tuple[Float[Array, ""], "Gaussian"]:
        r"""Return $\mathcal{N}(Nm, NS)$ with $N = (I + SP)^{-1}$, and its log-mass."""
        if self.factor is not None:
            return self._tilted_by_factor(self.factor, precision, is_positive)
        identity = jnp.eye(self.dimension, dtype=precision.dtype)
        system = identity + matmul(self.spread, precision)
        system = self._if_integrable(precision, system, is_positive)
        log_determinant = jnp.linalg.slogdet(system)[1]
        solved = jnp.linalg.solve(
            system, jnp.concatenate([self.location[:, None], self.spread], axis=1)
        )
        location, spread = solved[:, 0], solved[:, 1:]
        exponent = matmul(self.location, matmul(precision, location))
        # Symmetrised, not checked.
        tilted = eqx.tree_at(
            lambda gaussian: (gaussian.location, gaussian.spread),
            self,
            (location, (spread + spread.T) / 2),
        )
        return -0.5 * (log_determinant + exponent), tilted

    def _tilted_by_factor(
        self,
        factor: Float[Array, "d r"],
        precision: Float[Array, "d d"],
        is_positive: bool,
    ) -> tuple[Float[Array, ""], "Gaussian"]:
        r"""Do the same by a factor: $NS = F(I + F^\top PF)^{-1}F^\top$."""
        identity = jnp.eye(factor.shape[1], dtype=factor.dtype)
        system = identity + matmul(factor.T, matmul(precision, factor))
        system = self._if_integrable(precision, system, is_positive)
        lower = jnp.linalg.cholesky(system)
        log_determinant = 2 * jnp.sum(jnp.log(jnp.diag(lower)))
        thinner = divided_by_root(factor, lower)
        pull = matmul(precision, self.location)
        location = self.location - matmul(thinner, matmul(thinner.T, pull))
        exponent = matmul(pull, location)
        tilted = Gaussian(location, factor=thinner)
        return -0.5 * (log_determinant + exponent), tilted

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
        conditional = entropic_factor(self.root(), form)
        pull = matmul(form, self.location)
        shift = matmul(conditional, matmul(conditional.T, pull))
        return Gaussian(self.location - shift, factor=conditional)

    def _if_integrable(
        self,
        precision: Float[Array, "d d"],
        value: Float[Array, "r r"],
        is_positive: bool,
    ) -> Float[Array, "r r"]:
        """Return the value if the factor is integrable; refuse otherwise.

        What is only known at run time fails when the value is used. That takes a
        callback, and programs with one are not kept between runs: where the factor
        should be integrable, one that is not makes NaN instead.
        """
        message = (
            "the repulsive L2 kernel is not integrable against this Gaussian; "
            "it needs I + 2 beta S K^T K to stay positive: move beta towards zero."
        )
        if not (is_concrete(self.spread) and is_concrete(precision)):
            holds = _is_integrable(*lax.stop_gradient((self.spread, precision)))
            if is_positive:
                return jnp.where(holds, value, jnp.nan)
            return eqx.error_if(value, ~holds, message)
        values, vectors = np.linalg.eigh(np.asarray(self.spread))
        root = vectors * np.sqrt(np.clip(values, 0, None))
        lowest = np.linalg.eigvalsh(root.T @ np.asarray(precision) @ root)[0]
        if not lowest > -1:
            raise Unsupported(message)
        return value


def _is_integrable(
    covariance: Float[Array, "d d"], precision: Float[Array, "d d"]
) -> Bool[Array, ""]:
    r"""Whether $I + S^{1/2} P S^{1/2}$ is positive; an easy yes if $P \ge 0$."""

    def is_positive():
        root = sqrt_psd(covariance)
        inner = matmul(root, matmul(precision, root))
        return jnp.linalg.eigvalsh(inner)[0] > -1

    size = len(precision) * jnp.finfo(precision.dtype).eps * jnp.trace(precision)
    lifted = precision + jnp.abs(size) * jnp.eye(len(precision), dtype=precision.dtype)
    is_easy = jnp.isfinite(jnp.linalg.cholesky(lifted)).all()
    return lax.cond(is_easy, lambda: jnp.array(True), is_positive)


def entropic_factor(
    root: Float[Array, "d r"], form: Float[Array, "d d"]
) -> Float[Array, "d r"]:
    r"""Root of the conditional covariance of the entropic self-transport of a Gaussian.

    $$M = F Y F^\top, \quad Y = 2\bigl(I + (I + 4H)^{1/2}\bigr)^{-1}, \quad
      H = F^\top B S B^\top F,$$
    the positive semi-definite solution of $M + M B S B^\top M = S = FF^\top$. No
    inverse of $S$ or $B$ is taken, so both may be singular.

    Args:
        root: any matrix $F$ with $S = FF^\top$.
        form: the matrix $B$ of the score $y^\top B x$.

    Returns:
        A matrix $G$ with $M = GG^\top$.
    """
    identity = jnp.eye(root.shape[1], dtype=root.dtype)
    half = matmul(root.T, matmul(form, root))
    inner = sqrt_one_plus_square(2 * half)
    return divided_by_root(root, jnp.linalg.cholesky((identity + inner) / 2))


def divided_by_root(
    factor: Float[Array, "d r"], lower: Float[Array, "r r"]
) -> Float[Array, "d r"]:
    r"""Return $FC^{-\top}$, a root of $F(CC^\top)^{-1}F^\top$."""
    return solve_triangular(lower, factor.T, lower=True).T


def entropic_reward(mu: Gaussian, form: Float[Array, "d d"]) -> Float[Array, ""]:
    r"""Return the reward of the entropic transport of a Gaussian onto itself.

    $E_B = \max_\pi \int y^\top Bx\,\mathrm{d}\pi - \mathrm{KL}(\pi|\mu\otimes\mu)$ over
    the couplings of a Gaussian with itself; it is
    $m^\top Bm + \sum_i \frac{s_i - 1}{2} + \frac12\log\frac{2}{1+s_i}$ with
    $s_i = \sqrt{1 + 4h_i}$ and the eigenvalues $h_i$ of $S^{1/2}BSB^\top S^{1/2}$.
    """
    root, mean = mu.root(), mu.mean()
    half = matmul(root.T, matmul(form, root))
    singular = jnp.linalg.svd(half, compute_uv=False)
    # (s - 1)/2, for which the sum is of halves of 2x - log(1 + x).
    half_way = 2 * singular**2 / (1 + jnp.sqrt(1 + 4 * singular**2))
    spread = (half_way + log_excess(half_way)) / 2
    return matmul(mean, matmul(form, mean)) + jnp.sum(spread)
