"""The merges that a trajectory did not reach, by the greedy rule."""

from typing import cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from meanformer.errors import Unsupported, as_number, check
from meanformer.flows import Constant, Flow, Status, Trajectory
from meanformer.flows.trajectories.atoms import Atoms, Merges
from meanformer.observables.metastability.attraction import attraction_on_sphere
from meanformer.observables.metastability.clocks import flow_of
from meanformer.observables.metastability.staircase import Staircase, climbed
from meanformer.observables.metastability.two_groups import TwoGroups


class PredictedStaircase(eqx.Module):
    r"""All merges down to one cluster: those of a trajectory, then predicted ones.

    Attributes:
        verdict: how many are predicted, and why, in words.
        is_predicted: which of the merges are.
        leaders: the token that carries the atom from then on.
        tokens: the token that joins it.
        points: where they meet.
        log_depths: logarithms of the depths, of the smallest number for depth zero;
            predicted ones by the law of two groups.
        arc_lengths: lengths of the path of all tokens; `None` without `LongDepth`.
        levels: energy before the first merge and after each, $\sum_k m_k^2$.
        is_tied: whether another pair was equally close in a predicted merge.
    """

    verdict: str = eqx.field(static=True)
    is_predicted: Bool[Array, " k"]
    leaders: Int[Array, " k"]
    tokens: Int[Array, " k"]
    points: Float[Array, "k d"]
    log_depths: Float[Array, " k"]
    arc_lengths: Float[Array, " k"] | None
    levels: Float[Array, " l"]
    is_tied: Bool[Array, " k"]

    def __str__(self) -> str:
        """Return a table, one line for each merge, and the verdict."""
        lines = [f"{'merge':>11}{'log10 depth':>13}{'level':>11}"]
        for k, (leader, token) in enumerate(
            zip(self.leaders, self.tokens, strict=True)
        ):
            lines.append(
                f"{f'{leader} + {token}':>11}{self.log_depths[k] / np.log(10):>13.6g}"
                f"{self.levels[k + 1]:>11.6g}"
                + "  predicted" * bool(self.is_predicted[k])
                + "; tied" * bool(self.is_tied[k])
            )
        return "\n".join([*lines, self.verdict])


def predicted_staircase(
    trajectory: Trajectory, flow: Flow | None = None, *, distance: float = 1e-9
) -> PredictedStaircase:
    r"""Continue a trajectory that ended before the last merge, by the greedy rule.

    From the last saved depth on the closest pair of atoms meets next, and the others
    wait, as `greedy_staircase` has it; the time it takes is that of `TwoGroups` from
    their angle to `distance`, as if they were alone, added up from merge to merge. A
    rule of thumb for large $\beta$, not a theorem; where it was used is said.

    Args:
        trajectory: tokens on the sphere, solved with `LongDepth` or `merge`.
        flow: the flow, for a trajectory that does not know it.
        distance: the angle at which two atoms count as met; the default is that of
            `merge` in double precision.

    Returns:
        All merges. Cost: as `greedy_staircase` for the atoms that are left.
    """
    flow = flow_of(trajectory, flow)
    attraction = attraction_on_sphere(flow, "predicted staircases")
    distance = as_number("distance", distance)
    check(distance > 0, f"distance is {distance}; it must be positive.")
    merges, atoms = trajectory.merges, trajectory.atoms
    if merges is None or atoms is None:
        raise Unsupported(
            "this trajectory has no record of merges; solve with LongDepth() or merge."
        )
    cloud = trajectory.cloud(-1)
    last = cast(Atoms, jax.tree.map(lambda leaf: leaf[-1], atoms))
    masses = np.asarray(last.weights(cloud), np.float64)
    rest = climbed(
        cloud, attraction.is_softmax, masses, np.asarray(last.counts(cloud), float)
    )
    times = _log_depths(flow, trajectory, rest, distance)
    return _joined(trajectory, merges, rest, times, _verdict(trajectory, rest))


def _log_depths(
    flow: Flow, trajectory: Trajectory, rest: Staircase, distance: float
) -> np.ndarray:
    """Return logarithms of the depths of the predicted merges."""
    layer = cast(Constant, flow.velocity).gamma
    depth = float(trajectory.depths[-1])
    reached, found = np.log(max(depth, np.finfo(float).tiny)), []
    for masses, gap in zip(np.asarray(rest.masses), np.asarray(rest.gaps), strict=True):
        if gap > distance:
            # Opposite groups balance; the rule lets them meet all the same.
            start = min(float(gap), np.pi * (1 - 1e-12))
            wait = TwoGroups(layer, masses).log_dwell_time(start, distance)
            reached = float(np.logaddexp(reached, wait))
        found.append(reached)
    return np.array(found)


def _verdict(trajectory: Trajectory, rest: Staircase) -> str:
    count = len(rest.leaders)
    if count == 0:
        return "all merges were reached by the trajectory"
    reason = f"the trajectory ended at depth {float(trajectory.depths[-1]):.6g}"
    if bool(trajectory.status == Status.steady):
        reason += ", at rest at a balance that the rule breaks"
    noun = "merge" if count == 1 else "merges"
    tied = int(np.sum(np.asarray(rest.is_tied)))
    ties = f"; {tied} of them tied, in an arbitrary order" if tied else ""
    return f"{count} {noun} predicted by the greedy rule: {reason}{ties}"


def _joined(
    trajectory: Trajectory,
    merges: Merges,
    rest: Staircase,
    times: np.ndarray,
    verdict: str,
) -> PredictedStaircase:
    """Return the merges on record with the predicted ones behind them."""
    dtype = trajectory.points.dtype
    # Depths may be below all numbers.
    known = np.log(
        np.maximum(np.asarray(merges.depths, np.float64), np.finfo(float).tiny)
    )
    arcs, atoms = merges.arc_lengths, cast(Atoms, trajectory.atoms)
    if arcs is not None and atoms.arc_length is not None:
        arcs = jnp.concatenate([arcs, atoms.arc_length[-1] + rest.arc_lengths])
    return PredictedStaircase(
        verdict,
        jnp.arange(len(merges) + len(rest.leaders)) >= len(merges),
        jnp.concatenate([merges.leaders, rest.leaders]),
        jnp.concatenate([merges.tokens, rest.tokens]),
        jnp.concatenate([merges.points, rest.points]),
        jnp.asarray(np.append(known, times), dtype),
        arcs,
        jnp.asarray(np.append(_levels(trajectory, merges), rest.levels[1:]), dtype),
        jnp.concatenate([jnp.zeros(len(merges), bool), rest.is_tied]),
    )


def _levels(trajectory: Trajectory, merges: Merges) -> np.ndarray:
    """Return the sums of squared masses before the first merge and after each."""
    masses = np.array(trajectory.weights, np.float64)
    levels = [np.sum(masses**2)]
    for leader, token in zip(merges.leaders, merges.tokens, strict=True):
        masses[int(leader)] += masses[int(token)]
        masses[int(token)] = 0
        levels.append(np.sum(masses**2))
    return np.array(levels)
