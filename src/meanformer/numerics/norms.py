"""Roots and norms whose derivatives stay finite, also where they vanish."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def safe_root(value: Float[Array, "..."], order: int | float) -> Float[Array, "..."]:
    """Root of a value, with value and derivative zero unless the value is positive."""
    is_positive = value > 0
    root = jnp.where(is_positive, value, 1) ** (1 / order)
    return jnp.where(is_positive, root, 0)


def safe_norm(vectors: Float[Array, "s d"]) -> Float[Array, " s"]:
    """Euclidean norm of each row, with derivative zero at zero."""
    scaled, scale = _of_size_one(vectors)
    return scale[:, 0] * safe_root(jnp.sum(scaled**2, axis=1), 2)


def unit_rows(vectors: Float[Array, "s d"]) -> Float[Array, "s d"]:
    """Direction of each row, of norm one; a row of zeros stays as it is."""
    scaled, _ = _of_size_one(vectors)
    norms = safe_norm(scaled)[:, None]
    return scaled / jnp.where(norms > 0, norms, 1)


def _of_size_one(
    vectors: Float[Array, "s d"],
) -> tuple[Float[Array, "s d"], Float[Array, "s 1"]]:
    """Divide each row by its largest entry, so that squares stay within range."""
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(vectors), axis=1, keepdims=True))
    scale = jnp.where(largest > 0, largest, 1)
    return vectors / scale, scale


def norms_of(rows: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " n"]:
    """Return the length of each row, whatever its size; on the host, in NumPy."""
    # Powers of two, so that nothing is rounded by the scaling.
    exponents = np.frexp(np.abs(rows).max(axis=1, initial=0.0))[1]
    lengths = np.linalg.norm(np.ldexp(rows, -exponents[:, None]), axis=1)
    return np.ldexp(lengths, exponents)
