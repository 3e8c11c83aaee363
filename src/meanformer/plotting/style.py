"""How our figures look: colours, type, sizes, and turning a figure into a file.

Figures are drawn in one ink colour on no background, with data in colours of middle
lightness, so that the same drawing reads well on a white and on a dark page.
"""

import contextlib
import io
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

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
    "xtick.color": INK,
    "xtick.direction": "out",
    "xtick.labelsize": 9.5,
    "xtick.major.width": 0.7,
    "xtick.minor.width": 0.5,
    "ytick.color": INK,
    "ytick.labelsize": 9.5,
    "ytick.major.width": 0.7,
    "ytick.minor.width": 0.5,
}


@contextlib.contextmanager
def applied() -> Iterator[None]:
    """Draw in our style inside the `with` block."""
    import matplotlib
    from cycler import cycler

    cycle = {"axes.prop_cycle": cycler(color=PALETTE)}
    with matplotlib.rc_context(SETTINGS | cycle):
        yield


def depth_colours() -> Any:
    """A colour map for what changes along depth: blue at first, gold at last."""
    from matplotlib.colors import LinearSegmentedColormap

    steps = (BLUE, VIOLET, ROSE, ORANGE, "#bd8a12")
    return LinearSegmentedColormap.from_list("depth", steps)


def shades(count: int) -> Any:
    """So many colours from blue to gold, such as one for each temperature."""
    return depth_colours()(np.linspace(0, 1, count))


def density_colours() -> Any:
    """Colours from dark blue to dark red, with what is in the middle pale."""
    from matplotlib.colors import LinearSegmentedColormap

    steps = ("#10203c", BLUE, "#e8e6e1", ORANGE, "#6d1f12")
    return LinearSegmentedColormap.from_list("density", steps)


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
    return _own_identifiers(element.replace(INK, "currentColor"))


def to_png(figure: Any) -> bytes:
    """The figure as a bitmap on white, for slides and papers."""
    buffer = io.BytesIO()
    with applied():
        figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, facecolor="white")
    return buffer.getvalue()


def _own_identifiers(element: str) -> str:
    import hashlib

    prefix = "f" + hashlib.sha256(element.encode()).hexdigest()[:8] + "-"
    element = re.sub(r'\bid="', f'id="{prefix}', element)
    element = re.sub(r'href="#', f'href="#{prefix}', element)
    return element.replace("url(#", f"url(#{prefix}")
