r"""Axisymmetric measures on the sphere: a whole ring of tokens is one point.

A point of $\mathbb{S}^{d-1}$ is $(s\omega, z)$ with its height $z$ over an axis, its
distance $s = \sqrt{1-z^2}$ to it, and $\omega \in \mathbb{S}^{d-2}$. A measure that
does not change under rotations about the axis is one of rings, each a point $(s, z)$ of
the half circle, and stays one under attention that commutes with these rotations.
"""

from typing import SupportsIndex

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import (
    AbstractAttention,
    AbstractExponential,
    AbstractInContextMap,
    Linear,
)
from meanformer.attention.abstract import checked_queries
from meanformer.errors import Unsupported, as_integer, check, is_concrete
from meanformer.measures import AbstractContext, TokenCloud
from meanformer.measures.abstract import FeatureMap
from meanformer.measures.cloud import check_cloud
from meanformer.numerics.arrays import matmul
from meanformer.numerics.nearest import PAIRS_AT_ONCE
from meanformer.numerics.pair_sums.tiles import map_rows
from meanformer.numerics.softmax import weighted_logsumexp
from meanformer.numerics.special.bessel import sphere_transform
from meanformer.numerics.special.quadrature import sphere_rule
from meanformer.typing import MassAndMean, Places


class Axisymmetric(AbstractInContextMap):
    r"""Attention between rings of tokens around an axis, in any dimension.

    The ring at $(s', z')$ has the Laplace transform
    $$\int e^{\langle u, y\rangle} = e^{u_zz'}\,\Gamma(\tfrac{d-1}2)
      \bigl(\tfrac{2}{r}\bigr)^{(d-3)/2} I_{(d-3)/2}(r), \qquad r = |u_s|\,s',$$
    at a tilt with the part $u_z$ along the axis and $u_s$ away from it; $\cosh r$ on
    the circle. So a flow of this map on the half circle,
    `Flow(Axisymmetric(attention, d), space=Sphere())`, moves a cloud of points $(s, z)$
    as the flow of `attention` moves the measure of rings on $\mathbb{S}^{d-1}$: about a
    hundred rings with the weights of a smooth density (`ring_nodes`) are the mean field
    to many digits.

    Args:
        attention: softmax, unnormalised or linear attention in dimension 2. Its
            matrices must be diagonal, $\mathrm{diag}(a_s, a_z)$, and stand for
            $\mathrm{diag}(a_sI_{d-1}, a_z)$; no biases.
        dimension: dimension $d \ge 2$ of the space around the sphere.
    """

    attention: AbstractAttention
    dimension: int = eqx.field(static=True)

    def __init__(self, attention: AbstractAttention, dimension: SupportsIndex):
        if not isinstance(attention, AbstractExponential | Linear):
            raise Unsupported(
                f"attention is {type(attention).__name__}; between rings it must be "
                "Softmax, Unnormalised or Linear."
            )
        _check_diagonal(attention)
        self.attention = attention
        self.dimension = as_integer("dimension", dimension, least=2)

    @property
    def input_dimension(self) -> int:
        """Two: a ring is a point of the half plane."""
        return 2

    @property
    def output_dimension(self) -> int:
        """Two, likewise."""
        return 2

    def __call__(
        self, mu: AbstractContext, x: Float[Array, "m d"], *, positions: Places = None
    ) -> Float[Array, "m d"]:
        """Return what each ring makes of the others. Cost: $O(mn)$ time."""
        x = checked_queries(self, mu, x)
        check_cloud("mu", mu)
        return self.attention(self.context(mu), x)

    def context(self, rings: TokenCloud) -> "Rings":
        """Return the measure of the rings, as attention sees it."""
        return Rings(rings, self.dimension)

    def energy(self, rings: TokenCloud) -> Float[Array, ""]:
        r"""Return $\tfrac{1}{2\beta}\iint e^{\beta\langle Ax,y\rangle - s}$ of rings.

        It is the `energy` of the measure on the sphere, for softmax and unnormalised
        attention with the `shift` $s$.
        """
        if not isinstance(self.attention, AbstractExponential):
            raise Unsupported("linear attention between rings has no energy here.")
        temperature = self.attention.temperature
        check(
            not is_concrete(temperature) or float(temperature) != 0,
            "beta is 0, where the energy is not defined; take a small one.",
        )
        tilts = self.attention.tilts(rings.points)
        log_mass = self.attention.shifted(self.context(rings).log_laplace(tilts))
        mass = jnp.where(rings.weights > 0, jnp.exp(log_mass), 0)
        return jnp.dot(rings.weights, mass) / (2 * temperature)


class Rings(AbstractContext):
    r"""A measure made of rings around an axis, by the points $(s, z)$ of a cloud.

    Attributes:
        cloud: the points and masses.
        ambient: dimension $d$ of the space around the sphere.
    """

    cloud: TokenCloud
    ambient: int = eqx.field(static=True)

    @property
    def dimension(self) -> int:
        """Two: tilts have a part along the axis and one away from it."""
        return 2

    def tilted_mass_and_mean(self, u: Float[Array, "m d"]) -> MassAndMean:
        """Return the log-Laplace transform and the tilted mean of the rings."""
        distances, heights = self.cloud.points.T

        def of_rows(tilts):
            across = tilts[:, :1] * distances[None, :]
            log_ring, mean = sphere_transform(across[..., None], self.ambient - 1)
            scores = tilts[:, 1:] * heights[None, :] + log_ring
            log_mass, shares = weighted_logsumexp(scores, self.cloud.weights)
            away = jnp.sum(shares * mean[..., 0] * distances[None, :], axis=1)
            return log_mass, jnp.stack([away, matmul(shares, heights)], axis=1)

        return map_rows(of_rows, u, max(1, PAIRS_AT_ONCE // self.cloud.count))

    def linear_mean(
        self, u: Float[Array, "m k"], feature_map: FeatureMap | None = None
    ) -> MassAndMean:
        """Return mass and moment of a linear kernel, from moments of the rings."""
        if feature_map is not None:
            raise Unsupported("linear attention between rings has no feature map.")
        squares = matmul(self.cloud.weights, self.cloud.points**2)
        moments = squares / jnp.asarray([self.ambient - 1, 1], squares.dtype)
        return u[:, 1] * self.cloud.mean()[1], u * moments[None, :]


def unfold_rings(rings: TokenCloud, dimension: SupportsIndex, order: int) -> TokenCloud:
    """Replace rings around an axis by tokens on them, of a rule of some order.

    Args:
        rings: points (s, z) of the half circle, with masses.
        dimension: dimension of the space around the sphere, 2 or more.
        order: how many nodes for each dimension of a ring, as for `quadrature`.

    Returns:
        The tokens of the first ring, then those of the second, and so on; the axis is
        the last coordinate.
    """
    dimension = as_integer("dimension", dimension, least=2)
    check_cloud("rings", rings)
    check(
        rings.dimension == 2,
        f"rings has dimension {rings.dimension}; rings are points (s, z), distance "
        "to the axis and height.",
    )
    nodes, masses = sphere_rule(dimension - 1, as_integer("order", order, least=1))
    dtype = rings.points.dtype
    circle, shares = jnp.asarray(nodes, dtype), jnp.asarray(masses, dtype)
    away = rings.points[:, :1, None] * circle[None]
    heights = jnp.broadcast_to(rings.points[:, 1:, None], (*away.shape[:2], 1))
    points = jnp.concatenate([away, heights], axis=2).reshape(-1, dimension)
    return TokenCloud(points, jnp.outer(rings.weights, shares).ravel())


def _check_diagonal(attention: AbstractAttention) -> None:
    check(
        attention.input_dimension == 2 == attention.output_dimension,
        f"attention maps dimension {attention.input_dimension} to "
        f"{attention.output_dimension}; between rings it acts on points (s, z), and "
        "both must be 2.",
    )
    if attention.query_bias is not None or attention.value_bias is not None:
        raise Unsupported("attention between rings has no biases; leave them out.")
    for name in ("score", "value"):
        matrix = getattr(attention, name)
        if is_concrete(matrix):
            known = np.asarray(matrix, np.float64)
            rounding = 64 * float(jnp.finfo(matrix.dtype).eps) * np.abs(known).max()
            check(
                max(abs(known[0, 1]), abs(known[1, 0])) <= rounding,
                f"{name} is {known.tolist()}; it must be diagonal, or rings would not "
                "stay rings.",
            )
