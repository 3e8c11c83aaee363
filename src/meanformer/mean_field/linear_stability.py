"""Degrees on the sphere: how fast they grow about the uniform measure, their power."""

import functools
import math
from typing import SupportsIndex

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, ScalarLike

from meanformer.attention import AbstractExponential
from meanformer.attention.exponential import isotropic_factors
from meanformer.errors import (
    InvalidInput,
    Overflow,
    as_integer,
    check,
    check_finite,
    is_concrete,
)
from meanformer.geometry import Sphere
from meanformer.measures import TokenCloud
from meanformer.measures.cloud import check_cloud
from meanformer.numerics.arrays import matmul, unit_rows
from meanformer.numerics.nearest import PAIRS_AT_ONCE
from meanformer.numerics.pair_sums.tiles import map_rows
from meanformer.numerics.special import zonal
from meanformer.typing import ArrayLike

# Rates closer to each other than this many roundings count as equal.
ROUNDINGS = 64


def growth_rates(
    attention: AbstractExponential,
    degrees: ArrayLike | range,
    *,
    dimension: SupportsIndex | None = None,
    noise: ScalarLike | None = None,
) -> Float[Array, " k"]:
    r"""Growth rates of small perturbations of the uniform measure on the sphere.

    Let scores be $b\langle x,y\rangle$, $b = \beta a$ for $A = aI$, and values $cy$. A
    density $1 + \varepsilon Y_l$ with a spherical harmonic $Y_l$ of degree $l$ grows as
    $\varepsilon e^{\lambda_l t}$ while it is small,
    $$\lambda_l = c\,l(l+d-2)\,\frac{\kappa_l}{b\,\kappa_0} - \frac{\sigma^2}{2}\,
      l(l+d-2), \qquad \kappa_l = \Gamma(\tfrac d2)\,\bigl(\tfrac2b\bigr)^{d/2-1}
      I_{l+d/2-1}(b),$$
    for softmax attention, and without the $\kappa_0$ for the unnormalised one; on the
    circle $\kappa_l = I_l(b)$. At $b = 0$ only the first degree grows, at the rate
    $c(d-1)/d$. Noise $\sigma$ damps all degrees, by its Laplacian. The formula is an
    exact linearisation. For $n$ independent tokens, $n \to \infty$, [BPA25] proves
    that the flow comes close to solutions with the period of the fastest mode.

    Args:
        attention: softmax or unnormalised, with $A = aI$, $V = cI$ of any sign. With a
            `shift` $s$ the rates are those on its clock, times $e^{-s}$: at large
            $\beta$ give `Unnormalised(..., shift=beta)`, which never overflows.
        degrees: the degrees $l \ge 0$, integers; the number of waves on the circle.
        dimension: dimension $d \ge 2$ of the space around the sphere, if not that of
            the attention; then only its factors $a$ and $c$ count.
        noise: the strength $\sigma$ of the noise of the flow; none by default.

    Returns:
        The rates, with the digits of the arithmetic at any $d$ and $\beta$;
        differentiable in $\beta$. Cost: $O(\max l)$.
    """
    return _rates(attention, checked_degrees(degrees), dimension, noise)


class FastestDegree(eqx.Module):
    """The mode that grows fastest about the uniform measure.

    Attributes:
        degree: its degree; `None` if no mode grows. On the circle it predicts the
            number of clusters that emerge from a small smooth perturbation.
        rate: its growth rate; zero if no mode grows.
        is_tied: whether another degree grows as fast up to rounding; the smallest one
            is given.
    """

    degree: int | None = eqx.field(static=True)
    rate: float = eqx.field(static=True)
    is_tied: bool = eqx.field(static=True)


def fastest_degree(
    attention: AbstractExponential,
    *,
    dimension: SupportsIndex | None = None,
    noise: ScalarLike | None = None,
) -> FastestDegree:
    r"""Find the degree that grows fastest about the uniform measure.

    Without noise it is the same for softmax and unnormalised attention. For large
    $\beta$ it is near the root of $l(l+d-2) = 2\beta$, so near $\sqrt{2\beta}$ on the
    circle, because $\kappa_l/\kappa_0 \to e^{-l(l+d-2)/(2\beta)}$.

    Args:
        attention: as in `growth_rates`; likewise `dimension` and `noise`. Not under
            `jit`: the rates are compared one by one.
        dimension: dimension of the space around the sphere.
        noise: the strength of the noise of the flow.

    Returns:
        The degree, its rate, and whether there is a tie. Cost: $O(\sqrt\beta)$.
    """
    factor, _ = isotropic_factors(attention, "growth rates")
    check(
        is_concrete(factor),
        "fastest_degree needs a known beta; call it outside of jit, or compare "
        "growth_rates.",
    )
    # Past the root of l(l+d-2) = 2 beta the rates only fall. Few lengths occur, so that
    # few programs are compiled.
    root = math.ceil(math.sqrt(2 * abs(float(factor)))) + 8
    degrees = np.arange(2 ** max(5, math.ceil(math.log2(root))))
    rates = np.asarray(_rates(attention, degrees, dimension, noise))
    best = int(rates.argmax())
    if not rates[best] > 0:
        return FastestDegree(None, 0.0, False)
    # Where noise takes nearly as much away, the roundings are those without it.
    without = float(_rates(attention, np.array([best]), dimension, None)[0])
    rounding = ROUNDINGS * np.finfo(rates.dtype).eps * without
    is_near = rates >= rates[best] - rounding
    return FastestDegree(
        int(is_near.argmax()), float(rates[best]), int(is_near.sum()) > 1
    )


def predicted_clusters(
    attention: AbstractExponential, *, noise: ScalarLike | None = None
) -> int:
    r"""Predict how many clusters emerge on the circle from a nearly uniform start.

    It is the fastest mode $k^*$, near $\sqrt{2\beta}$. That is a heuristic for finite
    $n$: right for a small smooth perturbation with a share of every mode, which leaves
    the fastest the time to win. From $n$ random tokens all modes start at $n^{-1/2}$,
    and get ahead of each other by $n^{(1-\lambda_k/\lambda_{k^*})/2}$ only; fewer
    clusters are observed then.

    Args:
        attention: as in `growth_rates`, of any dimension.
        noise: the strength of the noise of the flow.

    Returns:
        The number. Raises if no mode grows.
    """
    fastest = fastest_degree(attention, dimension=2, noise=noise)
    if fastest.degree is None:
        raise InvalidInput(
            "no mode grows about the uniform measure, so that no clusters emerge: "
            "noise or repulsion keeps it; look at growth_rates."
        )
    return fastest.degree


def _rates(attention, degrees: np.ndarray, dimension, noise) -> Float[Array, " k"]:
    factor, value = isotropic_factors(attention, "growth rates")
    if dimension is None:
        dimension = attention.input_dimension
    dimension = as_integer("dimension", dimension, least=2)
    laplacian = jnp.asarray(degrees * (degrees + dimension - 2.0), factor.dtype)
    speed = value * _speed(attention, dimension, factor)
    last = int(degrees.max(initial=1))
    rates = laplacian * speed * _relative(dimension, factor, last)[degrees]
    if noise is None:
        return rates
    strength = jnp.asarray(noise, factor.dtype)
    check(strength.shape == (), f"noise has shape {strength.shape}; give one number.")
    check_finite("noise", strength)
    return rates - laplacian * strength**2 / 2


def _relative(
    dimension: int, factor: Float[Array, ""], last: int
) -> Float[Array, " l"]:
    r"""Return $\kappa_l/(b\kappa_0)$ for $l$ up to the last, and zero for $l = 0$."""
    slopes = zonal.zonal_slopes(dimension, factor**2, last)
    rest = jnp.concatenate([slopes[:1], factor * slopes[1:]])
    return jnp.concatenate([jnp.zeros_like(slopes[:1]), jnp.cumprod(rest)])


def _speed(
    attention: AbstractExponential, dimension: int, factor: Float[Array, ""]
) -> Float[Array, ""]:
    """Return how much faster the flow is than that of softmax attention."""
    if attention.is_normalised:
        return jnp.ones_like(factor)
    log_speed = attention.shifted(zonal.log_zonal_mass(dimension, factor))
    largest = math.log(float(jnp.finfo(log_speed.dtype).max))
    if is_concrete(log_speed) and float(log_speed) > largest:
        raise Overflow(
            f"the rates overflow: they are exp({float(log_speed):.6g}) times those of "
            "softmax; take this factor out of time by Unnormalised(..., shift=beta)."
        )
    return jnp.exp(log_speed)


def checked_degrees(degrees: ArrayLike | range) -> np.ndarray:
    """Return degrees as an array of integers, or raise."""
    known = np.asarray(degrees)
    check(
        known.ndim == 1 and known.size > 0 and np.issubdtype(known.dtype, np.integer),
        f"degrees is {degrees!r}; it must list integers, for instance range(1, 6).",
    )
    check(
        bool((known >= 0).all()), f"degrees holds {known.min()}; degrees are 0 or more."
    )
    return known


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
        table = zonal.zonal_polynomials(dimension, cosines, count)
        return masses[:, None] * jnp.einsum("lmn,n->ml", table, weights)

    length = max(1, PAIRS_AT_ONCE // (count * len(points)))
    return jnp.sum(map_rows(of_rows, (points, weights), length), axis=0)
