"""The number of modes of the density of a cloud, counted with a certificate."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import InvalidInput, check, is_concrete
from meanformer.geometry import AbstractSpace, Euclidean, Sphere
from meanformer.measures import TokenCloud
from meanformer.measures.cloud import check_cloud
from meanformer.observables.modes.crossings import (
    Crossings,
    Sites,
    crossings,
    derivative_signs,
    sites_of,
)
from meanformer.observables.modes.kernels import CircleBump, LineBump, checked_beta

_BISECTIONS = 54


class Modes(eqx.Module):
    r"""The modes of the density of a cloud.

    Attributes:
        count: how many there are.
        is_certified: whether the count is proved by bounds of all errors. If not, the
            density is flat up to rounding somewhere, and `undecided` says where.
        positions: where they are, in order; angles in $[0, 2\pi)$ on the circle.
        valleys: the minima, in order: one between neighbours, on the circle as many
            as modes, or none if the whole density is flat up to rounding.
        undecided: intervals, one per row, on which the derivative is too close to zero
            for its sign. Such an interval counts as one mode if the density rises
            before it and falls behind it, and as none otherwise. On the circle each
            begins in $[0, 2\pi)$; if the whole density is flat, it is all of it.
    """

    count: int = eqx.field(static=True)
    is_certified: bool = eqx.field(static=True)
    positions: Float[Array, " k"]
    valleys: Float[Array, " v"]
    undecided: Float[Array, "u 2"]


def count_modes(
    cloud: TokenCloud,
    beta: float | Float[Array, ""],
    *,
    space: AbstractSpace | None = None,
) -> Modes:
    r"""Count the modes of the kernel density of a cloud on the line or circle, exactly.

    $$f(t) = \sum_i w_i\,e^{-\beta(t - x_i)^2/2} \quad\text{or}\quad
      f(\theta) = \sum_i w_i\,e^{\beta\cos(\theta - \theta_i)},$$
    of bandwidth $\beta^{-1/2}$. A mode needs $f'' \le 0$, hence a token within one
    bandwidth (on the circle within the angle $a$ with $\beta\sin^2 a = \cos a$); so
    only cells around tokens are looked at, and between them $f$ is convex. On each
    cell $f'$ is a polynomial up to a bounded error, and cells are halved until its
    coefficients prove how often it changes its sign: the count does not depend on a
    grid, nor on the order of tokens or how one is split. On the line it never exceeds
    the number of tokens and never decreases with $\beta$ (a theorem for Gaussians).

    Args:
        cloud: the tokens, of dimension one, or unit vectors of the plane on `Sphere()`;
            those of weight zero are absent.
        beta: inverse temperature, positive; the square of one over the bandwidth, which
            has to be longer than the rounding of the places in double precision.
        space: `Euclidean()` by default, or `Sphere()`.

    Returns:
        The modes, found on the host in double precision. Cost: $O(n\log n)$ and, for
        each bandwidth of length near tokens, the number of tokens within about ten
        bandwidths; empty space costs nothing. Not under `jit`.
    """
    sites = _sites(cloud, beta, space)
    found = crossings(sites)
    places = _refined(sites, found)
    dtype = cloud.points.dtype
    return Modes(
        int(found.is_mode.sum()),
        len(found.undecided) == 0,
        jnp.asarray(_ordered(places[found.is_mode], sites), dtype),
        jnp.asarray(_ordered(places[~found.is_mode], sites), dtype),
        jnp.asarray(found.undecided, dtype),
    )


def is_circle(space: AbstractSpace | None) -> bool:
    """Whether the space is the circle; raise unless it is that or the line."""
    check(
        space is None or isinstance(space, Euclidean | Sphere),
        f"space is {space!r}; it must be Euclidean(), for the line, or Sphere(), for "
        "the circle.",
    )
    return isinstance(space, Sphere)


def _sites(cloud: TokenCloud, beta, space: AbstractSpace | None) -> Sites:
    check_cloud("cloud", cloud)
    beta, on_circle = checked_beta(beta), is_circle(space)
    if not (is_concrete(cloud.points) and is_concrete(cloud.weights)):
        raise InvalidInput(
            "the number of modes depends on values that are not known under jit or "
            "grad; count outside of it."
        )
    wanted = 2 if on_circle else 1
    check(
        cloud.dimension == wanted,
        f"cloud has dimension {cloud.dimension}; modes are counted on the line "
        "(dimension 1) and, with space=Sphere(), on the circle (dimension 2).",
    )
    points = np.asarray(cloud.points, np.float64)
    weights = np.asarray(cloud.weights, np.float64)
    if not on_circle:
        return sites_of(points[:, 0], weights, LineBump(beta))
    Sphere().check(cloud.points)
    angles = np.arctan2(points[:, 1], points[:, 0])
    return sites_of(angles, weights, CircleBump(beta))


def _refined(sites: Sites, found: Crossings) -> np.ndarray:
    """The zero of the derivative in each interval, by bisection."""
    low, high = found.low.copy(), found.high.copy()
    if len(low) == 0:
        return low
    before = np.where(found.is_mode, 1, -1)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        is_before = derivative_signs(sites, middle) == before
        low = np.where(is_before, middle, low)
        high = np.where(is_before, high, middle)
    return 0.5 * (low + high)


def _ordered(places: np.ndarray, sites: Sites) -> np.ndarray:
    return np.sort(sites.bump.wrapped(places))
