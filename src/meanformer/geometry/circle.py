"""Points of the unit circle and their angles, in NumPy or JAX as they are given."""

from typing import TypeVar

import jax
import numpy as np

Numbers = TypeVar("Numbers", np.ndarray, jax.Array)


def on_circle(angles: Numbers) -> Numbers:
    """Return the points of the plane at these angles, along a new last axis."""
    library = angles.__array_namespace__()
    return library.stack([library.cos(angles), library.sin(angles)], axis=-1)


def angles_of(points: Numbers) -> Numbers:
    """Return the angles of points of the plane, from zero to a full turn."""
    library = points.__array_namespace__()
    return library.arctan2(points[..., 1], points[..., 0]) % (2 * np.pi)
