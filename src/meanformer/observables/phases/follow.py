"""Starts followed through depth at one temperature, in batches that grow smaller."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from meanformer.errors import Unsupported
from meanformer.observables.phases.merging import Flock, joined, shrunk
from meanformer.observables.phases.options import Options, Recipe
from meanformer.observables.phases.starts import Maps
from meanformer.observables.phases.walk import (
    MOST_STEPS,
    Course,
    Walk,
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
    """Starts at the end of a stage.

    Attributes:
        states: what moves.
        values: what was read, from the first depth of the stage on.
        index: the first depth that was not read.
        depth: where they are.
        width: the step to try next.
        steps: accepted steps.
        rejected: rejected steps.
        is_final: whether the value is one from now on.
        together: which tokens have met.
    """

    states: Float[Array, "b n c"]
    values: Float[Array, "b t"]
    index: Int[Array, " b"]
    depth: Float[Array, " b"]
    width: Float[Array, " b"]
    steps: Int[Array, " b"]
    rejected: Int[Array, " b"]
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
    start = Flock(
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
    options: Options, beta: float, start: Flock, batch_size: int, found: Followed
) -> None:
    """Follow identity attention, with new batches at the end of every stage."""
    number, count = start.numbers.shape
    is_gram = options.integrates_gram(count, start.states.shape[2])
    recipe = options.recipe(beta, is_gram=is_gram)
    is_many = number >= MANY and options.quantity != "rank"
    flocks, depth, index = [start], 0.0, 0
    for share in STAGES if is_many else STAGES[-1:]:
        stop, following = share * float(options.depths[-1]), []
        read = len(options.depths)
        course = options.course(stop)
        for flock in flocks:
            # Smaller clouds in larger batches: as many tokens.
            size = min(number, batch_size * count // flock.numbers.shape[1])
            batches = min(BATCHES_AT_ONCE, -(-number // size))
            for part in flock.split(batches * size):
                stage = _followed(recipe, part, course, (batches, size), depth, index)
                _check_arrived(stage.depth, stop, beta)
                # Batches that have become one cluster have read to the end.
                read = min(read, int(stage.index.min()))
                left, together = _noted(stage, part, found, index)
                if share < 1 and len(left.places) > 0:
                    following += shrunk(left, together, count=count, is_gram=is_gram)
        flocks, depth, index = joined(following), stop, read


def _followed(
    recipe: Recipe,
    flock: Flock,
    course: Course,
    shape: tuple[int, int],
    depth: float,
    index: int,
) -> Stage:
    """Follow starts through one stage, in batches; the last repeats its starts."""
    number, (batches, size) = len(flock.places), shape
    used = -(-number // size)
    # Starts that fill up are those of the last batch again, so as not to slow it.
    last = np.arange((used - 1) * size, number)
    rest = np.resize(last, batches * size - number)
    order = np.append(np.arange(number), rest).reshape(shape)
    widths = flock.widths[order].min(axis=1)
    stage = _stage(
        recipe,
        jnp.asarray(flock.states[order]),
        jnp.asarray(flock.numbers[order]),
        jnp.asarray(widths),
        jnp.asarray(np.arange(batches) < used),
        course,
        jnp.asarray(index),
        jnp.asarray(depth, widths.dtype),
    )
    flat = (np.asarray(leaf) for leaf in stage)
    return Stage(*(leaf.reshape(-1, *leaf.shape[2:])[:number] for leaf in flat))


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
        numbers = (walk.index, walk.depth, walk.width, walk.steps, walk.rejected)
        each = (jnp.broadcast_to(number, (len(state),)) for number in numbers)
        final = reader.is_final(walk.seen)
        return Stage(walk.state, walk.values, *each, final, together)

    return jax.lax.map(of_batch, (states, numbers, widths, is_used))


def _noted(
    stage: Stage, flock: Flock, found: Followed, first: int
) -> tuple[Flock, Bool[np.ndarray, "b n n"]]:
    """Keep what was read; return the starts that go on, and which tokens have met."""
    is_final = np.asarray(stage.is_final)
    is_ahead = np.arange(stage.values.shape[1])[None, :] >= stage.index[:, None]
    values = np.where(is_final[:, None] & is_ahead, 1, stage.values)
    found.values[flock.places, first:] = values[:, first:]
    found.steps[flock.places] += stage.steps
    found.rejected[flock.places] += stage.rejected
    moved = Flock(stage.states, flock.numbers, flock.places, stage.width)
    going = np.flatnonzero(~is_final)
    return moved.taken(going), np.asarray(stage.together)[going]


def _under_maps(
    options: Options,
    maps: Maps,
    beta: float,
    states: Float[np.ndarray, "b n c"],
    places: Int[np.ndarray, " f"],
) -> Walk:
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
