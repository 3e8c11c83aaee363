"""Energies of attention and perceptrons, taken apart, and certified minima."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from meanformer.attention import AbstractExponential, AbstractInContextMap, Perceptron
from meanformer.errors import Unsupported
from meanformer.observables.energy.potentials import Units, units_of
from meanformer.observables.energy.structure import (
    checked_structure,
    dtype_of,
    factor_in_sum,
    terms_of,
)

FIRST_CELLS = 512
MOST_CELLS = 60_000
ZOOMS = 4
ATOM_ROOM = 64  # atoms that have a place before a larger program is compiled


class Kernel(NamedTuple):
    r"""A part $\frac{c}{2\beta}\iint e^{\beta\langle x,Ay\rangle - s}$ of an energy."""

    factor: float
    beta: float
    score: np.ndarray
    shift: float

    def matrix(self, atoms: np.ndarray) -> np.ndarray:
        """Return what twice the energy is a quadratic form of the masses with."""
        scores = self.beta * atoms @ self.score.T @ atoms.T - self.shift
        with np.errstate(over="ignore"):
            return self.factor / self.beta * np.exp(scores)

    @property
    def convexity(self) -> int | None:
        """The sign of the quadratic form in the masses; `None` if it has none."""
        levels = self.beta * np.linalg.eigvalsh(self.score)
        if levels[0] < -1e-12 * np.abs(levels).max():
            return None
        return int(np.sign(self.factor) * np.sign(self.beta))


def with_room(rows: np.ndarray, room: int = ATOM_ROOM) -> np.ndarray:
    """Repeat the first row up to a size that one program serves for."""
    return np.concatenate([rows, np.repeat(rows[:1], -len(rows) % room, axis=0)])


class Landscape(NamedTuple):
    """An energy whose convexity in the measure is known: 1, $-1$, or 0 if linear."""

    layer: AbstractInContextMap
    kernels: list[Kernel]
    units: list[Units]
    convexity: int
    dimension: int
    dtype: np.dtype

    @property
    def rounding(self) -> float:
        """The relative rounding error of the first variation and its bounds."""
        sizes = [abs(k.beta) * np.linalg.norm(k.score, 2) for k in self.kernels]
        return float(jnp.finfo(self.dtype).eps * (100 + 10 * max(sizes, default=0.0)))

    def quadratic(self, atoms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the form and the vector of the energy as a function of masses."""
        form, heights = np.zeros((len(atoms), len(atoms))), np.zeros(len(atoms))
        for kernel in self.kernels:
            form = form + kernel.matrix(atoms)
        points = jnp.asarray(with_room(atoms), self.dtype)
        for units in self.units:
            heights = heights + np.asarray(units.potential(points))[: len(atoms)]
        return form, heights

    def single_curvature(self) -> float:
        """Bound the second derivative in the angle of the energy of one atom."""
        total = self._potential_curvature()
        for kernel in self.kernels:
            levels = np.linalg.eigvalsh(kernel.score)
            half = (levels[-1] - levels[0]) / 2
            with np.errstate(over="ignore"):
                top = np.exp(max(kernel.beta * levels) - kernel.shift)
            bend = abs(kernel.beta) * (2 * half) ** 2 + 4 * half
            total += abs(kernel.factor) / 2 * top * bend
        return total

    def curvature(self, atoms: np.ndarray, masses: np.ndarray) -> float:
        """Bound the second derivative in the angle of the first variation."""
        total = self._potential_curvature()
        for kernel in self.kernels:
            slopes = np.abs(kernel.beta) * np.linalg.norm(atoms @ kernel.score, axis=1)
            with np.errstate(over="ignore"):
                tops = np.exp(slopes - kernel.shift) * (slopes**2 + slopes)
            total += abs(kernel.factor / kernel.beta) * float(masses @ tops)
        return total

    def _potential_curvature(self) -> float:
        total = 0.0
        for units in self.units:
            steepest = units.activation.steepest
            if steepest is None:
                return np.inf
            lengths = np.linalg.norm(np.asarray(units.directions), axis=1)
            reach = lengths + np.abs(np.asarray(units.biases))
            at_zero = abs(float(units.activation(jnp.zeros((), self.dtype))))
            # |sigma'| |a|^2 + |sigma| |a| bounds the derivative along the circle.
            bends = steepest * lengths**2 + (at_zero + steepest * reach) * lengths
            total += float(np.abs(np.asarray(units.strengths)) @ bends)
            total += float(np.linalg.norm(np.asarray(units.constant)))
            if units.matrix is not None:
                total += 2 * float(np.linalg.norm(np.asarray(units.matrix), 2))
        return total


def landscape_of(layer: AbstractInContextMap) -> Landscape:
    """Take an energy apart, or say why its extremes are not known."""
    checked_structure(layer)
    terms = terms_of(layer)
    kernels, units = [], []
    for term in terms:
        if isinstance(term, AbstractExponential):
            factor = 1.0 if len(terms) == 1 else float(factor_in_sum(term))
            score, beta = np.asarray(term.score, np.float64), float(term.temperature)
            even = (score + score.T) / 2
            kernels.append(Kernel(factor, beta, even, term.shift_number))
        elif isinstance(term, Perceptron):
            units.append(units_of(term))
        else:
            name = type(term).__name__
            raise Unsupported(
                f"the energy of {name} is not known to be convex or concave in the "
                "measure; extremes are found for exponential kernels and perceptrons."
            )
    signs = {kernel.convexity for kernel in kernels if kernel.factor != 0}
    if None in signs or len(signs) > 1:
        raise Unsupported(
            "the energy is neither convex nor concave in the measure, as far as is "
            "known; this needs a score A with beta A positive semi-definite, and "
            "factors of one sign."
        )
    convexity, dimension = signs.pop() if signs else 0, layer.input_dimension
    assert convexity is not None
    assert dimension is not None
    return Landscape(layer, kernels, units, convexity, dimension, dtype_of(layer))


class CircleMinimum(NamedTuple):
    """Where a function is smallest, its value, a proven bound, and its largest size."""

    angle: float
    value: float
    bound: float | None
    size: float


def circle_minimum(
    function: Callable[[np.ndarray], np.ndarray],
    curvature: float | None,
    *,
    tolerance: float,
) -> CircleMinimum:
    r"""Minimise a function of the angle, by bisection of cells with bounds.

    On a cell of width $h$ the function is at least the smaller of its values at the
    ends less $Lh^2/8$, if $|f''| \le L$ almost everywhere. Without $L$ the search goes
    on as if it were that of the samples, and nothing is proven.
    """
    ends = 2 * np.pi * np.arange(FIRST_CELLS + 1) / FIRST_CELLS
    values = function(ends)
    left, width = ends[:-1], float(ends[1])
    heights = np.stack([values[:-1], values[1:]], axis=1)
    bend = curvature
    if bend is None:
        bend = 4 * np.abs(np.diff(values, n=2)).max() / width**2
    best, angle = float(values.min()), float(ends[values.argmin()])
    bound = np.inf
    while True:
        lows = heights.min(axis=1) - bend * width**2 / 8
        is_open = lows < best - tolerance
        is_last = not 0 < is_open.sum() <= MOST_CELLS or width < 1e-9
        done = np.ones_like(is_open) if is_last else ~is_open
        bound = min(bound, float(lows[done].min(initial=np.inf)))
        if is_last:
            break
        left, heights, width = left[is_open], heights[is_open], width / 2
        middles = left + width
        centres = function(middles)
        if centres.min() < best:
            best, angle = float(centres.min()), float(middles[centres.argmin()])
        left = np.concatenate([left, middles])
        halves = [[heights[:, 0], centres], [centres, heights[:, 1]]]
        heights = np.concatenate([np.stack(half, axis=1) for half in halves])
    angle, best = _zoomed(function, angle, best, width)
    proven = min(bound, best) if curvature is not None else None
    return CircleMinimum(angle, best, proven, float(np.abs(values).max()))


def _zoomed(function, angle: float, best: float, width: float) -> tuple[float, float]:
    """Return the best angle and value nearby: cells know it to their width only."""
    for _ in range(ZOOMS):
        nodes = angle + width * np.linspace(-1, 1, 65)
        values = function(nodes)
        if values.min() < best:
            best, angle = float(values.min()), float(nodes[values.argmin()])
        width = width / 16
    return angle, best


def simplex_minimum(
    kernel: np.ndarray, heights: np.ndarray, masses: np.ndarray
) -> np.ndarray:
    r"""Minimise $\frac12w^\top Kw + \langle h, w\rangle$ over masses of total one.

    By active sets: solve for the atoms in use, walk until one is used up, drop it; take
    in the atom of the smallest slope. Each step lowers a convex function.
    """
    masses = masses / masses.sum()
    used = masses > 0
    # In these units the condition that masses add up to one weighs as much as others.
    unit = max(np.abs(kernel).max(), np.abs(heights).max(), 1e-300)
    kernel, heights = kernel / unit, heights / unit
    for _ in range(20 * len(masses)):
        masses, used = _settled(kernel, heights, masses, used)
        slopes = kernel @ masses + heights
        entering = int(np.argmin(np.where(used, np.inf, slopes)))
        if used.all() or slopes[entering] >= masses @ slopes - 1e-13:
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
