"""Small tools for arrays: products, types, bytes, padding, norms, batches."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree, UInt8


def matmul(left: Array, right: Array) -> Array:
    """Matrix product at full precision on every device."""
    return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)


def widened(tree: PyTree) -> PyTree:
    """Replace arrays of half precision by arrays of single precision."""

    def widen(leaf):
        is_half = eqx.is_inexact_array(leaf) and jnp.finfo(leaf.dtype).bits < 32
        return leaf.astype(jnp.float32) if is_half else leaf

    return jax.tree.map(widen, tree)


def cast(tree: PyTree, dtype: jnp.dtype) -> PyTree:
    """Return a tree with its floating-point arrays in one type."""

    def convert(leaf):
        return leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf

    return jax.tree.map(convert, tree)


def padded(tree: PyTree[Array], size: int) -> PyTree[Array]:
    """Fill up with rows of zeros, absent tokens or queries to drop, to equal shares."""

    def pad(array):
        missing = (0, -len(array) % size)
        return jnp.pad(array, [missing] + [(0, 0)] * (array.ndim - 1))

    return jax.tree.map(pad, tree)


def held(
    array: Float[Array, "*shape"], present: Bool[Array, "..."], power: float = 0.25
) -> Float[Array, "*shape"]:
    """Hold what absent tokens have fixed, below a power of the largest number.

    They have no derivative but that by their weight, which stays finite.
    """
    largest = float(jnp.finfo(array.dtype).max) ** power
    fixed = jnp.nan_to_num(lax.stop_gradient(array), posinf=largest)
    return jnp.where(present, array, jnp.clip(fixed, -largest, largest))


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


def bytes_of(tree: PyTree) -> UInt8[Array, "t e"]:
    """Return the numbers of a tree as bytes, one row for each time."""

    def rows(leaf: Array) -> Array:
        leaf = leaf.astype(jnp.uint8) if leaf.dtype == bool else leaf
        return jax.lax.bitcast_convert_type(leaf, jnp.uint8).reshape(len(leaf), -1)

    return jnp.concatenate([rows(leaf) for leaf in jax.tree.leaves(tree)], axis=1)


def from_bytes(row: UInt8[Array, " e"], kinds: PyTree) -> PyTree:
    """Return the tree that bytes stand for, with leaves of these shapes and types."""
    given, start, leaves = np.asarray(row).tobytes(), 0, []
    for kind in jax.tree.leaves(kinds):
        numbers = np.frombuffer(given, kind.dtype, kind.size, start)
        leaves.append(jnp.asarray(numbers.reshape(kind.shape)))
        start += numbers.nbytes
    return jax.tree.unflatten(jax.tree.structure(kinds), leaves)


@jax.custom_batching.custom_vmap
def any_in_batch(condition: Bool[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Return the condition; within `vmap`, whether it holds anywhere in the batch.

    A branch on a condition that differs within a batch would be computed on both sides.
    """
    return condition


@any_in_batch.def_vmap
def _join_conditions(axis_size, in_batched, condition):
    return any_in_batch(jnp.any(condition, axis=0)), False


def all_in_batch(condition: Bool[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Return the condition; within `vmap`, whether it holds everywhere in the batch."""
    return ~any_in_batch(~condition)
