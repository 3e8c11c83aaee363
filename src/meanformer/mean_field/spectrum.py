"""How much of each degree there is in a cloud of tokens on the sphere."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.errors import check
from meanformer.geometry import Sphere
from meanformer.mean_field.linear_stability import checked_degrees
from meanformer.measures import TokenCloud
from meanformer.measures.cloud import check_cloud
from meanformer.numerics.arrays import matmul, unit_rows
from meanformer.numerics.nearest import PAIRS_AT_ONCE
from meanformer.numerics.pair_sums.tiles import map_rows
from meanformer.numerics.special.zonal import zonal_polynomials
from meanformer.typing import ArrayLike


def degree_powers(cloud: TokenCloud, degrees: ArrayLike | range) -> Float[Array, " k"]:
    r"""Power of each degree in a measure on the sphere, whatever its orientation.

    $$C_l = \iint P_l(\langle x, y\rangle)\,\mathrm{d}\mu(x)\,\mathrm{d}\mu(y) \ge 0,$$
    with the Legendre polynomial of the dimension, $P_l(1) = 1$; on the circle
    $C_l = |\int e^{il\theta}\,\mathrm{d}\mu|^2$. It is 0 for the uniform measure, 1 for
    one point, and $1/n$ on average for $n$ independent uniform tokens. Near the uniform
    measure it grows like $e^{2\lambda_lt}$, with the rate $\lambda_l$ of
    `growth_rates`.

    Args:
        cloud: the tokens, unit vectors of dimension 2 or more.
        degrees: the degrees, integers, 0 or more.

    Returns:
        The powers. Cost: $O(nl)$ on the circle, $O(n^2l)$ time otherwise.
    """
    known = checked_degrees(degrees)
    check_cloud("cloud", cloud)
    check(
        cloud.dimension >= 2,
        f"cloud has dimension {cloud.dimension}; a sphere needs 2 or more.",
    )
    Sphere().check(cloud.points)
    present = (cloud.weights > 0)[:, None]
    points = jnp.where(present, cloud.points, jax.lax.stop_gradient(cloud.points))
    of = _on_circle if cloud.dimension == 2 else _between_pairs
    return of(unit_rows(points), cloud.weights, int(known.max()) + 1)[known]


@functools.partial(jax.jit, static_argnums=2)
def _on_circle(
    points: Float[Array, "n 2"], weights: Float[Array, " n"], count: int
) -> Float[Array, " k"]:
    """Return the squared moduli of Fourier coefficients, by turning the phases."""

    def turn(phases, _):
        cosines, sines = phases
        size = jnp.dot(weights, cosines) ** 2 + jnp.dot(weights, sines) ** 2
        turned = cosines * x - sines * y, cosines * y + sines * x
        return turned, size

    x, y = points.T
    start = jnp.ones_like(x), jnp.zeros_like(x)
    return jax.lax.scan(turn, start, length=count)[1]


@functools.partial(jax.jit, static_argnums=2)
def _between_pairs(
    points: Float[Array, "n d"], weights: Float[Array, " n"], count: int
) -> Float[Array, " k"]:
    dimension = points.shape[1]

    def of_rows(block):
        rows, masses = block
        cosines = jnp.clip(matmul(rows, points.T), -1, 1)
        table = zonal_polynomials(dimension, cosines, count)
        return masses[:, None] * jnp.einsum("lmn,n->ml", table, weights)

    length = max(1, PAIRS_AT_ONCE // (count * len(points)))
    return jnp.sum(map_rows(of_rows, (points, weights), length), axis=0)
