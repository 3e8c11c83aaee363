"""One depth of the mean-field transformer: what moves the points, and backward."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.attention.abstract import AbstractAttention
from meanformer.attention.softmax import Softmax
from meanformer.measures import TokenCloud
from meanformer.numerics.arrays import matmul
from meanformer.training.heads import Heads, transposed, velocity

# Pairs of a point and a token, over all heads, beyond which heads take turns.
MOST_PAIRS = 2**24


class Neurons(eqx.Module):
    r"""Neurons that are averaged: $x \mapsto \tfrac1p\sum_j a_j\,\sigma(b_j x + c_j)$.

    Args:
        weights_in: the rows $b_j$; with an axis of depth in front, as all of these.
        bias_in: the numbers $c_j$.
        weights_out: the rows $a_j$.
    """

    weights_in: Float[Array, "... p d"]
    bias_in: Float[Array, "... p"]
    weights_out: Float[Array, "... p d"]


class Parameters(eqx.Module):
    """Heads, and neurons if there are any; also changes of them."""

    heads: Heads
    neurons: Neurons | None = None


class Layer(eqx.Module):
    """What does not change with depth: kinds of heads and neurons, temperature.

    Attributes:
        beta: the inverse temperature.
        kind: the attention of a head: takes query, key, value, `beta`, `value_bias`.
        activation: that of the neurons.
        is_frozen: whether the context stays where it is.
    """

    beta: Float[Array, ""]
    kind: Callable[..., AbstractAttention] = eqx.field(static=True)
    activation: Callable[[Array], Array] = eqx.field(static=True)
    is_frozen: bool = eqx.field(static=True)

    def velocity(
        self,
        parameters: Parameters,
        points: Float[Array, "r d"],
        weights: Float[Array, " n"],
    ) -> Float[Array, "r d"]:
        """Return the velocity of tokens, which come first, and queries."""
        moved = self._of_heads(parameters.heads, points, weights)
        if parameters.neurons is not None:
            moved = moved + self._of_neurons(parameters.neurons, points)
        return self._held(moved, weights)

    def transposed(
        self,
        parameters: Parameters,
        points: Float[Array, "r d"],
        weights: Float[Array, " n"],
        adjoint: Float[Array, "r d"],
    ) -> tuple[Float[Array, "r d"], Parameters]:
        r"""Return how an adjoint changes backward, and the derivative in each particle.

        Args:
            parameters: heads and neurons.
            points: tokens and queries.
            weights: the masses of the tokens.
            adjoint: the adjoint of each token divided by its mass, and of each query.

        Returns:
            The mean over particles for each point; and the derivatives
            $\nabla_\theta\sum_r c_r\langle a_r, \Gamma_\theta(x_r)\rangle$, with the
            masses $c_r$ of tokens and one for queries, not divided by their number.
        """
        heads, neurons = parameters.heads, parameters.neurons
        adjoint = self._held(adjoint, weights)
        if self.kind is Softmax:
            changes, of_heads = self._in_turns(
                lambda some: transposed(some, self.beta, points, weights, adjoint),
                heads,
                points,
                weights,
            )
        else:
            changes, of_heads = _transposed(
                lambda some, x: self._of_heads(some, x, weights),
                heads,
                points,
                weights,
                adjoint,
            )
        if neurons is None:
            return self._held(changes, weights), Parameters(of_heads)
        change, of_neurons = _transposed(
            self._of_neurons, neurons, points, weights, adjoint
        )
        found = Parameters(of_heads, of_neurons)
        return self._held(changes + change, weights), found

    def _held(self, changes, weights):
        """Return changes that leave a frozen context where it is."""
        return changes.at[: len(weights)].set(0) if self.is_frozen else changes

    def _of_heads(self, heads: Heads, points, weights) -> Float[Array, "r d"]:
        if self.kind is Softmax:
            return self._in_turns(
                lambda some: (velocity(some, self.beta, points, weights), ()),
                heads,
                points,
                weights,
            )[0]
        cloud = TokenCloud(points[: len(weights)], weights)

        def of_head(head: Heads):
            query, key, value, bias = head
            gamma = self.kind(query, key, value, beta=self.beta, value_bias=bias)
            return gamma(cloud, points)

        return jax.vmap(of_head)(heads).mean(axis=0)

    def _of_neurons(self, neurons: Neurons, points) -> Float[Array, "r d"]:
        hidden = matmul(points, neurons.weights_in.T) + neurons.bias_in[None]
        return matmul(self.activation(hidden), neurons.weights_out) / hidden.shape[1]

    def _in_turns(self, function: Callable, heads: Heads, points, weights):
        """Apply a function that averages over heads, to as many at once as fit."""
        count, pairs = len(heads.query), len(points) * len(weights)
        if count * pairs <= MOST_PAIRS:
            return function(heads)

        def alone(head: Heads):
            mean, rest = function(jax.tree.map(lambda leaf: leaf[None], head))
            return mean, jax.tree.map(lambda leaf: leaf[0], rest)

        size = max(1, MOST_PAIRS // pairs)
        means, rest = jax.lax.map(alone, heads, batch_size=size)
        return means.mean(axis=0), rest


def _transposed(function: Callable, particles, points, weights, adjoint):
    """Transpose a mean over particles by automatic differentiation."""
    count = jax.tree.leaves(particles)[0].shape[0]
    masses = jnp.append(weights, jnp.ones(len(points) - len(weights), weights.dtype))
    _, pull = jax.vjp(function, particles, points)
    of_particles, of_points = pull(masses[:, None] * adjoint)
    present = masses > 0
    safe = jnp.where(present, masses, 1)
    changes = jnp.where(present[:, None], of_points / safe[:, None], 0)
    return changes, jax.tree.map(lambda leaf: count * leaf, of_particles)
