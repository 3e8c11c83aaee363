"""Base classes of what moves through depth: tokens, Gaussians, densities, yours."""

import abc
from typing import Any

import equinox as eqx
from jaxtyping import Array, Float, PyTree

from meanformer.flows.dynamics.derivatives import Mode, in_both_modes
from meanformer.flows.dynamics.state import State
from meanformer.flows.dynamics.stretch import Settings, Stretch, in_wide, integrate
from meanformer.flows.solvers import LongDepth
from meanformer.flows.trajectories.abstract import AbstractTrajectory

NO_DERIVATIVE = (
    "LongDepth() has no derivative: it locates the end of a stretch in its clock; use "
    "Adaptive() to differentiate."
)


class AbstractDynamics(eqx.Module):
    """Base class of what moves through depth.

    It holds all that stays the same; what changes is a `State`.
    """

    @abc.abstractmethod
    def advance(self, state: State, target: Float[Array, ""]) -> State:
        """Go from the state's depth to the target, unless it has stopped already."""

    @abc.abstractmethod
    def rates(self, state: State) -> PyTree:
        """Return what is saved beside a state: how fast it changes there."""

    @abc.abstractmethod
    def trajectory(self, states: State, rates: PyTree) -> AbstractTrajectory:
        """Return states and rates, stacked along depth, as a trajectory."""

    @abc.abstractmethod
    def resumed(self, trajectory: Any) -> State:
        """Return the state at the last depth of a trajectory, to go on from."""

    @abc.abstractmethod
    def request(self, start: State) -> dict[str, Any]:
        """Return everything that tells one run from another, by the words for it."""


class AbstractIntegrated(AbstractDynamics):
    """Base class of dynamics that a stretch of depth at a time is integrated of.

    Attributes:
        settings: steps, tolerances, and conditions that end it.
    """

    settings: eqx.AbstractVar[Settings]

    @abc.abstractmethod
    def stretch(self, state: State, end: Float[Array, ""], mode: Mode) -> Stretch:
        """Return what to integrate from a state to a depth; see `in_depth`."""

    def advance(self, state: State, target: Float[Array, ""]) -> State:
        """Integrate; differentiable in all ways, but for `LongDepth()`."""
        if isinstance(self.settings.integrator, LongDepth):
            return in_wide(integrate, NO_DERIVATIVE, self, state, target)
        return in_both_modes(integrate, self, state, target)
