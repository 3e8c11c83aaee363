"""How a flow is integrated: adaptive, stiff, fixed steps, splitting."""

import abc
from collections.abc import Callable

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from meanformer.errors import as_integer, as_number, check
from meanformer.flows.methods import RK4, SplitStep
from meanformer.measures import TokenCloud
from meanformer.numerics.nearest import largest_relative_change

ROUNDINGS = 32


class AbstractIntegrator(eqx.Module):
    """Base class of solvers: a method together with its choice of steps."""

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
    def watching_gaps(
        self,
        controller: diffrax.AbstractStepSizeController,
        settings: "StepSettings",
        cloud_of: Callable[[PyTree], TokenCloud],
    ) -> diffrax.AbstractStepSizeController:
        """Return the controller for a solve that waits for tokens to meet.

        Args:
            controller: what `controller` returned.
            settings: what it was given.
            cloud_of: the tokens in the solver's unknown.
        """

    @abc.abstractmethod
    def prepared(self, dtype: jnp.dtype) -> "AbstractIntegrator":
        """Return the same with numbers as arrays: one compilation serves them all."""


class StepSettings(eqx.Module):
    """Tolerances, smallest step, norm and jumps, for an adaptive choice of steps."""

    rtol: float | Float[Array, ""]
    atol: float | Float[Array, ""]
    smallest: Float[Array, ""]
    norm: object
    jumps: Float[Array, " j"] | None


class AbstractWrappedController(diffrax.AbstractAdaptiveStepSizeController):
    """Base class of step controllers that wrap another one and change a part of it."""

    controller: eqx.AbstractVar[diffrax.AbstractAdaptiveStepSizeController]

    @property
    def rtol(self):
        """That of the controller."""
        return self.controller.rtol

    @property
    def atol(self):
        """That of the controller."""
        return self.controller.atol

    @property
    def norm(self):
        """That of the controller."""
        return self.controller.norm

    def wrap(self, direction):
        """Wrap the controller."""
        return eqx.tree_at(
            lambda whole: whole.controller, self, self.controller.wrap(direction)
        )


class NoSmaller(AbstractWrappedController):
    """A controller that gives up when a refused step would have to be too small.

    A step that was taken is no reason, however small: it may only have made up for
    rounding, before a jump of the velocity or at the end of a stretch.

    Args:
        controller: the controller that decides.
        smallest: the smallest step to try after a refusal.
    """

    controller: diffrax.AbstractAdaptiveStepSizeController
    smallest: Float[Array, ""]

    def init(self, terms, t0, t1, y0, dt0, args, func, error_order):
        """Begin as the controller does, with no smaller step."""
        end, state = self.controller.init(
            terms, t0, t1, y0, dt0, args, func, error_order
        )
        return jnp.maximum(end, t0 + self.smallest), state

    def adapt_step_size(self, *arguments):
        """Let the controller decide; fail if it wants a smaller step after all."""
        is_kept, start, end, made_jump, state, result = self.controller.adapt_step_size(
            *arguments
        )
        gives_up = jnp.logical_not(is_kept) & (end - start < self.smallest)
        result = diffrax.RESULTS.where(gives_up, diffrax.RESULTS.dt_min_reached, result)
        return is_kept, start, end, made_jump, state, result


class RescaledErrors(AbstractWrappedController):
    """A controller that sees errors in other units than the solver's.

    Args:
        controller: the controller that decides.
        rescale: takes the end of a step and its error, returns the error to judge.
        is_too_far: takes start and end of a step, tells whether to refuse it whatever
            its error; none is refused by default.
    """

    controller: diffrax.AbstractAdaptiveStepSizeController
    rescale: Callable[[PyTree, PyTree], PyTree]
    is_too_far: Callable[[PyTree, PyTree], Bool[Array, ""]] | None = None

    def init(self, *arguments):
        """Begin as the controller does."""
        return self.controller.init(*arguments)

    def adapt_step_size(
        self, t0, t1, y0, y1_candidate, args, y_error, error_order, controller_state
    ):
        """Let the controller decide on the rescaled error."""
        error = self.rescale(y1_candidate, y_error)
        if self.is_too_far is not None:
            # About half of the step is tried next.
            refused = self.is_too_far(y0, y1_candidate)
            error = jax.tree.map(
                lambda e: jnp.where(refused, 2.0**error_order, e).astype(e.dtype), error
            )
        return self.controller.adapt_step_size(
            t0, t1, y0, y1_candidate, args, error, error_order, controller_state
        )


def gap_error(
    cloud: TokenCloud, errors: Float[Array, "n d"], rtol: float | Float[Array, ""]
) -> Float[Array, ""]:
    """Return the largest error of a gap between tokens, in units of what is allowed.

    That is the gap times the relative tolerance, but not less than rounding.
    """
    rounding = ROUNDINGS * jnp.finfo(cloud.points.dtype).eps
    present = cloud.weights > 0
    size = jnp.max(jnp.where(present[:, None], jnp.abs(cloud.points), 0))
    return largest_relative_change(
        cloud.points, errors, present, relative=rtol, absolute=rounding * size
    )


class AbstractAdaptive(AbstractIntegrator):
    """Base class of solvers that keep the error of each step below the tolerances."""

    method: eqx.AbstractVar[diffrax.AbstractSolver]

    def method_for(self, is_noisy: bool) -> diffrax.AbstractSolver:
        """Return the method; noise needs fixed steps."""
        check(not is_noisy, "a flow with noise needs fixed steps: solver=FixedStep(h).")
        return self.method

    def controller(self, settings: StepSettings) -> diffrax.AbstractStepSizeController:
        """Return a proportional-integral controller on the largest error."""
        controller = NoSmaller(
            diffrax.PIDController(
                rtol=settings.rtol, atol=settings.atol, norm=settings.norm
            ),
            settings.smallest,
        )
        if settings.jumps is None:
            return controller
        jumps = jnp.asarray(settings.jumps, settings.smallest.dtype)
        return diffrax.ClipStepSizeController(controller, jump_ts=jumps)

    def watching_gaps(self, controller, settings, cloud_of):
        """Keep also the errors of the gaps between tokens small against the gaps.

        Otherwise two tokens that approach each other hover at the distance of the
        tolerance, and never meet.
        """

        def rescale(end, error):
            cloud = cloud_of(end)
            points = error[0]
            allowed = settings.atol + settings.rtol * jnp.abs(cloud.points)
            present = (cloud.weights > 0)[:, None]
            usual = jnp.max(jnp.where(present, jnp.abs(points) / allowed, 0))
            ratio = gap_error(cloud, points, settings.rtol)
            factor = jnp.where(usual > 0, ratio / jnp.where(usual > 0, usual, 1), 1)
            rescaled = points * jnp.maximum(1, factor)
            return eqx.tree_at(lambda e: e[0], error, rescaled)

        return RescaledErrors(controller, rescale)

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


class Switching(AbstractAdaptive):
    r"""Explicit steps, and implicit ones where these become too many.

    Each stretch between two saved depths is begun with explicit steps. If `budget` of
    them, tried or taken, do not reach its end, the flow is stiff there, and implicit
    steps go on from where they came to. These cost $O((nd)^3)$ each, as with `Stiff`.

    Args:
        method: the explicit method; `Tsit5` by default.
        stiff: the implicit one; `Kvaerno5` by default.
        budget: explicit steps for one stretch.
    """

    method: diffrax.AbstractSolver = diffrax.Tsit5()
    stiff: diffrax.AbstractSolver = diffrax.Kvaerno5()
    budget: int = eqx.field(default=256, static=True)

    def __check_init__(self):
        check(self.budget > 0, f"budget is {self.budget}; it must be positive.")


class AbstractEqualSteps(AbstractIntegrator):
    """Base class of solvers with equal steps between two saved depths."""

    step: eqx.AbstractVar[float]

    def controller(self, settings: StepSettings) -> diffrax.AbstractStepSizeController:
        """Return constant steps."""
        return diffrax.ConstantStepSize()

    def watching_gaps(self, controller, settings, cloud_of):
        """Return the same: the steps are given."""
        return controller

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


class LongDepth(AbstractAdaptive):
    r"""Explicit steps in a clock of the tokens' own, for exponentially long depths.

    For flows on the sphere whose lone token rests: `Softmax` and `Unnormalised` with
    values $V = cI$, any query, key and $\beta$, and sums and heads of those. Such a
    flow passes through phases in which a few groups of tokens hardly move for a depth
    that is exponential in $\beta$. Here

    - velocities are a common scale, kept as a logarithm, times vectors of ordinary
      size, so that they are right to rounding also at $10^{-300}$;
    - depth is an unknown, and the steps are taken in the clock
      $\mathrm{d}s = \mathrm{d}t\,\bigl(\sum_{i\ne j} p_{ij}^4\bigr)^{1/4}$, smooth and
      close to the largest attention $p_{ij}$ that an atom pays to another one: gaps
      then close like $e^{-s}$, nothing is stiff, and a phase takes a few dozen steps
      however long it is;
    - tokens that meet are joined: `merge=Merge()` unless you pass another.

    Depth is accurate relatively: an error $\varepsilon$ of an angle changes it by a
    factor $e^{\beta\varepsilon}$. `rtol` bounds the error of every step in
    every gap against the gap, and in depth; `atol` is not used. Tokens at a balance of
    forces, to rounding, are a stationary saddle: the solve ends with the status
    `steady` instead of amplifying the rounding. Tokens of weight zero rest.
    `statistics["arc_length"]` is the length of the path of all tokens in
    $\mathbb{R}^{nd}$.

    Cost: $O(n^2 d)$ time and memory for each evaluation: for few tokens.

    For a `Gaussian` under a map that is the same at all depths the clock is
    $\mathrm{d}s = (|LS|/|S| + 1/T)\,\mathrm{d}t$, with the slope $L$ of the velocity
    and the length $T$ of the stretch: the logarithm of depth where covariances decay
    like a power of it, and of the depth that is left before a blow-up. Where the map
    that carries points does not come to rest, steps are many: `mf.gaussian.limit_of`
    follows the covariance alone.

    Args:
        method: an explicit adaptive method of diffrax; `Dopri8` by default.
    """

    method: diffrax.AbstractSolver = diffrax.Dopri8()


class Spectral(eqx.Module):
    """The solver of flows of densities: the number of modes, and the steps.

    Modes are doubled when the last third of the coefficients exceeds the absolute
    tolerance of the solve, up to `most_modes`; then the solve goes on until it exceeds
    `tail`, where it ends as `unresolved`. Under `jit` the modes are those of the start.

    Args:
        most_modes: how many modes there may be.
        tail: the size of the last third that ends the solve.
        integrator: `Adaptive(…)`, `Stiff(…)` or `FixedStep(…)`; by default explicit
            steps of order 8. Explicit steps take diffusion out exactly.
    """

    most_modes: int = eqx.field(default=1024, static=True)
    tail: float = 1e-6
    integrator: AbstractIntegrator | None = None

    def __check_init__(self):
        as_integer("most_modes", self.most_modes, least=1)
        as_number("tail", self.tail, "positive", above=0)
