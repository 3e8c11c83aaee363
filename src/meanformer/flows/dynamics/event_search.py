"""Where within a step an event happens: a bracketed search without derivatives."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix
from jaxtyping import Array, Float, Int


class Bracket(eqx.Module):
    """An interval that holds the event: it lies after `left`, not after `right`."""

    left: Float[Array, ""]
    right: Float[Array, ""]
    left_value: Float[Array, ""]
    right_value: Float[Array, ""]
    value: Float[Array, ""]
    count: Int[Array, ""]


class FirstZero(optimistix.AbstractRootFinder):
    """Finds where conditions, positive at the start of a step, come down to zero.

    The Illinois variant of the false position: the bracket always shrinks, and a
    nearly linear condition takes a handful of evaluations. It ends at an exact zero,
    which a condition should return where it is met to rounding, or at an empty bracket.
    Of several conditions only one is not zero throughout: they are added.
    """

    rtol: ClassVar[float] = 0.0
    atol: ClassVar[float] = 0.0
    norm: ClassVar[Any] = staticmethod(optimistix.max_norm)

    def init(self, fn, y, args, options, f_struct, aux_struct, tags) -> Bracket:
        """Begin with the whole step; the first two evaluations are at its ends."""
        dtype = jnp.result_type(y)
        left, right = (jnp.asarray(options[k], dtype) for k in ("lower", "upper"))
        one = jnp.ones((), dtype)
        return Bracket(left, right, one, -one, one, jnp.array(0))

    def step(self, fn, y, args, options, state: Bracket, tags):
        """Evaluate at one place, shrink the bracket, choose the next place."""
        values, aux = fn(y, args)
        value = jnp.asarray(sum(jax.tree.leaves(values)), y.dtype)
        # Where the same end moves twice, the value at the other counts half: without
        # this, false position creeps.
        is_left = value > 0
        moves_again = (state.count > 2) & (is_left == (state.value > 0))
        half = jnp.where(moves_again, 0.5, 1).astype(y.dtype)
        bracket = Bracket(
            jnp.where(is_left, y, state.left),
            jnp.where(is_left, state.right, y),
            jnp.where(is_left, value, half * state.left_value),
            jnp.where(is_left, half * state.right_value, value),
            value,
            state.count + 1,
        )
        place = jnp.where(state.count == 0, state.left, _crossing(bracket))
        return jnp.where(value == 0, y, place), bracket, aux

    def terminate(self, fn, y, args, options, state: Bracket, tags):
        """End at a zero, or where no number lies between the ends."""
        is_empty = jnp.nextafter(state.left, state.right) >= state.right
        ended = (state.count > 0) & ((state.value == 0) | is_empty)
        return ended, optimistix.RESULTS.successful

    def postprocess(self, fn, y, aux, args, options, state, tags, result):
        """Return the place found."""
        return y, aux, {}


def _crossing(bracket: Bracket) -> Float[Array, ""]:
    """Return where the line through both ends is zero, strictly inside."""
    height = bracket.left_value - bracket.right_value
    share = bracket.left_value / jnp.where(height > 0, height, 1)
    place = bracket.left + share * (bracket.right - bracket.left)
    middle = bracket.left + (bracket.right - bracket.left) / 2
    inside = (place > bracket.left) & (place < bracket.right)
    return jnp.where(inside, place, middle)
