"""Where the tokens of a phase diagram start, and maps that are drawn for them."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import AbstractInContextMap
from meanformer.errors import (
    InvalidInput,
    as_float_array,
    as_integer,
    as_number,
    check,
    check_finite,
)
from meanformer.geometry import Sphere
from meanformer.observables.phases.options import Options
from meanformer.observables.phases.sphere_batches import gram_matrices, unit_tokens
from meanformer.observables.phases.systems import (
    AbstractSystem,
    MovedByMaps,
    reduced_tokens,
)
from meanformer.typing import Key

DRAWN_AT_ONCE = 64
Draw = Callable[[Key, Float[Array, ""]], AbstractInContextMap]


class Maps(NamedTuple):
    """Where random maps come from, and the depths at which each draw ends."""

    draw: Draw | None
    key: Key
    ends: list[float]

    def system(
        self, beta: float, indices: np.ndarray, layer: int, dtype: Any
    ) -> AbstractSystem:
        """Return the maps in force, one for each start."""
        key = jr.fold_in(self.key, layer)
        drawn = _drawn(self.draw, key, jnp.asarray(indices), jnp.asarray(beta, dtype))
        if not isinstance(drawn, AbstractInContextMap):
            raise InvalidInput(f"draw returned {drawn!r}, which is not a map.")
        return MovedByMaps(drawn)


@eqx.filter_jit
def _drawn(draw: Any, key: Key, indices: Array, beta: Array) -> Any:
    """Return what is drawn for several starts, stacked."""
    keys = jax.vmap(jr.fold_in, in_axes=(None, 0))(key, indices)
    return eqx.filter_vmap(lambda key: draw(key, beta))(keys)


def checked_maps(
    draw: Draw | None, redraw: float | None, options: Options, key: Key
) -> Maps:
    """Return where maps come from, or raise."""
    check(
        redraw is None or draw is not None,
        "redraw is given without draw; there is nothing to draw anew.",
    )
    check(
        draw is None or callable(draw),
        f"draw is {draw!r}; it must be a function of a key and beta.",
    )
    last = float(options.depths[-1])
    if redraw is None:
        return Maps(draw, key, [last])
    period = as_number("redraw", redraw)
    check(period > 0, f"redraw is {period}; it must be positive.")
    whole = math.ceil(last / period - 1e-9)
    return Maps(draw, key, [*(period * np.arange(1, whole)), last])


class Starts(NamedTuple):
    """Random or given starts, made some at a time."""

    make: Callable[[np.ndarray], Float[Array, "b n d"]]
    dimension: int
    count: int
    number: int

    def states(self, options: Options, *, is_drawn: bool) -> np.ndarray:
        """Return what moves: tokens, tokens in their span, or Gram matrices."""
        is_gram = options.integrates_gram(self.count, self.dimension)

        def state(indices):
            tokens = self.make(indices)
            if is_drawn:
                return tokens
            return _grams(tokens, tokens) if is_gram else reduced_tokens(tokens)

        # Some at a time: in high dimension all tokens would not fit into memory.
        firsts = np.arange(0, self.number, DRAWN_AT_ONCE)
        lasts = np.minimum(firsts + DRAWN_AT_ONCE, self.number)
        ranges = zip(firsts, lasts, strict=True)
        pieces = [np.asarray(state(np.arange(*ends))) for ends in ranges]
        return np.concatenate(pieces)


_grams = jax.jit(gram_matrices)


def checked_starts(
    dimension: Any, count: Any, starts: Any, dtype: Any, key: Key
) -> Starts:
    """Return where tokens start, or raise."""
    if np.ndim(starts) == 3:
        return _given(dimension, starts, dtype)
    check(
        dimension is not None,
        "dimension is missing; give it, or the starts themselves.",
    )
    dimension = as_integer("dimension", dimension, least=2)
    count = as_integer("count", count, least=2)
    number = as_integer("starts", starts, least=1)

    def make(indices):
        return _uniform(key, jnp.asarray(indices), (count, dimension), dtype)

    return Starts(make, dimension, count, number)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _uniform(key: Key, indices: Array, shape: tuple[int, int], dtype: Any) -> Array:
    """Return clouds uniform on the sphere; each index has a key of its own."""
    keys = jax.vmap(jr.fold_in, in_axes=(None, 0))(key, indices)
    return unit_tokens(jax.vmap(lambda key: jr.normal(key, shape, dtype))(keys))


def _given(dimension: Any, starts: Any, dtype: Any) -> Starts:
    array = as_float_array("starts", starts)
    check_finite("starts", array)
    number, count, own = array.shape
    check(
        number >= 1 and count >= 2 and own >= 2,
        f"starts has shape {array.shape}; it must hold clouds of at least two tokens "
        "in at least two dimensions.",
    )
    check(
        dimension in (None, own),
        f"dimension is {dimension}, but the starts have dimension {own}.",
    )
    Sphere().check(array.reshape(-1, own))
    array = unit_tokens(array.astype(dtype))
    return Starts(lambda indices: array[indices], own, count, number)
