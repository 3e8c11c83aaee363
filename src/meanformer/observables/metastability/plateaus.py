"""A trajectory cut into plateaus: when they begin and end, and how high they are."""

from collections.abc import Iterator
from typing import NamedTuple, cast

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import AbstractExponential, Unnormalised
from meanformer.flows import Constant, Flow, Trajectory
from meanformer.flows.trajectories.atoms import Merges
from meanformer.geometry import Sphere
from meanformer.measures import TokenCloud
from meanformer.observables.clusters.counting import cluster_profile
from meanformer.observables.energy.energies import energy
from meanformer.observables.metastability.attraction import attraction_on_sphere
from meanformer.observables.metastability.clocks import flow_of

# Rounding of angles changes depths by this many times beta times the precision.
ROUNDINGS = 64
# Of more groups than this, the heaviest are printed.
SHOWN = 8


class Plateau(eqx.Module):
    r"""A stretch of depth along which the groups of tokens stay the same.

    Attributes:
        start: the depth at which it begins.
        end: the depth at which it ends.
        log_duration: logarithm of its length; `None` if that is zero in numbers.
        is_open: whether it ends only because the trajectory does.
        is_tied: whether it ends with several joins at once: at one depth, or of
            different groups within what rounding of their angles makes of a depth.
        count: how many groups there are; `None` if undecided.
        masses: those of the groups, the heaviest first.
        arc_start: the arc length at which it begins; `None` without `LongDepth`.
        arc_end: that at which it ends.
        index: the saved depth that stands for it, the nearest to its middle on a
            logarithmic scale; `None` if none lies in it.
        energy: the energy $2\beta e^{-\beta}E$ there, which is 1 for one cluster; or
            `None`.
        level: the energy $\sum_k m_k^2$ of groups that are points, far apart; `None` if
            the groups are undecided.
    """

    start: float = eqx.field(static=True)
    end: float = eqx.field(static=True)
    log_duration: float | None = eqx.field(static=True)
    is_open: bool = eqx.field(static=True)
    is_tied: bool = eqx.field(static=True)
    count: int | None = eqx.field(static=True)
    masses: Float[Array, " k"]
    arc_start: float | None = eqx.field(static=True)
    arc_end: float | None = eqx.field(static=True)
    index: int | None = eqx.field(static=True)
    energy: float | None = eqx.field(static=True)
    level: float | None = eqx.field(static=True)


class Plateaus(eqx.Module):
    """The plateaus of a trajectory, in order; a sequence of `Plateau`.

    Attributes:
        steps: the plateaus.
        is_located: whether ends are located by the solver. If not, they are saved
            depths, and the groups change somewhere between the end of one plateau and
            the start of the next.
        verdict: how they were found, in words.
        threshold: the rule of `count_clusters` by which they were; or `None`.
    """

    steps: tuple[Plateau, ...]
    is_located: bool = eqx.field(static=True)
    verdict: str = eqx.field(static=True)
    threshold: float | str | None = eqx.field(static=True, default=None)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Plateau]:
        return iter(self.steps)

    def __getitem__(self, index: int) -> Plateau:
        return self.steps[index]

    def __str__(self) -> str:
        """Return a table, one line for each plateau, and how they were found."""
        head = (
            f"{'start':>11}{'end':>12}{'groups':>8}{'energy':>11}{'level':>11}  masses"
        )
        return "\n".join([head, *map(_line, self.steps), self.verdict])

    @property
    def longest(self) -> Plateau:
        """The longest plateau that ends before the trajectory does, if there is one."""
        closed = [step for step in self.steps if not step.is_open] or self.steps
        return max(closed, key=lambda step: step.end - step.start)


def _line(step: Plateau) -> str:
    """Return a plateau in one line, with the heaviest masses only."""
    count = "?" if step.count is None else f"{step.count}"
    heights = ["" if h is None else f"{h:.6g}" for h in (step.energy, step.level)]
    masses = [f"{mass:.3g}" for mass in np.asarray(step.masses)]
    shown = ", ".join(masses[:SHOWN]) + ", …" * (len(masses) > SHOWN)
    notes = "; ends in a tie" * step.is_tied + "; open" * step.is_open
    return (
        f"{step.start:>11.5g}{step.end:>12.5g}{count:>8}{heights[0]:>11}"
        f"{heights[1]:>11}  {shown}{notes}"
    )


def plateaus(
    trajectory: Trajectory,
    flow: Flow | None = None,
    *,
    threshold: float | str | None = None,
) -> Plateaus:
    r"""Cut a trajectory on the sphere into plateaus.

    Between two joins of tokens the groups stay the same. With joins on record
    (`merge`, `LongDepth`) the plateaus are the stretches between them, their ends
    located by the solver; equal depths are one event, and tokens that are joined where
    the trajectory begins were one from the first. A join is recorded when tokens are as
    close as the distance of the merge, later than an eye would say. Without joins, or
    with a threshold, clusters are counted at the saved depths instead, and ends are
    known as well as saved depths are dense.

    Args:
        trajectory: the solution of a flow with scores $\beta\langle x, y\rangle$ and
            values $cx$, $c > 0$.
        flow: the flow, for a trajectory that does not know it.
        threshold: count clusters by this rule of `count_clusters`; if left out, joins
            are taken where there are any, and the default rule of the sphere if not.

    Returns:
        The plateaus, the last of them open. Cost: one energy for each; without joins
        one count of clusters for each saved depth.
    """
    flow = flow_of(trajectory, flow)
    beta = attraction_on_sphere(flow, "plateaus").beta
    merges = trajectory.merges
    layer = normalised(cast(Constant, flow.velocity).gamma, beta)
    if threshold is None and merges is not None and len(merges) > 0:
        return _from_joins(trajectory, merges, layer, beta)
    return _from_counts(trajectory, layer, beta, threshold)


class _Mark(NamedTuple):
    """A depth, and the arc length there if it is known."""

    depth: float
    arc: float | None


def _from_joins(
    trajectory: Trajectory, merges: Merges, layer: Unnormalised, beta: float
) -> Plateaus:
    rounding = ROUNDINGS * beta * float(jnp.finfo(trajectory.points.dtype).eps)
    events, arcs = _events(merges, rounding), merges.arc_lengths
    marks = [
        _Mark(float(merges.depths[e[0]]), None if arcs is None else float(arcs[e[0]]))
        for e in events
    ]
    marks = [_saved_mark(trajectory, 0), *marks, _saved_mark(trajectory, -1)]
    atoms = np.asarray(trajectory.statistics["atom_count"])
    groups = _masses_between(trajectory, merges, events)
    steps = []
    for place, masses in enumerate(groups):
        if place == 0 and marks[0] == marks[1]:
            continue
        is_last = place == len(events)
        is_tied = not is_last and len(events[place]) > 1
        inside = np.flatnonzero(atoms == len(masses))
        ends = marks[place], marks[place + 1]
        index = _middle(trajectory, ends, inside)
        steps.append(
            _plateau(trajectory, layer, ends, (is_last, is_tied), masses, index)
        )
    return Plateaus(tuple(steps), True, "from joins, located by the solver")


def _from_counts(
    trajectory: Trajectory,
    layer: Unnormalised,
    beta: float,
    threshold: float | str | None,
) -> Plateaus:
    found = cluster_profile(
        trajectory, space=Sphere(), beta=beta, threshold=threshold
    ).clusters
    labels = np.stack([np.asarray(clusters.labels) for clusters in found])
    unknown = np.array([clusters.count is None for clusters in found])
    # Undecided groups change with every token: they are one stretch.
    changes = (labels[1:] != labels[:-1]).any(axis=1) & ~(unknown[1:] & unknown[:-1])
    changes |= unknown[1:] != unknown[:-1]
    runs = np.split(np.arange(len(found)), np.flatnonzero(changes) + 1)
    steps = []
    for run in runs:
        ends = (
            _saved_mark(trajectory, int(run[0])),
            _saved_mark(trajectory, int(run[-1])),
        )
        is_last = bool(run[-1] == len(found) - 1)
        masses = None if unknown[run[0]] else np.asarray(found[run[0]].masses)
        index = _middle(trajectory, ends, run)
        steps.append(_plateau(trajectory, layer, ends, (is_last, False), masses, index))
    undecided = int(unknown.sum())
    verdict = "from clusters at saved depths, between which they change"
    if undecided:
        verdict += f"; undecided at {undecided} of {len(found)}"
    is_rule = threshold is None or isinstance(threshold, str)
    rule = threshold if is_rule else float(threshold)
    return Plateaus(tuple(steps), False, verdict, rule)


def _plateau(
    trajectory: Trajectory,
    layer: Unnormalised,
    ends: tuple[_Mark, _Mark],
    flags: tuple[bool, bool],
    masses: np.ndarray | None,
    index: int | None,
) -> Plateau:
    start, end = ends
    duration = end.depth - start.depth
    known = np.zeros(0) if masses is None else -np.sort(-masses)
    return Plateau(
        start.depth,
        end.depth,
        float(np.log(duration)) if duration > 0 else None,
        *flags,
        None if masses is None else len(masses),
        jnp.asarray(known, trajectory.weights.dtype),
        start.arc,
        end.arc,
        index,
        None if index is None else normalised_energy(layer, trajectory.cloud(index)),
        None if masses is None else float(np.sum(known**2)),
    )


def _saved_mark(trajectory: Trajectory, index: int) -> _Mark:
    atoms, depth = trajectory.atoms, float(trajectory.depths[index])
    if atoms is None or atoms.arc_length is None:
        return _Mark(depth, None)
    return _Mark(depth, float(atoms.arc_length[index]))


def _events(merges: Merges, rounding: float) -> list[np.ndarray]:
    """Return the joins of each event: those at one depth, and at one arc length.

    Depths beyond rounding stand still while tokens go on, so that equal depths at
    different lengths are different events, unless the groups are different as well: two
    pairs of one gap meet together, and no more than rounding parts them.
    """
    depths = np.asarray(merges.depths)
    lengths = np.zeros_like(depths)
    if merges.arc_lengths is not None:
        lengths = np.asarray(merges.arc_lengths)
    pairs = np.stack([np.asarray(merges.leaders), np.asarray(merges.tokens)], axis=1)
    events = [[0]]
    for join in range(1, len(depths)):
        last = events[-1][-1]
        is_same = depths[join] == depths[last] and lengths[join] == lengths[last]
        is_near = depths[join] - depths[last] <= rounding * depths[join]
        is_apart = not np.isin(pairs[join], pairs[events[-1]]).any()
        if is_same or (is_near and is_apart):
            events[-1].append(join)
        else:
            events.append([join])
    return [np.array(event) for event in events]


def _masses_between(
    trajectory: Trajectory, merges: Merges, events: list[np.ndarray]
) -> list[np.ndarray]:
    """Return the masses of the groups before the first event and after each."""
    masses = np.array(trajectory.weights, np.float64)
    found = [masses[masses > 0]]
    for event in events:
        for join in event:
            leader, token = int(merges.leaders[join]), int(merges.tokens[join])
            masses[leader] += masses[token]
            masses[token] = 0
        found.append(masses[masses > 0])
    return found


def _middle(
    trajectory: Trajectory, ends: tuple[_Mark, _Mark], inside: np.ndarray
) -> int | None:
    """Return the saved depth nearest to the middle, on a logarithmic scale."""
    if len(inside) == 0:
        return None
    depths = np.asarray(trajectory.depths, np.float64)[inside]
    low, high = ends[0].depth, ends[1].depth
    if high <= 0:
        return int(inside[len(inside) // 2])
    # A plateau from depth zero on has its middle close to the end.
    least = low if low > 0 else high * 1e-3
    logs = np.log(np.maximum(depths, least * 1e-3))
    return int(inside[np.abs(logs - np.log(least * high) / 2).argmin()])


def normalised(layer: AbstractExponential, beta: float) -> Unnormalised:
    """Return the layer whose energy is at most one over twice beta."""
    return Unnormalised(
        layer.query, layer.key, layer.score, beta=layer.beta, shift=beta
    )


def normalised_energy(layer: Unnormalised, cloud: TokenCloud) -> float:
    """Return the energy in units of that of one cluster."""
    return float(2 * layer.temperature * energy(layer, cloud))
