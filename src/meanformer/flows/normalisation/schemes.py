"""The usual places of the normalisation, and one of your own."""

from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.attention import Residual
from meanformer.attention.abstract import number
from meanformer.errors import as_float_array, check
from meanformer.flows.normalisation.abstract import (
    DIRECTIONS,
    AbstractScheme,
    NormalisedVelocity,
)
from meanformer.flows.schedule import Constant, FunctionOfDepth, Schedule
from meanformer.geometry import AbstractSpace, Euclidean, Sphere
from meanformer.typing import ArrayLike


class AbstractUnitRadius(AbstractScheme):
    """A scheme that brings tokens back to the unit sphere in every layer."""

    def growth(self, depth, radius, radial, norm):
        """Return zero."""
        return jnp.zeros_like(radius)

    @property
    def space(self) -> AbstractSpace:
        """The sphere."""
        return Sphere()

    @property
    def jumps(self) -> None:
        """There are none."""
        return


class AbstractFreeRadius(AbstractScheme):
    """A scheme under which the radius of tokens grows, and slows them down."""

    @property
    def space(self) -> AbstractSpace:
        """The whole space."""
        return Euclidean()

    @property
    def jumps(self) -> None:
        """There are none."""
        return


class PostNorm(AbstractUnitRadius):
    r"""Normalise after the residual: $x \leftarrow N(x + hA)$, so $s = 1$."""

    def slowness(self, depth, radius, radial, norm):
        """Return one."""
        return jnp.ones_like(radius)

    def layers(self, attention, step):
        """Return the layer that is the same at every depth."""
        return Constant(DIRECTIONS @ Residual(attention, step))


class PreNorm(AbstractFreeRadius):
    r"""Normalise what attention sees: $x \leftarrow x + hA$, so $s = r$.

    Radii grow at the rate $\langle A, \theta\rangle$, in the end linearly in depth.
    """

    def slowness(self, depth, radius, radial, norm):
        """Return the radius."""
        return radius

    def growth(self, depth, radius, radial, norm):
        """Return the radial part of the attention."""
        return radial

    def layers(self, attention, step):
        """Return the layer that is the same at every depth."""
        return Constant(Residual(attention @ DIRECTIONS, step))


class PeriNorm(AbstractFreeRadius):
    r"""Normalise on both sides of attention: $x \leftarrow x + hN(A)$, $s = r|A|$.

    Undefined where $A = 0$.
    """

    divides_by_attention: ClassVar[bool] = True

    def slowness(self, depth, radius, radial, norm):
        """Return the radius times the length of the attention."""
        return radius * norm

    def growth(self, depth, radius, radial, norm):
        """Return the cosine between attention and direction."""
        return radial / norm

    def layers(self, attention, step):
        """Return the layer that is the same at every depth."""
        return Constant(Residual(DIRECTIONS @ attention @ DIRECTIONS, step))


class NGPT(AbstractUnitRadius):
    r"""Normalise attention and residual: $x \leftarrow N(x + \alpha hN(A))$.

    Then $s = |A|/\alpha$. The published network takes the step from $x$ towards $N(A)$,
    which is the same direction at another step size; its schedule of $\alpha$ in depth
    is not fixed here. Undefined where $A = 0$.

    Args:
        alpha: the rate $\alpha > 0$.
    """

    divides_by_attention: ClassVar[bool] = True
    alpha: float = number("alpha", default=1.0)

    def __check_init__(self):
        check(self.alpha > 0, f"alpha is {self.alpha}; it must be positive.")

    def slowness(self, depth, radius, radial, norm):
        """Return the length of the attention over the rate."""
        return norm / self.alpha

    def layers(self, attention, step):
        """Return the layer that is the same at every depth."""
        inner = DIRECTIONS @ attention
        return Constant(DIRECTIONS @ Residual(inner, self.alpha * jnp.asarray(step)))


class SqrtScaling(AbstractUnitRadius):
    r"""Shrink what a layer adds with its depth: $s = \sqrt{1+t}$, on the sphere."""

    def slowness(self, depth, radius, radial, norm):
        """Return the root of one plus depth."""
        return jnp.sqrt(1 + depth) * jnp.ones_like(radius)

    def layers(self, attention, step):
        """Return the layer as a function of depth."""

        def layer(depth):
            return DIRECTIONS @ Residual(attention, step / jnp.sqrt(1 + depth))

        return FunctionOfDepth(layer)


class MixNorm(AbstractScheme):
    """Normalise after the residual up to a depth, and what attention sees afterwards.

    Args:
        switch: the depth of the change.
    """

    switch: float = number("switch")

    def __check_init__(self):
        check(
            self.switch > 0,
            f"switch is {self.switch}; it must be positive: use PreNorm() otherwise.",
        )

    def slowness(self, depth, radius, radial, norm):
        """Return one, and the radius after the change."""
        return jnp.where(depth < self.switch, 1, radius)

    def growth(self, depth, radius, radial, norm):
        """Return zero, and the radial part of the attention after the change."""
        return jnp.where(depth < self.switch, 0, radial)

    @property
    def space(self) -> AbstractSpace:
        """The whole space; tokens start on the sphere."""
        return Euclidean()

    @property
    def start(self) -> AbstractSpace:
        """The sphere."""
        return Sphere()

    @property
    def jumps(self) -> Float[Array, " 1"]:
        """The depth of the change."""
        return jnp.array([self.switch])

    def layers(self, attention, step):
        """Return the two layers with the depths at which they begin."""
        kinds = (PostNorm(), PreNorm())
        maps = [scheme.layer(attention, 0.0, step) for scheme in kinds]
        return Schedule(maps, [0.0, self.switch])


class CustomScheme(AbstractScheme):
    r"""A scheme of your own: functions of depth, $r$, $\langle A,\theta\rangle$, $|A|$.

    Its layer is one explicit step of its flow, brought back to the sphere where the
    radius does not grow.

    Args:
        slowness: takes `(depth, radius, radial, norm)`, a scalar depth and arrays of
            one shape, and returns the slowness $s > 0$.
        growth: the same for $\dot r$; without it tokens stay on the sphere.
        jumps: depths at which the functions are discontinuous.
    """

    divides_by_attention: ClassVar[bool] = True
    slowness_of: Callable[..., Array]
    growth_of: Callable[..., Array] | None
    jump_depths: Float[Array, " j"] | None

    def __init__(
        self,
        slowness: Callable[..., Array],
        growth: Callable[..., Array] | None = None,
        *,
        jumps: ArrayLike | None = None,
    ):
        for name, function in (("slowness", slowness), ("growth", growth)):
            is_left_out = name == "growth" and function is None
            check(
                is_left_out or callable(function),
                f"{name} is {function!r}; it must be a function of depth, radius, "
                "radial and norm.",
            )
        self.slowness_of, self.growth_of = slowness, growth
        self.jump_depths = None if jumps is None else as_float_array("jumps", jumps)

    def slowness(self, depth, radius, radial, norm):
        """Return what the function says."""
        return self.slowness_of(depth, radius, radial, norm)

    def growth(self, depth, radius, radial, norm):
        """Return what the function says; zero without one."""
        if self.growth_of is None:
            return jnp.zeros_like(radius)
        return self.growth_of(depth, radius, radial, norm)

    @property
    def space(self) -> AbstractSpace:
        """The sphere, unless there is a growth."""
        return Sphere() if self.growth_of is None else Euclidean()

    @property
    def jumps(self) -> Float[Array, " j"] | None:
        """The depths given."""
        return self.jump_depths

    def layers(self, attention, step):
        """Return one explicit step of the flow."""

        def layer(depth):
            step_of = Residual(NormalisedVelocity(attention, self, depth), step)
            return DIRECTIONS @ step_of if self.growth_of is None else step_of

        return FunctionOfDepth(layer, self.jumps)
