"""Whether two clouds of atoms are one, up to what a flow does not notice."""

import itertools
import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import AbstractInContextMap, Perceptron
from meanformer.flows import Flow
from meanformer.measures import TokenCloud
from meanformer.observables.energy.structure import dtype_of, terms_of
from meanformer.observables.linearised.symmetry import free_spaces

MOST_PERMUTATIONS = 5040
MOST_UNITS = 6
SLACK = 1e-10  # of spaces
NEAR = 1e-9  # of masses and weights; in single precision they are known less well


class Symmetry(NamedTuple):
    r"""Isometries that a flow does not notice.

    All of $O(E_k)$ for each of the orthogonal `spaces` $E_k$, and the finitely many
    `elements`, which act in coordinates of the rest, whose basis is `fixed`.
    """

    spaces: list[np.ndarray]
    fixed: np.ndarray
    elements: list[np.ndarray]

    def distance(self, first: TokenCloud, second: TokenCloud) -> float:
        """Return how far two clouds are apart, at best; infinite if masses differ.

        Coordinates in the fixed part, and inner products in each space, are compared
        for each order of atoms of equal mass. Where these orders are too many, sorted
        values are compared instead, which may take different clouds for one.
        """
        if first.count != second.count:
            return np.inf
        masses = [np.asarray(cloud.weights, np.float64) for cloud in (first, second)]
        near = _nearness(first.weights)
        if np.abs(np.sort(masses[0]) - np.sort(masses[1])).max() > near:
            return np.inf
        looks = [self._look(np.asarray(c.points, np.float64)) for c in (first, second)]
        orders = _orders(*masses, near)
        if orders is None:
            pairs = zip(*looks, strict=True)
            apart = [np.sort(np.ravel(a)) - np.sort(np.ravel(b)) for a, b in pairs]
            return max(float(np.abs(part).max(initial=0)) for part in apart)
        return min(self._apart(looks[0], looks[1], np.array(order)) for order in orders)

    def _look(self, points: np.ndarray) -> list[np.ndarray]:
        grams = [(points @ space) @ (points @ space).T for space in self.spaces]
        return [points @ self.fixed, *grams]

    def _apart(self, first, second, order: np.ndarray) -> float:
        pairs = zip(first[1:], second[1:], strict=True)
        apart = [np.abs(a - b[np.ix_(order, order)]).max(initial=0) for a, b in pairs]
        moved = [
            np.abs(first[0] @ element.T - second[0][order]).max(initial=0)
            for element in self.elements
        ]
        return float(max([min(moved), *apart]))


def symmetry_of(flow: Flow, layer: AbstractInContextMap, dimension: int) -> Symmetry:
    """Return the isometries that a flow is known not to notice."""
    spaces = free_spaces(layer, max(SLACK, _nearness(layer) / 10))
    covered = np.concatenate([np.zeros((dimension, 0)), *spaces], axis=1)
    # What is orthogonal to all free spaces.
    left, sizes, _ = np.linalg.svd(covered, full_matrices=True)
    fixed = left[:, int(np.sum(sizes > 0.5)) :]
    elements = [np.eye(fixed.shape[1])]
    for candidate in _candidates(layer, fixed):
        is_new = all(np.abs(candidate - known).max() > 1e-8 for known in elements)
        if is_new and _is_unnoticed(flow, layer, candidate, (covered, fixed)):
            elements.append(candidate)
    return Symmetry(spaces, fixed, elements)


def _candidates(layer: AbstractInContextMap, fixed: np.ndarray):
    """Yield isometries of the fixed part that exchange units of a perceptron."""
    units = [term for term in terms_of(layer) if isinstance(term, Perceptron)]
    if not units or fixed.shape[1] == 0:
        return
    rows = np.concatenate([np.asarray(u.weights_in, np.float64) for u in units]) @ fixed
    biases = np.concatenate([np.asarray(u.bias_in, np.float64) for u in units])
    if len(rows) > MOST_UNITS:
        return
    near = _nearness(layer) * max(np.abs(rows).max(initial=0), 1) ** 2
    gram = rows @ rows.T
    for order in itertools.permutations(range(len(rows))):
        places = list(order)
        is_same = np.abs(gram - gram[np.ix_(places, places)]).max() < near
        if is_same and np.abs(biases - biases[places]).max() < near:
            left, _, right = np.linalg.svd(rows[places].T @ rows)
            yield left @ right


def _is_unnoticed(
    flow: Flow,
    layer: AbstractInContextMap,
    element: np.ndarray,
    spaces: tuple[np.ndarray, np.ndarray],
) -> bool:
    """Whether moving random atoms moves their velocities alike."""
    covered, fixed = spaces
    isometry = fixed @ element @ fixed.T + covered @ covered.T
    normal = np.random.default_rng(0).normal(size=(7, len(fixed)))
    points = normal / np.linalg.norm(normal, axis=1, keepdims=True)

    both = jnp.asarray(np.stack([points, points @ isometry.T]), dtype_of(layer))
    expected, found = np.asarray(_fields(flow, both), np.float64)
    expected = expected @ isometry.T
    return bool(np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max())


@eqx.filter_jit
def _fields(flow: Flow, clouds: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
    """Return the velocities of equal tokens at several places."""
    start = jnp.zeros((), clouds.dtype)
    return jax.vmap(lambda x: flow.field(start, TokenCloud(x), x))(clouds)


def _nearness(known) -> float:
    """Return how well the arrays of a map, or an array, are known."""
    arrays = jax.tree.leaves(eqx.filter(known, eqx.is_inexact_array))
    eps = max((float(jnp.finfo(array.dtype).eps) for array in arrays), default=0.0)
    return max(NEAR, 100 * eps)


def _orders(first: np.ndarray, second: np.ndarray, near: float):
    """Return all ways to match atoms of equal masses; `None` if they are too many."""
    kinds = [np.flatnonzero(np.abs(second - mass) < near) for mass in np.unique(first)]
    count = np.prod([float(math.factorial(len(kind))) for kind in kinds])
    if count > MOST_PERMUTATIONS:
        return None
    orders: list[list[int]] = [[]]
    for mass in first:
        alike = np.flatnonzero(np.abs(second - mass) < near)
        orders = [[*o, int(k)] for o in orders for k in alike if k not in o]
    return orders
