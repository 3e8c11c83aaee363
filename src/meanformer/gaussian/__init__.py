"""Gaussian token measures: exact flows, blow-up, rank, energies, the conjecture."""

from meanformer.errors import warn as _warn
from meanformer.measures.gaussian import entropic_reward as entropic_reward

from .blow_up import BlowUp as BlowUp
from .blow_up import blowup_time as blowup_time
from .conjecture.classify import Classification as Classification
from .conjecture.classify import classify as classify
from .conjecture.ensembles import KNOWN_CASES as KNOWN_CASES
from .conjecture.ensembles import AbstractEnsemble as AbstractEnsemble
from .conjecture.ensembles import Case as Case
from .conjecture.ensembles import Ensemble as Ensemble
from .conjecture.ensembles import GivenHeads as GivenHeads
from .conjecture.explorer import Draw as Draw
from .conjecture.explorer import Exploration as Exploration
from .conjecture.explorer import examine as examine
from .conjecture.explorer import explore as explore
from .conjecture.search import NearMiss as NearMiss
from .conjecture.search import nearest_cycle as nearest_cycle
from .conjecture.search import nearest_stationary as nearest_stationary
from .energies import GaussianEnergyProfile as GaussianEnergyProfile
from .energies import GaussianStructure as GaussianStructure
from .energies import dissipation as dissipation
from .energies import energy as energy
from .energies import energy_profile as energy_profile
from .energies import gradient_structure as gradient_structure
from .explicit import explicit_solution as explicit_solution
from .exponents import LongRun as LongRun
from .long_depth import growth_along as growth_along
from .long_depth import limit_of as limit_of
from .particles import Comparison as Comparison
from .particles import compare_with_particles as compare_with_particles
from .particles import matched_tokens as matched_tokens
from .stationary import StationaryPoint as StationaryPoint
from .stationary import is_stationary as is_stationary
from .stationary import stationary_points as stationary_points
from .velocity import ClosureResidual as ClosureResidual
from .velocity import affine_velocity as affine_velocity
from .velocity import centred as centred
from .velocity import closure_residual as closure_residual


def __getattr__(name: str):
    if name == "Outcome":
        message = "gaussian.Outcome is now gaussian.Classification; use that name."
        _warn(message, DeprecationWarning)
        return Classification
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
