"""Atoms on the circle and searches for critical points, as experiments share them."""

from collections.abc import Sequence

import jax.random as jr
import numpy as np

import meanformer as mf
from meanformer.experiments.framework.experiment import Table
from meanformer.geometry import circle
from meanformer.observables import CriticalPoint, CriticalPoints, find_critical_points


def angles_of(cloud: mf.TokenCloud) -> np.ndarray:
    """The angles of atoms, from zero to a full turn."""
    return circle.angles_of(np.asarray(cloud.points))


def search_of(
    flow: mf.Flow, masses: Sequence[float], *, starts: int, seed: int
) -> CriticalPoints:
    """All critical points that a search finds, by Newton's method and deflation."""
    return find_critical_points(
        flow,
        np.array(masses),
        key=jr.key(seed),
        starts=starts,
        deflations=starts // 2,
        depth=0.0,
    )


def pull(gap, beta: float):
    """The pull of a token on another one, behind it by this angle."""
    return np.exp(beta * np.cos(gap)) * np.sin(gap)


def turned(angles, target) -> np.ndarray:
    """How far angles are from others, around the circle."""
    return np.abs((np.asarray(angles) - target + np.pi) % (2 * np.pi) - np.pi)


def full_index(point: CriticalPoint) -> int:
    """The number of growing directions of two tokens, which may part if joined."""
    splits = point.cloud.count == 1 and float(point.splitting[0]) > 0
    return int(point.index or 0) + int(splits)


def table_of(found: CriticalPoints) -> Table:
    """The points of a search."""
    rows = [
        [
            point.kind,
            point.cloud.count,
            point.energy,
            full_index(point),
            ", ".join(f"{angle:.6f}" for angle in angles_of(point.cloud)),
            int(visits),
        ]
        for point, visits in zip(found, found.visits, strict=True)
    ]
    heads = ["kind", "atoms", "energy", "index among two tokens", "angles", "visits"]
    caption = "Critical points of the search, one of each set of images by symmetries."
    return Table(heads, rows, caption)
