"""Solving without the warning that a solve ended early."""

import warnings

from meanformer.attention import AbstractInContextMap
from meanformer.errors import StoppedEarly
from meanformer.flows import Flow, GaussianTrajectory, StepBudget, solve
from meanformer.measures import Gaussian

# Most steps between two saved depths.
STEPS = 4096


def quiet_solve(
    gamma: AbstractInContextMap, mu: Gaussian, depth, *, steps: int = STEPS, **options
) -> GaussianTrajectory:
    """Flow a Gaussian under one map, without the warning of a solve that ended early.

    Args:
        gamma: the velocity.
        mu: the Gaussian.
        depth: as for `solve`.
        steps: most steps between two saved depths.
        options: those of `solve`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoppedEarly)
        return solve(Flow(gamma), mu, depth, stop=StepBudget(steps), **options)
