"""Branches of stationary states as noise falls: bifurcation, folds, Maxwell point."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, SupportsIndex

import equinox as eqx
import numpy as np
from jaxtyping import Bool, Float

from meanformer.attention import AbstractExponential
from meanformer.errors import InvalidInput, as_integer, as_number, check
from meanformer.mean_field import stationary
from meanformer.mean_field.balance import (
    Balance,
    NoConvergence,
    Nodes,
    fixed_amplitude,
    newton,
)
from meanformer.mean_field.noise import attraction, checked_kappa
from meanformer.mean_field.stationary import StationaryState

MOST_POINTS = 2000
FIRST_AMPLITUDE = 0.02
FIRST_STEP = 0.05
SMALLEST_STEP = 1e-6
LEAST_COSINE = 0.9  # of the angle that the branch may turn by within one step


class StationaryBranch(eqx.Module):
    r"""Stationary states that leave the uniform measure together.

    Arrays run along the branch, from the bifurcation on; folds and the Maxwell point
    are among the states.

    Attributes:
        kappas: the inverse noise $\kappa$; it turns back at folds.
        orders: $\int P_l\,\mathrm{d}\rho$ with the zonal harmonic of the degree, one at
            the pole: the mean for degree one, $\int\cos l\theta$ on the circle.
        free_energies: free energy less that of the uniform measure; none for softmax.
        growths: largest growth rate of a perturbation, rotations apart.
        densities: the densities at the nodes, against the uniform probability.
        heights: the nodes, heights along the axis; on the circle $\cos\theta$.
        masses: their masses in the uniform law.
        folds: the states at which $\kappa$ turns back.
        maxwell: the state, other than uniform, whose free energy equals that of the
            uniform measure; `None` if there is none on the branch.
        degree: the degree $l$.
        dimension: dimension of the space around the sphere.
    """

    kappas: Float[np.ndarray, " t"]
    orders: Float[np.ndarray, " t"]
    free_energies: Float[np.ndarray, " t"] | None
    growths: Float[np.ndarray, " t"]
    densities: Float[np.ndarray, "t n"]
    heights: Float[np.ndarray, " n"]
    masses: Float[np.ndarray, " n"]
    folds: tuple[StationaryState, ...]
    maxwell: StationaryState | None
    degree: int = eqx.field(static=True)
    dimension: int = eqx.field(static=True)

    def __str__(self) -> str:
        """Return where it begins, and its folds and Maxwell point."""
        lines = [
            f"branch of degree {self.degree} in dimension {self.dimension}: "
            f"{len(self.kappas)} states from kappa {self.critical:.10g}, "
            f"{int(self.is_stable.sum())} of them stable"
        ]
        lines += [f"fold at {fold}" for fold in self.folds]
        if self.maxwell is not None:
            lines.append(f"Maxwell point at {self.maxwell}")
        return "\n".join(lines)

    @property
    def critical(self) -> float:
        r"""The $\kappa$ at which the branch begins."""
        return float(self.kappas[0])

    @property
    def is_stable(self) -> Bool[np.ndarray, " t"]:
        """Which states are stable; the uniform one at the beginning is not."""
        return self.kappas * self.growths < -stationary.NEUTRAL

    def orders_at(self, kappa: float) -> Float[np.ndarray, " k"]:
        r"""Return the orders of all states of the branch at a $\kappa$, interpolated.

        Linear in the order's square between the points: for figures, not for digits.

        Args:
            kappa: the inverse noise.
        """
        kappa = checked_kappa(kappa)
        below, above = self.kappas[:-1], self.kappas[1:]
        crossed = (below - kappa) * (above - kappa) <= 0
        share = (kappa - below[crossed]) / (above - below)[crossed]
        signed = np.sign(self.orders) * self.orders**2
        squares = signed[:-1][crossed] * (1 - share) + signed[1:][crossed] * share
        return np.sign(squares) * np.sqrt(np.abs(squares))


def stationary_branch(
    attention: AbstractExponential,
    *,
    until: float | None = None,
    dimension: SupportsIndex | None = None,
    degree: SupportsIndex = 1,
    sign: SupportsIndex = 1,
    spacing: float = 0.1,
) -> StationaryBranch:
    r"""Follow the stationary states that leave the uniform measure in a degree.

    The branch begins at `critical_kappa(attention, degree=degree)` and is followed by
    pseudo-arc-length continuation, around folds, until $\kappa$ exceeds a bound. Folds
    and the Maxwell point, where the free energies of the branch and of the uniform
    measure agree, are roots along it, found to rounding. Stability comes from the
    spectrum of the linearised Fokker-Planck equation, for perturbations with up to two
    waves around the axis; on the circle these are all.

    Degree $l$ gives $l$ clusters on the circle. A branch of degree one leaves to larger
    $\kappa$ if `branch_curvature` is positive, which for unnormalised attention means
    $\beta < \beta_*$, and otherwise turns at a fold below $\kappa_c$ [MR26].

    Args:
        attention: `Softmax` or `Unnormalised` with scores $b\langle x,y\rangle$ and
            values $cy$, $b, c > 0$.
        until: the largest $\kappa$; twice that of the bifurcation by default.
        dimension: dimension of the space around the sphere, if not the attention's.
        degree: the degree $l$ in which the branch leaves the uniform measure.
        sign: 1 if the density grows at the pole at first, -1 if it falls. It matters
            for even degrees in dimension 3 and more only.
        spacing: largest step, in $\log\rho$ and $\log\kappa$, relative to the size of
            $\log\rho$ where that exceeds one.

    Returns:
        The branch. Cost: a second or so, on the host: each point needs a few solutions
        of linear systems and eigenvalues, of the size of the number of nodes.
    """
    model = attraction(attention, dimension)
    degree = as_integer("degree", degree, least=1)
    sign = as_integer("sign", sign, least=-1)
    check(sign in (-1, 1), f"sign is {sign}; it must be 1 or -1.")
    spacing = as_number("spacing", spacing, "a positive number", above=0)
    critical = model.unit / float(model.ratios(degree + 1)[degree])
    last = 2 * critical if until is None else checked_kappa(until)
    check(
        last > critical,
        f"until is {last:.6g}, but the branch begins at kappa {critical:.6g}; give a "
        "larger one.",
    )
    count = max(stationary.NODES, 8 * degree)
    while count <= stationary.MOST_NODES:
        record = _BranchRecord(Branch(Balance(model, count), degree, sign), last)
        record.go(spacing)
        if record.is_resolved():
            return record.result()
        count *= 2
    raise stationary.too_narrow(last)


class Place(NamedTuple):
    """A solution of the balance, and the direction of its branch there."""

    logarithm: Nodes
    log_coupling: float
    along: Nodes
    across: float


class Branch:
    """A branch of solutions, followed by arc length in the norm of the uniform law."""

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
        guess = size * start.along, start.log_coupling
        return self.place(*newton(self.balance, *guess, condition), start)

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
                cosine = self.product(here, there.along, there.across)
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

    def product(self, here: Place, along: Nodes, across: float) -> float:
        """Return the inner product of the tangent at a place and of another vector."""
        masses = self.balance.basis.masses
        return float(masses @ (here.along * along) + here.across * across)

    def distance(self, here: Place, there: Place) -> float:
        """Return how far a place lies from the first, along the tangent there."""
        gone = there.logarithm - here.logarithm
        return self.product(here, gone, there.log_coupling - here.log_coupling)

    def find_zero(
        self, here: Place, step: float, function: Callable[[Place], float]
    ) -> Place:
        """Return the place on a stretch of the branch where a function is zero."""
        from scipy.optimize import brentq

        places: dict[float, Place] = {}

        def value(distance: float) -> float:
            places[distance] = self.after(here, distance) if distance > 0 else here
            return function(places[distance])

        root = float(brentq(value, 0.0, step, xtol=1e-14, rtol=1e-14))
        return places.get(root) or self.after(here, root)


class _BranchRecord:
    """Places along a branch, with its folds and its Maxwell point."""

    def __init__(self, branch: Branch, until: float):
        self.branch, self.balance = branch, branch.balance
        self.bound = float(np.log(until / self.balance.model.unit))
        self.places: list[Place] = [branch.origin()]
        self.folds: list[Place] = []
        self.maxwell: Place | None = None

    def go(self, spacing: float) -> None:
        """Walk until the bound, and end there exactly."""
        for here, step, there in self.branch.walk(spacing):
            if len(self.places) == 1:
                self.places.append(here)
            if there.log_coupling >= self.bound:
                there = self.branch.find_zero(
                    here, step, lambda place: place.log_coupling - self.bound
                )
                step = self.branch.distance(here, there)
            self.places += [*self._found(here, step, there), there]
            if there.log_coupling >= self.bound - 1e-12:
                return
            if len(self.places) > MOST_POINTS:
                raise InvalidInput(
                    f"the branch has more than {MOST_POINTS} points; give a larger "
                    "spacing or a smaller until."
                )

    def _found(self, here: Place, step: float, there: Place) -> list[Place]:
        """Return folds and equal free energies on a stretch, in order."""
        found = []
        if here.across * there.across < 0:
            self.folds.append(self.branch.find_zero(here, step, lambda p: p.across))
            found.append(self.folds[-1])
        is_free = not self.balance.model.is_softmax and self.maxwell is None
        if is_free and self._excess(here) > 0 >= self._excess(there):
            self.maxwell = self.branch.find_zero(here, step, self._excess)
            found.append(self.maxwell)
        return sorted(found, key=lambda place: self.branch.distance(here, place))

    def _excess(self, place: Place) -> float:
        density = self.balance.density(place.logarithm)
        coupling = float(np.exp(place.log_coupling))
        return self.balance.excess_free_energy(density, coupling)

    def _state(self, place: Place) -> StationaryState:
        kappa = self.balance.model.unit * float(np.exp(place.log_coupling))
        return stationary.state_of(self.balance, place.logarithm, kappa)

    def is_resolved(self) -> bool:
        """Whether the nodes are enough for all densities."""
        densities = [self.balance.density(place.logarithm) for place in self.places]
        return all(map(self.balance.is_resolved, densities))

    def result(self) -> StationaryBranch:
        """Return the branch."""
        states = [self._state(place) for place in self.places]
        basis, degree = self.balance.basis, self.branch.degree
        energies = [state.free_energy for state in states]
        return StationaryBranch(
            np.array([state.kappa for state in states]),
            np.array([self.balance.order(s.densities, degree) for s in states]),
            None if self.balance.model.is_softmax else np.array(energies, float),
            np.array([state.growth for state in states]),
            np.stack([state.densities for state in states]),
            basis.heights,
            basis.masses,
            tuple(self._state(place) for place in self.folds),
            None if self.maxwell is None else self._state(self.maxwell),
            degree,
            self.balance.model.dimension,
        )
