"""Frames of movies: tokens in the plane, in space, on the sphere, on the circle."""

import abc
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from meanformer.errors import InvalidInput
from meanformer.measures import TokenCloud
from meanformer.plotting import style
from meanformer.plotting.circles import draw_circle
from meanformer.plotting.discs import draw_tails, scatter_discs, token_colours
from meanformer.plotting.hulls import draw_hull
from meanformer.plotting.limits import set_box, set_square
from meanformer.plotting.space import draw_hyperplanes
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
class PlaneFrames(AbstractFrames):
    """Draws tokens in the plane with fading tails, for `movie`.

    Args:
        tail, labels, decorate: as for `AbstractFrames`.
        hull: draw the convex hull of the tokens.
        follows: let the axes shrink and grow with the tokens, instead of holding the
            whole movie.
        hyperplanes: a normal and offsets of lines to draw, as for `draw_hyperplanes`.
    """

    hull: bool = False
    follows: bool = False
    hyperplanes: tuple[Any, Any] | None = None

    def draw(self, figure: Any, frame: Frame) -> Any:
        """Draw the tokens in a square that stands still or follows them."""
        check_dimension(frame.paths, 2)
        axes = figure.add_axes(FLAT_PLACE)
        set_square(axes, _shown(self, frame), margin=0.06)
        return _draw_free(self, axes, frame)


@dataclasses.dataclass(frozen=True)
class SpaceFrames(AbstractFrames):
    """Draws tokens in space with fading tails from a slowly turning eye, for `movie`.

    Args:
        tail, labels, decorate: as for `AbstractFrames`.
        hull: draw the convex hull of the tokens.
        follows: let the axes shrink and grow with the tokens, instead of holding the
            whole movie.
        hyperplanes: a normal and offsets of planes to draw, as for `draw_hyperplanes`.
        view: elevation and azimuth of the eye at first, in degrees.
        turn: by how many degrees it moves around until the end.
    """

    hull: bool = False
    follows: bool = False
    hyperplanes: tuple[Any, Any] | None = None
    view: tuple[float, float] = (22.0, -60.0)
    turn: float = 60.0

    def draw(self, figure: Any, frame: Frame) -> Any:
        """Draw the tokens in a box that stands still or follows them."""
        check_dimension(frame.paths, 3)
        axes = figure.add_axes(ROUND_PLACE, projection="3d")
        set_box(axes, _shown(self, frame), zoom=0.88)
        axes.view_init(self.view[0], self.view[1] + self.turn * frame.share)
        return _draw_free(self, axes, frame)


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
    """What suits tokens of this dimension, on the unit sphere or not."""
    kinds = {2: (PlaneFrames, CircleFrames), 3: (SpaceFrames, SphereFrames)}
    if paths.dimension not in kinds:
        raise InvalidInput(
            f"the tokens have dimension {paths.dimension}; movies are drawn in 2 and 3 "
            "dimensions: pass a function draw, or keep two or three coordinates of the "
            "points."
        )
    return kinds[paths.dimension][paths.is_round]()


def _shown(frames: PlaneFrames | SpaceFrames, frame: Frame) -> np.ndarray:
    """The points that the axes hold: those of this frame, or of all."""
    paths = frame.paths
    if frames.follows:
        return paths.points[frame.index]
    return paths.points.reshape(-1, paths.dimension)


def _draw_free(frames: PlaneFrames | SpaceFrames, axes: Any, frame: Frame) -> Any:
    """Draw tokens of the plane or of space, and what is to be seen around them."""
    paths, index = frame.paths, frame.index
    points = paths.points[index]
    colours = token_colours(paths, index, frames.labels)
    draw_tails(paths.tail(index, frames.tail), colours, axes, widest=1.3)
    scatter_discs(points, paths.weights, axes, c=colours)
    if frames.hull:
        draw_hull(points, axes)
    if frames.hyperplanes is not None:
        draw_hyperplanes(*frames.hyperplanes, axes)
    return axes


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
