"""Infinitely many tokens: densities, linear stability, stationary states with noise."""

from .branches import StationaryBranch as StationaryBranch
from .branches import stationary_branch as stationary_branch
from .evolution import Evolution as Evolution
from .evolution import evolve as evolve
from .linear_stability import FastestDegree as FastestDegree
from .linear_stability import degree_powers as degree_powers
from .linear_stability import fastest_degree as fastest_degree
from .linear_stability import growth_rates as growth_rates
from .linear_stability import predicted_clusters as predicted_clusters
from .minimising_movement import MinimisingMovement as MinimisingMovement
from .minimising_movement import minimising_movement as minimising_movement
from .nodes import circle_nodes as circle_nodes
from .nodes import density_nodes as density_nodes
from .nodes import ring_nodes as ring_nodes
from .noise import branch_curvature as branch_curvature
from .noise import critical_kappa as critical_kappa
from .noise import critical_noise as critical_noise
from .noise import noise_of_kappa as noise_of_kappa
from .noise import tricritical_beta as tricritical_beta
from .rings import Axisymmetric as Axisymmetric
from .rings import Rings as Rings
from .rings import unfold_rings as unfold_rings
from .stationary import StationaryState as StationaryState
from .stationary import stationary_state as stationary_state
