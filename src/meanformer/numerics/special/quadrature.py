"""Gauss rules of probability measures, as nodes and weights of total one.

Their tables depend on the order only, so they are computed by numpy in float64.
"""

import math

import numpy as np
from jaxtyping import Float

from meanformer.errors import check

LARGEST_RULE = 5_000_000

Nodes = Float[np.ndarray, " q"]
RuleOnTheLine = tuple[Nodes, Nodes]
Rule = tuple[Float[np.ndarray, "n d"], Float[np.ndarray, " n"]]


def gauss_hermite(order: int) -> RuleOnTheLine:
    """Rule of the standard normal law, exact up to degree 2 order - 1."""
    from scipy.special import roots_hermitenorm

    nodes, masses = roots_hermitenorm(order)
    return nodes, masses / masses.sum()


def gauss_legendre(order: int) -> RuleOnTheLine:
    """Rule of the uniform law on [-1, 1], exact up to degree 2 order - 1."""
    nodes, masses = np.polynomial.legendre.leggauss(order)
    return nodes, masses / masses.sum()


def gauss_panels(ends: Float[np.ndarray, "*b e"], order: int):
    """Nodes and weights of Gauss rules on the panels between increasing ends."""
    nodes, masses = gauss_legendre(order)
    low, width = ends[..., :-1, None], np.diff(ends)[..., None]
    shape = (*ends.shape[:-1], -1)
    places = low + width * (1 + nodes) / 2
    return places.reshape(shape), (width * masses).reshape(shape)


def gauss_gegenbauer(order: int, dimension: int) -> RuleOnTheLine:
    r"""Rule of one coordinate of a uniform point of the sphere, dimension 3 or more.

    The density on $[-1, 1]$ is proportional to $(1 - s^2)^{(d-3)/2}$; the rule is exact
    up to degree 2 order - 1.
    """
    if dimension == 3:
        return gauss_legendre(order)
    from scipy.special import roots_gegenbauer

    nodes, masses = roots_gegenbauer(order, dimension / 2 - 1)
    return nodes, masses / masses.sum()


def tensor_rule(nodes: Nodes, masses: Nodes, dimension: int) -> Rule:
    """Product of a rule with itself: one point for each choice of nodes."""
    check_size(len(nodes), dimension)
    count = len(nodes) ** dimension
    index = np.indices((len(nodes),) * dimension).reshape(dimension, count)
    return nodes[index].T, masses[index].prod(axis=0)


def sphere_rule(dimension: int, order: int) -> Rule:
    """Product rule of the uniform law on the unit sphere.

    Two points in dimension 1; in dimension 2 as many equispaced points as the order,
    exact up to degree order - 1; from dimension 3 on, parallels at Gauss nodes of each
    height over a circle of 2 order points, exact up to degree 2 order - 1.
    """
    if dimension == 1:
        return np.array([[-1.0], [1.0]]), np.full(2, 0.5)
    if dimension == 2:
        return _circle_rule(order)
    check_size(order, dimension - 1, copies=2)
    points, masses = _circle_rule(2 * order)
    for size in range(3, dimension + 1):
        points, masses = _suspend(points, masses, *gauss_gegenbauer(order, size))
    return points, masses


def ball_rule(dimension: int, order: int) -> Rule:
    r"""Product rule of the uniform law on the unit ball, exact to degree 2 order - 1.

    Spheres carry a rule of that degree. What is left after integration over them is a
    polynomial in the squared radius $t$, of degree below the order, whose density is
    proportional to $t^{d/2-1}$ on $[0, 1]$.
    """
    from scipy.special import roots_jacobi

    spheres = (order + 1) // 2
    if dimension > 1:
        check_size(order, dimension - 1, copies=2 * spheres)
    points, masses = sphere_rule(dimension, 2 * order if dimension == 2 else order)
    check_size(spheres * len(points), 1)
    nodes, shares = roots_jacobi(spheres, 0, dimension / 2 - 1)
    radii = np.sqrt((1 + nodes) / 2)
    scaled = (radii[:, None, None] * points).reshape(-1, dimension)
    return scaled, np.outer(shares / shares.sum(), masses).ravel()


def check_size(order: int, dimension: int, copies: int = 1) -> None:
    """Refuse a product rule that would not fit in memory, before it is built."""
    logarithm = math.log10(copies) + dimension * math.log10(order)
    check(
        logarithm <= math.log10(LARGEST_RULE),
        f"a rule of order {order} in dimension {dimension} has about "
        f"1e{logarithm:.1f} nodes; at most {LARGEST_RULE:.0e} are allowed: lower the "
        "order, or use TokenCloud(measure.sample(count, key=key)).",
    )


def _circle_rule(count: int) -> Rule:
    check_size(count, 1)
    angles = 2 * np.pi * np.arange(count) / count
    points = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return points, np.full(count, 1 / count)


def _suspend(
    points: np.ndarray, masses: np.ndarray, heights: np.ndarray, shares: np.ndarray
) -> Rule:
    """Put a copy of a sphere's rule, shrunk to fit, at each height of the next one."""
    radii = np.sqrt(1 - heights**2)
    parallels = radii[:, None, None] * points
    tops = np.broadcast_to(heights[:, None, None], (len(heights), len(points), 1))
    raised = np.concatenate([parallels, tops], axis=2)
    return raised.reshape(-1, points.shape[1] + 1), np.outer(shares, masses).ravel()
