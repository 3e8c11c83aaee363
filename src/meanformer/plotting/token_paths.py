"""Tokens at several depths, as figures with tails and movies need them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meanformer.errors import InvalidInput, as_integer, check
from meanformer.flows import Trajectory
from meanformer.flows.trajectories.interpolation import check_in_range
from meanformer.measures import TokenCloud

ON_THE_SPHERE = 1e-3


@dataclasses.dataclass(frozen=True)
class TokenPaths:
    """Tokens at several depths, without those of weight zero.

    Args:
        depths: the depths, `(t,)`.
        points: the tokens at each of them, `(t, n, d)`.
        weights: their masses, `(n,)`.
    """

    depths: np.ndarray
    points: np.ndarray
    weights: np.ndarray

    @property
    def dimension(self) -> int:
        """Coordinates of a token."""
        return self.points.shape[2]

    @property
    def is_round(self) -> bool:
        """Whether all tokens lie on the unit sphere at all depths."""
        norms = np.linalg.norm(self.points, axis=2)
        return bool(np.abs(norms - 1).max() < ON_THE_SPHERE)

    def place(self, index: int) -> int:
        """An index counted from the first depth; raise if there is no such depth."""
        count = len(self.depths)
        check(
            -count <= index < count,
            f"index is {index}; there are {count} depths, from 0 to {count - 1}.",
        )
        return index % count

    def share(self, index: int) -> float:
        """How far along the depths this one is, from zero to one."""
        whole = self.depths[-1] - self.depths[0]
        passed = self.depths[self.place(index)] - self.depths[0]
        return float(passed / whole) if whole else 0.0

    def tail(self, index: int, length: int) -> np.ndarray:
        """The tokens at a depth and at most so many before it, `(s, n, d)`."""
        length, last = as_integer("tail", length, least=0), self.place(index)
        return self.points[max(0, last - length) : last + 1]


def paths_of(subject: Any) -> TokenPaths:
    """Tokens along depth, from a trajectory, a cloud or an array of points."""
    if isinstance(subject, TokenPaths):
        return subject
    if isinstance(subject, Trajectory):
        return _present(subject.depths, subject.points, subject.weights)
    if isinstance(subject, TokenCloud):
        return _present(np.zeros(1), subject.points[None], subject.weights)
    points = np.asarray(subject, float)
    check(
        points.ndim == 2 and len(points) > 0,
        f"the points have shape {points.shape}; give one row for each token.",
    )
    return TokenPaths(np.zeros(1), points[None], np.full(len(points), 1 / len(points)))


def resample(subject: Any, depths: Any) -> TokenPaths:
    """The paths of a trajectory at other depths in its range.

    If all saved tokens lie on the unit sphere, those between are put onto it.
    """
    check_trajectory(subject)
    depths = jnp.asarray(depths, subject.depths.dtype)
    for end in (depths.min(), depths.max()):
        check_in_range(subject.depths, end)
    points = jax.jit(jax.vmap(lambda depth: subject.at(depth).points))(depths)
    paths = _present(depths, points, subject.weights)
    return _rounded(paths) if paths_of(subject).is_round else paths


def check_trajectory(subject: Any) -> None:
    """Raise unless these are tokens along depth."""
    if not isinstance(subject, Trajectory):
        raise InvalidInput(
            f"a {type(subject).__name__} has no tokens along depth; give a Trajectory."
        )


def choose_coordinates(trajectory: Trajectory, places: Sequence[int]) -> Trajectory:
    """A trajectory in some of its coordinates, counted from zero, to look at."""
    dimension = trajectory.points.shape[2]
    check(
        all(0 <= place < dimension for place in places),
        f"coordinates are {', '.join(str(p + 1) for p in places)}; they must be from 1 "
        f"to {dimension}.",
    )
    check(
        len(set(places)) == len(places),
        f"coordinates are {', '.join(str(p + 1) for p in places)}; each can be shown "
        "once.",
    )
    chosen = np.asarray(places, int)
    return dataclasses.replace(
        trajectory,
        points=trajectory.points[..., chosen],
        velocities=trajectory.velocities[..., chosen],
        probes=None,
        flow=None,
    )


def _present(depths: Any, points: Any, weights: Any) -> TokenPaths:
    weights = np.asarray(weights)
    is_there = weights > 0
    return TokenPaths(
        np.asarray(depths), np.asarray(points)[:, is_there], weights[is_there]
    )


def _rounded(paths: TokenPaths) -> TokenPaths:
    """Tokens moved to the unit sphere along their directions."""
    norms = np.linalg.norm(paths.points, axis=2, keepdims=True)
    points = paths.points / np.where(norms > 0, norms, 1)
    return TokenPaths(paths.depths, points, paths.weights)


def check_dimension(paths: TokenPaths, *allowed: int) -> None:
    """Raise unless the tokens have one of these dimensions."""
    listed = " or ".join(map(str, allowed))
    check(
        paths.dimension in allowed,
        f"the tokens have dimension {paths.dimension}; this figure is of dimension "
        f"{listed}.",
    )
