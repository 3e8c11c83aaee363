"""Few weighted tokens that stand for a smooth density, to many digits.

A flow moves points, and the mean field of a smooth density is an integral of a smooth
function of them at all depths: so a quadrature rule of the density at the start stays
one. Errors fall faster than any power of the number of nodes.
"""

from collections.abc import Callable
from typing import SupportsIndex

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import (
    as_finite_array,
    as_integer,
    check,
    check_kind,
    is_concrete,
)
from meanformer.measures import AbstractMeasure, TokenCloud, quadrature
from meanformer.numerics.special.quadrature import gauss_gegenbauer

MASS_TOLERANCE = 1e-6

Density = Callable[[Array], Array]


def density_nodes(
    density: Density,
    reference: AbstractMeasure,
    count: SupportsIndex,
    *,
    normalize: bool = False,
) -> TokenCloud:
    r"""Replace a measure with a density by weighted tokens.

    $$\mu = \varrho\,\nu \approx \sum_i w_i\varrho(x_i)\,\delta_{x_i},$$
    with the nodes and masses of `quadrature(reference, count)`: equispaced nodes for
    `UniformSphere(2)`, Gauss-Legendre for `UniformBox(low, high)`, Gauss-Hermite for a
    `Gaussian`, product rules in higher dimension. A flow from there is the mean field
    of $\mu$ with an error that falls faster than any power of the count, as long as the
    density at that depth is as smooth as the nodes can see.

    Args:
        density: $\varrho$, a function of points $(n, d)$, relative to the reference: 1
            is the reference itself.
        reference: the measure $\nu$.
        count: how many nodes for each dimension.
        normalize: divide by the total mass instead of requiring 1 (to 1e-6).
    """
    rule = quadrature(reference, count)
    weights = _weighted(density, rule.points, rule.weights, normalize=normalize)
    return TokenCloud(rule.points, weights)


def circle_nodes(
    density: Density, count: SupportsIndex, *, normalize: bool = False
) -> TokenCloud:
    r"""Replace a density on the circle by weighted tokens at the middles of equal arcs.

    Args:
        density: a function of angles $(n,)$, relative to the uniform probability: 1 is
            the uniform measure, $1 + 0.1\cos 3\theta$ a wave on it.
        count: how many nodes.
        normalize: divide by the total mass instead of requiring 1 (to 1e-6).

    Returns:
        The cloud, at points $(\cos\theta_i, \sin\theta_i)$ of the plane.
    """
    count = as_integer("count", count, least=1)
    angles = jnp.asarray(2 * np.pi / count * (np.arange(count) + 0.5))
    masses = jnp.full_like(angles, 1 / count)
    weights = _weighted(density, angles, masses, normalize=normalize)
    return TokenCloud(jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1), weights)


def ring_nodes(
    density: Density,
    count: SupportsIndex,
    *,
    dimension: SupportsIndex,
    normalize: bool = False,
) -> TokenCloud:
    r"""Replace an axisymmetric density on the sphere by weighted rings, for a flow.

    The rings lie at Gauss nodes of the height $z$, whose law under the uniform measure
    has the density $\propto (1-z^2)^{(d-3)/2}$. They flow by
    `Flow(Axisymmetric(attention, dimension), space=Sphere())`.

    Args:
        density: a function of heights $(n,)$ in $[-1, 1]$, relative to the uniform
            probability: 1 is the uniform measure.
        count: how many rings.
        dimension: dimension $d \ge 2$ of the space around the sphere; on the circle
            the density is that of a measure which is even in the angle.
        normalize: divide by the total mass instead of requiring 1 (to 1e-6).

    Returns:
        The cloud of points $(\sqrt{1-z_i^2}, z_i)$ of the half circle.
    """
    count = as_integer("count", count, least=1)
    dimension = as_integer("dimension", dimension, least=2)
    nodes, masses = (jnp.asarray(array) for array in gauss_gegenbauer(count, dimension))
    weights = _weighted(density, nodes, masses, normalize=normalize)
    distances = jnp.sqrt((1 - nodes) * (1 + nodes))
    return TokenCloud(jnp.stack([distances, nodes], axis=1), weights)


def _weighted(
    density: Density, nodes: Array, masses: Float[Array, " n"], *, normalize: bool
) -> Float[Array, " n"]:
    """Return masses times density, checked to be a probability."""
    check_kind("density", density, Callable, "a function of points")
    values = as_finite_array("density", density(nodes), masses.shape, masses.dtype)
    weights = masses * values
    total = jnp.sum(weights)
    if is_concrete(values):
        lowest, mass = float(jnp.min(values)), float(total)
        negative = f"density is {lowest:.6g} at a node; it must not be negative."
        check(lowest >= 0, negative)
        check(
            mass > 0 or not normalize,
            "the density is zero at all nodes; it has no mass to divide by.",
        )
        check(
            normalize or abs(mass - 1) <= MASS_TOLERANCE,
            f"the mass is {mass:.8g}; a density relative to the reference has "
            "mass 1: divide by it, take more nodes, or pass normalize=True.",
        )
    return weights / total if normalize else weights
