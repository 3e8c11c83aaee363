r"""Expected modes of the density of a Poisson process with few tokens.

A quadrature gives their number without a single random one.
The density $f$ of a Poisson process with Gaussians of bandwidth one is shot noise, and
the pair $(f', f'')$ has the characteristic function $e^{-\lambda\Psi}$,
$$\Psi(\rho, \theta) = \int_{\mathbb{R}} 1 - e^{i\rho w_\theta(y)}\,\mathrm{d}y, \qquad
  w_\theta(y) = \bigl(\sin\theta\,(y^2 - 1) - \cos\theta\,y\bigr)e^{-y^2/2}.$$
By Kac and Rice, modes have the density $\tfrac12\mathbb{E}[|f''|\,\delta(f')]$, that is
half the density at zero of the ratio $f'/f''$. Fourier's transform of
$|z_2|\delta(z_1)$, homogeneous of degree $-2$, gives in polar coordinates
$$F(\lambda) = \frac1{2\pi} + \frac1{\pi^2}\int_0^\infty\frac{\mathrm{d}\rho}\rho
  \int_0^{\pi/2}\frac{e^{-\lambda\Psi(\rho, 0)} - \mathrm{Re}\,
  e^{-\lambda\Psi(\rho, \theta)}}{\sin^2\theta}\,\mathrm{d}\theta ,$$
where $1/2\pi$ is Frullani's integral of what the subtraction at fixed $\rho$, instead
of fixed $\rho\cos\theta$, leaves out. It decays like $e^{-2\lambda\sqrt{2\log\rho}}$
only: where there are few tokens, radii far beyond $e^{100}$ count.

The ratio does not see a common random factor of $f'$ and $f''$. Beyond a cutoff this
is used to smooth the oscillations away: $e^{i\rho w}$ is replaced by its mean over a
factor of Gamma's law, which is elementary, and only the tokens at the rim, where
$\rho w$ is of order one, have to be resolved.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import as_doubles, as_float_array, as_number, check, is_concrete
from meanformer.flows.trajectories.interpolation import hermite, place_of
from meanformer.numerics.special.quadrature import gauss_panels
from meanformer.typing import ArrayLike

# Modes per bandwidth of many tokens: those of a stationary Gaussian process.
DENSE_LIMIT = float(np.sqrt(1.5) / (2 * np.pi))

# Rates and densities: up to 0.3 counted on some 10^7 bandwidths
# (`sample_poisson_modes`, standard errors 3e-5 to 7e-5), beyond by quadrature
# (`poisson_mode_integral`, with errors of 3e-5 at 0.4 and 1e-6 from 1 on).
# The first after zero is the expansion.
_COUNTED = {0.0: 0.0, 0.025: 0.02377, 0.05: 0.04512, 0.1: 0.08127, 0.15: 0.10950}
_COUNTED |= {0.2: 0.13139, 0.3: 0.16037}
_INTEGRATED = {0.4: 0.1766, 0.5: 0.18526, 0.6: 0.18977, 0.7: 0.19207, 0.8: 0.19324}
_INTEGRATED |= {0.9: 0.193833, 1.0: 0.194149, 1.1: 0.194328, 1.25: 0.194480}
_INTEGRATED |= {1.5: 0.194609, 1.75: 0.194678, 2.0: 0.194718, 2.5: 0.194765}
_INTEGRATED |= {3.0: 0.194792, 4.0: 0.194825, 5.0: 0.194845, 7.0: 0.194868}
_INTEGRATED |= {10.0: 0.1948848, 20.0: 0.1949045, 50.0: 0.1949163, 100.0: 0.1949203}

_SHAPE = 400.0  # of the law of the common factor, whose relative spread is 1/20
_PLAIN = 200.0  # sizes of the phase beyond which the smoothed wave is gone
_RIM = 4000  # nodes across the rim
_DEPTHS = (0.0, 3.0, 10.0, 40.0, 160.0, 640.0)  # of the logarithm of the radius
_SLOWEST = 44.0  # logarithm of the phase that is negligible
_DEEP = 16.0  # exponent of a characteristic function that is negligible
_ROWS = 64  # angles at a time


def poisson_mode_density(rate: ArrayLike) -> Float[Array, "..."]:
    r"""Modes per bandwidth of the density of a Poisson process on the line.

    $F(\lambda)$ is the mean number of modes, per unit of length, of
    $\sum_i e^{-(t - Y_i)^2/2}$ for a Poisson process $Y$ of the rate $\lambda$, that is
    with $\lambda$ tokens per bandwidth:
    $$F(\lambda) = \lambda - 2\lambda^2 + O(\lambda^3), \qquad
      F(\lambda) \to F(\infty) = \frac{\sqrt{3/2}}{2\pi} = 0.194924\ldots$$
    Lone tokens are modes, two at a distance below two bandwidths share one, and many
    fluctuate like a Gaussian process.

    Args:
        rate: mean numbers $\lambda \ge 0$ of tokens per bandwidth.

    Returns:
        One number for each: a monotone cubic through a table that this library
        computed, with errors of some 5e-5; beyond the rate 100 a tail like
        $1/\lambda$. Cost: one search in the table for each.
    """
    rate = as_float_array("rate", rate)
    if is_concrete(rate):
        check(bool((rate >= 0).all()), f"rate is {rate}; it must not be negative.")
    return _density(rate)


@jax.jit
def _density(rate: Float[Array, "..."]) -> Float[Array, "..."]:
    """The interpolant of the table, and its tail."""
    nodes, values, slopes = (jnp.asarray(part, rate.dtype) for part in _interpolant())
    last = nodes[-1]

    def inside(rate: Float[Array, ""]) -> Float[Array, ""]:
        return hermite(place_of(nodes, jnp.minimum(rate, last)), values, slopes)

    beyond = DENSE_LIMIT - (DENSE_LIMIT - values[-1]) * last / jnp.maximum(rate, last)
    return jnp.where(rate > last, beyond, jnp.vectorize(inside)(rate))


@functools.cache
def _interpolant() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes, values and slopes of the monotone cubic of Fritsch and Carlson.

    The first slope is known: lone tokens are modes.
    """
    from scipy.interpolate import PchipInterpolator

    table = np.array(sorted((_COUNTED | _INTEGRATED).items()))
    slopes = PchipInterpolator(*table.T).derivative()(table[:, 0])
    slopes[0] = 1.0
    return table[:, 0], table[:, 1], slopes


def poisson_mode_integral(
    rates: ArrayLike, *, cutoff: float = 400.0
) -> Float[np.ndarray, " m"]:
    r"""Modes per bandwidth of the density of a Poisson process, by quadrature.

    $F(\lambda)$ of `poisson_mode_density`. The error, mostly that of averaging the
    oscillations beyond the cutoff, is about 1e-4 at the rate 0.3, 2e-5 at 0.5 and 1e-6
    from 1 on (observed, by changing all parameters).

    Args:
        rates: mean numbers $\lambda$ of tokens per bandwidth, from 0.3 to 100.
        cutoff: radius of the characteristic function up to which its oscillations are
            resolved, more than 200; beyond it they are averaged.

    Returns:
        One number for each rate, in double precision on the host. Cost: half a minute,
        whatever the number of rates.
    """
    rates = np.atleast_1d(as_doubles("rates", rates))
    is_allowed = bool(((rates >= 0.3) & (rates <= 100)).all())
    check(
        rates.ndim == 1 and len(rates) > 0 and is_allowed,
        f"rates is {rates}; it must be a list of numbers from 0.3 to 100: for fewer "
        "tokens count with sample_poisson_modes.",
    )
    allowed = f"above {_PLAIN:g} and finite"
    cutoff = as_number("cutoff", cutoff, allowed, above=_PLAIN, below=np.inf)
    total = resolved_part(rates, cutoff) + _smoothed_part(rates, cutoff)
    return 1 / (2 * np.pi) + total / np.pi**2


def resolved_part(rates: np.ndarray, cutoff: float) -> np.ndarray:
    """The integral up to the cutoff, with all oscillations."""
    wide = int(1.2 * cutoff)
    angles, weights = _panels([0, 0.02, 0.1, np.pi / 2], [60, 80, wide])
    radii, shares = _panels([0, 1, 20, cutoff], [16, 48, int(1.1 * cutoff)])
    parts = (
        share
        / radius
        * _angular(rates, resolved_exponents(radius, angles), angles, weights)
        for radius, share in zip(radii, shares, strict=True)
    )
    return sum(parts, np.zeros(len(rates)))


def _smoothed_part(rates: np.ndarray, cutoff: float) -> np.ndarray:
    """The integral beyond the cutoff, in the logarithm of the radius."""
    depths, shares = _panels(_DEPTHS, [10] * (len(_DEPTHS) - 1))
    depths = depths + np.log(cutoff)
    # What is left beyond is smaller than its first factor by orders of magnitude.
    counts = rates.min() * 2 * np.sqrt(2 * (depths - np.log(_PLAIN))) < _DEEP
    total = np.zeros(len(rates))
    for depth, share in zip(depths[counts], shares[counts], strict=True):
        angles, weights = _rim_angles(np.sqrt(2 * depth))
        total += share * _angular(
            rates, smoothed_exponents(depth, angles), angles, weights
        )
    return total


def _angular(rates: np.ndarray, exponents, angles, weights) -> np.ndarray:
    """The integral over angles, for each rate; the first exponent is at angle zero."""
    values = np.real(np.exp(-rates[:, None] * exponents[None, :]))
    return (values[:, :1] - values[:, 1:]) @ (weights / np.sin(angles) ** 2)


def resolved_exponents(radius: float, angles: np.ndarray) -> np.ndarray:
    r"""$\Psi$ at the angle zero and at others, by the rule of trapezes."""
    step = min(0.05, 1.5 / radius)
    places = np.arange(0, np.sqrt(2 * max(np.log(radius), 0) + 40), step)
    shares = np.where(places > 0, step, step / 2)
    bump = radius * np.exp(-(places**2) / 2)
    odd, even = places * bump, (places**2 - 1) * bump
    angles = np.append(0, angles)
    parts = []
    for some in np.array_split(angles, -(-len(angles) // _ROWS)):
        across, along = np.cos(some)[:, None] * odd, np.sin(some)[:, None] * even
        phases = along - across, along + across
        real = sum(2 * np.sin(phase / 2) ** 2 for phase in phases) @ shares
        parts.append(real - 1j * (sum(np.sin(phase) for phase in phases) @ shares))
    return np.concatenate(parts)


def smoothed_exponents(depth: float, angles: np.ndarray) -> np.ndarray:
    r"""$\Psi$ at the radius $e^{\text{depth}}$, averaged over a common factor."""
    inner = np.sqrt(2 * (depth - np.log(_PLAIN)))
    places = np.linspace(inner, np.sqrt(2 * depth + _SLOWEST), _RIM)
    shares = np.full(_RIM, places[1] - places[0])
    shares[0] /= 2
    # The factor of Gamma's law has the mean logarithm zero to second order.
    scale = np.exp(depth - places**2 / 2) * (1 + 0.5 / _SHAPE) / _SHAPE
    angles = np.append(0, angles)
    total = np.full(len(angles), 2 * inner, complex)
    for side in (-1, 1):
        odd, even = side * places * scale, (places**2 - 1) * scale
        for some in np.array_split(np.arange(len(angles)), -(-len(angles) // _ROWS)):
            phases = np.cos(angles[some])[:, None] * odd
            phases = phases + np.sin(angles[some])[:, None] * even
            # The mean of the wave over the factor is (1 - i phase) to minus the shape.
            sizes = np.exp(-0.5 * _SHAPE * np.log1p(phases**2))
            turns = _SHAPE * np.arctan(phases)
            total[some] += (1 - sizes * np.cos(turns)) @ shares
            total[some] -= 1j * ((sizes * np.sin(turns)) @ shares)
    return total


def _rim_angles(rim: float) -> tuple[np.ndarray, np.ndarray]:
    """Nodes that crowd where the wave vanishes at the rim, and their weights."""
    steps = 0.7 * 0.4 ** np.arange(np.ceil(np.log(1.4 * rim**2) / np.log(2.5)) + 1)
    tangents = np.concatenate([[0], 1 - steps, 1 + steps[::-1], [2.5, 4, 8]]) / rim
    ends = np.arctan(tangents)
    ends = np.append(ends[ends < 1.2], np.pi / 2)
    return _panels(ends, [10] * (len(ends) - 1))


def _panels(ends, counts) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of Gauss and Legendre on neighbouring intervals."""
    pairs = zip(itertools.pairwise(ends), counts, strict=True)
    rules = [gauss_panels(np.array(pair, float), count) for pair, count in pairs]
    nodes, weights = zip(*rules, strict=True)
    return np.concatenate(nodes), np.concatenate(weights)
