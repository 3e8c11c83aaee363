"""The rate at which neighbouring clouds part under a field of velocities."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from meanformer.attention.jacobian import ScaledJacobian, Search, TokenField, norm_roots
from meanformer.geometry import AbstractSpace, Euclidean
from meanformer.measures import TokenCloud


def symmetric_part(
    jacobian: ScaledJacobian,
    points: Float[Array, "n d"],
    space: AbstractSpace,
    penalty: Float[Array, ""],
) -> Callable[[Float[Array, "n d"]], Float[Array, "n d"]]:
    """Return the symmetric part of a Jacobian on tangent vectors, as an operator.

    Normal directions, which do not move, get minus the penalty instead of zero: they
    must not win over negative rates.
    """

    def operator(v: Float[Array, "n d"]) -> Float[Array, "n d"]:
        along = space.project(points, v)
        symmetric = (jacobian(along) + jacobian.adjoint(along)) / 2
        return space.project(points, symmetric) - penalty * (v - along)

    return operator


def normal_penalty(
    jacobian: ScaledJacobian, points: Float[Array, "n d"], space: AbstractSpace
) -> Float[Array, ""]:
    """Return a penalty larger than every rate; zero where nothing is normal."""
    if isinstance(space, Euclidean):
        return jnp.zeros((), points.dtype)
    rough = Search(tolerance=1e-2, max_steps=20).top(jacobian.normal, points)
    return 2 * jnp.sqrt(jnp.maximum(rough.values[0], 0))


def largest_rate(
    field: TokenField, cloud: TokenCloud, space: AbstractSpace
) -> Float[Array, ""]:
    r"""Largest rate at which an infinitesimal perturbation grows, from a dense matrix.

    $\lambda_{\max}$ of the symmetric part of $D^{1/2}JD^{-1/2}$ on tangent vectors, $J$
    the derivative of the field and $D$ the masses; tokens of weight zero are left out.
    Cost: $nd$ derivatives of the field and $O((nd)^3)$: for few tokens.
    """
    points, roots = cloud.points, norm_roots(cloud, "weighted")
    jacobian = ScaledJacobian(field, points, roots)
    units = jnp.eye(points.size, dtype=points.dtype).reshape(-1, *points.shape)
    none = jnp.zeros((), points.dtype)
    columns = jax.vmap(symmetric_part(jacobian, points, space, none))(units)
    matrix = columns.reshape(points.size, -1)
    # Directions that do not count, normal or of absent tokens, sink below all others.
    present = (roots > 0)[:, None].astype(points.dtype)
    tangent = jax.vmap(lambda v: present * space.project(points, v))(units)
    sunk = jnp.eye(points.size, dtype=points.dtype) - tangent.reshape(points.size, -1)
    penalty = 1 + 2 * jnp.linalg.norm(matrix)
    return jnp.linalg.eigvalsh(matrix - penalty * sunk)[-1]


def internal_rate(
    field: TokenField,
    points: Float[Array, "n d"],
    inside: Bool[Array, " n"],
    space: AbstractSpace,
) -> Float[Array, ""]:
    r"""Largest rate at which tokens that stand at one place may part.

    A perturbation that keeps the mean of an atom keeps the measure to first order: it
    grows by the derivative of the field in the query alone, at most at the rate
    $\lambda_{\max}$ of its symmetric part on tangent vectors. Together with
    `largest_rate` of the atoms these are all directions of the tokens. The field takes
    places of queries, one for each point, to their velocities in the measure of the
    points; `inside` are the atoms that hold several tokens, and the rate is minus
    infinity if there are none. Cost: $d$ derivatives of the field and $O(nd^3)$.
    """
    units = jnp.eye(points.shape[1], dtype=points.dtype)

    def column(unit: Float[Array, " d"]) -> tuple[Array, Array]:
        everywhere = jnp.broadcast_to(unit[None], points.shape)
        along = space.project(points, everywhere)
        _, change = jax.jvp(field, (points,), (along,))
        return space.project(points, change), everywhere - along

    columns, normal = jax.vmap(column, out_axes=2)(units)
    symmetric = (columns + columns.mT) / 2
    penalty = 1 + 2 * jnp.linalg.norm(symmetric, axis=(1, 2), keepdims=True)
    rates = jnp.linalg.eigvalsh(symmetric - penalty * normal)[:, -1]
    return jnp.max(jnp.where(inside, rates, -jnp.inf))
