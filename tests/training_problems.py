"""Small transformers and data sets for the tests of training."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import meanformer as mf
from meanformer import training

IDENTITY = np.eye(2)


def first_reference():
    """Two layers of two heads, one context: the reference R1 of the specification."""
    query = [[[[1, 0.5], [0, 1]], IDENTITY], [IDENTITY, [[1, 1], [0, 1]]]]
    key = [[[[0.5, -1], [1, 0]], IDENTITY], [[[0, 1], [-1, 0]], [[1, 0], [1, 1]]]]
    value = [
        [[[1, -0.5], [0.25, 1]], -IDENTITY / 2],
        [[[0, 1], [1, 0]], [[0.5, 0], [0, -1]]],
    ]
    arrays = (np.array(each, float) for each in (query, key, value))
    model = training.MeanFieldTransformer(*arrays, beta=1.5)
    points = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.5]])
    cloud = mf.TokenCloud(points, [0.5, 0.25, 0.25])
    return model, training.Dataset([cloud], [[0.5, -1.0]], [[0.0, 1.0]])


def contexts_of_sizes(sizes, dimension, key):
    """Random contexts with random weights."""
    clouds = []
    for size, one in zip(sizes, jr.split(key, len(sizes)), strict=True):
        key_x, key_w = jr.split(one)
        weights = jr.uniform(key_w, (size,), minval=0.2)
        points = jr.normal(key_x, (size, dimension))
        clouds.append(mf.TokenCloud(points, weights, normalize=True))
    return clouds


def random_problem(key, *, sizes=(3, 5, 4), dimension=2, layers=3, heads=2, **options):
    """A random transformer, and contexts of different sizes, padded."""
    keys = jr.split(key, 4)
    clouds = contexts_of_sizes(sizes, dimension, keys[0])
    shape = (len(sizes), dimension)
    queries, targets = jr.normal(keys[1], shape), jr.normal(keys[2], shape)
    model = training.MeanFieldTransformer.draw(
        layers, heads, dimension, key=keys[3], **options
    )
    return model, training.Dataset(clouds, queries, targets)


def largest_difference(first, second):
    """The largest relative difference of two trees of particles."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return max(
        float(jnp.abs(a - b).max() / (1e-300 + jnp.abs(b).max())) for a, b in pairs
    )


def dependent_contexts():
    """The contexts {a, b}, {c, e} and their sums: m_3 = m_1 + m_2 for every head."""
    a, b, c, e = np.array([[1, 0], [-0.5, 0.8], [0.3, -1], [-0.2, 0.4]])
    return [np.array(rows) for rows in ([a, b], [c, e], [a + c, a + e, b + c, b + e])]
