"""How many clusters a cloud has, by single linkage, and along a trajectory."""

import math
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meanformer.errors import (
    InvalidInput,
    Unsupported,
    as_number,
    check,
    is_concrete,
)
from meanformer.flows import Trajectory
from meanformer.geometry import AbstractSpace, Euclidean, Sphere
from meanformer.measures import TokenCloud
from meanformer.measures.cloud import check_cloud
from meanformer.numerics.linkage import (
    circle_edges,
    close_components,
    components,
    line_edges,
    spanning_edges,
)

MOST_FOR_TREE = 20_000
GAP_RATIO = 10.0
# In units of beta^(-1/2) on the sphere, of the diameter elsewhere.
SPHERE_SHARES = (0.5, 1e-3)
EUCLIDEAN_SHARES = (0.05, 1e-4)


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
    | `"auto"` | floor $10^{-3}\beta^{-1/2}$ | floor $10^{-4}$ `scale` |

    The automatic rule looks for a gap of scales: if no height passes the floor, there
    is one cluster; else the largest ratio $h_{k+1}/h_k$ with $h_{k+1}$ above the floor
    decides if it is 10 or more; else the count is undecided. It looks at tokens, not at
    their measure: two tokens at one point are evidence of a group, where one token of
    their mass is none. Both rules are conventions, not theorems: report the `interval`
    beside the count.

    Args:
        cloud: the tokens; those of weight zero are absent.
        space: where distances are taken, `Euclidean()` by default.
        beta: inverse temperature, for the default and automatic thresholds on the
            sphere.
        threshold: the distance at which the tree is cut, `"auto"`, or `None`.
        scale: the diameter of the cloud at the start, for the same elsewhere.
        smallest_mass: drop clusters lighter than this.

    Returns:
        The clusters. Cost on the host: $O(n\log n)$ time on a line or circle,
        otherwise $O(n^2 d)$ time and $O(nd)$ memory; for more than 20 000 tokens a grid
        finds the groups at a given threshold exactly, and `"auto"` is refused. Not
        under `jit`.
    """
    space = _checked(cloud, space)
    cut = _cut(space, threshold, beta, scale)
    smallest_mass = as_number("smallest_mass", smallest_mass, "a number, zero or more")
    check(
        smallest_mass >= 0,
        f"smallest_mass is {smallest_mass}; it must not be negative.",
    )
    kept = np.flatnonzero(np.asarray(cloud.weights) > 0)
    tokens = _Tokens(
        np.asarray(cloud.points, np.float64)[kept],
        np.asarray(cloud.weights, np.float64)[kept],
        space,
    )
    groups = _groups(tokens, cut)
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
    space = Euclidean() if space is None else space
    needs_scale = scale is None and not _is_number(threshold)
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


class _Tokens(NamedTuple):
    points: np.ndarray
    masses: np.ndarray
    space: AbstractSpace

    def distances(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        # Padded to few lengths, so that few programs serve clouds of all sizes.
        missing = (1 << max(len(first) - 1, 0).bit_length()) - len(first)
        ends = [
            jnp.asarray(np.pad(rows, ((0, missing), (0, 0))))
            for rows in (first, second)
        ]
        return np.asarray(_distance(self.space, *ends), np.float64)[: len(first)]


@eqx.filter_jit
def _distance(space: AbstractSpace, first: Array, second: Array) -> Array:
    return space.distance(first, second)


class _Cut(NamedTuple):
    """Where to cut the tree: at a threshold, or where a gap above the floor is."""

    threshold: float | None
    floor: float


class _Groups(NamedTuple):
    labels: np.ndarray
    heights: np.ndarray | None
    threshold: float
    is_decided: bool
    verdict: str


def _checked(cloud: TokenCloud, space: AbstractSpace | None) -> AbstractSpace:
    check_cloud("cloud", cloud)
    space = Euclidean() if space is None else space
    check(
        isinstance(space, Euclidean | Sphere),
        f"space is {space!r}; it must be Euclidean() or Sphere().",
    )
    if not (is_concrete(cloud.points) and is_concrete(cloud.weights)):
        raise InvalidInput(
            "the number of clusters depends on values that are not known under jit or "
            "grad; count outside of it."
        )
    space.check(cloud.points)
    return space


def _is_number(threshold) -> bool:
    return threshold is not None and not isinstance(threshold, str)


def _cut(space, threshold, beta, scale) -> _Cut:
    if _is_number(threshold):
        given = as_number(
            "threshold", threshold, 'a distance, "auto", or None for the default'
        )
        check(
            given >= 0 and math.isfinite(given),
            f"threshold is {given}; it must be a distance, zero or more.",
        )
        return _Cut(given, 0.0)
    check(
        threshold in (None, "auto"),
        f'threshold is {threshold!r}; it must be a distance, "auto", or None for the '
        "default.",
    )
    unit, (share, floor) = _unit(space, beta, scale)
    return _Cut(None if threshold == "auto" else share * unit, floor * unit)


def _unit(space, beta, scale) -> tuple[float, tuple[float, float]]:
    """Return what thresholds are measured in: 1/sqrt(beta), or the diameter."""
    if isinstance(space, Sphere):
        if beta is None:
            raise InvalidInput(
                "on Sphere() the threshold is measured in beta^(-1/2); pass beta=…, or "
                "threshold=… as an angle."
            )
        beta = as_number("beta", beta)
        check(
            beta > 0 and math.isfinite(beta),
            f"beta is {beta}; the threshold beta^(-1/2) needs it to be positive: pass "
            "threshold=… as an angle.",
        )
        return 1 / math.sqrt(beta), SPHERE_SHARES
    if scale is None:
        raise InvalidInput(
            "in Euclidean() the threshold is a share of the diameter at the start; "
            "pass scale=start.diameter(), or threshold=… as a distance; for tokens on "
            "the sphere pass space=Sphere() and beta=…."
        )
    scale = as_number("scale", scale)
    check(
        scale >= 0 and math.isfinite(scale),
        f"scale is {scale}; it must be a diameter, zero or more.",
    )
    return scale, EUCLIDEAN_SHARES


def _groups(tokens: _Tokens, cut: _Cut) -> _Groups:
    edges = _edges(tokens)
    if edges is None:
        return _groups_without_tree(tokens, cut)
    heights = tokens.distances(tokens.points[edges[:, 0]], tokens.points[edges[:, 1]])
    order = np.argsort(heights, kind="stable")
    edges, heights = edges[order], heights[order]
    threshold, verdict = cut.threshold, "counted at the threshold"
    is_decided = True
    if threshold is None:
        is_decided, threshold, verdict = _automatic(heights, cut.floor)
    labels = components(len(tokens.points), edges[heights <= threshold])
    return _Groups(labels, heights, threshold, is_decided, verdict)


def _edges(tokens: _Tokens) -> np.ndarray | None:
    """Return the edges of a shortest tree, or nothing if that takes too long."""
    points = tokens.points
    dimension, is_round = points.shape[1], isinstance(tokens.space, Sphere)
    if dimension == 1:
        return line_edges(points[:, 0])
    if is_round and dimension == 2:
        return circle_edges(np.arctan2(points[:, 1], points[:, 0]))
    return None if len(points) > MOST_FOR_TREE else spanning_edges(points)


def _groups_without_tree(tokens: _Tokens, cut: _Cut) -> _Groups:
    if cut.threshold is None:
        raise Unsupported(
            'threshold="auto" needs a tree through all tokens, and '
            f"{len(tokens.points)} are more than {MOST_FOR_TREE}; join close ones "
            "first with merge(cloud, tolerance), or give a threshold."
        )
    chord = float(tokens.space.chord(jnp.asarray(cut.threshold)))
    labels = close_components(tokens.points, chord)
    return _Groups(labels, None, cut.threshold, True, "counted at the threshold")


def _automatic(heights: np.ndarray, floor: float) -> tuple[bool, float, str]:
    """Return whether the heights have a gap, where to cut, and why."""
    if len(heights) == 0 or heights[-1] <= floor:
        return True, floor, "one cluster: no step is longer than the floor"
    below = np.append(0.0, heights[:-1])
    apart = np.full_like(heights, np.inf)
    ratios = np.divide(heights, below, out=apart, where=below > 0)
    # The shortest step has none below it: tokens that are all apart show no gap.
    ratios[0] = 0.0
    ratios[heights <= floor] = 0.0
    best = int(ratios.argmax())
    if ratios[best] < GAP_RATIO:
        return False, floor, f"undecided: no ratio of steps reaches {GAP_RATIO:g}"
    return True, float(below[best]), f"a gap: steps grow by a factor {ratios[best]:.3g}"


def _as_clusters(
    cloud: TokenCloud,
    kept: np.ndarray,
    tokens: _Tokens,
    groups: _Groups,
    smallest_mass: float,
) -> Clusters:
    totals = np.bincount(groups.labels, tokens.masses)
    firsts = np.unique(groups.labels, return_index=True)[1]
    order = np.lexsort((firsts, -totals))
    order = order[totals[order] >= smallest_mass]
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
    tokens: _Tokens, labels: np.ndarray, count: int
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


def _separations(tokens: _Tokens, centres: np.ndarray) -> np.ndarray:
    """Return the distance from each centre to the nearest other one."""
    from scipy.spatial import KDTree

    if len(centres) < 2:
        return np.zeros(0)
    # The nearest in the space around is the nearest in the space.
    nearest = KDTree(centres).query(centres, k=2)[1]
    own = nearest[:, 0] == np.arange(len(centres))
    partner = np.where(own, nearest[:, 1], nearest[:, 0])
    return tokens.distances(centres, centres[partner])


def _interval(heights: np.ndarray, threshold: float) -> tuple[float, float | None]:
    shorter, longer = heights[heights <= threshold], heights[heights > threshold]
    low = float(shorter[-1]) if len(shorter) else 0.0
    return low, float(longer[0]) if len(longer) else None
