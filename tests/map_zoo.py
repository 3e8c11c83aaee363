"""Every kind of in-context map, once: the table behind the parametrised tests.

A new map gets all tests that hold for all maps by one line in `MAPS`, and those that
hold for some by its name in the sets below.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanformer.attention import (
    L2,
    AbstractInContextMap,
    Blocks,
    Hardmax,
    LayerNorm,
    Linear,
    Masked,
    MultiHead,
    Perceptron,
    Prefix,
    Residual,
    RMSNorm,
    Sigmoid,
    Sinkhorn,
    Softmax,
    StrictCausal,
    Sum,
    UnitNorm,
    Unnormalised,
    Window,
    compose,
)
from meanformer.measures import TokenCloud
from reference import KEY, QUERY, SECOND_HEAD, VALUE, reference_attention

BIASES = {"query_bias": np.array([0.4, -0.7]), "value_bias": np.array([0.2, 0.3])}
TIED = {"query": KEY, "key": KEY, "value": VALUE}
TALL = np.array([[0.3, -0.4], [0.8, 0.1], [0.2, 0.5]])


def exponential_features(rows):
    """Positive features; a module-level function, so that it is compiled once."""
    return jnp.exp(rows / 2)


def _perceptron():
    return Perceptron(TALL, np.array([0.1, -0.2, 0.3]), TALL.T, np.array([0.5, -0.5]))


def _heads():
    first = reference_attention()
    return MultiHead([first, Softmax(KEY, QUERY, SECOND_HEAD)])


def _mixed_heads():
    kinds = (Softmax, L2, Linear, Sigmoid)
    heads = [kind(TALL, TALL[::-1], TALL) for kind in kinds]
    return MultiHead(heads, [TALL.T, TALL.T[::-1], -TALL.T, TALL.T])


def _network():
    attention = Residual(reference_attention(), 0.5)
    return compose(LayerNorm(), Residual(_perceptron(), 0.5), attention)


MAPS = {
    "softmax": reference_attention(),
    "softmax with biases": reference_attention(**BIASES),
    "repulsive softmax": reference_attention(beta=-1.0, allow_negative_beta=True),
    "l2": reference_attention(L2),
    "tied l2": L2(**TIED),
    "half l2 with biases": reference_attention(L2, half=True, **BIASES),
    "kim's l2": L2(**TIED, value_map="kim"),
    "sinkhorn": reference_attention(Sinkhorn),
    "tied sinkhorn": Sinkhorn(**TIED, value_bias=BIASES["value_bias"]),
    "three half-steps": reference_attention(Sinkhorn, half_steps=3, **BIASES),
    "two half-steps": reference_attention(
        Sinkhorn, half_steps=2, end_on="column", kernel="dot", **BIASES
    ),
    "linear": reference_attention(Linear, **BIASES),
    "linear with features": reference_attention(
        Linear, feature_map=exponential_features
    ),
    "normalised linear": reference_attention(
        Linear, feature_map=exponential_features, normalized=True, **BIASES
    ),
    "unnormalised": reference_attention(Unnormalised, **BIASES),
    "sigmoid": reference_attention(Sigmoid, bias=-0.5, **BIASES),
    "hardmax": reference_attention(Hardmax, **BIASES),
    "two heads": _heads(),
    "mixed heads": _mixed_heads(),
    "causal softmax": Masked(reference_attention(**BIASES)),
    "strictly causal sigmoid": Masked(reference_attention(Sigmoid), StrictCausal()),
    "windowed l2": Masked(L2(**TIED), Window(0.5)),
    "divided causal linear": Masked(reference_attention(Linear, **BIASES), divide=True),
    "unnormalised with prefix": Masked(reference_attention(Unnormalised), Prefix(0.4)),
    "hardmax in blocks": Masked(reference_attention(Hardmax), Blocks([0.55])),
    "masked mixed heads": Masked(_mixed_heads()),
    "perceptron": _perceptron(),
    "layer norm": LayerNorm(np.array([1.0, 2.0]), 0.5),
    "rms norm": RMSNorm(2.0),
    "unit norm": UnitNorm(),
    "residual": Residual(reference_attention(Sigmoid), 0.3),
    "sum": Sum([reference_attention(), _perceptron()]),
    "network": _network(),
}

SINKHORNS = {"sinkhorn", "tied sinkhorn", "three half-steps", "two half-steps"}
POINTWISE = {"perceptron", "layer norm", "rms norm", "unit norm"}
NOT_DIFFERENTIABLE = {"hardmax", "hardmax in blocks"}
DIFFERENTIABLE = [name for name in MAPS if name not in NOT_DIFFERENTIABLE]
# Values are averages: the output lies in the image of the convex hull.
AVERAGING = {
    "softmax": VALUE,
    "repulsive softmax": VALUE,
    "l2": VALUE,
    "sinkhorn": VALUE,
    "windowed l2": VALUE,
    "hardmax in blocks": VALUE,
}

# Five tokens, four queries: one shape, so that each map is compiled once.
TOKENS = np.array([[0.9, 0.1], [-0.3, 1.1], [-1.2, 0.4], [0.6, -0.8], [-0.5, -0.6]])
MASSES = np.array([0.25, 0.3, 0.05, 0.15, 0.25])
PLACES = np.array([0.2, 0.8, 0.4, 0.4, 1.0])
QUERIES = np.array([[0.3, -0.2], [-1.0, 0.7], [0.8, 1.3], [-0.4, -0.9]])
QUERY_PLACES = np.array([0.2, 0.5, 0.7, 1.0])


def every_map(names=MAPS, *, slow=()):
    """Parametrise a test over maps by name, marking those that compile long."""
    cases = [
        pytest.param(name, marks=pytest.mark.slow if name in slow else ())
        for name in names
    ]
    return pytest.mark.parametrize("name", cases)


def cloud_of(points=TOKENS, weights=MASSES, places=PLACES, dtype=jnp.float64):
    """The five tokens, or others, as a cloud."""
    points, weights = jnp.asarray(points, dtype), jnp.asarray(weights, dtype)
    places = None if places is None else jnp.asarray(places)
    return TokenCloud(points, weights, positions=places)


def evaluate(gamma, cloud, queries=QUERIES, places=QUERY_PLACES):
    """Return the map's values at the queries as a numpy array."""
    queries = jnp.asarray(queries, cloud.points.dtype)
    return np.asarray(gamma(cloud, queries, positions=jnp.asarray(places)))


def cast(tree, dtype):
    """Return a map or cloud with all its floating-point arrays in another type."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)


class Counted(AbstractInContextMap):
    """A map of one's own that counts how often it is called."""

    matrix: jax.Array
    calls: ClassVar[list[int]] = []

    input_dimension: ClassVar[int] = 2
    output_dimension: ClassVar[int] = 2

    def __call__(self, mu, x, *, positions=None):
        self.calls.append(1)
        return jnp.tanh(x @ self.matrix) + mu.mean()[None]
