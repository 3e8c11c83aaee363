"""The variance of attention on random tokens: central limit theorems."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.attention import AbstractInContextMap, Softmax
from meanformer.errors import Unsupported, as_float_array
from meanformer.measures import AbstractMeasure, TokenCloud
from meanformer.typing import ArrayLike


def asymptotic_covariance(
    gamma: AbstractInContextMap, mu: AbstractMeasure, x: ArrayLike
) -> Float[Array, "m e e"]:
    r"""Covariance in the central limit theorem of a map on random tokens.

    For $n$ independent tokens, $\sqrt n\,(\Gamma[\mu_n](x) - \Gamma[\mu](x))$ tends to
    a normal law; for softmax, with $u = \beta A x$, its covariance is
    $$V\,\mathbb{E}\bigl[e^{2\langle u,y\rangle - 2\Lambda(u)}(y-\bar y)(y-\bar y)^\top
      \bigr]V^\top = e^{\Lambda(2u) - 2\Lambda(u)}\, V\bigl[\nabla^2\Lambda(2u)
      + \delta\delta^\top\bigr]V^\top, \quad
      \delta = \nabla\Lambda(2u) - \nabla\Lambda(u),$$
    exact for every measure that knows its log-Laplace transform: for
    $\mathcal{N}(m, S)$ it is $e^{q}V(S + Su\,u^\top S)V^\top$ with $q = u^\top S u$.
    For other maps it is $\int I I^\top\mathrm{d}\mu$ with the influence $I$ of a token,
    the derivative of the output with respect to its mass; this needs a `TokenCloud`.

    Args:
        gamma: the map.
        mu: the law of the tokens; for maps other than softmax a cloud.
        x: the points at which to evaluate, one per row.

    Returns:
        One covariance matrix for each point. Cost on a cloud, for other maps: one
        derivative per coordinate of each output, $O(m e n)$ memory.
    """
    x = as_float_array("x", x)
    if isinstance(gamma, Softmax):
        return _of_softmax(gamma, mu, x)
    if isinstance(mu, TokenCloud):
        return _from_influences(gamma, mu, x)
    raise Unsupported(
        f"{type(gamma).__name__} has a known covariance on a TokenCloud only; use "
        "quadrature(mu, order) or a sample."
    )


def _of_softmax(gamma: Softmax, mu: AbstractMeasure, x: Float[Array, "m d"]):
    tilts = gamma.tilts(x)
    growth = mu.log_laplace(2 * tilts) - 2 * mu.log_laplace(tilts)
    shift = mu.tilted_mean(2 * tilts) - mu.tilted_mean(tilts)

    def tilted_covariance(tilt: Float[Array, " d"]) -> Float[Array, "d d"]:
        return jax.jacfwd(lambda u: mu.tilted_mean(u[None, :])[0])(tilt)

    spread = jax.vmap(tilted_covariance)(2 * tilts)
    spread = spread + shift[:, :, None] * shift[:, None, :]
    covariance = jnp.einsum("fd,mde,ge->mfg", gamma.value, spread, gamma.value)
    return jnp.exp(growth)[:, None, None] * covariance


def _from_influences(gamma, mu: TokenCloud, x: Float[Array, "m d"]):
    def output(weights: Float[Array, " n"]) -> Float[Array, "m e"]:
        own = {"positions": mu.positions, "sums": mu.sums}
        return gamma(TokenCloud(mu.points, weights, **own), x)

    slopes = jax.jacrev(output)(mu.weights)
    influences = slopes - (slopes @ mu.weights)[:, :, None]
    return jnp.einsum("mfn,mgn,n->mfg", influences, influences, mu.weights)
