"""The expected number of modes of random tokens, by the formula of Kac and Rice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm
from jaxtyping import Array, Float

from meanformer import errors
from meanformer.errors import as_float_array, check, is_concrete
from meanformer.numerics.special.quadrature import gauss_legendre
from meanformer.numerics.special.zonal import zonal_ratios
from meanformer.observables.modes.kernels import checked_beta
from meanformer.observables.modes.poisson import DENSE_LIMIT, poisson_mode_density
from meanformer.typing import ArrayLike

_PANELS = 96  # of the integral over the line, and
_PEAK_PANELS = 16  # over the peak in its middle, each with
_NODES = 12  # nodes of Gauss and Legendre
_PEAK = 10.0  # standard deviations of the peak that are looked at
_LIGHT = 36.0  # logarithm of the expected samples per bandwidth where it is cut


def mode_rate(
    t: ArrayLike, count: ArrayLike, beta: ArrayLike, *, corrected: bool = True
) -> Float[Array, " m"]:
    r"""Density of the expected modes of a kernel density of normal tokens.

    For $f(t) = \sum_{i \le n} e^{-\beta(t - X_i)^2/2}$ with $X_i \sim N(0, 1)$ the
    formula of Kac and Rice is $\mathbb{E}[(f'')_- \mid f' = 0]\,p_{f'}(0)$. With a
    Gaussian pair $(f', f'')$ of the same means $n m_1, n m_2$, variances $n v_1, n v_2$
    and covariance $n c$, all in closed form, this is
    $$\frac{\varphi(\sqrt{n/v_1}\,m_1)}{\sqrt{v_1}}\,
      \bigl(s\,\varphi(a/s) - a\,\Phi(-a/s)\bigr), \qquad
      a = \sqrt n\,(m_2 - c\,m_1/v_1), \quad s^2 = v_2 - c^2/v_1 .$$
    Where fewer than about one token per bandwidth is expected, the pair is far from
    Gaussian: this density does not vanish in empty tails, and its integral over the
    line is infinite. The correction multiplies it by $F(\lambda)/F(\infty)$ with
    $\lambda(t) = n\varphi(t)/\sqrt\beta$, see `poisson_mode_density`; it is a
    heuristic that counting confirms, not a theorem.

    Args:
        t: places on the line.
        count: the number $n$ of tokens; any positive number.
        beta: inverse temperature, positive.
        corrected: whether to correct for the empty tails.

    Returns:
        Expected modes per unit of length, at each place. Cost: $O(m)$.
    """
    t = jnp.atleast_1d(as_float_array("t", t))
    check(t.ndim == 1, f"t has shape {t.shape}; it must be a list of places.")
    errors.check_finite("t", t)
    count, beta = (
        _positive(name, value, t.dtype)
        for name, value in (("count", count), ("beta", beta))
    )
    return _rate(t, count, beta) if corrected else _gaussian_rate(t, count, beta)


def expected_modes(count: ArrayLike, beta: ArrayLike) -> Float[Array, ""]:
    r"""Expected number of modes of a kernel density of normal tokens, finite $n$.

    The integral of `mode_rate` over the line, with the correction for empty tails.
    For $n^c \le \beta \le n^{2-c}$ the exact expectation is of the order of
    $\sqrt{\beta\log\beta}$ (a theorem, GRS24). That this formula is close to it is an
    observation: it is always low, by 0.5 to 3 percent in counts of thousands of clouds,
    since a pair of derivatives that is not Gaussian has a few modes more;
    `sample_modes` counts.

    Args:
        count: the number $n$ of tokens; any positive number.
        beta: inverse temperature, positive.

    Returns:
        The number, a scalar. Cost: about a thousand evaluations of the density.
    """
    count, beta = as_float_array("count", count), as_float_array("beta", beta)
    dtype = jnp.result_type(count, beta)
    return _integral(_positive("count", count, dtype), _positive("beta", beta, dtype))


def expected_circle_modes(beta: float | Float[Array, ""]) -> Float[Array, ""]:
    r"""Expected modes of the density of many uniform tokens on the circle.

    $$\mathbb{E}M = \sqrt{\frac{\sum_k k^4 I_k(\beta)^2}{\sum_k k^2 I_k(\beta)^2}}
      \;\sim\; \sqrt{3\beta/2}, \qquad \beta \to \infty,$$
    the formula of Kac and Rice for the stationary Gaussian process that the density of
    $n \to \infty$ uniform tokens fluctuates like, with the kernel $e^{\beta\cos}$.
    There is no logarithm on the circle: on the line it comes from the tails of the
    normal law.

    Args:
        beta: inverse temperature, positive.

    Returns:
        The number, a scalar. Cost: $O(\sqrt\beta)$.
    """
    beta = checked_beta(beta)
    # A power of two, so that few programs are compiled.
    needed = 7 * np.sqrt(beta) + 30
    return _circle_modes(jnp.asarray(beta), 2 ** int(np.ceil(np.log2(needed))))


def mode_window(beta: ArrayLike) -> Float[Array, "..."]:
    r"""The order of the number of modes of normal tokens, $\sqrt{\beta\log\beta}$.

    Theorem (GRS24): if $n^c \le \beta \le n^{2-c}$ for some $c > 0$, the expected
    number of modes is between two positive multiples of it.

    Args:
        beta: inverse temperatures, above one.

    Returns:
        One number for each.
    """
    beta = as_float_array("beta", beta)
    if is_concrete(beta):
        check(
            bool(((beta > 1) & jnp.isfinite(beta)).all()),
            f"beta is {beta}; it must be above 1 and finite.",
        )
    return jnp.sqrt(beta * jnp.log(beta))


def mode_constant(exponent: float) -> float:
    r"""The constant before $\sqrt{\beta\log\beta}$ as tokens and temperature grow.

    With $\beta = n^a$, $0 < a < 2$, the formula of `expected_modes` tends to
    $C\sqrt{\beta\log\beta}$,
    $$C = \frac{\sqrt3}{\pi}\Bigl(\sqrt{\tfrac1a - \tfrac12} -
      \sqrt{\bigl(\tfrac1a - \tfrac32\bigr)_+}\Bigr):$$
    modes are $\sqrt{3\beta/2}/2\pi$ per unit of length between the place where the
    normal law stops to hide the fluctuations and that where tokens become rarer than
    one per bandwidth. A heuristic, and the limit is reached logarithmically slowly.

    Args:
        exponent: the exponent $a$, between 0 and 2.

    Returns:
        The constant.
    """
    allowed = (
        "between 0 and 2, both excluded: beyond them nearly every token is a mode, or "
        "all are one"
    )
    exponent = errors.as_number("exponent", exponent, allowed, above=0, below=2)
    outer, inner = 1 / exponent - 0.5, max(1 / exponent - 1.5, 0.0)
    # The difference of the roots, without loss of digits where they are large.
    roots = min(outer, 1.0) / (np.sqrt(outer) + np.sqrt(inner))
    return float(np.sqrt(3) / np.pi * roots)


@jax.jit
def _integral(count: Float[Array, ""], beta: Float[Array, ""]) -> Float[Array, ""]:
    """The integral of the rate over the line, by panels on one half of it."""
    # If tokens are many, the mean density hides all modes but the one in the middle:
    # the rate has a narrow Gaussian peak there, which has panels of its own.
    dtype = count.dtype
    log_top = jnp.log(count) - 0.5 * jnp.log(2 * jnp.pi * beta)
    end = jnp.sqrt(2 * (jnp.maximum(log_top, 0) + _LIGHT))
    one, two = 1 + beta, 1 + 2 * beta
    width = one / jnp.sqrt(count) * jnp.sqrt(one / two) / two**0.25
    peak = jnp.minimum(_PEAK * width, end)
    steps = (np.arange(many + 1) / many for many in (_PANELS, _PEAK_PANELS))
    whole, middle = (jnp.asarray(part, dtype) for part in steps)
    ends = jnp.sort(jnp.concatenate([end * whole, peak * middle]))
    nodes, masses = (jnp.asarray(part, dtype) for part in gauss_legendre(_NODES))
    widths = jnp.diff(ends)[:, None]
    t = ends[:-1, None] + 0.5 * (1 + nodes[None, :]) * widths
    # Twice one half of the line.
    return 2 * jnp.vdot(masses[None, :] * widths, _rate(t.ravel(), count, beta))


def _positive(name: str, value: ArrayLike, dtype: jnp.dtype) -> Array:
    array = as_float_array(name, value).astype(dtype)
    check(array.ndim == 0, f"{name} has shape {array.shape}; it must be one number.")
    if is_concrete(array):
        check(
            bool((array > 0) & jnp.isfinite(array)),
            f"{name} is {array}; it must be positive and finite.",
        )
    return array


@functools.partial(jax.jit, static_argnums=1)
def _circle_modes(beta: Float[Array, ""], count: int) -> Float[Array, ""]:
    """The square root of fourth moments over second ones, of Bessel functions."""
    degrees = jnp.arange(count, dtype=beta.dtype)
    ratios = zonal_ratios(2, beta, count)
    # Over that of degree one, so that the squares do not underflow.
    slopes = (degrees * (ratios / ratios[1])) ** 2
    return jnp.sqrt(jnp.sum(degrees**2 * slopes) / jnp.sum(slopes))


@jax.jit
def _rate(t: Float[Array, " m"], count, beta) -> Float[Array, " m"]:
    """The density, corrected where tokens are rare."""
    local = count * norm.pdf(t) / jnp.sqrt(beta)
    share = poisson_mode_density(local) / DENSE_LIMIT
    return share * _gaussian_rate(t, count, beta)


@jax.jit
def _gaussian_rate(t: Float[Array, " m"], count, beta) -> Float[Array, " m"]:
    """The density with a Gaussian pair of first and second derivative."""
    (mean_slope, mean_bend), slope, bend, both = derivative_moments(t, count, beta)
    ratio = both / slope
    shift = mean_bend - ratio * mean_slope
    spread = jnp.sqrt(jnp.maximum(bend - ratio * both, jnp.finfo(t.dtype).tiny))
    score = shift / spread
    below = spread * norm.pdf(score) - shift * norm.cdf(-score)
    root = jnp.sqrt(slope)
    return jnp.sqrt(beta) * norm.pdf(mean_slope / root) / root * below


def derivative_moments(
    t: Float[Array, " m"], count: Float[Array, ""], beta: Float[Array, ""]
):
    r"""Means and covariances of the pair, in units of one kernel's size.

    The gap $z = (t - X)\sqrt\beta$ of a token, in bandwidths, is normal under the law
    of the token times the kernel $e^{-z^2/2}$, and times its square, where its mean is
    $y$. The pair is $f'/\sqrt\beta$ and $f''/\beta + yf'/\sqrt\beta$, so one
    kernel times $-z$ and $z^2 - 1 - yz$: what is asked of $f''$ given $f' = 0$ is the
    same, and no fourth powers of $y$ cancel. What is common to all entries of the
    covariance is divided out.
    """
    one, two = 1 + beta, 1 + 2 * beta
    # Beyond this the rate is constant, and its square would overflow.
    most = jnp.finfo(t.dtype).max ** 0.25
    places = jnp.clip(jnp.sqrt(beta) / two * t, -most, most)
    near = places * (two / one)
    spread, near_spread = beta / two, beta / one
    # The mean of the kernel over the root of the mean of its square.
    size = jnp.sqrt(jnp.sqrt(two) / one)
    size = size * jnp.exp(-0.5 * near_spread * spread * t**2)
    slope_mean = -size * near
    bend_mean = size * (near * (near - places) + near_spread - 1)
    slope = places**2 + spread - slope_mean**2
    bend = places**2 * spread + 3 * spread**2 - 2 * spread + 1 - bend_mean**2
    both = places * (1 - 2 * spread) - slope_mean * bend_mean
    root = jnp.sqrt(count)
    return (root * slope_mean, root * bend_mean), slope, bend, both
