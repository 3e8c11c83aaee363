"""Token clouds that stand for continuous measures."""

from functools import singledispatch
from typing import SupportsIndex

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import Unsupported, as_integer, check, is_concrete
from meanformer.measures.abstract import AbstractMeasure
from meanformer.measures.box import TruncatedNormalBox, UniformBox
from meanformer.measures.cloud import AbstractWeightedCloud, TokenCloud
from meanformer.measures.fourier_density import FourierDensity
from meanformer.measures.gaussian import Gaussian
from meanformer.measures.mixture import Mixture
from meanformer.measures.sphere_and_ball import UniformBall, UniformSphere
from meanformer.numerics.arrays import matmul, widened
from meanformer.numerics.matrices import sqrt_psd
from meanformer.numerics.special import quadrature as rules

# Of these orders the largest is taken whose nodes are few enough.
_ORDERS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 96)
_ORDERS += (128, 192, 256, 384, 512, 768, 1024)


def quadrature(measure: AbstractMeasure, order: SupportsIndex) -> TokenCloud:
    r"""Replace a measure by a token cloud that integrates polynomials exactly.

    | measure | rule | nodes | exact up to degree |
    |---|---|---|---|
    | `Gaussian` | Gauss-Hermite, tensor product | order^rank | 2 order - 1 |
    | `UniformBox` | Gauss-Legendre, tensor product | order^d | 2 order - 1 per axis |
    | `TruncatedNormalBox` | the same, times the density | order^d | none |
    | `UniformSphere`, d = 1 | both points | 2 | every degree |
    | `UniformSphere`, d = 2 | equispaced | order | order - 1 |
    | `UniformSphere`, d > 2 | Gauss-Gegenbauer product | 2 order^(d-1) | 2 order - 1 |
    | `UniformBall` | Gauss radii times spheres | about order^d | 2 order - 1 |
    | `Mixture` | union of the components' rules | their sum | the least of theirs |
    | `FourierDensity` | midpoints of equal arcs, times the density | order | none |
    | clouds | themselves | as many as before | every degree |

    Degrees are total ones, except in a box. The axes of a Gaussian are the rows of the
    symmetric square root of its covariance; directions without variance get no nodes if
    the covariance is known (not traced). A tilt $e^{\langle u,y\rangle}$ is entire, so
    that its integral converges faster than geometrically in the order.

    Args:
        measure: the measure.
        order: how many nodes for each dimension, 1 or more.

    Returns:
        The cloud, at most 5e6 points; differentiable in the parameters of the measure.
    """
    return _quadrature(measure, as_integer("order", order, least=1))


def quadratures_within(
    measure: AbstractMeasure, nodes: int
) -> tuple[TokenCloud, TokenCloud]:
    """Return the finest quadrature of at most so many nodes, and a coarser one.

    The coarser one has at most half as many, so that results for both tell how large
    the error is. A cloud stands for itself, twice.
    """
    name = type(measure).__name__
    if isinstance(measure, AbstractWeightedCloud):
        cloud = _quadrature(measure, 1)
        return cloud, cloud
    if not is_concrete(measure.mean()):
        raise Unsupported(
            f"{name} is traced, and tokens are put in its place with a look at their "
            "number and error; under jit pass quadrature(measure, order)."
        )
    fitting = []
    for order in _ORDERS:
        cloud = _quadrature(measure, order)
        if cloud.count > nodes:
            break
        fitting.append(cloud)
    if len(fitting) == len(_ORDERS) and fitting[0].count == fitting[-1].count:
        # As many nodes at every order, such as both points of a sphere on the line.
        return fitting[0], fitting[-1]
    coarser = [cloud for cloud in fitting if 2 * cloud.count <= fitting[-1].count]
    if not coarser:
        raise Unsupported(
            f"{name} of dimension {measure.dimension} has no quadrature of few nodes; "
            "use TokenCloud(measure.sample(count, key=key))."
        )
    return fitting[-1], coarser[-1]


@singledispatch
def _quadrature(measure: AbstractMeasure, order: int) -> TokenCloud:
    raise Unsupported(
        f"{type(measure).__name__} has no quadrature rule; use "
        "TokenCloud(measure.sample(count, key=key))."
    )


@_quadrature.register(AbstractWeightedCloud)
def _(measure: AbstractWeightedCloud, order: int) -> TokenCloud:
    if isinstance(measure, TokenCloud):
        return measure
    return TokenCloud(measure.points, measure.weights, sums=measure.sums)


@_quadrature.register(Gaussian)
def _(measure: Gaussian, order: int) -> TokenCloud:
    dtype, wide = measure.mean().dtype, widened(measure)
    axes = _axes(wide.covariance())
    rule = rules.tensor_rule(*rules.gauss_hermite(order), len(axes))
    nodes, masses = _as_arrays(*rule, axes)
    points = wide.mean()[None, :] + matmul(nodes, axes)
    return TokenCloud(points.astype(dtype), masses.astype(dtype))


@_quadrature.register(UniformBox)
def _(measure: UniformBox, order: int) -> TokenCloud:
    rule = rules.tensor_rule(*rules.gauss_legendre(order), measure.dimension)
    nodes, masses = _as_arrays(*rule, measure.low)
    half_lengths = (measure.high - measure.low) / 2
    return TokenCloud(measure.mean()[None, :] + nodes * half_lengths[None, :], masses)


@_quadrature.register(TruncatedNormalBox)
def _(measure: TruncatedNormalBox, order: int) -> TokenCloud:
    uniform = _quadrature(UniformBox(measure.low, measure.high), order)
    tilted = uniform.quadratic_tilt(jnp.diag(measure.precision))[1]
    return TokenCloud(tilted.points, tilted.weights, normalize=True)


@_quadrature.register(FourierDensity)
def _(measure: FourierDensity, order: int) -> TokenCloud:
    angles = 2 * np.pi / order * (np.arange(order) + 0.5)
    nodes = jnp.asarray(angles, measure.moments.dtype)
    # A truncated series may be negative, by rounding or a little more.
    masses = jnp.maximum(measure.density(nodes), 0)
    return TokenCloud.from_angles(nodes, masses, normalize=True)


@_quadrature.register(UniformSphere)
@_quadrature.register(UniformBall)
def _(measure: UniformSphere | UniformBall, order: int) -> TokenCloud:
    rule = rules.sphere_rule if isinstance(measure, UniformSphere) else rules.ball_rule
    nodes, masses = _as_arrays(*rule(measure.dimension, order), measure.radius)
    return TokenCloud(measure.radius * nodes, masses)


@_quadrature.register(Mixture)
def _(measure: Mixture, order: int) -> TokenCloud:
    clouds = [_quadrature(component, order) for component in measure.components]
    count = sum(cloud.count for cloud in clouds)
    check(
        count <= rules.LARGEST_RULE,
        f"the rules of the components have {count} nodes in all; at most "
        f"{rules.LARGEST_RULE:.0e} are allowed: lower the order.",
    )
    parts = zip(measure.weights, clouds, strict=True)
    masses = [share * cloud.weights for share, cloud in parts]
    points = jnp.concatenate([cloud.points for cloud in clouds])
    return TokenCloud(points, jnp.concatenate(masses))


def _axes(covariance: Float[Array, "d d"]) -> Float[Array, "k d"]:
    """Return axes, one per row, with the covariance as sum of their outer products."""
    if not is_concrete(covariance):
        return sqrt_psd(covariance)
    eigenvalues, vectors = np.linalg.eigh(np.asarray(covariance))
    resolution = len(covariance) * jnp.finfo(covariance.dtype).eps
    has_variance = eigenvalues > resolution * max(eigenvalues[-1], 0)
    if has_variance.all():
        return sqrt_psd(covariance)
    axes = np.sqrt(eigenvalues[has_variance])[:, None] * vectors.T[has_variance]
    return jnp.asarray(axes, covariance.dtype)


def _as_arrays(
    nodes: np.ndarray, masses: np.ndarray, like: Array
) -> tuple[Float[Array, "n k"], Float[Array, " n"]]:
    return jnp.asarray(nodes, like.dtype), jnp.asarray(masses, like.dtype)
