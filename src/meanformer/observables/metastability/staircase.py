"""The order in which clusters merge at low temperature, by the greedy rule."""

import math

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from meanformer.attention import AbstractInContextMap
from meanformer.errors import Unsupported, as_number, check_known
from meanformer.flows import Flow, Status, Trajectory
from meanformer.geometry import Sphere
from meanformer.measures import TokenCloud
from meanformer.measures.cloud import check_cloud
from meanformer.numerics.arrays import norms_of
from meanformer.observables.metastability import attraction as attracting
from meanformer.observables.metastability.two_groups import TwoGroups

# Angles and rates of closing that differ by less, or by so many roundings, are equal.
TIE = 1e-9
ROUNDINGS = 32


class Staircase(eqx.Module):
    r"""Merges one after another, and the levels of energy between them.

    Attributes:
        leaders: the token of lowest index in the first group of each merge.
        tokens: that of the group that joins it.
        gaps: the angle between the two groups.
        points: where they meet.
        masses: those of the two groups.
        arc_lengths: length of the path of all tokens up to each merge.
        levels: energy before the first merge and after each, in units of that of one
            cluster.
        is_tied: whether another pair was as close and closing as fast, so that the
            order is arbitrary; or the two are opposite, so that the way on which they
            meet is.
        ties: for each merge the pairs, leader and token, that could go first with equal
            right; empty where there is one.
    """

    leaders: Int[Array, " k"]
    tokens: Int[Array, " k"]
    gaps: Float[Array, " k"]
    points: Float[Array, "k d"]
    masses: Float[Array, "k 2"]
    arc_lengths: Float[Array, " k"]
    levels: Float[Array, " l"]
    is_tied: Bool[Array, " k"]
    ties: tuple[tuple[tuple[int, int], ...], ...] = eqx.field(static=True)

    def __str__(self) -> str:
        """Return a table, one line for each merge."""
        head = f"{'merge':>11}{'angle':>11}{'arc length':>12}{'level':>11}  masses"
        lines = [head]
        pairs = zip(self.leaders, self.tokens, strict=True)
        for k, (leader, token) in enumerate(pairs):
            masses = ", ".join(f"{mass:.3g}" for mass in np.asarray(self.masses[k]))
            ties = ", ".join(f"{first} + {second}" for first, second in self.ties[k])
            note = "; tied" * bool(self.is_tied[k]) + f" ({ties})" * bool(ties)
            lines.append(
                f"{f'{leader} + {token}':>11}{self.gaps[k]:>11.5g}"
                f"{self.arc_lengths[k]:>12.6g}{self.levels[k + 1]:>11.6g}"
                f"  {masses}{note}"
            )
        return "\n".join(lines)


def greedy_staircase(layer: AbstractInContextMap, cloud: TokenCloud) -> Staircase:
    r"""Predict the merges of groups on the sphere as $\beta \to \infty$.

    Attention to others falls so fast with the distance that the closest pair moves and
    all others wait. Of pairs that are equally close the one that closes fastest goes
    first, and equal rates are a tie. The rate of two groups of masses $m_1, m_2$ by
    themselves is $m_1 + m_2$ (unnormalised) or $m_1/m_2 + m_2/m_1$ (softmax); a group
    that belongs to several such pairs is pulled by all of them. Groups made of
    $N_1, N_2$ tokens, an angle $g$ apart, meet on the arc between them, the first after
    the share
    $$\sigma = \frac{m_2}{m_1+m_2} \ \text{(unnormalised)}, \qquad
      \sigma = \frac{m_2^2}{m_1^2+m_2^2} \ \text{(softmax)},$$
    and the path of all tokens grows by $g\,(N_1\sigma^2 + N_2(1-\sigma)^2)^{1/2}$. The
    energy, in units of that of one cluster, is $\sum_k m_k^2$ on the plateaus. Meeting
    points at finite $\beta$ differ by $O(\beta^{-1/2})$. A rule of thumb, checked
    against flows; not a theorem. It is for scores $\langle x, y\rangle$ and values
    $cx$, $c > 0$.

    Args:
        layer: `Softmax` or `Unnormalised`, with such scores and values; for the rule
            only the kind counts.
        cloud: the tokens, unit vectors; those of weight zero are left out.

    Returns:
        The merges. Cost: $O(n^3 + n^2 d)$ time and $O(n^2)$ memory on the host; not
        under `jit`.
    """
    is_softmax = attracting.attraction_of(layer, "greedy staircases").is_softmax
    check_cloud("cloud", cloud)
    check_known("greedy_staircase", cloud.points, cloud.weights)
    Sphere().check(cloud.points)
    weights = np.asarray(cloud.weights, np.float64)
    return _climbed(cloud, is_softmax, weights, (weights > 0).astype(float))


def _climbed(cloud: TokenCloud, is_softmax: bool, masses, counts) -> Staircase:
    """Return the merges of atoms of given masses and numbers of tokens."""
    groups = _Groups(cloud, masses, counts)
    levels, steps, length = [groups.level()], [], 0.0
    for _ in groups.indices[1:]:
        first, second, gap, ties = groups.closest(is_softmax)
        is_tied = len(ties) > 0 or gap >= math.pi - groups.tie
        share = attracting.first_share(is_softmax, *groups.masses[[first, second]])
        counts = groups.counts[[first, second]]
        length += gap * math.hypot(
            math.sqrt(counts[0]) * share, math.sqrt(counts[1]) * (1 - share)
        )
        pair = groups.indices[first], groups.indices[second]
        masses = groups.masses[[first, second]]
        point = groups.join(first, second, share)
        steps.append((*pair, gap, point, masses, length, is_tied, ties))
        levels.append(groups.level())
    return _as_staircase(steps, levels, cloud)


class _Groups:
    """Groups of tokens by index, with points, masses and numbers of tokens.

    A group that has joined another has no mass, and is infinitely far from all.
    """

    def __init__(self, cloud: TokenCloud, masses: np.ndarray, counts: np.ndarray):
        self.indices = np.flatnonzero(masses > 0)
        self.points = np.asarray(cloud.points, np.float64)[self.indices]
        self.masses = masses[self.indices]
        self.counts = counts[self.indices]
        self.tie = max(TIE, ROUNDINGS * float(jnp.finfo(cloud.points.dtype).eps))
        self.gaps = np.full((len(self.indices),) * 2, np.inf)
        for first in range(len(self.indices)):
            self.gaps[first, first + 1 :] = self._angles(first)[first + 1 :]

    def level(self) -> float:
        return float(np.sum(self.masses**2))

    def closest(self, is_softmax: bool) -> tuple[int, int, float, tuple]:
        """Return the pair that goes first, its angle, and the pairs tied with it."""
        shortest = self.gaps.min()
        pairs = np.stack(np.nonzero(self.gaps <= shortest + self.tie), 1)
        # Whichever of the tokens at one place is joined first changes nothing.
        ties = pairs[:0]
        if len(pairs) > 1 and shortest > self.tie:
            rates = self._closing_rates(is_softmax, pairs)
            # Directions are known up to the rounding of points over their distance.
            pairs = pairs[rates >= rates.max() - self.tie / shortest]
            ties = self.indices[pairs] if len(pairs) > 1 else ties
        first, second = (int(index) for index in pairs[0])
        listed = tuple((int(leader), int(token)) for leader, token in ties)
        return first, second, float(self.gaps[first, second]), listed

    def _closing_rates(self, is_softmax: bool, pairs: np.ndarray) -> np.ndarray:
        """Return how fast each of these pairs closes, over the strongest pull."""
        on, by = np.concatenate([pairs, pairs[:, ::-1]]).T
        across = self.points[by] - self.points[on]
        across -= np.sum(across * self.points[on], 1, keepdims=True) * self.points[on]
        across /= np.linalg.norm(across, axis=1, keepdims=True)
        velocities = np.zeros_like(self.points)
        pulls = attracting.pull(is_softmax, self.masses[on], self.masses[by])
        np.add.at(velocities, on, pulls[:, None] / pulls.max() * across)
        return np.sum(velocities[on] * across, 1).reshape(2, -1).sum(0)

    def join(self, first: int, second: int, share: float) -> np.ndarray:
        """Let the second group join the first, this share of the way along the arc."""
        start, end = self.points[first], self.points[second]
        across = end - (start @ end) * start
        size = np.linalg.norm(across)
        angle = share * math.atan2(size, start @ end)
        if size > 0:
            start = math.cos(angle) * start + math.sin(angle) * across / size
        self.points[first] = start
        self.masses[first] += self.masses[second]
        self.counts[first] += self.counts[second]
        self.masses[second] = self.counts[second] = 0
        angles = np.where(self.masses > 0, self._angles(first), np.inf)
        self.gaps[:first, first] = angles[:first]
        self.gaps[first, first + 1 :] = angles[first + 1 :]
        self.gaps[second] = self.gaps[:, second] = np.inf
        return start

    def _angles(self, index: int) -> np.ndarray:
        """Return the angles from one group to all."""
        points, own = self.points, self.points[index]
        return 2 * np.arctan2(norms_of(points - own), norms_of(points + own))


def _as_staircase(steps: list, levels: list[float], cloud: TokenCloud) -> Staircase:
    columns = list(zip(*steps, strict=True)) if steps else [[] for _ in range(8)]
    leaders, tokens, gaps, points, masses, lengths, are_tied, ties = columns
    dtype = cloud.points.dtype
    return Staircase(
        jnp.asarray(leaders, int),
        jnp.asarray(tokens, int),
        jnp.asarray(gaps, dtype),
        jnp.asarray(np.reshape(points, (-1, cloud.dimension)), dtype),
        jnp.asarray(np.reshape(masses, (-1, 2)), dtype),
        jnp.asarray(lengths, dtype),
        jnp.asarray(levels, dtype),
        jnp.asarray(are_tied, bool),
        tuple(ties),
    )


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
        pairs = zip(self.leaders, self.tokens, strict=True)
        for k, (leader, token) in enumerate(pairs):
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
    topic = "predicted staircases"
    _, layer, (is_softmax, *_) = attracting.attraction_along(trajectory, flow, topic)
    distance = as_number("distance", distance, "positive", above=0)
    merges, atoms = trajectory.merges, trajectory.atoms
    if merges is None or atoms is None:
        raise Unsupported(
            "this trajectory has no record of merges; solve with LongDepth() or merge."
        )
    left = (np.asarray(a, np.float64) for a in attracting.atoms_at(trajectory, -1))
    rest = _climbed(trajectory.cloud(-1), is_softmax, *left)
    dtype, least = trajectory.points.dtype, np.finfo(float).tiny
    # Depths may be below all numbers.
    known = np.log(np.maximum(np.asarray(merges.depths, np.float64), least))
    last = math.log(max(float(trajectory.depths[-1]), least))
    times = _log_depths(layer, last, rest, distance)
    every = attracting.masses_along(trajectory, merges)
    levels = [float(np.sum(masses**2)) for masses in every]
    arcs = merges.arc_lengths
    if arcs is not None and atoms.arc_length is not None:
        arcs = jnp.concatenate([arcs, atoms.arc_length[-1] + rest.arc_lengths])
    return PredictedStaircase(
        _verdict(trajectory, rest),
        jnp.arange(len(merges) + len(rest.leaders)) >= len(merges),
        jnp.concatenate([merges.leaders, rest.leaders]),
        jnp.concatenate([merges.tokens, rest.tokens]),
        jnp.concatenate([merges.points, rest.points]),
        jnp.asarray(np.append(known, times), dtype),
        arcs,
        jnp.asarray(np.append(levels, rest.levels[1:]), dtype),
        jnp.concatenate([jnp.zeros(len(merges), bool), rest.is_tied]),
    )


def _log_depths(layer, reached: float, rest: Staircase, distance) -> np.ndarray:
    """Return logarithms of the depths of predicted merges, from that reached on."""
    found = []
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
