r"""Velocities of many small clouds on the sphere at once, as tokens or Gram matrices.

Clouds lie along the first axis. Sums over coordinates are products with a vector of
ones, which compile to faster code than reductions; scores lie within $[-\beta, \beta]$,
so that no largest one has to be looked for.
"""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.attention import AbstractInContextMap
from meanformer.geometry import Sphere
from meanformer.measures import TokenCloud
from meanformer.numerics.arrays import matmul
from meanformer.numerics.pair_sums.tilted_masses import exponent_scale, scaled_exp

State = Float[Array, "b n c"]


def row_sums(matrices: Float[Array, "b n m"]) -> Float[Array, "b n 1"]:
    """Return the sum over the last axis, which stays."""
    return matmul(matrices, jnp.ones((matrices.shape[-1], 1), matrices.dtype))


def unit_tokens(tokens: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
    """Return tokens near the sphere brought back to it."""
    return tokens * jax.lax.rsqrt(row_sums(tokens * tokens))


def gram_matrices(
    tokens: Float[Array, "b n d"], others: Float[Array, "b m d"]
) -> Float[Array, "b n m"]:
    """Return the inner products of tokens with others of the same cloud."""
    return matmul(tokens, jnp.swapaxes(others, 1, 2))


@jax.jit
def reduced_tokens(tokens: Float[Array, "b n d"]) -> Float[Array, "b n c"]:
    """Return the coordinates of tokens in their span: at most as many as tokens.

    An isometry of the span changes no inner product, and attention sees no other.
    """
    if tokens.shape[2] <= tokens.shape[1]:
        return tokens
    factors = jax.vmap(lambda cloud: jnp.linalg.qr(cloud.T, mode="r"))(tokens)
    return unit_tokens(jnp.swapaxes(factors, 1, 2))


def velocities(
    state: State,
    weights: Float[Array, "b n"],
    beta: Float[Array, ""],
    *,
    is_softmax: bool,
    is_gram: bool = False,
) -> State:
    r"""Velocities on the sphere under identity attention, of tokens or Gram matrices.

    $$\dot x_i = (I - \hat x_i\hat x_i^\top)\, s_i \sum_j
      w_j e^{\beta(\langle\hat x_i, \hat x_j\rangle - 1)}\,\hat x_j, \qquad
      \hat x = x/|x|,$$
    with $s_i$ the inverse of the same sum without $\hat x_j$ for softmax, and $e^\beta$
    without normalisation. The field does not see the norms: so an error along the
    radius stays as it is, where in the field without hats it is damped at the rate
    $2\langle x, A\rangle$, which an explicit method pays with a third more steps
    (measured: 37 in place of 28 at $\beta = 9$). For Gram matrices, with $A$ the
    attention matrix and $m$ the diagonal of $AG$,
    $$\dot G = F + F^\top, \qquad F = AG - \operatorname{diag}(m)\,G :$$
    the dimension of the tokens is gone.

    Cost: $O(n^2 d)$ for each cloud, $O(n^3)$ for Gram matrices.
    """
    rows = state if is_gram else unit_tokens(state)
    gram = rows if is_gram else gram_matrices(rows, rows)
    exponents = (beta * exponent_scale(gram.dtype)) * (gram - 1)
    masses = scaled_exp(exponents) * weights[:, None, :]
    pulls = matmul(masses, rows)
    own = jnp.eye(rows.shape[-1], dtype=rows.dtype)[None] if is_gram else rows
    tangent = pulls - row_sums(pulls * own) * rows
    if is_softmax:
        tangent = tangent * (1 / jnp.sum(masses, axis=-1, keepdims=True))
    else:
        tangent = tangent * jnp.exp(beta)
    return tangent + jnp.swapaxes(tangent, 1, 2) if is_gram else tangent


class AbstractMotion(eqx.Module):
    """Velocities of clouds of equal size that move at the same time, each by itself.

    Attributes:
        is_gram: whether a state holds Gram matrices in place of tokens.
        gathers: whether the smallest inner product of a cloud never decreases once it
            is positive, so that one cluster stays one for ever.
    """

    is_gram: eqx.AbstractVar[bool]
    gathers: eqx.AbstractVar[bool]

    @abc.abstractmethod
    def rate(self, state: State) -> State:
        """Return the velocity of the state."""

    def settled(self, state: State) -> State:
        """Return tokens brought back to the sphere; a Gram matrix attracts one."""
        return state if self.is_gram else unit_tokens(state)

    def gram(self, state: State) -> Float[Array, "b n n"]:
        """Return the inner products of the tokens."""
        return state if self.is_gram else gram_matrices(state, state)

    def gram_rate(self, state: State, rate: State) -> Float[Array, "b n n"]:
        """Return the velocity of the inner products."""
        if self.is_gram:
            return rate
        half = gram_matrices(rate, state)
        return half + jnp.swapaxes(half, 1, 2)


class IdentityAttention(AbstractMotion):
    """Tokens, or their Gram matrices, under identity attention."""

    weights: Float[Array, "b n"]
    beta: Float[Array, ""]
    is_softmax: bool = eqx.field(static=True)
    is_gram: bool = eqx.field(static=True, default=False)
    gathers: bool = eqx.field(static=True, default=True)

    def rate(self, state):
        """Return the velocities."""
        kind = {"is_softmax": self.is_softmax, "is_gram": self.is_gram}
        return velocities(state, self.weights, self.beta, **kind)


class MapPerCloud(AbstractMotion):
    """Tokens of which each cloud has an in-context map of its own."""

    maps: AbstractInContextMap
    is_gram: bool = eqx.field(static=True, default=False)
    gathers: bool = eqx.field(static=True, default=False)

    def rate(self, state):
        """Return the tangent part of the maps' values at the unit vectors."""
        sphere = Sphere()

        def of_cloud(gamma, tokens):
            unit = sphere.retract(tokens)
            return sphere.project(unit, gamma(TokenCloud(unit), unit))

        return eqx.filter_vmap(of_cloud)(self.maps, state)
