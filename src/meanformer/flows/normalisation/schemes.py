"""Normalisation schemes: how fast directions turn, how radii grow."""

import abc
from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from meanformer.attention import AbstractInContextMap, PointMap, Residual, push_forward
from meanformer.attention.abstract import number
from meanformer.errors import as_float_array, check
from meanformer.flows.schedule import (
    AbstractSchedule,
    Constant,
    FunctionOfDepth,
    Schedule,
)
from meanformer.geometry import AbstractSpace, Euclidean, Sphere
from meanformer.measures import AbstractContext, TokenCloud
from meanformer.numerics.arrays import safe_norm, unit_rows
from meanformer.typing import ArrayLike, Places

# Attention shorter than this many roundings of that of lone tokens is zero.
ROUNDINGS = 8
DIRECTIONS = PointMap(unit_rows)
Sizes = Float[Array, "*s"]


class AbstractScheme(eqx.Module):
    r"""A place of the normalisation: how fast directions turn, how radii grow.

    With $x_i = r_i\theta_i$ and the attention $A_i$ computed on the directions,
    $$\dot\theta_i = \frac{1}{s_i}P_{\theta_i}A_i, \qquad \dot r_i = g_i,$$
    where the slowness $s_i$ and the growth $g_i$ are functions of depth, $r_i$,
    $\langle A_i, \theta_i\rangle$ and $|A_i|$ [KGPR25].

    Attributes:
        divides_by_attention: whether the scheme has no meaning where $A_i = 0$.
    """

    divides_by_attention: ClassVar[bool] = False

    @abc.abstractmethod
    def slowness(
        self, depth: Float[Array, ""], radius: Sizes, radial: Sizes, norm: Sizes
    ) -> Sizes:
        r"""Return $s$ from depth, $r$, $\langle A, \theta\rangle$ and $|A|$."""

    @abc.abstractmethod
    def growth(
        self, depth: Float[Array, ""], radius: Sizes, radial: Sizes, norm: Sizes
    ) -> Sizes:
        r"""Return $\dot r$ from depth, $r$, $\langle A, \theta\rangle$ and $|A|$."""

    @property
    @abc.abstractmethod
    def space(self) -> AbstractSpace:
        """Where tokens live: on the sphere, if the scheme keeps the radius at one."""

    @property
    def start(self) -> AbstractSpace:
        """Where tokens must start: where they live, unless a scheme says otherwise."""
        return self.space

    @property
    def jumps(self) -> Float[Array, " j"] | None:
        """Depths at which the scheme changes its rule: none, unless it says so."""
        return None

    @abc.abstractmethod
    def layers(
        self, attention: AbstractInContextMap, step: float | Float[Array, ""]
    ) -> AbstractSchedule:
        """Return the residual layer of the network at every depth."""

    def layer(
        self,
        attention: AbstractInContextMap,
        depth: float | Float[Array, ""],
        step: float | Float[Array, ""],
    ) -> AbstractInContextMap:
        """Return the residual layer at a depth, normalised where the scheme does."""
        return self.layers(attention, step).at(jnp.asarray(depth))


class AbstractUnitRadius(AbstractScheme):
    """A scheme that brings tokens back to the unit sphere in every layer."""

    def growth(self, depth, radius, radial, norm):
        """Return zero."""
        return jnp.zeros_like(radius)

    @property
    def space(self) -> AbstractSpace:
        """The sphere."""
        return Sphere()


class AbstractFreeRadius(AbstractScheme):
    """A scheme under which the radius of tokens grows, and slows them down."""

    @property
    def space(self) -> AbstractSpace:
        """The whole space."""
        return Euclidean()


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


class MixNorm(AbstractFreeRadius):
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
        for name, function in {"slowness": slowness, "growth": growth}.items():
            check(
                callable(function) or (name == "growth" and function is None),
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


class NormalisedVelocity(AbstractInContextMap):
    r"""The velocity under a scheme at one depth: $g\theta + \frac rs P_\theta A$.

    A point without a direction, and one where the scheme has no meaning, rests.
    """

    attention: AbstractInContextMap
    scheme: AbstractScheme
    depth: Float[Array, ""]

    @property
    def input_dimension(self) -> int | None:
        """That of the attention."""
        return self.attention.input_dimension

    @property
    def output_dimension(self) -> int | None:
        """That of the attention."""
        return self.attention.output_dimension

    def __call__(
        self, mu: AbstractContext, x: Float[Array, "m d"], *, positions: Places = None
    ) -> Float[Array, "m e"]:
        """Return the velocity of each point."""
        directions = unit_rows(x)
        pull = self._pull(mu, directions, positions)
        inputs = self._scheme_inputs(mu, x, directions, pull)
        defined = self._is_defined(inputs)
        # What is undefined must not spoil the derivative of the rest either.
        radius, radial, norm = (jnp.where(defined, one, 1) for one in inputs)
        depth = self.depth.astype(x.dtype)
        growth = self.scheme.growth(depth, radius, radial, norm)
        speed = radius / self.scheme.slowness(depth, radius, radial, norm)
        # Where there is no direction, any will do.
        has_none = (directions == 0).all(axis=1, keepdims=True)
        axis = jnp.zeros_like(directions).at[:, 0].set(1)
        somewhere = jnp.where(has_none, axis, directions)
        turning = speed[:, None] * Sphere().project(somewhere, pull)
        velocity = growth[:, None] * directions + turning
        return jnp.where(defined[:, None], velocity, 0)

    def defined_at(
        self, mu: AbstractContext, x: Float[Array, "m d"], positions: Places = None
    ) -> Bool[Array, " m"]:
        """Return where there is a direction, and the scheme has a meaning."""
        directions = unit_rows(x)
        if not self.scheme.divides_by_attention:
            one = jnp.ones_like(x[:, 0])
            return self._is_defined((safe_norm(x), one, one))
        pull = self._pull(mu, directions, positions)
        return self._is_defined(self._scheme_inputs(mu, x, directions, pull))

    def _pull(self, mu, directions, positions) -> Float[Array, "m e"]:
        context = push_forward(DIRECTIONS, mu)
        return self.attention(context, directions, positions=positions)

    def _scheme_inputs(self, mu, x, directions, pull):
        """Return the radius, the radial part of the attention, and its length."""
        norm = safe_norm(pull)
        if self.scheme.divides_by_attention:
            cut = ROUNDINGS * jnp.finfo(norm.dtype).eps * self._scale(mu)
            norm = jnp.where(norm > cut, norm, 0)
        return safe_norm(x), jnp.sum(directions * pull, axis=1), norm

    def _scale(self, mu: AbstractContext) -> Float[Array, ""]:
        """Return the largest attention of a token to itself alone."""
        if not isinstance(mu, TokenCloud):
            return jnp.ones(())

        def alone(x, position):
            place = None if position is None else position[None]
            cloud = TokenCloud(x[None], positions=place)
            return safe_norm(self.attention(cloud, x[None], positions=place))[0]

        lengths = jax.vmap(alone)(unit_rows(mu.points), mu.positions)
        return jax.lax.stop_gradient(jnp.max(jnp.where(mu.weights > 0, lengths, 0)))

    def _is_defined(self, inputs) -> Bool[Array, " m"]:
        depth, inputs = jax.lax.stop_gradient((self.depth, inputs))
        depth = depth.astype(inputs[0].dtype)
        slowness = self.scheme.slowness(depth, *inputs)
        growth = self.scheme.growth(depth, *inputs)
        finite = jnp.isfinite(slowness) & jnp.isfinite(growth)
        return (inputs[0] > 0) & (slowness > 0) & finite
