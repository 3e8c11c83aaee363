"""What moves through depth: all that changes is a state, all that stays is dynamics."""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from meanformer.flows.status import Status
from meanformer.flows.trajectories.abstract import AbstractTrajectory


class State(eqx.Module):
    """Everything that changes along depth; a solve can restart from it alone.

    Attributes:
        depth: where it is.
        moving: what is integrated, a tree of arrays.
        status: `reached` while all is well, otherwise why it stopped.
        accepted_steps: steps taken so far.
        rejected_steps: steps tried and refused so far.
        stretch: how many saved depths lie behind; it numbers the noise.
        record: what is noted on the way, such as which tokens have joined; or `None`.
    """

    depth: Float[Array, ""]
    moving: PyTree
    status: PyTree
    accepted_steps: Int[Array, ""]
    rejected_steps: Int[Array, ""]
    stretch: Int[Array, ""]
    record: PyTree = None

    @classmethod
    def first(cls, depth: Float[Array, ""], moving: PyTree, record: PyTree = None):
        """Return the state at the first depth."""
        none = jnp.zeros((), jnp.result_type(int))
        return cls(depth, moving, Status.reached, none, none, none, record)

    @classmethod
    def at_end_of(cls, trajectory: Any, moving: PyTree, record: PyTree = None):
        """Return the state at the last depth of a trajectory.

        Args:
            trajectory: has depths, statuses and steps, one for each depth.
            moving: what moved, along depth.
            record: what was noted on the way, along depth; or `None`.
        """
        steps = (trajectory.accepted_steps, trajectory.rejected_steps)
        given = (trajectory.depths, moving, trajectory.status, *steps, record)
        *last, record = jax.tree.map(lambda leaf: leaf[-1], given)
        return cls(*last, jnp.asarray(len(trajectory) - 1), record)

    @property
    def is_running(self) -> Bool[Array, ""]:
        """Whether it has not stopped."""
        return self.status == Status.reached


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


def kept_if_finite(
    moved: State,
    state: State,
    running: Bool[Array, ""],
    is_finite: bool | Bool[Array, ""] = True,
) -> State:
    """Return the new state; the old one if it had stopped or the new is not finite.

    Args:
        moved: the new state.
        state: the old one.
        running: whether the old one had not stopped.
        is_finite: whether what follows from the new state is finite too.
    """
    kept = eqx.tree_at(lambda s: s.status, state, Status.not_finite)
    leaves = jax.tree.leaves((moved.depth, moved.moving))
    all_finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()
    moved = choose(all_finite & is_finite, moved, kept)
    return choose(running, moved, state)


def choose(condition: Bool[Array, ""], first: Any, second: Any) -> Any:
    """Return one of two states."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), first, second)
