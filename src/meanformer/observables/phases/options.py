"""What is asked of a phase diagram, checked."""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import (
    PrecisionWarning,
    as_integer,
    as_number,
    check,
    check_choice,
    warn,
)
from meanformer.observables.equiangular.equiangular import checked_kind
from meanformer.observables.phases.readers import (
    AbstractReader,
    ClosePairs,
    LinkedGroups,
    Rank,
)
from meanformer.observables.phases.stepping import Course
from meanformer.observables.phases.systems import AbstractSystem, Grams, Tokens
from meanformer.typing import ArrayLike

QUANTITIES = ("pairs", "clusters", "rank")
# Longest step where tokens are interpolated: a cubic then errs by 2e-4 of an e-folding.
LONGEST_FOR_RANK = 0.5
SMALLEST_EIGENVALUE = 1e-3
SMALLEST_SINGLE_GAP = 1e-4


class Options(NamedTuple):
    """Checked options."""

    betas: np.ndarray
    depths: np.ndarray
    is_softmax: bool
    quantity: str
    level: float
    threshold: float | None
    cap: int | None
    tolerance: float
    dtype: Any

    def integrates_gram(self, count: int, dimension: int) -> bool:
        """Whether Gram matrices move in place of tokens."""
        return self.quantity != "rank" and dimension >= count

    def recipe(self, beta: float, *, is_gram: bool = False) -> "Recipe":
        """Return what moves and what is read at this temperature."""
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
        """Return how to go on to a depth."""
        longest = LONGEST_FOR_RANK if self.quantity == "rank" else math.inf
        numbers = (self.depths, stop, self.tolerance, longest)
        return Course(*(jnp.asarray(number, self.dtype) for number in numbers))


class Recipe(eqx.Module):
    """What moves and what is read, for any number of tokens at each place.

    Attributes:
        beta: inverse temperature.
        bound: gap below which tokens are close, or smallest eigenvalue that counts.
        is_softmax: whether attention is normalised.
        is_gram: whether Gram matrices move in place of tokens.
        quantity: what is read.
        cap: largest rank that is told apart.
    """

    beta: Float[Array, ""]
    bound: Float[Array, ""]
    is_softmax: bool = eqx.field(static=True)
    is_gram: bool = eqx.field(static=True)
    quantity: str = eqx.field(static=True)
    cap: int | None = eqx.field(static=True)

    def system(self, numbers: Float[Array, "b n"]) -> AbstractSystem:
        """Return identity attention."""
        weights = numbers / jnp.sum(numbers, axis=1, keepdims=True)
        kind = Grams if self.is_gram else Tokens
        return kind(weights, self.beta, self.is_softmax)

    def reader(self, numbers: Float[Array, "b n"]) -> AbstractReader:
        """Return what is read."""
        if self.quantity == "rank":
            return Rank(self.bound, self.cap)
        if self.quantity == "pairs":
            return ClosePairs.of(self.bound, numbers)
        return LinkedGroups(self.bound)


def checked_options(
    betas: ArrayLike,
    depths: ArrayLike,
    *,
    kind: str,
    quantity: str,
    level: float,
    threshold: float | None,
    cap: int | None,
    tolerance: float,
    dtype: Any,
) -> Options:
    """Return the options, or raise."""
    is_softmax = checked_kind(kind) == "softmax"
    check_choice("quantity", quantity, QUANTITIES)
    dtype = _checked_dtype(dtype)
    level = _checked_level(level, dtype)
    betas = _checked_betas(betas, dtype, is_softmax)
    if threshold is not None:
        threshold = as_number("threshold", threshold)
        check(threshold > 0, f"threshold is {threshold}; it must be positive.")
    check(
        quantity != "clusters" or threshold is not None or bool((betas > 0).all()),
        "at beta = 0 there is no scale for clusters; give a threshold, an angle.",
    )
    if cap is not None:
        cap = as_integer("cap", cap, least=1)
    return Options(
        betas,
        _checked_depths(depths),
        is_softmax,
        quantity,
        level,
        threshold,
        cap,
        _checked_tolerance(tolerance, dtype),
        dtype,
    )


def _checked_dtype(dtype: Any) -> np.dtype:
    if dtype is None:
        return np.dtype(jnp.result_type(float))
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    check(
        found in (np.dtype("float32"), np.dtype("float64")),
        f"dtype is {dtype!r}; it must be float32 or float64.",
    )
    check(
        found == np.float32 or bool(jax.config.read("jax_enable_x64")),
        "dtype is float64 but JAX runs in 32 bits; call "
        'jax.config.update("jax_enable_x64", True) first.',
    )
    return np.dtype(dtype)


def _checked_tolerance(tolerance: float, dtype: np.dtype) -> float:
    value = as_number("tolerance", tolerance)
    least = 16 * float(np.finfo(dtype).eps)
    check(
        least <= value <= 0.1,
        f"tolerance is {value}; in {dtype} it must lie between {least:.1e} and 0.1.",
    )
    return value


def _checked_level(level: float, dtype: np.dtype) -> float:
    value = as_number("level", level)
    check(-1 < value < 1, f"level is {level}; it must lie between -1 and 1.")
    if dtype == np.float32 and 1 - value < SMALLEST_SINGLE_GAP:
        warn(
            f"level is {level}, and inner products of float32 carry errors of 1e-7 "
            "that are no longer small beside 1 - level; use dtype=float64.",
            PrecisionWarning,
        )
    return value


def _checked_betas(betas: ArrayLike, dtype: np.dtype, is_softmax: bool) -> np.ndarray:
    array = np.asarray(betas, np.float64)
    check(array.ndim == 1 and len(array) > 0, "betas must be a list of numbers.")
    check(
        bool(np.isfinite(array).all() and (array >= 0).all()),
        "betas must be finite and not negative.",
    )
    largest = 0.9 * math.log(float(np.finfo(dtype).max))
    check(
        is_softmax or bool((array <= largest).all()),
        f"betas reach {array.max():g}; velocities without normalisation grow like "
        f"exp(beta), which in {dtype} ends at beta = {largest:.0f}.",
    )
    return array


def _checked_depths(depths: ArrayLike) -> np.ndarray:
    array = np.asarray(depths, np.float64)
    check(array.ndim == 1 and len(array) > 0, "depths must be a list of numbers.")
    is_good = np.isfinite(array).all() and array[0] >= 0 and (np.diff(array) > 0).all()
    check(bool(is_good and array[-1] > 0), "depths must increase, from 0 or later.")
    return array
