"""The affine velocity of a Gaussian, and how far another velocity is from affine."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.attention import AbstractInContextMap
from meanformer.attention.affine import slope_and_drift
from meanformer.errors import InvalidInput, Unsupported, as_float_array
from meanformer.flows import AbstractSchedule, Flow
from meanformer.measures import Gaussian, quadrature
from meanformer.numerics.arrays import matmul
from meanformer.typing import ArrayLike

# A velocity that varies by less, relative to its size, is constant.
ROUNDINGS = 64


def check_gaussian(mu: object) -> None:
    """Raise unless this is a Gaussian."""
    if not isinstance(mu, Gaussian):
        raise InvalidInput(
            f"mu is a {type(mu).__name__}; it must be a Gaussian(mean, covariance)."
        )


def check_map(gamma: object) -> None:
    """Raise unless this is one map, the same at all depths."""
    if isinstance(gamma, AbstractInContextMap):
        return
    advice = "it must be an attention, a perceptron, or heads and sums of them"
    if isinstance(gamma, Flow):
        advice = "give its velocity, flow.velocity.gamma, not the flow"
    elif isinstance(gamma, AbstractSchedule) or callable(gamma):
        advice = "give the map at one depth: here it is the same at all"
    raise InvalidInput(f"gamma is a {type(gamma).__name__}; {advice}.")


def centred(
    covariance: ArrayLike | None = None, *, factor: ArrayLike | None = None
) -> Gaussian:
    """Return the Gaussian of mean zero with a covariance, or a factor of it."""
    given = as_float_array("covariance", covariance if factor is None else factor)
    mean = jnp.zeros(given.shape[:1], given.dtype)
    return Gaussian(mean, covariance, factor=factor)


def affine_velocity(
    gamma: AbstractInContextMap, mu: Gaussian
) -> tuple[Float[Array, "d d"], Float[Array, " d"]]:
    r"""Return $L$ and $c$ with $\Gamma[\mu](x) = c + Lx$.

    Then $\dot m = Lm + c$ and $\dot S = LS + SL^\top$ keep the measure Gaussian. With
    $A = K^\top Q$:

    - softmax: $L = \beta VSA$ and $c = Vm$;
    - L2: $L = 2\beta VNSA$ and $c = VNm$, where $N = (I + 2\beta SK^\top K)^{-1}$;
    - Sinkhorn: $L = VMB$ and $c = Vm - Lm$, where $B = 2\beta A$ and $M$ is the
      conditional covariance of the entropic plan of the Gaussian onto itself;
    - linear: $L = \beta V(S + mm^\top)A$ and $c = 0$;
    - heads and sums add, a perceptron $Ux + b$ without activation adds $U$ and $b$.

    Nothing is inverted that may be singular. Unnormalised, sigmoid and hardmax bend
    Gaussians, and masks need positions: they are refused with the reason.

    Args:
        gamma: the map; for parameters that change with depth, that at one depth.
        mu: the Gaussian that is its context.

    Returns:
        The matrix and the vector. Cost: $O(d^3)$.
    """
    check_map(gamma)
    check_gaussian(mu)
    slope, drift = slope_and_drift(gamma, mu)
    return slope, drift - matmul(slope, mu.mean())


class ClosureResidual(eqx.Module):
    r"""The affine map closest to a velocity in $L^2(\mu)$, and what is left.

    Attributes:
        slope: the matrix $L$ of the fit.
        constant: the vector $c$ of the fit.
        absolute: the root mean square of $\Gamma - c - Lx$.
        relative: the same over that of $\Gamma - \int\Gamma\,\mathrm{d}\mu$; zero for
            a constant velocity.
    """

    slope: Float[Array, "e d"]
    constant: Float[Array, " e"]
    absolute: Float[Array, ""]
    relative: Float[Array, ""]


def closure_residual(
    gamma: AbstractInContextMap, mu: Gaussian, *, order: int = 24
) -> ClosureResidual:
    r"""Fit an affine map to any velocity, by quadrature over a Gaussian.

    The fit is the regression of $\Gamma[\mu](x)$ on $x$ under $\mu$, so that a measure
    moved by it has the right mean and covariance at first order in depth.

    Args:
        gamma: any in-context map.
        mu: the Gaussian, which is the context as well; where the map has no closed form
            there, its quadrature is.
        order: Gauss-Hermite nodes along each axis.

    Returns:
        The fit and its error. Cost: one evaluation at `order` to the power $d$ nodes.
    """
    check_map(gamma)
    check_gaussian(mu)
    nodes = quadrature(mu, order)
    try:
        values = gamma(mu, nodes.points)
    except Unsupported:
        values = gamma(nodes, nodes.points)
    weights, mean = nodes.weights, matmul(nodes.weights, values)
    offsets, moved = nodes.points - mu.mean()[None, :], values - mean[None, :]
    # On a singular covariance the fit is that on its range.
    shared = matmul(moved.T, weights[:, None] * offsets)
    slope = matmul(shared, jnp.linalg.pinv(mu.covariance(), hermitian=True))
    left = moved - matmul(offsets, slope.T)
    absolute, size, whole = (
        jnp.sqrt(matmul(weights, jnp.sum(rest**2, axis=1)))
        for rest in (left, moved, values)
    )
    moves = size > ROUNDINGS * jnp.finfo(size.dtype).eps * whole
    relative = jnp.where(moves, absolute / jnp.where(moves, size, 1), 0)
    return ClosureResidual(slope, mean - matmul(slope, mu.mean()), absolute, relative)
