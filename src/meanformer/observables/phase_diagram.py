"""How far tokens have clustered, over depth and temperature, for random starts."""

import functools
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
    PrecisionWarning,
    Unsupported,
    as_float_array,
    as_integer,
    as_number,
    check,
    check_finite,
    warn,
)
from meanformer.flows.recorder import AbstractProgress, bar_for
from meanformer.geometry import Sphere
from meanformer.numerics.sphere_batches import gram_matrices, unit_tokens
from meanformer.observables.equiangular import checked_kind
from meanformer.observables.phase_readers import (
    AbstractReader,
    ClosePairs,
    LinkedGroups,
    Rank,
)
from meanformer.observables.phase_systems import (
    AbstractSystem,
    Grams,
    MovedByMaps,
    Tokens,
    reduced_tokens,
)
from meanformer.observables.phase_walk import (
    MOST_STEPS,
    Course,
    Walk,
    begun,
    continued,
    renewed,
)
from meanformer.typing import ArrayLike, Key

QUANTITIES = ("pairs", "clusters", "rank")
# Longest step where tokens are interpolated: a cubic then errs by 2e-4 of an e-folding.
LONGEST_FOR_RANK = 0.5
SMALLEST_SINGLE_GAP = 1e-4
DRAWN_AT_ONCE = 64
Draw = Callable[[Key, Float[Array, ""]], AbstractInContextMap]


class PhaseDiagram(eqx.Module):
    r"""A number between one cluster and none, over temperature and depth.

    Attributes:
        betas: inverse temperatures.
        depths: depths.
        mean: mean of the quantity over the starts, one row per temperature.
        standard_error: standard error of that mean; zero for a single start.
        median: median over the starts.
        quantity: `"pairs"`, `"clusters"` or `"rank"`.
        kind: `"softmax"`, `"unnormalised"`, or `"drawn"` for maps of one's own.
        dimension: dimension of the tokens.
        count: number of tokens.
        starts: number of starts.
        level: inner product above which a pair counts as clustered.
        tolerance: error per step of the solver.
        steps: accepted steps, mean over the batches, for each temperature.
        rejected: rejected steps, likewise.
    """

    betas: Float[np.ndarray, " m"]
    depths: Float[np.ndarray, " t"]
    mean: Float[np.ndarray, "m t"]
    standard_error: Float[np.ndarray, "m t"]
    median: Float[np.ndarray, "m t"]
    quantity: str = eqx.field(static=True)
    kind: str = eqx.field(static=True)
    dimension: int = eqx.field(static=True)
    count: int = eqx.field(static=True)
    starts: int = eqx.field(static=True)
    level: float = eqx.field(static=True)
    tolerance: float = eqx.field(static=True)
    steps: Float[np.ndarray, " m"]
    rejected: Float[np.ndarray, " m"]

    def passage(self, value: float = 0.5) -> Float[np.ndarray, " m"]:
        """Depths at which the mean first reaches a value, for each temperature.

        Linear between the depths of the diagram; $-1$ where it is not reached.
        """
        reached = self.mean >= value
        first = np.argmax(reached, axis=1)
        row = np.arange(len(self.betas))
        before = np.maximum(first - 1, 0)
        low, high = self.mean[row, before], self.mean[row, first]
        share = np.where(
            high > low, (value - low) / np.where(high > low, high - low, 1), 1
        )
        depth = self.depths[before] + share * (self.depths[first] - self.depths[before])
        return np.where(reached.any(axis=1), depth, -1.0)


def phase_diagram(
    *,
    betas: ArrayLike,
    depths: ArrayLike,
    dimension: int | None = None,
    count: int = 32,
    starts: int | Float[Array, "b n d"] | Float[np.ndarray, "b n d"] = 2048,
    kind: str = "softmax",
    quantity: str = "pairs",
    level: float = 0.999,
    threshold: float | None = None,
    cap: int | None = None,
    draw: Draw | None = None,
    redraw: float | None = None,
    tolerance: float = 1e-4,
    dtype: Any = None,
    batch_size: int = 32,
    workers: int | None = None,
    progress: bool | AbstractProgress = False,
    key: Key,
) -> PhaseDiagram:
    r"""Follow random tokens on the sphere, and tell how clustered they are.

    Starts are uniform on the sphere, and the same for all temperatures. Tokens of equal
    weight move by identity attention, or by maps that are drawn at random. At every
    depth one number is read from each start:

    - `"pairs"`: the fraction of pairs $i < j$ with $\langle x_i, x_j\rangle$ above
      `level`;
    - `"clusters"`: the number of groups linked by steps of at most `threshold`, an
      angle, $\tfrac12\beta^{-1/2}$ by default;
    - `"rank"`: the number of eigenvalues of the Gram matrix above `threshold`,
      $10^{-3}$ by default, at most `cap`.

    Attention sees inner products only. So if there are more dimensions than tokens, the
    Gram matrix itself is integrated, and the dimension costs nothing. Batches of starts
    share an adaptive step (Tsitouras' method of order 5); between steps the gap
    $1 - \langle x_i, x_j\rangle$ is interpolated in its logarithm. A batch ends as soon
    as all its pairs are clustered: the smallest inner product, once it is not negative,
    never decreases, since for the pair $(i, j)$ that attains it
    $\dot G_{ij} = \sum_k A_{ik}(G_{kj} - G_{ik}G_{ij}) + \sum_k A_{jk}(G_{ki} -
    G_{jk}G_{ij}) \ge 0$ term by term.

    In single precision inner products carry errors of $10^{-7}$: enough for the level
    0.999, and a warning is given for levels within $10^{-4}$ of one.

    Args:
        betas: inverse temperatures, not negative.
        depths: increasing depths, from zero or later.
        dimension: dimension $d \ge 2$ of the tokens; that of given starts by default.
        count: number of tokens.
        starts: number of random starts; or the starts, unit vectors.
        kind: `"softmax"` or `"unnormalised"`.
        quantity: what is read.
        level: inner product above which a pair counts.
        threshold: angle that links tokens, or smallest eigenvalue that counts.
        cap: largest rank that is told apart.
        draw: function of a key and $\beta$ that returns a map of $\mathbb{R}^d$, in
            place of identity attention; each start has its own, the same for all
            temperatures if the function draws before it looks at $\beta$.
        redraw: depth after which maps are drawn anew; `None` keeps them.
        tolerance: root mean square error of the tokens of a start, for each step.
        dtype: `"float32"` or `"float64"`; by default that of JAX.
        batch_size: starts that share a step.
        workers: threads; by default one for each core.
        progress: show a progress bar on standard error; or an object to report to.
        key: random key, for the starts and for the maps.

    Returns:
        The diagram. Cost: some hundred evaluations of $O(n^2\min(n, d))$ for each
        start and temperature; memory for one temperature, and the starts.
    """
    options = _Options.of(
        betas, depths, kind, quantity, level, threshold, cap, tolerance, dtype
    )
    key_starts, key_maps = jr.split(key)
    maps = _Maps.of(draw, redraw, options, key_maps)
    clouds = _starts(dimension, count, starts, options.dtype, key_starts)
    states = _states(clouds, options, is_drawn=draw is not None)
    batches = _batches(states, as_integer("batch_size", batch_size, least=1))
    jobs = [(beta, *batch) for beta in options.betas for batch in batches]
    bar = bar_for(progress)
    rows, counts, found = [], [], []
    with bar:
        walks = _in_threads(lambda job: _walk(options, maps, *job), jobs, workers)
        for done, (walk, (_, _, batch)) in enumerate(zip(walks, jobs, strict=True)):
            found.append(np.asarray(walk.values[: len(batch)], np.float64))
            counts.append((int(walk.steps), int(walk.rejected)))
            bar.update(done + 1, len(jobs))
            if len(found) == len(batches):
                rows.append(_summary(np.concatenate(found)))
                found = []
    solver = np.reshape(counts, (len(options.betas), -1, 2)).mean(axis=1)
    mean, error, median = np.stack(rows, axis=1)
    return PhaseDiagram(
        betas=options.betas,
        depths=np.asarray(options.depths, np.float64),
        mean=mean,
        standard_error=error,
        median=median,
        quantity=quantity,
        kind=kind if draw is None else "drawn",
        dimension=clouds.dimension,
        count=clouds.count,
        starts=clouds.starts,
        level=options.level,
        tolerance=options.tolerance,
        steps=solver[:, 0],
        rejected=solver[:, 1],
    )


class _Options(NamedTuple):
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

    @classmethod
    def of(
        cls, betas, depths, kind, quantity, level, threshold, cap, tolerance, dtype
    ) -> "_Options":
        is_softmax = checked_kind(kind) == "softmax"
        check(
            quantity in QUANTITIES,
            f"quantity is {quantity!r}; it must be one of {QUANTITIES}.",
        )
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
        tolerance = as_number("tolerance", tolerance)
        least = 16 * float(np.finfo(dtype).eps)
        check(
            least <= tolerance <= 0.1,
            f"tolerance is {tolerance}; in {dtype} it must lie between {least:.1e} and "
            "0.1.",
        )
        depths = _checked_depths(depths)
        return cls(
            betas, depths, is_softmax, quantity, level, threshold, cap, tolerance, dtype
        )

    def reader(self, beta: float, count: int) -> AbstractReader:
        """Return what is read at this temperature."""
        if self.quantity == "rank":
            smallest = 1e-3 if self.threshold is None else self.threshold
            return Rank(jnp.asarray(smallest, self.dtype), self.cap)
        if self.quantity == "pairs":
            return ClosePairs(jnp.asarray(1 - self.level, self.dtype), count)
        angle = 0.5 / math.sqrt(beta) if self.threshold is None else self.threshold
        gap = 2 * math.sin(min(angle, math.pi) / 2) ** 2
        return LinkedGroups(jnp.asarray(gap, self.dtype))

    def system(self, beta: float, state: Array) -> AbstractSystem:
        """Return identity attention at this temperature."""
        is_gram = _integrates_gram(self, state.shape[1], state.shape[2])
        kind = Grams if is_gram else Tokens
        return kind(jnp.asarray(beta, self.dtype), self.is_softmax)

    def course(self, stop: float) -> Course:
        """Return how to go on to a depth."""
        longest = LONGEST_FOR_RANK if self.quantity == "rank" else math.inf
        numbers = (self.depths, stop, self.tolerance, longest)
        return Course(*(jnp.asarray(number, self.dtype) for number in numbers))


class _Maps(NamedTuple):
    """Where random maps come from; `draw` is `None` for identity attention."""

    draw: Draw | None
    key: Key
    ends: list[float]

    @classmethod
    def of(cls, draw, redraw, options: _Options, key: Key) -> "_Maps":
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
            return cls(draw, key, [last])
        period = as_number("redraw", redraw)
        check(period > 0, f"redraw is {period}; it must be positive.")
        whole = math.ceil(last / period - 1e-9)
        return cls(draw, key, [*(period * np.arange(1, whole)), last])

    def system(
        self, beta: float, indices: np.ndarray, layer: int, dtype
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


class _Clouds(NamedTuple):
    """Random or given starts, made batch by batch."""

    make: Callable[[np.ndarray], Float[Array, "b n d"]]
    dimension: int
    count: int
    starts: int


def _starts(dimension, count, starts, dtype, key: Key) -> _Clouds:
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

    return _Clouds(make, dimension, count, number)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _uniform(key: Key, indices: Array, shape: tuple[int, int], dtype) -> Array:
    """Return clouds uniform on the sphere; each index has a key of its own."""
    keys = jax.vmap(jr.fold_in, in_axes=(None, 0))(key, indices)
    return unit_tokens(jax.vmap(lambda key: jr.normal(key, shape, dtype))(keys))


def _given(dimension, starts, dtype) -> _Clouds:
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
    return _Clouds(lambda indices: array[indices], own, count, number)


def _integrates_gram(options: _Options, count: int, dimension: int) -> bool:
    return options.quantity != "rank" and dimension >= count


def _states(clouds: _Clouds, options: _Options, *, is_drawn: bool) -> Array:
    """Return what moves, for all starts: tokens, in their span, or Gram matrices."""
    is_gram = _integrates_gram(options, clouds.count, clouds.dimension)

    def state(indices):
        tokens = clouds.make(indices)
        if is_drawn:
            return tokens
        return _gram(tokens) if is_gram else reduced_tokens(tokens)

    pieces = np.arange(0, clouds.starts, DRAWN_AT_ONCE)
    ends = np.minimum(pieces + DRAWN_AT_ONCE, clouds.starts)
    ranges = [np.arange(*ends) for ends in zip(pieces, ends, strict=True)]
    return jnp.concatenate([state(indices) for indices in ranges])


@jax.jit
def _gram(tokens: Float[Array, "b n d"]) -> Float[Array, "b n n"]:
    return gram_matrices(tokens, tokens)


def _batches(states: Array, size: int) -> list[tuple[Array, np.ndarray]]:
    """Return states and indices of batches of one size; the last is filled up."""
    batches = []
    for first in range(0, len(states), size):
        indices = np.arange(first, min(first + size, len(states)))
        filled = np.resize(indices, min(size, len(states)))
        batches.append((states[filled], indices))
    return batches


def _walk(
    options: _Options, maps: _Maps, beta: float, state: Array, indices: np.ndarray
) -> Walk:
    """Follow one batch at one temperature, through all layers of maps."""
    reader, walk = options.reader(beta, state.shape[1]), None
    filled = np.resize(indices, len(state))
    for layer, stop in enumerate(maps.ends):
        if maps.draw is None:
            system = options.system(beta, state)
        else:
            system = maps.system(beta, filled, layer, options.dtype)
        course = options.course(stop)
        if walk is None:
            walk = _begun(system, reader, state, course)
        else:
            walk = _renewed(system, reader, walk)
        walk = _continued(system, reader, walk, course)
    walk = jax.block_until_ready(walk)
    if int(walk.index) < len(options.depths):
        raise Unsupported(
            f"more than {MOST_STEPS} steps at beta = {beta:g}, depth "
            f"{float(walk.depth):.3g}; raise the tolerance, or end earlier."
        )
    return walk


_begun = eqx.filter_jit(begun)
_renewed = eqx.filter_jit(renewed)
_continued = eqx.filter_jit(continued)


def _in_threads(function, jobs: list, workers: int | None) -> Iterator:
    """Map over jobs in order, on several threads: compiled code runs side by side."""
    if workers is None:
        workers = (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        )
    workers = as_integer("workers", workers, least=1)
    if workers == 1 or len(jobs) == 1:
        yield from map(function, jobs)
        return
    # The first job compiles; the others would wait for it, or compile once more.
    yield function(jobs[0])
    pool = ThreadPoolExecutor(workers)
    try:
        yield from pool.map(function, jobs[1:])
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _summary(values: Float[np.ndarray, "b t"]) -> tuple[np.ndarray, ...]:
    number = len(values)
    spread = values.std(axis=0, ddof=1) if number > 1 else np.zeros(values.shape[1])
    return values.mean(axis=0), spread / math.sqrt(number), np.median(values, axis=0)


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
