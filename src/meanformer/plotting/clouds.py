"""Tokens in the plane: where they are, where they go, what moves them."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from meanformer.attention import AbstractInContextMap
from meanformer.flows import Trajectory
from meanformer.measures import TokenCloud
from meanformer.plotting import style
from meanformer.plotting.discs import disc_areas, draw_coloured_paths
from meanformer.plotting.limits import check_planar
from meanformer.plotting.token_paths import paths_of


def draw_tokens(
    cloud: TokenCloud, axes: Any, *, color: str = style.INK, **options
) -> Any:
    """Draw tokens as discs whose area is their weight.

    Args:
        cloud: tokens in the plane.
        axes: where to draw.
        color: colour of the discs.
        **options: passed to `Axes.scatter`.

    Returns:
        The axes.
    """
    check_planar("the tokens have dimension", cloud.dimension)
    sizes = disc_areas(np.asarray(cloud.weights), 90)
    axes.scatter(*np.asarray(cloud.points).T, s=sizes, color=color, zorder=3, **options)
    return axes


def draw_paths(trajectory: Trajectory, axes: Any, *, is_labelled: bool = True) -> Any:
    """Draw the tokens' paths in the plane, coloured by depth.

    Args:
        trajectory: tokens in the plane along depth.
        axes: where to draw.
        is_labelled: add a colour bar with the depths.

    Returns:
        The axes.
    """
    paths = paths_of(trajectory)
    check_planar("the tokens have dimension", paths.dimension)
    bar = {"shrink": 0.8} if is_labelled else {}
    draw_coloured_paths(paths, axes, linewidth=1.6, largest=110, **bar)
    axes.autoscale_view()
    axes.set(aspect="equal", xlabel="$x_1$", ylabel="$x_2$")
    return axes


def draw_field(
    gamma: AbstractInContextMap, cloud: TokenCloud, axes: Any, *, resolution: int = 15
) -> Any:
    r"""Draw $x \mapsto \Gamma[\mu](x)$ on a grid, with the tokens and their moves.

    Args:
        gamma: a map of the plane.
        cloud: the context.
        axes: where to draw.
        resolution: arrows along each side of the grid.

    Returns:
        The axes.
    """
    check_planar("the tokens have dimension", cloud.dimension)
    reach = 1.35 * float(cloud.radius())
    side = np.linspace(-reach, reach, resolution)
    grid = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    field = np.asarray(gamma(cloud, jnp.asarray(grid)))
    axes.quiver(*grid.T, *field.T, color=style.GREY, alpha=0.7, width=0.0035)
    moves = np.asarray(gamma(cloud, cloud.points, positions=cloud.positions))
    axes.quiver(
        *np.asarray(cloud.points).T,
        *moves.T,
        color=style.ORANGE,
        angles="xy",
        scale_units="xy",
        scale=1,
        width=0.009,
        zorder=4,
    )
    draw_tokens(cloud, axes, color=style.BLUE)
    axes.set(aspect="equal", xlim=(-reach, reach), ylim=(-reach, reach))
    return axes
