"""Measures made from measures: merged, mixed, padded, resampled, batched."""

from collections.abc import Sequence
from typing import SupportsIndex

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from meanformer.errors import (
    Unsupported,
    as_integer,
    as_key,
    as_number,
    check,
    check_choice,
    check_kind,
    check_known,
)
from meanformer.measures.abstract import AbstractMeasure
from meanformer.measures.checks import checked_weights
from meanformer.measures.cloud import AbstractWeightedCloud, TokenCloud, check_cloud
from meanformer.measures.mixture import Mixture, check_measures
from meanformer.numerics.arrays import widened
from meanformer.numerics.linkage import close_components
from meanformer.typing import ArrayLike, Key


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
    check_cloud("cloud", cloud)
    tolerance = as_number("tolerance", tolerance, "a number, zero or more", least=0)
    # The number of tokens left depends on them.
    check_known("merge", cloud.points, cloud.weights)
    kept = np.flatnonzero(np.asarray(cloud.weights) > 0)
    # In float64, because many small masses in one group would round away in float32.
    masses = np.asarray(cloud.weights, np.float64)[kept]
    points = np.asarray(cloud.points, np.float64)[kept]
    places = None if cloud.positions is None else np.asarray(cloud.positions)[kept]
    labels = group_labels(points, places, tolerance)
    first = np.unique(labels, return_index=True)[1]
    totals = np.bincount(labels, masses)
    # Deviations from the first member: equal points stay what they are, exactly.
    deviations = masses[:, None] * (points - points[first[labels]])
    moments = np.stack([np.bincount(labels, column) for column in deviations.T], axis=1)
    return TokenCloud(
        jnp.asarray(points[first] + moments / totals[:, None], cloud.points.dtype),
        jnp.asarray(totals, cloud.weights.dtype),
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
    check_measures("measures", measures)
    means = jnp.stack([measure.mean() for measure in measures])
    shares = checked_weights(means, coefficients, normalize=False)
    clouds = [measure for measure in measures if isinstance(measure, TokenCloud)]
    if len(clouds) < len(measures):
        return Mixture(shares, measures)
    _check_placed(clouds)
    positions = [cloud.positions for cloud in clouds if cloud.positions is not None]
    parts = zip(shares, clouds, strict=True)
    return TokenCloud(
        jnp.concatenate([cloud.points for cloud in clouds]),
        jnp.concatenate([share * cloud.weights for share, cloud in parts]),
        positions=jnp.concatenate(positions) if positions else None,
        sums=clouds[0].sums,
    )


def pad(cloud: TokenCloud, count: int) -> TokenCloud:
    """Append tokens of weight zero, copies of the first, until there are `count`."""
    check_cloud("cloud", cloud)
    count = as_integer("count", count, least=1)
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


def resample(
    measure: AbstractMeasure,
    count: SupportsIndex,
    *,
    key: Key,
    method: str = "independent",
) -> TokenCloud:
    r"""Draw a cloud of equally weighted tokens from a measure.

    | method | what it draws | for |
    |---|---|---|
    | `"independent"` | each token on its own | every measure |
    | `"systematic"` | the quantiles $(k + U)/n$ of one uniform $U$ | clouds |

    In a systematic sample, a token of weight $w$ appears $\lfloor nw\rfloor$ or
    $\lceil nw\rceil$ times; its variance is that of one uniform number. Either way the
    expectation is the measure, and tokens of weight zero are never drawn.

    Args:
        measure: the measure; a cloud keeps the positions of what is drawn.
        count: how many tokens to draw, 1 or more.
        key: random key.
        method: `"independent"` or `"systematic"`.

    Returns:
        The cloud. Cost: that of sampling, $O(n + \mathrm{count}\log n)$ for a cloud.
    """
    check_kind("measure", measure, AbstractMeasure, "a measure")
    number, key = as_integer("count", count, least=1), as_key(key)
    check_choice("method", method, ("independent", "systematic"))
    if isinstance(measure, AbstractWeightedCloud):
        return _drawn(measure, number, key, method)
    if method == "systematic":
        raise Unsupported(
            f"measure is a {type(measure).__name__}; systematic resampling is for "
            'clouds: use method="independent", or quadrature(measure, order) first.'
        )
    return TokenCloud(measure.sample(number, key=key))


def _drawn(
    cloud: AbstractWeightedCloud, count: int, key: Key, method: str
) -> TokenCloud:
    levels = jnp.cumsum(widened(cloud.weights))
    shape = (1,) if method == "systematic" else (count,)
    fractions = jr.uniform(key, shape, levels.dtype)
    if method == "systematic":
        fractions = (jnp.arange(count, dtype=levels.dtype) + fractions) / count
    below_one = 1 - float(jnp.finfo(levels.dtype).epsneg)
    heights = jnp.minimum(fractions, below_one) * levels[-1]
    chosen = jnp.searchsorted(levels, heights, side="right")
    # What rounds up to the last level belongs to the last token that has weight.
    last = cloud.count - 1 - jnp.argmax(cloud.weights[::-1] > 0).astype(chosen.dtype)
    chosen = jnp.minimum(chosen, last)
    positions = cloud.positions if isinstance(cloud, TokenCloud) else None
    return TokenCloud(
        cloud.points[chosen],
        positions=None if positions is None else positions[chosen],
        sums=cloud.sums,
    )


def batch(clouds: Sequence[TokenCloud]) -> TokenCloud:
    """Stack clouds along a leading axis for `jax.vmap`, padded to the largest count."""
    check_measures("clouds", clouds)
    for cloud in clouds:
        check_cloud("clouds", cloud)
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


def group_labels(
    points: np.ndarray, places: np.ndarray | None, tolerance: float
) -> np.ndarray:
    """Label each point by its group, numbered by first appearance.

    Groups are linked by steps no longer than the tolerance, between equal places.
    """
    if places is not None:
        # In one more coordinate, different places are more than a step apart.
        ranks = np.unique(places, return_inverse=True)[1]
        points = np.column_stack([points, (2 * tolerance or 1.0) * ranks])
    labels = close_components(points, tolerance)
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), int)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse.reshape(-1)]
