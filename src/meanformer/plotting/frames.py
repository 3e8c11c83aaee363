"""Frames of movies: tokens in the plane, in space, on the sphere, on the circle."""

import abc
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from meanformer.errors import check
from meanformer.measures import TokenCloud
from meanformer.plotting import style
from meanformer.plotting import token_paths as tokens
from meanformer.plotting.circles import draw_circle
from meanformer.plotting.clouds import draw_hyperplanes
from meanformer.plotting.hulls import draw_hull
from meanformer.plotting.spheres import draw_sphere
from meanformer.plotting.token_paths import TokenPaths, check_dimension

FLAT_PLACE = (0.13, 0.105, 0.82, 0.82)  # left, bottom, width, height of the axes
ROUND_PLACE = (0.02, 0.01, 0.96, 0.92)
TITLE_HEIGHT = 0.945


@dataclasses.dataclass(frozen=True)
class Frame:
    """One frame of a movie, with what came before it.

    Args:
        paths: the tokens at the depths of all frames, `paths.points[index]` now.
        index: the number of this frame, from zero on.
    """

    paths: TokenPaths
    index: int

    @property
    def depth(self) -> float:
        """The depth of this frame."""
        return float(self.paths.depths[self.index])

    @property
    def cloud(self) -> TokenCloud:
        """The tokens of this frame."""
        points = jnp.asarray(self.paths.points[self.index])
        return TokenCloud(points, jnp.asarray(self.paths.weights))

    @property
    def strip(self) -> TokenPaths:
        """The old name of `paths`."""
        message = "Frame.strip has become Frame.paths; use that name."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self.paths

    @property
    def share(self) -> float:
        """How far the movie has come, from zero at its first frame to one."""
        return self.index / max(len(self.paths.depths) - 1, 1)


@dataclasses.dataclass(frozen=True)
class AbstractFrames(abc.ABC):
    """Draws tokens with fading tails, for `movie`.

    Args:
        tail: how many frames the tails reach back.
        labels: the cluster of each token of positive weight; colours by depth if left
            out.
        decorate: called with the axes and the frame at the end, to add more.
    """

    tail: int = 12
    _: dataclasses.KW_ONLY
    labels: Any = None
    decorate: Callable[[Any, Frame], Any] | None = None

    def __call__(self, figure: Any, frame: Frame) -> None:
        """Draw a frame on an empty figure."""
        axes = self.draw(figure, frame)
        text = f"depth $t = {_depth_text(frame)}$"
        figure.text(0.03, TITLE_HEIGHT, text, color=style.INK, fontsize=12)
        if self.decorate is not None:
            self.decorate(axes, frame)

    @abc.abstractmethod
    def draw(self, figure: Any, frame: Frame) -> Any:
        """Draw the tokens on new axes; return the axes."""


@dataclasses.dataclass(frozen=True)
class AbstractFreeFrames(AbstractFrames):
    """Draws tokens that may be anywhere, in axes that stand still or follow them.

    Args:
        tail, labels, decorate: as for `AbstractFrames`.
        hull: draw the convex hull of the tokens.
        follows: let the axes shrink and grow with the tokens, instead of holding the
            whole movie.
        hyperplanes: a normal and offsets of lines or planes to draw, as for
            `draw_hyperplanes`.
    """

    hull: bool = False
    follows: bool = False
    hyperplanes: tuple[Any, Any] | None = None

    @abc.abstractmethod
    def around(self, figure: Any, frame: Frame, shown: np.ndarray) -> Any:
        """Return new axes that hold these points."""

    def draw(self, figure: Any, frame: Frame) -> Any:
        """Draw the tokens, and what is to be seen around them."""
        paths, points = frame.paths, frame.paths.points[frame.index]
        shown = points if self.follows else paths.points.reshape(-1, paths.dimension)
        axes = self.around(figure, frame, shown)
        colours = tokens.token_colours(paths, frame.index, self.labels)
        tails = paths.tail(frame.index, self.tail)
        tokens.draw_tails(tails, colours, axes, widest=1.3)
        tokens.scatter_discs(points, paths.weights, axes, c=colours)
        if self.hull:
            draw_hull(points, axes)
        if self.hyperplanes is not None:
            draw_hyperplanes(*self.hyperplanes, axes)
        return axes


@dataclasses.dataclass(frozen=True)
class PlaneFrames(AbstractFreeFrames):
    """Draws tokens in the plane with fading tails, for `movie`.

    Args:
        tail, labels, decorate: as for `AbstractFrames`.
        hull, follows, hyperplanes: as for `AbstractFreeFrames`.
    """

    def around(self, figure: Any, frame: Frame, shown: np.ndarray) -> Any:
        """Return a square that stands still or follows the tokens."""
        check_dimension(frame.paths.dimension, 2)
        axes = figure.add_axes(FLAT_PLACE)
        style.set_square(axes, shown, margin=0.06)
        return axes


@dataclasses.dataclass(frozen=True)
class SpaceFrames(AbstractFreeFrames):
    """Draws tokens in space with fading tails from a slowly turning eye, for `movie`.

    Args:
        tail, labels, decorate: as for `AbstractFrames`.
        hull, follows, hyperplanes: as for `AbstractFreeFrames`.
        view: elevation and azimuth of the eye at first, in degrees.
        turn: by how many degrees it moves around until the end.
    """

    view: tuple[float, float] = (22.0, -60.0)
    turn: float = 60.0

    def around(self, figure: Any, frame: Frame, shown: np.ndarray) -> Any:
        """Return a box that stands still or follows the tokens."""
        check_dimension(frame.paths.dimension, 3)
        axes = figure.add_axes(ROUND_PLACE, projection="3d")
        style.set_box(axes, shown, zoom=0.88)
        axes.view_init(self.view[0], self.view[1] + self.turn * frame.share)
        return axes


@dataclasses.dataclass(frozen=True)
class SphereFrames(AbstractFrames):
    """Draws tokens on the sphere with fading tails from a turning eye, for `movie`.

    Args:
        tail, labels, decorate: as for `AbstractFrames`.
        view: elevation and azimuth of the eye at first, in degrees.
        turn: by how many degrees it moves around until the end.
    """

    view: tuple[float, float] = (18.0, -50.0)
    turn: float = 60.0

    def draw(self, figure: Any, frame: Frame) -> Any:
        """Draw the tokens as `draw_sphere` does."""
        axes = figure.add_axes(ROUND_PLACE, projection="3d")
        view = (self.view[0], self.view[1] + self.turn * frame.share)
        options = {"index": frame.index, "tail": self.tail, "labels": self.labels}
        return draw_sphere(frame.paths, axes, view=view, **options)


@dataclasses.dataclass(frozen=True)
class CircleFrames(AbstractFrames):
    """Draws tokens on the circle with tails that spiral inwards, for `movie`.

    Args:
        tail, labels, decorate: as for `AbstractFrames`.
    """

    def draw(self, figure: Any, frame: Frame) -> Any:
        """Draw the tokens as `draw_circle` does."""
        axes = figure.add_axes(ROUND_PLACE)
        options = {"index": frame.index, "tail": self.tail, "labels": self.labels}
        return draw_circle(frame.paths, axes, **options)


def usual_frames(paths: TokenPaths) -> AbstractFrames:
    """Return the frames for tokens of this dimension, on the unit sphere or not."""
    kinds = {2: (PlaneFrames, CircleFrames), 3: (SpaceFrames, SphereFrames)}
    check(
        paths.dimension in kinds,
        f"the tokens have dimension {paths.dimension}; movies are drawn in 2 and 3 "
        "dimensions: pass a function draw, or keep two or three coordinates of the "
        "points.",
    )
    return kinds[paths.dimension][paths.is_round]()


def _depth_text(frame: Frame) -> str:
    """The depth in decimals, or with a power of ten if it is too small for them."""
    depth, decimals = frame.depth, _decimals(frame.paths)
    if depth == 0 or abs(depth) >= 0.99 * 10.0**-decimals:
        return f"{depth:.{decimals}f}"
    mantissa, exponent = f"{depth:.2e}".split("e")
    return rf"{mantissa} \cdot 10^{{{int(exponent)}}}"


def _decimals(paths: TokenPaths) -> int:
    """Decimals that tell the depths of two frames apart: three, if depths reach one.

    More where all depths are small, so that three digits are seen; six at most.
    """
    gaps = np.abs(np.diff(paths.depths))
    step = gaps.min() if gaps.size else 1.0
    largest = max(float(np.abs(paths.depths).max()), 1e-9)
    most = int(np.clip(2 - np.floor(np.log10(largest)), 3, 6))
    return int(np.clip(np.ceil(-np.log10(max(step, 1e-9))), 0, most))
