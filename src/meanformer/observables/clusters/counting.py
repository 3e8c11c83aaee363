"""How many clusters a cloud has, by single linkage, and along a trajectory."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meanformer.errors import (
    InvalidInput,
    as_number,
    check,
    is_concrete,
)
from meanformer.flows import Trajectory
from meanformer.geometry import AbstractSpace, Euclidean, Sphere
from meanformer.measures import TokenCloud
from meanformer.measures.cloud import check_cloud
from meanformer.numerics.linkage import scale_of
from meanformer.observables.clusters.tree import (
    Groups,
    Tokens,
    cut_of,
    groups_of,
    is_number,
)
from meanformer.observables.order import check_trajectory


class Clusters(eqx.Module):
    r"""The clusters of a cloud, the heaviest first.

    Attributes:
        count: how many there are; `None` if the automatic rule cannot tell.
        verdict: how the count came about, in words; it begins with "undecided" if there
            is none.
        labels: the cluster of each token; $-1$ for absent tokens and for those of
            clusters that are too light. Where the count is undecided, the groups of
            tokens that are linked by steps no longer than the floor of the rule.
        masses: the mass of each cluster.
        centres: its weighted mean, brought back to the space.
        radii: the largest distance of one of its tokens from the centre.
        separations: the distance from each centre to the nearest other one; empty
            unless there are two.
        heights: lengths of the steps of the shortest tree, the shortest first, that is
            the distances at which groups join; `None` for more than 20 000 tokens that
            are not on a line or circle.
        threshold: the distance at which the tree was cut.
        interval: the distances $\delta$ that give the same groups,
            $a \le \delta < b$; $b$ is `None` if there is one group, and the whole is
            `None` without heights. Clusters that were dropped count here.
    """

    count: int | None = eqx.field(static=True)
    verdict: str = eqx.field(static=True)
    labels: Int[Array, " n"]
    masses: Float[Array, " k"]
    centres: Float[Array, "k d"]
    radii: Float[Array, " k"]
    separations: Float[Array, " s"]
    heights: Float[Array, " h"] | None
    threshold: float = eqx.field(static=True)
    interval: tuple[float, float | None] | None = eqx.field(static=True)


def count_clusters(
    cloud: TokenCloud,
    *,
    space: AbstractSpace | None = None,
    beta: float | Float[Array, ""] | None = None,
    threshold: float | str | None = None,
    scale: float | Float[Array, ""] | None = None,
    smallest_mass: float = 0.0,
) -> Clusters:
    r"""Count the clusters of a cloud: groups linked by chains of short steps.

    With the heights $h_1 \le \dots \le h_{n-1}$ of the shortest tree through the tokens
    (single linkage) there are $1 + \#\{h_k > \delta\}$ groups at the threshold
    $\delta$. Tokens linked by a chain are one group; the rank of the matrix of close
    pairs, which has been used instead, counts a chain of three tokens as three.

    | `threshold` | on `Sphere()` | in $\mathbb{R}^d$ |
    |---|---|---|
    | a number | that angle | that distance |
    | `None` | $\tfrac12\beta^{-1/2}$ | 0.05 `scale` |
    | `"auto"` | floor $\tfrac1{20}\beta^{-1/2}$ | floor 0.005 `scale` |

    The automatic rule looks for a gap of scales. Steps up to the floor, a tenth of the
    default threshold, count as the floor, and a step of that length stands below all:
    how close tokens of one place are, and how often it is listed, decides nothing. If
    no height passes the floor, there is one cluster; else the largest ratio
    $h_{k+1}/h_k$ decides if it is 10 or more, so that a gap reaches the default
    threshold; else the count is undecided. Both rules are conventions, not theorems:
    report the `interval` beside the count.

    Args:
        cloud: the tokens; those of weight zero are absent.
        space: where distances are taken, `Euclidean()` by default.
        beta: inverse temperature, for the default and automatic thresholds on the
            sphere.
        threshold: the distance at which the tree is cut, `"auto"`, or `None`.
        scale: the diameter of the cloud at the start, for the same elsewhere.
        smallest_mass: drop clusters lighter than this by more than rounding.

    Returns:
        The clusters. Lengths are compared in double precision, those of single
        precision as they are. Cost on the host: $O(n\log n)$ time on a line or circle,
        otherwise $O(n^2 d)$ time and $O(nd)$ memory; for more than 20 000 tokens the
        same groups are found at a given threshold without the tree, in less time where
        few tokens have most of the others near, and `"auto"` is refused. Not under
        `jit`.
    """
    space = _checked(cloud, space)
    cut = cut_of(space, threshold, beta, scale)
    smallest_mass = as_number("smallest_mass", smallest_mass, "a number, zero or more")
    check(
        smallest_mass >= 0,
        f"smallest_mass is {smallest_mass}; it must not be negative.",
    )
    kept = np.flatnonzero(np.asarray(cloud.weights) > 0)
    tokens = Tokens(
        np.asarray(cloud.points, np.float64)[kept],
        np.asarray(cloud.weights, np.float64)[kept],
        space,
    )
    groups = groups_of(tokens, cut)
    return _as_clusters(cloud, kept, tokens, groups, smallest_mass)


class ClusterProfile(eqx.Module):
    """The number of clusters along depth.

    Attributes:
        depths: the saved depths.
        counts: the number of clusters at each of them; $-1$ where it is undecided.
        clusters: the clusters themselves.
    """

    depths: Float[Array, " t"]
    counts: Int[Array, " t"]
    clusters: tuple[Clusters, ...]


def cluster_profile(
    trajectory: Trajectory,
    *,
    space: AbstractSpace | None = None,
    beta: float | Float[Array, ""] | None = None,
    threshold: float | str | None = None,
    scale: float | Float[Array, ""] | None = None,
    smallest_mass: float = 0.0,
) -> ClusterProfile:
    """Count the clusters at every saved depth of a trajectory.

    The depths at which tokens meet are found by the solver, not here: solve with
    `merge` and read `trajectory.merges`.

    Args:
        trajectory: the solution of a flow.
        space: as for `count_clusters`; likewise `beta`, `threshold`, `smallest_mass`.
        beta: see there.
        threshold: see there.
        scale: the diameter of the first saved cloud by default.
        smallest_mass: see there.

    Returns:
        The counts. Cost: one count per saved depth.
    """
    check_trajectory(trajectory)
    space = Euclidean() if space is None else space
    needs_scale = scale is None and not is_number(threshold)
    if needs_scale and not isinstance(space, Sphere):
        scale = trajectory.cloud(0).diameter()
    found = tuple(
        count_clusters(
            trajectory.cloud(index),
            space=space,
            beta=beta,
            threshold=threshold,
            scale=scale,
            smallest_mass=smallest_mass,
        )
        for index in range(len(trajectory))
    )
    counts = [-1 if one.count is None else one.count for one in found]
    return ClusterProfile(trajectory.depths, jnp.asarray(counts, int), found)


def _checked(cloud: TokenCloud, space: AbstractSpace | None) -> AbstractSpace:
    check_cloud("cloud", cloud)
    space = Euclidean() if space is None else space
    check(
        isinstance(space, Euclidean | Sphere),
        f"space is {space!r}; it must be Euclidean() or Sphere().",
    )
    if not (is_concrete(cloud.points) and is_concrete(cloud.weights)):
        raise InvalidInput(
            "the number of clusters depends on values that are not known under jit, "
            "vmap or grad; count outside of it, cloud by cloud."
        )
    check(
        cloud.points.ndim == 2,
        f"points has shape {cloud.points.shape}, a batch; count cloud by cloud, as in "
        "[count_clusters(path.cloud(-1)) for path in solve_many(flow, clouds, depth)].",
    )
    space.check(cloud.points)
    return space


def _as_clusters(
    cloud: TokenCloud,
    kept: np.ndarray,
    tokens: Tokens,
    groups: Groups,
    smallest_mass: float,
) -> Clusters:
    totals = np.bincount(groups.labels, tokens.masses)
    firsts = np.unique(groups.labels, return_index=True)[1]
    order = np.lexsort((firsts, -totals))
    rounding = len(kept) * float(jnp.finfo(cloud.weights.dtype).eps)
    order = order[totals[order] >= smallest_mass * (1 - rounding)]
    rank = np.full(len(totals), -1)
    rank[order] = np.arange(len(order))
    labels = np.full(cloud.count, -1)
    labels[kept] = rank[groups.labels]
    centres, radii = _centres(tokens, rank[groups.labels], len(order))
    dtype = cloud.points.dtype
    heights = groups.heights
    return Clusters(
        len(order) if groups.is_decided else None,
        groups.verdict,
        jnp.asarray(labels),
        jnp.asarray(totals[order], dtype),
        jnp.asarray(centres, dtype),
        jnp.asarray(radii, dtype),
        jnp.asarray(_separations(tokens, centres), dtype),
        None if heights is None else jnp.asarray(heights, dtype),
        groups.threshold,
        None if heights is None else _interval(heights, groups.threshold),
    )


def _centres(
    tokens: Tokens, labels: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return weighted means, on the sphere brought back to it, and radii."""
    is_kept = labels >= 0
    points, masses, labels = (
        array[is_kept] for array in (tokens.points, tokens.masses, labels)
    )
    totals = np.bincount(labels, masses, minlength=count)
    means = np.zeros((count, points.shape[1]))
    np.add.at(means, labels, masses[:, None] * points)
    means = means / totals[:, None]
    if isinstance(tokens.space, Sphere):
        norms = np.linalg.norm(means, axis=1)
        # A cluster all around has no mean direction: its first token stands for it.
        firsts = points[np.unique(labels, return_index=True)[1]]
        is_round = norms <= 1e-12
        means = np.where(
            is_round[:, None], firsts, means / np.where(is_round, 1, norms)[:, None]
        )
    radii = np.zeros(count)
    np.maximum.at(radii, labels, tokens.distances(points, means[labels]))
    return means, radii


def _separations(tokens: Tokens, centres: np.ndarray) -> np.ndarray:
    """Return the distance from each centre to the nearest other one."""
    from scipy.spatial import KDTree

    if len(centres) < 2:
        return np.zeros(0)
    # The nearest in the space around is the nearest in the space.
    scaled = centres / scale_of(centres)
    nearest = np.asarray(KDTree(scaled).query(scaled, k=2)[1])
    own = nearest[:, 0] == np.arange(len(centres))
    partner = np.where(own, nearest[:, 1], nearest[:, 0])
    return tokens.distances(centres, centres[partner])


def _interval(heights: np.ndarray, threshold: float) -> tuple[float, float | None]:
    shorter, longer = heights[heights <= threshold], heights[heights > threshold]
    low = float(shorter[-1]) if len(shorter) else 0.0
    return low, float(longer[0]) if len(longer) else None
