"""The number of modes of the density of a cloud, counted with a certificate."""

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int

from meanformer.errors import (
    as_integer,
    as_key,
    as_number,
    check,
    check_kind,
    check_known,
)
from meanformer.geometry import AbstractSpace, Euclidean, Sphere
from meanformer.measures import TokenCloud
from meanformer.measures.cloud import check_cloud
from meanformer.observables.modes import kernels, sign_changes
from meanformer.observables.modes.sign_changes import SignChanges, Sites
from meanformer.typing import Key

_MARGIN = 12.0  # bandwidths beyond which a token does not matter
_STRETCH = 2000.0  # bandwidths of a Poisson process that are counted at once
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
    sites = _sites(cloud, _bump(beta, space))
    found = sign_changes.find_sign_changes(sites)
    places = sites.bump.wrapped(_refined(sites, found))
    dtype = cloud.points.dtype
    return Modes(
        int(found.is_mode.sum()),
        len(found.undecided) == 0,
        jnp.asarray(np.sort(places[found.is_mode]), dtype),
        jnp.asarray(np.sort(places[~found.is_mode]), dtype),
        jnp.asarray(found.undecided, dtype),
    )


def _bump(beta, space: AbstractSpace | None) -> kernels.AbstractBump:
    """Return what each token carries on the line or circle, or raise."""
    allowed = "Euclidean(), for the line, or Sphere(), for the circle"
    check_kind("space", space, Euclidean | Sphere | None, allowed)
    kind = kernels.CircleBump if isinstance(space, Sphere) else kernels.LineBump
    return kind(kernels.checked_beta(beta))


def _sites(cloud: TokenCloud, bump: kernels.AbstractBump) -> Sites:
    check_cloud("cloud", cloud)
    check_known("count_modes", cloud.points, cloud.weights)
    check(
        cloud.dimension == (1 if bump.period is None else 2),
        f"cloud has dimension {cloud.dimension}; modes are counted on the line "
        "(dimension 1) and, with space=Sphere(), on the circle (dimension 2).",
    )
    places = np.asarray(cloud.points, np.float64).T
    if bump.period is not None:
        Sphere().check(cloud.points)
        places = np.arctan2(places[1:], places[:1])
    return sign_changes.sites_of(places[0], np.asarray(cloud.weights, np.float64), bump)


def _refined(sites: Sites, found: SignChanges) -> np.ndarray:
    """The zero of the derivative in each interval, by bisection."""
    low, high = found.low.copy(), found.high.copy()
    if len(low) == 0:
        return low
    before = np.where(found.is_mode, 1, -1)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        is_before = sign_changes.derivative_signs(sites, middle) == before
        low = np.where(is_before, middle, low)
        high = np.where(is_before, high, middle)
    return 0.5 * (low + high)


class ModeSample(eqx.Module):
    """Numbers of modes of independent clouds.

    Attributes:
        counts: the number of modes of each.
        mean: their mean.
        standard_error: of the mean.
        is_certified: whether every count is proved.
    """

    counts: Int[Array, " b"]
    mean: float = eqx.field(static=True)
    standard_error: float = eqx.field(static=True)
    is_certified: bool = eqx.field(static=True)


def sample_modes(
    count: int,
    beta: float | Float[Array, ""],
    samples: int,
    *,
    space: AbstractSpace | None = None,
    key: Key,
) -> ModeSample:
    r"""Count the modes of clouds of random tokens, exactly, and average.

    The tokens are independent: standard normal on the line, uniform on the circle.

    Args:
        count: the number of tokens of a cloud.
        beta: inverse temperature, positive; the square of one over the bandwidth.
        samples: how many clouds, at least two.
        space: `Euclidean()` by default, or `Sphere()` for the circle.
        key: random key.

    Returns:
        The counts, their mean and its standard error. Cost: one count per cloud.
    """
    count = as_integer("count", count, least=1)
    samples = as_integer("samples", samples, least=2)
    bump, shape = _bump(beta, space), (samples, count)
    if bump.period is None:
        places = jr.normal(as_key(key), shape)
    else:
        places = bump.period * jr.uniform(as_key(key), shape)
    found = [_of_equal_tokens(row, bump) for row in np.asarray(places, np.float64)]
    counts = np.array([one.is_mode.sum() for one in found])
    return _sample(counts, counts, found)


def sample_poisson_modes(rate: float, length: float, *, key: Key) -> ModeSample:
    r"""Count the modes of the density of a Poisson process, per bandwidth.

    This estimates $F(\lambda)$ of `poisson_mode_density`: tokens fall on the line at
    the rate $\lambda$ per bandwidth, and each carries a Gaussian of bandwidth one.

    Args:
        rate: the mean number $\lambda > 0$ of tokens per bandwidth.
        length: how many bandwidths to look at, rounded up to a multiple of 2000, and at
            least 4000.
        key: random key.

    Returns:
        The counts of stretches of 2000 bandwidths, and the mean number of modes per
        bandwidth with its standard error. Cost: $O((1 + \lambda)\,\text{length})$.
    """
    rate, length = (
        as_number(name, value, "positive and finite", above=0, below=np.inf)
        for name, value in (("rate", rate), ("length", length))
    )
    stretches = max(2, int(np.ceil(length / _STRETCH)))
    expected = rate * (_STRETCH + 2 * _MARGIN)
    # More gaps than are ever needed, so that all draws have one shape.
    enough = int(expected + 10 * np.sqrt(expected) + 30)
    found = [
        _of_equal_tokens(_poisson(rate, enough, one), kernels.LineBump(1.0))
        for one in jr.split(as_key(key), stretches)
    ]
    counts = np.array(
        [(one.is_mode & (one.low >= 0) & (one.low < _STRETCH)).sum() for one in found]
    )
    return _sample(counts, counts / _STRETCH, found)


def _poisson(rate: float, enough: int, key: Key) -> np.ndarray:
    gaps = np.asarray(jr.exponential(key, (enough,)), np.float64) / rate
    places = np.cumsum(gaps) - _MARGIN
    inside = places < _STRETCH + _MARGIN
    return places[inside] if inside.any() else places[:1]


def _of_equal_tokens(places: np.ndarray, bump: kernels.AbstractBump) -> SignChanges:
    weights = np.full(len(places), 1 / len(places))
    return sign_changes.find_sign_changes(sign_changes.sites_of(places, weights, bump))


def _sample(counts: np.ndarray, values, found: list[SignChanges]) -> ModeSample:
    return ModeSample(
        jnp.asarray(counts, int),
        float(values.mean()),
        float(values.std(ddof=1) / np.sqrt(len(values))),
        all(len(one.undecided) == 0 for one in found),
    )
