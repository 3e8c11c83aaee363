"""Depth as time: flows, schedules, solvers, finite layers, trajectories."""

from meanformer.errors import warn as _warn
from meanformer.flows.append import append_tokens as append_tokens
from meanformer.flows.bounds.a_priori import radius_bound as radius_bound
from meanformer.flows.bounds.a_priori import stability_bound as stability_bound
from meanformer.flows.bounds.stability import Growth as Growth
from meanformer.flows.bounds.stability import growth_factor as growth_factor
from meanformer.flows.bounds.stability import lipschitz_profile as lipschitz_profile
from meanformer.flows.bounds.stability import observed_growth as observed_growth
from meanformer.flows.dynamics.driver import AbstractDynamics as AbstractDynamics
from meanformer.flows.dynamics.driver import State as State
from meanformer.flows.dynamics.driver import drive as drive
from meanformer.flows.dynamics.merging import Merge as Merge
from meanformer.flows.dynamics.recorder import AbstractProgress as AbstractProgress
from meanformer.flows.dynamics.recorder import AbstractRecorder as AbstractRecorder
from meanformer.flows.dynamics.recorder import ProgressBar as ProgressBar
from meanformer.flows.dynamics.stretch import AbstractIntegrated as AbstractIntegrated
from meanformer.flows.dynamics.stretch import Stretch as Stretch
from meanformer.flows.dynamics.stretch import in_clock as in_clock
from meanformer.flows.dynamics.stretch import in_depth as in_depth
from meanformer.flows.dynamics.stretch import term as term
from meanformer.flows.flow import Flow as Flow
from meanformer.flows.geodesic import GeodesicStep as GeodesicStep
from meanformer.flows.hardmax.flow import HardmaxPath as HardmaxPath
from meanformer.flows.hardmax.flow import LeaderChange as LeaderChange
from meanformer.flows.hardmax.flow import hardmax_flow as hardmax_flow
from meanformer.flows.hardmax.steps import HardmaxRun as HardmaxRun
from meanformer.flows.hardmax.steps import run_hardmax as run_hardmax
from meanformer.flows.inputs import Settings as Settings
from meanformer.flows.layers import run_layers as run_layers
from meanformer.flows.many import solve_many as solve_many
from meanformer.flows.methods import RK4 as RK4
from meanformer.flows.normalisation.flows import Normalised as Normalised
from meanformer.flows.normalisation.flows import normalised_flow as normalised_flow
from meanformer.flows.normalisation.flows import (
    run_normalised_layers as run_normalised_layers,
)
from meanformer.flows.normalisation.schemes import NGPT as NGPT
from meanformer.flows.normalisation.schemes import AbstractScheme as AbstractScheme
from meanformer.flows.normalisation.schemes import CustomScheme as CustomScheme
from meanformer.flows.normalisation.schemes import MixNorm as MixNorm
from meanformer.flows.normalisation.schemes import PeriNorm as PeriNorm
from meanformer.flows.normalisation.schemes import PostNorm as PostNorm
from meanformer.flows.normalisation.schemes import PreNorm as PreNorm
from meanformer.flows.normalisation.schemes import SqrtScaling as SqrtScaling
from meanformer.flows.rescaled import BooleanAttention as BooleanAttention
from meanformer.flows.rescaled import Rescaled as Rescaled
from meanformer.flows.schedule import AbstractSchedule as AbstractSchedule
from meanformer.flows.schedule import Constant as Constant
from meanformer.flows.schedule import FunctionOfDepth as FunctionOfDepth
from meanformer.flows.schedule import Schedule as Schedule
from meanformer.flows.solve import solve as solve
from meanformer.flows.solvers import AbstractIntegrator as AbstractIntegrator
from meanformer.flows.solvers import Adaptive as Adaptive
from meanformer.flows.solvers import FixedStep as FixedStep
from meanformer.flows.solvers import LongDepth as LongDepth
from meanformer.flows.solvers import Spectral as Spectral
from meanformer.flows.solvers import Splitting as Splitting
from meanformer.flows.solvers import Stiff as Stiff
from meanformer.flows.solvers import Switching as Switching
from meanformer.flows.status import AbstractStop as AbstractStop
from meanformer.flows.status import EscapeRadius as EscapeRadius
from meanformer.flows.status import Snapshot as Snapshot
from meanformer.flows.status import Status as Status
from meanformer.flows.status import SteadyState as SteadyState
from meanformer.flows.status import StepBudget as StepBudget
from meanformer.flows.status import StopWhen as StopWhen
from meanformer.flows.trajectories.abstract import (
    AbstractTrajectory as AbstractTrajectory,
)
from meanformer.flows.trajectories.atoms import Atoms as Atoms
from meanformer.flows.trajectories.atoms import Merges as Merges
from meanformer.flows.trajectories.density import DensityTrajectory as DensityTrajectory
from meanformer.flows.trajectories.gaussian import (
    GaussianTrajectory as GaussianTrajectory,
)
from meanformer.flows.trajectories.tokens import Trajectory as Trajectory


def __getattr__(name: str):
    if name == "Moment":
        _warn("flows.Moment is now flows.Snapshot; use that name.", DeprecationWarning)
        return Snapshot
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
