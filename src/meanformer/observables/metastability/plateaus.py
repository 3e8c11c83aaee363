"""A trajectory cut into plateaus: when they begin and end, and how high they are."""

from collections.abc import Iterator

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import AbstractExponential, Unnormalised
from meanformer.flows import Flow, Trajectory
from meanformer.flows.trajectories.atoms import Merges
from meanformer.geometry import Sphere
from meanformer.measures import TokenCloud
from meanformer.observables.clusters.counting import cluster_profile
from meanformer.observables.energy.energies import energy
from meanformer.observables.metastability.attraction import (
    attraction_along,
    masses_along,
)

# Rounding of angles changes depths by this many times beta times the precision.
ROUNDINGS = 64
# Of more groups than this, the heaviest are printed.
SHOWN = 8
HEAD = f"{'start':>11}{'end':>12}{'groups':>8}{'energy':>11}"


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


class AbstractSteps(eqx.Module):
    """Base class of results that are a sequence of steps, in order."""

    steps: eqx.AbstractVar[tuple]

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator:
        return iter(self.steps)

    def __getitem__(self, index: int):
        return self.steps[index]


class Plateaus(AbstractSteps):
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

    def __str__(self) -> str:
        """Return a table, one line for each plateau, and how they were found."""
        head = f"{HEAD}{'level':>11}  masses"
        return "\n".join([head, *map(_line, self.steps), self.verdict])

    @property
    def longest(self) -> Plateau:
        """The longest plateau that ends before the trajectory does, if there is one."""
        closed = [step for step in self.steps if not step.is_open] or self.steps
        return max(closed, key=lambda step: step.end - step.start)


def line_of(plateau: Plateau, energy: float | None, rest: str) -> str:
    """Return a line of a table of plateaus, at this energy."""
    count = "?" if plateau.count is None else f"{plateau.count}"
    height = "" if energy is None else f"{energy:.6g}"
    return f"{plateau.start:>11.5g}{plateau.end:>12.5g}{count:>8}{height:>11}{rest}"


def _line(step: Plateau) -> str:
    """Return a plateau in one line, with the heaviest masses only."""
    level = "" if step.level is None else f"{step.level:.6g}"
    masses = [f"{mass:.3g}" for mass in np.asarray(step.masses)]
    shown = ", ".join(masses[:SHOWN]) + ", …" * (len(masses) > SHOWN)
    notes = "; ends in a tie" * step.is_tied + "; open" * step.is_open
    return line_of(step, step.energy, f"{level:>11}  {shown}{notes}")


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
    _, layer, (_, beta, *_) = attraction_along(trajectory, flow, "plateaus")
    merges, layer = trajectory.merges, normalised(layer, beta)
    if threshold is None and merges is not None and len(merges) > 0:
        return _from_joins(trajectory, merges, layer, beta)
    return _from_counts(trajectory, layer, beta, threshold)


def _mark(depths: Array, arcs: Array | None, index: int) -> tuple[float, float | None]:
    """Return a depth, and the arc length there if it is known."""
    return float(depths[index]), None if arcs is None else float(arcs[index])


def _saved_mark(trajectory: Trajectory, index: int) -> tuple[float, float | None]:
    atoms = trajectory.atoms
    return _mark(trajectory.depths, None if atoms is None else atoms.arc_length, index)


def _from_joins(trajectory: Trajectory, merges: Merges, layer, beta) -> Plateaus:
    rounding = ROUNDINGS * beta * float(jnp.finfo(trajectory.points.dtype).eps)
    events = _events(merges, rounding)
    marks = [_mark(merges.depths, merges.arc_lengths, event[0]) for event in events]
    marks = [_saved_mark(trajectory, 0), *marks, _saved_mark(trajectory, -1)]
    atoms = np.asarray(trajectory.statistics["atom_count"])
    lasts = {-1, *(event[-1] for event in events)}
    every = enumerate(masses_along(trajectory, merges), -1)
    groups = [masses[masses > 0] for join, masses in every if join in lasts]
    steps = []
    for place, masses in enumerate(groups):
        if place == 0 and marks[0] == marks[1]:
            continue
        is_last = place == len(events)
        flags = is_last, not is_last and len(events[place]) > 1
        inside = np.flatnonzero(atoms == len(masses))
        ends = marks[place], marks[place + 1]
        steps.append(_plateau(trajectory, layer, ends, flags, masses, inside))
    return Plateaus(tuple(steps), True, "from joins, located by the solver")


def _from_counts(trajectory: Trajectory, layer, beta, threshold) -> Plateaus:
    found = cluster_profile(
        trajectory, space=Sphere(), beta=beta, threshold=threshold
    ).clusters
    labels = np.stack([np.asarray(clusters.labels) for clusters in found])
    unknown = np.array([clusters.count is None for clusters in found])
    # Undecided groups change with every token: they are one stretch.
    changes = (labels[1:] != labels[:-1]).any(axis=1) & ~(unknown[1:] & unknown[:-1])
    changes |= unknown[1:] != unknown[:-1]
    steps = []
    for run in np.split(np.arange(len(found)), np.flatnonzero(changes) + 1):
        first, last = int(run[0]), int(run[-1])
        ends = _saved_mark(trajectory, first), _saved_mark(trajectory, last)
        flags = last == len(found) - 1, False
        masses = None if unknown[first] else np.asarray(found[first].masses)
        steps.append(_plateau(trajectory, layer, ends, flags, masses, run))
    verdict = "from clusters at saved depths, between which they change"
    if unknown.any():
        verdict += f"; undecided at {unknown.sum()} of {len(found)}"
    is_rule = threshold is None or isinstance(threshold, str)
    rule = threshold if is_rule else float(threshold)
    return Plateaus(tuple(steps), False, verdict, rule)


def _plateau(trajectory: Trajectory, layer, ends, flags, masses, inside) -> Plateau:
    """Return the plateau between two marks, with these saved depths inside.

    The flags are `is_open` and `is_tied`; masses are `None` if they are undecided.
    """
    (start, arc_start), (end, arc_end) = ends
    duration = end - start
    index = _middle(trajectory, start, end, inside)
    known = np.zeros(0) if masses is None else -np.sort(-masses)
    return Plateau(
        start,
        end,
        float(np.log(duration)) if duration > 0 else None,
        *flags,
        None if masses is None else len(masses),
        jnp.asarray(known, trajectory.weights.dtype),
        arc_start,
        arc_end,
        index,
        None if index is None else normalised_energy(layer, trajectory.cloud(index)),
        None if masses is None else float(np.sum(known**2)),
    )


def _events(merges: Merges, rounding: float) -> list[list[int]]:
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
    return events


def _middle(trajectory: Trajectory, low, high, inside: np.ndarray) -> int | None:
    """Return the saved depth nearest to the middle, on a logarithmic scale."""
    if len(inside) == 0:
        return None
    depths = np.asarray(trajectory.depths, np.float64)[inside]
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
