"""Figures: one function for each kind, drawing on given axes and returning them."""

from meanformer.plotting.clouds import draw_field as draw_field
from meanformer.plotting.clouds import draw_paths as draw_paths
from meanformer.plotting.clouds import draw_tokens as draw_tokens
from meanformer.plotting.gaussians import draw_cone as draw_cone
from meanformer.plotting.gaussians import draw_eigenvalues as draw_eigenvalues
from meanformer.plotting.gaussians import draw_ellipse as draw_ellipse
from meanformer.plotting.gaussians import draw_ellipses as draw_ellipses
from meanformer.plotting.matrices import draw_matrix as draw_matrix
from meanformer.plotting.rates import draw_rate as draw_rate
from meanformer.plotting.rates import draw_slope as draw_slope
from meanformer.plotting.rates import mark_sizes as mark_sizes
from meanformer.plotting.spheres import draw_sphere_density as draw_sphere_density
from meanformer.plotting.style import canvas as canvas
