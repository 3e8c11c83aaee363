"""Where to cut the shortest tree through tokens, and the groups that are left."""

import math
from typing import NamedTuple

import numpy as np

from meanformer.errors import InvalidInput, Unsupported, as_number, check
from meanformer.geometry import AbstractSpace, Sphere
from meanformer.numerics.arrays import norms_of
from meanformer.numerics.linkage import (
    circle_edges,
    close_components,
    components,
    line_edges,
    spanning_edges,
)

MOST_FOR_TREE = 20_000
GAP_RATIO = 10.0
# The default threshold, in units of beta^(-1/2) on the sphere, else of the diameter.
SPHERE_SHARE = 0.5
EUCLIDEAN_SHARE = 0.05


class Tokens(NamedTuple):
    """Present tokens on the host, in double precision."""

    points: np.ndarray
    masses: np.ndarray
    space: AbstractSpace

    def distances(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Return the distance within the space, row by row, in double precision.

        As `space.distance` in JAX, which may be limited to single precision.
        """
        apart = norms_of(first - second)
        if not isinstance(self.space, Sphere):
            return apart
        return 2 * np.arctan2(apart, norms_of(first + second))


class Cut(NamedTuple):
    """Where to cut the tree: at a threshold, or where a gap above the floor is."""

    threshold: float | None
    floor: float


class Groups(NamedTuple):
    """Groups of tokens, with what decided them."""

    labels: np.ndarray
    heights: np.ndarray | None
    threshold: float
    is_decided: bool
    verdict: str


def is_number(threshold) -> bool:
    """Whether a threshold is given as a distance."""
    return threshold is not None and not isinstance(threshold, str)


def cut_of(space, threshold, beta, scale) -> Cut:
    """Return where to cut, or raise with what is missing for it."""
    if is_number(threshold):
        given = as_number(
            "threshold", threshold, 'a distance, "auto", or None for the default'
        )
        check(
            given >= 0 and math.isfinite(given),
            f"threshold is {given}; it must be a distance, zero or more.",
        )
        return Cut(given, 0.0)
    check(
        threshold in (None, "auto"),
        f'threshold is {threshold!r}; it must be a distance, "auto", or None for the '
        "default.",
    )
    default = _default_threshold(space, beta, scale)
    return Cut(None if threshold == "auto" else default, default / GAP_RATIO)


def _default_threshold(space, beta, scale) -> float:
    """Return a share of 1/sqrt(beta) on the sphere, of the diameter elsewhere."""
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
        return SPHERE_SHARE / math.sqrt(beta)
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
    return EUCLIDEAN_SHARE * scale


def groups_of(tokens: Tokens, cut: Cut) -> Groups:
    """Return the groups that are left when the tree is cut."""
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
    return Groups(labels, heights, threshold, is_decided, verdict)


def _edges(tokens: Tokens) -> np.ndarray | None:
    """Return the edges of a shortest tree, or nothing if that takes too long."""
    points = tokens.points
    dimension, is_round = points.shape[1], isinstance(tokens.space, Sphere)
    if dimension == 1:
        return line_edges(points[:, 0])
    if is_round and dimension == 2:
        return circle_edges(np.arctan2(points[:, 1], points[:, 0]))
    return None if len(points) > MOST_FOR_TREE else spanning_edges(points)


def _groups_without_tree(tokens: Tokens, cut: Cut) -> Groups:
    if cut.threshold is None:
        raise Unsupported(
            'threshold="auto" needs a tree through all tokens, and '
            f"{len(tokens.points)} are more than {MOST_FOR_TREE}; join close ones "
            "first with merge(cloud, tolerance), or give a threshold."
        )
    threshold = reach = cut.threshold
    if isinstance(tokens.space, Sphere):
        reach = 2 * math.sin(min(threshold, math.pi) / 2)
    labels = close_components(
        tokens.points,
        reach,
        lambda first, second: tokens.distances(first, second) <= threshold,
    )
    return Groups(labels, None, threshold, True, "counted at the threshold")


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
