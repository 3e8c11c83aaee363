"""Depth as time: flows, schedules, solvers, finite layers, trajectories."""

from meanformer.errors import warn as _warn

from .append import append_tokens as append_tokens
from .bounds.a_priori import radius_bound as radius_bound
from .bounds.a_priori import stability_bound as stability_bound
from .bounds.stability import Growth as Growth
from .bounds.stability import growth_factor as growth_factor
from .bounds.stability import lipschitz_profile as lipschitz_profile
from .bounds.stability import observed_growth as observed_growth
from .dynamics.driver import AbstractDynamics as AbstractDynamics
from .dynamics.driver import State as State
from .dynamics.driver import drive as drive
from .dynamics.merging import Merge as Merge
from .dynamics.recorder import AbstractProgress as AbstractProgress
from .dynamics.recorder import AbstractRecorder as AbstractRecorder
from .dynamics.recorder import ProgressBar as ProgressBar
from .dynamics.stretch import AbstractIntegrated as AbstractIntegrated
from .dynamics.stretch import Stretch as Stretch
from .dynamics.stretch import in_clock as in_clock
from .dynamics.stretch import in_depth as in_depth
from .dynamics.stretch import term as term
from .flow import Flow as Flow
from .geodesic import GeodesicStep as GeodesicStep
from .hardmax.flow import HardmaxPath as HardmaxPath
from .hardmax.flow import LeaderChange as LeaderChange
from .hardmax.flow import hardmax_flow as hardmax_flow
from .hardmax.steps import HardmaxRun as HardmaxRun
from .hardmax.steps import run_hardmax as run_hardmax
from .inputs import Settings as Settings
from .layers import run_layers as run_layers
from .many import solve_many as solve_many
from .methods import RK4 as RK4
from .normalisation.flows import Normalised as Normalised
from .normalisation.flows import normalised_flow as normalised_flow
from .normalisation.flows import run_normalised_layers as run_normalised_layers
from .normalisation.schemes import NGPT as NGPT
from .normalisation.schemes import AbstractScheme as AbstractScheme
from .normalisation.schemes import CustomScheme as CustomScheme
from .normalisation.schemes import MixNorm as MixNorm
from .normalisation.schemes import PeriNorm as PeriNorm
from .normalisation.schemes import PostNorm as PostNorm
from .normalisation.schemes import PreNorm as PreNorm
from .normalisation.schemes import SqrtScaling as SqrtScaling
from .rescaled import BooleanAttention as BooleanAttention
from .rescaled import Rescaled as Rescaled
from .schedule import AbstractSchedule as AbstractSchedule
from .schedule import Constant as Constant
from .schedule import FunctionOfDepth as FunctionOfDepth
from .schedule import Schedule as Schedule
from .solve import solve as solve
from .solvers import AbstractIntegrator as AbstractIntegrator
from .solvers import Adaptive as Adaptive
from .solvers import FixedStep as FixedStep
from .solvers import LongDepth as LongDepth
from .solvers import Spectral as Spectral
from .solvers import Splitting as Splitting
from .solvers import Stiff as Stiff
from .solvers import Switching as Switching
from .status import AbstractStop as AbstractStop
from .status import EscapeRadius as EscapeRadius
from .status import Snapshot as Snapshot
from .status import Status as Status
from .status import SteadyState as SteadyState
from .status import StepBudget as StepBudget
from .status import StopWhen as StopWhen
from .trajectories.abstract import AbstractTrajectory as AbstractTrajectory
from .trajectories.atoms import Atoms as Atoms
from .trajectories.atoms import Merges as Merges
from .trajectories.density import DensityTrajectory as DensityTrajectory
from .trajectories.gaussian import GaussianTrajectory as GaussianTrajectory
from .trajectories.tokens import Trajectory as Trajectory


def __getattr__(name: str):
    if name == "Moment":
        _warn("flows.Moment is now flows.Snapshot; use that name.", DeprecationWarning)
        return Snapshot
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
