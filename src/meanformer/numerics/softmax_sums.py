"""Log-mass and mean under the exponential of the score, with their derivative."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from meanformer.numerics.pairs import Pairs
from meanformer.numerics.terms import (
    Terms,
    as_terms,
    common_dtype,
    is_visible,
    matmul,
    scores_of_tile,
)
from meanformer.numerics.tiles import fold_tiles


@partial(jax.jit, static_argnames="block_size")
def softmax_sum(
    pairs: Pairs, values: Array, *, block_size: int | str
) -> tuple[Array, Array]:
    """Log-mass and mean; see `AbstractPairSums.softmax`."""
    dtype = common_dtype(pairs, values)
    log_mass, mean = tilted_mean(as_terms(pairs, values), block_size)
    return log_mass.astype(dtype), mean.astype(dtype)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def tilted_mean(terms: Terms, block_size: int | str) -> tuple[Array, Array]:
    """Log-mass and mean by a running maximum."""
    masses = terms.tokens.masses

    def start(tilts):
        count = len(tilts)
        nothing = jnp.zeros((count, masses.shape[1]), masses.dtype)
        return jnp.full(count, -jnp.inf, masses.dtype), nothing

    def step(carry, tilts, tokens, seen):
        top, total = carry
        scores = scores_of_tile(tilts, tokens)
        scores = jnp.where(is_visible(tokens, seen), scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=1))
        shift = jnp.where(new_top > -jnp.inf, new_top, 0)
        tilted = matmul(jnp.exp(scores - shift[:, None]), tokens.masses)
        return new_top, total * jnp.exp(top - shift)[:, None] + tilted

    top, total = fold_tiles(step, start, *terms, block_size)
    is_empty = top == -jnp.inf
    mass = jnp.where(is_empty, 1, total[:, 0])
    log_mass = jnp.where(is_empty, -jnp.inf, top + jnp.log(mass))
    return log_mass, total[:, 1:] / mass[:, None]


@tilted_mean.defjvp
def tilted_mean_jvp(block_size, primals, tangents):
    """Derivative of log-mass and mean, from the tangent of the normalised masses."""
    (terms,), (moving,) = primals, tangents
    log_mass, mean = tilted_mean(terms, block_size)
    moved = moved_masses(terms, moving, log_mass, block_size)
    return (log_mass, mean), (moved[:, 0], moved[:, 1:] - mean * moved[:, :1])


def moved_masses(
    terms: Terms, moving: Terms, log_mass: Array, block_size: int | str
) -> Array:
    r"""Sum the tangents of the masses over the tokens.

    $$\sum_j e^{s_{ij} - \Lambda_i} (\dot s_{ij} W_j + \dot W_j),
      \qquad W_j = w_j (1, v_j).$$
    """
    masses = terms.tokens.masses
    top = jnp.where(log_mass > -jnp.inf, log_mass, jnp.inf)

    def start(queries):
        return jnp.zeros((len(queries[0]), masses.shape[1]), masses.dtype)

    def step(carry, queries, tokens, seen):
        tilts, moving_tilts, top = queries
        tokens, moving, caps = tokens
        exponents = scores_of_tile(tilts, tokens) - top[:, None]
        factors = jnp.exp(jnp.minimum(exponents, caps[None, :]))
        factors = jnp.where(seen, factors, 0)
        slopes = matmul(moving_tilts, tokens.points.T)
        slopes += scores_of_tile(tilts, moving)
        moved = matmul(factors * slopes, tokens.masses)
        return carry + moved + matmul(factors, moving.masses)

    queries = terms.tilts, moving.tilts, top
    tokens = terms.tokens, moving.tokens, exponent_caps(masses[:, 0])
    return fold_tiles(step, start, queries, tokens, terms.ranges, block_size)


def exponent_caps(weights: Array) -> Array:
    """Bound the exponents of normalised scores so that no product overflows.

    A token that is present never reaches its bound; an absent one may, since its
    score takes no part in the log-mass.
    """
    half = jnp.log(jnp.finfo(weights.dtype).max) / 2
    present = weights > 0
    own = jnp.where(present, -jnp.log(jnp.where(present, weights, 1)), half)
    return lax.stop_gradient(jnp.maximum(own + 1, half))
