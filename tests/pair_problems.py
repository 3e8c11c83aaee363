"""Random problems for pair sums, and their answers by dense formulas in numpy."""

import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp

from meanformer.numerics.pair_sums.pairs import Pairs


def random_problem(
    queries=13,
    tokens=17,
    dimension=3,
    width=2,
    *,
    seed=0,
    masked=False,
    offsets=True,
    dtype=np.float64,
):
    """Return pairs and values; token 2 is absent, masked queries see random ranges."""
    random = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(random.standard_normal(shape), dtype)

    weights = random.uniform(0.1, 1.0, tokens)
    weights[2 % tokens] = 0.0 if tokens > 1 else 1.0
    first = random.integers(0, tokens, queries)
    pairs = Pairs(
        tilts=normal(queries, dimension),
        points=normal(tokens, dimension),
        weights=jnp.asarray(weights, dtype),
        offsets=normal(tokens) if offsets else None,
        first=jnp.asarray(first) if masked else None,
        last=jnp.asarray(first + random.integers(1, tokens, queries))
        if masked
        else None,
    )
    return pairs, normal(tokens, width)


def ordered_problem(count, mask):
    """Return pairs and values of a sequence, seen causally or by a window or prefix."""
    pairs, values = random_problem(count, count)
    here = jnp.arange(count)
    first, last = jnp.zeros_like(here), here + 1
    if mask == "window":
        first = jnp.maximum(here - count // 3, 0)
    if mask == "prefix":
        last = jnp.maximum(last, count // 2)
    fields = pairs.tilts, pairs.points, pairs.weights, pairs.offsets
    return Pairs(*fields, first, last), values


def dense_scores(pairs):
    """Scores in double precision, minus infinity where a query does not see a token."""
    scores = np.asarray(pairs.tilts, float) @ np.asarray(pairs.points, float).T
    if pairs.offsets is not None:
        scores = scores + np.asarray(pairs.offsets, float)
    index = np.arange(len(pairs.points))
    seen = np.broadcast_to(np.asarray(pairs.weights) > 0, scores.shape).copy()
    if pairs.first is not None:
        seen &= index >= np.asarray(pairs.first)[:, None]
        seen &= index < np.asarray(pairs.last)[:, None]
    return np.where(seen, scores, -np.inf)


def dense_softmax(pairs, values):
    """Log-mass and mean by scipy; minus infinity and zero where nothing is seen."""
    scores = dense_scores(pairs)
    weights = np.asarray(pairs.weights, float)
    with np.errstate(divide="ignore"):
        log_mass = logsumexp(scores, b=weights, axis=1)
    shift = np.where(log_mass > -np.inf, log_mass, 0)
    return log_mass, np.exp(scores - shift[:, None]) * weights @ np.asarray(
        values, float
    )


def traceable_softmax(pairs, values):
    """The same in plain JAX, to be differentiated automatically."""
    scores = jnp.where(pairs.visible(), pairs.scores(), -jnp.inf)
    top = scores.max(axis=1)
    masses = jnp.exp(scores - top[:, None]) * pairs.weights[None, :]
    mass = masses.sum(axis=1)
    return top + jnp.log(mass), masses @ values / mass[:, None]
