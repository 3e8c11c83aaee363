"""The derivative of a fast sum: that of the level it was computed at."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from meanformer.numerics.arrays import any_in_batch
from meanformer.numerics.fourier.frames import frames_of
from meanformer.numerics.fourier.level_sums import MassAndMean, level_sum
from meanformer.numerics.fourier.levels import Level
from meanformer.numerics.fourier.patches import Decisions, exactly, queries_of, replaced
from meanformer.numerics.pair_sums.pairs import Pairs
from meanformer.numerics.pair_sums.tiles import only_moving

Levels = tuple[Level, ...]
Terms = tuple[Pairs, Float[Array, "n v"]]
# The same with `None` for what does not move.
Moving = tuple[Pairs, Float[Array, "n v"] | None]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def with_derivative(
    levels: Levels,
    found: MassAndMean,
    decisions: Decisions,
    pairs: Pairs,
    values: Float[Array, "n v"],
) -> MassAndMean:
    """Return what was found, as a function of pairs and values."""
    return found


def with_derivative_jvp(levels, primals, tangents):
    """Differentiate the sum at the level and the patches that were decided on."""
    found, decisions, *terms = primals
    moving = only_moving(tuple(tangents[2:]))
    # The value again, so that derivatives of this derivative see it move, too.
    found = with_derivative(levels, found, decisions, *terms)
    if not jax.tree.leaves(moving):
        return found, jax.tree.map(jnp.zeros_like, found)
    return found, moved_sum(levels, decisions, tuple(terms), moving)


with_derivative.defjvp(with_derivative_jvp, symbolic_zeros=True)


def moved_sum(
    levels: Levels, decisions: Decisions, terms: Terms, moving: Moving
) -> MassAndMean:
    """Return the derivative, linear in what moves; `None` stands for what does not.

    Every branch computes again what it needs, so that the backward pass keeps nothing
    but the terms.
    """
    level = level_for_derivative(levels, decisions, terms, moving)

    def of_branch(function):
        @jax.checkpoint
        def derivative(terms, moving):
            return derivative_of(function, terms, moving)

        return derivative

    def at_level(level: Level):
        return of_branch(partial(differentiable_level_sum, level, moving))

    devices = levels[0].devices
    branches = [*map(at_level, levels), of_branch(partial(exactly, devices=devices))]
    moved = lax.switch(level, branches, terms, moving)

    @of_branch
    def of_patch(pairs, values):
        return exactly(queries_of(pairs, decisions.patch), values, devices)

    is_needed = any_in_batch(decisions.is_patched.any())
    return lax.cond(
        is_needed,
        lambda moved, *both: replaced(moved, decisions, of_patch(*both)),
        lambda moved, *_: moved,
        moved,
        terms,
        moving,
    )


def differentiable_level_sum(
    level: Level, moving: Moving, pairs: Pairs, values: Float[Array, "n v"]
) -> MassAndMean:
    """Return the sum at a level in a form that can be differentiated."""
    counted = counted_tokens(pairs, moving)
    frame = frames_of(pairs, counted)[level.kind]
    return level_sum(frame, pairs, values, level, counted, is_moving=True)[0]


def counted_tokens(pairs: Pairs, moving: Moving) -> Array:
    """Return which tokens matter: absent ones do if the weights move."""
    present = pairs.weights > 0
    return present if moving[0].weights is None else jnp.ones_like(present)


def level_for_derivative(
    levels: Levels, decisions: Decisions, terms: Terms, moving: Moving
) -> Int[Array, ""]:
    """Return the level that was used, if it is right for absent tokens, too.

    Where the weights move, absent tokens have derivatives. Those among the others
    change neither the frame nor the largest mass; for those outside of the cloud, or
    heavier than all of it, the derivative is computed exactly.
    """
    if moving[0].weights is None:
        return decisions.level
    pairs = terms[0]
    present, everyone = pairs.weights > 0, counted_tokens(pairs, moving)
    is_same = jnp.array(True)
    for kind, frame in frames_of(pairs, present).items():
        wider = frames_of(pairs, everyone)[kind]
        top = jnp.where(present, frame.log_tokens, -jnp.inf).max()
        is_same &= wider.is_like(frame) & (wider.log_tokens.max() <= top)
    is_same = ~any_in_batch(~is_same)
    return jnp.where(is_same, decisions.level, len(levels))


def derivative_of(function, terms: PyTree, moving: PyTree) -> PyTree:
    """Return the derivative of a function in the direction of what moves."""
    does_move = jax.tree.map(
        lambda a: a is not None, moving, is_leaf=lambda a: a is None
    )
    moves, still = eqx.partition(terms, does_move)

    def of_moving(moves):
        return function(*eqx.combine(moves, still))

    return jax.jvp(of_moving, (moves,), (moving,))[1]
