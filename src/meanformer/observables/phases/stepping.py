r"""Many small clouds through depth together, with an adaptive step.

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

from meanformer.flows.trajectories.interpolation import Place, hermite
from meanformer.observables.phases.motions import AbstractMotion, State
from meanformer.observables.phases.quantities import AbstractQuantity, Interpolated

SAFETY, SHRINK, GROW = 0.8, 0.2, 2.0
ORDER = 5
FIRST_MOVE = 0.03  # angle by which the fastest token moves in the first trial step
MOST_STEPS = 20_000


class BatchState(NamedTuple):
    """A batch of clouds on its way: depth, next step, state, and values read."""

    depth: Float[Array, ""]  # where it is
    width: Float[Array, ""]  # the next step to try
    state: State  # the clouds
    rate: State  # their velocity
    seen: Interpolated  # what the quantity is computed from
    index: Int[Array, ""]  # the first depth that is not read yet
    values: Float[Array, "b t"]  # what was read, one row per cloud
    steps: Int[Array, ""]  # accepted steps
    rejected: Int[Array, ""]  # rejected steps


class Course(eqx.Module):
    """The depths to read, the depth to end at, the error and the step allowed."""

    depths: Float[Array, " t"]  # depths at which the quantity is read, increasing
    stop: Float[Array, ""]  # where to end, at the latest
    # Root mean square error of the tokens of a cloud, per step.
    tolerance: Float[Array, ""]
    longest: Float[Array, ""]  # longest step


def begun(
    motion: AbstractMotion, quantity: AbstractQuantity, state: State, course: Course
) -> BatchState:
    """Return the batch at depth zero, with nothing read."""
    rate, dtype = motion.rate(state), state.dtype
    fastest = jnp.sqrt(jnp.max(jnp.sum(rate * rate, axis=2)))
    width = FIRST_MOVE / jnp.maximum(fastest, FIRST_MOVE / course.depths[-1])
    zero = jnp.zeros((), int)
    values = jnp.zeros((len(state), len(course.depths)), dtype)
    seen = quantity.interpolated(motion, state, rate)
    start = jnp.zeros((), dtype)
    return BatchState(start, width, state, rate, seen, zero, values, zero, zero)


def continued(
    motion: AbstractMotion,
    quantity: AbstractQuantity,
    batch: BatchState,
    course: Course,
) -> BatchState:
    """Go on to the end of the course, perhaps under another motion than before."""
    rate = motion.rate(batch.state)
    seen = quantity.interpolated(motion, batch.state, rate)

    def is_on_the_way(batch: BatchState) -> Bool[Array, ""]:
        is_new = batch.steps + batch.rejected < MOST_STEPS
        return is_new & (batch.depth < course.stop)

    def forward(batch: BatchState) -> BatchState:
        return _stepped(motion, quantity, batch, course)

    start = batch._replace(rate=rate, seen=seen)
    return jax.lax.while_loop(is_on_the_way, forward, start)


def _stepped(motion, quantity, batch: BatchState, course: Course) -> BatchState:
    """Try a step; accept it or make it shorter."""
    room = course.stop - batch.depth
    is_last = batch.width >= 0.999 * room
    width = jnp.where(is_last, room, batch.width)
    state, rate, error = _runge_kutta(motion, batch, width)
    sizes = jnp.sqrt(jnp.mean(jnp.sum(error * error, axis=2), axis=1))
    excess = jnp.max(sizes) / course.tolerance
    # What is not a number was a step far too long.
    excess = jnp.where(jnp.isfinite(excess), excess, jnp.finfo(excess.dtype).max)
    growth = SAFETY * jnp.maximum(excess, 1e-6) ** (-1 / ORDER)
    trial = jnp.minimum(width * jnp.clip(growth, SHRINK, GROW), course.longest)

    def accept(batch: BatchState) -> BatchState:
        settled = motion.settled(state)
        there = batch._replace(
            depth=jnp.where(is_last, course.stop, batch.depth + width),
            # A step cut short by the end says little about the next one.
            width=jnp.where(is_last, jnp.maximum(trial, batch.width), trial),
            state=settled,
            rate=rate,
            seen=quantity.interpolated(motion, settled, rate),
            steps=batch.steps + 1,
        )
        read = _read(quantity, batch, there, course)
        return _finished(quantity, read, course) if motion.gathers else read

    def reject(batch: BatchState) -> BatchState:
        return batch._replace(width=trial, rejected=batch.rejected + 1)

    return jax.lax.cond(excess <= 1, accept, reject, batch)


def _runge_kutta(motion, batch: BatchState, width) -> tuple[State, State, State]:
    """Return state and velocity after a step of Tsitouras' method, and the error.

    The stages are a loop: written out, the compiler would compute their velocities
    anew in every sum that they enter.
    """
    tableau, dtype = diffrax.Tsit5.tableau, batch.state.dtype
    count = len(tableau.a_lower)
    rows = [np.pad(row, (0, count - len(row))) for row in tableau.a_lower]
    table = jnp.asarray(np.stack(rows), dtype)
    none = jnp.zeros((count + 1, *batch.state.shape), dtype)

    def stage(index, carry):
        rates, _ = carry
        row = table[index]
        move = sum(row[k] * rates[k] for k in range(count))
        # The last stage is the step itself.
        state = batch.state + width * move
        return rates.at[index + 1].set(motion.rate(state)), state

    start = none.at[0].set(batch.rate), batch.state
    rates, state = jax.lax.fori_loop(0, count, stage, start)
    error = sum(float(weight) * rates[k] for k, weight in enumerate(tableau.b_error))
    return state, rates[-1], width * error


def _read(quantity, before: BatchState, there: BatchState, course) -> BatchState:
    """Read the depths that lie in the step."""
    width = there.depth - before.depth
    ends = jax.tree.map(lambda *parts: jnp.stack(parts), before.seen, there.seen)
    slopes = quantity.slopes(ends, width)
    last = len(course.depths) - 1

    def lies_in_step(batch: BatchState) -> Bool[Array, ""]:
        depth = course.depths[jnp.minimum(batch.index, last)]
        return (batch.index <= last) & (depth <= there.depth)

    def read_next(batch: BatchState) -> BatchState:
        share = (course.depths[batch.index] - before.depth) / width
        seen = hermite(Place(1, share, width), ends.values, slopes)
        values = batch.values.at[:, batch.index].set(quantity.value(seen))
        return batch._replace(values=values, index=batch.index + 1)

    return jax.lax.while_loop(lies_in_step, read_next, there)


def _finished(quantity, batch: BatchState, course: Course) -> BatchState:
    """Go to the end at once if every cloud is one cluster, and stays one."""
    is_over = jnp.all(quantity.is_final(batch.seen))
    is_ahead = jnp.arange(len(course.depths)) >= batch.index
    return batch._replace(
        values=jnp.where(is_over & is_ahead[None, :], 1, batch.values),
        depth=jnp.where(is_over, course.stop, batch.depth),
        index=jnp.where(is_over, len(course.depths), batch.index),
    )
