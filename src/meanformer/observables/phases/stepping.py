r"""Many small clouds through depth together, with an adaptive step and a reader.

One step serves a batch of clouds, and is as long as the cloud with the largest error
allows. The coefficients are those of diffrax's `Tsit5`; diffrax's own loop would keep
the state at every depth that is asked for, where only one number per cloud is wanted,
and these numbers come from an interpolation that diffrax does not have.
"""

from typing import NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from meanformer.observables.phases.readers import AbstractReader, Seen
from meanformer.observables.phases.systems import AbstractSystem, State

SAFETY, SHRINK, GROW = 0.8, 0.2, 2.0
ORDER = 5
FIRST_MOVE = 0.03  # angle by which the fastest token moves in the first trial step
MOST_STEPS = 20_000


class BatchState(NamedTuple):
    """How far a batch has come.

    Attributes:
        depth: where it is.
        width: the next step to try.
        state: the clouds.
        rate: their velocity.
        seen: what the reader looks at.
        index: the first depth that is not read yet.
        values: what was read, one row per cloud.
        steps: accepted steps.
        rejected: rejected steps.
    """

    depth: Float[Array, ""]
    width: Float[Array, ""]
    state: State
    rate: State
    seen: Seen
    index: Int[Array, ""]
    values: Float[Array, "b t"]
    steps: Int[Array, ""]
    rejected: Int[Array, ""]


class Course(eqx.Module):
    """From where to where, what to read, and how accurately.

    Attributes:
        depths: depths at which the reader is asked, increasing.
        stop: where to end, at the latest.
        tolerance: root mean square error of the tokens of a cloud, per step.
        longest: longest step.
    """

    depths: Float[Array, " t"]
    stop: Float[Array, ""]
    tolerance: Float[Array, ""]
    longest: Float[Array, ""]


def begun(
    system: AbstractSystem, reader: AbstractReader, state: State, course: Course
) -> BatchState:
    """Return the batch at depth zero, with nothing read."""
    rate, dtype = system.rate(state), state.dtype
    fastest = jnp.sqrt(jnp.max(jnp.sum(rate * rate, axis=2)))
    width = FIRST_MOVE / jnp.maximum(fastest, FIRST_MOVE / course.depths[-1])
    zero = jnp.zeros((), int)
    values = jnp.zeros((len(state), len(course.depths)), dtype)
    seen = reader.look(system, state, rate)
    start = jnp.zeros((), dtype)
    return BatchState(start, width, state, rate, seen, zero, values, zero, zero)


def renewed(
    system: AbstractSystem, reader: AbstractReader, walk: BatchState
) -> BatchState:
    """Return the batch where it is, under another system."""
    rate = system.rate(walk.state)
    seen = reader.look(system, walk.state, rate)
    return walk._replace(rate=rate, seen=seen)


def continued(
    system: AbstractSystem, reader: AbstractReader, walk: BatchState, course: Course
) -> BatchState:
    """Go on to the end of the course."""

    def is_on_the_way(walk: BatchState) -> Bool[Array, ""]:
        is_new = walk.steps + walk.rejected < MOST_STEPS
        return is_new & (walk.depth < course.stop)

    def forward(walk: BatchState) -> BatchState:
        return _stepped(system, reader, walk, course)

    return jax.lax.while_loop(is_on_the_way, forward, walk)


def _stepped(system, reader, walk: BatchState, course: Course) -> BatchState:
    """Try a step; accept it or make it shorter."""
    room = course.stop - walk.depth
    is_last = walk.width >= 0.999 * room
    width = jnp.where(is_last, room, walk.width)
    state, rate, error = _runge_kutta(system, walk, width)
    sizes = jnp.sqrt(jnp.mean(jnp.sum(error * error, axis=2), axis=1))
    excess = jnp.max(sizes) / course.tolerance
    # What is not a number was a step far too long.
    excess = jnp.where(jnp.isfinite(excess), excess, jnp.finfo(excess.dtype).max)
    growth = SAFETY * jnp.maximum(excess, 1e-6) ** (-1 / ORDER)
    trial = jnp.minimum(width * jnp.clip(growth, SHRINK, GROW), course.longest)
    end = jnp.where(is_last, course.stop, walk.depth + width)

    def accept(walk: BatchState) -> BatchState:
        settled = system.settled(state)
        seen = reader.look(system, settled, rate)
        there = BatchState(
            end,
            # A step cut short by the end says little about the next one.
            jnp.where(is_last, jnp.maximum(trial, walk.width), trial),
            settled,
            rate,
            seen,
            walk.index,
            walk.values,
            walk.steps + 1,
            walk.rejected,
        )
        return _finished(system, reader, _read(reader, walk, there, course), course)

    def reject(walk: BatchState) -> BatchState:
        return walk._replace(width=trial, rejected=walk.rejected + 1)

    return jax.lax.cond(excess <= 1, accept, reject, walk)


def _runge_kutta(system, walk: BatchState, width) -> tuple[State, State, State]:
    """Return state and velocity after a step of Tsitouras' method, and the error.

    The stages are a loop: written out, the compiler would compute their velocities
    anew in every sum that they enter.
    """
    stages, errors = _tableau()
    table = jnp.asarray(stages, walk.state.dtype)
    none = jnp.zeros((len(stages) + 1, *walk.state.shape), walk.state.dtype)

    def stage(index, carry):
        rates, _ = carry
        row = table[index]
        move = sum(row[k] * rates[k] for k in range(len(stages)))
        # The last stage is the step itself.
        state = walk.state + width * move
        return rates.at[index + 1].set(system.rate(state)), state

    start = none.at[0].set(walk.rate), walk.state
    rates, state = jax.lax.fori_loop(0, len(stages), stage, start)
    error = sum(float(weight) * rates[k] for k, weight in enumerate(errors))
    return state, rates[-1], width * error


def _tableau() -> tuple[np.ndarray, np.ndarray]:
    """Return the weights of the stages, one row for each, and those of the error."""
    tableau = diffrax.Tsit5.tableau
    stages = np.zeros((len(tableau.a_lower), len(tableau.a_lower)))
    for row, weights in zip(stages, tableau.a_lower, strict=True):
        row[: len(weights)] = weights
    return stages, tableau.b_error


def _read(reader, before: BatchState, there: BatchState, course: Course) -> BatchState:
    """Read the depths that lie in the step."""
    width = there.depth - before.depth
    curve = reader.between(before.seen, there.seen, width)
    last = len(course.depths) - 1

    def lies_in_step(walk: BatchState) -> Bool[Array, ""]:
        depth = course.depths[jnp.minimum(walk.index, last)]
        return (walk.index <= last) & (depth <= there.depth)

    def read_next(walk: BatchState) -> BatchState:
        share = (course.depths[walk.index] - before.depth) / width
        numbers = reader.value(curve.at(share))
        values = walk.values.at[:, walk.index].set(numbers)
        return walk._replace(values=values, index=walk.index + 1)

    return jax.lax.while_loop(lies_in_step, read_next, there)


def _finished(system, reader, walk: BatchState, course: Course) -> BatchState:
    """Go to the end at once if every cloud is one cluster, and stays one."""
    if not system.gathers:
        return walk
    is_over = jnp.all(reader.is_final(walk.seen))
    is_ahead = jnp.arange(len(course.depths)) >= walk.index
    values = jnp.where(is_over & is_ahead[None, :], 1, walk.values)
    depth = jnp.where(is_over, course.stop, walk.depth)
    index = jnp.where(is_over, len(course.depths), walk.index)
    return walk._replace(values=values, depth=depth, index=index)
