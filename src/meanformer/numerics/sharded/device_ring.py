"""Sums over the tokens of all devices, as one device computes them for its queries.

The functions here run inside `jax.shard_map`: every device holds a share of the queries
and a share of the tokens. Shares of tokens go round, and each device adds up what they
contribute to its own queries.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree, ScalarLike

from meanformer.numerics.arrays import any_in_batch
from meanformer.numerics.pair_sums.kernel import (
    best_scores,
    better,
    mean_over_ties,
    no_best,
    sums_over_ties,
)
from meanformer.numerics.pair_sums.pairs import Pairs
from meanformer.numerics.pair_sums.softmax import log_mass_and_mean
from meanformer.numerics.pair_sums.sums import AbstractPairSums, MassAndVectors
from meanformer.numerics.pair_sums.tiles import Terms, as_terms, only_moving, row_count
from meanformer.numerics.pair_sums.tilted_masses import Shifted


class Queries(NamedTuple):
    """One device's queries, and the ranges that they see, in indices of all tokens."""

    tilts: Float[Array, "m k"]
    first: Int[Array, " m"] | None
    last: Int[Array, " m"] | None


class Share(NamedTuple):
    """One device's tokens."""

    points: Float[Array, "n k"]
    weights: Float[Array, " n"]
    offsets: Float[Array, " n"] | None
    values: Float[Array, "n v"]


class DeviceRing(NamedTuple):
    """The devices along one axis of a mesh, which pass their tokens around in a circle.

    Attributes:
        axis: the name of the axis.
        size: the number of devices.
    """

    axis: str
    size: int

    def fold(self, step: Callable, carry: PyTree, share: PyTree) -> PyTree:
        """Fold `step(carry, share, start)` over the shares of all devices.

        `start` is the index of a share's first token among all tokens. Each device
        starts with its own share, so that no two ask the same one at once. Derivatives
        ask for the shares again instead of keeping them.
        """
        here, count = lax.axis_index(self.axis), row_count(share)

        @jax.checkpoint
        def turn(carry, distance):
            start = (here + distance) % self.size * count
            return step(carry, self.share_at(distance, share), start), None

        return lax.scan(turn, carry, jnp.arange(self.size, dtype=here.dtype))[0]

    def share_at(self, distance: Int[Array, ""], share: PyTree) -> PyTree:
        """Return the share of the device that many places ahead."""
        branches = [partial(self._moved, places) for places in range(self.size)]
        return lax.switch(distance, branches, share)

    def _moved(self, places: int, share: PyTree) -> PyTree:
        route = [(i, (i - places) % self.size) for i in range(self.size)]
        return lax.ppermute(share, self.axis, route) if places else share


def pairs_of(
    queries: Queries, share: Share, start: Int[Array, ""]
) -> tuple[Pairs, Float[Array, "n v"]]:
    """Return the pairs of queries with a share of the tokens, and its values."""
    tilts, *ranges = queries
    points, weights, offsets, values = share

    def within(bound):
        """Turn an index among all tokens into one among those of the share."""
        if bound is None:
            return None
        return jnp.clip(bound - start.astype(bound.dtype), 0, len(points))

    return Pairs(tilts, points, weights, offsets, *map(within, ranges)), values


def ring_softmax(
    sums: AbstractPairSums, ring: DeviceRing, queries: Queries, share: Share
) -> MassAndVectors:
    """Log-mass and mean; see `AbstractPairSums.softmax`."""
    return log_mass_and_mean(*ring_masses(sums, ring, queries, share))


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def ring_masses(
    sums: AbstractPairSums, ring: DeviceRing, queries: Queries, share: Share
) -> Shifted:
    """Sum tilted masses relative to shifts that are constant for differentiation.

    The shift is the largest log-mass of a share: what a share contributes can then be
    found again from its log-mass alone, without a loss of digits.
    """

    def step(carry, share, start):
        top, total = carry
        log_mass, mean = sums.softmax(*pairs_of(queries, share, start))
        new_top = jnp.maximum(top, log_mass)
        total *= jnp.exp(top - _finite(new_top))[:, None]
        return new_top, total + _masses(log_mass, mean, new_top)

    nothing = jnp.full(len(queries.tilts), -jnp.inf, queries.tilts.dtype)
    return ring.fold(step, (nothing, _no_masses(queries, share)), share)


def ring_masses_jvp(sums, ring, primals, tangents):
    r"""Differentiate the tilted masses at fixed shifts.

    They are a sum over shares, so that neither this derivative nor its transpose, the
    backward pass, keeps more than one of them.
    """
    queries, share = primals
    moving_queries, moving_share = only_moving(tangents)
    top, total = ring_masses(sums, ring, queries, share)

    def step(moved, held, start):
        share, moving_share = held

        def masses(queries, share):
            answer = sums.softmax(*pairs_of(queries, share, start))
            return _masses(*answer, top), answer[0]

        (_, log_mass), (slopes, _) = eqx.filter_jvp(
            masses, (queries, share), (moving_queries, moving_share)
        )
        moved += slopes
        if moving_share.weights is None:
            return moved
        is_lost = (log_mass == -jnp.inf) & (top > -jnp.inf)
        appearing = partial(_appearing_masses, sums, start, top)
        return moved + lax.cond(
            any_in_batch(jnp.any(is_lost) & jnp.any(share.weights == 0)),
            lambda: jnp.where(is_lost[:, None], appearing(queries, *held), 0),
            lambda: jnp.zeros_like(moved),
        )

    held = share, moving_share
    moved = ring.fold(step, _no_masses(queries, share), held)
    return (top, total), (jnp.zeros_like(top), moved)


ring_masses.defjvp(ring_masses_jvp, symbolic_zeros=True)


def _appearing_masses(
    sums: AbstractPairSums,
    start: Int[Array, ""],
    top: Float[Array, " m"],
    queries: Queries,
    share: Share,
    moving: Share,
) -> Float[Array, "m c"]:
    r"""Derivative of the tilted masses by the weights of absent tokens.

    A share of which a query sees only absent tokens has no log-mass, and the derivative
    by their weights, $\sum_j \dot w_j e^{s_{ij} - c_i} (1, v_j)$, would be lost. Masses
    are linear in the weights: it is the same at any, here at one.
    """

    def masses(weights):
        present = share._replace(weights=jnp.where(share.weights == 0, 1 + weights, 0))
        return _masses(*sums.softmax(*pairs_of(queries, present, start)), top)

    return jax.jvp(masses, (share.weights,), (moving.weights,))[1]


def _masses(
    log_mass: Float[Array, " m"], mean: Float[Array, "m v"], shift: Float[Array, " m"]
) -> Float[Array, "m c"]:
    """Return mass and moments relative to the exponential of shifts."""
    # Only the masses of absent tokens, which shifts ignore, ever reach the bound.
    largest = jnp.log(jnp.finfo(mean.dtype).max) / 2
    mass = jnp.exp(jnp.minimum(log_mass - _finite(shift), largest))[:, None]
    return jnp.concatenate([mass, mass * mean], axis=1)


def _finite(shift: Float[Array, " m"]) -> Float[Array, " m"]:
    """Return zero for the shift of a query that has seen nothing."""
    return jnp.where(shift == -jnp.inf, 0, shift)


def _no_masses(queries: Queries, share: Share) -> Float[Array, "m c"]:
    """Return mass and moments before any share is added."""
    shape = len(queries.tilts), 1 + share.values.shape[1]
    return jnp.zeros(shape, share.values.dtype)


def ring_kernel(
    sums: AbstractPairSums,
    ring: DeviceRing,
    profile: Callable,
    queries: Queries,
    share: Share,
) -> MassAndVectors:
    """Mass and moment; see `AbstractPairSums.kernel`."""

    def step(total, share, start):
        mass, moment = sums.kernel(*pairs_of(queries, share, start), profile)
        return total + jnp.concatenate([mass[:, None], moment], axis=1)

    total = ring.fold(step, _no_masses(queries, share), share)
    return total[:, 0], total[:, 1:]


def ring_hardmax(
    ring: DeviceRing, tolerance: ScalarLike, queries: Queries, share: Share
) -> MassAndVectors:
    """Best score and mean over its ties; see `AbstractPairSums.hardmax`.

    What ties with the best score of all is known only when all shares have been seen,
    and needs exact scores: shares go round twice, summed in tiles.
    """

    def terms(share: Share, start: Array) -> Terms:
        return as_terms(*pairs_of(queries, share, start))

    def find(best, share, start):
        constant = lax.stop_gradient(terms(share, start))
        return better(best, best_scores(constant, "auto"))

    def add(carry, share, start):
        found = sums_over_ties(terms(share, start), best, tolerance, "auto")
        return jax.tree.map(jnp.add, carry, found)

    best = ring.fold(find, no_best(queries.tilts), share)
    nothing = _no_masses(queries, share), jnp.zeros_like(best[0])
    return mean_over_ties(best[0], *ring.fold(add, nothing, share))
