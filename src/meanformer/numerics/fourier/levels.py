"""Levels: how many modes a transform has and how accurate it is, both fixed by shape.

Compiled code needs to know the size of a grid in advance. What a cloud needs changes
along a flow. So a sum carries a short ladder of levels and takes, each time, the
cheapest one that is enough.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

GAUSSIAN, CIRCLE = "gaussian", "circle"
LARGEST_DIMENSION = 3

# Few enough to compile, close enough to waste little: the cost in one dimension is
# that of the points, in three that of the modes.
GAUSSIAN_MODES = {
    1: (256, 4096, 65536),
    2: (32, 96, 300, 900),
    3: (20, 32, 50, 80, 128),
}
CIRCLE_MODES = (32, 128, 1024, 8192)
# What the transforms can reach, a little above rounding.
FINEST = {jnp.dtype(jnp.float64): 3e-14, jnp.dtype(jnp.float32): 2e-6}
# Error of a mass or a mean in units of the accuracy, found to be up to 5.6 where the
# accuracy is coarse, in clouds of many shapes: errors of a transform are local, so that
# they are in proportion to the mass that a query finds.
ERROR = 6.0
# How far below the tolerance all accuracies but the finest are. The first, a little
# coarser than a digit, keeps it nearly always. In three dimensions, where a digit costs
# most, another branch is worth compiling.
MARGINS = {1: (9.0,), 2: (9.0,), 3: (9.0, 90.0)}


# Queries that are summed exactly in any case.
SAMPLE = 16


class Devices(NamedTuple):
    """The devices along an axis of a mesh, which share the queries and the tokens.

    Attributes:
        mesh: the mesh.
        axis: the name of the axis.
        exact: sums exactly on them: `exact(mesh, axis, pairs, values)`.
    """

    mesh: Mesh
    axis: str
    exact: Callable


class Level(NamedTuple):
    """One transform: its kind, modes along each axis, accuracy, and who computes it."""

    kind: str
    modes: int
    accuracy: float
    devices: Devices | None = None

    def __str__(self) -> str:
        """Describe modes and accuracy."""
        kind = "Gaussian" if self.kind == GAUSSIAN else "circle"
        return f"{kind}, {self.modes} modes per axis, accuracy {self.accuracy:.0e}"


def working_dtype() -> jnp.dtype:
    """Return the widest floating-point type that JAX is allowed to use."""
    return jax.dtypes.canonicalize_dtype(jnp.float64)


def smallest_tolerance(dtype: jnp.dtype) -> float:
    """Return the smallest tolerance that sums of this type can keep."""
    return 8 * FINEST[dtype]


def accuracies(dimension: int, tolerance: float, dtype: jnp.dtype) -> tuple[float, ...]:
    """Return the accuracies worth trying for a tolerance, coarsest first."""
    finest = FINEST[dtype]
    coarser = [tolerance / margin for margin in MARGINS[dimension]]
    return (*[accuracy for accuracy in coarser if accuracy > finest], finest)


class Ladder(NamedTuple):
    """The levels that a sum may use, and the tolerance that it keeps.

    They are fixed when the sum is compiled.
    """

    levels: tuple[Level, ...]
    tolerance: float

    @property
    def devices(self) -> Devices | None:
        """The devices that share the work, if there are several."""
        return self.levels[0].devices

    def shared(self, devices: Devices) -> "Ladder":
        """Return the same levels, computed by several devices."""
        levels = tuple(level._replace(devices=devices) for level in self.levels)
        return Ladder(levels, self.tolerance)


def full_ladder(dimension: int, tolerance: float, dtype: jnp.dtype) -> Ladder:
    """Return all levels for points of a dimension, those with few modes first."""
    kinds = [(GAUSSIAN, modes) for modes in GAUSSIAN_MODES[dimension]]
    if dimension == 2:
        kinds = [(CIRCLE, modes) for modes in CIRCLE_MODES] + kinds
    reached = accuracies(dimension, tolerance, dtype)
    levels = tuple(
        Level(kind, modes, accuracy) for accuracy in reached for kind, modes in kinds
    )
    return Ladder(levels, tolerance)


def kernel_width(accuracy: float) -> int:
    """Return how many nodes of the grid a point touches along each axis."""
    return math.ceil(-math.log10(accuracy)) + 1
