"""Bifurcation diagrams: stationary states against a parameter."""

from typing import Any

import numpy as np

from meanformer.mean_field import StationaryBranch
from meanformer.plotting import style

# Points drawn between two of a branch and the next.
FINER = 8


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
    kappas, orders = _smooth(branch.kappas / unit, branch.orders)
    pieces = _pieces(branch.is_stable)
    # The legend shows a solid line if there is one.
    named = max(range(len(pieces)), key=lambda index: (pieces[index][1], -index))
    for index, (stretch, is_stable) in enumerate(pieces):
        piece = slice(FINER * stretch.start, FINER * (stretch.stop - 1) + 1)
        axes.plot(
            kappas[piece],
            orders[piece],
            "-" if is_stable else "--",
            color=color,
            label=label if index == named else None,
        )
    if marks:
        for fold in branch.folds:
            axes.plot(
                fold.kappa / unit, fold.moment(branch.degree), "o", color=style.ROSE
            )
        if branch.maxwell is not None:
            state = branch.maxwell
            place = state.kappa / unit, state.moment(branch.degree)
            axes.plot(*place, "D", color=style.GOLD)
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


def _smooth(kappas: np.ndarray, orders: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a smooth curve through the points of a branch, which are on it."""
    from scipy.interpolate import Akima1DInterpolator

    steps = np.hypot(np.diff(kappas) / np.ptp(kappas), np.diff(orders))
    places = np.append(0, np.cumsum(steps))
    count = len(kappas) - 1
    fine = np.interp(np.arange(FINER * count + 1) / FINER, np.arange(count + 1), places)
    curve = Akima1DInterpolator(places, np.stack([kappas, orders], axis=1))(fine)
    curve[::FINER] = np.stack([kappas, orders], axis=1)
    return curve[:, 0], curve[:, 1]


def _pieces(is_stable: np.ndarray) -> list[tuple[slice, bool]]:
    """Return stretches of one stability, which share their end points.

    The first point is the bifurcation, which belongs to the stretch after it.
    """
    flags = np.append(is_stable[1:2], is_stable[1:])
    ends = np.flatnonzero(np.diff(flags)) + 1
    starts, stops = [0, *ends], [*ends, len(flags)]
    return [
        (slice(max(start - 1, 0), stop), bool(flags[start]))
        for start, stop in zip(starts, stops, strict=True)
    ]
