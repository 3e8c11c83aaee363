"""Covariances that come back to where they were."""

from typing import NamedTuple, cast

import numpy as np
from scipy.optimize import brentq

from meanformer.attention import AbstractInContextMap
from meanformer.flows import Adaptive, Flow, GaussianTrajectory, solve
from meanformer.gaussian.stationary import covariance_velocity
from meanformer.gaussian.without_warnings import quiet_solve
from meanformer.measures import Gaussian

SAVED = 801
# A path is looked at more closely where it comes so close, in units of its extent.
NEAR = 0.2
RETURNED = 1e-9
MOVED = 1e-3


class Return(NamedTuple):
    """How a covariance comes back.

    Attributes:
        period: the depth between.
        distance: how far from its first place it ends, relative to its size.
    """

    period: float
    distance: float


def early_path(
    gamma: AbstractInContextMap, mu: Gaussian, depth: float
) -> GaussianTrajectory:
    """Follow a Gaussian closely, at many depths."""
    return quiet_solve(gamma, mu, depth, save=SAVED, rtol=1e-11, steps=20_000)


def find_return(gamma: AbstractInContextMap, path: GaussianTrajectory) -> Return | None:
    """Look for a return to the first covariance, or to that half way.

    The second finds a cycle that a path only approaches.
    """
    spreads = np.asarray(path.covariances)
    for start in (0, len(spreads) // 2):
        found = _return_to(gamma, path, spreads, start)
        if found is not None:
            return found
    return None


def _return_to(gamma, path, spreads: np.ndarray, start: int) -> Return | None:
    size = np.linalg.norm(spreads[start])
    distances = np.linalg.norm(spreads[start:] - spreads[start], axis=(1, 2))
    if size == 0 or distances.max() < MOVED * size:
        return None
    left = np.flatnonzero(distances > NEAR * distances.max())
    if len(left) == 0:
        return None
    for index in range(left[0] + 1, len(distances) - 1):
        near = distances[index] < NEAR * distances.max()
        if near and distances[index - 1 : index + 2].min() == distances[index]:
            found = _refined(gamma, path, spreads, start, start + index, size)
            if found.distance < RETURNED:
                return found
    return None


def _refined(gamma, path, spreads, start: int, index: int, size: float) -> Return:
    """Find the closest approach between the neighbours of a saved depth."""
    depths = np.asarray(path.depths)
    before = path.gaussian(index - 1)

    first, spacing = float(depths[index - 1]), float(depths[index] - depths[index - 1])

    def at(share: float) -> tuple[float, np.ndarray]:
        """Return whether the covariance still approaches, and how far it is."""
        depth = first + spacing * share
        moved = solve(
            Flow(gamma), before, (first, depth), save=2, rtol=1e-12, solver=Adaptive()
        )
        spread = moved.covariances[-1]
        away = np.asarray(spread - spreads[start]) / size
        velocity = np.asarray(covariance_velocity(gamma, spread)) * spacing / size
        return float(np.sum(away * velocity)), away

    low, high = 1e-3, float(depths[index + 1] - first) / spacing
    if at(low)[0] * at(high)[0] > 0:
        return Return(float(depths[index] - depths[start]), np.inf)
    share = cast(
        float, brentq(lambda share: at(share)[0], low, high, xtol=1e-15, rtol=1e-14)
    )
    period = first - float(depths[start]) + spacing * share
    return Return(period, float(np.linalg.norm(at(share)[1])))
