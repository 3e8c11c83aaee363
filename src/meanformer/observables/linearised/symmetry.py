"""Symmetries of a flow, and the distance of clouds up to them."""

import itertools
import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import (
    AbstractExponential,
    AbstractInContextMap,
    Perceptron,
    Sigmoid,
)
from meanformer.flows import Flow
from meanformer.measures import TokenCloud
from meanformer.numerics.multiples import agree
from meanformer.observables.energy.structure import dtype_of, terms_of

MOST_PERMUTATIONS = 5040
MOST_UNITS = 6
SPACE_SLACK = 1e-10
MASS_SLACK = 1e-9  # in single precision masses are known less well


def rotations(layer: AbstractInContextMap, tokens: TokenCloud) -> int:
    """Return how many independent rotations of the tokens commute with a layer."""
    slack = 1000 * float(jnp.finfo(tokens.points.dtype).eps)
    points = np.asarray(tokens.points, np.float64)
    least = slack * np.linalg.norm(points, 2)
    count = 0
    for space in free_spaces(layer, slack):
        rank = int(np.linalg.matrix_rank(points @ space, tol=least))
        count += rank * (2 * space.shape[1] - rank - 1) // 2
    return count


def free_spaces(layer: AbstractInContextMap, slack: float) -> list[np.ndarray]:
    r"""Return orthogonal spaces, as columns, whose isometries commute with a map.

    The common eigenspaces of $\beta A$ and $V$ of all attentions, if these matrices are
    symmetric and commute, and of the span of the weights of all perceptrons, whose
    directions stay where they are; of other maps none are known.
    """
    matrices, vectors = [], []
    for term in terms_of(layer):
        is_attention = isinstance(term, AbstractExponential | Sigmoid)
        if is_attention and term.query_bias is None and term.value_bias is None:
            matrices += [term.temperature * term.score, term.value]
        elif isinstance(term, Perceptron):
            vectors += [term.weights_in, term.weights_out.T]
            vectors += [] if term.bias_out is None else [term.bias_out[None]]
        else:
            return []
    matrices = [np.asarray(matrix, np.float64) for matrix in matrices]
    matrices = [matrix / (np.abs(matrix).max(initial=0) or 1.0) for matrix in matrices]
    for matrix in matrices:
        if matrix.shape != matrix.T.shape or not agree(matrix, matrix.T, slack):
            return []
    none = np.zeros((0, layer.input_dimension or 0))
    return _common_spaces(matrices, np.concatenate([none, *vectors]), slack)


def _common_spaces(
    matrices: list[np.ndarray], vectors: np.ndarray, slack: float
) -> list[np.ndarray]:
    """Return common eigenspaces of symmetric matrices, orthogonal to some vectors."""
    _, sizes, right = np.linalg.svd(vectors, full_matrices=False)
    marked = right[sizes > slack * sizes.max(initial=0)].T
    matrices = [*matrices, marked @ marked.T]
    # A combination that mixes no two sets of eigenvalues, except by accident.
    blend = sum(np.sqrt(1 + k) * matrix for k, matrix in enumerate(matrices))
    levels, columns = np.linalg.eigh(blend)
    spaces = np.split(columns, np.flatnonzero(np.diff(levels) > slack) + 1, axis=1)
    pairs = itertools.product(matrices, spaces)
    if not all(_is_eigenspace(matrix, space, slack) for matrix, space in pairs):
        return []
    return [space for space in spaces if np.abs(marked.T @ space).max(initial=0) < 0.5]


def _is_eigenspace(matrix: np.ndarray, space: np.ndarray, slack: float) -> bool:
    image = matrix @ space
    level = np.trace(space.T @ image) / space.shape[1]
    return bool(np.abs(image - level * space).max() <= slack)


class Symmetry(NamedTuple):
    r"""The isometries that commute with a flow.

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
        if _sorted_gap(*masses) > near:
            return np.inf
        looks = [self._look(np.asarray(c.points, np.float64)) for c in (first, second)]
        orders = _orders(*masses, near)
        if orders is None:
            return max(_sorted_gap(*pair) for pair in zip(*looks, strict=True))
        return min(self._apart(*looks, np.array(order)) for order in orders)

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


def _sorted_gap(first: np.ndarray, second: np.ndarray) -> float:
    gaps = np.sort(np.ravel(first)) - np.sort(np.ravel(second))
    return float(np.abs(gaps).max(initial=0))


def symmetry_of(flow: Flow, layer: AbstractInContextMap, dimension: int) -> Symmetry:
    """Return the isometries that are known to commute with a flow."""
    spaces = free_spaces(layer, max(SPACE_SLACK, _nearness(layer) / 10))
    covered = np.concatenate([np.zeros((dimension, 0)), *spaces], axis=1)
    # What is orthogonal to all free spaces.
    fixed = np.linalg.svd(covered)[0][:, covered.shape[1] :]
    elements = [np.eye(fixed.shape[1])]
    for candidate in _candidates(layer, fixed):
        is_new = all(np.abs(candidate - known).max() > 1e-8 for known in elements)
        isometry = fixed @ candidate @ fixed.T + covered @ covered.T
        if is_new and _is_unnoticed(flow, isometry, dtype_of(layer)):
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


def _is_unnoticed(flow: Flow, isometry: np.ndarray, dtype: np.dtype) -> bool:
    """Whether moving random atoms moves their velocities alike."""
    normal = np.random.default_rng(0).normal(size=(7, len(isometry)))
    points = normal / np.linalg.norm(normal, axis=1, keepdims=True)
    both = jnp.asarray(np.stack([points, points @ isometry.T]), dtype)
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
    return max(MASS_SLACK, 100 * eps)


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
