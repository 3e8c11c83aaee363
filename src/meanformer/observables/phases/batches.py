"""Starts followed through depth at one temperature, in batches that grow smaller."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from meanformer.errors import Unsupported
from meanformer.observables.phases import stepping
from meanformer.observables.phases.options import Options, RandomMaps, Recipe
from meanformer.observables.phases.stepping import BatchState, Course

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


# Sizes of clouds, as shares of the first one: each is compiled once.
SHARES = (1, 2, 4, 8)
LEAST = 4

_begun = eqx.filter_jit(stepping.begun)
_continued = eqx.filter_jit(stepping.continued)


class StartGroup(NamedTuple):
    """Starts of one size of cloud, at one depth."""

    states: Float[np.ndarray, "b n c"]  # tokens or Gram matrices
    # How many tokens have met at each place; zero for none.
    numbers: Float[np.ndarray, "b n"]
    places: Int[np.ndarray, " b"]  # which start it is
    # The step that its batch would try next; zero for none yet.
    widths: Float[np.ndarray, " b"]

    def taken(self, chosen: np.ndarray | slice) -> "StartGroup":
        """Return some of the starts."""
        return StartGroup(*(array[chosen] for array in self))

    def split(self, size: int) -> list["StartGroup"]:
        """Return batches of at most this size."""
        firsts = range(0, len(self.places), size)
        return [self.taken(slice(first, first + size)) for first in firsts]


class Followed(NamedTuple):
    """The values read from some starts, with the numbers of steps."""

    values: Float[np.ndarray, "b t"]
    steps: Float[np.ndarray, " b"]
    rejected: Float[np.ndarray, " b"]


class StageEnd(NamedTuple):
    """Starts at the end of a stage: one row for each of them."""

    # How far they have come, without velocities and what they are read from.
    batch: BatchState
    is_final: Bool[Array, " b"]  # whether the value is one from now on
    together: Bool[Array, "b n n"]  # which tokens have met


def follow_starts(
    options: Options,
    maps: RandomMaps | None,
    beta: float,
    states: Float[np.ndarray, "b n c"],
    places: Int[np.ndarray, " b"],
    batch_size: int,
) -> Followed:
    """Follow some starts, numbered by their places, to the last depth.

    They move by maps, or by identity attention if there are none; as many starts as
    `batch_size` share a step.
    """
    number = len(states)
    found = Followed(np.zeros((number, len(options.depths))), *np.zeros((2, number)))
    if maps is None:
        _through_stages(options, beta, states, batch_size, found)
        return found
    size = min(number, batch_size)
    for first in range(0, number, size):
        chosen = np.arange(first, min(first + size, number))
        # The last batch repeats its starts.
        filled = np.resize(chosen, size)
        batch = _under_maps(options, maps, beta, states[filled], places[filled])
        found.values[chosen] = np.asarray(batch.values)[: len(chosen)]
        found.steps[chosen] = int(batch.steps)
        found.rejected[chosen] = int(batch.rejected)
    return found


def _through_stages(
    options: Options, beta: float, states: np.ndarray, batch_size: int, found: Followed
) -> None:
    """Follow identity attention, with new batches at the end of every stage."""
    number, count, width = states.shape
    is_gram = options.integrates_gram(count, width)
    ones, zeros = np.ones((number, count), states.dtype), np.zeros(number, states.dtype)
    start = StartGroup(states, ones, np.arange(number), zeros)
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
                end = _stage_end(recipe, part, course, (batches, size), depth, index)
                _check_arrived(end.batch.depth, stop, beta)
                # Batches that have become one cluster have read to the end.
                read = min(read, int(end.batch.index.min()))
                left, together = _noted(end, part, found, index)
                if share < 1 and len(left.places) > 0:
                    following += shrunk(left, together, count=count, is_gram=is_gram)
        groups, depth, index = joined(following), stop, read


def _stage_end(
    recipe: Recipe, group: StartGroup, course: Course, shape, depth: float, index: int
) -> StageEnd:
    """Follow starts through one stage, in batches; the last repeats its starts."""
    number, (batches, size) = len(group.places), shape
    used = -(-number // size)
    # Starts that fill up are those of the last batch again, so as not to slow it.
    last = np.arange((used - 1) * size, number)
    rest = np.resize(last, batches * size - number)
    order = np.append(np.arange(number), rest).reshape(shape)
    widths = group.widths[order].min(axis=1)
    end = _through_stage(
        recipe,
        course,
        *map(jnp.asarray, (group.states[order], group.numbers[order], widths)),
        jnp.asarray(np.arange(batches) < used),
        jnp.asarray(index),
        jnp.asarray(depth, widths.dtype),
    )

    def of_starts(leaf: Array) -> np.ndarray:
        rows = np.asarray(leaf)
        # Depth, steps and the like are those of the batch.
        rows = np.repeat(rows[:, None], size, 1) if rows.ndim == 1 else rows
        return rows.reshape(-1, *rows.shape[2:])[:number]

    return jax.tree.map(of_starts, end)


@eqx.filter_jit
def _through_stage(
    recipe: Recipe,
    course: Course,
    states: Float[Array, "p b n c"],
    numbers: Float[Array, "p b n"],
    widths: Float[Array, " p"],
    is_used: Bool[Array, " p"],
    index: Int[Array, ""],
    depth: Float[Array, ""],
) -> StageEnd:
    """Follow several batches, one after the other."""

    def of_batch(part) -> StageEnd:
        state, number, width, is_real = part
        motion, quantity = recipe.motion_of(number), recipe.quantity_of(number)
        batch = stepping.begun(motion, quantity, state, course)
        batch = batch._replace(
            # A batch that only fills up is at its end already.
            depth=jnp.where(is_real, depth, course.stop),
            index=index,
            width=jnp.where(width > 0, width, batch.width),
        )
        batch = stepping.continued(motion, quantity, batch, course)
        gaps = 1 - motion.gram(batch.state)
        closing = motion.gram_rate(batch.state, batch.rate)
        rounding = 8 * jnp.finfo(gaps.dtype).eps
        met = MET * jnp.minimum(course.tolerance, recipe.bound)
        together = (gaps < met) & ((closing >= CLOSING * gaps) | (gaps < rounding))
        is_final = quantity.is_final(batch.seen)
        return StageEnd(batch._replace(rate=None, seen=None), is_final, together)

    return jax.lax.map(of_batch, (states, numbers, widths, is_used))


def _noted(
    end: StageEnd, group: StartGroup, found: Followed, first: int
) -> tuple[StartGroup, Bool[np.ndarray, "b n n"]]:
    """Keep what was read; return the starts that go on, and which tokens have met."""
    batch, is_final, together = end
    is_ahead = np.arange(batch.values.shape[1])[None, :] >= batch.index[:, None]
    values = np.where(is_final[:, None] & is_ahead, 1, batch.values)
    found.values[group.places, first:] = values[:, first:]
    found.steps[group.places] += batch.steps
    found.rejected[group.places] += batch.rejected
    moved = StartGroup(batch.state, group.numbers, group.places, batch.width)
    going = np.flatnonzero(~is_final)
    return moved.taken(going), np.asarray(together)[going]


def _under_maps(options: Options, maps: RandomMaps, beta, states, places) -> BatchState:
    """Follow one batch under maps of its own, through all draws."""
    state = jnp.asarray(states)
    quantity = options.recipe(beta).quantity_of(jnp.ones(state.shape[:2], state.dtype))
    motion = maps.motion(beta, places, 0, options.dtype)
    batch = _begun(motion, quantity, state, options.course(maps.ends[0]))
    for layer, stop in enumerate(maps.ends):
        motion = maps.motion(beta, places, layer, options.dtype)
        batch = _continued(motion, quantity, batch, options.course(stop))
    _check_arrived(np.asarray(batch.depth), maps.ends[-1], beta)
    return batch


def _check_arrived(depth: np.ndarray | Array, stop: float, beta: float) -> None:
    least = float(np.min(depth))
    if least < stop * (1 - 1e-6):
        raise Unsupported(
            f"more than {stepping.MOST_STEPS} steps at beta = {beta:g}, depth "
            f"{least:.3g}; raise the tolerance, or end earlier."
        )


def joined(groups: list[StartGroup]) -> list[StartGroup]:
    """Return one group for each size of cloud, the largest first."""
    alike = {}
    for group in groups:
        alike.setdefault(group.numbers.shape[1], []).append(group)
    arrays = (zip(*alike[size], strict=True) for size in sorted(alike, reverse=True))
    return [StartGroup(*map(np.concatenate, columns)) for columns in arrays]


def shrunk(
    group: StartGroup, together: Bool[np.ndarray, "b n n"], *, count: int, is_gram: bool
) -> list[StartGroup]:
    """Replace tokens that have met by one, where a smaller size of cloud is enough.

    The starts, whose clouds were of the size `count` at first, come in groups of
    different sizes.
    """
    leaders = leaders_of(together, group.numbers > 0)
    left = np.sum(leaders == np.arange(leaders.shape[1])[None, :], axis=1)
    left -= np.sum(group.numbers == 0, axis=1)
    own = group.numbers.shape[1]
    sizes = np.array([max(LEAST, -(-count // share)) for share in SHARES])
    needed = np.array([min(own, sizes[sizes >= number].min()) for number in left])
    parts = []
    for size in np.unique(needed).tolist():
        chosen = np.flatnonzero(needed == size)
        part = group.taken(chosen)
        parts.append(
            part if size == own else _merged(part, leaders[chosen], size, is_gram)
        )
    return parts


def leaders_of(
    together: Bool[np.ndarray, "b n n"], present: Bool[np.ndarray, "b n"]
) -> Int[np.ndarray, "b n"]:
    """Return for each token the first leader that it has met, perhaps itself.

    Absent tokens are their own leaders.
    """
    number, count = present.shape
    leaders = np.tile(np.arange(count), (number, 1))
    is_leader = np.zeros((number, count), bool)
    for token in range(count):
        met = together[:, token, :] & is_leader & present[:, token, None]
        follows = met.any(axis=1)
        leaders[follows, token] = met[follows].argmax(axis=1)
        is_leader[:, token] = present[:, token] & ~follows
    return leaders


def _merged(group: StartGroup, leaders: np.ndarray, size, is_gram) -> StartGroup:
    """Return clouds of this size, with the mean direction of each group."""
    count = leaders.shape[1]
    is_leader = (leaders == np.arange(count)[None, :]) & (group.numbers > 0)
    slots = np.take_along_axis(np.cumsum(is_leader, axis=1) - 1, leaders, axis=1)
    members = slots[:, None, :] == np.arange(size)[None, :, None]
    shares = members * group.numbers[:, None, :]
    numbers = shares.sum(axis=2)
    # A place that stays empty holds a copy of the first token.
    filled = np.where(numbers[:, :, None] > 0, shares, shares[:, :1])
    sums = filled @ group.states
    if is_gram:
        sums = sums @ np.swapaxes(filled, 1, 2)
        norms = np.sqrt(np.einsum("bii->bi", sums))
        states = sums / (norms[:, :, None] * norms[:, None, :])
    else:
        states = sums / np.linalg.norm(sums, axis=2, keepdims=True)
    return StartGroup(states, numbers, group.places, group.widths)
