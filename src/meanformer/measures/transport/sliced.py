"""Sliced transport: the average over directions of distances on the line."""

from typing import Any, SupportsIndex

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import (
    InvalidInput,
    as_finite_array,
    as_integer,
    as_key,
    check,
    is_concrete,
)
from meanformer.measures.transport.atoms import Atoms
from meanformer.measures.transport.coupling import power_mean
from meanformer.measures.transport.line import line_distance
from meanformer.numerics.arrays import matmul, unit_rows
from meanformer.typing import ArrayLike, Key

DEFAULT_DIRECTIONS = 256
DIRECTIONS_AT_ONCE = 16


@eqx.filter_jit
def sliced_distance(
    source: Atoms, target: Atoms, directions: Float[Array, "l d"], order: float
) -> Float[Array, ""]:
    r"""Sliced Wasserstein distance, from given unit directions.

    $$SW_p = \Bigl(\frac1L \sum_{l=1}^L W_p(\langle\theta_l, \cdot\rangle_\# \mu,
      \langle\theta_l, \cdot\rangle_\# \nu)^p\Bigr)^{1/p}.$$

    Cost: $O(L n \log n)$ time, $O(n)$ memory.
    """

    @jax.checkpoint
    def along(direction):
        return line_distance(
            _projected(source, direction), _projected(target, direction), order
        )

    distances = jax.lax.map(along, directions, batch_size=DIRECTIONS_AT_ONCE)
    shares = jnp.full_like(distances, 1 / len(distances))
    return power_mean(distances, shares, order)


def unit_directions(
    directions: SupportsIndex | ArrayLike | None, atoms: Atoms, key: Key | None
) -> Float[Array, "l d"]:
    """Return the directions given, made unit vectors, or draw as many as asked for."""
    dimension, dtype = atoms.points.shape[1], atoms.points.dtype
    if directions is None or np.ndim(directions) == 0:
        count = DEFAULT_DIRECTIONS if directions is None else directions
        vectors = _draw(count, dimension, dtype, key)
    else:
        vectors = as_finite_array("directions", directions, (None, dimension), dtype)
    is_zero = is_concrete(vectors) and not np.asarray(vectors).any(axis=1).all()
    check(
        len(vectors) > 0 and not is_zero,
        "directions has a zero row or no row; every direction must be nonzero.",
    )
    return unit_rows(vectors)


def _draw(
    directions: Any, dimension: int, dtype, key: Key | None
) -> Float[Array, "l d"]:
    count = as_integer("directions", directions, least=1)
    if key is None:
        raise InvalidInput(
            'method="sliced" draws random directions and needs a key; pass '
            "key=jax.random.key(0), or the directions as an array."
        )
    return jr.normal(as_key(key), (count, dimension), dtype)


def _projected(atoms: Atoms, direction: Float[Array, " d"]) -> Atoms:
    heights = matmul(atoms.points, direction)
    return Atoms(heights[:, None], atoms.masses, atoms.labels)
