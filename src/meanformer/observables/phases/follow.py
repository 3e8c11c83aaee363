"""Starts followed through depth at one temperature, in batches that grow smaller."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from meanformer.errors import Unsupported
from meanformer.observables.phases.merging import StartGroup, joined, shrunk
from meanformer.observables.phases.options import Options, Recipe
from meanformer.observables.phases.starts import Maps
from meanformer.observables.phases.stepping import (
    MOST_STEPS,
    BatchState,
    Course,
    begun,
    continued,
    renewed,
)

# With so many starts the batches are made anew at these shares of the depth: starts
# that have become one cluster leave, tokens that have met become one. Each size of
# cloud is compiled, which does not pay for fewer starts.
MANY = 512
STAGES = (0.24, 0.31, 0.4, 0.55, 0.75, 1.0)
BATCHES_AT_ONCE = 8
# Tokens have met if their gap is below this share of the tolerance and of the level,
# and closes by itself, at half of the natural rate or faster.
MET = 0.1
CLOSING = 1.0


class Followed(NamedTuple):
    """What was read from some starts, and the steps that it took."""

    values: Float[np.ndarray, "b t"]
    steps: Float[np.ndarray, " b"]
    rejected: Float[np.ndarray, " b"]


class Stage(NamedTuple):
    """Starts at the end of a stage: one row for each of them.

    Attributes:
        walk: how far they have come, without what the reader looks at.
        is_final: whether the value is one from now on.
        together: which tokens have met.
    """

    walk: BatchState
    is_final: Bool[Array, " b"]
    together: Bool[Array, "b n n"]


def follow(
    options: Options,
    maps: Maps,
    beta: float,
    states: Float[np.ndarray, "b n c"],
    places: Int[np.ndarray, " b"],
    batch_size: int,
) -> Followed:
    """Follow some starts to the last depth.

    Args:
        options: what is asked.
        maps: the maps that move the tokens, if it is not identity attention.
        beta: inverse temperature.
        states: what moves.
        places: numbers of the starts, for their maps.
        batch_size: starts that share a step.
    """
    number, count = states.shape[:2]
    found = Followed(
        np.zeros((number, len(options.depths))), np.zeros(number), np.zeros(number)
    )
    start = StartGroup(
        states,
        np.ones((number, count), states.dtype),
        np.arange(number),
        np.zeros(number, states.dtype),
    )
    if maps.draw is None:
        _through_stages(options, beta, start, batch_size, found)
        return found
    size = min(number, batch_size)
    for batch in start.split(size):
        own = places[np.resize(batch.places, size)]
        walk = _under_maps(options, maps, beta, batch.states, own)
        found.values[batch.places] = np.asarray(walk.values)[: len(batch.places)]
        found.steps[batch.places] = int(walk.steps)
        found.rejected[batch.places] = int(walk.rejected)
    return found


def _through_stages(
    options: Options, beta: float, start: StartGroup, batch_size: int, found: Followed
) -> None:
    """Follow identity attention, with new batches at the end of every stage."""
    number, count = start.numbers.shape
    is_gram = options.integrates_gram(count, start.states.shape[2])
    recipe = options.recipe(beta, is_gram=is_gram)
    is_many = number >= MANY and options.quantity != "rank"
    groups, depth, index = [start], 0.0, 0
    for share in STAGES if is_many else STAGES[-1:]:
        stop, following = share * float(options.depths[-1]), []
        read = len(options.depths)
        course = options.course(stop)
        for group in groups:
            # Smaller clouds in larger batches: as many tokens.
            size = min(number, batch_size * count // group.numbers.shape[1])
            batches = min(BATCHES_AT_ONCE, -(-number // size))
            for part in group.split(batches * size):
                stage = _followed(recipe, part, course, (batches, size), depth, index)
                _check_arrived(stage.walk.depth, stop, beta)
                # Batches that have become one cluster have read to the end.
                read = min(read, int(stage.walk.index.min()))
                left, together = _noted(stage, part, found, index)
                if share < 1 and len(left.places) > 0:
                    following += shrunk(left, together, count=count, is_gram=is_gram)
        groups, depth, index = joined(following), stop, read


def _followed(
    recipe: Recipe,
    group: StartGroup,
    course: Course,
    shape: tuple[int, int],
    depth: float,
    index: int,
) -> Stage:
    """Follow starts through one stage, in batches; the last repeats its starts."""
    number, (batches, size) = len(group.places), shape
    used = -(-number // size)
    # Starts that fill up are those of the last batch again, so as not to slow it.
    last = np.arange((used - 1) * size, number)
    rest = np.resize(last, batches * size - number)
    order = np.append(np.arange(number), rest).reshape(shape)
    widths = group.widths[order].min(axis=1)
    stage = _stage(
        recipe,
        jnp.asarray(group.states[order]),
        jnp.asarray(group.numbers[order]),
        jnp.asarray(widths),
        jnp.asarray(np.arange(batches) < used),
        course,
        jnp.asarray(index),
        jnp.asarray(depth, widths.dtype),
    )

    def of_starts(leaf: Array) -> np.ndarray:
        rows = np.asarray(leaf)
        # Depth, steps and the like are those of the batch.
        rows = np.repeat(rows[:, None], size, 1) if rows.ndim == 1 else rows
        return rows.reshape(-1, *rows.shape[2:])[:number]

    return jax.tree.map(of_starts, stage)


@eqx.filter_jit
def _stage(
    recipe: Recipe,
    states: Float[Array, "p b n c"],
    numbers: Float[Array, "p b n"],
    widths: Float[Array, " p"],
    is_used: Bool[Array, " p"],
    course: Course,
    index: Int[Array, ""],
    depth: Float[Array, ""],
) -> Stage:
    """Follow several batches, one after the other."""

    def of_batch(batch) -> Stage:
        state, number, width, is_real = batch
        system, reader = recipe.system(number), recipe.reader(number)
        walk = begun(system, reader, state, course)
        width = jnp.where(width > 0, width, walk.width)
        # A batch that only fills up is at its end already.
        start = jnp.where(is_real, depth, course.stop)
        walk = walk._replace(depth=start, index=index, width=width)
        walk = continued(system, reader, walk, course)
        gaps = 1 - system.gram(walk.state)
        closing = system.gram_rate(walk.state, walk.rate)
        rounding = 8 * jnp.finfo(gaps.dtype).eps
        met = MET * jnp.minimum(course.tolerance, recipe.bound)
        together = (gaps < met) & ((closing >= CLOSING * gaps) | (gaps < rounding))
        final = reader.is_final(walk.seen)
        return Stage(walk._replace(rate=None, seen=None), final, together)

    return jax.lax.map(of_batch, (states, numbers, widths, is_used))


def _noted(
    stage: Stage, group: StartGroup, found: Followed, first: int
) -> tuple[StartGroup, Bool[np.ndarray, "b n n"]]:
    """Keep what was read; return the starts that go on, and which tokens have met."""
    walk, is_final, together = stage
    is_ahead = np.arange(walk.values.shape[1])[None, :] >= walk.index[:, None]
    values = np.where(is_final[:, None] & is_ahead, 1, walk.values)
    found.values[group.places, first:] = values[:, first:]
    found.steps[group.places] += walk.steps
    found.rejected[group.places] += walk.rejected
    moved = StartGroup(walk.state, group.numbers, group.places, walk.width)
    going = np.flatnonzero(~is_final)
    return moved.taken(going), np.asarray(together)[going]


def _under_maps(
    options: Options,
    maps: Maps,
    beta: float,
    states: Float[np.ndarray, "b n c"],
    places: Int[np.ndarray, " f"],
) -> BatchState:
    """Follow one batch under maps of its own, through all draws."""
    state = jnp.asarray(np.resize(states, (len(places), *states.shape[1:])))
    ones = jnp.ones(state.shape[:2], state.dtype)
    reader, walk = options.recipe(beta).reader(ones), None
    for layer, stop in enumerate(maps.ends):
        system = maps.system(beta, places, layer, options.dtype)
        course = options.course(stop)
        if walk is None:
            walk = _begun(system, reader, state, course)
        else:
            walk = _renewed(system, reader, walk)
        walk = _continued(system, reader, walk, course)
    if walk is None:
        raise Unsupported("there are no maps.")
    _check_arrived(np.asarray(walk.depth), maps.ends[-1], beta)
    return walk


_begun = eqx.filter_jit(begun)
_renewed = eqx.filter_jit(renewed)
_continued = eqx.filter_jit(continued)


def _check_arrived(depth: np.ndarray | Array, stop: float, beta: float) -> None:
    least = float(np.min(depth))
    if least < stop * (1 - 1e-6):
        raise Unsupported(
            f"more than {MOST_STEPS} steps at beta = {beta:g}, depth {least:.3g}; "
            "raise the tolerance, or end earlier."
        )
