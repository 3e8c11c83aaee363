"""Softmax attention on the circle in angles, without the library, by SciPy."""

from typing import Any

import numpy as np
import scipy.integrate


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
