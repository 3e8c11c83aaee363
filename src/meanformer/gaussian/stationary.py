"""Covariances that do not move: found from many starts, certified, and their rank."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optimistix
from jaxtyping import Array, Float

from meanformer.attention import AbstractInContextMap
from meanformer.errors import as_integer, as_key, check
from meanformer.gaussian import velocity
from meanformer.gaussian.velocity import affine_velocity, centred
from meanformer.measures import Gaussian
from meanformer.numerics.arrays import matmul
from meanformer.typing import Key


@dataclasses.dataclass(frozen=True)
class StationaryPoint:
    r"""A covariance of given rank with $LS + SL^\top = 0$, and its certificate.

    Attributes:
        covariance: the covariance $S = UDU^\top$.
        rank: how many columns its factor has.
        residual: $|LS + SL^\top| / (|L||S|)$, zero in exact arithmetic; in the place of
            $|L|$ that at a multiple of the identity of this trace, if it is larger.
        smallest: its smallest positive eigenvalue over the largest: how sure the rank.
        isotropy: $|U^\top AU| / |A|$ for a single attention: zero if the range of $S$
            is isotropic for the score; `None` for several heads.
        stability: eigenvalues of the linearised flow on symmetric matrices, largest
            real part first; moving along a family of stationary points is a zero.
    """

    covariance: np.ndarray
    rank: int
    residual: float
    smallest: float
    isotropy: float | None
    stability: np.ndarray


def stationary_points(
    gamma: AbstractInContextMap,
    dimension: int,
    rank: int,
    *,
    key: Key,
    starts: int = 64,
    trace: float = 1.0,
    tolerance: float = 1e-9,
) -> list[StationaryPoint]:
    r"""Look for stationary covariances of a rank, from many random starts.

    The factor $F$ of shape (d, r) is found by the method of Levenberg and Marquardt for
    $LS + SL^\top = 0$ and $\operatorname{tr}S$ as given. For softmax the equation is
    homogeneous, so the trace does not matter.

    Args:
        gamma: the velocity.
        dimension: the dimension $d$.
        rank: the rank $r$.
        key: random key for the starts.
        starts: how many.
        trace: the trace of the covariances looked for.
        tolerance: largest residual that counts as zero. Zeros are double where the
            score is semi-definite, and found less accurately: 1e-6 suits them.

    Returns:
        The points found, the surest rank first; none if no start led to one whose
        smallest eigenvalue is clearly positive.
    """
    velocity.check_map(gamma)
    rank = as_integer("rank", rank, least=1)
    check(rank <= dimension, f"rank is {rank}; the dimension is {dimension}.")
    count = as_integer("starts", starts, least=1)
    roots = jr.normal(as_key(key), (count, dimension, rank))
    scales = jnp.sqrt(trace / jnp.sum(roots**2, axis=(1, 2), keepdims=True))
    found = np.asarray(_descend(gamma, scales * roots, jnp.asarray(trace)))
    points = [certified(gamma, root) for root in found if np.isfinite(root).all()]
    sure = [p for p in points if p.residual <= tolerance and p.smallest > 1e-4]
    return sorted(sure, key=lambda point: -point.smallest)


def is_stationary(
    gamma: AbstractInContextMap, mu: Gaussian, *, tolerance: float | None = None
) -> bool:
    r"""Tell whether a Gaussian does not move: neither its covariance nor its mean.

    That is $LS + SL^\top = 0$, relative to $|L||S|$ as in `StationaryPoint`, and
    $Lm + c = 0$, relative to $|Lm| + |c|$.

    Args:
        gamma: the velocity.
        mu: the Gaussian.
        tolerance: largest of both that counts as zero; by default the square root of
            the rounding of the Gaussian's numbers.
    """
    velocity.check_gaussian(mu)
    if tolerance is None:
        tolerance = float(np.sqrt(jnp.finfo(mu.mean().dtype).eps))
    mean, spread = mu.mean(), mu.covariance()
    slope, constant = affine_velocity(gamma, mu)
    even = affine_velocity(gamma, Gaussian(mean, _evened(spread)))[0]
    moved, carried = matmul(slope, spread), matmul(slope, mean)
    sizes = jnp.linalg.norm(carried) + jnp.linalg.norm(constant)
    rests = jnp.linalg.norm(carried + constant) <= tolerance * sizes
    residual = _residual(spread, moved + moved.T, jnp.stack([slope, even]))
    return bool(rests) and residual <= tolerance


def _residual(spread: Array, change: Array, slopes: Float[Array, "2 d d"]) -> float:
    """Return the velocity of a covariance over its size and that of a slope.

    At a range in the kernel of the score the slope itself is zero, so that a second one
    is needed.
    """
    steepest = jnp.linalg.norm(slopes, axis=(1, 2)).max()
    size = float(steepest * jnp.linalg.norm(spread))
    return float(jnp.linalg.norm(change)) / size if size > 0 else 0.0


def _evened(spread: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """Return the multiple of the identity of the same trace."""
    return jnp.trace(spread) / len(spread) * jnp.eye(len(spread), dtype=spread.dtype)


@eqx.filter_jit
def _descend(gamma, roots: Float[Array, "s d r"], trace: Float[Array, ""]):
    return jax.lax.map(lambda root: _solved(gamma, root, trace), roots)


@eqx.filter_jit
def polished(
    gamma: AbstractInContextMap, root: Float[Array, "d r"]
) -> Float[Array, "d r"]:
    """Return a factor of a stationary covariance of the same trace, starting there."""
    return _solved(gamma, root, jnp.sum(root**2))


def _solved(gamma, root: Float[Array, "d r"], trace: Float[Array, ""]):
    def residual(root, args):
        change = covariance_velocity(gamma, matmul(root, root.T), root)
        return change, jnp.sum(root**2) - trace

    solver = optimistix.LevenbergMarquardt(rtol=1e-14, atol=1e-14)
    options = {"max_steps": 200, "throw": False}
    return optimistix.least_squares(residual, solver, root, **options).value


def covariance_velocity(
    gamma: AbstractInContextMap,
    covariance: Float[Array, "d d"],
    root: Float[Array, "d r"] | None = None,
) -> Float[Array, "d d"]:
    r"""Return $LS + SL^\top$ for a centred Gaussian, by a factor if there is one."""
    mu = centred(covariance) if root is None else centred(factor=root)
    slope = affine_velocity(gamma, mu)[0]
    moved = matmul(slope, covariance)
    return moved + moved.T


def certified(gamma: AbstractInContextMap, root: np.ndarray) -> StationaryPoint:
    """Measure how stationary a covariance is, how sure its rank, and how stable."""
    spread, change, slopes, jacobian = _measured(gamma, jnp.asarray(root))
    vectors, singular, _ = np.linalg.svd(root, full_matrices=False)
    head, isotropy = velocity.parts_of(gamma, centred(factor=root)).only_head, None
    if head is not None:
        score = head.exact_score
        inner = np.linalg.norm(vectors.T @ score @ vectors, 2)
        isotropy = float(inner / (np.linalg.norm(score, 2) or 1.0))
    stability = np.linalg.eigvals(np.asarray(jacobian))
    return StationaryPoint(
        np.asarray(spread),
        root.shape[1],
        _residual(spread, change, slopes),
        float((singular[-1] / singular[0]) ** 2),
        isotropy,
        stability[np.argsort(-stability.real, kind="stable")],
    )


@eqx.filter_jit
def _measured(
    gamma: AbstractInContextMap, root: Float[Array, "d r"]
) -> tuple[Array, Array, Array, Array]:
    """Return covariance, its velocity, two slopes, and the linearised flow.

    The slopes are that at the covariance, and at the multiple of the identity.
    """
    spread = matmul(root, root.T)
    measures = (centred(factor=root), centred(_evened(spread)))
    slopes = jnp.stack([affine_velocity(gamma, mu)[0] for mu in measures])
    change = covariance_velocity(gamma, spread, root)
    return spread, change, slopes, linearised_flow(gamma, spread)


def linearised_flow(
    gamma: AbstractInContextMap, covariance: Float[Array, "d d"]
) -> Float[Array, "k k"]:
    """Return the derivative of the velocity on symmetric matrices, as a matrix.

    Of a singular covariance under Sinkhorn attention the columns of perturbations of
    its kernel are wrong where they lead out of it, since a root is taken there; the
    matrix is block triangular, and its eigenvalues are right.
    """

    def change(entries: Array) -> Array:
        return entries_of(covariance_velocity(gamma, matrix_of(entries)))

    return jax.jacfwd(change)(entries_of(covariance))


def entries_of(matrix: Float[Array, "d d"]) -> Float[Array, " k"]:
    """Return the entries of a symmetric matrix, with the factors that keep the norm."""
    rows, columns = np.triu_indices(len(matrix))
    scale = np.where(rows == columns, 1.0, np.sqrt(2.0)).astype(matrix.dtype)
    return matrix[rows, columns] * scale


def matrix_of(vector: Float[Array, " k"]) -> Float[Array, "d d"]:
    """Return the symmetric matrix of these entries."""
    size = (math.isqrt(8 * len(vector) + 1) - 1) // 2
    rows, columns = np.triu_indices(size)
    scale = np.where(rows == columns, 2.0, np.sqrt(2.0)).astype(vector.dtype)
    upper = jnp.zeros((size, size), vector.dtype).at[rows, columns].set(vector / scale)
    return upper + upper.T
