"""Potentials on the circle with atoms on them, and basins of attraction."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from meanformer.attention import Perceptron, Sum
from meanformer.errors import check
from meanformer.measures import TokenCloud
from meanformer.observables import first_variation
from meanformer.observables.energy.structure import terms_of
from meanformer.plotting import style
from meanformer.plotting.discs import disc_areas

NODES = 721
QUARTERS = (r"$-\pi$", r"$-\pi/2$", "0", r"$\pi/2$", r"$\pi$", r"$3\pi/2$", r"$2\pi$")


def draw_potential(
    flow: Any,
    axes: Any,
    *,
    atoms: Any = (),
    labels: Any = None,
    first_quarter: int = 0,
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
        axes.scatter(
            angles,
            _heights(layer, angles),
            s=disc_areas(np.asarray(cloud.weights), 90.0),
            color=style.PALETTE[place % len(style.PALETTE)],
            label=None if labels is None else labels[place],
            edgecolors="white",
            linewidths=0.8,
            alpha=0.85,
            clip_on=False,
            zorder=3,
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
    check(
        labels.ndim == 2 and labels.shape[0] == labels.shape[1],
        f"labels has shape {labels.shape}; it must be a square grid.",
    )
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
    for axis in ("x", "y"):
        quarter_ticks(axes, axis)
    axes.set(xlabel="start of the first token", ylabel="start of the second token")
    handles = [Patch(color=c, label=n) for c, n in zip(colours[1:], names, strict=True)]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return axes


def quarter_ticks(axes: Any, axis: str, first_quarter: int = 0) -> None:
    """Mark quarters of a turn along an axis."""
    ticks = np.pi / 2 * (first_quarter + np.arange(5))
    names = QUARTERS[first_quarter + 2 :][:5]
    axes.set(
        **{f"{axis}ticks": ticks, f"{axis}ticklabels": names},
        **{f"{axis}lim": (ticks[0], ticks[-1])},
    )


def _heights(layer: Any, angles: np.ndarray) -> np.ndarray:
    points = jnp.asarray(np.stack([np.cos(angles), np.sin(angles)], axis=1))
    return np.asarray(first_variation(layer, TokenCloud(points), points))
