"""Order parameters: the mean, inner products and distances, the span."""

from collections.abc import Callable, Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from meanformer.errors import (
    as_finite_array,
    as_integer,
    as_number,
    check,
    check_kind,
    check_known,
    is_concrete,
)
from meanformer.flows import Trajectory
from meanformer.geometry import AbstractSpace, Sphere
from meanformer.measures import TokenCloud
from meanformer.measures.cloud import check_cloud
from meanformer.numerics.arrays import matmul, safe_norm
from meanformer.numerics.pair_sums.tiles import map_rows
from meanformer.typing import ArrayLike

PAIRS_AT_ONCE = 2_000_000
BLOCK_AREA = 1 << 20


def order_parameter(cloud: TokenCloud) -> Float[Array, ""]:
    r"""Length of the mean of the tokens: one for a single cluster on the sphere.

    $$R = \Bigl|\sum_i w_i x_i\Bigr|,$$
    the order parameter of Kuramoto on the circle.

    Args:
        cloud: the tokens.

    Returns:
        The length; its derivative is zero where the mean is. Cost: $O(nd)$.
    """
    check_cloud("cloud", cloud)
    return safe_norm(cloud.mean()[None, :])[0]


def inner_products(cloud: TokenCloud) -> Float[Array, " p"]:
    r"""Inner products of all pairs of different tokens.

    $\langle x_i, x_j\rangle$ for $i < j$, in this order; tokens of weight zero are left
    out, and the weights of the others do not matter.

    Args:
        cloud: the tokens, of known weights.

    Returns:
        One number for each pair. Cost: $O(n^2 d)$ time, and the memory of the result:
        for histograms of many tokens use `gram_histogram`.
    """
    check_cloud("cloud", cloud)
    # How many pairs there are depends on the weights.
    otherwise = ", close over the cloud, or use smallest_inner_product"
    check_known("inner_products", cloud.weights, otherwise=otherwise)
    points = cloud.points[np.flatnonzero(np.asarray(cloud.weights) > 0)]
    first, second = np.triu_indices(len(points), 1)
    return matmul(points, points.T)[first, second]


def smallest_inner_product(cloud: TokenCloud) -> Float[Array, ""]:
    r"""Smallest inner product of two tokens, $\min_{i,j} \langle x_i, x_j\rangle$.

    On the sphere it is the cosine of the diameter of the cloud; positive, it says that
    all tokens lie in an open hemisphere.

    Args:
        cloud: the tokens; those of weight zero are absent.

    Returns:
        The smallest product. Cost: $O(n^2 d)$ time, two million pairs of memory.
    """
    check_cloud("cloud", cloud)
    points, present = cloud.points, cloud.weights > 0

    def of_block(block):
        rows, is_row = block
        pairs = is_row[:, None] & present[None, :]
        return jnp.where(pairs, matmul(rows, points.T), jnp.inf).min(axis=1)

    rows_at_once = max(1, PAIRS_AT_ONCE // cloud.count)
    return jnp.min(map_rows(of_block, (points, present), rows_at_once))


def span_dimension(
    cloud: TokenCloud, *, tolerance: float | Float[Array, ""] = 1e-3
) -> Int[Array, ""]:
    r"""Number of eigenvalues of the Gram matrix above a tolerance.

    The Gram matrix $\langle x_i, x_j\rangle$ has the eigenvalues of $\sum_i x_i
    x_i^\top$. Each token of positive weight counts once, as in the published diagrams,
    and the tolerance is absolute: one cluster of $n$ unit vectors has the eigenvalue
    $n$ and no other.

    Args:
        cloud: the tokens; those of weight zero are absent.
        tolerance: the smallest eigenvalue that counts.

    Returns:
        The dimension. Cost: $O(nd\min(n, d))$; usable under `jit` and `vmap`.
    """
    check_cloud("cloud", cloud)
    if is_concrete(tolerance):
        as_number("tolerance", tolerance, "positive", above=0)
    points = jnp.where((cloud.weights > 0)[:, None], cloud.points, 0)
    values = jnp.linalg.svd(points, compute_uv=False)
    return jnp.sum(values**2 > tolerance)


class GramHistogram(eqx.Module):
    r"""Histograms of inner products along depth.

    Attributes:
        depths: the saved depths.
        edges: the ends of the bins.
        masses: the share of pairs in each bin, one row per depth, of sum 1.
    """

    depths: Float[Array, " t"]
    edges: Float[Array, " e"]
    masses: Float[Array, "t b"]


def gram_histogram(trajectory: Trajectory, bins: int | ArrayLike = 40) -> GramHistogram:
    r"""Histogram of the inner products of the tokens at every saved depth.

    The pair of tokens $i$ and $j$ has the mass $w_iw_j$. A token also meets itself:
    so neither the order of tokens nor splitting one in two changes anything, and $n$
    equal tokens put at least $1/n$ in the bin of one.

    Args:
        trajectory: the solution of a flow.
        bins: how many bins of equal width on $[-1, 1]$, for tokens on the sphere; or
            their ends, increasing. What lies outside belongs to the outermost bins.

    Returns:
        The histograms. Cost on the host: $O(n^2 d)$ time for each depth, two million
        pairs of memory.
    """
    check_trajectory(trajectory)
    edges = _edges(trajectory, bins)
    weights = np.asarray(trajectory.weights, np.float64)
    kept = np.flatnonzero(weights > 0)
    rows = [
        _histogram(np.asarray(points, np.float64)[kept], weights[kept], edges)
        for points in trajectory.points
    ]
    arrays = (jnp.asarray(x, trajectory.points.dtype) for x in (edges, np.stack(rows)))
    return GramHistogram(trajectory.depths, *arrays)


def first_passage(
    trajectory: Trajectory,
    levels: Sequence[float] | ArrayLike,
    *,
    space: AbstractSpace | None = None,
) -> tuple[float | None, ...]:
    r"""First depths at which the smallest inner product reaches given levels.

    A level counts as reached between two saved depths if it is at the later one; there
    the depth is located on the interpolation `trajectory.at`, by SciPy's method of
    Brent, not before that of a lower level. What happens between two saved depths and
    is undone there is not seen.

    Args:
        trajectory: the solution of a flow, with all saved tokens on the space.
        levels: the levels, in any order.
        space: brings points back to where they live; `Sphere()` by default.

    Returns:
        One depth for each level; `None` where it is not reached. Cost: one pass over
        the pairs for each saved depth, and a dozen for each level.
    """
    check_trajectory(trajectory)
    space = Sphere() if space is None else space
    check_kind("space", space, AbstractSpace, "a space, such as Sphere()")
    given = np.asarray(as_finite_array("levels", levels, (None,)), np.float64)
    clouds = [trajectory.cloud(index) for index in range(len(trajectory))]
    for cloud in clouds:
        space.check(cloud.points)
    smallest = np.array([_smallest_on(space, cloud) for cloud in clouds])
    found: list[float | None] = [None] * len(given)
    depth = float(trajectory.depths[0])
    for index in np.argsort(given, kind="stable"):
        found[index] = _passage(trajectory, smallest, given[index], space, depth)
        depth = depth if found[index] is None else found[index]
    return tuple(found)


def check_trajectory(trajectory: Trajectory) -> None:
    """Raise unless the trajectory is one of tokens."""
    allowed = "a Trajectory, the solution of a flow of tokens"
    check_kind("trajectory", trajectory, Trajectory, allowed)


def _smallest_on(space: AbstractSpace, cloud: TokenCloud) -> float:
    return float(smallest_inner_product(cloud.moved(space.retract(cloud.points))))


def _passage(trajectory: Trajectory, smallest, level, space, earliest) -> float | None:
    """Return where a level is reached, given where the next lower one is."""
    from scipy.optimize import brentq

    reached = np.flatnonzero(smallest >= level)
    if len(reached) == 0:
        return None
    after = int(reached[0])
    depths = np.asarray(trajectory.depths, np.float64)
    if after == 0 or smallest[after] == level:
        return float(depths[after])
    # Interpolated ends may differ from the saved ones by rounding.
    saved = dict(zip(depths, smallest, strict=True))

    def excess(depth: float) -> float:
        if depth in saved:
            return saved[depth] - level
        return _smallest_on(space, trajectory.at(depth)) - level

    forward = 1 if depths[-1] >= depths[0] else -1
    before = forward * max(forward * depths[after - 1], forward * earliest)
    if excess(before) >= 0:
        return float(before)
    width = 1e-13 * max(1.0, abs(depths[after]))
    return float(brentq(excess, before, depths[after], xtol=width))


def _edges(trajectory: Trajectory, bins: int | ArrayLike) -> np.ndarray:
    if np.ndim(bins) == 0:
        count = as_integer("bins", bins, least=1)
        Sphere().check(trajectory.points[0])
        return np.linspace(-1, 1, count + 1)
    edges = np.asarray(bins, np.float64)
    check(
        edges.ndim == 1 and len(edges) >= 2 and bool((np.diff(edges) > 0).all()),
        "bins must be a number of bins, or at least two ends that increase.",
    )
    return edges


def _histogram(points, weights, edges: np.ndarray) -> np.ndarray:
    total = np.zeros(len(edges) - 1)
    rows = max(1, PAIRS_AT_ONCE // len(points))
    for start in range(0, len(points), rows):
        block = slice(start, start + rows)
        products = np.clip(points[block] @ points.T, edges[0], edges[-1])
        masses = weights[block, None] * weights[None, :]
        total += np.histogram(products, edges, weights=masses)[0]
    return total


class DistanceStatistics(eqx.Module):
    r"""Statistics of $|x - y|$ for two tokens drawn independently from a cloud.

    Attributes:
        mean: $\iint |x-y|\,\mathrm{d}\mu\,\mathrm{d}\mu$.
        largest: the diameter of the support.
        levels: the levels of the quantiles.
        quantiles: for each level $q$ the smallest $r$ with probability at least $q$ of
            $|x-y| \le r$.
    """

    mean: Float[Array, ""]
    largest: Float[Array, ""]
    levels: Float[Array, " q"]
    quantiles: Float[Array, " q"]


def distance_statistics(
    cloud: TokenCloud,
    levels: ArrayLike = (0.05, 0.25, 0.5, 0.75, 0.95),
) -> DistanceStatistics:
    r"""Statistics of the distances between the tokens of a cloud.

    They belong to the measure: a token also meets itself, and neither the order of
    tokens nor splitting one in two changes anything.

    Args:
        cloud: the tokens; those of weight zero are absent.
        levels: levels in $[0, 1]$ of the quantiles to compute.

    Returns:
        The statistics. Cost: $O(n^2 d)$ time, about fifty times for the quantiles,
        which are found by bisection to rounding; memory for one block of pairs.
    """
    levels = as_finite_array("levels", levels, (None,), cloud.points.dtype)
    if is_concrete(levels):
        given = np.asarray(levels)
        inside = bool(((given >= 0) & (given <= 1)).all())
        check(inside, f"levels is {levels}; they must lie in [0, 1].")
    return _statistics(cloud, levels)


@eqx.filter_jit
def _statistics(cloud: TokenCloud, levels: Float[Array, " q"]) -> DistanceStatistics:
    # Absent tokens stand on a present one, so that they cannot be the farthest.
    anchor = cloud.points[jnp.argmax(cloud.weights)]
    present = (cloud.weights > 0)[:, None]
    cloud = cloud.moved(jnp.where(present, cloud.points, anchor[None, :]))
    largest = _of_rows(cloud, jnp.max).max()
    mean = cloud.weights @ _of_rows(cloud, lambda distances: distances @ cloud.weights)
    return DistanceStatistics(mean, largest, levels, _quantiles(cloud, levels, largest))


def _quantiles(cloud: TokenCloud, levels: Array, largest: Array) -> Array:
    """Return the smallest radii within which there is enough mass."""
    enough = levels - 64 * jnp.finfo(levels.dtype).eps

    def halve(_, bracket):
        low, high = bracket
        middle = (low + high) / 2
        is_enough = _mass_within(cloud, middle) >= enough
        return jnp.where(is_enough, low, middle), jnp.where(is_enough, middle, high)

    zeros = jnp.zeros_like(levels)
    steps = jnp.finfo(levels.dtype).nmant + 2
    high = lax.fori_loop(0, steps, halve, (zeros, zeros + largest))[1]
    return jnp.where(_mass_within(cloud, zeros) >= enough, 0, high)


def _mass_within(cloud: TokenCloud, radii: Float[Array, " q"]) -> Float[Array, " q"]:
    """Return the mass of the pairs that are no farther apart than each radius."""

    def masses(distances: Float[Array, " n"]) -> Float[Array, " q"]:
        is_near = distances[None, :] <= radii[:, None]
        return jnp.where(is_near, cloud.weights[None, :], 0).sum(axis=1)

    return cloud.weights @ _of_rows(cloud, masses)


def _of_rows(cloud: TokenCloud, summary: Callable) -> Array:
    """Summarise the distances of each token to all others, a block at a time."""

    def of_row(point):
        differences = point[None, :] - cloud.points
        return summary(jnp.sqrt(jnp.sum(differences**2, axis=1)))

    rows = min(max(1, BLOCK_AREA // cloud.points.size), cloud.count)
    return lax.map(of_row, cloud.points, batch_size=rows)
