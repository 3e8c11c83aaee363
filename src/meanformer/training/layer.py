"""One depth of the mean-field transformer: what moves the points."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.attention.abstract import AbstractAttention, AbstractInContextMap
from meanformer.attention.averaged_heads import Heads, velocity
from meanformer.attention.pointwise import Perceptron
from meanformer.attention.softmax import Softmax
from meanformer.flows.sweeps import AbstractLayer
from meanformer.measures import TokenCloud

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


class Layer(AbstractLayer):
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
        *,
        is_explicit: bool = False,
    ) -> Float[Array, "r d"]:
        """Return the mean over heads, and that over neurons if there are any.

        The explicit derivative is that of softmax heads; it takes a frozen context for
        constant.
        """
        count = len(weights)
        tokens, moving = points[:count], points[count if self.is_frozen else 0 :]
        if self.is_frozen and is_explicit:
            tokens = jax.lax.stop_gradient(tokens)
        moved = self._of_heads(parameters.heads, moving, tokens, weights, is_explicit)
        if parameters.neurons is not None:
            moved = moved + self.perceptron(parameters.neurons).apply(moving)
        return jnp.pad(moved, [(len(points) - len(moving), 0), (0, 0)])

    def _of_heads(self, heads: Heads, points, tokens, weights, is_explicit: bool):
        """Return the mean over heads, as many at once as fit."""

        def of_head(head: Heads):
            return self.attention(head)(TokenCloud(tokens, weights), points)

        def of_some(heads: Heads):
            if self.kind is Softmax:
                given = heads, self.beta, points, tokens, weights
                return velocity(*given, is_explicit=is_explicit)
            return jax.vmap(of_head)(heads).mean(axis=0)

        size = max(1, MOST_PAIRS // max(1, len(points) * len(tokens)))
        if len(heads.query) <= size:
            return of_some(heads)

        def alone(head: Heads):
            return of_some(jax.tree.map(lambda leaf: leaf[None], head))

        return jax.lax.map(alone, heads, batch_size=size).mean(axis=0)

    def attention(self, head: Heads) -> AbstractInContextMap:
        """Return one head as an ordinary map."""
        query, key, value, bias = head
        return self.kind(query, key, value, beta=self.beta, value_bias=bias)

    def perceptron(self, neurons: Neurons) -> Perceptron:
        """Return the mean over the neurons of one depth as an ordinary map."""
        inner, bias = neurons.weights_in, neurons.bias_in
        outer = neurons.weights_out.T / len(bias)
        return Perceptron(inner, bias, outer, activation=self.activation)
