"""How a flow is integrated: adaptive, stiff, fixed steps, splitting."""

import abc

import diffrax
import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.errors import check
from meanformer.flows.methods import RK4, SplitStep


class AbstractIntegrator(eqx.Module):
    """A method together with its choice of steps."""

    @abc.abstractmethod
    def method_for(self, is_noisy: bool) -> diffrax.AbstractSolver:
        """Return the single-step method."""

    @abc.abstractmethod
    def controller(
        self, settings: "StepSettings"
    ) -> diffrax.AbstractStepSizeController:
        """Return what chooses the steps."""

    @abc.abstractmethod
    def first_step(
        self, start: Float[Array, ""], end: Float[Array, ""]
    ) -> Float[Array, ""] | None:
        """Return the first step of a stretch; `None` lets the controller choose."""

    @abc.abstractmethod
    def prepared(self, dtype: jnp.dtype) -> "AbstractIntegrator":
        """Return the same with numbers as arrays: one compilation serves them all."""


class StepSettings(eqx.Module):
    """What an adaptive choice of steps goes by."""

    rtol: float | Float[Array, ""]
    atol: float | Float[Array, ""]
    smallest: Float[Array, ""]
    norm: object
    jumps: Float[Array, " j"] | None


class AbstractAdaptive(AbstractIntegrator):
    """Steps whose error is kept below the tolerances."""

    method: eqx.AbstractVar[diffrax.AbstractSolver]

    def method_for(self, is_noisy: bool) -> diffrax.AbstractSolver:
        """Return the method; noise needs fixed steps."""
        check(not is_noisy, "a flow with noise needs fixed steps: solver=FixedStep(h).")
        return self.method

    def controller(self, settings: StepSettings) -> diffrax.AbstractStepSizeController:
        """Return a proportional-integral controller on the largest error."""
        controller = diffrax.PIDController(
            rtol=settings.rtol,
            atol=settings.atol,
            norm=settings.norm,
            dtmin=settings.smallest,
            force_dtmin=False,
        )
        if settings.jumps is None:
            return controller
        return diffrax.ClipStepSizeController(controller, jump_ts=settings.jumps)

    def first_step(self, start, end) -> None:
        """Leave the first step to the controller."""
        return

    def prepared(self, dtype):
        """Return the same: the tolerances are arrays already."""
        return self


class Adaptive(AbstractAdaptive):
    """Explicit steps whose error is kept below the tolerances; the default.

    Args:
        method: an explicit adaptive method of diffrax; `Tsit5` by default.
    """

    method: diffrax.AbstractSolver = diffrax.Tsit5()


class Stiff(AbstractAdaptive):
    r"""Implicit steps, for large $\beta R^2$ or fast contraction.

    Every step solves linear systems of size $nd$, so this is for small clouds:
    $O((nd)^3)$ time and $O((nd)^2)$ memory.

    Args:
        method: an implicit adaptive method of diffrax; `Kvaerno5` by default.
    """

    method: diffrax.AbstractSolver = diffrax.Kvaerno5()


class AbstractEqualSteps(AbstractIntegrator):
    """Equal steps, as many between two saved depths as keep each at most `step`."""

    step: eqx.AbstractVar[float]

    def controller(self, settings: StepSettings) -> diffrax.AbstractStepSizeController:
        """Return constant steps."""
        return diffrax.ConstantStepSize()

    def first_step(self, start, end) -> Float[Array, ""]:
        """Return the equal step of a stretch."""
        length = end - start
        # A stretch a hair longer than a multiple of the step is not worth another step.
        rounding = 8 * jnp.finfo(end.dtype).eps
        hair = rounding * jnp.maximum(jnp.abs(start), jnp.abs(end)) / self.step + 1e-9
        count = jnp.ceil(jnp.abs(length) / self.step - hair)
        return jnp.where(length == 0, self.step, length / jnp.maximum(count, 1))

    def prepared(self, dtype):
        """Return the same with the step as an array."""
        return eqx.tree_at(lambda i: i.step, self, jnp.asarray(self.step, dtype))


class FixedStep(AbstractEqualSteps):
    """Equal steps, as many between two saved depths as keep each at most `step`.

    Where a `Schedule` jumps, save that depth: a step across it is of first order.

    Args:
        step: the largest step.
        method: a method of diffrax; classical Runge-Kutta by default, Heun for noise.
    """

    step: float
    method: diffrax.AbstractSolver | None = None

    def __check_init__(self):
        check(self.step > 0, f"step is {self.step}; it must be positive.")

    def method_for(self, is_noisy: bool) -> diffrax.AbstractSolver:
        """Return the method."""
        if self.method is None:
            return diffrax.Heun() if is_noisy else RK4()
        return self.method


class Splitting(AbstractEqualSteps):
    r"""Equal steps that treat the summands of the velocity in turn.

    For `Sum([attention, perceptron])`: Lie splitting alternates the two flows, error
    $O(h)$; Strang splitting is symmetric, error $O(h^2)$.

    Args:
        step: the largest step.
        order: 1 for Lie, 2 for Strang.
    """

    step: float
    order: int = eqx.field(default=2, static=True)

    def __check_init__(self):
        check(self.step > 0, f"step is {self.step}; it must be positive.")
        check(self.order in (1, 2), f"order is {self.order}; it must be 1 or 2.")

    def method_for(self, is_noisy: bool) -> diffrax.AbstractSolver:
        """Return the splitting step."""
        check(not is_noisy, "splitting has no noise; use solver=FixedStep(h).")
        return SplitStep(self.order)
