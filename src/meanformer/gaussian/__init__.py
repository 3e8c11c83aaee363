"""Gaussian token measures: exact flows, blow-up, rank, energies, the conjecture."""

from meanformer.gaussian.blow_up import BlowUp as BlowUp
from meanformer.gaussian.blow_up import blowup_time as blowup_time
from meanformer.gaussian.conjecture.classify import Outcome as Outcome
from meanformer.gaussian.conjecture.classify import classify as classify
from meanformer.gaussian.conjecture.ensembles import KNOWN_CASES as KNOWN_CASES
from meanformer.gaussian.conjecture.ensembles import (
    AbstractEnsemble as AbstractEnsemble,
)
from meanformer.gaussian.conjecture.ensembles import Case as Case
from meanformer.gaussian.conjecture.ensembles import Ensemble as Ensemble
from meanformer.gaussian.conjecture.ensembles import GivenHeads as GivenHeads
from meanformer.gaussian.conjecture.explorer import Draw as Draw
from meanformer.gaussian.conjecture.explorer import Exploration as Exploration
from meanformer.gaussian.conjecture.explorer import examine as examine
from meanformer.gaussian.conjecture.explorer import explore as explore
from meanformer.gaussian.conjecture.search import NearMiss as NearMiss
from meanformer.gaussian.conjecture.search import nearest_cycle as nearest_cycle
from meanformer.gaussian.conjecture.search import (
    nearest_stationary as nearest_stationary,
)
from meanformer.gaussian.energies import GaussianEnergyProfile as GaussianEnergyProfile
from meanformer.gaussian.energies import GaussianStructure as GaussianStructure
from meanformer.gaussian.energies import dissipation as dissipation
from meanformer.gaussian.energies import energy as energy
from meanformer.gaussian.energies import energy_profile as energy_profile
from meanformer.gaussian.energies import entropic_reward as entropic_reward
from meanformer.gaussian.energies import gradient_structure as gradient_structure
from meanformer.gaussian.explicit import explicit_solution as explicit_solution
from meanformer.gaussian.exponents import LongRun as LongRun
from meanformer.gaussian.long_run import growth_along as growth_along
from meanformer.gaussian.long_run import limit_of as limit_of
from meanformer.gaussian.particles import Comparison as Comparison
from meanformer.gaussian.particles import (
    compare_with_particles as compare_with_particles,
)
from meanformer.gaussian.particles import matched_tokens as matched_tokens
from meanformer.gaussian.stationary import StationaryPoint as StationaryPoint
from meanformer.gaussian.stationary import is_stationary as is_stationary
from meanformer.gaussian.stationary import stationary_points as stationary_points
from meanformer.gaussian.velocity import ClosureResidual as ClosureResidual
from meanformer.gaussian.velocity import affine_velocity as affine_velocity
from meanformer.gaussian.velocity import centred as centred
from meanformer.gaussian.velocity import closure_residual as closure_residual
