"""The reference cloud of the Sinkhorn tests, and a dense algorithm to compare with."""

import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp

from meanformer.numerics.pair_sums.sums import Blocked
from meanformer.numerics.sinkhorn.self_transport import SelfTransport

POINTS = np.array([[1, 0], [0, 1], [-1, 0.5], [0.5, -1]])
WEIGHTS = np.array([0.4, 0.3, 0.2, 0.1])
QUERY = np.array([[0.6, -0.2], [0.3, 0.5]])
KEY = np.array([[0.4, 0.1], [-0.3, 0.7]])
VALUE = np.array([[0.5, 0.2], [-0.1, 0.8]])
FORM = 2 * KEY.T @ QUERY
L2_START = -np.sum((POINTS @ KEY.T) ** 2, axis=1)


def transport(points=POINTS, weights=WEIGHTS, form=FORM, *, dtype=np.float64):
    """Build a problem; by default that of the reference cloud."""
    arrays = [jnp.asarray(a, dtype) for a in (points, weights, form)]
    return SelfTransport(*arrays, Blocked())


def random_transport(seed, *, count=8, dimension=2, beta=1.0, dtype=np.float64):
    """Build a problem with normal points, random weights and an asymmetric form."""
    random = np.random.default_rng(seed)
    points = random.normal(size=(count, dimension))
    weights = random.dirichlet(np.ones(count))
    form = 2 * beta * random.normal(size=(dimension, dimension)) / dimension**0.5
    return transport(points, weights, form, dtype=dtype)


def attention(problem, potentials, value=VALUE):
    """Evaluate Sinkhorn attention on the tokens themselves."""
    return problem.row_average(potentials.g, problem.points) @ value.T


def dense_rounds(points, weights, form, g, count):
    """Alternate with dense arrays of NumPy; return both potentials, rows last."""
    scores, logs = points @ form.T @ points.T, np.log(weights)

    def row_step(g):
        return -logsumexp(scores + g + logs, axis=1)

    for _ in range(count):
        g = -logsumexp(scores + (row_step(g) + logs)[:, None], axis=0)
    return row_step(g), g
