"""How our figures look: colours, type, sizes, axes; and a figure as a file.

Figures are drawn in one ink colour on no background, with data in colours of middle
lightness, so that the same drawing reads well on a white and on a dark page.
"""

import contextlib
import hashlib
import io
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from meanformer.errors import check

INK = "#1f2430"
PALETTE = (
    "#3b78c9",  # blue
    "#d9692b",  # orange
    "#2b9370",  # green
    "#c2508b",  # rose
    "#8468cf",  # violet
    "#a57f13",  # gold
    "#3d93a8",  # teal
    "#808793",  # grey
)
BLUE, ORANGE, GREEN, ROSE, VIOLET, GOLD, TEAL, GREY = PALETTE

PANEL = (4.4, 3.3)  # inches
DOTS_PER_INCH = 160

SETTINGS: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 10.5,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "figure.constrained_layout.use": True,
    "figure.dpi": 100,
    "figure.facecolor": "none",
    "font.family": "STIXGeneral",
    "font.size": 10.5,
    "grid.alpha": 0.13,
    "grid.color": INK,
    "grid.linewidth": 0.7,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "lines.linewidth": 1.7,
    "lines.markersize": 4.5,
    "mathtext.fontset": "stix",
    "savefig.facecolor": "none",
    "svg.fonttype": "path",
    "svg.hashsalt": "meanformer",
    "text.color": INK,
    "xtick.direction": "out",
}
TICKS = {"color": INK, "labelsize": 9.5, "major.width": 0.7, "minor.width": 0.5}
SETTINGS |= {f"{axis}tick.{key}": TICKS[key] for axis in "xy" for key in TICKS}


@contextlib.contextmanager
def applied() -> Iterator[None]:
    """Draw in our style inside the `with` block."""
    import matplotlib
    from cycler import cycler

    cycle = {"axes.prop_cycle": cycler(color=PALETTE)}
    with matplotlib.rc_context(SETTINGS | cycle):
        yield


def colours_through(name: str, *steps: str) -> Any:
    """A colour map that goes from one colour to the next."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(name, steps)


def depth_colours() -> Any:
    """A colour map for what changes along depth: blue at first, gold at last."""
    return colours_through("depth", BLUE, VIOLET, ROSE, ORANGE, "#bd8a12")


def shades(count: int) -> Any:
    """So many colours from blue to gold, such as one for each temperature."""
    return depth_colours()(np.linspace(0, 1, count))


def density_colours() -> Any:
    """Colours from dark blue to dark red, with what is in the middle pale."""
    return colours_through("density", "#10203c", BLUE, "#e8e6e1", ORANGE, "#6d1f12")


def canvas(
    columns: int = 1,
    rows: int = 1,
    *,
    panel: tuple[float, float] = PANEL,
    **options: Any,
) -> tuple[Any, Any]:
    """A new figure with a grid of panels of equal size, in our style.

    Args:
        columns: panels side by side.
        rows: panels on top of each other.
        panel: width and height of one panel, in inches.
        **options: passed to `Figure.subplots`, such as `sharey=True`.

    Returns:
        The figure, and its axes as `Figure.subplots` returns them.
    """
    from matplotlib.figure import Figure

    with applied():
        figure = Figure(figsize=(columns * panel[0], rows * panel[1]))
        return figure, figure.subplots(rows, columns, **options)


def to_svg(figure: Any) -> str:
    """The figure as an SVG element that takes its ink from the page around it.

    Ink becomes `currentColor`, and identifiers are made unlike those of any other
    figure, so that several can stand in one page.
    """
    buffer = io.StringIO()
    with applied():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    element = buffer.getvalue()
    element = element[element.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>\s*", "", element, flags=re.DOTALL)
    element = element.replace(INK, "currentColor")
    prefix = "f" + hashlib.sha256(element.encode()).hexdigest()[:8] + "-"
    for reference in ('id="', 'href="#', "url(#"):
        element = re.sub(rf"\b{re.escape(reference)}", reference + prefix, element)
    return element


def to_png(figure: Any) -> bytes:
    """The figure as a bitmap on white, for slides and papers."""
    buffer = io.BytesIO()
    with applied():
        figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, facecolor="white")
    return buffer.getvalue()


def check_axes(axes: Any, dimension: int) -> None:
    """Raise unless the axes are of the plane or of space as the dimension is."""
    kind = getattr(axes, "name", None)
    check(
        kind is not None and (kind == "3d") == (dimension == 3),
        f"what has {dimension} coordinates is given for {kind or type(axes).__name__} "
        "axes; three need "
        'those of canvas(subplot_kw={"projection": "3d"}), two those of canvas().',
    )


def check_opacity(opacity: float) -> None:
    """Raise unless the opacity is between zero and one."""
    check(0 <= opacity <= 1, f"opacity is {opacity}; it must be between 0 and 1.")


def set_square(axes: Any, points: np.ndarray, *, margin: float) -> None:
    """Make axes of the plane square around points, with a margin on each side."""
    low, high = points.min(axis=0), points.max(axis=0)
    half = (0.5 + margin) * max(float((high - low).max()), 1e-9)
    (left, bottom), (right, top) = (low + high) / 2 - half, (low + high) / 2 + half
    axes.set(xlim=(left, right), ylim=(bottom, top), aspect="equal")
    axes.set(xlabel="$x_1$", ylabel="$x_2$")


def set_box(axes: Any, points: np.ndarray, *, zoom: float = 0.95) -> None:
    """Make axes of space a box around points: equal scales, no walls, few ticks."""
    # By itself it would hide all discs of a kind behind a plane through their midst.
    axes.computed_zorder = False
    low, high = points.min(axis=0), points.max(axis=0)
    half = np.maximum((high - low) / 2, 1e-9 + 0.02 * np.max(high - low))
    middle, half = (low + high) / 2, 1.12 * half
    for name, centre, reach in zip("xyz", middle, half, strict=True):
        axes.set(**{f"{name}lim": (centre - reach, centre + reach)})
    axes.set(xlabel="$x_1$", ylabel="$x_2$", zlabel="$x_3$")
    axes.set_box_aspect(half / half.max(), zoom=zoom)
    remove_walls(axes)
    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        axis.gridlines.set_alpha(0.12)


def remove_walls(axes: Any) -> None:
    """Make the walls of a box transparent, and its ticks few."""
    from matplotlib.ticker import MaxNLocator

    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        axis.set_pane_color((0, 0, 0, 0))
        axis.set_major_locator(MaxNLocator(4, prune="both"))


def add_lines(axes: Any, pieces: Any, *, autolim: bool = False, **options: Any) -> Any:
    """Add line segments of the plane or of space to axes; return their collection."""
    from matplotlib.collections import LineCollection
    from mpl_toolkits.mplot3d.art3d import Line3DCollection

    kind = Line3DCollection if axes.name == "3d" else LineCollection
    return axes.add_collection(kind(pieces, **options), autolim=autolim)


def add_polygons(
    axes: Any, corners: Any, faces: list, edge: Any, *, autolim: bool, **options: Any
) -> None:
    """Add polygons of the plane or of space to axes; colours come with opacities."""
    from matplotlib.collections import PolyCollection
    from mpl_toolkits.mplot3d.art3d import Poly3DCollection

    kind = Poly3DCollection if axes.name == "3d" else PolyCollection
    polygons = kind(corners, facecolors=faces, edgecolors=[edge], **options)
    axes.add_collection(polygons, autolim=autolim)
