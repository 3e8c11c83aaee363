"""Moving a whole measure by a map that sees it."""

from collections.abc import Callable
from typing import overload

import jax
import jax.numpy as jnp
from jaxtyping import Array

from meanformer.attention.abstract import (
    AbstractAttention,
    AbstractInContextMap,
    check_function,
)
from meanformer.errors import Unsupported, as_float_array, check_finite, check_shape
from meanformer.measures import AbstractMeasure, AffineMap, Gaussian, TokenCloud
from meanformer.measures.checks import require
from meanformer.numerics.matrices import matmul
from meanformer.numerics.precision import widened

MapOfPoints = AbstractInContextMap | Callable[[Array], Array]


@overload
def push_forward(gamma: MapOfPoints, mu: TokenCloud) -> TokenCloud: ...


@overload
def push_forward(gamma: MapOfPoints, mu: AbstractMeasure) -> AbstractMeasure: ...


def push_forward(gamma: MapOfPoints, mu: AbstractMeasure) -> AbstractMeasure:
    r"""Move a measure by a map that sees it: $\mu \mapsto \Gamma[\mu]_\#\mu$.

    Atoms move and keep their weights and places. A Gaussian stays one under a map that
    is affine on it: softmax, L2, Sinkhorn and linear attention, their sums, heads,
    residuals and compositions, and the `AffineMap` of a transport.

    Args:
        gamma: an in-context map, or a plain function of points of shape (n, d).
        mu: a token cloud, or a Gaussian.

    Returns:
        A token cloud for a cloud, a Gaussian for a Gaussian.
    """
    if isinstance(mu, Gaussian) and _may_be_affine(gamma):
        return _affine_image(gamma, mu)
    if not isinstance(mu, TokenCloud):
        raise Unsupported(
            f"the image of {type(mu).__name__} has no closed form here; push forward "
            "quadrature(mu, order) or TokenCloud(mu.sample(count, key=key))."
        )
    if isinstance(gamma, AbstractInContextMap):
        return mu.moved(gamma(mu, mu.points, positions=mu.positions))
    check_function("gamma", gamma)
    points = as_float_array("the image of the points", gamma(mu.points))
    check_shape("the image of the points", points, (mu.count, None))
    check_finite("the image of the points", points)
    return mu.moved(points)


def _may_be_affine(gamma: MapOfPoints) -> bool:
    """Whether a map is analytic, so that a look at a few points tells if it is affine.

    A perceptron may be affine where one looks and bent where one does not.
    """
    if not isinstance(gamma, AbstractInContextMap):
        return isinstance(gamma, AffineMap)
    return all(isinstance(part, AbstractAttention) for part in _parts(gamma))


def _parts(gamma: AbstractInContextMap) -> list[AbstractInContextMap]:
    """Return the maps that a map is made of, each made of no other."""

    def is_inner(node) -> bool:
        return node is not gamma and isinstance(node, AbstractInContextMap)

    inner = filter(is_inner, jax.tree.leaves(gamma, is_leaf=is_inner))
    return [part for one in inner for part in _parts(one)] or [gamma]


def _affine_image(gamma: MapOfPoints, mu: Gaussian) -> Gaussian:
    """Return the image of a Gaussian, read off at its mean and a step along each axis.

    One more point tells whether the map is affine; if not, it is refused.
    """
    wide = widened(mu)
    steps = jnp.eye(mu.dimension, dtype=wide.mean().dtype)
    elsewhere = jnp.cos(1 + jnp.arange(mu.dimension, dtype=steps.dtype))[None, :]
    origin = wide.mean()[None, :]
    points = jnp.concatenate([origin, origin + steps, origin + elsewhere])
    in_context = isinstance(gamma, AbstractInContextMap)
    images = gamma(wide, points) if in_context else gamma(points)
    location, rows = images[0], images[1:-1] - images[:1]
    gap = images[-1] - location - matmul(elsewhere, rows)[0]
    rounding = 100 * len(images) * jnp.finfo(images.dtype).eps
    location = require(
        jnp.max(jnp.abs(gap)) <= rounding * jnp.max(jnp.abs(images)),
        location,
        f"{type(gamma).__name__} is not affine on a Gaussian, so the image is not one",
    )
    spread = matmul(rows.T, matmul(wide.covariance(), rows))
    image = Gaussian(location, (spread + spread.T) / 2)
    return jax.tree.map(lambda leaf: leaf.astype(mu.mean().dtype), image)
