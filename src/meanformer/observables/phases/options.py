"""Checked options of a phase diagram, its starts, and its random maps."""

import dataclasses
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

from meanformer import errors
from meanformer.attention import AbstractInContextMap
from meanformer.errors import as_integer, as_number, check, check_kind
from meanformer.geometry import Sphere
from meanformer.observables.equiangular.times import checked_kind
from meanformer.observables.phases import motions, quantities
from meanformer.observables.phases.stepping import Course
from meanformer.typing import ArrayLike, Key

QUANTITIES = ("pairs", "clusters", "rank")
# Longest step where tokens are interpolated: a cubic then errs by 2e-4 of an e-folding.
LONGEST_FOR_RANK = 0.5
SMALLEST_EIGENVALUE = 1e-3
SMALLEST_SINGLE_GAP = 1e-4
DRAWN_AT_ONCE = 64

_grams = jax.jit(motions.gram_matrices)

Draw = Callable[[Key, Float[Array, ""]], AbstractInContextMap]


@dataclasses.dataclass
class Options:
    """Options of a phase diagram, checked."""

    betas: Any
    depths: Any
    kind: str
    quantity: str
    level: float
    threshold: float | None
    cap: int | None
    tolerance: float
    dtype: Any

    def __post_init__(self) -> None:
        """Check the options."""
        self.is_softmax = checked_kind(self.kind) == "softmax"
        errors.check_choice("quantity", self.quantity, QUANTITIES)
        self.dtype = _checked_dtype(self.dtype)
        self._check_level()
        self._check_betas()
        if self.threshold is not None:
            self.threshold = as_number("threshold", self.threshold, "positive", above=0)
        has_scale = self.threshold is not None or bool((self.betas > 0).all())
        check(
            self.quantity != "clusters" or has_scale,
            "at beta = 0 there is no scale for clusters; give a threshold, an angle.",
        )
        if self.cap is not None:
            self.cap = as_integer("cap", self.cap, least=1)
        least = 16 * float(np.finfo(self.dtype).eps)
        allowed = f"between {least:.1e} and 0.1 in {self.dtype}"
        self.tolerance = as_number("tolerance", self.tolerance, allowed, least=least)
        given = self.tolerance
        check(given <= 0.1, f"tolerance is {given}; it must be {allowed}.")
        self.depths = _list_of_numbers("depths", self.depths)
        is_increasing = bool((np.diff(self.depths) > 0).all())
        check(
            is_increasing and self.depths[0] >= 0 and 0 < self.depths[-1] < np.inf,
            "depths must increase, from 0 or later.",
        )

    def _check_level(self) -> None:
        allowed = "between -1 and 1"
        self.level = as_number("level", self.level, allowed, above=-1, below=1)
        if self.dtype == np.float32 and 1 - self.level < SMALLEST_SINGLE_GAP:
            errors.warn(
                f"level is {self.level}, and inner products of float32 carry errors of "
                "1e-7 that are no longer small beside 1 - level; use dtype=float64.",
                errors.PrecisionWarning,
            )

    def _check_betas(self) -> None:
        betas = self.betas = _list_of_numbers("betas", self.betas)
        check(
            bool(np.isfinite(betas).all() and (betas >= 0).all()),
            "betas must be finite and not negative.",
        )
        largest = 0.9 * math.log(float(np.finfo(self.dtype).max))
        check(
            self.is_softmax or bool((betas <= largest).all()),
            f"betas reach {betas.max():g}; velocities without normalisation grow like "
            f"exp(beta), which in {self.dtype} ends at beta = {largest:.0f}.",
        )

    def starting_states(
        self, dimension: Any, count: Any, starts: Any, key: Key, *, is_drawn: bool
    ) -> tuple[Float[np.ndarray, "b n c"], int]:
        """Return what moves, and the dimension of the tokens, or raise.

        What moves are tokens for maps that are drawn, otherwise tokens in their span,
        or Gram matrices.
        """
        if np.ndim(starts) == 3:
            tokens = _given_starts(dimension, starts, self.dtype)
            number, count, dimension = tokens.shape
            make = tokens.__getitem__
        else:
            check(
                dimension is not None,
                "dimension is missing; give it, or the starts themselves.",
            )
            dimension = as_integer("dimension", dimension, least=2)
            count = as_integer("count", count, least=2)
            number = as_integer("starts", starts, least=1)
            make = functools.partial(_uniform, key, (count, dimension), self.dtype)
        is_gram = self.integrates_gram(count, dimension)

        def states(indices: np.ndarray) -> Array:
            tokens = make(indices)
            if is_drawn:
                return tokens
            return _grams(tokens, tokens) if is_gram else motions.reduced_tokens(tokens)

        # Some at a time: in high dimension all tokens would not fit into memory.
        firsts = np.arange(DRAWN_AT_ONCE, number, DRAWN_AT_ONCE)
        parts = np.split(np.arange(number), firsts)
        return np.concatenate([np.asarray(states(part)) for part in parts]), dimension

    def random_maps(
        self, draw: Draw | None, redraw: float | None, key: Key
    ) -> "RandomMaps | None":
        """Return where maps come from, if it is not identity attention, or raise."""
        if draw is None:
            check(
                redraw is None,
                "redraw is given without draw; there is nothing to draw anew.",
            )
            return None
        check_kind("draw", draw, Callable, "a function of a key and beta")
        last = float(self.depths[-1])
        if redraw is None:
            return RandomMaps(draw, key, [last])
        period = as_number("redraw", redraw, "positive", above=0)
        whole = math.ceil(last / period - 1e-9)
        return RandomMaps(draw, key, [*(period * np.arange(1, whole)), last])

    def integrates_gram(self, count: int, dimension: int) -> bool:
        """Whether Gram matrices move in place of tokens."""
        return self.quantity != "rank" and dimension >= count

    def recipe(self, beta: float, *, is_gram: bool = False) -> "Recipe":
        """Return the motion and the quantity at this temperature."""
        given = self.threshold
        if self.quantity == "rank":
            bound = SMALLEST_EIGENVALUE if given is None else given
        elif self.quantity == "pairs":
            bound = 1 - self.level
        else:
            angle = 0.5 / math.sqrt(beta) if given is None else given
            bound = 2 * math.sin(min(angle, math.pi) / 2) ** 2
        beta_, bound_ = (jnp.asarray(number, self.dtype) for number in (beta, bound))
        return Recipe(beta_, bound_, self.is_softmax, is_gram, self.quantity, self.cap)

    def course(self, stop: float) -> Course:
        """Return the course up to a depth."""
        longest = LONGEST_FOR_RANK if self.quantity == "rank" else math.inf
        numbers = (self.depths, stop, self.tolerance, longest)
        return Course(*(jnp.asarray(number, self.dtype) for number in numbers))


class Recipe(eqx.Module):
    """The motion and the quantity of a diagram, for clouds with joined tokens."""

    beta: Float[Array, ""]  # inverse temperature
    # Gap below which tokens are close, or smallest eigenvalue that counts.
    bound: Float[Array, ""]
    is_softmax: bool = eqx.field(static=True)  # whether attention is normalised
    # Whether Gram matrices move in place of tokens.
    is_gram: bool = eqx.field(static=True)
    quantity: str = eqx.field(static=True)  # what is read
    cap: int | None = eqx.field(static=True)  # largest rank that is told apart

    def motion_of(self, numbers: Float[Array, "b n"]) -> motions.IdentityAttention:
        """Return identity attention."""
        weights = numbers / jnp.sum(numbers, axis=1, keepdims=True)
        return motions.IdentityAttention(
            weights, self.beta, self.is_softmax, self.is_gram
        )

    def quantity_of(self, numbers: Float[Array, "b n"]) -> quantities.AbstractQuantity:
        """Return what is read."""
        if self.quantity == "rank":
            return quantities.Rank(self.bound, self.cap)
        if self.quantity == "pairs":
            return quantities.ClosePairs.of(self.bound, numbers)
        return quantities.LinkedGroups(self.bound)


def _checked_dtype(dtype: Any) -> np.dtype:
    try:
        found = np.dtype(jnp.result_type(float) if dtype is None else dtype)
    except TypeError:
        found = np.dtype(object)
    check(
        found in (np.float32, np.float64),
        f"dtype is {dtype!r}; it must be float32 or float64.",
    )
    check(
        found == np.float32 or bool(jax.config.read("jax_enable_x64")),
        "dtype is float64 but JAX runs in 32 bits; call "
        'jax.config.update("jax_enable_x64", True) first.',
    )
    return found


def _list_of_numbers(name: str, values: ArrayLike) -> np.ndarray:
    array = np.asarray(values, np.float64)
    check(array.ndim == 1 and len(array) > 0, f"{name} must be a list of numbers.")
    return array


@functools.partial(jax.jit, static_argnums=(1, 2))
def _uniform(key: Key, shape: tuple[int, int], dtype: Any, indices: Array) -> Array:
    """Return clouds uniform on the sphere; each index has a key of its own."""
    keys = jax.vmap(jr.fold_in, in_axes=(None, 0))(key, indices)
    return motions.unit_tokens(jax.vmap(lambda key: jr.normal(key, shape, dtype))(keys))


def _given_starts(dimension: Any, starts: Any, dtype: Any) -> Float[Array, "b n d"]:
    array = errors.as_finite_array("starts", starts, (None, None, None))
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
    return motions.unit_tokens(array.astype(dtype))


class RandomMaps(NamedTuple):
    """Where maps come from, and the depths at which each draw ends."""

    draw: Draw
    key: Key
    ends: list[float]

    def motion(
        self, beta: float, indices: np.ndarray, layer: int, dtype: Any
    ) -> motions.MapPerCloud:
        """Return the maps in force, one for each start."""
        key = jr.fold_in(self.key, layer)
        drawn = _drawn(self.draw, key, jnp.asarray(indices), jnp.asarray(beta, dtype))
        check(
            isinstance(drawn, AbstractInContextMap),
            f"draw returned {drawn!r}, which is not a map.",
        )
        return motions.MapPerCloud(drawn)


@eqx.filter_jit
def _drawn(draw: Any, key: Key, indices: Array, beta: Array) -> Any:
    """Return what is drawn for several starts, stacked."""
    keys = jax.vmap(jr.fold_in, in_axes=(None, 0))(key, indices)
    return eqx.filter_vmap(lambda key: draw(key, beta))(keys)
