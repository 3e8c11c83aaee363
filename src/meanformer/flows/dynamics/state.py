"""What changes along depth, and nothing else."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from meanformer.flows.dynamics.merging import Atoms
from meanformer.flows.dynamics.sum_statistics import SumSummary
from meanformer.flows.status import Status

Moving = tuple[Float[Array, "n d"], Float[Array, "p d"] | None]


class State(eqx.Module):
    """Everything that changes along depth; a solve can restart from it alone.

    Attributes:
        depth: where it is.
        points: the tokens.
        probes: passive points, or `None`.
        status: `reached` while all is well, otherwise why it stopped.
        accepted_steps: steps taken so far.
        rejected_steps: steps tried and refused so far.
        stretch: how many saved depths lie behind; it numbers the noise.
        atoms: which tokens have joined, where the solve merges them; or `None`.
        sums: how accurate the fast sums of its velocity are, where it is saved.
    """

    depth: Float[Array, ""]
    points: Float[Array, "n d"]
    probes: Float[Array, "p d"] | None
    status: PyTree
    accepted_steps: Int[Array, ""]
    rejected_steps: Int[Array, ""]
    stretch: Int[Array, ""]
    atoms: Atoms | None = None
    sums: SumSummary | None = None

    @property
    def moving(self) -> Moving:
        """The points that move: tokens and probes."""
        return self.points, self.probes

    def is_finite(self) -> Bool[Array, ""]:
        """Return whether depth and every coordinate are finite."""
        return all_finite((self.depth, self.moving))


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Return whether every number of a tree is finite."""
    leaves = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
    return jnp.stack(leaves).all()


def kept_if_finite(
    moved: Any,
    state: Any,
    running: Bool[Array, ""],
    is_finite: bool | Bool[Array, ""] = True,
) -> Any:
    """Return the new state; the old one if it had stopped or the new is not finite.

    Args:
        moved: the new state, of tokens or of a Gaussian.
        state: the old one.
        running: whether the old one had not stopped.
        is_finite: whether what follows from the new state is finite too.
    """
    kept = eqx.tree_at(lambda s: s.status, state, Status.not_finite)
    moved = choose(moved.is_finite() & is_finite, moved, kept)
    return choose(running, moved, state)


def choose(condition: Bool[Array, ""], first: Any, second: Any) -> Any:
    """Return one of two states."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), first, second)


def initial_state(
    depth: Float[Array, ""],
    points: Float[Array, "n d"],
    probes: Float[Array, "p d"] | None,
    atoms: Atoms | None = None,
) -> State:
    """Return the state at the first depth."""
    none = jnp.zeros((), jnp.result_type(int))
    return State(depth, points, probes, Status.reached, none, none, none, atoms)
