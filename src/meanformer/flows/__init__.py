"""Depth as time: flows, schedules, solvers, finite layers, trajectories."""

from meanformer.flows.a_priori import radius_bound as radius_bound
from meanformer.flows.a_priori import stability_bound as stability_bound
from meanformer.flows.append import append_tokens as append_tokens
from meanformer.flows.flow import Flow as Flow
from meanformer.flows.gaussian_trajectory import (
    GaussianTrajectory as GaussianTrajectory,
)
from meanformer.flows.hardmax import HardmaxRun as HardmaxRun
from meanformer.flows.hardmax import run_hardmax as run_hardmax
from meanformer.flows.layers import run_layers as run_layers
from meanformer.flows.merging import Atoms as Atoms
from meanformer.flows.merging import Merge as Merge
from meanformer.flows.merging import Merges as Merges
from meanformer.flows.methods import RK4 as RK4
from meanformer.flows.normalised import Normalised as Normalised
from meanformer.flows.normalised import normalised_flow as normalised_flow
from meanformer.flows.normalised import run_normalised_layers as run_normalised_layers
from meanformer.flows.recorder import AbstractProgress as AbstractProgress
from meanformer.flows.recorder import AbstractRecorder as AbstractRecorder
from meanformer.flows.recorder import ProgressBar as ProgressBar
from meanformer.flows.rescaled import BooleanAttention as BooleanAttention
from meanformer.flows.rescaled import Rescaled as Rescaled
from meanformer.flows.schedule import AbstractSchedule as AbstractSchedule
from meanformer.flows.schedule import Constant as Constant
from meanformer.flows.schedule import FunctionOfDepth as FunctionOfDepth
from meanformer.flows.schedule import Schedule as Schedule
from meanformer.flows.scheme import AbstractScheme as AbstractScheme
from meanformer.flows.schemes import NGPT as NGPT
from meanformer.flows.schemes import CustomScheme as CustomScheme
from meanformer.flows.schemes import MixNorm as MixNorm
from meanformer.flows.schemes import PeriNorm as PeriNorm
from meanformer.flows.schemes import PostNorm as PostNorm
from meanformer.flows.schemes import PreNorm as PreNorm
from meanformer.flows.schemes import SqrtScaling as SqrtScaling
from meanformer.flows.solve import solve as solve
from meanformer.flows.solvers import AbstractIntegrator as AbstractIntegrator
from meanformer.flows.solvers import Adaptive as Adaptive
from meanformer.flows.solvers import FixedStep as FixedStep
from meanformer.flows.solvers import LongDepth as LongDepth
from meanformer.flows.solvers import Splitting as Splitting
from meanformer.flows.solvers import Stiff as Stiff
from meanformer.flows.solvers import Switching as Switching
from meanformer.flows.stability import Growth as Growth
from meanformer.flows.stability import growth_factor as growth_factor
from meanformer.flows.stability import lipschitz_profile as lipschitz_profile
from meanformer.flows.stability import observed_growth as observed_growth
from meanformer.flows.state import State as State
from meanformer.flows.status import AbstractStop as AbstractStop
from meanformer.flows.status import EscapeRadius as EscapeRadius
from meanformer.flows.status import Moment as Moment
from meanformer.flows.status import Status as Status
from meanformer.flows.status import SteadyState as SteadyState
from meanformer.flows.status import StepBudget as StepBudget
from meanformer.flows.status import StopWhen as StopWhen
from meanformer.flows.trajectory import Trajectory as Trajectory
