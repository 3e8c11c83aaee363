"""Transport on the line: the monotone plan, in closed form for any weights."""

import math

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from meanformer.measures.transport.atoms import Atoms
from meanformer.measures.transport.coupling import Coupling, power_mean


@eqx.filter_jit
def monotone_coupling(source: Atoms, target: Atoms) -> Coupling:
    r"""Plan between measures on the line that is optimal for every order.

    The merged levels $t_1 \le t_2 \le \dots \le 1$ of both distribution functions cut
    the mass into pieces; piece $s$ goes from the quantile of one measure at $t_s$ to
    that of the other. Levels of the two that agree up to rounding are made equal, so
    that an atom split in parts is still the same atom. Differentiable in the masses.
    Cost: sorting, $O(n \log n)$.

    Args:
        source: atoms on the line.
        target: atoms on the line.

    Returns:
        The plan, with $n + m$ entries.
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
    is_same = jnp.abs(levels - nearest) <= _rounding_of_levels(levels, anchors)
    moved = lax.stop_gradient(jnp.where(is_same, nearest, levels))
    return moved + (levels - lax.stop_gradient(levels))


def _rounding_of_levels(levels: Array, anchors: Array) -> float:
    """Return the error of a running sum of masses, which is added up in pairs."""
    depth = math.log2(len(levels) + len(anchors))
    return (2 + depth) * float(jnp.finfo(levels.dtype).eps)
