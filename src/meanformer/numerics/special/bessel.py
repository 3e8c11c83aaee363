r"""Ratios and logarithms of modified Bessel functions, as the unit sphere needs them.

With $r = \sqrt t$ the uniform probability on the unit sphere of $\mathbb{R}^d$ has
$$L_d(t) = \log\Bigl[\Gamma(\tfrac d2) (\tfrac 2r)^{d/2-1} I_{d/2-1}(r)\Bigr], \qquad
  h_d(t) = \frac{I_{d/2}(r)}{r\, I_{d/2-1}(r)},$$
as log-Laplace transform and as tilted mean divided by the tilt. Both are smooth in the
squared norm $t \ge 0$, zero included, and neighbours two dimensions apart are tied by
$$h_d = \frac{1}{d + t\,h_{d+2}}, \qquad L_d = L_{d+2} + \log(1 + t\,h_{d+2}/d), \qquad
  \delta_d = (2 - t\,\delta_{d+2})\, h_d h_{d+2},$$
$$L_d' = \tfrac12 h_d, \qquad h_d' = -\tfrac12 h_d \delta_d, \qquad
  \delta_d = h_d - h_{d+2}.$$
Nothing cancels on the way down in dimension, which starts where the uniform expansion
of Debye (Olver 1974, chapter 10.7) is exact to rounding.
"""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.polynomial.polynomial import polyadd, polyder, polyint, polymul

# The first omitted term of Debye's expansion is about 14! / (pi (18 pi)^15) = 1e-16.
_TERMS = 14
_SMALLEST_ORDER = 18


def sphere_transform(
    u: Float[Array, "*batch k"], dimension: int
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch k"]]:
    r"""Log-Laplace transform and tilted mean of the uniform law on the unit sphere.

    $$\Lambda(u) = L_d(|u|^2), \qquad \nabla\Lambda(u) = h_d(|u|^2)\,u.$$

    Only the norm of the tilt matters, so its last axis may be shorter than the
    dimension: a tilt in a subspace. Both results have the digits of the arithmetic at
    any norm; their second derivatives lose those of the norm, if it is large.

    Args:
        u: tilts, along the last axis.
        dimension: dimension $d$ of the space around the sphere.

    Returns:
        The transform and its gradient; about 200 operations for each tilt.
    """
    # Beyond what is moderate the transform grows with slope one.
    moderate = moderated(u)
    square = jnp.sum(moderate**2, axis=-1)
    log_laplace, ratio, _ = sphere_functions(dimension, square)
    mean = ratio[..., None] * moderate
    beyond = jnp.sum((u - moderate) * jax.lax.stop_gradient(mean), axis=-1)
    return log_laplace + beyond, mean


def moderated(u: Float[Array, "*batch k"]) -> Float[Array, "*batch k"]:
    """Return tilts whose squares do not overflow: huge ones are shortened."""
    limit = float(jnp.finfo(u.dtype).max) ** 0.25
    largest = jnp.max(jnp.abs(u), axis=-1, keepdims=True)
    return jax.lax.stop_gradient(limit / jnp.maximum(largest, limit)) * u


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=0)
def sphere_functions(
    dimension: int, square: Float[Array, "*batch"]
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"], Float[Array, "*batch"]]:
    r"""Return $L_d(t)$, $h_d(t)$ and $\delta_d(t)$ at squares that do not overflow."""
    start = max(dimension, 2 * (_SMALLEST_ORDER + 1) + dimension % 2)
    log_laplace, ratio, gap = _debye(start, square)
    for lower in range(start - 2, dimension - 1, -2):
        growth = square * ratio
        log_laplace = log_laplace + jnp.log1p(growth / lower)
        lower_ratio = 1 / (lower + growth)
        gap = (2 - square * gap) * lower_ratio * ratio
        ratio = lower_ratio
    return log_laplace, ratio, gap


@sphere_functions.defjvp
def _sphere_functions_jvp(dimension, primals, tangents):
    (square,), (tangent,) = primals, tangents
    log_laplace, ratio, gap = sphere_functions(dimension, square)
    _, next_ratio, next_gap = sphere_functions(dimension + 2, square)
    slopes = (ratio, -ratio * gap, next_ratio * next_gap - ratio * gap)
    values = (log_laplace, ratio, gap)
    return values, tuple(0.5 * slope * tangent for slope in slopes)


def _debye(
    dimension: int, square: Float[Array, "*batch"]
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"], Float[Array, "*batch"]]:
    r"""Return the three functions by the uniform expansion in $\mu = d/2 - 1$.

    With $s = \sqrt{1 + t/\mu^2}$, $w = (s-1)/2$, $p = 1/s$ and $F$ the expansion,
    $$L = \mu(2w - \log(1+w)) - \tfrac12\log s + F(p) - F(1), \qquad
      \mu h = \frac{1}{1+s} - \frac{p^2}{\mu}\Bigl(\frac12 + pF'\Bigr),$$
    $$\mu^3 h\delta = \frac{p}{(1+s)^2} - \frac{p^4}{\mu}(1 + 3pF' + p^2F'').$$
    """
    order = dimension / 2 - 1
    quotient, first, second = _debye_sums(dimension)
    scaled = square / order**2
    s = jnp.sqrt(1 + scaled)
    p = 1 / s
    w = scaled / (2 * (1 + s))
    log_laplace = (
        order * (2 * w - jnp.log1p(w))
        - 0.5 * jnp.log1p(2 * w)
        - 2 * w * p * _horner(quotient, p)
    )
    slope = p * _horner(first, p)
    bend = p**2 * _horner(second, p)
    ratio = (1 / (1 + s) - p**2 * (0.5 + slope) / order) / order
    gap = p * (1 / (1 + s) ** 2 - p**3 * (1 + 3 * slope + bend) / order)
    return log_laplace, ratio, gap / (order**3 * ratio)


def _horner(coefficients: tuple[float, ...], at: Array) -> Array:
    total = jnp.zeros_like(at)
    for coefficient in reversed(coefficients):
        total = total * at + coefficient
    return total


@functools.cache
def _debye_sums(dimension: int) -> list[tuple[float, ...]]:
    r"""Return the coefficients of $(F(p) - F(1))/(p - 1)$, $F'(p)$ and $F''(p)$."""
    order = Fraction(dimension - 2, 2)
    total = np.zeros(1, object)
    for power, polynomial in enumerate(debye_polynomials(_TERMS), start=1):
        total = polyadd(total, polynomial / order**power)
    # Division by p - 1 leaves the sums of the coefficients above each degree.
    quotient = np.cumsum(total[:0:-1])[::-1]
    polynomials = (quotient, polyder(total), polyder(total, 2))
    return [tuple(map(float, polynomial)) for polynomial in polynomials]


@functools.cache
def debye_polynomials(count: int) -> list[np.ndarray]:
    r"""Exact polynomials $D_k$ of the logarithm of Debye's uniform expansion.

    $$\log I_\mu(\mu z) \sim \mu\eta - \tfrac12\log(2\pi\mu s)
      + \sum_{k\ge1} D_k(p)\,\mu^{-k}, \qquad p = \tfrac1s = (1+z^2)^{-1/2},$$
    $$D_1 = \frac{3p - 5p^3}{24}, \qquad D_{k+1} = \tfrac12 p^2(1-p^2) D_k'
      + \tfrac12 \int_0^p \tau^2 (1-\tau^2) \sum_{j=1}^{k-1} D_j' D_{k-j}'.$$

    Args:
        count: how many.

    Returns:
        For each $D_k$ its fractions, constant term first.
    """
    bell = np.array([0, 0, Fraction(1, 2), 0, Fraction(-1, 2)])
    found = [np.array([0, Fraction(3, 24), 0, Fraction(-5, 24)])]
    while len(found) < count:
        slopes = [polyder(polynomial) for polynomial in found]
        products = np.zeros(1, object)
        for left, right in zip(slopes[:-1], slopes[-2::-1], strict=True):
            products = polyadd(products, polymul(left, right))
        integral = polyint(polymul(bell, products))
        found.append(polyadd(polymul(bell, slopes[-1]), integral))
    return found
