"""Transport between Gaussians: the Bures distance and the optimal affine map."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import Unsupported, is_concrete
from meanformer.measures.abstract import AbstractMeasure
from meanformer.measures.gaussian import Gaussian
from meanformer.measures.transport.atoms import check_both
from meanformer.numerics.arrays import matmul, safe_root, widened
from meanformer.numerics.matrices import sqrt_psd


class AffineMap(eqx.Module):
    """A map that multiplies by a matrix and then shifts."""

    matrix: Float[Array, "d d"]
    shift: Float[Array, " d"]

    def __call__(self, x: Float[Array, "m d"]) -> Float[Array, "m d"]:
        """Map each row."""
        return matmul(x, self.matrix.T) + self.shift[None, :]


def bures_distance(mu: Gaussian, nu: Gaussian) -> Float[Array, ""]:
    r"""Wasserstein distance of order two between Gaussians, not squared.

    $$W_2^2 = |m_1 - m_2|^2 + \operatorname{tr}\bigl(S_1 + S_2
      - 2 (S_1^{1/2} S_2 S_1^{1/2})^{1/2}\bigr).$$

    The trace is computed as $\min_U |S_1^{1/2} - S_2^{1/2} U|^2$ over rotations: a sum
    of squares, exact also when the covariances are close or singular. The optimal
    rotation is frozen in the derivative, as the envelope theorem allows.
    """
    first, second = sqrt_psd(mu.covariance()), sqrt_psd(nu.covariance())
    gap = first - matmul(second, optimal_rotation(first, second))
    shift = mu.mean() - nu.mean()
    return safe_root(jnp.sum(shift**2) + jnp.sum(gap**2), 2)


def optimal_rotation(
    first: Float[Array, "d d"], second: Float[Array, "d d"]
) -> Float[Array, "d d"]:
    r"""Orthogonal $U$ that minimises $|R_1 - R_2 U|$; constant for derivatives.

    On a common kernel the minimiser is lost in rounding, so the identity, which is
    optimal for roots that commute, competes with it.
    """
    first, second = jax.lax.stop_gradient((first, second))
    left, _, right = jnp.linalg.svd(matmul(second.T, first))
    rotation, identity = matmul(left, right), jnp.eye(len(first), dtype=first.dtype)
    rotated, plain = first - matmul(second, rotation), first - second
    is_better = jnp.sum(rotated**2) < jnp.sum(plain**2)
    return jnp.where(is_better, rotation, identity)


def transport_map(mu: AbstractMeasure, nu: AbstractMeasure) -> AffineMap:
    r"""Optimal map from one Gaussian to another, for the quadratic cost.

    $$T(x) = m_2 + S_1^{-1/2} (S_1^{1/2} S_2 S_1^{1/2})^{1/2} S_1^{-1/2} (x - m_1).$$

    If $S_1$ is singular the inverse is that on its range, and the second Gaussian must
    live on that range.

    Args:
        mu: the Gaussian to move.
        nu: the Gaussian to reach.

    Returns:
        The affine map, in single precision at least; push `mu` forward by it to get
        `nu`. Cost: $O(d^3)$.
    """
    advice = (
        "an optimal map has a closed form between Gaussians only; use transport_plan "
        "for token clouds"
    )
    check_both(Gaussian, mu, nu, advice)
    mu, nu = widened((mu, nu))
    root = sqrt_psd(mu.covariance())
    resolution = np.sqrt(len(root) * jnp.finfo(root.dtype).eps).astype(root.dtype)
    inverse = jnp.linalg.pinv(root, rtol=resolution, hermitian=True)
    middle = sqrt_psd(matmul(root, matmul(nu.covariance(), root)))
    matrix = matmul(inverse, matmul(middle, inverse))
    reached, wanted = matmul(matrix, matmul(mu.covariance(), matrix)), nu.covariance()
    if is_concrete(reached) and is_concrete(wanted):
        error, size = (float(jnp.abs(a).max()) for a in (reached - wanted, wanted))
        if error > np.sqrt(jnp.finfo(wanted.dtype).eps) * size:
            raise Unsupported(
                "the covariance of mu is singular and nu leaves its range, so no "
                "symmetric map reaches nu; add a small multiple of the identity to the "
                "covariance."
            )
    return AffineMap(matrix, nu.mean() - matmul(matrix, mu.mean()))
