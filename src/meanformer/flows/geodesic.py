"""Steps for noise on the sphere that go along great circles."""

from collections.abc import Callable
from typing import Any, ClassVar

import diffrax
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.errors import check
from meanformer.geometry import AbstractSpace, Sphere
from meanformer.numerics.arrays import safe_norm, unit_rows


class GeodesicStep(diffrax.AbstractStratonovichSolver):
    r"""Noise along great circles before and after a step of the drift, for the sphere.

    Half of the noise, the drift by one step of Heun's method, the other half of the
    noise. A tangent increment $v$ of the Brownian motion moves a token along its great
    circle, by the angle
    $$\varphi(r) = \frac{r}{1 + \frac{d-2}{12(d+1)}\,r^2}, \qquad r = |v|.$$
    With the angle $r$ itself a step would differ from the heat flow by
    $\tfrac{d-2}{12}\sigma^4h^2\Delta + O(h^3)$, from the curvature of the sphere; this
    cancels it in all harmonics. So the weak order is two, and on the circle the noise
    is exact. The default for flows with noise, Heun's method with retraction, has weak
    order one, with an error about ten times that of uncorrected great circles. The
    strong order of both is one half in general: the fields of the noise do not commute.
    Derived and measured here.

    Use it as `FixedStep(h, method=GeodesicStep())`, for flows on `Sphere()` with noise.
    """

    term_structure: ClassVar = diffrax.MultiTerm
    interpolation_cls: ClassVar[Callable] = diffrax.LocalLinearInterpolation

    def order(self, terms) -> int:
        """Return the order of the drift: two."""
        return 2

    def strong_order(self, terms) -> float:
        """Return one half."""
        return 0.5

    def init(self, terms, t0, t1, y0, args) -> None:
        """Return no state."""
        return

    def step(self, terms, t0, t1, y0, args, solver_state, made_jump):
        """Advance by half the noise, the drift, half the noise."""
        drift, noise = terms.terms
        middle = t0 + (t1 - t0) / 2
        y = _walked(noise, t0, middle, y0, args)
        y = _drifted(drift, t0, t1, y, args)
        y1 = _walked(noise, middle, t1, y, args)
        return y1, None, {"y0": y0, "y1": y1}, None, diffrax.RESULTS.successful

    def func(self, terms, t0, y0, args):
        """Return the drift."""
        return terms.terms[0].vf(t0, y0, args)


def check_geodesic(space: AbstractSpace, is_noisy: bool) -> None:
    """Raise if great circles are asked for where there are none, or no noise."""
    check(
        isinstance(space, Sphere) and is_noisy,
        "GeodesicStep is for flows on Sphere() with noise; leave method out.",
    )


def _drifted(term, t0, t1, y, args) -> Any:
    """Make one step of Heun's method, and retract."""
    control = term.contr(t0, t1)
    first = term.vf_prod(t0, y, args, control)
    second = term.vf_prod(t1, _sum(y, first), args, control)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, first, second)
    return jax.tree.map(unit_rows, _sum(y, mean))


def _walked(term, t0, t1, y, args) -> Any:
    """Let the Brownian motion of a time act along great circles."""
    increment = term.vf_prod(t0, y, args, term.contr(t0, t1))
    return jax.tree.map(along_great_circles, y, increment)


def _sum(y, change) -> Any:
    return jax.tree.map(lambda a, b: a + b, y, change)


def along_great_circles(
    points: Float[Array, "m d"], increments: Float[Array, "m d"]
) -> Float[Array, "m d"]:
    r"""Move points of the sphere along tangent increments of a Brownian motion.

    Args:
        points: unit vectors.
        increments: tangent vectors $v$; a point goes by the angle $\varphi(|v|)$ of
            `GeodesicStep`.

    Returns:
        Unit vectors again.
    """
    dimension = points.shape[1]
    lengths = safe_norm(increments)[:, None]
    angles = lengths / (1 + (dimension - 2) / (12 * (dimension + 1)) * lengths**2)
    is_moved = lengths > 0
    directions = increments / jnp.where(is_moved, lengths, 1)
    return unit_rows(jnp.cos(angles) * points + jnp.sin(angles) * directions)
