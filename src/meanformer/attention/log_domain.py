r"""Velocities on the sphere that are right at any smallness, as scale and direction.

A token that sees only itself must rest: then its velocity is a sum over the *other*
tokens, and a sum of small terms loses nothing.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from meanformer.attention.abstract import AbstractInContextMap
from meanformer.attention.composition import terms_of
from meanformer.attention.exponential import AbstractExponential
from meanformer.errors import Unsupported, is_concrete
from meanformer.numerics.arrays import matmul

ROUNDINGS = 8


class ScaledVelocity(NamedTuple):
    r"""Velocities of all tokens in one common unit.

    Attributes:
        log_scale: the logarithm of the unit.
        velocities: the velocities in that unit.
        attention: what each token pays to each other one, in that unit: the rate at
            which their gap closes is at most the sum of both ways, if they are alone.
    """

    log_scale: Float[Array, ""]
    velocities: Float[Array, "n d"]
    attention: Float[Array, "n n"]


class _Pull(NamedTuple):
    """What one head contributes, and the speeds that rounding alone explains."""

    velocities: Float[Array, "n d"]
    attention: Float[Array, "n n"]
    roundings: Float[Array, " n"]


def scaled_velocity(
    gamma: AbstractInContextMap,
    points: Float[Array, "n d"],
    weights: Float[Array, " n"],
) -> ScaledVelocity:
    r"""Velocities on the sphere, as a common scale times vectors of ordinary size.

    For values $V = cI$ the token's own value is normal to the sphere, so that
    $$v_i = c\sum_{j \ne i} p_{ij}\,P_{x_i}(x_j - x_i),$$
    with $p_{ij} = w_j e^{s_{ij}}$, divided by $\sum_k w_k e^{s_{ik}}$ for softmax, and
    by the exponential of a shift. The
    largest exponent off the diagonal is taken out, so that the sum keeps its relative
    accuracy where all velocities are below the smallest number of the type. Tokens of
    weight zero rest. Derivatives in the points hold the scale fixed.

    Args:
        gamma: a map that `check_resting` accepts.
        points: unit vectors.
        weights: masses, zero for absence.

    Returns:
        Scale and velocities. Cost: $O(n^2 d)$ time and memory: for few tokens.
    """
    heads, apart = terms_of(gamma, with_heads=True), _apart(weights)
    tables = [_exponents(head, points, points, weights) for head in heads]
    top = _largest_apart(tables, apart)
    scaled = [
        _pull(head, points, jnp.where(apart, table - top, -jnp.inf))
        for head, table in zip(heads, tables, strict=True)
    ]
    velocities = sum(pull.velocities for pull in scaled)
    roundings = sum(pull.roundings for pull in scaled)
    speeds = jnp.linalg.norm(lax.stop_gradient(velocities), axis=1)
    # What rounding explains is nothing: a balance must not be tipped by it.
    moves = (speeds > roundings)[:, None]
    attention = sum(pull.attention for pull in scaled)
    return ScaledVelocity(top, jnp.where(moves, velocities, 0), attention)


def scaled_field(
    gamma: AbstractInContextMap,
    points: Float[Array, "n d"],
    weights: Float[Array, " n"],
    queries: Float[Array, "n d"],
) -> Float[Array, "n d"]:
    r"""Velocities of queries beside the tokens, in the unit of `scaled_velocity`.

    The measure is that of the points, and a query beside the point $x_i$ feels it too,
    $c\,p_{ii}P_q(x_i - q)$. In that unit this may be beyond all numbers: the share is
    cut off at the fourth root of the largest one.

    Args:
        gamma: a map that `check_resting` accepts.
        points: unit vectors.
        weights: masses, zero for absence.
        queries: unit vectors, the $i$-th of them at the $i$-th point or next to it.

    Returns:
        The velocities. Cost: as `scaled_velocity`.
    """
    heads = terms_of(gamma, with_heads=True)
    tables = [_exponents(head, queries, points, weights) for head in heads]
    top = _largest_apart(tables, _apart(weights))
    highest = jnp.log(jnp.finfo(points.dtype).max) / 4
    differences = points[None, :, :] - queries[:, None, :]
    shares = [
        _shares(head, jnp.minimum(table - top, highest))
        for head, table in zip(heads, tables, strict=True)
    ]
    total = jnp.stack(shares).sum(axis=0)
    return _projected(queries, jnp.sum(total[:, :, None] * differences, axis=1))


def check_resting(gamma: AbstractInContextMap) -> None:
    """Raise unless a lone token on the sphere rests under this map, for a known reason.

    That is so for softmax and unnormalised attention whose values are a multiple of
    the tokens, and for sums and heads of those. The values must be known: a traced
    matrix is refused.
    """
    for head in terms_of(gamma, with_heads=True):
        if not isinstance(head, AbstractExponential):
            raise Unsupported(
                f"the solver LongDepth cannot follow {type(head).__name__}; it knows "
                "Softmax, Unnormalised, and sums and heads of these: take an adaptive "
                "or a stiff one."
            )
        _check_values(head)


def _check_values(head: AbstractExponential) -> None:
    if head.value_bias is not None:
        raise Unsupported(
            "value_bias moves a token that sees only itself, so no phase is slow and "
            "LongDepth does not apply; take an adaptive or a stiff solver."
        )
    if not is_concrete(head.value):
        raise Unsupported(
            "value is not known here, and LongDepth() must see that it is a multiple "
            "of the identity; under jit, vmap or grad close over the map instead of "
            "passing its matrices as arguments of the transformed function."
        )
    value = np.asarray(head.value)
    multiple = value.shape[0] == value.shape[1] and np.array_equal(
        value, value[0, 0] * np.eye(len(value), dtype=value.dtype)
    )
    if not multiple:
        raise Unsupported(
            "value is not a multiple of the identity, so a token that sees only itself "
            "moves, no phase is slow and LongDepth does not apply; take an adaptive or "
            "a stiff solver."
        )


def _apart(weights: Float[Array, " n"]) -> Bool[Array, "n n"]:
    """Return which token is moved by which other one."""
    return (weights > 0)[:, None] & ~jnp.eye(len(weights), dtype=bool)


def _largest_apart(
    tables: list[Float[Array, "n n"]], apart: Bool[Array, "n n"]
) -> Float[Array, ""]:
    """Return the largest exponent between different tokens; zero if there is none."""
    tops = [jnp.where(apart, table, -jnp.inf).max() for table in tables]
    top = lax.stop_gradient(jnp.stack(tops).max())
    return jnp.where(jnp.isfinite(top), top, 0)


def _exponents(
    head: AbstractExponential,
    queries: Float[Array, "n d"],
    points: Float[Array, "n d"],
    weights: Float[Array, " n"],
) -> Float[Array, "n n"]:
    """Return the logarithm of what queries pay to points; absent ones get nothing."""
    present = weights > 0
    scores = matmul(head.tilts(queries), points.T)
    masked = jnp.where(present[None, :], scores, -jnp.inf)
    exponents = masked + jnp.log(jnp.where(present, weights, 1))[None, :]
    if head.is_normalised:
        highest = exponents.max(axis=1, keepdims=True)
        total = jnp.exp(exponents - highest).sum(axis=1, keepdims=True)
        exponents = exponents - highest - jnp.log(total)
    return head.shifted(exponents)


def _shares(
    head: AbstractExponential, exponents: Float[Array, "n n"]
) -> Float[Array, "n n"]:
    """Return attention times the multiple of the tokens that the values are."""
    return head.value[0, 0] * jnp.exp(exponents)


def _projected(
    points: Float[Array, "n d"], vectors: Float[Array, "n d"]
) -> Float[Array, "n d"]:
    return vectors - jnp.sum(points * vectors, axis=1, keepdims=True) * points


def _pull(
    head: AbstractExponential,
    points: Float[Array, "n d"],
    exponents: Float[Array, "n n"],
) -> _Pull:
    """Return what one head contributes, given what is paid to other tokens."""
    shares = _shares(head, exponents)
    differences = points[None, :, :] - points[:, None, :]
    velocities = _projected(points, jnp.sum(shares[:, :, None] * differences, axis=1))
    # A score is rounded relative to its size, and its exponential by that much; tokens
    # that went there by such velocities are off by as much again.
    scores = lax.stop_gradient(matmul(head.tilts(points), points.T))
    largest = jnp.where(jnp.isfinite(exponents), jnp.abs(scores), 0).max()
    sizes = jnp.sum(jnp.abs(shares) * jnp.linalg.norm(differences, axis=2), axis=1)
    rounding = ROUNDINGS * jnp.finfo(points.dtype).eps * (1 + largest) ** 2
    return _Pull(velocities, jnp.abs(shares), lax.stop_gradient(rounding * sizes))
