r"""Log-mass and mean by fast transforms, never silently inaccurate.

A transform has an *absolute* error: its accuracy $\varepsilon$ times the sum of all
masses $\sum_j w_j e^{t_j}$. A query far from all tokens finds a tiny mass there, and
the error relative to it is larger by the amplification
$$A_i = \sum_j w_j e^{t_j} \Big/ \sum_j w_j e^{t_j} G(a_i - z_j).$$

So a sum takes four steps. A random sample of queries is summed exactly: its
amplifications choose the level, or tell that none will do. All queries are summed at
that level, and each gets its bound, $4\varepsilon A_i$ and rounding, from its own
mass. Where the bound is above the tolerance a finer level is tried, and the few queries
that are left are summed exactly; if they are many, all are. Last, the sample is
compared with its exact sums, which catches everything the bound has not foreseen.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from meanformer.numerics.batching import all_in_batch, any_in_batch
from meanformer.numerics.fourier.derivative import with_derivative
from meanformer.numerics.fourier.frames import AbstractFrame, frames_of
from meanformer.numerics.fourier.level_sums import (
    MassAndMean,
    level_sum,
    middle_and_width,
    own_error,
    sum_distance,
    token_masses,
)
from meanformer.numerics.fourier.levels import (
    ERROR,
    Devices,
    Ladder,
    Level,
    working_dtype,
)
from meanformer.numerics.fourier.report import (
    MODES,
    NONE,
    RANGE,
    REASONS,
    WRONG,
    SumReport,
)
from meanformer.numerics.fourier.rows import (
    Decisions,
    exactly,
    queries_of,
    replaced_exactly,
    rows,
)
from meanformer.numerics.pairs import Pairs
from meanformer.numerics.precision import cast

SAMPLE = 16
# Queries that are summed exactly one by one, before all of them are.
LARGEST_PATCH = 256
# If more than this multiple of them is foreseen, the level is not tried at all.
HOPELESS = 8


class Sampled(NamedTuple):
    """A random sample of the queries and their exact sums."""

    index: Int[Array, " s"]
    result: MassAndMean


class Attempt(NamedTuple):
    """The sums at a level and the bounds on their errors."""

    level: Int[Array, ""]
    result: MassAndMean
    bounds: Float[Array, " m"]


def fourier_softmax(
    pairs: Pairs, values: Float[Array, "n v"], ladder: Ladder
) -> tuple[MassAndMean, SumReport]:
    """Log-mass and mean; see `AbstractPairSums.softmax`. There must be no mask."""
    dtype = jnp.result_type(*jax.tree.leaves((pairs, values)))
    wide = cast((pairs, values), working_dtype())
    result, report = differentiable_sum(ladder, *wide)
    return cast(result, dtype), report


@partial(jax.jit, static_argnums=0)
def differentiable_sum(
    ladder: Ladder, pairs: Pairs, values: Float[Array, "n v"]
) -> tuple[MassAndMean, SumReport]:
    """Sum and report; decisions are constant for differentiation."""
    fixed = lax.stop_gradient((pairs, values))
    found, decisions, report = checked_sum(ladder, *fixed)
    return with_derivative(ladder.levels, found, decisions, pairs, values), report


def checked_sum(
    ladder: Ladder, pairs: Pairs, values: Float[Array, "n v"]
) -> tuple[MassAndMean, Decisions, SumReport]:
    """Sum by the cheapest level that is accurate enough, and say which it was."""
    levels, tolerance, devices = ladder.levels, ladder.tolerance, ladder.devices
    frames = frames_of(pairs, pairs.weights > 0)
    sampled = draw_sample(pairs, values, devices)
    allowed, foreseen = allowed_levels(*ladder, frames, pairs, sampled)
    attempt = best_attempt(levels, allowed, frames, pairs, values, tolerance)

    patch, is_patched = worst_queries(attempt.bounds, tolerance)
    decisions = Decisions(attempt.level, patch, is_patched)
    result = replaced_exactly(attempt.result, decisions, pairs, values, devices)

    width = middle_and_width(values, pairs.weights > 0)[1]
    observed = sum_distance(rows(result, sampled.index), sampled.result, width)
    is_exact = attempt.level == len(levels)
    is_wrong = any_in_batch(~is_exact & ~(observed <= tolerance))
    result = lax.cond(is_wrong, lambda: exactly(pairs, values, devices), lambda: result)

    reason = jnp.where(is_wrong, WRONG, jnp.where(allowed.any(), RANGE, foreseen))
    is_exact |= is_wrong
    decisions = Decisions(
        jnp.where(is_exact, len(levels), attempt.level),
        patch,
        decisions.is_patched & ~is_exact,
    )
    certain = jnp.where(attempt.bounds > tolerance, 0, attempt.bounds).max()
    report = SumReport(
        decisions.level,
        jnp.where(is_exact, 0, certain),
        jnp.where(jnp.isfinite(observed), observed, jnp.finfo(observed.dtype).max),
        decisions.is_patched.sum(),
        jnp.where(is_exact, reason, NONE),
    )
    return result, decisions, report


def worst_queries(
    bounds: Float[Array, " m"], tolerance: float
) -> tuple[Int[Array, " p"], Bool[Array, " p"]]:
    """Return queries with the largest bounds, and which are above the tolerance.

    If none is, any will do, and the bounds need not be sorted.
    """
    count = min(len(bounds), LARGEST_PATCH)

    def largest() -> tuple[Array, Array]:
        top, index = lax.top_k(bounds, count)
        return index, top > tolerance

    def no_matter() -> tuple[Array, Array]:
        return jnp.arange(count, dtype=jnp.int32), jnp.zeros(count, bool)

    return lax.cond(any_in_batch((bounds > tolerance).any()), largest, no_matter)


@partial(jax.jit, static_argnames="ladder")
def _first_allowed(pairs, values, ladder):
    frames = frames_of(pairs, pairs.weights > 0)
    sampled = draw_sample(pairs, values, ladder.devices)
    allowed, reason = allowed_levels(*ladder, frames, pairs, sampled)
    return jnp.argmax(allowed), jnp.where(allowed.any(), NONE, reason)


def first_level(
    pairs: Pairs, values: Float[Array, "n v"], ladder: Ladder
) -> tuple[int, str | None]:
    """Return the level that a sum would start with, or why there is none."""
    pairs, values = cast((pairs, values), working_dtype())
    index, reason = _first_allowed(pairs, values, ladder)
    return int(index), REASONS[int(reason)]


def draw_sample(
    pairs: Pairs, values: Float[Array, "n v"], devices: Devices | None
) -> Sampled:
    """Sum a few queries exactly; which ones changes with the queries."""
    bits = lax.bitcast_convert_type(pairs.tilts.sum().astype(jnp.float32), jnp.int32)
    count = len(pairs.tilts)
    index = jr.randint(jr.fold_in(jr.key(0), bits), (min(SAMPLE, count),), 0, count)
    return Sampled(index, exactly(queries_of(pairs, index), values, devices))


def allowed_levels(
    levels: tuple[Level, ...],
    tolerance: float,
    frames: dict[str, AbstractFrame],
    pairs: Pairs,
    sampled: Sampled,
) -> tuple[Bool[Array, " l"], Int[Array, ""]]:
    """Return which levels have enough modes, and accuracy enough for the sample.

    The finest accuracy is allowed unless too many queries would have to be patched.
    Also return the reason why, if none is allowed.
    """
    finest = min(level.accuracy for level in levels)
    count, index = len(pairs.tilts), sampled.index
    amplifications, rooms = {}, {}
    for kind, frame in frames.items():
        top, masses = token_masses(frame, pairs.weights, pairs.weights > 0)
        log_found = sampled.result[0] - frame.log_queries[index]
        amplifications[kind] = jnp.exp(top + jnp.log(masses.sum()) - log_found)
        rooms[kind] = tolerance - own_error(frame, top)[index]

    def has_modes(level: Level) -> Bool[Array, ""]:
        frame = frames[level.kind]
        is_fit = frame.defect() <= tolerance / ERROR
        return is_fit & (frame.needed_modes(level.accuracy) <= level.modes)

    def is_accurate(level: Level) -> Bool[Array, ""]:
        error = ERROR * level.accuracy * amplifications[level.kind]
        is_over = ~(error <= rooms[level.kind])
        if level.accuracy > finest:
            return ~is_over.any()
        foreseen = jnp.mean(is_over.astype(pairs.tilts.dtype)) * count
        return foreseen <= HOPELESS * LARGEST_PATCH

    enough = jnp.stack([has_modes(level) for level in levels])
    accurate = jnp.stack([is_accurate(level) for level in levels])
    return all_in_batch(enough & accurate), jnp.where(enough.any(), RANGE, MODES)


def best_attempt(
    levels: tuple[Level, ...],
    allowed: Bool[Array, " l"],
    frames: dict[str, AbstractFrame],
    pairs: Pairs,
    values: Float[Array, "n v"],
    tolerance: float,
) -> Attempt:
    """Try levels of growing accuracy until few queries are left; then the exact sum."""
    accuracies = jnp.asarray([level.accuracy for level in levels], pairs.tilts.dtype)
    present, count = pairs.weights > 0, len(pairs.tilts)

    def at_level(level: Level):
        return lambda: level_sum(frames[level.kind], pairs, values, level, present)

    def without_level():
        exact = exactly(pairs, values, levels[0].devices)
        return exact, jnp.zeros(count, pairs.tilts.dtype)

    def is_unfinished(attempt: Attempt) -> Bool[Array, ""]:
        left = jnp.sum(~(attempt.bounds <= tolerance))
        return any_in_batch(left > min(LARGEST_PATCH, count - 1))

    def try_next(attempt: Attempt) -> Attempt:
        before = jnp.where(attempt.level < 0, jnp.inf, accuracies[attempt.level])
        finer = allowed & (accuracies < before)
        chosen = jnp.where(finer.any(), jnp.argmax(finer), len(levels))
        branches = [*map(at_level, levels), without_level]
        return Attempt(chosen, *lax.switch(chosen, branches))

    nothing = jnp.zeros(count, pairs.tilts.dtype), jnp.zeros_like(values[:1])
    start = Attempt(
        jnp.asarray(-1, jnp.argmax(allowed).dtype),
        (nothing[0], jnp.broadcast_to(nothing[1], (count, values.shape[1]))),
        jnp.full(count, jnp.inf, pairs.tilts.dtype),
    )
    return lax.while_loop(is_unfinished, try_next, start)
