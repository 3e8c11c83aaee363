"""Maps of one kind as one map: traced and compiled once, however many there are."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from meanformer.attention.abstract import AbstractInContextMap
from meanformer.attention.affine import is_array, push_forward
from meanformer.measures import AbstractContext, TokenCloud
from meanformer.numerics.fourier.sums import reported_anew, with_sums, without_reports
from meanformer.typing import Places


class Stacked(eqx.Module):
    """A sequence of maps that keeps those of one kind as one, with a leading axis.

    Maps are of one kind if they differ in the numbers of their arrays alone.

    Attributes:
        kinds: one map for each kind, its arrays stacked.
        places: for each map of the sequence its kind, and its row there.
    """

    kinds: tuple[AbstractInContextMap, ...]
    places: tuple[tuple[int, int], ...] = eqx.field(static=True)

    def __len__(self) -> int:
        """Return the number of maps."""
        return len(self.places)

    def __getitem__(self, index: int) -> AbstractInContextMap:
        """Return one map."""
        kind, row = self.places[index]
        return _row(self.kinds[kind], row)

    def __iter__(self) -> Iterator[AbstractInContextMap]:
        """Return the maps one after another."""
        return (self[index] for index in range(len(self)))

    def at(self, index: Int[Array, ""], call: Callable) -> Any:
        """Return what a function makes of the map at an index that may be traced."""
        kinds, rows = np.array(self.places).T
        row = jnp.asarray(rows)[index]
        branches = [lambda row, one=one: call(_row(one, row)) for one in self.kinds]
        if len(branches) == 1:
            return branches[0](row)
        return jax.lax.switch(jnp.asarray(kinds)[index], branches, row)

    def stacked_at(self, indices: Sequence[int]) -> AbstractInContextMap:
        """Return some maps of one kind as one, with a leading axis."""
        kind = self.places[indices[0]][0]
        return _row(self.kinds[kind], np.array([self.places[i][1] for i in indices]))


Maps = tuple[AbstractInContextMap, ...] | Stacked


def stacked(maps: Maps) -> Stacked:
    """Return a sequence of maps with those of one kind as one."""
    if isinstance(maps, Stacked):
        return maps
    groups = _groups(maps)
    places = {
        index: (kind, row)
        for kind, group in enumerate(groups)
        for row, index in enumerate(group)
    }
    kinds = tuple(_stack([maps[index] for index in group]) for group in groups)
    return Stacked(kinds, tuple(places[index] for index in range(len(maps))))


def stack_if_alike(maps: Maps) -> Maps:
    """Return the maps with those of one kind as one, if there are such."""
    kept = stacked(maps)
    return maps if len(kept.kinds) == len(maps) else kept


def one_of_each_kind(maps: Maps) -> tuple[AbstractInContextMap, ...]:
    """Return one map of each kind."""
    if isinstance(maps, Stacked):
        return tuple(_row(kind, 0) for kind in maps.kinds)
    return tuple(maps[group[0]] for group in _groups(maps))


def shapes(maps: Maps) -> Sequence[AbstractInContextMap]:
    """Return maps to ask for their dimensions: of each kind one is enough."""
    if isinstance(maps, Stacked):
        return [eqx.filter_eval_shape(_row, kind, 0) for kind in maps.kinds]
    return maps


def add_images(
    maps: Maps, mu: AbstractContext, x: Float[Array, "m d"], positions: Places
) -> Float[Array, "m e"]:
    """Return the sum of the images under all maps; a loop over those of one kind."""
    if _is_looped(maps, (mu, x, positions)):
        kept = stacked(maps)
        counts = np.bincount([kind for kind, _ in kept.places])
        images = [
            _looped(_sum, kind, int(count), mu, x, positions)
            for kind, count in zip(kept.kinds, counts, strict=True)
        ]
    else:
        images = [gamma(mu, x, positions=positions) for gamma in maps]
    first, *rest = images
    return sum(rest, start=first)


def before_last(
    maps: Maps, mu: AbstractContext, x: Float[Array, "m d"], positions: Places
) -> tuple[AbstractContext, Float[Array, "m e"]]:
    """Return context and queries after all maps but the last.

    A loop where a stretch of kinds repeats itself, as the blocks of a network do.
    """
    end = len(maps) - 1
    is_looped = _is_looped(maps, (mu, x, positions))
    layers, start = stacked(maps) if is_looped else maps, 0
    while start < end:
        units, length = (), 1
        if isinstance(layers, Stacked):
            units, length = _repetition(layers, start, end)
        if units and _keeps_shapes(units, mu, x, positions):
            mu, x = _looped(_network, units, length // len(units), mu, x, positions)
            start += length
        else:
            mu, x = _layer(layers[start], mu, x, positions)
            start += 1
    return mu, x


def _looped(loop: Callable, maps: PyTree, count: int, mu, x, positions) -> Any:
    """Run a compiled loop over so many rows, and hand on what its sums report."""
    bare, sums = without_reports(mu)
    result, reports = loop(maps, count, bare, x, positions, sums is not None)
    if sums is None:
        return result
    sums.keep(reports)
    return with_sums(result, sums)


@eqx.filter_jit
def _sum(maps: AbstractInContextMap, count: int, mu, x, positions, has_reports: bool):
    def image(gamma: AbstractInContextMap):
        seen, sums = reported_anew(mu) if has_reports else (mu, None)
        value = gamma(seen, x, positions=positions)
        return value, () if sums is None else tuple(sums.reports)

    arrays, rest = eqx.partition(maps, eqx.is_array)
    shape, _ = eqx.filter_eval_shape(lambda: image(_row(maps, 0)))

    def add(total, row):
        value, reports = image(eqx.combine(row, rest))
        return total + value, reports

    # Maps without arrays do not tell how many they are.
    return jax.lax.scan(add, jnp.zeros(shape.shape, shape.dtype), arrays, count)


@eqx.filter_jit
def _network(
    units: tuple[AbstractInContextMap, ...], count: int, mu, x, positions, has_reports
):
    arrays, rest = eqx.partition(units, eqx.is_array)
    moving, fixed = eqx.partition((mu, x), eqx.is_array)

    def block(state, row):
        mu, x = eqx.combine(state, fixed)
        mu, sums = reported_anew(mu) if has_reports else (mu, None)
        for gamma in eqx.combine(row, rest):
            mu, x = _layer(gamma, mu, x, positions)
        state = eqx.filter((without_reports(mu)[0], x), eqx.is_array)
        return state, () if sums is None else tuple(sums.reports)

    state, reports = jax.lax.scan(block, moving, arrays, count)
    return eqx.combine(state, fixed), reports


def _layer(gamma: AbstractInContextMap, mu, x, positions):
    # Absent tokens are carried along, and must not overflow on the way.
    mu = mu.without_harm() if isinstance(mu, TokenCloud) else mu
    return push_forward(gamma, mu), gamma(mu, x, positions=positions)


def _repetition(layers: Stacked, start: int, end: int):
    """Return the kinds that repeat themselves from a layer on, and for how long.

    Each kind is returned as one map, with its repetitions as a leading axis.
    """
    kinds = [kind for kind, _ in layers.places[start:end]]

    def repeats(period: int) -> int:
        count = 1
        while kinds[period * count :][:period] == kinds[:period]:
            count += 1
        return count

    periods = [p for p in range(1, len(kinds) // 2 + 1) if repeats(p) > 1]
    period = max(periods, key=lambda p: p * repeats(p), default=0)
    length = period * repeats(period) if period else 1
    units = tuple(
        layers.stacked_at(range(start + slot, start + length, period))
        for slot in range(period)
    )
    return units, length


def _keeps_shapes(units, mu, x, positions) -> bool:
    """Whether what goes through the layers is of one shape before and after."""

    def after():
        state = without_reports(mu)[0], x
        for unit in units:
            state = _layer(_row(unit, 0), *state, positions)
        return state

    return _kind(eqx.filter_eval_shape(after)) == _kind((without_reports(mu)[0], x))


def _is_looped(maps: Maps, at: PyTree) -> bool:
    """Whether to loop: not outside of compiled code, where errors name their place."""
    if isinstance(maps, Stacked):
        return True
    leaves = jax.tree.leaves((maps, at))
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return False
    is_known = _kind(without_reports(at)[0]) is not None
    return is_known and len(_groups(maps)) < len(maps)


def _groups(maps: Maps) -> list[list[int]]:
    """Return the indices of the maps of each kind."""
    groups: dict[Hashable, list[int]] = {}
    for index, gamma in enumerate(maps):
        kind = _kind(gamma)
        groups.setdefault(index if kind is None else kind, []).append(index)
    return list(groups.values())


def _kind(tree: PyTree) -> Hashable | None:
    """Return all but the numbers of a tree; `None` if that cannot be compared."""
    leaves, structure = jax.tree.flatten(tree)
    kind = (
        structure,
        tuple(
            (leaf.shape, leaf.dtype) if is_array(leaf) else (type(leaf), leaf)
            for leaf in leaves
        ),
    )
    try:
        hash(kind)
    except TypeError:
        return None
    return kind


def _stack(maps: Sequence[AbstractInContextMap]) -> AbstractInContextMap:
    def stack_leaves(*leaves):
        return jnp.stack(leaves) if eqx.is_array(leaves[0]) else leaves[0]

    return jax.tree.map(stack_leaves, *maps)


def _row(maps: PyTree, index) -> Any:
    """Return one of several maps that are kept as one, or some of them."""
    is_traced = isinstance(index, jax.core.Tracer)

    def row(leaf):
        if not eqx.is_array(leaf):
            return leaf
        if is_traced:
            return jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)
        return leaf[index]

    return jax.tree.map(row, maps)
