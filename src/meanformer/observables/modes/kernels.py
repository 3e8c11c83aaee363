"""The bumps whose sum has modes: Gaussian on the line, von Mises on the circle."""

import abc

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import as_number

LogAndSlope = tuple[np.ndarray, np.ndarray]

# Tokens whose bump is smaller than the nearest by e to the minus this are left out.
_NEGLIGIBLE = 45.0


class AbstractBump(eqx.Module):
    r"""A bump $K$ with one maximum, and what is needed to count modes of its sums.

    Lengths inside a cell are in units of `unit`. With $\alpha = x - c$ the gap from the
    centre of a cell to a token, the bump at a point $c + \tau$ of the cell, relative to
    that at the centre, is $p(\tau) = K(\alpha - \tau)/K(\alpha)$.

    Attributes:
        beta: the inverse temperature.
        unit: the length of one bandwidth, or less where the series needs it.
        reach: the distance from the token beyond which the bump is convex.
        period: the length of the circle; `None` on the line.
    """

    beta: eqx.AbstractVar[float]
    unit: eqx.AbstractVar[float]
    reach: eqx.AbstractVar[float]
    period: eqx.AbstractVar[float | None]

    def wrapped(self, places: np.ndarray) -> np.ndarray:
        """Places on the first turn of a circle; on the line the places themselves."""
        if self.period is None:
            return places
        turned = np.mod(places, self.period)
        return np.where(turned == self.period, 0, turned)

    @abc.abstractmethod
    def logs(self, gaps: np.ndarray) -> np.ndarray:
        """The logarithm of the bump, zero at the token."""

    @abc.abstractmethod
    def slopes(self, gaps: np.ndarray) -> np.ndarray:
        """Its logarithmic derivative in the point, up to a common positive factor."""

    @abc.abstractmethod
    def series(self, gaps: np.ndarray, degree: int) -> np.ndarray:
        """Taylor coefficients of $p$ in units, one row for each power."""

    @abc.abstractmethod
    def majorant(self, gaps: np.ndarray, radius: np.ndarray) -> LogAndSlope:
        """Return a series that dominates that of $p$."""

    @abc.abstractmethod
    def window(self, nearest: np.ndarray, log_ratio: float) -> np.ndarray:
        """The distance beyond which tokens are negligible, from that of the nearest."""

    @abc.abstractmethod
    def rounding(self, heights: np.ndarray, radius: np.ndarray) -> np.ndarray:
        """Relative error of the derivative of bumps, in units of machine precision."""


class LineBump(AbstractBump):
    r"""$K(x) = e^{-\beta x^2/2}$, whose series is that of Hermite's polynomials."""

    beta: float = eqx.field(static=True)
    unit: float = eqx.field(static=True)
    reach: float = eqx.field(static=True)
    period: None = eqx.field(static=True)

    def __init__(self, beta: float):
        self.beta, self.period = beta, None
        # The second derivative changes its sign at one bandwidth.
        self.unit = self.reach = float(1 / np.sqrt(beta))

    def logs(self, gaps: np.ndarray) -> np.ndarray:
        r"""$-\beta x^2/2$."""
        return -0.5 * (gaps * np.sqrt(self.beta)) ** 2

    def slopes(self, gaps: np.ndarray) -> np.ndarray:
        """The gap itself."""
        return gaps

    def series(self, gaps: np.ndarray, degree: int) -> np.ndarray:
        r"""$e^{y\tau - \tau^2/2} = \sum_k \mathrm{He}_k(y)\tau^k/k!$ at the gap $y$."""
        gaps = gaps * np.sqrt(self.beta)
        rows = np.empty((degree + 1, len(gaps)))
        rows[0], rows[1] = 1, gaps
        for k in range(1, degree):
            rows[k + 1] = (gaps * rows[k] - rows[k - 1]) / (k + 1)
        return rows

    def majorant(self, gaps: np.ndarray, radius: np.ndarray) -> LogAndSlope:
        r"""$e^{|y|\tau + \tau^2/2}$."""
        sizes = np.abs(gaps) * np.sqrt(self.beta)
        return sizes * radius + radius**2 / 2, sizes + radius

    def window(self, nearest: np.ndarray, log_ratio: float) -> np.ndarray:
        """Squares of distances differ by twice the exponent allowed."""
        depth = np.sqrt(2 * (_NEGLIGIBLE + log_ratio))
        return self.unit * (1 + np.hypot(nearest / self.unit, depth))

    def rounding(self, heights: np.ndarray, radius: np.ndarray) -> np.ndarray:
        """A few roundings of the logarithm, relative to its size."""
        return -10 * heights


class CircleBump(AbstractBump):
    r"""$K(x) = e^{\beta(\cos x - 1)}$, with a series from its differential equation."""

    beta: float = eqx.field(static=True)
    unit: float = eqx.field(static=True)
    reach: float = eqx.field(static=True)
    period: float = eqx.field(static=True)

    def __init__(self, beta: float):
        self.beta, self.period = beta, 2 * np.pi
        # The bandwidth at large inverse temperature; short against the circle.
        self.unit = float(0.7 / np.sqrt(beta + 20))
        self.reach = convex_angle(beta)

    def logs(self, gaps: np.ndarray) -> np.ndarray:
        r"""$\beta(\cos x - 1)$, without loss of digits near the token."""
        return -2 * self.beta * np.sin(gaps / 2) ** 2

    def slopes(self, gaps: np.ndarray) -> np.ndarray:
        """The sine of the gap."""
        return np.sin(gaps)

    def series(self, gaps: np.ndarray, degree: int) -> np.ndarray:
        r"""From $p' = sp$ with $s(\tau) = \beta\ell\sin(\alpha - \ell\tau)$."""
        speed, rows = np.empty((2, degree + 1, len(gaps)))
        unit, rows[0] = self.unit, 1
        speed[0] = self.beta * unit * np.sin(gaps)
        speed[1] = -self.beta * unit**2 * np.cos(gaps)
        for k in range(degree - 1):
            speed[k + 2] = -(unit**2) * speed[k] / ((k + 1) * (k + 2))
        for k in range(degree):
            product = np.einsum("ki,ki->i", speed[: k + 1], rows[k::-1])
            rows[k + 1] = product / (k + 1)
        return rows

    def majorant(self, gaps: np.ndarray, radius: np.ndarray) -> LogAndSlope:
        r"""The same with every coefficient of the exponent replaced by its size."""
        across, along = np.abs(np.sin(gaps)), np.abs(np.cos(gaps))
        sinh, cosh = np.sinh(self.unit * radius), np.cosh(self.unit * radius)
        log = self.beta * (across * sinh + along * (cosh - 1))
        return log, self.beta * self.unit * (across * cosh + along * sinh)

    def window(self, nearest: np.ndarray, log_ratio: float) -> np.ndarray:
        """Squared chords differ by the exponent allowed, up to half the circle."""
        depth = _NEGLIGIBLE + log_ratio + 0.5 * float(np.log1p(self.beta))
        squares = np.sin(nearest / 2) ** 2 + depth / (2 * self.beta)
        angle = 2 * np.arcsin(np.sqrt(np.minimum(squares, 1)))
        return np.minimum(self.unit + angle, np.pi)

    def rounding(self, heights: np.ndarray, radius: np.ndarray) -> np.ndarray:
        r"""As on the line, and that of angles, which have an absolute error.

        It moves the logarithm by its multiple with $\beta|\sin x| \le
        \sqrt{-2\beta\log K}$, and the slope as moving along the cell does.
        """
        moves = np.sqrt(-2 * self.beta * heights) + 1 / (self.unit * radius)
        return 13 * moves - 10 * heights


def checked_beta(beta: float | Float[Array, ""]) -> float:
    """The inverse temperature as a positive number, or raise."""
    allowed = "positive and finite: without a bandwidth there are no modes"
    return as_number("beta", beta, allowed, above=0, below=np.inf)


def convex_angle(beta: float | Float[Array, ""]) -> float:
    r"""The angle beyond which a bump on the circle is convex.

    The root of $\beta\sin^2 a = \cos a$: two equal tokens at the angles $\pm a$ have
    one mode up to it and two beyond.

    Args:
        beta: inverse temperature, positive.

    Returns:
        The angle, below a quarter of the circle.
    """
    beta = checked_beta(beta)
    cosine = 2 * beta / (1 + np.hypot(1, 2 * beta))
    return float(np.arctan2(np.sqrt(cosine / beta), cosine))
