"""Which tokens have joined along a solve, and the record of it."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from meanformer.errors import is_concrete
from meanformer.measures import TokenCloud


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
