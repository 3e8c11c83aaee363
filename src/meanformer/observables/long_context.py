r"""Long contexts: what one layer does when the temperature falls like a logarithm."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import AbstractAttention, identity_attention
from meanformer.errors import as_doubles, as_number, check, check_kind, is_concrete
from meanformer.geometry import Sphere
from meanformer.measures import TokenCloud
from meanformer.measures.cloud import check_cloud
from meanformer.numerics.arrays import cast, safe_norm, unit_rows
from meanformer.typing import ArrayLike

# Beyond this exponent a term is as good as infinite.
LARGEST_EXPONENT = 600.0
Numbers = Float[np.ndarray, "*s"]


def long_context_similarity(
    count: ArrayLike, gamma: ArrayLike, rho: ArrayLike
) -> Numbers:
    r"""Return the cosine between outputs of one layer at $\beta = \gamma\log n$.

    For $n$ unit tokens with $\langle x_i, x_j\rangle = \rho$ and softmax attention with
    $Q = K = V = I$, without the residual,
    $$\cos(A_i, A_j) = 1 - \frac{1-\rho}{1 + 2\kappa/z + n\kappa/z^2}, \qquad
      z = n^{\gamma(1-\rho)} - 1, \quad \kappa = 1 + (n-1)\rho .$$
    Exact for every $n$. As $n \to \infty$ it is `long_context_limit` [Rig25].

    Args:
        count: numbers $n \ge 2$ of tokens, up to $10^{300}$.
        gamma: $\beta/\log n$, not negative.
        rho: inner products from $-1/(n-1)$ to 1. All three broadcast.

    Returns:
        The cosines, in the shape of all three; computed in logarithms.
    """
    n, gamma, rho = _checked(count, gamma=gamma, rho=rho)
    check(bool((gamma >= 0).all()), f"gamma is {gamma}; it must not be negative.")
    kappa = 1 + (n - 1) * rho
    kappa = np.where(np.abs(kappa) <= 4 * np.finfo(float).eps, 0, kappa)
    check(
        bool((kappa >= 0).all() and (rho <= 1).all()),
        "rho must lie between -1/(n-1) and 1: unit vectors have no others.",
    )
    score = gamma * np.log(n) * (1 - rho)
    is_flat = (kappa == 0) & (score == 0)
    check(
        not is_flat.any(),
        "a simplex at gamma = 0 has zero attention and no cosines: raise rho or gamma.",
    )
    with np.errstate(divide="ignore"):
        log_z = score + np.log(-np.expm1(-score))
        log_kappa = np.log(kappa)
    logs = np.log(2) + log_kappa - log_z, np.log(n) + log_kappa - 2 * log_z
    first, second = np.exp(np.minimum(logs, LARGEST_EXPONENT))
    return np.asarray(1 - (1 - rho) / (1 + first + second))


def long_context_critical(rho: ArrayLike) -> Numbers:
    r"""Return the critical $\gamma = 1/(1-\rho)$ of long contexts.

    Args:
        rho: inner products, from 0 on and below 1.
    """
    rho = _inside("rho", rho)
    return np.asarray(1 / (1 - rho))


def long_context_limit(gamma: ArrayLike, rho: ArrayLike) -> Numbers:
    r"""Return the limit of `long_context_similarity` for infinitely many tokens.

    It is 1 for $\gamma < 1/(1-\rho)$: one layer maps all tokens to one direction;
    $4\rho/(1+3\rho)$ at $\gamma = 1/(1-\rho)$, to rounding; and $\rho$ above: the layer
    is the identity on directions [Rig25].

    Args:
        gamma: $\beta/\log n$.
        rho: inner products, above 0 and below 1.
    """
    gamma, rho = np.broadcast_arrays(_numbers("gamma", gamma), _inside("rho", rho))
    check(bool((rho > 0).all()), "rho must be positive; at 0 the limit is another one.")
    position = gamma * (1 - rho) - 1
    is_critical = np.abs(position) <= 8 * np.finfo(float).eps
    away = np.where(position < 0, 1.0, rho)
    return np.where(is_critical, 4 * rho / (1 + 3 * rho), away)


def long_context_gamma(
    count: ArrayLike, similarity: ArrayLike, rho: ArrayLike
) -> Numbers:
    r"""Return the $\gamma$ at which outputs have a given cosine: the exact inverse.

    With $m = (1-\rho)/(1-\text{similarity})$ it solves the quadratic
    $1 + 2\kappa/z + n\kappa/z^2 = m$ in $1/z$. The transition between two cosines has
    a width in $\gamma$ of order $1/\log n$: this is how it sharpens.

    Args:
        count: numbers of tokens.
        similarity: cosines, above $\rho$ and below 1.
        rho: inner products, above $-1/(n-1)$ and below 1.
    """
    n, similarity, rho = _checked(count, similarity=similarity, rho=rho)
    kappa = 1 + (n - 1) * rho
    check(
        bool((kappa > 0).all() and (similarity > rho).all() and (similarity < 1).all()),
        "similarity must lie above rho and below 1, and rho above -1/(n-1).",
    )
    excess = (1 - rho) / (1 - similarity) - 1
    # In t = n/z and with share = kappa/n: share t^2 + 2 share t = excess.
    share = kappa / n
    t = excess / (share + np.sqrt(share**2 + share * excess))
    log_z = np.log(n) - np.log(t)
    return np.asarray(np.logaddexp(0, log_z) / ((1 - rho) * np.log(n)))


def long_context_scan(
    counts: ArrayLike, gammas: ArrayLike, rhos: ArrayLike
) -> Float[np.ndarray, "c g r"]:
    """Return the cosines for all choices of count, gamma and inner product.

    Args:
        counts: numbers of tokens.
        gammas: values of gamma.
        rhos: inner products.
    """
    grid = np.meshgrid(counts, gammas, rhos, indexing="ij")
    return long_context_similarity(*grid)


class ContextSimilarity(eqx.Module):
    r"""What one layer at $\beta = \gamma\log n$ does to the cosines of real tokens.

    Averages are over pairs of different tokens, by their weights.

    Attributes:
        beta: the inverse temperature.
        before: average cosine of the tokens.
        after: average cosine of the outputs.
        predicted: what `long_context_similarity` says for tokens that all have the
            average cosine; a comparison, not a theorem, for other tokens.
        critical: the $\gamma$ at which such tokens have their transition.
        outputs: the directions of the outputs.
    """

    beta: Float[Array, ""]
    before: Float[Array, ""]
    after: Float[Array, ""]
    predicted: Float[Array, ""]
    critical: Float[Array, ""]
    outputs: Float[Array, "n d"]


def context_similarity(
    cloud: TokenCloud, gamma: float, *, attention: AbstractAttention | None = None
) -> ContextSimilarity:
    r"""Measure what one layer of attention at $\beta = \gamma\log n$ does to tokens.

    Args:
        cloud: tokens on the unit sphere; $n$ counts those of positive weight, so that
            it, and the averages, change if one is split into two at the same place.
        gamma: $\beta/\log n$.
        attention: the layer, whose `beta` is replaced; softmax with $Q = K = V = I$ by
            default.

    Returns:
        Average cosines before and after. Cost: that of one layer, and $O(nd)$ for the
        averages, which need no pairs.
    """
    check_cloud("cloud", cloud)
    gamma = as_number("gamma", gamma, "a number from 0 on", least=0)
    check(is_concrete(cloud.points), "context_similarity needs known tokens, not jit.")
    Sphere().check(cloud.points)
    count = int((np.asarray(cloud.weights) > 0).sum())
    check(count >= 2, f"the cloud has {count} token of positive weight; it needs two.")
    beta = jnp.asarray(gamma * np.log(count), cloud.points.dtype)
    layer = _at_temperature(attention, cloud, beta)
    before = mean_cosine(cloud.points, cloud.weights)
    images = layer(cloud, cloud.points, positions=cloud.positions)
    lost = (np.asarray(safe_norm(images)) == 0) & (np.asarray(cloud.weights) > 0)
    check(
        not lost.any(),
        f"the output of token {lost.argmax()} is zero and has no direction.",
    )
    outputs = unit_rows(images)
    level = float(np.clip(before, -1 / (count - 1), 1))
    critical = 1 / (1 - level) if level < 1 else np.finfo(beta.dtype).max
    predicted = long_context_similarity(count, gamma, level)
    return ContextSimilarity(
        beta,
        before,
        mean_cosine(outputs, cloud.weights),
        jnp.asarray(predicted, beta.dtype),
        jnp.asarray(critical, beta.dtype),
        outputs,
    )


def mean_cosine(
    directions: Float[Array, "n d"], weights: Float[Array, " n"]
) -> Float[Array, ""]:
    r"""Return the average inner product of two different tokens.

    $$\frac{\sum_{j<i} w_iw_j\langle x_i, x_j\rangle}{\sum_{j<i} w_iw_j},$$
    by partial sums over tokens, not pairs: $O(nd)$, without cancellation for weights
    however unequal. It is the average over pairs of atoms: an atom that is split into
    two adds a pair of cosine 1. Without two tokens of positive weight it is 0.

    Args:
        directions: unit vectors.
        weights: their masses.
    """
    present = (weights > 0)[:, None]
    points = weights[:, None] * jnp.where(present, directions, 0)
    pairs = jnp.sum(points[1:] * jnp.cumsum(points, axis=0)[:-1])
    mass = jnp.sum(weights[1:] * jnp.cumsum(weights)[:-1])
    return pairs / jnp.where(mass > 0, mass, 1)


def _at_temperature(
    attention: AbstractAttention | None, cloud: TokenCloud, beta: Float[Array, ""]
) -> AbstractAttention:
    if attention is None:
        layer = identity_attention("softmax", cloud.dimension, beta)
        return cast(layer, cloud.points.dtype)
    allowed = "one attention with a beta, such as Softmax(query, key, value)"
    check_kind("attention", attention, AbstractAttention, allowed)
    return eqx.tree_at(lambda layer: layer.beta, attention, beta)


def _numbers(name: str, value: ArrayLike) -> Numbers:
    array = as_doubles(name, value)
    check(bool(np.isfinite(array).all()), f"{name} is {value}; it must be finite.")
    return array


def _inside(name: str, value: ArrayLike) -> Numbers:
    array = _numbers(name, value)
    check(
        bool((array >= 0).all() and (array < 1).all()),
        f"{name} is {value}; it must be from 0 on and below 1.",
    )
    return array


def _checked(count: ArrayLike, **others: ArrayLike):
    numbers = [_numbers(name, value) for name, value in others.items()]
    n = _numbers("count", count)
    check(bool((n >= 2).all()), f"count is {count}; it must be 2 or more.")
    return np.broadcast_arrays(n, *numbers)
