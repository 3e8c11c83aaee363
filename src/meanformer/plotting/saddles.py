"""Plateaus and the saddles that belong to them, as a graph that climbs."""

from typing import Any

import numpy as np

from meanformer.plotting import style

AREA = 150.0


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
    heights = [_height(step) for step in steps]
    for place, (start, end) in enumerate(zip(heights[:-1], heights[1:], strict=True)):
        arrow = {"arrowstyle": "-|>", "color": style.GREY, "linewidth": 1.2}
        shape = {"shrinkA": 8, "shrinkB": 8, "connectionstyle": "arc3,rad=-0.12"}
        axes.annotate("", (place + 1, end), (place, start), arrowprops=arrow | shape)
    colours = style.depth_colours()(np.linspace(0, 1, len(steps)))
    for place, (step, height) in enumerate(zip(steps, heights, strict=True)):
        is_critical = step.point is not None
        axes.scatter(
            [place],
            [height],
            s=AREA,
            facecolors=[colours[place]] if is_critical else "none",
            edgecolors=[colours[place]],
            linewidths=1.6,
            zorder=3,
        )
        if step.energy is not None:
            pair = [height, step.energy]
            axes.plot([place, place], pair, color=style.GREY, linewidth=1, zorder=2)
        label = _label(step)
        axes.annotate(
            label,
            (place, height),
            (8, -9),
            textcoords="offset points",
            ha="left",
            va="top",
            fontsize=9,
        )
    counts = ["?" if s.plateau.count is None else str(s.plateau.count) for s in steps]
    axes.set_xticks(range(len(steps)), counts)
    axes.set(xlabel="groups on the plateau", ylabel="energy (one cluster: 1)")
    # Labels stand to the right of their nodes.
    axes.margins(y=0.12)
    axes.set_xlim(-0.4, len(steps) - 0.2)
    axes.set_ylim(bottom=min(heights) - 0.25 * max(np.ptp(heights), 0.1))
    return axes


def _label(step: Any) -> str:
    """What there is to say about the critical point of a plateau."""
    if step.point is None:
        return "no saddle"
    if step.index == 0:
        return "maximum"
    return f"index {step.index}\n{step.distance:.2f} away"


def _height(step: Any) -> float:
    """The energy of a plateau, by its tokens where they are known."""
    plateau = step.plateau
    if plateau.energy is not None:
        return plateau.energy
    return 0.0 if plateau.level is None else plateau.level
