r"""Tell whether what heads read from contexts is linearly dependent.

A head with the matrix $A$ reads $m_\theta[\mu](x) = \nabla\Lambda_\mu(\beta Ax)$ from a
context, the gradient of its log-Laplace transform: sampled transforms tell.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from scipy.special import logsumexp, softmax

from meanformer.errors import as_doubles, as_integer, check, check_choice
from meanformer.measures import AbstractMeasure, Gaussian, Mixture
from meanformer.measures.mixture import check_measures
from meanformer.numerics.row_spaces import spanned
from meanformer.observables.injectivity.relations import (
    Asked,
    prepared,
    second_moments,
)
from meanformer.typing import ArrayLike

# Below the first, functions are dependent; between the two nobody knows.
DEPENDENT, UNDECIDED = 1e-11, 1e-6
# A function with no larger share beside affine functions is affine.
AFFINE = 1e-12
RADII = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
GOLDEN = (math.sqrt(5) - 1) / 2


class Dependence(NamedTuple):
    """Whether functions are linearly dependent.

    Attributes:
        verdict: `"dependent"`, `"independent"` or `"undecided"`.
        statistic: the smallest singular value over the largest.
        null_vectors: orthonormal rows of coefficients under which they cancel.
    """

    verdict: str
    statistic: float
    null_vectors: Float[np.ndarray, "r N"]


def dependence(
    measures: Sequence[AbstractMeasure], *, modulo: str = "constants"
) -> Dependence:
    r"""Tell whether log-Laplace transforms are dependent modulo constants or more.

    Modulo constants is the criterion for one query that all contexts share; modulo
    affine functions, for several queries, or heads that do not learn values [BHFP26].

    Args:
        measures: the measures.
        modulo: `"constants"` or `"affine"` functions.
    """
    check_choice("modulo", modulo, ("constants", "affine"))
    check_measures("measures", measures)
    asked = prepared(measures, np.ones((len(measures), measures[0].dimension)), 1e-9)
    return judged(asked, None, RADII, is_kernel=modulo == "constants")


def values_seen(
    asked: Asked, scores: ArrayLike | None = None, bias: bool = False
) -> Float[np.ndarray, "N N"]:
    """Return the mean over heads of the products of what they read from contexts.

    Args:
        asked: the contexts with their queries.
        scores: the matrices of the heads; by default those of many with normal queries
            and keys, always the same.
        bias: add one, as value biases do.
    """
    count, size = asked.queries.shape
    if scores is None:
        shape = 2, max(256, 2 * count), size, size
        pairs = np.random.default_rng(0).standard_normal(shape)
        scores = pairs[0] @ pairs[1]
    tilts = np.einsum("hde,ke->khd", as_doubles("scores", scores), asked.queries)
    seen = [mean + _tilted(asked, k, tilts[k]) for k, mean in enumerate(asked.means)]
    rows = np.stack(seen).reshape(len(seen), -1)
    return rows @ rows.T / tilts.shape[1] + float(bias)


def judged(asked: Asked, points, radii, *, is_kernel: bool, bias: bool = False):
    """Judge columns of sampled functions, with rows for the means in the kernel."""
    count, size = asked.queries.shape
    least = max(400, 20 * count, 4 * size)
    fewest = count + size + 1
    number = least if points is None else as_integer("points", points, least=fewest)
    scales = as_doubles("radii", radii)
    is_right = scales.ndim == 1 and scales.size > 0 and (scales > 0).all()
    check(is_right, f"radii is {radii!r}; it must be a list of positive numbers.")
    directions = np.random.default_rng(0).standard_normal((number, size))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    # Spread over a factor of two: on a line there are no other directions.
    spread = 2 ** (np.arange(number) * GOLDEN % 1 - 0.5)
    places = directions * (np.resize(scales, number) * spread)[:, None]
    kinds = {type(one) for one in asked.measures}
    is_cubic = is_kernel and bool(kinds & {Gaussian, Mixture})
    blocks = [_block(asked, line, places, is_cubic) for line in asked.lines]
    if is_cubic:
        blocks.append(second_moments(asked))
    if is_kernel:
        blocks.append(asked.means.T)
    blocks = [block / (np.linalg.norm(block, axis=0).max() or 1.0) for block in blocks]
    if bias:
        blocks.append(np.ones((1, count)))
    return _decomposed(np.concatenate([*blocks, np.zeros((count, count))]))


def _decomposed(table: np.ndarray) -> Dependence:
    """Return the verdict on columns."""
    norms = np.linalg.norm(table, axis=0)
    norms = np.where(norms > 0, norms, 1)
    _, sizes, rows = np.linalg.svd(table / norms, full_matrices=False)
    statistic = float(sizes[-1] / sizes[0]) if sizes[0] > 0 else 0.0
    null = spanned(rows[sizes <= DEPENDENT * sizes[0]] / norms, len(norms))
    verdict = "independent" if statistic > UNDECIDED else "undecided"
    return Dependence("dependent" if len(null) else verdict, statistic, null)


def _block(asked: Asked, line: int, places, is_cubic: bool) -> np.ndarray:
    """Return the functions of one line as columns, without affine parts."""
    members = asked.members(line)
    # One scale for all: functions would not cancel at different places.
    wide = asked.radii[asked.radii > 0]
    scale = np.median(wide) if len(wide) else 1.0
    factors = asked.factors[members] / np.abs(asked.factors[members]).max()
    # Where a function is small it looks quadratic: each is seen at its own size too.
    sizes = np.abs(factors) * asked.radii[members] / scale
    levels = np.unique(np.round(np.log2(sizes[sizes > 0]) / 3)) if sizes.any() else [0]
    places = np.concatenate([places / 8.0**level for level in {0.0, *levels}])
    weights = 1 / (1 + np.linalg.norm(places, axis=1, keepdims=True))
    affine = weights * np.column_stack([np.ones(len(places)), places])
    basis = np.linalg.qr(affine)[0]
    columns = []
    for k, factor in zip(members, factors, strict=True):
        values = _centred_transform(asked, k, factor * places / scale, is_cubic)
        column = weights[:, 0] * values[0] / factor
        whole = np.linalg.norm(weights[:, 0] * values[1] / factor)
        for _ in range(2):
            column = column - basis @ (basis.T @ column)
        columns.append(column * (np.linalg.norm(column) > AFFINE * whole))
    block = np.zeros((len(members), len(asked.measures)))
    # The same singular values in fewer rows.
    block[:, members] = np.linalg.qr(np.stack(columns, axis=1), mode="r")
    return block


def _centred_transform(asked: Asked, k: int, u, is_cubic: bool):
    """Return the transform of a centred context, or its cubic part; and the whole."""
    measure, atoms = asked.measures[k], asked.atoms[k]
    if asked.is_dirac(k) or (is_cubic and isinstance(measure, Gaussian)):
        return np.zeros((2, len(u)))
    if atoms is not None:
        scores = u @ atoms.points.T + np.log(atoms.masses)
        values = np.asarray(logsumexp(scores, axis=1))
    else:
        values = np.asarray(measure.log_laplace(jnp.asarray(u))) - u @ asked.means[k]
    if not is_cubic:
        return values, values
    spread = np.asarray(measure.covariance(), np.float64)
    return values - np.sum((u @ spread) * u, axis=1) / 2, values


def _tilted(asked: Asked, k: int, u) -> np.ndarray:
    """Return the tilted mean of a centred context."""
    atoms = asked.atoms[k]
    if atoms is None:
        seen = asked.measures[k].tilted_mean(jnp.asarray(u))
        return np.asarray(seen) - asked.means[k]
    shares = softmax(u @ atoms.points.T + np.log(atoms.masses), axis=1)
    return np.asarray(shares) @ atoms.points
