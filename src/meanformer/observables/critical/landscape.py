"""An energy of attention and perceptrons, taken apart: kernels, potential, bounds."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from meanformer.attention import AbstractExponential, AbstractInContextMap, Perceptron
from meanformer.errors import InvalidInput, Unsupported
from meanformer.observables.energy.potentials import Units, units_of
from meanformer.observables.energy.structure import (
    dtype_of,
    factor_in_sum,
    is_gradient_flow,
    terms_of,
)

ROOM = 64  # atoms that have a place before a larger program is compiled


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


def with_room(rows: np.ndarray) -> np.ndarray:
    """Repeat the first row up to a size that one program serves for."""
    return np.concatenate([rows, np.repeat(rows[:1], -len(rows) % ROOM, axis=0)])


class Landscape(NamedTuple):
    """An energy whose convexity in the measure is known: 1, $-1$, or 0 if linear."""

    layer: AbstractInContextMap
    kernels: list[Kernel]
    units: list[Units]
    convexity: int
    dimension: int
    dtype: np.dtype

    @property
    def steepness(self) -> float:
        """The largest norm of a score times its inverse temperature."""
        sizes = [abs(k.beta) * np.linalg.norm(k.score, 2) for k in self.kernels]
        return float(max(sizes, default=0.0))

    def quadratic(self, atoms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the form and the vector of the energy as a function of masses."""
        form = sum(kernel.matrix(atoms) for kernel in self.kernels)
        points, count = jnp.asarray(with_room(atoms), self.dtype), len(atoms)
        parts = [np.asarray(units.potential(points)) for units in self.units]
        heights = sum(parts, np.zeros(len(points)))[:count]
        return form + np.zeros((count, count)), np.asarray(heights, np.float64)

    def single_curvature(self) -> float | None:
        """Bound the second derivative in the angle of the energy of one atom."""
        total = self._potential_curvature()
        for kernel in self.kernels:
            levels = np.linalg.eigvalsh(kernel.score)
            half = (levels[-1] - levels[0]) / 2
            with np.errstate(over="ignore"):
                top = np.exp(max(kernel.beta * levels) - kernel.shift)
            bend = abs(kernel.beta) * (2 * half) ** 2 + 4 * half
            total = (
                None if total is None else total + abs(kernel.factor) / 2 * top * bend
            )
        return total

    def curvature(self, atoms: np.ndarray, masses: np.ndarray) -> float | None:
        """Bound the second derivative in the angle of the first variation."""
        total = self._potential_curvature()
        for kernel in self.kernels:
            slopes = np.abs(kernel.beta) * np.linalg.norm(atoms @ kernel.score, axis=1)
            with np.errstate(over="ignore"):
                tops = np.exp(slopes - kernel.shift) * (slopes**2 + slopes)
            share = abs(kernel.factor / kernel.beta) * float(masses @ tops)
            total = None if total is None else total + share
        return total

    def _potential_curvature(self) -> float | None:
        total = 0.0
        for units in self.units:
            steepest = units.activation.steepest
            if steepest is None:
                return None
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
    structure = is_gradient_flow(layer)
    if not structure:
        raise InvalidInput(f"this is not a gradient flow: {structure.failure}.")
    terms = terms_of(layer)
    kernels, units = [], []
    for term in terms:
        if isinstance(term, AbstractExponential):
            factor = 1.0 if len(terms) == 1 else float(factor_in_sum(term))
            kernels.append(_kernel(term, factor))
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
    dimension = layer.input_dimension
    assert dimension is not None
    convexity = signs.pop() if signs else 0
    return Landscape(layer, kernels, units, convexity, dimension, dtype_of(layer))


def _kernel(term: AbstractExponential, factor: float) -> Kernel:
    score = np.asarray(term.score, np.float64)
    beta = float(term.temperature)
    return Kernel(factor, beta, (score + score.T) / 2, term.shift_number)
