"""A velocity on Gaussians taken apart: attention heads and one affine map."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import (
    L2,
    AbstractAttention,
    AbstractInContextMap,
    MultiHead,
    Sum,
)
from meanformer.attention.affine import check_affine, linearised
from meanformer.attention.pointwise import AbstractPointwise
from meanformer.errors import Unsupported
from meanformer.measures import Gaussian

ROUNDINGS = 8


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

    @property
    def only_head(self) -> AbstractAttention | None:
        """The attention that is all there is; `None` if there is more, or none."""
        is_alone = len(self.heads) == 1 and not self.affine.any()
        return self.heads[0] if is_alone and not self.has_constant else None


def parts_of(gamma: AbstractInContextMap, mu: Gaussian) -> Parts:
    """Take sums and heads apart, or raise where a map is of another kind.

    Args:
        gamma: the velocity, affine on the Gaussian.
        mu: the Gaussian.
    """
    check_affine(gamma, mu)
    heads: list[AbstractAttention] = []
    matrix, constant = np.zeros((mu.dimension, mu.dimension)), np.zeros(mu.dimension)
    for term in terms_of(gamma):
        if isinstance(term, AbstractAttention):
            heads.append(term)
            continue
        slope, shift = _pointwise(term, mu)
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


def only_head(gamma: AbstractInContextMap, mu: Gaussian) -> AbstractAttention | None:
    """Return the attention that a velocity consists of; `None` if there is more."""
    return parts_of(gamma, mu).only_head


def score_of(head: AbstractAttention) -> np.ndarray:
    r"""Return $A = K^\top Q$ in double precision, whatever that of the head is."""
    query, key = (np.asarray(x, np.float64) for x in (head.query, head.key))
    return key.T @ query


def values_of(head: AbstractAttention) -> np.ndarray:
    """Return the matrix that is applied to the mean of the tokens, as a whole."""
    value = np.asarray(head.value, np.float64)
    if isinstance(head, L2) and head.value_map == "kim":
        return value @ score_of(head) / np.sqrt(len(head.key))
    return value


def rounding_of(head: AbstractAttention) -> float:
    """Return the relative error of products of the matrices of a head."""
    return ROUNDINGS * len(head.value) * float(np.finfo(head.value.dtype).eps)


def spectral_norm(matrix: Float[Array, "m n"] | np.ndarray) -> float:
    """Return the largest singular value."""
    return float(np.linalg.norm(np.asarray(matrix, np.float64), 2))


def _projected(
    term: AbstractInContextMap, output: Float[Array, "e d"]
) -> AbstractInContextMap:
    projected = term.followed_by(output)
    if projected is None:
        raise Unsupported(
            f"a head of kind {type(term).__name__} behind an output matrix cannot be "
            "taken apart; multiply the matrix into it."
        )
    return projected


def _pointwise(
    term: AbstractInContextMap, mu: Gaussian
) -> tuple[Float[Array, "d d"], Float[Array, " d"]]:
    if not isinstance(term, AbstractPointwise):
        raise Unsupported(
            f"{type(term).__name__} is neither an attention nor a map of points; only "
            "sums and heads of those can be taken apart."
        )
    return linearised(term.apply, 0 * mu.mean())
