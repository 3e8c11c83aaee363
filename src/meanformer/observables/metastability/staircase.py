"""The order in which clusters merge at low temperature, predicted without a flow."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from meanformer.attention import AbstractInContextMap
from meanformer.errors import check, is_concrete
from meanformer.geometry import Sphere
from meanformer.measures import TokenCloud
from meanformer.measures.cloud import check_cloud
from meanformer.observables.metastability.attraction import (
    attraction_of,
    first_share,
    pull,
)

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
        for k, (leader, token) in enumerate(
            zip(self.leaders, self.tokens, strict=True)
        ):
            masses = ", ".join(f"{mass:.3g}" for mass in np.asarray(self.masses[k]))
            pairs = ", ".join(f"{first} + {second}" for first, second in self.ties[k])
            note = "; tied" * bool(self.is_tied[k]) + f" ({pairs})" * bool(pairs)
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
    is_softmax = attraction_of(layer, "greedy staircases").is_softmax
    check_cloud("cloud", cloud)
    check(
        is_concrete(cloud.points) and is_concrete(cloud.weights),
        "greedy_staircase needs concrete tokens; call it outside of jit.",
    )
    Sphere().check(cloud.points)
    weights = np.asarray(cloud.weights, np.float64)
    return climbed(cloud, is_softmax, weights, (weights > 0).astype(float))


def climbed(
    cloud: TokenCloud, is_softmax: bool, masses: np.ndarray, counts: np.ndarray
) -> Staircase:
    """Return the merges of atoms of given masses and numbers of tokens."""
    groups = _Groups(cloud, masses, counts)
    levels, steps, length = [groups.level()], [], 0.0
    for _ in groups.indices[1:]:
        first, second, gap, ties = groups.closest(is_softmax)
        is_tied = len(ties) > 0 or gap >= math.pi - groups.tie
        share = first_share(is_softmax, *groups.masses[[first, second]])
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
        if len(pairs) > 1 and shortest > self.tie:
            rates = self._closing_rates(is_softmax, pairs)
            # Directions are known up to the rounding of points over their distance.
            pairs = pairs[rates >= rates.max() - self.tie / shortest]
            ties = self.indices[pairs] if len(pairs) > 1 else pairs[:0]
        else:
            # Whichever of the tokens at one place is joined first changes nothing.
            ties = pairs[:0]
        first, second = (int(index) for index in pairs[0])
        listed = tuple((int(leader), int(token)) for leader, token in ties)
        return first, second, float(self.gaps[first, second]), listed

    def _closing_rates(self, is_softmax: bool, pairs: np.ndarray) -> np.ndarray:
        """Return how fast each of these pairs closes, in units of the strongest pull.

        They are equally close, and each group is pulled by all others that it is close
        to.
        """
        on, by = np.concatenate([pairs, pairs[:, ::-1]]).T
        across = self.points[by] - self.points[on]
        across -= np.sum(across * self.points[on], 1, keepdims=True) * self.points[on]
        across /= np.linalg.norm(across, axis=1, keepdims=True)
        velocities = np.zeros_like(self.points)
        pulls = pull(is_softmax, self.masses[on], self.masses[by])
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
        self._measure(first, second)
        return start

    def _measure(self, moved: int, gone: int) -> None:
        """Bring the gaps up to date."""
        angles = np.where(self.masses > 0, self._angles(moved), np.inf)
        self.gaps[:moved, moved] = angles[:moved]
        self.gaps[moved, moved + 1 :] = angles[moved + 1 :]
        self.gaps[gone] = self.gaps[:, gone] = np.inf

    def _angles(self, index: int) -> np.ndarray:
        """Return the angles from one group to all."""
        # One shape throughout, so that it is compiled once.
        points = jnp.asarray(self.points)
        return np.asarray(
            _distance(points, jnp.broadcast_to(points[index], points.shape))
        )


_distance = jax.jit(Sphere().distance)


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
