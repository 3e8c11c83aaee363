"""The affine velocity of a Gaussian and its parts; velocities that are not affine."""

import warnings
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer import flows
from meanformer.attention import AbstractAttention, AbstractInContextMap, composition
from meanformer.attention.affine import check_affine, linearised, slope_and_drift
from meanformer.attention.pointwise import AbstractPointwise
from meanformer.errors import InvalidInput, StoppedEarly, Unsupported, as_float_array
from meanformer.measures import Gaussian, quadrature
from meanformer.numerics.arrays import matmul
from meanformer.typing import ArrayLike

# Relative errors of products of matrices, and of a velocity that is constant.
ROUNDINGS, CONSTANT = 8, 64


def check_gaussian(mu: object) -> None:
    """Raise unless this is a Gaussian."""
    if not isinstance(mu, Gaussian):
        given = type(mu).__name__
        raise InvalidInput(f"mu is a {given}; it must be a Gaussian(mean, covariance).")


def check_map(gamma: object) -> None:
    """Raise unless this is one map, the same at all depths."""
    if isinstance(gamma, AbstractInContextMap):
        return
    advice = "it must be an attention, a perceptron, or heads and sums of them"
    if isinstance(gamma, flows.Flow):
        advice = "give its velocity, flow.velocity.gamma, not the flow"
    elif isinstance(gamma, flows.AbstractSchedule) or callable(gamma):
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


def quiet_solve(
    gamma: AbstractInContextMap, mu: Gaussian, depth, *, steps: int = 4096, **options
) -> flows.GaussianTrajectory:
    """Flow a Gaussian under one map, without the warning of a solve that ended early.

    There are at most so many steps between two saved depths; options are of `solve`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoppedEarly)
        options["stop"] = flows.StepBudget(steps)
        return flows.solve(flows.Flow(gamma), mu, depth, **options)


class Parts(NamedTuple):
    """The terms of a velocity: heads, and an affine map that ignores the context.

    The output matrices of the heads are multiplied into their values.
    """

    heads: tuple[AbstractAttention, ...]
    affine: np.ndarray
    has_constant: bool

    @property
    def only_head(self) -> AbstractAttention | None:
        """The attention that is all there is; `None` if there is more, or none."""
        is_alone = len(self.heads) == 1 and not self.affine.any()
        return self.heads[0] if is_alone and not self.has_constant else None


def parts_of(gamma: AbstractInContextMap, mu: Gaussian) -> Parts:
    """Take sums and heads apart, or raise where a map is of another kind."""
    check_affine(gamma, mu)
    heads: list[AbstractAttention] = []
    matrix, constant = np.zeros((mu.dimension, mu.dimension)), np.zeros(mu.dimension)
    for term in terms_of(gamma):
        if isinstance(term, AbstractAttention):
            heads.append(term)
            continue
        if not isinstance(term, AbstractPointwise):
            raise Unsupported(
                f"{type(term).__name__} is neither an attention nor a map of points; "
                "only sums and heads of those can be taken apart."
            )
        slope, shift = linearised(term.apply, 0 * mu.mean())
        matrix, constant = matrix + np.asarray(slope), constant + np.asarray(shift)
    return Parts(tuple(heads), matrix, bool(np.any(constant != 0)))


def terms_of(gamma: AbstractInContextMap) -> list[AbstractInContextMap]:
    """Return the summands of sums and heads, output matrices multiplied in."""
    terms = []
    for part in composition.terms_of(gamma, with_heads=True):
        if not (isinstance(part, composition.MultiHead) and part.outputs):
            terms.append(part)
            continue
        for head, output in zip(part.heads, part.outputs, strict=True):
            for term in terms_of(head):
                projected = term.followed_by(output)
                if projected is None:
                    raise Unsupported(
                        f"a head of kind {type(term).__name__} behind an output matrix "
                        "cannot be taken apart; multiply the matrix into it."
                    )
                terms.append(projected)
    return terms


def rounding_of(head: AbstractAttention) -> float:
    """Return the relative error of products of the matrices of a head."""
    return ROUNDINGS * len(head.value) * float(np.finfo(head.value.dtype).eps)


def spectral_norm(matrix: Float[Array, "m n"] | np.ndarray) -> float:
    """Return the largest singular value."""
    return float(np.linalg.norm(np.asarray(matrix, np.float64), 2))


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
    moves = size > CONSTANT * jnp.finfo(size.dtype).eps * whole
    relative = jnp.where(moves, absolute / jnp.where(moves, size, 1), 0)
    return ClosureResidual(slope, mean - matmul(slope, mu.mean()), absolute, relative)
