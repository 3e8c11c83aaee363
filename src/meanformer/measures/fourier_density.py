"""Densities on the circle, by their Fourier coefficients."""

import functools
from collections.abc import Callable
from typing import SupportsIndex

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax
from jaxtyping import Array, Complex, Float

from meanformer.errors import (
    InvalidInput,
    Unsupported,
    as_finite_array,
    as_float_array,
    as_integer,
    as_key,
    check,
    check_kind,
    is_concrete,
)
from meanformer.geometry import Sphere
from meanformer.geometry.circle import on_circle
from meanformer.measures.abstract import AbstractContext, AbstractMeasure, FeatureMap
from meanformer.measures.cloud import TokenCloud
from meanformer.numerics.special import trigonometric
from meanformer.numerics.special.bessel import moderated, sphere_functions
from meanformer.typing import ArrayLike, Key, MassAndMean

# How far below zero a density may be, in units of its largest value.
NEGATIVE = 1e-6
MASS_TOLERANCE = 1e-8
REFINEMENTS = 4


class FourierDensity(AbstractMeasure):
    r"""A probability density on the unit circle of the plane, by its moments.

    $$\varrho(\theta) = \frac{1}{2\pi}\Bigl(1 + 2\sum_{k=1}^{K} a_k\cos k\theta
      + b_k\sin k\theta\Bigr), \qquad a_k = \int\cos k\theta\,\mathrm{d}\mu, \quad
      b_k = \int\sin k\theta\,\mathrm{d}\mu.$$
    Its mass is one by construction. With $u = re^{i\varphi}$ and
    $c_k = a_k - ib_k = \overline{c_{-k}}$,
    $$\Lambda(u) = \log\sum_{|k|\le K} I_k(r)\,c_k\,e^{ik\varphi},$$
    so that attention to it is a sum over modes, without nodes. The sum is right up to
    the rounding of $I_0(r)$: where nothing is near the tilt it has fewer digits, as has
    the density itself. Then the mean is kept in the disc, where it must lie.

    Args:
        moments: one row $(a_k, b_k)$ for each $k = 1, \dots, K$; zeros are the uniform
            measure.
    """

    moments: Float[Array, "k 2"]

    def __init__(self, moments: ArrayLike):
        moments = as_finite_array("moments", moments, (None, 2))
        check(len(moments) > 0, "moments has no row; give at least the first moment.")
        self.moments = moments
        if is_concrete(moments):
            self._check_positive()

    @classmethod
    def from_function(
        cls,
        density: Callable[[Float[Array, " n"]], Float[Array, " n"]],
        modes: SupportsIndex = 64,
        *,
        normalize: bool = False,
    ) -> "FourierDensity":
        r"""Take the moments of a smooth density, given as a function of the angle.

        Args:
            density: takes angles in $[0, 2\pi)$, returns values, or one for all.
            modes: how many moments to keep; the function is sampled at four angles for
                each, and what is beyond is left out.
            normalize: divide by the mass; otherwise it must be one.
        """
        modes = as_integer("modes", modes, least=1)
        check_kind("density", density, Callable, "a function of angles")
        count = 4 * modes + 4
        angles = trigonometric.grid_angles(count, jnp.result_type(float))
        values = as_float_array("density", density(angles))
        values = jnp.broadcast_to(values, (count,)) if values.ndim == 0 else values
        values = as_finite_array("density", values, (count,))
        if is_concrete(values):
            lowest = float(values.min())
            check(
                lowest >= -NEGATIVE * float(values.max()),
                f"the function is {lowest:.3g} at one of the angles; a density is "
                "nowhere negative.",
            )
        series = trigonometric.from_grid(values, modes)
        mass = series[0].real
        if is_concrete(mass):
            slack = max(MASS_TOLERANCE, 100 * float(jnp.finfo(values.dtype).eps))
            check(
                normalize or abs(float(mass) - 1) <= slack,
                f"the density has mass {float(mass):.10g}; it must be 1, or pass "
                "normalize=True.",
            )
            check(float(mass) > 0, "the density has no positive mass.")
        return cls(trigonometric.moments_of(series[1:]) / mass)

    @property
    def dimension(self) -> int:
        """Two: the circle lies in the plane."""
        return 2

    @property
    def modes(self) -> int:
        """The number $K$ of moments."""
        return len(self.moments)

    @property
    def coefficients(self) -> Complex[Array, " k"]:
        r"""The coefficients $c_1, \dots, c_K$."""
        return trigonometric.coefficients_of(self.moments)

    def density(self, angles: ArrayLike) -> Float[Array, " m"]:
        """Return the density at any angles; $O(mK)$ time and memory."""
        angles = as_finite_array("angles", angles, (None,))
        return trigonometric.at_angles(self.moments, angles.astype(self.moments.dtype))

    def on_grid(self, count: SupportsIndex) -> Float[Array, " n"]:
        """Return the density at equispaced angles, from zero on, by a fast transform.

        Args:
            count: how many angles, more than twice the number of modes.
        """
        count = as_integer("count", count, least=2 * self.modes + 1)
        return trigonometric.on_grid(self.moments, count)

    def resized(self, modes: SupportsIndex) -> "FourierDensity":
        """Return the same with more moments, zeros, or with fewer of them.

        With too few the series is negative somewhere; a solve refuses it then.
        """
        modes = as_integer("modes", modes, least=1)
        added = max(modes - self.modes, 0)
        moments = jnp.pad(self.moments[:modes], ((0, added), (0, 0)))
        return eqx.tree_at(lambda density: density.moments, self, moments)

    def tail(self) -> Float[Array, ""]:
        """Return the largest coefficient in the last third; large if modes lack."""
        sizes = jnp.hypot(self.moments[:, 0], self.moments[:, 1])
        return jnp.max(sizes[-max(self.modes // 3, 1) :])

    def mean(self) -> Float[Array, " d"]:
        """Return the first moment."""
        return self.moments[0]

    def covariance(self) -> Float[Array, "d d"]:
        """Return the covariance, from the first two moments."""
        return self.second_moment() - jnp.outer(self.mean(), self.mean())

    def second_moment(self) -> Float[Array, "d d"]:
        r"""Return $\tfrac12 I$ and the second moment of the angle around it."""
        cosine, sine = self.resized(2).moments[1]
        rows = jnp.stack([1 + cosine, sine, sine, 1 - cosine])
        return rows.reshape(2, 2) / 2

    def diameter(self) -> Float[Array, ""]:
        """Return two: a trigonometric polynomial lives on the whole circle."""
        return jnp.full((), 2, self.moments.dtype)

    def tilted_mass_and_mean(self, u: Float[Array, "m d"]) -> MassAndMean:
        """Return both by sums over the modes, $O(mK)$ time and memory."""
        u = as_finite_array("u", u, (None, 2))
        return _tilted(self.moments, u, None)

    def sample(self, count: int, *, key: Key) -> Float[Array, "count d"]:
        r"""Draw angles by inversion of the distribution function, to rounding."""
        count, key = as_integer("count", count, least=0), as_key(key)
        dtype = self.moments.dtype
        shares = jr.uniform(key, (count,), dtype)
        angles = trigonometric.grid_angles(8 * self.modes + 8, dtype)
        table = trigonometric.share_below(self.moments, angles)
        found = jnp.interp(shares, jnp.append(table, 1), jnp.append(angles, 2 * np.pi))
        for _ in range(REFINEMENTS):
            missing = shares - trigonometric.share_below(self.moments, found)
            slope = trigonometric.at_angles(self.moments, found)
            width = angles[1] - angles[0]
            step = missing / jnp.where(slope > 0, slope, jnp.inf)
            found = found + jnp.clip(step, -width, width)
        return on_circle(found)

    def _check_positive(self) -> None:
        values = np.asarray(trigonometric.on_grid(self.moments, 4 * self.modes + 4))
        lowest, highest = float(values.min()), float(values.max())
        slack = max(NEGATIVE, 100 * float(jnp.finfo(self.moments.dtype).eps))
        if lowest < -slack * highest:
            angle = 2 * np.pi * values.argmin() / len(values)
            raise InvalidInput(
                f"these moments belong to no density: it would be {lowest:.3g} at the "
                f"angle {angle:.4g}; give more moments, or other ones."
            )


class RingOfTilts(AbstractContext):
    """A density asked by queries at equispaced angles, whose tilts have one length.

    Every question is answered as by the density, but by fast transforms.

    Args:
        density: the density.
        count: the number of queries.
    """

    on_circle: FourierDensity
    count: int = eqx.field(static=True)

    @property
    def dimension(self) -> int:
        """Two."""
        return 2

    def tilted_mass_and_mean(self, u: Float[Array, "m d"]) -> MassAndMean:
        """Return both, from the first tilt alone."""
        if len(u) != self.count:
            raise Unsupported(f"the ring has {self.count} tilts, not {len(u)}.")
        return _tilted(self.on_circle.moments, u, self.count)

    def linear_mean(
        self, u: Float[Array, "m k"], feature_map: FeatureMap | None = None
    ) -> MassAndMean:
        """Return what the density returns."""
        return self.on_circle.linear_mean(u, feature_map)


def circle_moments(mu: AbstractMeasure, modes: SupportsIndex) -> Float[Array, "k 2"]:
    r"""Return $(\int\cos k\theta\,\mathrm{d}\mu, \int\sin k\theta\,\mathrm{d}\mu)$.

    Args:
        mu: a `FourierDensity`, or a token cloud on the unit circle of the plane;
            tokens elsewhere are refused.
        modes: how many, $k = 1, \dots, K$.

    Returns:
        One row for each $k$; $O(nK)$ time and memory for a cloud.
    """
    modes = as_integer("modes", modes, least=1)
    if isinstance(mu, FourierDensity):
        return mu.resized(modes).moments
    if not isinstance(mu, TokenCloud) or mu.dimension != 2:
        raise Unsupported(
            f"mu is {type(mu).__name__}; moments on the circle are those of a "
            "FourierDensity or of a TokenCloud in the plane."
        )
    # An absent token may be anywhere.
    somewhere = jnp.zeros_like(mu.points).at[:, 0].set(1)
    points = jnp.where(mu.weights[:, None] > 0, mu.points, somewhere)
    Sphere().check(points)
    angles = jnp.arctan2(points[:, 1], points[:, 0])
    turns = angles[None, :] * jnp.arange(1, modes + 1, dtype=angles.dtype)[:, None]
    return jnp.stack([jnp.cos(turns) @ mu.weights, jnp.sin(turns) @ mu.weights], 1)


@functools.partial(jax.jit, static_argnums=2)
def _tilted(
    moments: Float[Array, "k 2"], u: Float[Array, "m 2"], ring: int | None
) -> tuple[Float[Array, " m"], Float[Array, "m 2"]]:
    """Return log-mass and mean, of tilts on a ring of so many or of any tilts."""
    moderate = moderated(u)
    tilts = lax.complex(moderate[:, 0], moderate[:, 1])
    moments = moments.astype(u.dtype)
    if ring is None:
        sums = trigonometric.tilt_sums(moments, tilts)
    else:
        sums = trigonometric.ring_tilt_sums(moments, tilts[0], ring)
    # Rounding may have spoiled the sums.
    square = jnp.sum(moderate**2, axis=1)
    rounding = jnp.finfo(u.dtype).eps
    mass = jnp.maximum(sums.mass, rounding)
    log_mass = sphere_functions(2, square)[0] + jnp.log(mass)
    mean = jnp.stack([sums.moment.real, sums.moment.imag], axis=1) / mass[:, None]
    length = jnp.sqrt(jnp.maximum(jnp.sum(mean**2, axis=1), 1))
    mean = mean / length[:, None]
    beyond = jnp.sum((u - moderate) * lax.stop_gradient(mean), axis=1)
    return log_mass + beyond, mean
