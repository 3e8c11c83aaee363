"""Frames of movies: tokens in the plane, in space, on the sphere, on the circle."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from meanformer.errors import InvalidInput
from meanformer.measures import TokenCloud
from meanformer.plotting import style
from meanformer.plotting.circles import draw_circle
from meanformer.plotting.hulls import draw_hull
from meanformer.plotting.room import furnish
from meanformer.plotting.space import draw_hyperplanes, scatter_discs
from meanformer.plotting.spheres import draw_sphere, token_colours
from meanformer.plotting.strips import Strip, check_dimension, faded, fading_pieces

FLAT_PLACE = (0.13, 0.105, 0.82, 0.82)  # left, bottom, width, height of the axes
ROUND_PLACE = (0.02, 0.01, 0.96, 0.92)
TITLE_HEIGHT = 0.945


@dataclasses.dataclass(frozen=True)
class Frame:
    """One frame of a movie, with what came before it.

    Args:
        strip: the tokens at the depths of all frames, `strip.points[index]` now.
        index: the number of this frame, from zero on.
    """

    strip: Strip
    index: int

    @property
    def depth(self) -> float:
        """The depth of this frame."""
        return float(self.strip.depths[self.index])

    @property
    def cloud(self) -> TokenCloud:
        """The tokens of this frame."""
        points = jnp.asarray(self.strip.points[self.index])
        return TokenCloud(points, jnp.asarray(self.strip.weights))

    @property
    def share(self) -> float:
        """How far the movie has come, from zero at its first frame to one."""
        return self.index / max(len(self.strip.depths) - 1, 1)


@dataclasses.dataclass(frozen=True)
class PlaneFrames:
    """Draws tokens in the plane with fading tails, for `movie`.

    Args:
        tail: how many frames the tails reach back.
        hull: draw the convex hull of the tokens.
        labels: the cluster of each token of positive weight; colours by depth if left
            out.
        follows: let the axes shrink and grow with the tokens, instead of holding the
            whole movie.
        hyperplanes: a normal and offsets of lines to draw, as for `draw_hyperplanes`.
        decorate: called with the axes and the frame at the end, to add more.
    """

    tail: int = 12
    hull: bool = False
    labels: Any = None
    follows: bool = False
    hyperplanes: tuple[Any, Any] | None = None
    decorate: Callable[[Any, Frame], Any] | None = None

    def __call__(self, figure: Any, frame: Frame) -> None:
        """Draw a frame on an empty figure."""
        from matplotlib.collections import LineCollection

        strip, index = frame.strip, frame.index
        check_dimension(strip, 2)
        axes = figure.add_axes(FLAT_PLACE)
        colours, pieces, youth, shades = _tails(self, strip, index)
        lines = LineCollection(pieces, colors=shades, linewidths=0.5 + 1.3 * youth)
        axes.add_collection(lines, autolim=False)
        points = strip.points[index]
        scatter_discs(points, strip.weights, axes, c=colours)
        if self.hull:
            draw_hull(points, axes)
        _set_square(axes, points if self.follows else strip.points.reshape(-1, 2))
        if self.hyperplanes is not None:
            draw_hyperplanes(*self.hyperplanes, axes)
        _finish(self, axes, frame)


@dataclasses.dataclass(frozen=True)
class SpaceFrames:
    """Draws tokens in space with fading tails from a slowly turning eye, for `movie`.

    Args:
        tail: how many frames the tails reach back.
        hull: draw the convex hull of the tokens.
        labels: the cluster of each token of positive weight; colours by depth if left
            out.
        follows: let the room shrink and grow with the tokens, instead of holding the
            whole movie.
        hyperplanes: a normal and offsets of planes to draw, as for `draw_hyperplanes`.
        view: elevation and azimuth of the eye at first, in degrees.
        turn: by how many degrees it moves around until the end.
        decorate: called with the axes and the frame at the end, to add more.
    """

    tail: int = 12
    hull: bool = False
    labels: Any = None
    follows: bool = False
    hyperplanes: tuple[Any, Any] | None = None
    view: tuple[float, float] = (22.0, -60.0)
    turn: float = 60.0
    decorate: Callable[[Any, Frame], Any] | None = None

    def __call__(self, figure: Any, frame: Frame) -> None:
        """Draw a frame on an empty figure."""
        from mpl_toolkits.mplot3d.art3d import Line3DCollection

        strip, index = frame.strip, frame.index
        check_dimension(strip, 3)
        axes = figure.add_axes(ROUND_PLACE, projection="3d")
        points = strip.points[index]
        shown = points if self.follows else strip.points.reshape(-1, 3)
        furnish(axes, shown, zoom=0.88)
        axes.view_init(self.view[0], self.view[1] + self.turn * frame.share)
        colours, pieces, youth, shades = _tails(self, strip, index)
        lines = Line3DCollection(pieces, colors=shades, linewidths=0.5 + 1.3 * youth)
        axes.add_collection(lines, autolim=False)
        if self.hull:
            draw_hull(points, axes)
        scatter_discs(points, strip.weights, axes, c=colours)
        if self.hyperplanes is not None:
            draw_hyperplanes(*self.hyperplanes, axes)
        _finish(self, axes, frame)


@dataclasses.dataclass(frozen=True)
class SphereFrames:
    """Draws tokens on the sphere with fading tails from a turning eye, for `movie`.

    Args:
        tail: how many frames the tails reach back.
        labels: the cluster of each token of positive weight; colours by depth if left
            out.
        view: elevation and azimuth of the eye at first, in degrees.
        turn: by how many degrees it moves around until the end.
        decorate: called with the axes and the frame at the end, to add more.
    """

    tail: int = 12
    labels: Any = None
    view: tuple[float, float] = (18.0, -50.0)
    turn: float = 60.0
    decorate: Callable[[Any, Frame], Any] | None = None

    def __call__(self, figure: Any, frame: Frame) -> None:
        """Draw a frame on an empty figure."""
        axes = figure.add_axes(ROUND_PLACE, projection="3d")
        view = (self.view[0], self.view[1] + self.turn * frame.share)
        options = {"index": frame.index, "tail": self.tail, "labels": self.labels}
        draw_sphere(frame.strip, axes, view=view, **options)
        _finish(self, axes, frame)


@dataclasses.dataclass(frozen=True)
class CircleFrames:
    """Draws tokens on the circle with tails that spiral inwards, for `movie`.

    Args:
        tail: how many frames the tails reach back.
        labels: the cluster of each token of positive weight; colours by depth if left
            out.
        decorate: called with the axes and the frame at the end, to add more.
    """

    tail: int = 12
    labels: Any = None
    decorate: Callable[[Any, Frame], Any] | None = None

    def __call__(self, figure: Any, frame: Frame) -> None:
        """Draw a frame on an empty figure."""
        axes = figure.add_axes(ROUND_PLACE)
        options = {"index": frame.index, "tail": self.tail, "labels": self.labels}
        draw_circle(frame.strip, axes, **options)
        _finish(self, axes, frame)


Frames = PlaneFrames | SpaceFrames | SphereFrames | CircleFrames


def usual_frames(strip: Strip) -> Frames:
    """What suits tokens of this dimension, on the unit sphere or not."""
    kinds = {2: (PlaneFrames, CircleFrames), 3: (SpaceFrames, SphereFrames)}
    if strip.dimension not in kinds:
        raise InvalidInput(
            f"the tokens have dimension {strip.dimension}; movies are drawn in 2 and 3 "
            "dimensions: pass a function draw, or keep two or three coordinates of the "
            "points."
        )
    return kinds[strip.dimension][strip.is_round]()


def _tails(frames: Any, strip: Strip, index: int) -> tuple:
    """Colours of the tokens, and the segments of their tails with age and shade."""
    colours = token_colours(strip, index, frames.labels)
    pieces, youth = fading_pieces(strip.tail(index, frames.tail))
    repeated = np.tile(colours, (len(pieces) // len(colours), 1))
    return colours, pieces, youth, faded(repeated, youth)


def _set_square(axes: Any, points: np.ndarray) -> None:
    """Axes of equal scales and sides around these points, with a margin."""
    low, high = points.min(axis=0), points.max(axis=0)
    half = 0.56 * max(float((high - low).max()), 1e-9)
    (left, bottom), (right, top) = (low + high) / 2 - half, (low + high) / 2 + half
    axes.set(xlim=(left, right), ylim=(bottom, top), aspect="equal")
    axes.set(xlabel="$x_1$", ylabel="$x_2$")


def _finish(frames: Frames, axes: Any, frame: Frame) -> None:
    """Put the depth above the picture, and what the user adds."""
    axes.figure.text(
        0.03, TITLE_HEIGHT, f"depth $t = {_depth_text(frame)}$",
        color=style.INK, fontsize=12,
    )  # fmt: skip
    if frames.decorate is not None:
        frames.decorate(axes, frame)


def _depth_text(frame: Frame) -> str:
    """The depth in decimals, or with a power of ten if it is too small for them."""
    depth, decimals = frame.depth, _decimals(frame.strip)
    if depth == 0 or abs(depth) >= 0.99 * 10.0**-decimals:
        return f"{depth:.{decimals}f}"
    mantissa, exponent = f"{depth:.2e}".split("e")
    return rf"{mantissa} \cdot 10^{{{int(exponent)}}}"


def _decimals(strip: Strip) -> int:
    """Decimals that tell the depths of two frames apart: three, if depths reach one.

    More where all depths are small, so that three digits are seen; six at most.
    """
    gaps = np.abs(np.diff(strip.depths))
    step = gaps.min() if gaps.size else 1.0
    largest = max(float(np.abs(strip.depths).max()), 1e-9)
    most = int(np.clip(2 - np.floor(np.log10(largest)), 3, 6))
    return int(np.clip(np.ceil(-np.log10(max(step, 1e-9))), 0, most))
