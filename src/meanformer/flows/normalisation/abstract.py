"""What a normalisation scheme is: how fast directions turn, how radii grow."""

import abc
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from meanformer.attention import AbstractInContextMap, PointMap, push_forward
from meanformer.flows.schedule import AbstractSchedule
from meanformer.geometry import AbstractSpace, Sphere
from meanformer.measures import AbstractContext, TokenCloud
from meanformer.numerics.arrays import safe_norm, unit_rows

# Attention shorter than this many roundings of that of lone tokens is zero.
ROUNDINGS = 8
DIRECTIONS = PointMap(unit_rows)


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
        self,
        depth: Float[Array, ""],
        radius: Float[Array, "*s"],
        radial: Float[Array, "*s"],
        norm: Float[Array, "*s"],
    ) -> Float[Array, "*s"]:
        r"""Return $s$ from depth, $r$, $\langle A, \theta\rangle$ and $|A|$."""

    @abc.abstractmethod
    def growth(
        self,
        depth: Float[Array, ""],
        radius: Float[Array, "*s"],
        radial: Float[Array, "*s"],
        norm: Float[Array, "*s"],
    ) -> Float[Array, "*s"]:
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
    @abc.abstractmethod
    def jumps(self) -> Float[Array, " j"] | None:
        """Depths at which the scheme changes its rule."""

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


class NormalisedVelocity(AbstractInContextMap):
    r"""The velocity under a scheme at one depth: $g\theta + \frac rs P_\theta A$.

    A point without a direction, and one where the scheme has no meaning, rests.

    Args:
        attention: the map $A$, computed on directions.
        scheme: the scheme.
        depth: the depth.
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
        self,
        mu: AbstractContext,
        x: Float[Array, "m d"],
        *,
        positions: Float[Array, " m"] | None = None,
    ) -> Float[Array, "m e"]:
        """Return the velocity of each point."""
        directions = unit_rows(x)
        pull = self._pull(mu, directions, positions)
        parts = self._parts(mu, x, directions, pull)
        defined = self._is_defined(parts)
        # What is undefined must not spoil the derivative of the rest either.
        radius, radial, norm = (jnp.where(defined, part, 1) for part in parts)
        depth = self.depth.astype(x.dtype)
        growth = self.scheme.growth(depth, radius, radial, norm)
        speed = radius / self.scheme.slowness(depth, radius, radial, norm)
        turning = speed[:, None] * Sphere().project(_somewhere(directions), pull)
        velocity = growth[:, None] * directions + turning
        return jnp.where(defined[:, None], velocity, 0)

    def defined_at(
        self,
        mu: AbstractContext,
        x: Float[Array, "m d"],
        positions: Float[Array, " m"] | None = None,
    ) -> Bool[Array, " m"]:
        """Return where there is a direction, and the scheme has a meaning."""
        directions = unit_rows(x)
        if not self.scheme.divides_by_attention:
            one = jnp.ones_like(x[:, 0])
            return self._is_defined((safe_norm(x), one, one))
        pull = self._pull(mu, directions, positions)
        return self._is_defined(self._parts(mu, x, directions, pull))

    def _pull(self, mu, directions, positions) -> Float[Array, "m e"]:
        context = push_forward(DIRECTIONS, mu)
        return self.attention(context, directions, positions=positions)

    def _parts(self, mu, x, directions, pull):
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

    def _is_defined(self, parts) -> Bool[Array, " m"]:
        depth, parts = jax.lax.stop_gradient((self.depth, parts))
        depth = depth.astype(parts[0].dtype)
        slowness = self.scheme.slowness(depth, *parts)
        growth = self.scheme.growth(depth, *parts)
        finite = jnp.isfinite(slowness) & jnp.isfinite(growth)
        return (parts[0] > 0) & (slowness > 0) & finite


def _somewhere(directions: Float[Array, "m d"]) -> Float[Array, "m d"]:
    """Return directions, an axis where there is none."""
    axis = jnp.zeros_like(directions).at[:, 0].set(1)
    has_none = (directions == 0).all(axis=1, keepdims=True)
    return jnp.where(has_none, axis, directions)
