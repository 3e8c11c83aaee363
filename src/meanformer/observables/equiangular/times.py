r"""Times of tokens at equal angles: an integral over the gap, in logarithms.

With the gap $u = 1 - \rho$, the room $w = \rho + 1/(n-1)$ above the simplex, and their
values $u_0, w_0$ at the start, the variable $z = \log\frac{u_0}{w_0} - \log\frac uw$
grows from zero on and makes the integrand smooth; Gauss rules on short panels converge
to rounding. All is computed by numpy in float64, whatever JAX is set to.
"""

from fractions import Fraction
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from meanformer.numerics.special.quadrature import gauss_legendre, gauss_panels

NODES = 16
PANEL = 3.5  # the integrand has its nearest singularities at distance pi
# Where an exponential has fallen by e to these powers.
FALLS = (2.0, 5.0, 10.0, 20.0, 40.0, 80.0)

Numbers = Float[np.ndarray, "*b"]
Grid = Float[np.ndarray, "*b q"]


class LogTime(NamedTuple):
    """The logarithm of a time, and its derivative in the inverse temperature."""

    log_time: Numbers
    slope: Numbers


class Interval(NamedTuple):
    r"""From one inner product to a larger one.

    Attributes:
        count: the number $n$ of tokens.
        start: the inner product at the beginning.
        gap: $1$ minus it.
        room: $1/(n-1)$ plus it.
        rise: how much it grows.
    """

    count: int
    start: float
    gap: float
    room: float
    rise: float

    @property
    def length(self) -> float:
        """The variable at the end."""
        return float(self.variable(np.array(self.rise)))

    def variable(self, rise: Numbers) -> Numbers:
        """Return the variable where the inner product has grown so much."""
        difference = np.log1p(rise / self.room) - np.log1p(-rise / self.gap)
        return np.asarray(difference)

    def risen(self, z: Grid) -> tuple[Grid, Grid]:
        r"""Return the rise, and $\kappa = 1 + (n-1)\rho$, at the variable."""
        total = self.room + self.gap * np.exp(-z)
        rise = self.gap * self.room * -np.expm1(-z) / total
        return rise, self.count * self.room / total


def interval_between(count: int, start: float, level: float) -> Interval:
    """Return the interval from a start to a level, with differences rounded once."""
    below, above = Fraction(start), Fraction(level)
    room = below + Fraction(1, count - 1)
    return Interval(count, start, float(1 - below), float(room), float(above - below))


def relative_attention(count, kappa, fall, excess):
    r"""Return radial part and length of the attention, over the share of oneself.

    With $f = e^{-\beta u}$, the share of another token over that of oneself, they are
    $1 - f + f\kappa$ and the root of $(1-f)^2 + (2(1-f) + nf)f\kappa$: sums of terms
    that are not negative.

    Args:
        count: the number $n$ of tokens.
        kappa: $1 + (n-1)\rho$.
        fall: $f$.
        excess: $1 - f$, without cancellation.
    """
    square = excess**2 + (2 * excess + count * fall) * fall * kappa
    return excess + fall * kappa, square**0.5


def log_clustering_time(
    interval: Interval, beta: Numbers, *, is_softmax: bool, by_length: bool = False
) -> LogTime:
    r"""Time in which the common inner product rises from one value to another.

    $$T = \int \frac{s}{2nq}\,\mathrm{d}z, \qquad
      \frac1q = n - 1 + e^{\beta u} \quad\text{or}\quad ne^{-\beta\rho},$$
    with $s = 1$, or $s = |A|$.

    Args:
        interval: start and end.
        beta: inverse temperatures, any shape.
        is_softmax: whether attention is divided by its mass.
        by_length: whether the speed is divided by the length of the attention.

    Returns:
        Logarithm and logarithmic derivative (the latter for $s = 1$ only), of the shape
        of beta. Cost: some hundred exponentials for each.
    """
    shares, weights = gauss_panels(_ends(interval, beta), NODES)
    z, beta = interval.length * shares, beta[..., None]
    log_terms = _log_slowness(interval, beta, z, is_softmax, by_length)
    rise, _ = interval.risen(z)
    growth = -(interval.start + rise)
    if is_softmax:
        growth = (interval.gap - rise) * np.exp(
            beta * (interval.gap - rise) - log_terms
        )
    largest = log_terms.max(axis=-1, keepdims=True)
    masses = weights * np.exp(log_terms - largest)
    total = masses.sum(axis=-1)
    log_scale = np.log(interval.length) - np.log(2 * interval.count)
    log_time = largest[..., 0] + np.log(total) + log_scale
    slope = (masses * growth).sum(axis=-1) / total
    return LogTime(np.asarray(log_time), np.asarray(slope))


def log_growing_time(
    interval: Interval, beta: float, *, is_softmax: bool, by_length: bool
) -> float:
    r"""Logarithm of the time if the speed is also divided by a radius that grows.

    The radius is a function of the variable, $\log r = R = \int \frac{\langle A,
    \theta\rangle}{2nq}\,\mathrm{d}z$, and $T = \int e^R\frac{s}{2nq}\,\mathrm{d}z$ with
    $s = 1$, or $s = |A|$. Panels are halved until $R$ grows by little in each, but not
    where the integrand is negligible.

    Args:
        interval: start and end.
        beta: the inverse temperature.
        is_softmax: whether attention is divided by its mass.
        by_length: whether the speed is divided by the length of the attention.

    Returns:
        The logarithm, infinite where that itself is too large for a number.
    """
    ends = interval.length * _ends(interval, np.array(beta))
    nodes, masses = gauss_legendre(NODES)
    shares = (1 + nodes) / 2

    def growth(z):
        return np.exp(_log_growth(interval, beta, z)) / (2 * interval.count)

    with np.errstate(over="ignore", invalid="ignore"):
        while True:
            low, width = ends[:-1, None], np.diff(ends)[:, None]
            growths = (width * masses * growth(low + width * shares)).sum(axis=1)
            left = np.append(np.cumsum(growths[::-1])[::-1], 0)
            if not np.isfinite(left[0]):
                return np.inf
            is_coarse = (growths > FALLS[0]) & (left[1:] < FALLS[-1])
            is_coarse &= np.diff(ends) > np.finfo(float).eps * ends[1:]
            if not is_coarse.any():
                break
            ends = np.sort(np.append(ends, ((ends[:-1] + ends[1:]) / 2)[is_coarse]))
        z = low + width * shares
        parts = (z - low)[..., None]
        inside = (parts * masses * growth(low[..., None] + parts * shares)).sum(-1)
        log_terms = _log_slowness(interval, np.array(beta), z, is_softmax, by_length)
        log_terms = log_terms + inside - left[:-1, None]
    largest = log_terms.max()
    total = (width / interval.length * masses * np.exp(log_terms - largest)).sum()
    log_scale = np.log(interval.length) - np.log(2 * interval.count)
    return float(left[0] + largest + np.log(total) + log_scale)


def _log_slowness(
    interval: Interval, beta, z: Grid, is_softmax: bool, by_length: bool
) -> Grid:
    """Return the logarithm of one, or the length, over the share of another."""
    rise, kappa = interval.risen(z)
    score = beta * (interval.gap - rise)
    if by_length:
        parts = relative_attention(
            interval.count, kappa, np.exp(-score), -np.expm1(-score)
        )
        return score + np.log(parts[1])
    if is_softmax:
        return np.logaddexp(score, np.log(interval.count - 1))
    return np.log(interval.count) - beta * (interval.start + rise)


def _log_growth(interval: Interval, beta: float, z: Grid) -> Grid:
    """Return the logarithm of the radial part over the share of another."""
    rise, kappa = interval.risen(z)
    score = beta * (interval.gap - rise)
    parts = relative_attention(interval.count, kappa, np.exp(-score), -np.expm1(-score))
    return score + np.log(parts[0])


def _ends(interval: Interval, beta: Numbers) -> Grid:
    """Return ends of panels from 0 to 1, fine where the integrand is steep."""
    even = np.linspace(0, 1, int(np.ceil(interval.length / PANEL)) + 1)
    with np.errstate(divide="ignore"):
        falls = np.minimum(np.array(FALLS) / beta[..., None], interval.rise)
    steep = np.minimum(interval.variable(falls) / interval.length, 1)
    shape = (*beta.shape, len(even))
    return np.sort(np.concatenate([np.broadcast_to(even, shape), steep], -1), -1)
