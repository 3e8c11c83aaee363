"""Diagrams: phases, branches of stationary states, saddles between plateaus."""

from itertools import pairwise
from typing import Any

import numpy as np

from meanformer.errors import check, check_choice
from meanformer.mean_field import StationaryBranch
from meanformer.observables import PhaseCurve, PhaseDiagram
from meanformer.plotting import style

LABELS = {
    "pairs": r"pairs with $\langle x_i, x_j\rangle > {level:g}$",
    "clusters": "number of clusters",
    "rank": "dimension of the span",
}
SMALLEST_SHARE = 1e-5  # below which logarithmic colours do not tell fractions apart
FINER = 8  # points drawn between two of a branch and the next


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
        # Light under dark: to be seen on every colour.
        line = (curve.depths, curve.betas) if isinstance(curve, PhaseCurve) else curve
        axes.plot(*line, color="#ffffff", linewidth=3.4, alpha=0.75)
        axes.plot(*line, "--", color="#111111", linewidth=1.5, label="equiangular")
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


def _edges(centres: np.ndarray) -> np.ndarray:
    """Ends of cells around points of the grid; a single one has width one."""
    halves = np.diff(centres) / 2 if len(centres) > 1 else np.array([0.5])
    first, last = centres[0] - halves[0], centres[-1] + halves[-1]
    return np.array([first, *(centres[:-1] + np.diff(centres) / 2), last])


def draw_branch(
    branch: StationaryBranch,
    axes: Any,
    *,
    color: str = style.BLUE,
    label: str | None = None,
    unit: float = 1.0,
    marks: bool = True,
) -> Any:
    r"""Draw the order of a branch against the inverse noise: dashed where unstable.

    Folds are dots; the Maxwell point, where its free energy is that of the uniform
    state, is a diamond. Axes without labels get them.

    Args:
        branch: the branch.
        axes: where to draw.
        color: its colour.
        label: its name in the legend; none by default.
        unit: what $\kappa$ is divided by, such as the critical one.
        marks: whether to mark folds and the Maxwell point.

    Returns:
        The axes.
    """
    curve = _smooth(np.stack([branch.kappas / unit, branch.orders], axis=1))
    pieces = _pieces(branch.is_stable)
    # The legend shows a solid line if there is one.
    named = max(range(len(pieces)), key=lambda index: (pieces[index][1], -index))
    for index, (stretch, is_stable) in enumerate(pieces):
        piece = slice(FINER * stretch.start, FINER * (stretch.stop - 1) + 1)
        name = label if index == named else None
        axes.plot(*curve[piece].T, "-" if is_stable else "--", color=color, label=name)
    marked = [(fold, "o", style.ROSE) for fold in branch.folds]
    if branch.maxwell is not None:
        marked.append((branch.maxwell, "D", style.GOLD))
    for state, mark, colour in marked if marks else []:
        place = state.kappa / unit, state.moment(branch.degree)
        axes.plot(*place, mark, color=colour)
    if not axes.get_xlabel():
        axes.set_xlabel(r"inverse noise $\kappa$" if unit == 1 else r"$\kappa$, scaled")
    if not axes.get_ylabel():
        axes.set_ylabel("order")
    return axes


def draw_uniform(critical: float, low: float, high: float, axes: Any) -> Any:
    """Draw the uniform state, stable up to the critical value and dashed beyond.

    Args:
        critical: where it loses its stability.
        low: the left end.
        high: the right end.
        axes: where to draw.

    Returns:
        The axes.
    """
    axes.plot([low, critical], [0, 0], "-", color=style.INK, linewidth=1.3)
    axes.plot([critical, high], [0, 0], "--", color=style.INK, linewidth=1.3)
    return axes


def _smooth(points: np.ndarray) -> np.ndarray:
    """Return a smooth curve through the points of a branch, which are on it."""
    from scipy.interpolate import Akima1DInterpolator

    steps = np.hypot(*(np.diff(points, axis=0) / [np.ptp(points[:, 0]), 1]).T)
    places = np.append(0, np.cumsum(steps))
    numbers = np.arange(len(points))
    fine = np.interp(np.arange(FINER * numbers[-1] + 1) / FINER, numbers, places)
    curve = Akima1DInterpolator(places, points)(fine)
    curve[::FINER] = points
    return curve


def _pieces(is_stable: np.ndarray) -> list[tuple[slice, bool]]:
    """Return stretches of one stability, which share their end points.

    The first point is the bifurcation, which belongs to the stretch after it.
    """
    flags = np.append(is_stable[1:2], is_stable[1:])
    ends = [0, *(np.flatnonzero(np.diff(flags)) + 1), len(flags)]
    return [
        (slice(max(start - 1, 0), stop), bool(flags[start]))
        for start, stop in pairwise(ends)
    ]


def draw_saddles(saddles: Any, axes: Any) -> Any:
    """Draw the way of a trajectory from plateau to plateau, with energy as height.

    Every plateau is a node, from left to right, filled if a critical point of the
    energy belongs to it and hollow if there is none nearby. Its label has the number of
    groups, the index of the critical point, and how far the farthest group is from it;
    arrows lead from each to the next. A grey bar reaches out to the energy of the
    critical point where that differs.

    Args:
        saddles: as `observables.saddles` returns them.
        axes: where to draw.

    Returns:
        The axes.
    """
    steps = list(saddles)
    # That of the tokens where they are known.
    energies = [(step.plateau.energy, step.plateau.level, 0.0) for step in steps]
    heights = [next(e for e in known if e is not None) for known in energies]
    for place, (start, end) in enumerate(pairwise(heights)):
        arrow = {"arrowstyle": "-|>", "color": style.GREY, "linewidth": 1.2}
        shape = {"shrinkA": 8, "shrinkB": 8, "connectionstyle": "arc3,rad=-0.12"}
        axes.annotate("", (place + 1, end), (place, start), arrowprops=arrow | shape)
    colours = style.shades(len(steps))
    for place, (step, height) in enumerate(zip(steps, heights, strict=True)):
        face = "none" if step.point is None else [colours[place]]
        options = {"s": 150, "linewidths": 1.6, "zorder": 3, "facecolors": face}
        axes.scatter([place], [height], edgecolors=[colours[place]], **options)
        if step.energy is not None:
            pair = [height, step.energy]
            axes.plot([place, place], pair, color=style.GREY, linewidth=1, zorder=2)
        below = {"textcoords": "offset points", "ha": "left", "va": "top"}
        axes.annotate(_label(step), (place, height), (8, -9), fontsize=9, **below)
    counts = ["?" if s.plateau.count is None else str(s.plateau.count) for s in steps]
    axes.set_xticks(range(len(steps)), counts)
    axes.set(xlabel="groups on the plateau", ylabel="energy (one cluster: 1)")
    # Labels stand to the right of their nodes.
    axes.margins(y=0.12)
    axes.set_xlim(-0.4, len(steps) - 0.2)
    axes.set_ylim(bottom=min(heights) - 0.25 * max(np.ptp(heights), 0.1))
    return axes


def _label(step: Any) -> str:
    """The label of a plateau, which describes its critical point."""
    if step.point is None:
        return "no saddle"
    if step.index == 0:
        return "maximum"
    return f"index {step.index}\n{step.distance:.2f} away"
