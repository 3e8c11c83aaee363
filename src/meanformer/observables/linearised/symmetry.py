"""Rotations that a map does not notice."""

import itertools

import jax.numpy as jnp
import numpy as np

from meanformer.attention import (
    AbstractExponential,
    AbstractInContextMap,
    Perceptron,
    Sigmoid,
)
from meanformer.measures import TokenCloud
from meanformer.numerics.multiples import agree
from meanformer.observables.energy.structure import terms_of


def rotations(layer: AbstractInContextMap, tokens: TokenCloud) -> int:
    r"""Return how many independent rotations of the tokens the layer does not notice.

    Those of the spaces of `free_spaces`.
    """
    slack = 1000 * float(jnp.finfo(tokens.points.dtype).eps)
    points = np.asarray(tokens.points, np.float64)
    least = slack * np.linalg.norm(points, 2)
    count = 0
    for space in free_spaces(layer, slack):
        rank = int(np.linalg.matrix_rank(points @ space, tol=least))
        count += rank * (2 * space.shape[1] - rank - 1) // 2
    return count


def free_spaces(layer: AbstractInContextMap, slack: float) -> list[np.ndarray]:
    r"""Return orthogonal spaces, as columns, whose isometries the map does not notice.

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
    return _common_spaces(
        [np.asarray(matrix, np.float64) for matrix in matrices],
        [np.asarray(rows, np.float64) for rows in vectors],
        slack,
    )


def _common_spaces(
    matrices: list[np.ndarray], vectors: list[np.ndarray], slack: float
) -> list[np.ndarray]:
    sizes = [np.abs(matrix).max(initial=0) or 1.0 for matrix in matrices]
    matrices = [matrix / size for matrix, size in zip(matrices, sizes, strict=True)]
    for matrix in matrices:
        if matrix.shape != matrix.T.shape or not agree(matrix, matrix.T, slack):
            return []
    marked = np.zeros((0, 0))
    if vectors:
        _, sizes, right = np.linalg.svd(np.concatenate(vectors), full_matrices=False)
        marked = right[sizes > slack * sizes.max(initial=0)].T
        matrices = [*matrices, marked @ marked.T]
    # A combination that mixes no two sets of eigenvalues, except by accident.
    blend = sum(np.sqrt(1 + k) * matrix for k, matrix in enumerate(matrices))
    levels, columns = np.linalg.eigh(blend)
    spaces = np.split(columns, np.flatnonzero(np.diff(levels) > slack) + 1, axis=1)
    pairs = itertools.product(matrices, spaces)
    if not all(_is_eigenspace(matrix, space, slack) for matrix, space in pairs):
        return []
    if not vectors:
        return spaces
    return [space for space in spaces if np.abs(marked.T @ space).max(initial=0) < 0.5]


def _is_eigenspace(matrix: np.ndarray, space: np.ndarray, slack: float) -> bool:
    image = matrix @ space
    level = np.trace(space.T @ image) / space.shape[1]
    return bool(np.abs(image - level * space).max() <= slack)
