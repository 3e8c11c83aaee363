"""Moving a whole measure by a map that sees it."""

from typing import overload

from meanformer.attention.abstract import AbstractInContextMap, check_function
from meanformer.attention.affine import MapOfPoints, affine_image
from meanformer.errors import Unsupported, as_finite_array
from meanformer.measures import AbstractMeasure, Gaussian, TokenCloud


@overload
def push_forward(gamma: MapOfPoints, mu: TokenCloud) -> TokenCloud: ...


@overload
def push_forward(gamma: MapOfPoints, mu: AbstractMeasure) -> AbstractMeasure: ...


def push_forward(gamma: MapOfPoints, mu: AbstractMeasure) -> AbstractMeasure:
    r"""Move a measure by a map that sees it: $\mu \mapsto \Gamma[\mu]_\#\mu$.

    Atoms move and keep their weights and places. A Gaussian stays one under a map that
    is affine on it: softmax, L2, Sinkhorn and linear attention, perceptrons without
    activation, their sums, heads, residuals and compositions, and the `AffineMap` of a
    transport.

    Args:
        gamma: an in-context map, or a plain function of points of shape (n, d).
        mu: a token cloud, or a Gaussian.

    Returns:
        A token cloud for a cloud, a Gaussian for a Gaussian.
    """
    if isinstance(mu, Gaussian):
        return affine_image(gamma, mu)
    if not isinstance(mu, TokenCloud):
        raise Unsupported(
            f"the image of {type(mu).__name__} has no closed form here; push forward "
            "quadrature(mu, order) or TokenCloud(mu.sample(count, key=key))."
        )
    if isinstance(gamma, AbstractInContextMap):
        return mu.moved(gamma(mu, mu.points, positions=mu.positions))
    check_function("gamma", gamma)
    points = as_finite_array(
        "the image of the points", gamma(mu.points), (mu.count, None)
    )
    return mu.moved(points)
