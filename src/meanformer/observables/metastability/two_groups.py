"""Two groups of tokens on a great circle: how they close in, how long they wait."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import AbstractInContextMap
from meanformer.errors import (
    InvalidInput,
    Overflow,
    as_float_array,
    as_number,
    check,
    is_concrete,
)
from meanformer.observables.metastability.attraction import (
    Attraction,
    attraction_of,
    first_share,
    pull,
)
from meanformer.observables.metastability.two_group_integrals import (
    first_way,
    log_dwell_integral,
    relative_pulls,
)
from meanformer.typing import ArrayLike

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

    attraction: Attraction = eqx.field(static=True)
    masses: tuple[float, float] = eqx.field(static=True)

    def __init__(
        self,
        layer: AbstractInContextMap,
        masses: tuple[float, float] | ArrayLike = (0.5, 0.5),
    ):
        self.attraction = attraction_of(layer, "laws of two groups", with_flat=True)
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
        start, end = self._way(start, end)
        attraction = self.attraction
        integral = log_dwell_integral(
            attraction.beta, self.masses, start, end, is_softmax=attraction.is_softmax
        )
        return integral + self._log_unit(start)

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
        total = sum(
            float(pull(self.attraction.is_softmax, *pair))
            for pair in (self.masses, self.masses[::-1])
        )
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
        end = as_number("end", end)
        check(0 <= end <= start, f"end is {end}; it must be between 0 and {start}.")
        if self.attraction.is_softmax:
            return first_way(self.attraction.beta, self.masses, start, end)
        return first_share(False, *self.masses) * (start - end)

    def limit_meeting_point(self, start: float) -> float:
        r"""Return how far the first group goes as $\beta \to \infty$.

        $\varphi_0m_2^2/(m_1^2+m_2^2)$ for softmax, from which finite $\beta$ differs by
        $O(\beta^{-1/2})$, and $\varphi_0m_2/(m_1+m_2)$ for unnormalised attention.
        """
        start = _checked_angle("start", start)
        return first_share(self.attraction.is_softmax, *self.masses) * start

    def _velocities(self, angle: Float[Array, "*s"], slowing: float):
        r"""Return the speeds, slowed down by $e^{-b(1-\cos\varphi)}$ with this $b$."""
        attraction, (first, second) = self.attraction, self.masses
        rise = 2 * jnp.sin(angle / 2) ** 2
        log_scale = -slowing * rise
        if attraction.is_softmax:
            pulls = relative_pulls(jnp.exp(-attraction.beta * rise), self.masses)
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

    def _way(self, start: float, end: float) -> tuple[float, float]:
        start, end = _checked_angle("start", start), _checked_angle("end", end)
        check(end < start, f"end is {end}; it must be below the start, {start}.")
        return start, end


def _check_speed(log_scale: Float[Array, "*s"]) -> None:
    if not is_concrete(log_scale):
        return
    largest = float(jnp.max(log_scale, initial=-jnp.inf))
    if largest > float(jnp.log(jnp.finfo(log_scale.dtype).max)) - 1:
        raise Overflow(
            f"the speed is about exp({largest:.6g}), beyond all numbers; give "
            "Unnormalised the shift beta."
        )


def _checked_masses(masses) -> tuple[float, float]:
    if np.shape(masses) != (2,):
        raise InvalidInput(f"masses is {masses!r}; it must be two positive numbers.")
    first, second = (as_number("each of masses", mass) for mass in masses)
    check(
        0 < first < np.inf and 0 < second < np.inf,
        f"masses are {first} and {second}; both must be positive and finite.",
    )
    return first, second


def _checked_angles(angle: ArrayLike) -> Float[Array, "*s"]:
    angles = as_float_array("angle", angle)
    if not is_concrete(angles):
        return angles
    known = np.asarray(angles)
    allowed = (known >= 0) & (known <= np.asarray(np.pi, known.dtype))
    if not allowed.all():
        raise InvalidInput(
            f"angle holds {float(known[~allowed].flat[0])}; it must be from 0 to pi."
        )
    return angles


def _checked_angle(name: str, angle: float) -> float:
    value = as_number(name, angle)
    check(
        0 < value < np.pi,
        f"{name} is {value}; it must be an angle above 0 and below pi: groups at one "
        "point or at opposite ones do not move.",
    )
    return value
