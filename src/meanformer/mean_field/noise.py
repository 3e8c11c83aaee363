r"""Noise against attraction: where the uniform measure of tokens loses its stability.

Tokens on the sphere follow $\mathrm{d}x = P_x(\Gamma[\mu](x)\,\mathrm{d}t +
\sigma\circ\mathrm{d}B)$, and infinitely many of them the equation
$$\partial_t\rho = \tfrac1\kappa\,\Delta\rho - \mathrm{div}(\rho v), \qquad
  \kappa = \frac{2}{\sigma^2},$$
where $v = \tfrac1\beta\nabla G$ for unnormalised attention and
$v = \tfrac1\beta\nabla\log G$ for softmax, $G = \int e^{\beta\langle x,y\rangle}
\rho(y)\,\mathrm{d}y$. Small $\kappa$ is much noise.
"""

import math
from typing import NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from meanformer.attention import AbstractExponential
from meanformer.attention.exponential import isotropic_factors
from meanformer.errors import Overflow, Unsupported, as_integer, as_number, check
from meanformer.numerics.special.zonal import log_zonal_mass, zonal_ratios

_TOPIC = "stationary states with noise"
# Beyond, the bend of a branch is a difference of numbers that agree to all digits.
LARGEST_BETA = 1e8

_zonal_ratios = jax.jit(zonal_ratios, static_argnums=(0, 2))
_log_zonal_mass = jax.jit(log_zonal_mass, static_argnums=0)


class Attraction(NamedTuple):
    r"""Attention by inner products on a sphere, as stationary states see it.

    With $r_l = \kappa_l/\kappa_0$ and a unit $u$ of noise they are the densities with
    $\log\rho = \tfrac\kappa u\,\Psi + \text{const}$, $\Psi = \sum_l r_l\rho_l p_l$ for
    unnormalised attention and its logarithm for softmax. Both lose uniformity in degree
    $l$ at $\kappa = u/r_l$.
    """

    dimension: int
    beta: float
    is_softmax: bool
    unit: float

    def ratios(self, count: int) -> Float[np.ndarray, " l"]:
        r"""Return $\kappa_l/\kappa_0$ for the first degrees, in double precision."""
        # A length of few sizes: each is a program of its own.
        length = max(16, 1 << (count - 1).bit_length())
        with jax.enable_x64(True):
            beta = jnp.asarray(self.beta, float)
            return np.asarray(_zonal_ratios(self.dimension, beta, length))[:count]


def attraction(
    attention: AbstractExponential, dimension: SupportsIndex | None = None
) -> Attraction:
    """Read what stationary states need off an attention that attracts."""
    factor, value = isotropic_factors(attention, _TOPIC, is_attracting=True)
    beta = as_number("beta", factor, "known: call this outside of jit")
    if dimension is None:
        dimension = attention.input_dimension
    size = as_integer("dimension", dimension, least=2)
    log_unit = math.log(beta / float(value))
    if not attention.is_normalised:
        with jax.enable_x64(True):
            log_unit -= float(_log_zonal_mass(size, jnp.asarray(beta, float)))
        log_unit += attention.shift_number
    if abs(log_unit) > 690:
        raise Overflow(
            f"the critical kappa is about exp({log_unit:.6g}), not a number; take the "
            "factor exp(beta) out of the attention by Unnormalised(..., shift=beta)."
        )
    return Attraction(size, beta, attention.is_normalised, math.exp(log_unit))


def critical_kappa(
    attention: AbstractExponential,
    *,
    dimension: SupportsIndex | None = None,
    degree: SupportsIndex = 1,
) -> float:
    r"""Return the inverse noise from which on the uniform measure is unstable.

    $$\kappa_c = \frac{\beta}{\kappa_l} \ \text{(unnormalised)}, \qquad
      \kappa_c = \frac{\beta\,\kappa_0}{\kappa_l} \ \text{(softmax)},$$
    $\kappa_l = \Gamma(\tfrac d2)(\tfrac2\beta)^{d/2-1}I_{l+d/2-1}(\beta)$, for identity
    values: the growth rate $l(l+d-2)(\kappa_l/\beta - 1/\kappa)$ of degree $l$ vanishes
    there. Degree one is the first to grow. On the circle, unnormalised,
    $\kappa_c = \beta/I_1(\beta)$. An exact linearisation.

    Args:
        attention: `Softmax` or `Unnormalised` with scores $b\langle x,y\rangle$ and
            values $cy$, $b, c > 0$. A `shift` $s$ multiplies the result by $e^s$.
        dimension: dimension $d \ge 2$ of the space around the sphere, if not that of
            the attention.
        degree: the degree $l \ge 1$ that begins to grow.

    Returns:
        $\kappa_c$; the strength of noise of the flow is `noise_of_kappa(kappa)`.
    """
    model = attraction(attention, dimension)
    degree = as_integer("degree", degree, least=1)
    ratio = float(model.ratios(degree + 1)[degree])
    check(
        ratio > 0 and math.isfinite(model.unit / ratio),
        f"degree {degree} at beta {model.beta:.6g} would grow at a kappa beyond all "
        "numbers; ask for a smaller degree.",
    )
    return model.unit / ratio


def critical_noise(
    attention: AbstractExponential, *, dimension: SupportsIndex | None = None
) -> float:
    r"""Return the strength of noise below which the uniform measure is unstable.

    It is $\sigma_c = \sqrt{2/\kappa_c}$, for `Flow(attention, space=Sphere(),
    noise=sigma)`.

    Args:
        attention: as in `critical_kappa`; likewise `dimension`.
        dimension: dimension of the space around the sphere.
    """
    return noise_of_kappa(critical_kappa(attention, dimension=dimension))


def noise_of_kappa(kappa: float) -> float:
    r"""Return the strength of noise $\sigma = \sqrt{2/\kappa}$ of a flow.

    Args:
        kappa: the inverse noise, positive.
    """
    return math.sqrt(2 / checked_kappa(kappa))


def checked_kappa(kappa: float) -> float:
    """Return the inverse noise as a number, or raise unless it is positive."""
    allowed = "positive and finite: it is 2 / noise**2"
    return as_number("kappa", kappa, allowed, above=0, below=math.inf)


def tricritical_beta(dimension: SupportsIndex) -> float:
    r"""Return the inverse temperature up to which the transition is continuous.

    For unnormalised attention on $\mathbb{S}^{d-1}$ it is the root of
    $$\frac{I_{d/2+1}(\beta_*)}{I_{d/2}(\beta_*)} = \frac1d.$$
    For $\beta \le \beta_*$ the uniform measure is the only minimiser of the free energy
    up to $\kappa_c$; for $\beta > \beta_*$ another one takes over before, and the order
    jumps [MR26]. Softmax attention has no such number: see `branch_curvature`.

    Args:
        dimension: dimension $d \ge 2$ of the space around the sphere.

    Returns:
        The root, to rounding; it falls to one like $1 + 2/d$. Cost: milliseconds.
    """
    from scipy.optimize import brentq

    size = as_integer("dimension", dimension, least=2)

    def excess(beta: float) -> float:
        _, first, second = Attraction(size, beta, is_softmax=False, unit=1.0).ratios(3)
        return size * float(second / first) - 1

    # b/(d+2) > I_(d/2+1)/I_(d/2) > b/(m + sqrt(m^2 + b^2)) with m = d/2 + 1.
    low, high = (size + 2) / size, size * (size + 2) / (size**2 - 1)
    return float(brentq(excess, low * (1 - 1e-9), high * (1 + 1e-9), xtol=1e-15))


def branch_curvature(
    attention: AbstractExponential,
    *,
    dimension: SupportsIndex | None = None,
    degree: SupportsIndex = 1,
) -> float:
    r"""Return how the branch of ordered states bends where it leaves the uniform one.

    With the order $r = |\int x\,\mathrm{d}\rho|$, on the branch
    $\kappa = \kappa_c(1 + b\,r^2 + O(r^4))$. With $q = \kappa_2/\kappa_1$ and
    $k_l = \kappa_l/\kappa_0$,
    $$b = \frac{d\,(1-dq)}{(d+2)(1-q)} \ \text{(unnormalised)}, \qquad
      b = \frac{d(1-k_1)}{d+2}\Bigl[d(1+k_1) - \frac{(d-1)(1-k_2)}{1-q}\Bigr]
      \ \text{(softmax)}.$$
    The transition is continuous near $\kappa_c$ if $b > 0$, and the branch turns back
    if $b < 0$. For unnormalised attention that is the condition of `tricritical_beta`.
    For softmax attention $b > 0$ always: the bracket is
    $d\,(k_1(1+k_1)/\beta - k_1')/(k_1 - k_2)$, and $k_1/\beta$ decreases in
    $\beta$. Derived here, by expansion to third order; it says nothing on states far
    from uniform.

    Args:
        attention: as in `critical_kappa`; likewise `dimension`.
        dimension: dimension of the space around the sphere.
        degree: the number of clusters of the branch; other than one on the circle only,
            with $r = \int\cos l\theta\,\mathrm{d}\rho$, $q = \kappa_{2l}/\kappa_l$.

    Returns:
        The number $b$, with an error of some $10^{-16}\beta$ of it.
    """
    model = attraction(attention, dimension)
    degree = as_integer("degree", degree, least=1)
    d = model.dimension
    check(
        model.beta <= LARGEST_BETA,
        f"beta is {model.beta:.6g}; beyond {LARGEST_BETA:g} the bend is lost in "
        "rounding: it tends to zero like 1/beta for softmax attention.",
    )
    if degree > 1 and d > 2:
        raise Unsupported(
            f"degree is {degree} in dimension {d}; the expansion is for degree 1, and "
            "on the circle for all degrees: follow the branch by stationary_branch."
        )
    ratios = model.ratios(2 * degree + 1)
    first, second = float(ratios[degree]), float(ratios[2 * degree])
    quotient = second / first
    if not model.is_softmax:
        return d * (1 - d * quotient) / ((d + 2) * (1 - quotient))
    bracket = d * (1 + first) - (d - 1) * (1 - second) / (1 - quotient)
    return d * (1 - first) * bracket / (d + 2)
