"""Transport on the line, in closed form, and its average over lines: sliced."""

import math
from typing import SupportsIndex

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from meanformer.errors import as_finite_array, as_integer, as_key, check, is_concrete
from meanformer.measures.transport.atoms import Atoms, Coupling, power_mean
from meanformer.numerics.arrays import matmul, unit_rows
from meanformer.typing import ArrayLike, Key

DEFAULT_DIRECTIONS = 256
DIRECTIONS_AT_ONCE = 16


@eqx.filter_jit
def monotone_coupling(source: Atoms, target: Atoms) -> Coupling:
    r"""Plan between measures on the line that is optimal for every order.

    The merged levels $t_1 \le t_2 \le \dots \le 1$ of both distribution functions cut
    the mass into pieces; piece $s$ goes from the quantile of one measure at $t_s$ to
    that of the other. Levels of the two that agree up to rounding are made equal, so
    that an atom split in parts is still the same atom. Differentiable in the masses.
    Cost: sorting, $O(n \log n)$.
    It has $n + m$ entries.
    """
    first, second = (jnp.argsort(atoms.points[:, 0]) for atoms in (source, target))
    anchors = _levels(source, first)
    levels = jnp.concatenate([anchors, _snapped(_levels(target, second), anchors)])
    merged = jnp.argsort(levels)
    is_first = (merged < len(first)).astype(merged.dtype)
    passed = jnp.cumsum(is_first) - is_first
    passed_second = jnp.cumsum(1 - is_first) - (1 - is_first)
    return Coupling(
        rows=first[jnp.minimum(passed, len(first) - 1)],
        columns=second[jnp.minimum(passed_second, len(second) - 1)],
        masses=jnp.diff(levels[merged], prepend=jnp.zeros(1, levels.dtype)),
        shape=(len(first), len(second)),
    )


@eqx.filter_jit
def line_distance(source: Atoms, target: Atoms, order: float) -> Float[Array, ""]:
    r"""Wasserstein distance of measures on the line.

    $$W_p = \Bigl(\int_0^1 |F_\mu^{-1}(t) - F_\nu^{-1}(t)|^p\,\mathrm{d}t\Bigr)^{1/p}.$$
    """
    coupling = monotone_coupling(source, target)
    return power_mean(coupling.distances(source, target), coupling.masses, order)


@eqx.filter_jit
def sliced_distance(
    source: Atoms, target: Atoms, directions: Float[Array, "l d"], order: float
) -> Float[Array, ""]:
    r"""Sliced Wasserstein distance, from given unit directions.

    $$SW_p = \Bigl(\frac1L \sum_{l=1}^L W_p(\langle\theta_l, \cdot\rangle_\# \mu,
      \langle\theta_l, \cdot\rangle_\# \nu)^p\Bigr)^{1/p}.$$

    Cost: $O(L n \log n)$ time, $O(n)$ memory.
    """

    @jax.checkpoint
    def along(direction):
        sides = (
            Atoms(matmul(atoms.points, direction)[:, None], atoms.masses, atoms.labels)
            for atoms in (source, target)
        )
        return line_distance(*sides, order)

    distances = lax.map(along, directions, batch_size=DIRECTIONS_AT_ONCE)
    shares = jnp.full_like(distances, 1 / len(distances))
    return power_mean(distances, shares, order)


def unit_directions(
    directions: SupportsIndex | ArrayLike | None, atoms: Atoms, key: Key | None
) -> Float[Array, "l d"]:
    """Return the directions given, made unit vectors, or draw as many as asked for."""
    dimension, dtype = atoms.points.shape[1], atoms.points.dtype
    if directions is None or np.ndim(directions) == 0:
        count = DEFAULT_DIRECTIONS if directions is None else directions
        count = as_integer("directions", count, least=1)
        check(
            key is not None,
            'method="sliced" draws random directions and needs a key; pass '
            "key=jax.random.key(0), or the directions as an array.",
        )
        vectors = jr.normal(as_key(key), (count, dimension), dtype)
    else:
        vectors = as_finite_array("directions", directions, (None, dimension), dtype)
    is_zero = is_concrete(vectors) and not np.asarray(vectors).any(axis=1).all()
    check(
        len(vectors) > 0 and not is_zero,
        "directions has a zero row or no row; every direction must be nonzero.",
    )
    return unit_rows(vectors)


def _levels(atoms: Atoms, order: Array) -> Float[Array, " n"]:
    """Distribution function at the sorted atoms, exactly 1 at the last."""
    sums = jnp.cumsum(atoms.masses[order])
    return sums / sums[-1]


def _snapped(
    levels: Float[Array, " m"], anchors: Float[Array, " n"]
) -> Float[Array, " m"]:
    """Move each level to the nearest anchor if only rounding tells them apart.

    The derivative is that of the level, which has not moved as far as it can tell.
    """
    above = jnp.minimum(jnp.searchsorted(anchors, levels), len(anchors) - 1)
    before, after = anchors[jnp.maximum(above - 1, 0)], anchors[above]
    nearest = jnp.where(levels - before < after - levels, before, after)
    # The error of a running sum of masses, which is added up in pairs.
    depth = math.log2(len(levels) + len(anchors))
    rounding = (2 + depth) * float(jnp.finfo(levels.dtype).eps)
    is_same = jnp.abs(levels - nearest) <= rounding
    moved = lax.stop_gradient(jnp.where(is_same, nearest, levels))
    return moved + (levels - lax.stop_gradient(levels))
