"""Draws tokens of space on their way to a polytope, and who attends to whom."""

import jax
import numpy as np

import meanformer as mf
from meanformer.plotting import canvas, draw_attention, draw_hull, draw_paths_3d

jax.config.update("jax_enable_x64", True)

attention = mf.identity_attention("softmax", dimension=3)
tokens = np.random.default_rng(0).uniform(-1.2, 1.2, size=(24, 3))
report = mf.observables.find_limit(attention, mf.TokenCloud(tokens))
found = report.detection

space, (left, right) = canvas(2, subplot_kw={"projection": "3d"})
draw_paths_3d(report.continued(np.linspace(0, 8, 121)), left)
draw_hull(found.vertices, right, vertices=True)

path = report.trajectory
last = mf.Rescaled(attention).attention_at(path.depths[-1])
matrix = mf.attention_matrix(last, path.cloud(-1))
heat, axes = canvas()
draw_attention(matrix, axes, leaders=found.leaders, rank=found.following.rank)

if __name__ == "__main__":
    space.savefig("polytope.png", facecolor="white")
    heat.savefig("attention.png", facecolor="white")
