"""From saddle to saddle: the critical point that belongs to each plateau, or none."""

from collections.abc import Iterator
from typing import NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import as_number, check
from meanformer.flows import Constant, Flow, Trajectory
from meanformer.flows.trajectories.atoms import Atoms
from meanformer.geometry import Sphere
from meanformer.measures import TokenCloud
from meanformer.observables.clusters.counting import count_clusters
from meanformer.observables.critical.newton import CriticalPoint, newton_critical_point
from meanformer.observables.metastability.attraction import attraction_on_sphere
from meanformer.observables.metastability.clocks import flow_of
from meanformer.observables.metastability.plateaus import (
    Plateau,
    Plateaus,
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
    state: TokenCloud | None
    point: CriticalPoint | None
    index: int | None = eqx.field(static=True)
    energy: float | None = eqx.field(static=True)
    distance: float | None = eqx.field(static=True)

    @property
    def direction(self) -> Float[Array, "k d"] | None:
        """The motion of the atoms that grows fastest; `None` without a saddle."""
        return None if self.point is None else self.point.direction


class Saddles(eqx.Module):
    """The saddles along a trajectory, one for each plateau; a sequence of `Saddle`.

    Attributes:
        steps: the saddles, in order.
    """

    steps: tuple[Saddle, ...]

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Saddle]:
        return iter(self.steps)

    def __getitem__(self, index: int) -> Saddle:
        return self.steps[index]

    def __str__(self) -> str:
        """Return a table, one line for each plateau."""
        lines = [f"{'start':>11}{'end':>12}{'groups':>8}{'energy':>11}  critical point"]
        for step in self.steps:
            plateau = step.plateau
            count = "?" if plateau.count is None else f"{plateau.count}"
            height = "" if step.energy is None else f"{step.energy:.6g}"
            lines.append(
                f"{plateau.start:>11.5g}{plateau.end:>12.5g}{count:>8}{height:>11}"
                f"  {step.verdict}"
            )
        return "\n".join(lines)


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
    flow = flow_of(trajectory, flow)
    beta = attraction_on_sphere(flow, "saddles of plateaus").beta
    farthest = as_number("farthest", farthest)
    check(farthest > 0, f"farthest is {farthest}; it must be positive.")
    found = plateaus(trajectory, flow) if found is None else found
    steps = [
        _saddle(trajectory, flow, _Search(beta, found.threshold, farthest), plateau)
        for plateau in found
    ]
    return Saddles(tuple(steps))


class _Search(NamedTuple):
    """What groups and critical points are looked for by."""

    beta: float
    threshold: float | str | None
    farthest: float


def _saddle(
    trajectory: Trajectory, flow: Flow, search: _Search, plateau: Plateau
) -> Saddle:
    if plateau.index is None:
        reason = "none: no saved depth lies on this plateau"
        return Saddle(plateau, reason, None, None, None, None, None)
    state, counts = _atoms_at(trajectory, search, plateau)
    point = newton_critical_point(flow, state)
    failure = _failure(state, point, search.farthest)
    if failure is not None:
        return Saddle(plateau, f"none: {failure}", state, None, None, None, None)
    splits = np.asarray(point.splitting) > 0
    inner = int(np.sum(splits * (counts - 1))) * (state.dimension - 1)
    index = cast(int, point.index) + inner
    noun = "maximum" if index == 0 else f"saddle of index {index}"
    return Saddle(
        plateau,
        f"{noun}, {point.distance:.3g} away",
        state,
        point,
        index,
        normalised_energy(
            normalised(cast(Constant, flow.velocity).gamma, search.beta), point.cloud
        ),
        point.distance,
    )


def _atoms_at(
    trajectory: Trajectory, search: _Search, plateau: Plateau
) -> tuple[TokenCloud, np.ndarray]:
    """Return the atoms on a plateau, joined or found, and their numbers of tokens."""
    index = cast(int, plateau.index)
    cloud = trajectory.cloud(index)
    if trajectory.atoms is not None and plateau.count is not None:
        atoms = cast(Atoms, jax.tree.map(lambda leaf: leaf[index], trajectory.atoms))
        masses = np.asarray(atoms.weights(cloud))
        kept = np.flatnonzero(masses > 0)
        if len(kept) == plateau.count:
            counts = np.asarray(atoms.counts(cloud))[kept]
            return TokenCloud(cloud.points[kept], jnp.asarray(masses[kept])), counts
    groups = count_clusters(
        cloud, space=Sphere(), beta=search.beta, threshold=search.threshold
    )
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
    points = np.asarray(cloud.points, np.float64)
    apart = np.linalg.norm(points[:, None] - points[None], axis=2)
    return float(apart[np.triu_indices(len(points), 1)].min())


def _in_half_sphere(points: np.ndarray) -> bool:
    """Whether all points lie in an open half of the sphere: zero is not in the hull."""
    from scipy.optimize import nnls

    rows = np.vstack([points.T, np.ones(len(points))])
    residual = nnls(rows, np.append(np.zeros(points.shape[1]), 1.0))[1]
    return bool(residual > 1e-9)
