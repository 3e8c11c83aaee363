"""What moves in a phase diagram: tokens, Gram matrices, tokens under given maps."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.attention import AbstractInContextMap
from meanformer.geometry import Sphere
from meanformer.measures import TokenCloud
from meanformer.observables.phases.sphere_batches import (
    gram_matrices,
    gram_velocities,
    token_velocities,
    unit_tokens,
)

State = Float[Array, "b n c"]


class AbstractSystem(eqx.Module):
    """Many clouds of equal size that move at the same time, each by itself.

    Attributes:
        gathers: whether the smallest inner product of a cloud never decreases once it
            is positive, so that one cluster stays one for ever.
    """

    gathers: eqx.AbstractVar[bool]

    @abc.abstractmethod
    def rate(self, state: State) -> State:
        """Return the velocity of the state."""

    @abc.abstractmethod
    def settled(self, state: State) -> State:
        """Return a state that a step has moved off the sphere, brought back."""

    @abc.abstractmethod
    def gram(self, state: State) -> Float[Array, "b n n"]:
        """Return the inner products of the tokens."""

    @abc.abstractmethod
    def gram_rate(self, state: State, rate: State) -> Float[Array, "b n n"]:
        """Return the velocity of the inner products."""


class AbstractTokens(AbstractSystem):
    """Clouds whose state are the tokens themselves."""

    def settled(self, state):
        """Return the tokens as unit vectors."""
        return unit_tokens(state)

    def gram(self, state):
        """Return the inner products."""
        return gram_matrices(state, state)

    def gram_rate(self, state, rate):
        """Return the velocity of the inner products."""
        half = gram_matrices(rate, state)
        return half + jnp.swapaxes(half, 1, 2)


class Tokens(AbstractTokens):
    """Tokens under identity attention."""

    weights: Float[Array, "b n"]
    beta: Float[Array, ""]
    is_softmax: bool = eqx.field(static=True)
    gathers: bool = eqx.field(static=True, default=True)

    def rate(self, state):
        """Return the velocities."""
        return token_velocities(
            state, self.weights, self.beta, is_softmax=self.is_softmax
        )


class Grams(AbstractSystem):
    """Gram matrices under identity attention: no dimension but the number of tokens."""

    weights: Float[Array, "b n"]
    beta: Float[Array, ""]
    is_softmax: bool = eqx.field(static=True)
    gathers: bool = eqx.field(static=True, default=True)

    def rate(self, state):
        """Return the velocities."""
        return gram_velocities(
            state, self.weights, self.beta, is_softmax=self.is_softmax
        )

    def settled(self, state):
        """Return the matrix: its diagonal attracts one."""
        return state

    def gram(self, state):
        """Return the matrix."""
        return state

    def gram_rate(self, state, rate):
        """Return the velocity."""
        return rate


class MovedByMaps(AbstractTokens):
    """Tokens of which each cloud has an in-context map of its own."""

    maps: AbstractInContextMap
    gathers: bool = eqx.field(static=True, default=False)

    def rate(self, state):
        """Return the tangent part of the maps' values at the unit vectors."""
        return eqx.filter_vmap(_on_sphere)(self.maps, state)


def _on_sphere(
    gamma: AbstractInContextMap, tokens: Float[Array, "n d"]
) -> Float[Array, "n d"]:
    sphere = Sphere()
    unit = sphere.retract(tokens)
    return sphere.project(unit, gamma(TokenCloud(unit), unit))


@jax.jit
def reduced_tokens(tokens: Float[Array, "b n d"]) -> Float[Array, "b n c"]:
    """Return the coordinates of tokens in their span: at most as many as tokens.

    An isometry of the span changes no inner product, and attention sees no other.
    """
    if tokens.shape[2] <= tokens.shape[1]:
        return tokens
    factors = jax.vmap(lambda cloud: jnp.linalg.qr(cloud.T, mode="r"))(tokens)
    return unit_tokens(jnp.swapaxes(factors, 1, 2))
