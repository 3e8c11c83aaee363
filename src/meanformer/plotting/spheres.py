"""Tokens on the sphere: how densely they lie, on a map that keeps areas."""

from typing import Any

import numpy as np

from meanformer.errors import check
from meanformer.measures import TokenCloud
from meanformer.plotting import style

LARGEST_CONTRAST = 100.0


def draw_sphere_density(cloud: TokenCloud, axes: Any, *, cells: int = 72) -> Any:
    """Draw the density of tokens on the unit sphere, relative to the uniform law.

    Args:
        cloud: tokens on the sphere in three dimensions.
        axes: where to draw, with `projection="mollweide"`.
        cells: cells along the equator; half as many from pole to pole, all of one area.

    Returns:
        The mesh, for a colour bar.
    """
    from matplotlib.colors import LogNorm

    check(
        cloud.dimension == 3,
        f"the tokens have dimension {cloud.dimension}; this map is of a sphere in "
        "three.",
    )
    x, y, z = np.asarray(cloud.points).T
    longitudes = np.linspace(-np.pi, np.pi, cells + 1)
    heights = np.linspace(-1, 1, cells // 2 + 1)
    masses, _, _ = np.histogram2d(
        np.arctan2(y, x),
        np.clip(z, -1, 1),
        bins=(longitudes, heights),
        weights=np.asarray(cloud.weights),
    )
    density = masses * masses.size
    mesh = axes.pcolormesh(
        longitudes,
        np.arcsin(heights),
        np.clip(density, 1 / LARGEST_CONTRAST, LARGEST_CONTRAST).T,
        norm=LogNorm(1 / LARGEST_CONTRAST, LARGEST_CONTRAST),
        cmap=style.density_colours(),
        rasterized=True,
    )
    axes.set(xticklabels=[], yticklabels=[])
    axes.grid(visible=False)
    return mesh
