r"""Times of tokens at equal angles: an integral over the gap, in logarithms.

With the gap $u = 1 - \rho$, the room $w = \rho + 1/(n-1)$ above the simplex, and their
values $u_0, w_0$ at the start, the variable $z = \log\frac{u_0}{w_0} - \log\frac uw$
grows from zero on and makes the integrand smooth; Gauss rules on short panels converge
to rounding. All is computed by numpy in float64, whatever JAX is set to.
"""

from fractions import Fraction
from typing import NamedTuple

import equinox as eqx
import numpy as np
from jaxtyping import Float

from meanformer.errors import (
    Overflow,
    Unsupported,
    as_doubles,
    as_integer,
    as_number,
    check,
    check_choice,
)
from meanformer.numerics.special.quadrature import gauss_legendre, gauss_panels
from meanformer.typing import ArrayLike

NODES = 16
PANEL = 3.5  # the integrand has its nearest singularities at distance pi
# Where an exponential has fallen by e to these powers.
FALLS = (2.0, 5.0, 10.0, 20.0, 40.0, 80.0)
ITERATIONS = 100
CLOSE = 1e-9  # after a step of this size Newton's method is exact to rounding

Numbers = Float[np.ndarray, "*b"]
Grid = Float[np.ndarray, "*b q"]


class Interval(NamedTuple):
    r"""From one inner product to a larger one.

    Attributes:
        count: the number $n$ of tokens.
        start: the inner product at the beginning.
        gap: $1$ minus it.
        room: $1/(n-1)$ plus it.
        rise: how much it grows.
        is_softmax: whether attention is divided by its mass.
    """

    count: int
    start: float
    gap: float
    room: float
    rise: float
    is_softmax: bool

    @classmethod
    def between(cls, count: int, start: float, level: float, is_softmax: bool):
        """Return that from a start to a level, with differences rounded once."""
        below, above = Fraction(start), Fraction(level)
        room = below + Fraction(1, count - 1)
        parts = (float(part) for part in (1 - below, room, above - below))
        return cls(count, start, *parts, is_softmax)

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

    def attention(self, beta, z: Grid) -> tuple[Grid, Grid, Grid]:
        r"""Return $\beta u$, and `relative_attention`, at the variable."""
        rise, kappa = self.risen(z)
        score = beta * (self.gap - rise)
        return score, *relative_attention(self.count, kappa, score)


def relative_attention(count, kappa, score):
    r"""Return radial part and length of the attention, over the share of oneself.

    With $f = e^{-\beta u}$, the share of another token over that of oneself, they are
    $1 - f + f\kappa$ and the root of $(1-f)^2 + (2(1-f) + nf)f\kappa$: sums of terms
    that are not negative.

    Given are the number $n$ of tokens, $\kappa = 1 + (n-1)\rho$, and the score $\beta
    u$, an array of NumPy or JAX.
    """
    library = score.__array_namespace__()
    fall, excess = library.exp(-score), -library.expm1(-score)
    square = excess**2 + (2 * excess + count * fall) * fall * kappa
    return excess + fall * kappa, square**0.5


def log_clustering_time(
    interval: Interval, beta: Numbers, *, by_length: bool = False
) -> tuple[Numbers, Numbers]:
    r"""Time in which the common inner product rises from one value to another.

    $$T = \int \frac{s}{2nq}\,\mathrm{d}z, \qquad
      \frac1q = n - 1 + e^{\beta u} \quad\text{or}\quad ne^{-\beta\rho},$$
    with $s = 1$, or $s = |A|$ by length. Returns logarithm and logarithmic derivative
    (the latter for $s = 1$ only), of the shape of beta. Cost: some hundred exponentials
    for each.
    """
    from scipy.special import logsumexp

    shares, weights = gauss_panels(_ends(interval, beta), NODES)
    z, beta = interval.length * shares, beta[..., None]
    log_terms = _log_slowness(interval, beta, z, by_length)
    rise, _ = interval.risen(z)
    growth = -(interval.start + rise)
    if interval.is_softmax:
        gap = interval.gap - rise
        growth = gap * np.exp(beta * gap - log_terms)
    log_total = np.asarray(logsumexp(log_terms, axis=-1, b=weights))
    parts = weights * np.exp(log_terms - log_total[..., None])
    log_time = log_total + np.log(interval.length) - np.log(2 * interval.count)
    return np.asarray(log_time), np.asarray((parts * growth).sum(axis=-1))


def log_growing_time(interval: Interval, beta: float, *, by_length: bool) -> float:
    r"""Logarithm of the time if the speed is also divided by a radius that grows.

    The radius is a function of the variable, $\log r = R = \int \frac{\langle A,
    \theta\rangle}{2nq}\,\mathrm{d}z$, and $T = \int e^R\frac{s}{2nq}\,\mathrm{d}z$ with
    $s = 1$, or $s = |A|$. Panels are halved until $R$ grows by little in each, but not
    where the integrand is negligible. The logarithm is infinite where it is itself too
    large for a number.
    """
    from scipy.special import logsumexp

    ends = interval.length * _ends(interval, np.array(beta))
    nodes, masses = gauss_legendre(NODES)
    shares = (1 + nodes) / 2

    def growth(z):
        score, radial, _ = interval.attention(beta, z)
        return np.exp(score + np.log(radial)) / (2 * interval.count)

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
        log_terms = _log_slowness(interval, beta, z, by_length)
        log_terms = log_terms + inside - left[:-1, None]
    log_total = logsumexp(log_terms, b=width / interval.length * masses)
    log_scale = np.log(interval.length) - np.log(2 * interval.count)
    return float(left[0] + log_total + log_scale)


def _log_slowness(interval: Interval, beta, z: Grid, by_length: bool) -> Grid:
    """Return the logarithm of one, or the length, over the share of another."""
    if by_length:
        score, _, length = interval.attention(beta, z)
        return score + np.log(length)
    rise, _ = interval.risen(z)
    if interval.is_softmax:
        return np.logaddexp(beta * (interval.gap - rise), np.log(interval.count - 1))
    return np.log(interval.count) - beta * (interval.start + rise)


def _ends(interval: Interval, beta: Numbers) -> Grid:
    """Return ends of panels from 0 to 1, fine where the integrand is steep."""
    even = np.linspace(0, 1, int(np.ceil(interval.length / PANEL)) + 1)
    with np.errstate(divide="ignore"):
        falls = np.minimum(np.array(FALLS) / beta[..., None], interval.rise)
    steep = np.minimum(interval.variable(falls) / interval.length, 1)
    shape = (*beta.shape, len(even))
    return np.sort(np.concatenate([np.broadcast_to(even, shape), steep], -1), -1)


class PhaseCurve(eqx.Module):
    r"""Where tokens at equal angles have clustered to a level.

    Attributes:
        depths: the depths asked for at which such a $\beta$ exists, in their order.
        betas: the $\beta$ at which the level is reached exactly there.
    """

    depths: Float[np.ndarray, " t"]
    betas: Float[np.ndarray, " t"]


def critical_beta(
    count: int,
    depth: float,
    *,
    level: float = 0.999,
    start: float = 0.0,
    kind: str = "softmax",
) -> float | None:
    r"""Return the inverse temperature at which a level is reached at a depth.

    Softmax attention has clustered by then for smaller $\beta$ and not for larger ones;
    unnormalised attention the other way round.

    Args:
        count: the number of tokens.
        depth: the depth, positive.
        level: the inner product that counts as clustered.
        start: the inner product at depth zero.
        kind: `"softmax"` or `"unnormalised"`.

    Returns:
        The $\beta \ge 0$, or `None` where there is none: softmax attention needs a
        depth of at least that at $\beta = 0$, unnormalised attention at most that.
    """
    curve = phase_curve(count, [depth], level=level, start=start, kind=kind)
    return float(curve.betas[0]) if len(curve.betas) else None


def phase_curve(
    count: int,
    depths: ArrayLike,
    *,
    level: float = 0.999,
    start: float = 0.0,
    kind: str = "softmax",
) -> PhaseCurve:
    r"""Return the boundary of the clustered phase in the plane of depth and $\beta$.

    The time to the level is a monotone function of $\beta$, and an integral; its
    inverse is found by Newton's method on the logarithm of the time, which is convex,
    for all depths at once, to rounding.

    Args:
        count: the number of tokens.
        depths: the depths, positive.
        level: the inner product that counts as clustered.
        start: the inner product at depth zero; not negative for unnormalised
            attention, whose time is not monotone in $\beta$ otherwise.
        kind: `"softmax"` or `"unnormalised"`.

    Returns:
        The curve, at those depths where it exists. Cost: milliseconds for hundreds of
        depths.
    """
    count = as_integer("count", count, least=2)
    is_softmax = checked_kind(kind) == "softmax"
    start = checked_start(count, start)
    level = checked_level(level, start)
    is_simplex = 1 + (count - 1) * start <= 0
    check(not is_simplex, f"start is {start}, a simplex, where nothing moves.")
    if start < 0 and not is_softmax:
        raise Unsupported(
            f"start is {start}; for unnormalised attention the time is not monotone in "
            "beta unless start is 0 or more, so it has no inverse: look at "
            "Equiangular(…).time_to for several beta."
        )
    times = as_doubles("depths", depths)
    check(
        times.ndim == 1 and bool(np.isfinite(times).all() and (times > 0).all()),
        f"depths is {depths}; it must be a list of finite and positive numbers.",
    )
    interval = Interval.between(count, start, level, is_softmax)
    sign, wanted = 1 if is_softmax else -1, np.log(times)
    exists = sign * (wanted - log_clustering_time(interval, np.zeros(1))[0][0]) >= 0
    return PhaseCurve(times[exists], _inverse(interval, wanted[exists], sign))


def _inverse(interval: Interval, wanted: np.ndarray, sign: int) -> np.ndarray:
    """Return the beta at which logarithms of times have these values."""
    if len(wanted) == 0:
        return wanted
    low, high = np.zeros_like(wanted), np.ones_like(wanted)
    while (
        is_short := sign * (log_clustering_time(interval, high)[0] - wanted) < 0
    ).any():
        if high.max() > np.finfo(float).max / 2:
            raise Overflow("beta is beyond all numbers; ask for less extreme depths.")
        low, high = np.where(is_short, high, low), np.where(is_short, 2 * high, high)
    # The logarithms are convex: from where they are larger Newton's steps do not turn.
    beta = high if sign > 0 else low
    for _ in range(ITERATIONS):
        value, slope = log_clustering_time(interval, beta)
        step = (wanted - value) / slope
        beta = np.maximum(beta + step, 0)
        if (np.abs(step) <= CLOSE * (1 + beta)).all():
            return beta
    raise Overflow(
        "no beta was found at which the level is reached at all depths; leave out the "
        "smallest and the largest depths."
    )


def checked_kind(kind: str) -> str:
    """Return the kind of attention, or raise."""
    check_choice("kind", kind, ("softmax", "unnormalised"))
    return kind


def checked_start(count: int, start: float) -> float:
    """Return the inner product at the start, the simplex exactly, or raise."""
    value = as_number("start", start)
    lowest = -1 / (count - 1)
    if abs(1 + (count - 1) * value) <= 4 * np.finfo(float).eps:
        return lowest
    check(
        lowest <= value <= 1,
        f"start is {start}; {count} unit vectors can have one inner product from "
        f"-1/(n-1) = {lowest:.6g} to 1.",
    )
    return value


def checked_level(level: float, start: float) -> float:
    """Return the level to reach, or raise."""
    allowed = f"above the start, {start}, and below 1"
    return as_number("level", level, allowed, above=start, below=1)
