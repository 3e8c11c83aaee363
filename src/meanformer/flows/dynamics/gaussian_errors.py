"""Errors of a Gaussian's steps, such that every eigenvalue is accurate relatively."""

from collections.abc import Callable
from typing import Any, NamedTuple

import diffrax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.flows.dynamics.stretch import Settings, largest_error
from meanformer.flows.solvers import AbstractAdaptive, RescaledErrors, StepSettings
from meanformer.numerics.arrays import matmul

ROUNDINGS = 64
# Roundings of the error that a method of high order estimates.
ESTIMATE = 1024
# Largest relative change of a point in one step: before a pole it is larger.
FARTHEST = 1.0


class Carried(NamedTuple):
    r"""The map $x \mapsto m + \Phi(x - m_0)$ that has carried a Gaussian so far.

    Attributes:
        mean: the mean $m$.
        linear: the matrix $\Phi$.
        log_volume: $\log\det\Phi$, which is right where $\Phi$ is singular to rounding.
    """

    mean: Float[Array, " d"]
    linear: Float[Array, "d d"]
    log_volume: Float[Array, ""]


class Clocked(NamedTuple):
    """The unknowns in a clock: the Gaussian, and its depth."""

    carried: Carried
    depth: Float[Array, ""]


def relative_controller(
    settings: Settings,
    jumps: Float[Array, " j"] | None,
    first_depth: Float[Array, ""],
    carried_in: Callable[[Any], Carried],
) -> diffrax.AbstractStepSizeController:
    r"""Return a controller that keeps every eigenvalue accurate relatively.

    An error $E$ of $\Phi$ is a perturbation $\Phi(I + \Phi^{-1}E)$, as if the flow had
    begun with other points. If they differ by the factor $I + \delta$ it changes every
    eigenvalue of $S$, however small, by at most the factor $(1 \pm |\delta|)^2$
    (Ostrowski). The mean is measured against its size.

    Args:
        settings: those of the solve.
        jumps: where the velocity jumps; or `None`.
        first_depth: where the Gaussian began.
        carried_in: takes the solver's unknown, returns the map in it.
    """
    integrator = settings.integrator
    zero, one = jnp.zeros_like(settings.rtol), jnp.ones_like(settings.rtol)
    if not isinstance(integrator, AbstractAdaptive):
        return integrator.controller(StepSettings(zero, one, zero, None, None))

    def rescale(end, error):
        mean, linear, log_volume = carried_in(end)
        wrong_mean, wrong_linear, wrong_volume = carried_in(error)
        # In units of the largest entry, so that nothing underflows.
        size = jnp.abs(linear).max()
        linear, wrong_linear = linear / size, wrong_linear / size
        inverse = jnp.linalg.inv(linear)
        # What rounding does to the smallest eigenvalue cannot be asked for.
        condition = jnp.linalg.norm(linear) * jnp.linalg.norm(inverse)
        rounding = ROUNDINGS * jnp.finfo(linear.dtype).eps
        rtol = settings.rtol + rounding
        noise = ESTIMATE * jnp.finfo(linear.dtype).eps * condition
        relative = matmul(inverse, wrong_linear) / (rtol + noise)
        # The largest is accurate also where the smallest is lost.
        large = wrong_linear / rtol
        allowed = settings.atol + rtol * jnp.abs(mean).max()
        errors = Carried(
            wrong_mean / allowed,
            jnp.where(jnp.isfinite(relative), jnp.hypot(relative, large), large),
            wrong_volume / (rtol * (1 + jnp.abs(log_volume))),
        )
        if isinstance(end, Clocked):
            late = jnp.abs(end.depth - first_depth)
            allowed = settings.rtol * late + rounding * jnp.abs(end.depth)
            errors = Clocked(errors, error.depth / allowed)
        return errors

    def is_too_far(start, end):
        """Whether points move so much that a pole may have been stepped over.

        As seen from where they are and from where they departed: each of the two
        norms may be large without need, where the map is far from normal.
        """
        before, after = carried_in(start).linear, carried_in(end).linear
        size = jnp.abs(before).max()
        before, after = before / size, after / size
        inverse, change = jnp.linalg.inv(before), after - before
        moved = jnp.minimum(
            _norm_bound(matmul(change, inverse)), _norm_bound(matmul(inverse, change))
        )
        condition = jnp.linalg.norm(before) * jnp.linalg.norm(inverse)
        rounding = ROUNDINGS * jnp.finfo(before.dtype).eps
        return moved > FARTHEST + rounding * condition

    steps = StepSettings(zero, one, zero, largest_error, jumps)
    return RescaledErrors(integrator.controller(steps), rescale, is_too_far)


def _norm_bound(matrix: Float[Array, "d d"]) -> Float[Array, ""]:
    """Return a bound of the largest singular value, from sums of rows and columns."""
    rows, columns = (jnp.abs(matrix).sum(axis=axis).max() for axis in (0, 1))
    return jnp.sqrt(rows * columns)
