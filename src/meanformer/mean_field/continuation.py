"""Following stationary densities along their branch, around folds, by arc length."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from meanformer.mean_field.balance import (
    Balance,
    NoConvergence,
    fixed_amplitude,
    newton,
)

Nodes = Float[np.ndarray, " n"]

FIRST_AMPLITUDE = 0.02
FIRST_STEP = 0.05
SMALLEST_STEP = 1e-6
LEAST_COSINE = 0.9  # of the angle that the branch may turn by within one step


class Place(NamedTuple):
    """A solution of the balance, and the direction of its branch there."""

    logarithm: Nodes
    log_coupling: float
    along: Nodes
    across: float


class Branch:
    """A branch of solutions, in the norm of the uniform law.

    Args:
        balance: the equation.
        degree: the degree in which the branch leaves the uniform density.
        sign: whether the density grows at the pole, 1, or falls, -1.
    """

    def __init__(self, balance: Balance, degree: int, sign: int):
        self.balance, self.degree, self.sign = balance, degree, sign

    def origin(self) -> Place:
        """Return the uniform density at which the branch begins."""
        zonal = self.sign * self.balance.basis.polynomials[self.degree]
        critical = -np.log(self.balance.ratios[self.degree])
        return Place(np.zeros_like(zonal), float(critical), zonal, 0.0)

    def first(self) -> Place:
        """Return a solution near the uniform one."""
        start, size = self.origin(), FIRST_AMPLITUDE
        condition = fixed_amplitude(self.balance, self.degree, self.sign * size)
        guess = size * start.along
        found = newton(self.balance, guess, start.log_coupling, condition)
        return self.place(*found, start)

    def place(self, logarithm: Nodes, log_coupling: float, last: Place) -> Place:
        """Return a solution with its direction, the one that goes on from the last."""
        slope, in_coupling = self.balance.derivatives(logarithm, np.exp(log_coupling))
        weighted = self.balance.basis.masses * last.along
        system = np.block([[slope, in_coupling[:, None]], [weighted, last.across]])
        direction = np.linalg.solve(system, np.append(np.zeros(len(logarithm)), 1.0))
        along, across = direction[:-1], float(direction[-1])
        size = np.sqrt(self.balance.basis.masses @ along**2 + across**2)
        return Place(logarithm, log_coupling, along / size, across / size)

    def after(self, last: Place, step: float) -> Place:
        """Return the solution at a distance along the tangent."""
        weighted = self.balance.basis.masses * last.along

        def condition(logarithm, log_coupling):
            there = Place(logarithm, log_coupling, last.along, last.across)
            return self.distance(last, there) - step, weighted, last.across

        guess = last.logarithm + step * last.along
        coupling = last.log_coupling + step * last.across
        return self.place(*newton(self.balance, guess, coupling, condition), last)

    def walk(self, largest_step: float) -> Iterator[tuple[Place, float, Place]]:
        """Yield stretches for ever: start, step, end; steps adapt to the turns.

        The largest step is relative to the logarithm, once that exceeds one.
        """
        here, step = self.first(), min(FIRST_STEP, largest_step)
        while step >= SMALLEST_STEP:
            try:
                there = self.after(here, step)
                cosine = self.cosine(here, there)
            except (NoConvergence, np.linalg.LinAlgError):
                cosine = -1.0
            if cosine < LEAST_COSINE:
                step /= 2
                continue
            yield here, step, there
            here = there
            size = np.sqrt(self.balance.basis.masses @ here.logarithm**2)
            longest = largest_step * max(1.0, float(size))
            step = min(step * (1.5 if cosine > 0.99 else 1.0), longest)
        raise NoConvergence(
            "the branch could not be followed further; ask for a smaller largest kappa."
        )

    def cosine(self, here: Place, there: Place) -> float:
        """Return that of the angle between the directions at two places."""
        masses = self.balance.basis.masses
        return float(masses @ (here.along * there.along) + here.across * there.across)

    def distance(self, here: Place, there: Place) -> float:
        """Return how far a place lies from the first, along the tangent there."""
        weighted = self.balance.basis.masses * here.along
        gone = weighted @ (there.logarithm - here.logarithm)
        return float(gone + here.across * (there.log_coupling - here.log_coupling))

    def locate(
        self, here: Place, step: float, function: Callable[[Place], float]
    ) -> Place:
        """Return where a function changes its sign on a stretch."""
        from scipy.optimize import brentq

        places: dict[float, Place] = {}

        def value(distance: float) -> float:
            places[distance] = self.after(here, distance) if distance > 0 else here
            return function(places[distance])

        root = float(brentq(value, 0.0, step, xtol=1e-14, rtol=1e-14))
        return places.get(root) or self.after(here, root)
