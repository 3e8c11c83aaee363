"""Softmax attention and its flow without the library: dense, in NumPy and SciPy.

What experiments compare with. Nothing of `meanformer` computes anything here.
"""

from collections.abc import Callable, Sequence
from typing import Any

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
    query, key, value = _matrices(attention)
    scores = float(attention.beta) * (queries @ query.T) @ (tokens @ key.T).T
    masses = weights * np.exp(scores)
    return masses @ tokens @ value.T / masses.sum(axis=1, keepdims=True)


def by_scipy(
    velocity: Callable[[float, np.ndarray], np.ndarray],
    start: np.ndarray,
    depths: Sequence[float] | np.ndarray,
    *,
    method: str = "DOP853",
    rtol: float = 1e-12,
    atol: float = 1e-13,
) -> np.ndarray:
    """Integrate an array of any shape by SciPy, and return it at these depths.

    Args:
        velocity: the rate of change, from the depth and the array.
        start: the array at the first depth.
        depths: rising, the first one is where the integration starts.
        method: as for `scipy.integrate.solve_ivp`, like the tolerances.
        rtol: relative tolerance.
        atol: absolute tolerance.
    """
    start = np.asarray(start)
    solution = scipy.integrate.solve_ivp(
        lambda t, flat: np.ravel(velocity(t, flat.reshape(start.shape))),
        (depths[0], depths[-1]),
        start.ravel(),
        t_eval=depths,
        method=method,
        rtol=rtol,
        atol=atol,
    )
    return solution.y.T.reshape(-1, *start.shape)


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
    query, key, value = _matrices(attention)
    values, vectors = np.linalg.eig(value)
    dual = np.linalg.inv(vectors)

    def velocity(t, rescaled):
        tokens = rescaled @ ((vectors * np.exp(t * values)) @ dual).real.T
        scores = float(attention.beta) * (tokens @ query.T) @ (tokens @ key.T).T
        masses = weights * np.exp(scores - scores.max(axis=1, keepdims=True))
        means = masses @ rescaled / masses.sum(axis=1, keepdims=True)
        return (means - rescaled) @ value.T

    options = {"method": method, "rtol": 1e-11, "atol": 1e-12}
    return by_scipy(velocity, points, [start, depth], **options)[-1]


def dense_flow(attention: Softmax, cloud: TokenCloud, depth: float) -> np.ndarray:
    """Return the tokens at a depth, by SciPy's DOP853 at tolerance 1e-12."""
    weights, points = np.asarray(cloud.weights), np.asarray(cloud.points)

    def velocity(_, tokens):
        return dense_velocity(attention, weights, tokens)

    return by_scipy(velocity, points, [0, depth])[-1]


def _matrices(attention: Softmax) -> tuple[np.ndarray, ...]:
    return tuple(map(np.asarray, (attention.query, attention.key, attention.value)))


def angle_velocity(_, angles: np.ndarray, beta: float, weights: Any = 1.0):
    """Return the velocity of tokens on the circle, written out in their angles."""
    gaps = angles[None, :] - angles[:, None]
    masses = weights * np.exp(beta * np.cos(gaps))
    return (masses * np.sin(gaps)).sum(1) / masses.sum(1)


def dense_angle_flow(
    angles: Any, beta: float, depths: Any, *, weights: Any = 1.0, events: Any = None
):
    """Return what SciPy's DOP853 makes of the flow, at tolerance 1e-12.

    Args:
        angles: the angles at the first depth.
        beta: the inverse temperature.
        depths: where the angles are wanted.
        weights: the masses; equal ones by default.
        events: functions of depth and angles whose zeros are located.
    """
    return scipy.integrate.solve_ivp(
        lambda depth, now: angle_velocity(depth, now, beta, weights),
        (depths[0], depths[-1]),
        angles,
        method="DOP853",
        t_eval=depths,
        events=events,
        rtol=1e-12,
        atol=1e-13,
    )
