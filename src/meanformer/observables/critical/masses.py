"""The best masses of given atoms, for a quadratic energy."""

import numpy as np


def simplex_minimum(
    kernel: np.ndarray, heights: np.ndarray, masses: np.ndarray
) -> np.ndarray:
    r"""Minimise $\frac12w^\top Kw + \langle h, w\rangle$ over masses of total one.

    By active sets: solve for the atoms in use, walk until one is used up, drop it; take
    in the atom of the smallest slope. Each step lowers a convex function.

    Args:
        kernel: the positive semi-definite matrix $K$.
        heights: the vector $h$.
        masses: where to start.
    """
    masses = masses / masses.sum()
    used = masses > 0
    # In these units the condition that masses add up to one weighs as much as others.
    unit = max(np.abs(kernel).max(), np.abs(heights).max(), 1e-300)
    kernel, heights = kernel / unit, heights / unit
    slack = 1e-13
    for _ in range(20 * len(masses)):
        masses, used = _settled(kernel, heights, masses, used)
        slopes = kernel @ masses + heights
        entering = int(np.argmin(np.where(used, np.inf, slopes)))
        if used.all() or slopes[entering] >= masses @ slopes - slack:
            break
        used[entering] = True
    return masses


def _settled(kernel, heights, masses, used):
    """Return the best masses of the atoms in use, and those that stay in use."""
    used = used.copy()
    while True:
        goal = _balanced(kernel, heights, used)
        if goal.min() >= 0:
            return goal, used
        falling = (goal < 0) & used
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.where(falling, masses / (masses - goal), np.inf)
        leaving = int(np.argmin(shares))
        masses = np.maximum(masses + shares[leaving] * (goal - masses), 0)
        masses[leaving], used[leaving] = 0.0, False


def _balanced(kernel, heights, used) -> np.ndarray:
    """Return masses of total one with equal slopes, zero for atoms not in use."""
    places = np.flatnonzero(used)
    count = len(places)
    system = np.zeros((count + 1, count + 1))
    system[:count, :count] = kernel[np.ix_(places, places)]
    system[:count, count] = system[count, :count] = 1
    right = np.append(-heights[places], 1.0)
    masses = np.zeros(len(used))
    masses[places] = np.linalg.lstsq(system, right, rcond=1e-14)[0][:count]
    return masses
