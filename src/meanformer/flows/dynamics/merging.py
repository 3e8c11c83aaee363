"""Tokens that have met become one atom: when, where, and at what cost."""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.errors import InvalidInput, Unsupported, as_number, is_concrete
from meanformer.flows.trajectories.atoms import Atoms
from meanformer.geometry import AbstractSpace
from meanformer.measures import TokenCloud
from meanformer.numerics.nearest import chain_labels, closest_pair

DISTANCES = {2: 1e-2, 4: 1e-4, 8: 1e-9}  # by the bytes of the type
ROUNDINGS = 512
# Coordinates up to which the rate of growth is worth its dense eigenvalues.
MOST_COORDINATES = 128
# A meeting is located at least to this share of the distance, and as well as rounding
# of the tokens allows; gaps larger by the share of a tie close in the same event.
LOCATED = 0.02
TIE = 1e-3


class Merge(eqx.Module):
    r"""Join tokens that have met, so that a cluster costs and moves as one token.

    Tokens of positive weight closer than `distance` become one atom at their weighted
    mean, of the sum of their weights; chains of close tokens join as a whole. The depth
    is located by the solver's event finder. The leader, the token of lowest index,
    carries the atom; the others are reported at its place.

    One pair of masses $w_1, w_2$ at distance $r$ moves the measure by
    $\sqrt{w_1w_2/(w_1+w_2)}\,r$ in $W_2$: `Trajectory.statistics` has the sum of these
    jumps, and what the flow may make of them.

    Args:
        distance: the distance in the space at which tokens join; `1e-9` in double and
            `1e-4` in single precision by default. A distance below what rounding allows
            to tell apart, 512 roundings of the largest coordinate, is raised to that.
    """

    distance: float | Float[Array, ""] | None = None

    def __check_init__(self):
        if self.distance is None or not is_concrete(self.distance):
            return
        bounds = {"above": 0, "below": math.inf}
        as_number("distance", self.distance, "positive and finite", **bounds)

    def prepared(self, dtype: jnp.dtype) -> "Merge":
        """Return the same with the distance as an array."""
        given = self.distance
        distance = DISTANCES[jnp.dtype(dtype).itemsize] if given is None else given
        return Merge(jnp.asarray(distance, dtype))


def as_merge(merge: "Merge | float | None", dtype: jnp.dtype) -> Merge:
    """Return what `merge=` stands for, a number being the distance."""
    if merge is None:
        return Merge().prepared(dtype)
    if isinstance(merge, bool) or not isinstance(merge, Merge | float | int | Array):
        raise InvalidInput(
            f"merge is {merge!r}; it must be Merge(distance), a distance, or None."
        )
    return (merge if isinstance(merge, Merge) else Merge(merge)).prepared(dtype)


def check_mergeable(mu: TokenCloud, is_noisy: bool, is_forward: bool) -> None:
    """Raise unless the tokens of this cloud may be joined along a solve."""
    if mu.positions is not None:
        raise Unsupported(
            "merge joins tokens, and tokens at different positions of the sequence "
            "stay different; leave out positions, or merge."
        )
    if is_noisy:
        raise Unsupported(
            "merge joins tokens for good, but noise drives them apart again; leave "
            "merge out."
        )
    if not is_forward:
        raise Unsupported(
            "merge forgets how tokens came together, so depth cannot run backward; "
            "leave merge out."
        )


def initial_atoms(
    depth: Float[Array, ""], points: Float[Array, "n d"], is_long: bool
) -> Atoms:
    """Return every token as an atom of its own."""
    dtype, indices = points.dtype, jnp.arange(len(points))
    none, zero = jnp.zeros((len(points),), dtype), jnp.zeros((), dtype)
    nothing = jnp.log(jnp.finfo(dtype).tiny).astype(dtype)
    is_small = points.size <= MOST_COORDINATES
    return Atoms(
        indices,
        jnp.zeros((len(points),), depth.dtype),
        indices,
        none,
        none,
        jnp.zeros_like(points),
        zero,
        nothing if is_small else None,
        zero if is_long else None,
        none if is_long else None,
    )


class Gap(eqx.Module):
    """The smallest gap between atoms, measured against the distance of a merge."""

    merge: Merge
    space: AbstractSpace

    def distance(self, cloud: TokenCloud) -> Float[Array, ""]:
        """Return the distance at which tokens join, raised above rounding."""
        eps = jnp.finfo(cloud.points.dtype).eps
        smallest = ROUNDINGS * eps * _largest_coordinate(cloud)
        return jnp.maximum(self.merge.distance, smallest)

    def log_excess(self, cloud: TokenCloud) -> Float[Array, ""]:
        """Return the logarithm of gap over distance, zero within what can be told.

        One for a lone atom, which never meets another.
        """
        chord, *pair = closest_pair(cloud.points, cloud.weights > 0)
        first, second = (cloud.points[index][None] for index in pair)
        distance = self.distance(cloud)
        excess = jnp.log(self.space.distance(first, second)[0] / distance)
        near = jnp.abs(excess) < self._located(cloud, distance)
        return jnp.where(jnp.isfinite(chord), jnp.where(near, 0, excess), 1)

    def linking(self, cloud: TokenCloud) -> Float[Array, ""]:
        """Return the distance up to which a gap counts as closed, ties included."""
        distance = self.distance(cloud)
        located = self._located(cloud, distance)
        return distance * (1 + jnp.maximum(TIE, 2 * located))

    def _located(self, cloud, distance) -> Float[Array, ""]:
        rounding = jnp.finfo(cloud.points.dtype).eps * _largest_coordinate(cloud)
        return jnp.minimum(64 * rounding / distance, LOCATED)


def join(
    gap: Gap, cloud: TokenCloud, depth: Float[Array, ""], atoms: Atoms
) -> tuple[Float[Array, "n d"], Atoms]:
    """Return points and atoms after every chain of close atoms has become one.

    Args:
        gap: what counts as close.
        cloud: the tokens, with their own masses.
        depth: where this happens.
        atoms: what had joined before.
    """
    masses, points = atoms.weights(cloud), cloud.points
    context = eqx.tree_at(lambda c: c.weights, cloud, masses)
    present = masses > 0
    labels = chain_labels(points, present, gap.space.chord(gap.linking(context)))
    total = jax.ops.segment_sum(masses, labels, len(points))
    # Deviations from the leader: an atom that nothing joined stays where it is.
    deviations = masses[:, None] * (points - points[labels])
    moments = jax.ops.segment_sum(deviations, labels, len(points))
    shift = moments / jnp.where(total > 0, total, 1)[:, None]
    is_moved = jnp.any(shift != 0, axis=1, keepdims=True)
    means = jnp.where(is_moved, gap.space.retract(points + shift), points)
    joins = present & (labels != jnp.arange(len(points)))
    distances = gap.space.distance(points, points[labels])
    cost = jnp.sum(masses * gap.space.distance(points, means[labels]) ** 2)
    jump = jnp.where(joins.any(), jnp.sqrt(cost), 0)
    leaders = labels[atoms.leaders]
    lengths = atoms.joined_arc_lengths
    joined = Atoms(
        leaders,
        jnp.where(joins, depth, atoms.joined_depths),
        jnp.where(joins, labels, atoms.joined_leaders),
        jnp.where(joins, distances, atoms.distances),
        jnp.where(joins, total[labels], atoms.masses),
        jnp.where(joins[:, None], means[labels], atoms.places),
        atoms.jumps + jump,
        None if atoms.log_bound is None else _log_sum(atoms.log_bound, jump),
        atoms.arc_length,
        None if lengths is None else jnp.where(joins, atoms.arc_length, lengths),
    )
    return means[leaders], joined


def grown(
    atoms: Atoms,
    rate: Callable[[Array, Array], Array],
    times: Float[Array, " s"] | None = None,
    paths: Float[Array, "s n d"] | None = None,
) -> Atoms:
    """Return the atoms with their error carried along a solve, by a trapezoidal sum.

    Args:
        atoms: the atoms at its start.
        rate: the rate of growth at a time and points, of atoms and inside of them.
        times: the times of its steps, infinite after the last; none where there are too
            many tokens to know.
        paths: the points there.
    """
    if times is None or paths is None:
        return atoms

    def add(index, carry):
        total, before = carry
        now = rate(times[index], paths[index])
        width = times[index] - times[jnp.maximum(index - 1, 0)]
        return total + width * (before + now) / 2, now

    zero = jnp.zeros((), paths.dtype)
    # Before the first join there is no error to carry, and no rate is computed.
    count = jnp.where(atoms.jumps > 0, jnp.sum(jnp.isfinite(times)), 0)
    growth, _ = jax.lax.fori_loop(0, count, add, (zero, zero))
    return eqx.tree_at(lambda a: a.log_bound, atoms, atoms.log_bound + growth)


def _log_sum(log_bound: Float[Array, ""], jump: Float[Array, ""]) -> Float[Array, ""]:
    safe = jnp.where(jump > 0, jump, 1)
    return jnp.where(jump > 0, jnp.logaddexp(log_bound, jnp.log(safe)), log_bound)


def _largest_coordinate(cloud: TokenCloud) -> Float[Array, ""]:
    present = (cloud.weights > 0)[:, None]
    return jnp.max(jnp.where(present, jnp.abs(cloud.points), 0))
