r"""Modes of a Poisson process by quadrature, without a single random number.

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

import itertools

import numpy as np
from jaxtyping import Float

from meanformer.errors import as_doubles, as_number, check
from meanformer.numerics.special.quadrature import gauss_panels
from meanformer.typing import ArrayLike

_SHAPE = 400.0  # of the law of the common factor, whose relative spread is 1/20
_PLAIN = 200.0  # sizes of the phase beyond which the smoothed wave is gone
_RIM = 4000  # nodes across the rim
_DEPTHS = (0.0, 3.0, 10.0, 40.0, 160.0, 640.0)  # of the logarithm of the radius
_SLOWEST = 44.0  # logarithm of the phase that is negligible
_DEEP = 16.0  # exponent of a characteristic function that is negligible
_ROWS = 64  # angles at a time


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
    check(
        rates.ndim == 1
        and len(rates) > 0
        and bool(((rates >= 0.3) & (rates <= 100)).all()),
        f"rates is {rates}; it must be a list of numbers from 0.3 to 100: for fewer "
        "tokens count with sample_poisson_modes.",
    )
    cutoff = as_number("cutoff", cutoff, "a number above 200")
    check(
        _PLAIN < cutoff < np.inf,
        f"cutoff is {cutoff}; it must be above {_PLAIN:g} and finite.",
    )
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


def _angular(
    rates: np.ndarray, exponents: np.ndarray, angles: np.ndarray, weights: np.ndarray
) -> np.ndarray:
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
