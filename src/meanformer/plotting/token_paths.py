"""Tokens at several depths: their paths, discs with fading tails, their colours."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meanformer.errors import as_integer, check
from meanformer.flows import Trajectory
from meanformer.flows.trajectories.interpolation import check_in_range
from meanformer.measures import TokenCloud
from meanformer.plotting import style

ON_THE_SPHERE = 1e-3
FAINTEST = 0.05  # opacity at the end of a tail
UNCLUSTERED = -1


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
    def off_sphere(self) -> float:
        """How far the farthest token is from the unit sphere."""
        return float(np.abs(np.linalg.norm(self.points, axis=2) - 1).max())

    @property
    def is_round(self) -> bool:
        """Whether all tokens lie on the unit sphere at all depths."""
        return self.off_sphere < ON_THE_SPHERE

    def rounded(self) -> "TokenPaths":
        """Move tokens to the unit sphere along their directions."""
        norms = np.linalg.norm(self.points, axis=2, keepdims=True)
        points = self.points / np.where(norms > 0, norms, 1)
        return dataclasses.replace(self, points=points)

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
    return paths.rounded() if paths_of(subject).is_round else paths


def check_trajectory(subject: Any) -> None:
    """Raise unless these are tokens along depth."""
    check(
        isinstance(subject, Trajectory),
        f"a {type(subject).__name__} has no tokens along depth; give a Trajectory.",
    )


def choose_coordinates(trajectory: Trajectory, places: Sequence[int]) -> Trajectory:
    """A trajectory in some of its coordinates, counted from zero, to look at."""
    dimension = trajectory.points.shape[2]
    given = f"coordinates are {', '.join(str(place + 1) for place in places)};"
    check(
        all(0 <= place < dimension for place in places),
        f"{given} they must be from 1 to {dimension}.",
    )
    check(len(set(places)) == len(places), f"{given} each can be shown once.")
    chosen = np.asarray(places, int)
    return dataclasses.replace(
        trajectory,
        points=trajectory.points[..., chosen],
        velocities=trajectory.velocities[..., chosen],
        probes=None,
        flow=None,
    )


def _present(depths: Any, points: Any, weights: Any) -> TokenPaths:
    depths, points, weights = map(np.asarray, (depths, points, weights))
    return TokenPaths(depths, points[:, weights > 0], weights[weights > 0])


def check_dimension(
    dimension: int, *allowed: int, subject: str = "the tokens have dimension"
) -> None:
    """Raise unless the dimension is one of these; the subject says whose it is."""
    listed = " or ".join(map(str, allowed))
    check(
        dimension in allowed,
        f"{subject} {dimension}; this figure is of dimension {listed}.",
    )


def cluster_colours(labels: Any) -> list[str]:
    """A colour for each label, the same for the same label; grey for -1."""
    colours = style.PALETTE[:-1]
    return [
        style.GREY if label == UNCLUSTERED else colours[int(label) % len(colours)]
        for label in labels
    ]


def token_colours(paths: TokenPaths, index: int, labels: Any) -> np.ndarray:
    """A colour for each token: that of its cluster, or from blue to gold by depth."""
    from matplotlib.colors import to_rgb

    count = len(paths.weights)
    if labels is None:
        return np.tile(style.depth_colours()(paths.share(index))[:3], (count, 1))
    check(
        len(labels) == count,
        f"there are {len(labels)} labels for {count} tokens of positive weight; give "
        "one for each.",
    )
    return np.array([to_rgb(colour) for colour in cluster_colours(labels)])


def disc_areas(weights: np.ndarray, largest: float) -> np.ndarray:
    """Areas of discs in proportion to masses."""
    return largest * weights / weights.max()


def scatter_discs(
    points: np.ndarray,
    weights: np.ndarray,
    axes: Any,
    *,
    mine: Any = slice(None),
    largest: float = 36.0,
    **options: Any,
) -> None:
    """Draw some discs whose area is their weight, in the plane or in space."""
    flat = {"depthshade": False} if points.shape[1] == 3 else {}
    defaults = {"zorder": 3, "linewidths": 0, "s": disc_areas(weights, largest)[mine]}
    axes.scatter(*points[mine].T, **defaults | flat | options)


def draw_tails(
    tails: np.ndarray,
    colours: np.ndarray,
    axes: Any,
    *,
    widest: float = 1.6,
    is_seen: Any = None,
    opacity: float = 1.0,
    **options: Any,
) -> None:
    """Draw where tokens come from, the fainter and thinner the longer ago.

    The tails are tokens at some depths up to now, `(s, n, d)`; `is_seen` tells by the
    middles of their segments which of them to draw.
    """
    stages, count, dimension = tails.shape
    pieces = np.stack([tails[:-1], tails[1:]], axis=2).reshape(-1, 2, dimension)
    youth = np.repeat(np.arange(1, stages) / max(stages - 1, 1), count)
    fading = opacity * (FAINTEST + (1 - FAINTEST) * youth**1.5)
    shades = np.column_stack([np.tile(colours, (stages - 1, 1)), fading])
    mine = slice(None) if is_seen is None else is_seen(pieces.mean(axis=1))
    options |= {"colors": shades[mine], "linewidths": 0.5 + widest * youth[mine]}
    style.add_lines(axes, pieces[mine], **options)


def draw_coloured_paths(
    paths: TokenPaths, axes: Any, *, linewidth: float, largest: float, **bar: Any
) -> None:
    """Draw paths in the colours of depth, with discs at both ends.

    There is a colour bar with the depths if options for it are given.
    """
    points, depths = paths.points, paths.depths
    pieces = np.stack([points[:-1], points[1:]], axis=2)
    lines = style.add_lines(
        axes,
        pieces.reshape(-1, 2, paths.dimension),
        autolim=paths.dimension == 2,
        cmap=style.depth_colours(),
        linewidths=linewidth,
    )
    lines.set_array(np.repeat((depths[:-1] + depths[1:]) / 2, points.shape[1]))
    for index, color in ((0, style.BLUE), (-1, style.GOLD)):
        scatter_discs(points[index], paths.weights, axes, color=color, largest=largest)
    if bar:
        axes.figure.colorbar(lines, ax=axes, label="depth $t$", **bar)
