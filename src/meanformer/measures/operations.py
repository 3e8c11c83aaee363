"""Measures made from measures: merged, mixed, padded, batched."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from meanformer.errors import check
from meanformer.measures.abstract import AbstractMeasure
from meanformer.measures.checks import checked_weights
from meanformer.measures.cloud import TokenCloud
from meanformer.measures.mixture import Mixture
from meanformer.typing import ArrayLike


def merge(cloud: TokenCloud, tolerance: float = 0.0) -> TokenCloud:
    r"""Join tokens that have met: equal points become one, their weights added.

    Tokens linked by a chain of steps no longer than `tolerance` are replaced by their
    weighted mean; tokens of weight zero are dropped. Tokens at different positions of
    the sequence are never joined. Cost: $O(n \log n)$ through a k-d tree when few
    tokens meet. The number of tokens depends on the values, so not under `jit`.

    Args:
        cloud: the tokens.
        tolerance: largest distance between neighbours that are joined.

    Returns:
        A cloud with one token for each group, in the order of their first members.
    """
    check(tolerance >= 0, f"tolerance is {tolerance}; it must not be negative.")
    kept = np.flatnonzero(np.asarray(cloud.weights) > 0)
    places = None if cloud.positions is None else np.asarray(cloud.positions)[kept]
    labels = _group_labels(np.asarray(cloud.points)[kept], places, tolerance)
    first = np.unique(labels, return_index=True)[1]
    masses, points = cloud.weights[kept], cloud.points[kept]
    totals = jax.ops.segment_sum(masses, labels, len(first))
    # Deviations from the first member: equal points stay what they are, exactly.
    deviations = masses[:, None] * (points - points[first[labels]])
    moments = jax.ops.segment_sum(deviations, labels, len(first))
    return TokenCloud(
        points[first] + moments / totals[:, None],
        totals,
        positions=None if cloud.positions is None else cloud.positions[kept[first]],
        sums=cloud.sums,
    )


def mix(
    measures: Sequence[AbstractMeasure], coefficients: ArrayLike | None = None
) -> AbstractMeasure:
    r"""Combine measures: $\sum_k c_k \mu_k$, a token cloud if all are clouds.

    Args:
        measures: the measures, of one dimension.
        coefficients: $c_k \ge 0$ of total 1; equal ones by default.
    """
    check(len(measures) > 0, "measures is empty; there is nothing to mix.")
    means = jnp.stack([measure.mean() for measure in measures])
    shares = checked_weights(means, coefficients, normalize=False)
    clouds = [measure for measure in measures if isinstance(measure, TokenCloud)]
    if len(clouds) < len(measures):
        return Mixture(shares, measures)
    _check_placed(clouds)
    positions = [cloud.positions for cloud in clouds if cloud.positions is not None]
    return TokenCloud(
        jnp.concatenate([cloud.points for cloud in clouds]),
        jnp.concatenate(
            [share * cloud.weights for share, cloud in zip(shares, clouds, strict=True)]
        ),
        positions=jnp.concatenate(positions) if positions else None,
        sums=clouds[0].sums,
    )


def pad(cloud: TokenCloud, count: int) -> TokenCloud:
    """Append tokens of weight zero, copies of the first, until there are `count`."""
    check(
        count >= cloud.count,
        f"count is {count}; the cloud already has {cloud.count} tokens.",
    )
    missing = count - cloud.count

    def extended(array: Array) -> Array:
        return jnp.concatenate([array, jnp.repeat(array[:1], missing, axis=0)])

    zeros = jnp.zeros((missing,), cloud.weights.dtype)
    positions = None if cloud.positions is None else extended(cloud.positions)
    return TokenCloud(
        extended(cloud.points),
        jnp.concatenate([cloud.weights, zeros]),
        positions=positions,
        sums=cloud.sums,
    )


def batch(clouds: Sequence[TokenCloud]) -> TokenCloud:
    """Stack clouds along a leading axis for `jax.vmap`, padded to the largest count."""
    check(len(clouds) > 0, "clouds is empty; there is nothing to stack.")
    dimensions = [cloud.dimension for cloud in clouds]
    check(
        len(set(dimensions)) == 1,
        f"clouds have dimensions {dimensions}; they must agree.",
    )
    _check_placed(clouds)
    largest = max(cloud.count for cloud in clouds)
    padded = [pad(cloud, largest) for cloud in clouds]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *padded)


def _check_placed(clouds: Sequence[TokenCloud]) -> None:
    placed = [cloud.positions is not None for cloud in clouds]
    check(
        all(placed) or not any(placed),
        "some clouds have positions and some have none; give all of them or none.",
    )


def _group_labels(
    points: np.ndarray, places: np.ndarray | None, tolerance: float
) -> np.ndarray:
    """Label each point by its group, numbered by first appearance."""
    if tolerance == 0:
        rows = points if places is None else np.column_stack([places, points])
        _, labels = np.unique(rows, axis=0, return_inverse=True)
        return _by_appearance(labels.reshape(-1))
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components
    from scipy.spatial import KDTree

    close = KDTree(points).query_pairs(tolerance, output_type="ndarray")
    if places is not None:
        close = close[places[close[:, 0]] == places[close[:, 1]]]
    shape = (len(points), len(points))
    graph = coo_array((np.ones(len(close), bool), (close[:, 0], close[:, 1])), shape)
    return _by_appearance(connected_components(graph, directed=False)[1])


def _by_appearance(labels: np.ndarray) -> np.ndarray:
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), int)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse.reshape(-1)]
