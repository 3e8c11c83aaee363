"""How many clusters a cloud has, by single linkage, and along a trajectory."""

import functools
import math
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meanformer.errors import Unsupported, as_number, check, check_kind, check_known
from meanformer.flows import Trajectory
from meanformer.geometry import AbstractSpace, Euclidean, Sphere
from meanformer.measures import TokenCloud
from meanformer.measures.cloud import check_cloud
from meanformer.numerics import linkage
from meanformer.numerics.arrays import norms_of
from meanformer.observables.order import check_trajectory

MOST_FOR_TREE = 20_000
GAP_RATIO = 10.0
# The default threshold, in units of beta^(-1/2) on the sphere, else of the diameter.
SPHERE_SHARE = 0.5
EUCLIDEAN_SHARE = 0.05


class _Tokens(NamedTuple):
    """Present tokens on the host, in double precision."""

    points: np.ndarray
    masses: np.ndarray
    space: AbstractSpace

    def distances(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Return the distance within the space, row by row, in double precision."""
        apart = norms_of(first - second)
        if not isinstance(self.space, Sphere):
            return apart
        return 2 * np.arctan2(apart, norms_of(first + second))


class _Groups(NamedTuple):
    """Groups of tokens, with what decided them."""

    labels: np.ndarray
    heights: np.ndarray | None
    threshold: float
    is_decided: bool
    verdict: str


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
    cut = _cut(space, threshold, beta, scale)
    smallest_mass = as_number("smallest_mass", smallest_mass, "zero or more", least=0)
    kept = np.flatnonzero(np.asarray(cloud.weights) > 0)
    tokens = _Tokens(
        np.asarray(cloud.points, np.float64)[kept],
        np.asarray(cloud.weights, np.float64)[kept],
        space,
    )
    groups = _groups(tokens, *cut)
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
    needs_scale = scale is None and isinstance(threshold, str | None)
    if needs_scale and not isinstance(space, Sphere):
        scale = trajectory.cloud(0).diameter()
    count = functools.partial(
        count_clusters,
        space=space,
        beta=beta,
        threshold=threshold,
        scale=scale,
        smallest_mass=smallest_mass,
    )
    found = tuple(count(trajectory.cloud(index)) for index in range(len(trajectory)))
    counts = [-1 if one.count is None else one.count for one in found]
    return ClusterProfile(trajectory.depths, jnp.asarray(counts, int), found)


def _checked(cloud: TokenCloud, space: AbstractSpace | None) -> AbstractSpace:
    check_cloud("cloud", cloud)
    space = Euclidean() if space is None else space
    check_kind("space", space, Euclidean | Sphere, "Euclidean() or Sphere()")
    otherwise = ", cloud by cloud"
    check_known("count_clusters", cloud.points, cloud.weights, otherwise=otherwise)
    check(
        cloud.points.ndim == 2,
        f"points has shape {cloud.points.shape}, a batch; count cloud by cloud, as in "
        "[count_clusters(path.cloud(-1)) for path in solve_many(flow, clouds, depth)].",
    )
    space.check(cloud.points)
    return space


def _as_clusters(cloud, kept, tokens, groups: _Groups, smallest_mass) -> Clusters:
    """Return groups of the tokens that were kept, those too light dropped."""
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


def _centres(tokens: _Tokens, labels: np.ndarray, count: int):
    """Return weighted means, on the sphere brought back to it, and radii."""
    is_kept = labels >= 0
    points, labels = tokens.points[is_kept], labels[is_kept]
    masses = tokens.masses[is_kept]
    means = np.zeros((count, points.shape[1]))
    np.add.at(means, labels, masses[:, None] * points)
    means = means / np.bincount(labels, masses, minlength=count)[:, None]
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


def _separations(tokens: _Tokens, centres: np.ndarray) -> np.ndarray:
    """Return the distance from each centre to the nearest other one."""
    from scipy.spatial import KDTree

    if len(centres) < 2:
        return np.zeros(0)
    # The nearest in the space around is the nearest in the space.
    scaled = centres / linkage.scale_of(centres)
    nearest = np.asarray(KDTree(scaled).query(scaled, k=2)[1])
    own = nearest[:, 0] == np.arange(len(centres))
    partner = np.where(own, nearest[:, 1], nearest[:, 0])
    return tokens.distances(centres, centres[partner])


def _interval(heights: np.ndarray, threshold: float) -> tuple[float, float | None]:
    shorter, longer = heights[heights <= threshold], heights[heights > threshold]
    low = float(shorter[-1]) if len(shorter) else 0.0
    return low, float(longer[0]) if len(longer) else None


def _cut(space, threshold, beta, scale) -> tuple[float | None, float]:
    """Return where to cut the tree, or nothing for a gap, and the floor for that."""
    allowed = 'a distance, zero or more, "auto", or None for the default'
    if not isinstance(threshold, str | None):
        given = as_number("threshold", threshold, allowed, least=0, below=math.inf)
        return given, 0.0
    check(
        threshold in (None, "auto"),
        f"threshold is {threshold!r}; it must be {allowed}.",
    )
    default = _default_threshold(space, beta, scale)
    return None if threshold == "auto" else default, default / GAP_RATIO


def _default_threshold(space, beta, scale) -> float:
    """Return a share of 1/sqrt(beta) on the sphere, of the diameter elsewhere."""
    if isinstance(space, Sphere):
        check(
            beta is not None,
            "on Sphere() the threshold is measured in beta^(-1/2); pass beta=…, or "
            "threshold=… as an angle.",
        )
        allowed = (
            "positive and finite, for the threshold beta^(-1/2): otherwise pass "
            "threshold=… as an angle"
        )
        beta = as_number("beta", beta, allowed, above=0, below=math.inf)
        return SPHERE_SHARE / math.sqrt(beta)
    check(
        scale is not None,
        "in Euclidean() the threshold is a share of the diameter at the start; pass "
        "scale=start.diameter(), or threshold=… as a distance; for tokens on the "
        "sphere pass space=Sphere() and beta=….",
    )
    allowed = "a diameter, zero or more"
    return EUCLIDEAN_SHARE * as_number("scale", scale, allowed, least=0, below=math.inf)


def _groups(tokens: _Tokens, threshold: float | None, floor: float) -> _Groups:
    """Return the groups that are left when the tree is cut."""
    edges = _edges(tokens)
    if edges is None:
        return _groups_without_tree(tokens, threshold)
    heights = tokens.distances(tokens.points[edges[:, 0]], tokens.points[edges[:, 1]])
    order = np.argsort(heights, kind="stable")
    edges, heights = edges[order], heights[order]
    is_decided, verdict = True, "counted at the threshold"
    if threshold is None:
        is_decided, threshold, verdict = _automatic(heights, floor)
    labels = linkage.components(len(tokens.points), edges[heights <= threshold])
    return _Groups(labels, heights, threshold, is_decided, verdict)


def _edges(tokens: _Tokens) -> np.ndarray | None:
    """Return the edges of a shortest tree, or nothing if that takes too long."""
    points = tokens.points
    dimension, is_round = points.shape[1], isinstance(tokens.space, Sphere)
    if dimension == 1:
        return linkage.line_edges(points[:, 0])
    if is_round and dimension == 2:
        return linkage.circle_edges(np.arctan2(points[:, 1], points[:, 0]))
    return None if len(points) > MOST_FOR_TREE else linkage.spanning_edges(points)


def _groups_without_tree(tokens: _Tokens, threshold: float | None) -> _Groups:
    if threshold is None:
        raise Unsupported(
            'threshold="auto" needs a tree through all tokens, and '
            f"{len(tokens.points)} are more than {MOST_FOR_TREE}; join close ones "
            "first with merge(cloud, tolerance), or give a threshold."
        )
    reach = threshold
    if isinstance(tokens.space, Sphere):
        reach = 2 * math.sin(min(threshold, math.pi) / 2)
    labels = linkage.close_components(
        tokens.points,
        reach,
        lambda first, second: tokens.distances(first, second) <= threshold,
    )
    return _Groups(labels, None, threshold, True, "counted at the threshold")


def _automatic(heights: np.ndarray, floor: float) -> tuple[bool, float, str]:
    """Return whether the heights have a gap, where to cut, and why."""
    # Steps below the floor count as the floor: how short they are is no evidence, and
    # a step of length zero, which only splits an atom, is one of them.
    steps = np.append(floor, np.maximum(heights, floor))
    if steps[-1] <= floor:
        return True, floor, "one cluster: no step is longer than the floor"
    below, apart = steps[:-1], np.where(heights > 0, np.inf, 0.0)
    # A cloud that began at one point has a floor of zero: all tokens apart are far.
    ratios = np.divide(steps[1:], below, out=apart, where=below > 0)
    best = int(ratios.argmax())
    if ratios[best] < GAP_RATIO:
        return False, floor, f"undecided: no ratio of steps reaches {GAP_RATIO:g}"
    return True, float(below[best]), f"a gap: steps grow by a factor {ratios[best]:.3g}"
