"""A velocity on Gaussians taken apart: attention heads and one affine map."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import (
    AbstractAttention,
    AbstractInContextMap,
    MultiHead,
    Sum,
)
from meanformer.attention.affine import linearised
from meanformer.attention.pointwise import AbstractPointwise
from meanformer.errors import Unsupported
from meanformer.numerics.matrices import matmul


class Parts(NamedTuple):
    """The terms of a velocity.

    Attributes:
        heads: attention maps, the output matrices multiplied into the values.
        affine: the matrix of the remaining terms, which ignore the context.
        has_constant: whether these have a constant term.
    """

    heads: tuple[AbstractAttention, ...]
    affine: np.ndarray
    has_constant: bool


def parts_of(gamma: AbstractInContextMap, dimension: int) -> Parts:
    """Take sums and heads apart, or raise where a map is of another kind."""
    heads: list[AbstractAttention] = []
    matrix, constant = np.zeros((dimension, dimension)), np.zeros(dimension)
    for term in terms_of(gamma):
        if isinstance(term, AbstractAttention):
            heads.append(term)
            continue
        slope, shift = _pointwise(term, dimension)
        matrix, constant = matrix + np.asarray(slope), constant + np.asarray(shift)
    return Parts(tuple(heads), matrix, bool(np.any(constant != 0)))


def terms_of(gamma: AbstractInContextMap) -> list[AbstractInContextMap]:
    """Return the summands of sums and heads, output matrices multiplied in."""
    if isinstance(gamma, Sum):
        return [term for one in gamma.maps for term in terms_of(one)]
    if not isinstance(gamma, MultiHead):
        return [gamma]
    terms = []
    for index, head in enumerate(gamma.heads):
        for term in terms_of(head):
            if gamma.outputs is not None:
                term = _projected(term, gamma.outputs[index])
            terms.append(term)
    return terms


def only_head(gamma: AbstractInContextMap, dimension: int) -> AbstractAttention | None:
    """Return the attention that a velocity consists of; `None` if there is more."""
    parts = parts_of(gamma, dimension)
    is_alone = len(parts.heads) == 1 and not parts.affine.any()
    return parts.heads[0] if is_alone and not parts.has_constant else None


def multiple_of_identity(matrix: Float[Array, "d d"]) -> float | None:
    """Return the factor if a matrix is a multiple of the identity."""
    known = np.asarray(matrix, np.float64)
    factor = float(np.trace(known)) / len(known)
    size = 4 * np.finfo(np.asarray(matrix).dtype).eps * np.abs(known).max()
    is_multiple = np.abs(known - factor * np.eye(len(known))).max() <= size
    return factor if is_multiple else None


def spectral_norm(matrix: Float[Array, "m n"] | np.ndarray) -> float:
    """Return the largest singular value."""
    return float(np.linalg.norm(np.asarray(matrix, np.float64), 2))


def _projected(
    term: AbstractInContextMap, output: Float[Array, "e d"]
) -> AbstractInContextMap:
    if not isinstance(term, AbstractAttention):
        raise Unsupported(
            f"a head of kind {type(term).__name__} behind an output matrix cannot be "
            "taken apart; multiply the matrix into it."
        )
    bias = None if term.value_bias is None else matmul(output, term.value_bias)
    return dataclasses.replace(term, value=matmul(output, term.value), value_bias=bias)


def _pointwise(
    term: AbstractInContextMap, dimension: int
) -> tuple[Float[Array, "d d"], Float[Array, " d"]]:
    if not isinstance(term, AbstractPointwise):
        raise Unsupported(
            f"{type(term).__name__} is neither an attention nor a map of points; only "
            "sums and heads of those can be taken apart."
        )
    return linearised(term.apply, jnp.zeros(dimension))
