"""Tokens, potentials and basins of attraction on the circle."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from meanformer.attention import Perceptron, Sum
from meanformer.errors import check, check_square
from meanformer.measures import TokenCloud
from meanformer.observables import first_variation
from meanformer.observables.energy.structure import terms_of
from meanformer.plotting import style
from meanformer.plotting.spheres import on_sphere
from meanformer.plotting.token_paths import draw_tails, scatter_discs, token_colours

INWARD = 0.3  # how far the end of a tail leans towards the centre
NODES = 721


def draw_circle(
    subject: Any, axes: Any, *, index: int = -1, tail: int = 12, labels: Any = None
) -> Any:
    """Draw tokens on the unit circle, with tails that spiral inwards into the past.

    Args:
        subject: a trajectory; or a cloud or points, which have no tails.
        axes: where to draw.
        index: which of the saved depths.
        tail: how many saved depths before it the tails reach back.
        labels: the cluster of each token of positive weight; colours by depth if left
            out.

    Returns:
        The axes.
    """
    paths = on_sphere(subject, 2)
    outline = {"color": style.GREY, "linewidth": 0.9, "alpha": 0.7, "zorder": 1}
    axes.plot(*_at_angles(np.linspace(0, 2 * np.pi, 181)).T, **outline)
    colours = token_colours(paths, index, labels)
    tails = paths.tail(index, tail)
    age = np.arange(len(tails))[::-1] / max(tail, 1)
    leaning = tails * (1 - INWARD * age)[:, None, None]
    draw_tails(leaning, colours, axes)
    scatter_discs(paths.points[index], paths.weights, axes, c=colours, largest=44)
    axes.set(aspect="equal", xlim=(-1.12, 1.12), ylim=(-1.12, 1.12))
    axes.set_axis_off()
    return axes


def draw_angles(trajectory: Any, axes: Any, *, labels: Any = None) -> Any:
    """Draw the angles of tokens on the circle against depth, without jumps.

    Args:
        trajectory: tokens on the unit circle along depth.
        axes: where to draw; make its depth logarithmic with `xscale="log"` if need be.
        labels: the cluster of each token of positive weight; a colour by the angle at
            the first depth if left out.

    Returns:
        The axes.
    """
    paths = on_sphere(trajectory, 2)
    angles = np.arctan2(paths.points[..., 1], paths.points[..., 0])
    angles = np.unwrap(angles % (2 * np.pi), axis=0)
    lines = [np.stack([paths.depths, one], axis=1) for one in angles.T]
    if labels is None:
        colours = style.depth_colours()(angles[0] / (2 * np.pi))
    else:
        colours = token_colours(paths, -1, labels)
    widths = 0.7 + 1.1 * paths.weights / paths.weights.max()
    style.add_lines(axes, lines, autolim=True, colors=colours, linewidths=widths)
    axes.autoscale_view()
    first, last = 2 * angles.min() / np.pi, 2 * angles.max() / np.pi
    quarters = np.arange(np.ceil(first), last + 1)
    axes.set_yticks(quarters * np.pi / 2, [f"${_multiple_of_pi(q)}$" for q in quarters])
    axes.set(xlabel="depth $t$", ylabel="angle")
    return axes


def _multiple_of_pi(halves: Any) -> str:
    """So many halves of pi, as a formula."""
    if halves == 0:
        return "0"
    sign, size = "-" if halves < 0 else "", abs(int(halves))
    over, top = ("/2", size) if size % 2 else ("", size // 2)
    return rf"{sign}{'' if top == 1 else top}\pi{over}"


def draw_potential(
    flow: Any, axes: Any, *, atoms: Any = (), labels: Any = None, first_quarter: int = 0
) -> Any:
    r"""Draw the potential of the perceptrons of a flow on the circle, with atoms on it.

    Args:
        flow: a flow on the circle with a perceptron that is a gradient.
        axes: where to draw.
        atoms: clouds on the circle; each is drawn in a colour of its own, with discs
            whose area is proportional to the mass, at the height of $\Phi$.
        labels: a word for each cloud.
        first_quarter: where the full turn begins that is drawn, in quarters of a turn:
            $-2$, $-1$ or 0.

    Returns:
        The axes.
    """
    check(
        first_quarter in (-2, -1, 0),
        f"first_quarter is {first_quarter!r}; it must be -2, -1 or 0.",
    )
    blocks = [t for t in terms_of(flow.velocity.gamma) if isinstance(t, Perceptron)]
    check(len(blocks) > 0, "draw_potential needs a flow with a perceptron.")
    layer = blocks[0] if len(blocks) == 1 else Sum(blocks)
    check(
        layer.input_dimension == 2,
        f"the flow is of dimension {layer.input_dimension}; a potential is drawn on "
        "the circle, in dimension 2.",
    )
    start = first_quarter * np.pi / 2
    turn = start + np.linspace(0, 2 * np.pi, NODES)
    axes.plot(turn, _heights(layer, turn), color=style.INK, linewidth=1.4, zorder=1)
    for place, cloud in enumerate(atoms):
        points = np.asarray(cloud.points)
        angles = np.arctan2(points[:, 1], points[:, 0])
        angles = (angles - start) % (2 * np.pi) + start
        scatter_discs(
            np.stack([angles, _heights(layer, angles)], axis=1),
            np.asarray(cloud.weights),
            axes,
            largest=90,
            color=style.PALETTE[place % len(style.PALETTE)],
            label=None if labels is None else labels[place],
            edgecolors="white",
            linewidths=0.8,
            alpha=0.85,
            clip_on=False,
        )
    quarter_ticks(axes, "x", first_quarter)
    axes.set(xlabel=r"angle $\theta$", ylabel=r"potential $\Phi(\theta)$")
    return axes


def draw_basins(labels: Any, axes: Any, *, names: Any) -> Any:
    """Draw which limit each pair of start angles goes to, as a picture.

    Args:
        labels: integers on a square grid of angles from 0 to a full turn, that of the
            first token along rows; $-1$ where there is no limit.
        axes: where to draw.
        names: a word for each limit, in the order of the integers.

    Returns:
        The axes.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    labels = np.asarray(labels)
    check_square("labels", labels)
    check(
        int(labels.max(initial=0)) < len(names) <= len(style.PALETTE),
        f"there are {len(names)} names for labels up to {labels.max()}; there must be "
        f"one for each, and at most {len(style.PALETTE)}.",
    )
    colours = ["#ffffff", *style.PALETTE[: len(names)]]
    axes.imshow(
        labels.T,
        origin="lower",
        extent=(0, 2 * np.pi, 0, 2 * np.pi),
        cmap=ListedColormap(colours),
        vmin=-1.5,
        vmax=len(names) - 0.5,
        interpolation="nearest",
        alpha=0.85,
    )
    axes.grid(visible=False)
    quarter_ticks(axes, "x")
    quarter_ticks(axes, "y")
    axes.set(xlabel="start of the first token", ylabel="start of the second token")
    handles = [Patch(color=c, label=n) for c, n in zip(colours[1:], names, strict=True)]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return axes


def quarter_ticks(axes: Any, axis: str, first_quarter: int = 0) -> None:
    """Mark quarters of a turn along an axis."""
    quarters = first_quarter + np.arange(5)
    names = [f"${_multiple_of_pi(q)}$" if q else "0" for q in quarters]
    ticks = quarters * np.pi / 2
    axes.set(**{f"{axis}ticks": ticks, f"{axis}ticklabels": names})
    axes.set(**{f"{axis}lim": (ticks[0], ticks[-1])})


def _at_angles(angles: np.ndarray) -> np.ndarray:
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _heights(layer: Any, angles: np.ndarray) -> np.ndarray:
    points = jnp.asarray(_at_angles(angles))
    return np.asarray(first_variation(layer, TokenCloud(points), points))
