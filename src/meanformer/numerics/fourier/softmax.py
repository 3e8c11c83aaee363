r"""Log-mass and mean by fast transforms, never silently inaccurate.

The errors of a transform of accuracy $\varepsilon$ are of two kinds. Those of moving
points to a grid are local: they are about $\varepsilon$ relative to what a query finds.
Those of rounding and of cutting the series are absolute: a query far from all tokens
finds a tiny mass, and relative to it they are larger by the amplification
$$A_i = \sum_j w_j e^{t_j} \Big/ \sum_j w_j e^{t_j} G(a_i - z_j).$$

So a sum takes four steps. A random sample of queries is summed exactly: its
amplifications tell how many modes are needed, or that none will do. All queries are
summed at the coarsest level, and the errors of the sample, and of queries of every
amplification, are measured. If four times the largest is below the tolerance, that is
the sum. If not, errors grow in proportion to the amplification at most: where that is
above the tolerance a finer level is tried, and the few queries that are left are summed
exactly; if they are many, all are. Last, the sample is compared once more.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from meanformer.numerics.arrays import all_in_batch, any_in_batch, cast
from meanformer.numerics.fourier.derivative import with_derivative
from meanformer.numerics.fourier.frames import AbstractFrame, frames_of
from meanformer.numerics.fourier.level_sums import (
    ROUNDINGS,
    MassAndMean,
    level_sum,
    middle_and_width,
    sum_distances,
    token_masses,
)
from meanformer.numerics.fourier.levels import (
    ERROR,
    FINEST,
    SAMPLE,
    Devices,
    Ladder,
    Level,
    working_dtype,
)
from meanformer.numerics.fourier.patches import (
    Decisions,
    exactly,
    queries_of,
    replaced_exactly,
    results_at,
)
from meanformer.numerics.fourier.report import (
    MODES,
    NONE,
    RANGE,
    REASONS,
    WRONG,
    SumReport,
)
from meanformer.numerics.pair_sums.pairs import Pairs

# Queries of every amplification whose errors are measured as well.
SPREAD = 8
# The error of any query in units of the largest that was measured, found to be up to
# three where errors are larger than the accuracy.
UNSEEN = 4.0
# Queries that are summed exactly one by one, before all of them are.
LARGEST_PATCH = 256
# If more than this multiple of them is foreseen, the level is not tried at all.
HOPELESS = 8


class Sampled(NamedTuple):
    """A random sample of the queries and their exact sums."""

    index: Int[Array, " s"]
    result: MassAndMean


class Attempt(NamedTuple):
    """The sums at a level and the bounds on their errors, by what was measured."""

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
    attempt = best_attempt(ladder, allowed, frames, pairs, values, sampled)

    patch, is_patched = worst_queries(attempt.bounds, tolerance)
    decisions = Decisions(attempt.level, patch, is_patched)
    result = replaced_exactly(attempt.result, decisions, pairs, values, devices)

    width = middle_and_width(values, pairs.weights > 0)[1]
    observed = sum_distances(
        results_at(result, sampled.index), sampled.result, width
    ).max()
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
    """Return which levels have enough modes for the sample.

    None is allowed if rounding alone would leave too many queries to be patched. Also
    return the reason why, if none is.
    """
    dtype, count = pairs.tilts.dtype, len(pairs.tilts)
    amplifications = {}
    for kind, frame in frames.items():
        top, masses = token_masses(frame, pairs.weights, pairs.weights > 0)
        log_found = sampled.result[0] - frame.log_queries[sampled.index]
        amplifications[kind] = jnp.exp(top + jnp.log(masses.sum()) - log_found)

    def has_modes(level: Level) -> Bool[Array, ""]:
        frame = frames[level.kind]
        is_fit = frame.defect() <= tolerance / ERROR
        relative = level.accuracy / amplifications[level.kind].max()
        needed = frame.needed_modes(jnp.maximum(relative, FINEST[dtype]))
        return is_fit & (needed <= level.modes)

    def is_in_range(level: Level) -> Bool[Array, ""]:
        rounding = ROUNDINGS * jnp.finfo(dtype).eps * amplifications[level.kind]
        foreseen = jnp.mean((~(rounding <= tolerance)).astype(dtype)) * count
        return foreseen <= HOPELESS * LARGEST_PATCH

    enough = jnp.stack([has_modes(level) for level in levels])
    in_range = jnp.stack([is_in_range(level) for level in levels])
    return all_in_batch(enough & in_range), jnp.where(enough.any(), RANGE, MODES)


def best_attempt(
    ladder: Ladder,
    allowed: Bool[Array, " l"],
    frames: dict[str, AbstractFrame],
    pairs: Pairs,
    values: Float[Array, "n v"],
    sampled: Sampled,
) -> Attempt:
    """Try levels of growing accuracy until few queries are left; then the exact sum."""
    levels, tolerance = ladder
    accuracies = jnp.asarray([level.accuracy for level in levels], pairs.tilts.dtype)
    defects = jnp.stack([frames[level.kind].defect() for level in levels])
    present, count = pairs.weights > 0, len(pairs.tilts)

    def at_level(level: Level):
        return lambda: level_sum(frames[level.kind], pairs, values, level, present)

    def without_level():
        exact = exactly(pairs, values, ladder.devices)
        return exact, jnp.zeros(count, pairs.tilts.dtype)

    def bounds_of(chosen, result, amplifications) -> Float[Array, " m"]:
        bounds = measured_bounds(result, amplifications, pairs, values, sampled, ladder)
        least = ERROR * accuracies[chosen]
        return jnp.maximum(bounds, least) + defects[chosen]

    def is_unfinished(attempt: Attempt) -> Bool[Array, ""]:
        left = jnp.sum(~(attempt.bounds <= tolerance))
        return any_in_batch(left > min(LARGEST_PATCH, count - 1))

    def try_next(attempt: Attempt) -> Attempt:
        before = jnp.where(attempt.level < 0, jnp.inf, accuracies[attempt.level])
        finer = allowed & (accuracies < before)
        chosen = jnp.where(finer.any(), jnp.argmax(finer), len(levels))
        branches = [*map(at_level, levels), without_level]
        result, amplifications = lax.switch(chosen, branches)
        bounds = lax.cond(
            chosen < len(levels),
            lambda: bounds_of(chosen, result, amplifications),
            lambda: amplifications,
        )
        return Attempt(chosen, result, bounds)

    nothing = jnp.zeros(count, pairs.tilts.dtype), jnp.zeros_like(values[:1])
    start = Attempt(
        jnp.asarray(-1, jnp.argmax(allowed).dtype),
        (nothing[0], jnp.broadcast_to(nothing[1], (count, values.shape[1]))),
        jnp.full(count, jnp.inf, pairs.tilts.dtype),
    )
    return lax.while_loop(is_unfinished, try_next, start)


def measured_bounds(
    result: MassAndMean,
    amplifications: Float[Array, " m"],
    pairs: Pairs,
    values: Float[Array, "n v"],
    sampled: Sampled,
    ladder: Ladder,
) -> Float[Array, " m"]:
    """Bound the error of each query by those of the sample and of every amplification.

    If they show that all queries are within the tolerance, one bound is that of all.
    """
    index = spread_queries(amplifications)
    spread = Sampled(index, exactly(queries_of(pairs, index), values, ladder.devices))
    width = middle_and_width(values, pairs.weights > 0)[1]
    errors, absolute = [], []
    for checked in (sampled, spread):
        error = sum_distances(results_at(result, checked.index), checked.result, width)
        by = amplifications[checked.index]
        errors.append(error)
        absolute.append(jnp.where(jnp.isfinite(by), error / by, 0))
    largest = UNSEEN * jnp.concatenate(errors).max()
    scaled = UNSEEN * jnp.concatenate(absolute).max() * amplifications
    bounds = jnp.where(largest <= ladder.tolerance, largest, scaled)
    # Where rounding has eaten the mass there is no bound.
    return jnp.where(jnp.isfinite(amplifications), bounds, jnp.inf)


def spread_queries(amplifications: Float[Array, " m"]) -> Int[Array, " s"]:
    """Return queries whose amplifications are evenly spread, the largest among them."""
    places = jnp.log(amplifications)
    is_known = jnp.isfinite(places)
    low = jnp.where(is_known, places, jnp.inf).min()
    high = jnp.where(is_known, places, -jnp.inf).max()
    marks = jnp.linspace(low, high, SPREAD)
    return lax.map(lambda mark: jnp.argmin(jnp.abs(places - mark)), marks)
