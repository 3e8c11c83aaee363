"""Infinitely many tokens: densities, linear stability, stationary states with noise."""

from meanformer.mean_field.branches import StationaryBranch as StationaryBranch
from meanformer.mean_field.branches import stationary_branch as stationary_branch
from meanformer.mean_field.evolution import Evolution as Evolution
from meanformer.mean_field.evolution import evolve as evolve
from meanformer.mean_field.linear_stability import FastestDegree as FastestDegree
from meanformer.mean_field.linear_stability import fastest_degree as fastest_degree
from meanformer.mean_field.linear_stability import growth_rates as growth_rates
from meanformer.mean_field.linear_stability import (
    predicted_clusters as predicted_clusters,
)
from meanformer.mean_field.minimising_movement import (
    MinimisingMovement as MinimisingMovement,
)
from meanformer.mean_field.minimising_movement import (
    minimising_movement as minimising_movement,
)
from meanformer.mean_field.nodes import circle_nodes as circle_nodes
from meanformer.mean_field.nodes import density_nodes as density_nodes
from meanformer.mean_field.nodes import ring_nodes as ring_nodes
from meanformer.mean_field.noise import branch_curvature as branch_curvature
from meanformer.mean_field.noise import critical_kappa as critical_kappa
from meanformer.mean_field.noise import critical_noise as critical_noise
from meanformer.mean_field.noise import noise_of_kappa as noise_of_kappa
from meanformer.mean_field.noise import tricritical_beta as tricritical_beta
from meanformer.mean_field.rings import Axisymmetric as Axisymmetric
from meanformer.mean_field.rings import Rings as Rings
from meanformer.mean_field.rings import unfold_rings as unfold_rings
from meanformer.mean_field.spectrum import degree_powers as degree_powers
from meanformer.mean_field.stationary import StationaryState as StationaryState
from meanformer.mean_field.stationary import stationary_state as stationary_state
