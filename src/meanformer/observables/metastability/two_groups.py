"""Two groups of tokens on a great circle: how they close in, how long they wait."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import AbstractInContextMap
from meanformer.errors import Overflow, as_float_array, as_number, check, is_concrete
from meanformer.numerics.special.quadrature import gauss_panels
from meanformer.observables.metastability import attraction as attracting
from meanformer.typing import ArrayLike

# With u = log tan(phi / 2) one has du = dphi / sin(phi) and cos(phi) = -tanh(u): the
# time is the integral over u of a function that is analytic up to a distance of pi / 4
# from the real line, whatever beta and the masses. Gauss rules on short panels, finer
# where the exponential is steep, converge to rounding. All is computed by numpy in
# float64, whatever JAX is set to.
NODES = 20
PANEL = 1.0
# Where an exponential has fallen by e to these powers.
FALLS = (1.0, 3.0, 6.0, 10.0, 16.0, 24.0, 40.0, 80.0)
# An exponential flatter than this does not fall at all.
FLATTEST = 1e-30

Grid = Float[np.ndarray, "*s"] | Float[Array, "*s"]
Masses = tuple[float, float]

LARGEST_LOG = float(np.log(np.finfo(np.float64).max))


class TwoGroups(eqx.Module):
    r"""Two groups of masses $m_1, m_2$ on the sphere, each at one point.

    They move towards each other on their great circle, and the angle $\varphi$ between
    them obeys an equation of its own: with scores $\beta\langle x, y\rangle$ and values
    $cx$
    $$\dot\varphi = -c\Bigl[\frac{m_2e^{\beta\cos\varphi}}{m_1e^\beta
      + m_2e^{\beta\cos\varphi}} + \frac{m_1e^{\beta\cos\varphi}}{m_2e^\beta
      + m_1e^{\beta\cos\varphi}}\Bigr]\sin\varphi$$
    for softmax, and $\dot\varphi = -c\,(m_1+m_2)\,e^{\beta\cos\varphi-s}\sin\varphi$
    for unnormalised attention of shift $s$. Exact, in every dimension; that groups wait
    for a time exponential in $\beta$ is proved for many tokens as well [GKPR24].

    Args:
        layer: `Softmax` or `Unnormalised` with scores and values that are positive
            multiples of inner products and tokens; $\beta = 0$ is allowed.
        masses: the two masses, positive; equal halves by default.
    """

    attraction: attracting.Attraction = eqx.field(static=True)
    masses: Masses = eqx.field(static=True)

    def __init__(
        self, layer: AbstractInContextMap, masses: Masses | ArrayLike = (0.5, 0.5)
    ):
        self.attraction = attracting.attraction_of(
            layer, "laws of two groups", with_flat=True
        )
        self.masses = _checked_masses(masses)

    def velocity(self, angle: ArrayLike) -> Float[Array, "*s"]:
        r"""Return $\dot\varphi$, which is never positive, at angles from 0 to $\pi$."""
        return -self.velocities(angle).sum(axis=-1)

    def velocities(self, angle: ArrayLike) -> Float[Array, "*s 2"]:
        r"""Return the speed of each group towards the other, angles from 0 to $\pi$."""
        return self._velocities(_checked_angles(angle), self.attraction.beta)

    def exponential_velocities(self, angle: ArrayLike) -> Float[Array, "*s 2"]:
        r"""Return these speeds in a clock in which they are of ordinary size.

        It is $\mathrm{d}t = e^{\beta(1-\cos\varphi)}\,\mathrm{d}s$. As
        $\beta \to \infty$ they tend to $c\sin\varphi$ times $m_2/m_1$ and $m_1/m_2$
        for softmax: the lighter group does the moving.
        """
        return self._velocities(_checked_angles(angle), 0.0)

    def log_dwell_time(self, start: float, end: float) -> float:
        r"""Return the logarithm of the time from one angle to a smaller one.

        An integral in logarithms, to rounding for every $\beta$.

        Args:
            start: the angle at the beginning, below $\pi$, where the groups balance.
            end: the angle at the end, above 0, which takes for ever.
        """
        start, end = _checked_angle("start", start), _checked_angle("end", end)
        check(end < start, f"end is {end}; it must be below the start, {start}.")
        is_softmax, beta, *_ = self.attraction
        return self._log_unit(start) + _log_dwell_integral(
            beta, self.masses, start, end, is_softmax=is_softmax
        )

    def dwell_time(self, start: float, end: float) -> float:
        """Return the time from one angle to a smaller one; see `log_dwell_time`."""
        log_time = self.log_dwell_time(start, end)
        if log_time > LARGEST_LOG:
            raise Overflow(
                f"the dwell time is exp({log_time:.6g}), beyond all numbers; use "
                "log_dwell_time."
            )
        return float(np.exp(log_time))

    def asymptotic_log_dwell_time(self, start: float) -> float:
        r"""Return the logarithm of the leading term of the dwell time, large $\beta$.

        $$T \sim \frac{m_1m_2}{m_1^2+m_2^2}\,
          \frac{e^{\beta(1-\cos\varphi_0)}}{c\,\beta\sin^2\varphi_0}$$
        for softmax, $e^{s-\beta\cos\varphi_0}/(c\,(m_1+m_2)\beta\sin^2\varphi_0)$ for
        unnormalised attention, whatever the end; by Laplace's method at the start.
        """
        start = _checked_angle("start", start)
        check(
            self.attraction.beta > 0,
            "beta is 0; the leading term is for large beta: take log_dwell_time.",
        )
        masses = np.array(self.masses)
        total = attracting.pull(self.attraction.is_softmax, masses, masses[::-1]).sum()
        slope = self.attraction.beta * np.sin(start) ** 2
        return float(self._log_unit(start) - np.log(slope * total))

    def meeting_point(self, start: float, end: float = 0.0) -> float:
        r"""Return how far the first group has gone when the angle has closed.

        For softmax the integral of its share of the closing speed, for unnormalised
        attention the barycentre.

        Args:
            start: the angle at the beginning.
            end: the angle at the end; zero where they meet.
        """
        start = _checked_angle("start", start)
        end = as_number("end", end, f"between 0 and {start}", least=0)
        check(end <= start, f"end is {end}; it must be between 0 and {start}.")
        if self.attraction.is_softmax:
            return _first_way(self.attraction.beta, self.masses, start, end)
        return attracting.first_share(False, *self.masses) * (start - end)

    def limit_meeting_point(self, start: float) -> float:
        r"""Return how far the first group goes as $\beta \to \infty$.

        $\varphi_0m_2^2/(m_1^2+m_2^2)$ for softmax, from which finite $\beta$ differs by
        $O(\beta^{-1/2})$, and $\varphi_0m_2/(m_1+m_2)$ for unnormalised attention.
        """
        start = _checked_angle("start", start)
        return attracting.first_share(self.attraction.is_softmax, *self.masses) * start

    def _velocities(self, angle: Float[Array, "*s"], slowing: float):
        r"""Return the speeds, slowed down by $e^{-b(1-\cos\varphi)}$ with this $b$."""
        attraction, (first, second) = self.attraction, self.masses
        rise = 2 * jnp.sin(angle / 2) ** 2
        log_scale = -slowing * rise
        if attraction.is_softmax:
            pulls = _relative_pulls(jnp.exp(-attraction.beta * rise), self.masses)
        else:
            pulls = second, first
            log_scale = log_scale + (attraction.beta - attraction.shift)
        _check_speed(log_scale)
        scale = attraction.speed * jnp.exp(log_scale) * jnp.sin(angle)
        return jnp.stack([scale * pull for pull in pulls], axis=-1)

    def _log_unit(self, start: float) -> float:
        """Return the logarithm of the time over the integral from this start."""
        attraction = self.attraction
        log_speed = float(np.log(attraction.speed))
        if attraction.is_softmax:
            return 2 * attraction.beta * np.sin(start / 2) ** 2 - log_speed
        return attraction.shift - attraction.beta * np.cos(start) - log_speed


def _check_speed(log_scale: Float[Array, "*s"]) -> None:
    if not is_concrete(log_scale):
        return
    largest = float(jnp.max(log_scale, initial=-jnp.inf))
    if largest > float(jnp.log(jnp.finfo(log_scale.dtype).max)) - 1:
        raise Overflow(
            f"the speed is about exp({largest:.6g}), beyond all numbers; give "
            "Unnormalised the shift beta."
        )


def _checked_masses(masses) -> Masses:
    check(
        np.shape(masses) == (2,),
        f"masses is {masses!r}; it must be two positive numbers.",
    )
    allowed = "positive and finite"
    first, second = (
        as_number("each of masses", mass, allowed, above=0, below=np.inf)
        for mass in masses
    )
    return first, second


def _checked_angles(angle: ArrayLike) -> Float[Array, "*s"]:
    angles = as_float_array("angle", angle)
    if is_concrete(angles):
        known = np.asarray(angles)
        wrong = known[~((known >= 0) & (known <= np.asarray(np.pi, known.dtype)))]
        first = float(wrong.flat[0]) if wrong.size else None
        check(first is None, f"angle holds {first}; it must be from 0 to pi.")
    return angles


def _checked_angle(name: str, angle: float) -> float:
    allowed = (
        "an angle above 0 and below pi: groups at one point or at opposite ones do not "
        "move"
    )
    return as_number(name, angle, allowed, above=0, below=np.pi)


def _log_dwell_integral(
    beta: float, masses: Masses, start: float, end: float, *, is_softmax: bool
) -> float:
    r"""Logarithm of the time from one angle to a smaller one, over $e^{-\beta\cos}$.

    $$\log\int_{\varphi_1}^{\varphi_0} \frac{e^{\beta(\cos\varphi_0-\cos\varphi)}}
      {f(\varphi)\sin\varphi}\,\mathrm{d}\varphi,$$
    where $f$ is the sum of `_relative_pulls`, or of the masses if attention
    is not normalised.
    """
    first, last = ends = np.log(np.tan(np.array([end, start]) / 2))
    foot, height = _rise(ends)
    steepness = max(2 * beta, FLATTEST)
    falls = height - np.minimum(np.array(FALLS) / steepness, height - foot)
    # Rounding may put the end of a fall outside of the way.
    below, least = 1 - np.finfo(float).eps, np.finfo(float).tiny
    falls = np.clip(falls, least, below)
    steep = np.clip(np.log(falls / (1 - falls)) / 2, first, last)
    even = np.linspace(first, last, int(np.ceil((last - first) / PANEL)) + 1)
    u, weights = gauss_panels(np.sort(np.concatenate([even, steep])), NODES)
    rises = _rise(u)
    logs = 2 * beta * (rises - height)
    if is_softmax:
        fall = np.exp(-2 * beta * rises)
        logs = logs - np.log(sum(_relative_pulls(fall, masses)))
    else:
        logs = logs - np.log(sum(masses))
    largest = logs.max()
    return float(largest + np.log(weights @ np.exp(logs - largest)))


def _first_way(beta: float, masses: Masses, start: float, end: float) -> float:
    r"""How far the first group goes under softmax, the angle closing from start to end.

    $$\int_{\varphi_1}^{\varphi_0} \frac{p_1}{p_1+p_2}\,\mathrm{d}\varphi,$$
    with the pulls $p_1, p_2$ of `_relative_pulls`.
    """
    scale = 1 / np.sqrt(max(beta, FLATTEST))
    near = np.clip(scale * np.arange(1, 13), end, start)
    even = np.linspace(end, start, int(np.ceil((start - end) / PANEL)) + 1)
    angles, weights = gauss_panels(np.sort(np.concatenate([even, near])), NODES)
    first, second = _relative_pulls(np.exp(-2 * beta * np.sin(angles / 2) ** 2), masses)
    return float(weights @ (first / (first + second)))


def _relative_pulls(fall: Grid, masses: Masses) -> tuple[Grid, Grid]:
    r"""What each group feels of the other under softmax, over $e^{\beta(\cos-1)}$.

    With $f = e^{\beta(\cos\varphi-1)}$: $m_2/(m_1+m_2f)$ and $m_1/(m_2+m_1f)$.
    """
    first, second = masses
    return second / (first + second * fall), first / (second + first * fall)


def _rise(u: np.ndarray) -> np.ndarray:
    r"""Return $\sin^2(\varphi/2)$ where $\tan(\varphi/2) = e^u$, to rounding."""
    small = np.exp(-2 * np.abs(u))
    return np.where(u > 0, 1, small) / (1 + small)
