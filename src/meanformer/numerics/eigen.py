"""Largest eigenvalues of a symmetric operator that is only known by its action."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from meanformer.numerics.arrays import matmul


class Eigenpairs(eqx.Module):
    r"""The largest eigenvalues found, in decreasing order, and how well.

    Attributes:
        values: the Ritz values.
        vectors: their unit vectors, one per column.
        residual: $|Hv - \lambda v|$ for the first pair.
        scale: largest absolute Ritz value met, an estimate of $|H|$ from below.
        iterations: steps taken.
        converged: whether residual and change fell below the tolerance.
    """

    values: Float[Array, " b"]
    vectors: Float[Array, "size b"]
    residual: Float[Array, ""]
    scale: Float[Array, ""]
    iterations: Int[Array, ""]
    converged: Bool[Array, ""]


class _Block(eqx.Module):
    """Ritz vectors, their images, and the directions they last moved in."""

    values: Float[Array, " b"]
    vectors: Float[Array, "size b"]
    images: Float[Array, "size b"]
    directions: Float[Array, "size b"]
    scale: Float[Array, ""]
    change: Float[Array, ""]
    count: Int[Array, ""]

    def residuals(self) -> Float[Array, "size b"]:
        return self.images - self.vectors * self.values[None, :]

    def is_settled(self, tolerance: float) -> Bool[Array, ""]:
        residual = jnp.linalg.norm(self.residuals()[:, 0])
        limit = tolerance * self.scale
        return (residual <= limit) & (self.change <= limit)


def largest_eigenpairs(
    operator: Callable[[Float[Array, " size"]], Float[Array, " size"]],
    start: Float[Array, "size b"],
    *,
    tolerance: float,
    max_steps: int,
) -> Eigenpairs:
    r"""Algebraically largest eigenvalues by a locally optimal block power iteration.

    One step looks for the best vectors in the span of the present ones, their images
    and the previous directions (the method of Knyazev, LOBPCG, without preconditioner):
    a block power iteration that also gets through clustered spectra. It stops when both
    the residual and the last change of the first eigenvalue $\lambda$ are below the
    tolerance times $|H|$; the error of $\lambda$ is then of the order of the residual
    squared over the gap. If the block spans the whole space one step is exact.

    Args:
        operator: the symmetric $H$, acting on one vector; it is mapped over columns.
        start: any independent vectors; usually random.
        tolerance: see above; never below what rounding allows.
        max_steps: most steps.

    Returns:
        The eigenpairs. Cost of a step: `3 b` applications, $O(\mathrm{size}\,b^2)$.
    """
    tolerance = max(tolerance, 16 * float(jnp.finfo(start.dtype).eps))
    apply = jax.vmap(operator, in_axes=1, out_axes=1)

    def goes_on(block: _Block) -> Bool[Array, ""]:
        return ~block.is_settled(tolerance) & (block.count < max_steps)

    block = lax.while_loop(goes_on, lambda block: _step(apply, block), _first(start))
    return Eigenpairs(
        block.values,
        block.vectors,
        jnp.linalg.norm(block.residuals()[:, 0]),
        block.scale,
        block.count,
        block.is_settled(tolerance),
    )


def _first(start: Float[Array, "size b"]) -> _Block:
    """Return a block that has seen nothing yet, and is not settled."""
    zero, nothing = jnp.zeros((), start.dtype), jnp.zeros_like(start)
    values = jnp.zeros(start.shape[1:], start.dtype)
    return _Block(values, start, nothing, nothing, zero, zero + jnp.inf, jnp.array(0))


def _step(apply: Callable, block: _Block) -> _Block:
    """Find the best vectors among the present, their residuals and directions."""
    width = len(block.values)
    span = [block.vectors, block.residuals(), block.directions]
    # Columns that depend on others are replaced by arbitrary orthogonal ones.
    basis = jnp.linalg.qr(jnp.concatenate(span, axis=1))[0]
    images = apply(basis)
    small = matmul(basis.T, images)
    values, mixing = jnp.linalg.eigh((small + small.T) / 2)
    values, mixing = values[::-1], mixing[:, ::-1][:, :width]
    is_old = (jnp.arange(len(mixing)) < width)[:, None]
    return _Block(
        values[:width],
        matmul(basis, mixing),
        matmul(images, mixing),
        matmul(basis, jnp.where(is_old, 0, mixing)),
        jnp.maximum(block.scale, jnp.abs(values).max()),
        jnp.abs(values[0] - block.values[0]),
        block.count + 1,
    )


def random_block(
    size: int, vectors: int, dtype: jnp.dtype, *, seed: int = 0
) -> Float[Array, "size b"]:
    """Return a reproducible random start of at most `size` columns."""
    return jr.normal(jr.key(seed), (size, min(vectors, size)), dtype)
