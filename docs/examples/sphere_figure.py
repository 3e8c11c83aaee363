"""Draws the figure of the README: tokens on the sphere gather as depth grows."""

import sys

import jax.random as jr
import numpy as np
from matplotlib.figure import Figure

import meanformer as mf
from meanformer.plotting import style

DEPTHS = (0.0, 1.5, 3.0, 8.0)


def draw(path: mf.Trajectory) -> Figure:
    """Return one sphere for each depth, tokens coloured by where they started."""
    with style.applied():
        figure = Figure(figsize=(11, 2.9))
        start = np.asarray(path.points[0])
        colours = (start[:, 2] + 1) / 2
        for place, depth in enumerate(DEPTHS):
            axes = figure.add_subplot(1, len(DEPTHS), place + 1, projection="3d")
            points = np.asarray(path.at(depth).points)
            draw_sphere(axes)
            axes.scatter(*points.T, c=colours, cmap=style.depth_colours(), s=14)
            axes.set_title(f"depth {depth:g}", loc="center")
    return figure


def draw_sphere(axes) -> None:
    """Draw a wire frame and nothing else around the tokens."""
    around, down = np.mgrid[0 : 2 * np.pi : 25j, 0 : np.pi : 13j]
    frame = (np.cos(around) * np.sin(down), np.sin(around) * np.sin(down), np.cos(down))
    axes.plot_wireframe(*frame, color=style.GREY, linewidth=0.3, alpha=0.5)
    axes.set_box_aspect((1, 1, 1), zoom=1.45)
    axes.set_axis_off()


cloud = mf.TokenCloud(mf.UniformSphere(3).sample(200, key=jr.key(0)))
attention = mf.identity_attention("softmax", dimension=3, beta=9.0)
flow = mf.Flow(attention, space=mf.Sphere())
trajectory = mf.solve(flow, cloud, depth=DEPTHS[-1], save=DEPTHS)

if __name__ == "__main__" and len(sys.argv) > 1:
    draw(trajectory).savefig(
        sys.argv[1], dpi=110, facecolor="white", bbox_inches="tight"
    )
