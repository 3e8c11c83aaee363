"""From saddle to saddle: the critical point that belongs to each plateau, or none."""

from typing import cast

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import as_number
from meanformer.flows import Flow, Trajectory
from meanformer.geometry import Sphere
from meanformer.measures import TokenCloud
from meanformer.observables.clusters.counting import count_clusters
from meanformer.observables.critical.newton import CriticalPoint, newton_critical_point
from meanformer.observables.metastability.attraction import atoms_at, attraction_along
from meanformer.observables.metastability.plateaus import (
    HEAD,
    AbstractSteps,
    Plateau,
    Plateaus,
    line_of,
    normalised,
    normalised_energy,
    plateaus,
)


class Saddle(eqx.Module):
    r"""A plateau and the critical point of the energy that belongs to it.

    Attributes:
        plateau: the plateau.
        verdict: what was found, in words; it begins with "none" if there is no critical
            point nearby.
        state: the atoms on the plateau; `None` if no depth was saved there.
        point: the critical point that Newton's method finds from there, with growth
            rates and the direction that grows fastest; `None` if there is none.
        index: how many directions of the tokens leave it: those of its atoms, and those
            in which an atom would split.
        energy: the energy $2\beta e^{-\beta}E$ of the critical point, 1 for one
            cluster; or `None`.
        distance: how far the farthest atom of the plateau is from it; or `None`.
    """

    plateau: Plateau
    verdict: str = eqx.field(static=True)
    state: TokenCloud | None = None
    point: CriticalPoint | None = None
    index: int | None = eqx.field(static=True, default=None)
    energy: float | None = eqx.field(static=True, default=None)
    distance: float | None = eqx.field(static=True, default=None)

    @property
    def direction(self) -> Float[Array, "k d"] | None:
        """The motion of the atoms that grows fastest; `None` without a saddle."""
        return None if self.point is None else self.point.direction


class Saddles(AbstractSteps):
    """The saddles along a trajectory, one for each plateau; a sequence of `Saddle`.

    Attributes:
        steps: the saddles, in order.
    """

    steps: tuple[Saddle, ...]

    def __str__(self) -> str:
        """Return a table, one line for each plateau."""
        lines = [line_of(s.plateau, s.energy, f"  {s.verdict}") for s in self.steps]
        return "\n".join([f"{HEAD}  critical point", *lines])


def saddles(
    trajectory: Trajectory,
    flow: Flow | None = None,
    *,
    found: Plateaus | None = None,
    farthest: float = 0.5,
) -> Saddles:
    r"""Find the critical point of the energy near every plateau of a trajectory.

    Metastable flows are said to go from saddle to saddle. That is a picture: tokens
    wait where the gradient is exponentially small, and there need be no critical point.
    An open half of the sphere holds none but the collapse, since the flow contracts
    the hull of tokens inside of it [GLPR23]; others may be far off, since their place
    is decided by exponentially small forces. So from each plateau Newton's method looks
    for one, with the atoms and their masses kept, and what it finds is reported with
    its distance.

    Args:
        trajectory: the solution of a flow with scores $\beta\langle x, y\rangle$ and
            values $cx$, $c > 0$, with saved depths on its plateaus.
        flow: the flow, for a trajectory that does not know it.
        found: its plateaus; those of `plateaus(trajectory, flow)` if left out.
        farthest: an angle; a critical point with an atom farther off does not count.

    Returns:
        One report for each plateau. Cost: some steps of Newton's method each.
    """
    topic = "saddles of plateaus"
    flow, layer, (_, beta, *_) = attraction_along(trajectory, flow, topic)
    layer = normalised(layer, beta)
    farthest = as_number("farthest", farthest, "positive", above=0)
    found = plateaus(trajectory, flow) if found is None else found
    steps = []
    for plateau in found:
        if plateau.index is None:
            reason = "none: no saved depth lies on this plateau"
            steps.append(Saddle(plateau, reason))
            continue
        atoms = _atoms_on(trajectory, plateau, beta, found.threshold)
        steps.append(_saddle(flow, layer, plateau, atoms, farthest))
    return Saddles(tuple(steps))


def _saddle(flow: Flow, layer, plateau: Plateau, atoms, farthest: float) -> Saddle:
    """Look for the critical point from atoms, and their numbers of tokens."""
    state, counts = atoms
    point = newton_critical_point(flow, state)
    failure = _failure(state, point, farthest)
    if failure is not None:
        return Saddle(plateau, f"none: {failure}", state)
    splits = np.asarray(point.splitting) > 0
    inner = int(np.sum(splits * (counts - 1))) * (state.dimension - 1)
    index = cast(int, point.index) + inner
    noun = "maximum" if index == 0 else f"saddle of index {index}"
    verdict = f"{noun}, {point.distance:.3g} away"
    height = normalised_energy(layer, point.cloud)
    return Saddle(plateau, verdict, state, point, index, height, point.distance)


def _atoms_on(
    trajectory: Trajectory, plateau: Plateau, beta: float, threshold
) -> tuple[TokenCloud, np.ndarray]:
    """Return the atoms on a plateau, joined or found, and their numbers of tokens."""
    index = cast(int, plateau.index)
    cloud = trajectory.cloud(index)
    if trajectory.atoms is not None and plateau.count is not None:
        masses, counts = map(np.asarray, atoms_at(trajectory, index))
        kept = np.flatnonzero(masses > 0)
        if len(kept) == plateau.count:
            atoms = TokenCloud(cloud.points[kept], jnp.asarray(masses[kept]))
            return atoms, counts[kept]
    groups = count_clusters(cloud, space=Sphere(), beta=beta, threshold=threshold)
    labels = np.asarray(groups.labels)
    return TokenCloud(groups.centres, groups.masses), np.bincount(labels[labels >= 0])


def _failure(state: TokenCloud, point: CriticalPoint, farthest: float) -> str | None:
    """Return why a critical point does not belong to the state; `None` if it does."""
    collides = state.count > 1 and _least(point.cloud) < _least(state) / 4
    if point.is_converged and not collides and point.distance <= farthest:
        return None
    if _in_half_sphere(np.asarray(state.points, np.float64)):
        return "in an open half sphere only the collapse is critical"
    if not point.is_converged:
        return f"Newton's method: {point.reason}"
    if collides:
        return "Newton's method lets atoms collide"
    return f"the critical point found is {point.distance:.3g} away"


def _least(cloud: TokenCloud) -> float:
    """Return the smallest distance of two atoms."""
    from scipy.spatial.distance import pdist

    return float(pdist(np.asarray(cloud.points, np.float64)).min())


def _in_half_sphere(points: np.ndarray) -> bool:
    """Whether all points lie in an open half of the sphere: zero is not in the hull."""
    from scipy.optimize import nnls

    rows = np.vstack([points.T, np.ones(len(points))])
    residual = nnls(rows, np.append(np.zeros(points.shape[1]), 1.0))[1]
    return bool(residual > 1e-9)
