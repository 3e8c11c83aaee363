"""Softmax attention and its flow without the library: dense, in NumPy and SciPy.

What experiments compare with. Nothing of `meanformer` computes anything here.
"""

import numpy as np
import scipy.integrate

from meanformer.attention import Softmax
from meanformer.measures import TokenCloud


def dense_velocity(
    attention: Softmax,
    weights: np.ndarray,
    tokens: np.ndarray,
    queries: np.ndarray | None = None,
) -> np.ndarray:
    r"""Return $V\sum_j w_je^{s_{ij}}x_j/\sum_jw_je^{s_{ij}}$, written out.

    The queries are the tokens themselves, unless others are given.
    """
    queries = tokens if queries is None else queries
    query, key, value = (
        np.asarray(matrix)
        for matrix in (attention.query, attention.key, attention.value)
    )
    scores = float(attention.beta) * (queries @ query.T) @ (tokens @ key.T).T
    masses = weights * np.exp(scores)
    return masses @ tokens @ value.T / masses.sum(axis=1, keepdims=True)


def dense_rescaled_flow(
    attention: Softmax,
    cloud: TokenCloud,
    depth: float,
    *,
    start: float = 0.0,
    method: str = "DOP853",
) -> np.ndarray:
    r"""Return the tokens $z = e^{-tV}x$ at a depth, by SciPy at tolerance 1e-11.

    $\dot z_i = \sum_jP_{ij}V(z_j - z_i)$ with scores of $e^{tV}z$, by eigenvectors of
    $V$; from the depth `start` on. With `method="LSODA"` where it is stiff.
    """
    weights, points = np.asarray(cloud.weights), np.asarray(cloud.points)
    query, key, value = (
        np.asarray(matrix)
        for matrix in (attention.query, attention.key, attention.value)
    )
    values, vectors = np.linalg.eig(value)
    dual = np.linalg.inv(vectors)

    def velocity(t, flat):
        rescaled = flat.reshape(points.shape)
        tokens = rescaled @ ((vectors * np.exp(t * values)) @ dual).real.T
        scores = float(attention.beta) * (tokens @ query.T) @ (tokens @ key.T).T
        masses = weights * np.exp(scores - scores.max(axis=1, keepdims=True))
        means = masses @ rescaled / masses.sum(axis=1, keepdims=True)
        return ((means - rescaled) @ value.T).ravel()

    solution = scipy.integrate.solve_ivp(
        velocity, (start, depth), points.ravel(), method=method, rtol=1e-11, atol=1e-12
    )
    return solution.y[:, -1].reshape(points.shape)


def dense_flow(attention: Softmax, cloud: TokenCloud, depth: float) -> np.ndarray:
    """Return the tokens at a depth, by SciPy's DOP853 at tolerance 1e-12."""
    weights, points = np.asarray(cloud.weights), np.asarray(cloud.points)

    def velocity(_, flat):
        return dense_velocity(attention, weights, flat.reshape(points.shape)).ravel()

    solution = scipy.integrate.solve_ivp(
        velocity, (0, depth), points.ravel(), method="DOP853", rtol=1e-12, atol=1e-13
    )
    return solution.y[:, -1].reshape(points.shape)
