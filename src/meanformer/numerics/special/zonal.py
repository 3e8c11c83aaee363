r"""How the exponential kernel acts on spherical harmonics, by Funk and Hecke.

For a harmonic $Y_l$ of degree $l$ on $\mathbb{S}^{d-1}$, with the uniform probability,
$$\int e^{\beta\langle x, y\rangle}\,Y_l(y)\,\mathrm{d}\sigma(y) = \kappa_l\,Y_l(x),
  \qquad \kappa_l = \Gamma(\tfrac d2)\,\bigl(\tfrac2\beta\bigr)^{d/2-1}
  I_{l+d/2-1}(\beta);$$
on the circle $\kappa_l = I_l(\beta)$.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.numerics.special.bessel import sphere_functions

# From this order on the ratio of Bessel functions is an expansion exact to rounding.
_LARGE_ORDER = 20


def log_zonal_mass(dimension: int, beta: Float[Array, ""]) -> Float[Array, ""]:
    r"""Return $\log\kappa_0$, which is that of the mean of $e^{\beta x_1}$."""
    return sphere_functions(dimension, beta**2)[0]


def zonal_ratios(
    dimension: int, beta: Float[Array, ""], count: int
) -> Float[Array, " count"]:
    r"""Return $\kappa_l/\kappa_0$ for $l = 0, \dots, \text{count} - 1$.

    They fall from one to zero.

    Args:
        dimension: dimension $d \ge 2$ of the space around the sphere.
        beta: inverse temperature, of any sign; the square must not overflow.
        count: how many.

    Returns:
        The ratios, each with the digits of the arithmetic. Cost: $O(\text{count})$.
    """
    steps = beta * zonal_slopes(dimension, beta**2, count)
    ratios = jnp.concatenate([jnp.ones_like(steps[:1]), jnp.cumprod(steps)])
    return ratios[:count]


@functools.partial(jax.jit, static_argnums=(0, 2))
def zonal_slopes(
    dimension: int, square: Float[Array, "*batch"], count: int
) -> Float[Array, "count *batch"]:
    r"""Return $h_l = \kappa_{l+1}/(\beta\kappa_l)$ for $l < \text{count}$.

    They come from the recurrence $h_l = 1/(d + 2l + \beta^2 h_{l+1})$, downward, where
    it is stable, and are smooth functions of $\beta^2$, also at zero.

    Args:
        dimension: dimension $d \ge 2$ of the space around the sphere.
        square: the squares $\beta^2$.
        count: how many.
    """
    top = max(count, _LARGE_ORDER)
    last = sphere_functions(dimension + 2 * top, square)[1]
    orders = dimension + 2 * jnp.arange(top - 1, -1, -1, dtype=square.dtype)

    def step(above, order):
        here = 1 / (order + square * above)
        return here, here

    _, downward = jax.lax.scan(step, last, orders)
    return downward[::-1][:count]


@functools.partial(jax.jit, static_argnums=(0, 2))
def zonal_polynomials(
    dimension: int, heights: Float[Array, "*batch"], count: int
) -> Float[Array, "count *batch"]:
    r"""Return the Legendre polynomials $P_0, P_1, \dots$ of a dimension, $P_l(1) = 1$.

    The zonal harmonics of $\mathbb{S}^{d-1}$, by the recurrence
    $(l+d-2)\,P_{l+1} = (2l+d-2)\,zP_l - l\,P_{l-1}$; on the circle
    $P_l(\cos\theta) = \cos l\theta$.

    Args:
        dimension: dimension $d \ge 2$ of the space around the sphere.
        heights: $z$, in $[-1, 1]$.
        count: how many.
    """
    degrees = jnp.arange(1, max(count, 1), dtype=heights.dtype)

    def step(pair, degree):
        below, here = pair
        rise = (2 * degree + dimension - 2) * heights * here - degree * below
        return (here, rise / (degree + dimension - 2)), here

    start = jnp.ones_like(heights), heights
    _, table = jax.lax.scan(step, start, degrees)
    return jnp.concatenate([start[0][None], table])[:count]
