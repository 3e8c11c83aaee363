"""Phase diagrams: a quantity over depth and temperature, with a theoretical curve."""

from typing import Any

import numpy as np

from meanformer.errors import check, check_choice
from meanformer.observables import PhaseCurve, PhaseDiagram
from meanformer.plotting import style

LABELS = {
    "pairs": r"pairs with $\langle x_i, x_j\rangle > {level:g}$",
    "clusters": "number of clusters",
    "rank": "dimension of the span",
}
SMALLEST_SHARE = 1e-5  # below which logarithmic colours do not tell fractions apart


def draw_phase_diagram(
    diagram: PhaseDiagram,
    axes: Any,
    *,
    curve: PhaseCurve | tuple[Any, Any] | None = None,
    colours: str = "linear",
    values: Any = None,
    bar: bool = True,
) -> Any:
    """Draw a phase diagram: depth to the right, inverse temperature upwards.

    Args:
        diagram: the diagram.
        axes: where to draw.
        curve: a theoretical boundary, or its depths and inverse temperatures; only the
            part inside the diagram is seen.
        colours: `"linear"`, or `"log"` for what is close to zero.
        values: what to colour by, one row per temperature; the mean by default.
        bar: add a colour bar.

    Returns:
        The axes.
    """
    check_choice("colours", colours, ("linear", "log"))
    shown = diagram.mean if values is None else np.asarray(values)
    check(
        shown.shape == diagram.mean.shape,
        f"values has shape {shown.shape}; that of the diagram is {diagram.mean.shape}.",
    )
    mesh = axes.pcolormesh(
        _edges(diagram.depths),
        _edges(diagram.betas),
        shown,
        cmap=style.density_colours(),
        norm=_norm(diagram, shown, colours),
        rasterized=True,
    )
    if curve is not None:
        _add_curve(curve, axes)
    axes.set(xlabel="depth $t$", ylabel=r"$\beta$")
    for name, grid in (("xlim", diagram.depths), ("ylim", diagram.betas)):
        if len(grid) > 1:
            axes.set(**{name: (grid[0], grid[-1])})
    axes.grid(False)
    if bar:
        label = LABELS[diagram.quantity].replace("{level:g}", f"{diagram.level:g}")
        axes.figure.colorbar(mesh, ax=axes, label=label)
    return axes


def _norm(diagram: PhaseDiagram, shown: np.ndarray, colours: str) -> Any:
    from matplotlib.colors import LogNorm, Normalize

    is_share = diagram.quantity == "pairs"
    top = 1.0 if is_share else max(float(shown.max()), 2.0)
    if colours == "linear":
        return Normalize(0.0 if is_share else 1.0, top)
    pairs = diagram.starts * diagram.count * (diagram.count - 1) / 2
    low = max(SMALLEST_SHARE, 1 / pairs) if is_share else 1.0
    return LogNorm(low, top, clip=True)


def _add_curve(curve: PhaseCurve | tuple[Any, Any], axes: Any) -> None:
    if isinstance(curve, PhaseCurve):
        depths, betas = curve.depths, curve.betas
    else:
        depths, betas = (np.asarray(part) for part in curve)
    # Light under dark: to be seen on every colour.
    axes.plot(depths, betas, color="#ffffff", linewidth=3.4, alpha=0.75)
    axes.plot(depths, betas, "--", color="#111111", linewidth=1.5, label="equiangular")


def _edges(centres: np.ndarray) -> np.ndarray:
    """Ends of cells around points of the grid; a single one has width one."""
    if len(centres) == 1:
        return centres[0] + np.array([-0.5, 0.5])
    halves = np.diff(centres) / 2
    first, last = centres[0] - halves[0], centres[-1] + halves[-1]
    return np.array([first, *(centres[:-1] + halves), last])
