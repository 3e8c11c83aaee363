"""Tokens that have met become one atom: when, where, and at what cost."""

import dataclasses
import math
from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from meanformer.errors import InvalidInput, Unsupported, as_number, check, is_concrete
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
        distance = as_number("distance", self.distance)
        check(
            0 < distance < math.inf,
            f"distance is {distance}; it must be positive and finite.",
        )

    def prepared(self, dtype: jnp.dtype) -> "Merge":
        """Return the same with the distance as an array."""
        given = self.distance
        distance = DISTANCES[jnp.dtype(dtype).itemsize] if given is None else given
        return Merge(jnp.asarray(distance, dtype))


class Atoms(eqx.Module):
    """Which tokens have joined so far, and the record of it, token by token.

    In a trajectory every array has an axis of saved depths in front.

    Attributes:
        leaders: the token that carries each token's atom: itself unless joined.
        joined_depths: where each token was joined; zero for one that was not.
        joined_leaders: the leader it was joined to; itself for one that was not.
        distances: how far it was from that leader.
        masses: the mass of the atom it became part of.
        places: where that atom was.
        jumps: the sum of the distances in $W_2$ by which joining moved the measure.
        log_bound: logarithm of these jumps carried along the path, at the rate of the
            atoms or of the tokens inside of one, whichever is larger; `None` where
            there are too many tokens to know.
        arc_length: length of the path of all tokens, with `LongDepth`; else `None`.
        joined_arc_lengths: that length where each token was joined; or `None`.
    """

    leaders: Int[Array, "... n"]
    joined_depths: Float[Array, "... n"]
    joined_leaders: Int[Array, "... n"]
    distances: Float[Array, "... n"]
    masses: Float[Array, "... n"]
    places: Float[Array, "... n d"]
    jumps: Float[Array, "..."]
    log_bound: Float[Array, "..."] | None
    arc_length: Float[Array, "..."] | None
    joined_arc_lengths: Float[Array, "... n"] | None

    def weights(self, cloud: TokenCloud) -> Float[Array, " n"]:
        """Return the masses of the atoms, at their leaders; zero for other tokens."""
        return self._summed(cloud.weights)

    def counts(self, cloud: TokenCloud) -> Float[Array, " n"]:
        """Return how many tokens of positive weight each atom is made of."""
        return self._summed((cloud.weights > 0).astype(cloud.weights.dtype))

    def are_several(self) -> Bool[Array, " n"]:
        """Return which tokens carry an atom of more than one token."""
        # A token of weight zero is never joined: every follower counts.
        return self._summed(jnp.ones_like(self.leaders)) > 1

    def _summed(self, values: Shaped[Array, " n"]) -> Shaped[Array, " n"]:
        return jax.ops.segment_sum(values, self.leaders, len(self.leaders))


class Merges(eqx.Module):
    """The joins of a solve, in the order of their depths.

    Attributes:
        depths: where each join happened; equal depths are one event.
        leaders: the token that carries the atom from then on.
        tokens: the token that was joined to it.
        distances: how far apart the two were.
        points: where the atom was placed.
        masses: its mass.
        arc_lengths: the length of the path of all tokens then, with `LongDepth`; or
            `None`.
    """

    depths: Float[Array, " k"]
    leaders: Int[Array, " k"]
    tokens: Int[Array, " k"]
    distances: Float[Array, " k"]
    points: Float[Array, "k d"]
    masses: Float[Array, " k"]
    arc_lengths: Float[Array, " k"] | None

    def __len__(self) -> int:
        return self.depths.shape[0]


def as_merge(
    merge: "Merge | float | None", is_needed: bool, dtype: jnp.dtype
) -> Merge | None:
    """Return what `merge=` stands for, a number being the distance."""
    if merge is None:
        return Merge().prepared(dtype) if is_needed else None
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


def _log_sum(log_bound: Float[Array, ""], jump: Float[Array, ""]) -> Float[Array, ""]:
    safe = jnp.where(jump > 0, jump, 1)
    return jnp.where(jump > 0, jnp.logaddexp(log_bound, jnp.log(safe)), log_bound)


def record_of(atoms: Atoms) -> Merges:
    """Return the joins in the order of their depths; those known to have happened.

    Under `jit` there is one row for each token, and a token that was not joined has
    itself as its leader.
    """
    tokens = jnp.arange(len(atoms.leaders))
    rows, lengths = tokens, atoms.joined_arc_lengths
    if is_concrete(atoms.joined_leaders):
        joined = np.flatnonzero(
            np.asarray(atoms.joined_leaders) != np.arange(len(tokens))
        )
        # Depths below the smallest number of the type are all zero: length goes on.
        keys = [array for array in (lengths, atoms.joined_depths) if array is not None]
        order = np.lexsort([np.asarray(array)[joined] for array in keys])
        rows = jnp.asarray(joined[order], tokens.dtype)
    return Merges(
        atoms.joined_depths[rows],
        atoms.joined_leaders[rows],
        tokens[rows],
        atoms.distances[rows],
        atoms.places[rows],
        atoms.masses[rows],
        None if lengths is None else lengths[rows],
    )


#: The arrays of `Atoms` as files name them, with their axes besides depth.
ATOM_AXES = {
    "leader": ("token",),
    "joined_depth": ("token",),
    "joined_leader": ("token",),
    "joined_distance": ("token",),
    "joined_mass": ("token",),
    "joined_place": ("token", "coordinate"),
    "merge_error": (),
    "log_merge_bound": (),
    "arc_length": (),
    "joined_arc_length": ("token",),
}


def atom_arrays(atoms: Atoms) -> dict[str, Array]:
    """Return the arrays of the atoms by their names in files, those that there are."""
    arrays = {
        name: getattr(atoms, field.name)
        for name, field in zip(ATOM_AXES, dataclasses.fields(atoms), strict=True)
    }
    return {name: array for name, array in arrays.items() if array is not None}


def atoms_from(arrays: Mapping[str, Array]) -> Atoms | None:
    """Return the atoms that arrays of a file stand for; `None` if it has none."""
    if "leader" not in arrays:
        return None
    return Atoms(*[arrays.get(name) for name in ATOM_AXES])


def series(atoms: Atoms, weights: Float[Array, " n"]) -> dict[str, Array]:
    """Return what joining did along the saved depths, for the statistics."""
    tokens = jnp.arange(len(weights))[None, :]
    leads = (atoms.leaders == tokens) & (weights > 0)[None, :]
    found = {"atom_count": leads.sum(axis=1), "merge_error": atoms.jumps}
    if atoms.log_bound is not None:
        found["log10_merge_bound"] = atoms.log_bound / math.log(10)
    if atoms.arc_length is not None:
        found["arc_length"] = atoms.arc_length
    return found


def _largest_coordinate(cloud: TokenCloud) -> Float[Array, ""]:
    present = (cloud.weights > 0)[:, None]
    return jnp.max(jnp.where(present, jnp.abs(cloud.points), 0))
