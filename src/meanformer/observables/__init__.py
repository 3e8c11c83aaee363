"""What to look at: energies, gradient structure, convergence, distances."""

from meanformer.observables.convergence import TokenConvergence as TokenConvergence
from meanformer.observables.convergence import token_convergence as token_convergence
from meanformer.observables.distances import DistanceStatistics as DistanceStatistics
from meanformer.observables.distances import distance_statistics as distance_statistics
from meanformer.observables.energies import EnergyProfile as EnergyProfile
from meanformer.observables.energies import dissipation as dissipation
from meanformer.observables.energies import energy as energy
from meanformer.observables.energies import energy_profile as energy_profile
from meanformer.observables.influence import (
    asymptotic_covariance as asymptotic_covariance,
)
from meanformer.observables.staircase import Staircase as Staircase
from meanformer.observables.staircase import greedy_staircase as greedy_staircase
from meanformer.observables.structure import GradientStructure as GradientStructure
from meanformer.observables.structure import is_gradient_flow as is_gradient_flow
