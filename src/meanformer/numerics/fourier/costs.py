"""What sums cost on this machine: a model of few numbers, measured once and kept."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.random as jr

from meanformer.files import keep_numbers, kept_numbers
from meanformer.numerics.fourier.frames import frames_of
from meanformer.numerics.fourier.level_sums import level_sum
from meanformer.numerics.fourier.levels import (
    GAUSSIAN,
    LARGEST_DIMENSION,
    Level,
    kernel_width,
    working_dtype,
)
from meanformer.numerics.fourier.softmax import SAMPLE
from meanformer.numerics.pair_sums.pairs import Pairs
from meanformer.numerics.pair_sums.softmax import softmax_sum

KEPT = "costs"
REPEATS = 3


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds for the parts of a sum; the defaults are those of two recent cores.

    Attributes:
        pair: one exponential and its share of the sums.
        pair_product: one multiplication and addition for a pair.
        point: spreading one point to one node of the grid, by dimension.
        mode: the fast Fourier transform, by mode and binary digit of their number.
    """

    pair: float = 6e-10
    pair_product: float = 5e-11
    point_1: float = 4e-9
    point_2: float = 1.2e-9
    point_3: float = 8e-10
    mode: float = 1e-9

    def exact(self, queries: int, tokens: int, dimension: int, columns: int) -> float:
        """Predict the seconds of an exact sum."""
        products = dimension + columns
        return queries * tokens * (self.pair + products * self.pair_product)

    def fast(
        self, level: Level, queries: int, tokens: int, dimension: int, columns: int
    ) -> float:
        """Predict the seconds of a sum at a level, its sample included."""
        axes = dimension if level.kind == GAUSSIAN else 1
        nodes = kernel_width(level.accuracy) ** axes
        point = getattr(self, f"point_{axes}") * nodes
        fine = (2 * level.modes) ** axes
        transform = self.mode * fine * math.log2(fine)
        complex_columns = -(-columns // 2)
        sampled = self.exact(min(SAMPLE, queries), tokens, dimension, columns)
        return sampled + complex_columns * ((queries + tokens) * point + 2 * transform)


def costs() -> Costs:
    """Return what was measured on this machine, or the defaults."""
    return _kept(jax.default_backend())


def measured_costs() -> Costs:
    """Return what was measured on this machine, measuring it the first time."""
    return _measured(jax.default_backend())


@functools.cache
def _kept(backend: str) -> Costs:
    known = kept_numbers(f"{KEPT}-{backend}")
    names = [field.name for field in dataclasses.fields(Costs)]
    if sorted(known) != sorted(names) or min(known.values()) <= 0:
        return Costs()
    return Costs(**known)


@functools.cache
def _measured(backend: str) -> Costs:
    known = _kept(backend)
    if known != Costs():
        return known
    with jax.ensure_compile_time_eval():
        found = measure()
    keep_numbers(f"{KEPT}-{backend}", dataclasses.asdict(found))
    _kept.cache_clear()
    return found


def measure() -> Costs:
    """Time small sums; takes a few seconds, nearly all of them to compile."""
    narrow, wide = (_exact_pair(columns) for columns in (3, 19))
    # On a busy machine the difference of two timings may be anything.
    product = min(max((wide - narrow) / 16, narrow / 256), narrow / 12)
    points = {f"point_{k}": _point(k) for k in range(1, LARGEST_DIMENSION + 1)}
    return Costs(narrow - 6 * product, product, mode=_mode(), **points)


def _exact_pair(columns: int, count: int = 2048) -> float:
    pairs, values = _cloud(count, 3, columns - 1)
    exact = functools.partial(softmax_sum, block_size="auto")
    return _seconds(exact, pairs, values) / count**2


def _point(dimension: int, count: int = 20_000) -> float:
    level = Level(GAUSSIAN, 32, 1e-9)
    seconds = _seconds(_at_level(level), *_cloud(count, dimension, 1))
    return seconds / (2 * count * kernel_width(level.accuracy) ** dimension)


def _mode(count: int = 64) -> float:
    level = Level(GAUSSIAN, 64, 1e-3)
    fine = (2 * level.modes) ** 3
    return _seconds(_at_level(level), *_cloud(count, 3, 1)) / (
        2 * fine * math.log2(fine)
    )


def _at_level(level: Level) -> Callable:
    @jax.jit
    def summed(pairs, values):
        present = pairs.weights > 0
        frame = frames_of(pairs, present)[level.kind]
        return level_sum(frame, pairs, values, level, present)

    return summed


def _cloud(count: int, dimension: int, columns: int) -> tuple[Pairs, jax.Array]:
    dtype = working_dtype()
    points = jr.uniform(jr.key(0), (count, dimension), dtype, -1, 1)
    weights = jnp.full(count, 1 / count, dtype)
    return Pairs(points, points, weights), jnp.ones((count, columns), dtype)


def _seconds(function: Callable, *arguments) -> float:
    """Return the least of a few timings, the first call left out."""
    jax.block_until_ready(function(*arguments))
    found = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        found.append(time.perf_counter() - start)
    return min(found)
