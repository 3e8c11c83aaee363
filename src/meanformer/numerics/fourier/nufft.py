"""Nonuniform fast Fourier transforms: those of jax-finufft, under all of JAX's rules.

The rule for `vmap` that jax-finufft 1.3 brings asks JAX for a name that JAX 0.10 no
longer has; the one below takes its place. And its derivatives promote ranks and types,
which JAX may be set to refuse.
"""

import contextlib
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax.interpreters import batching
from jax_finufft import nufft1, nufft2
from jax_finufft.ops import nufft1_p, nufft2_p
from jaxtyping import Array, Complex, Float


def transform(
    shape: tuple[int, ...],
    columns: Complex[Array, "c n"],
    points: Float[Array, "n k"],
    accuracy: float,
) -> Complex[Array, "c ..."]:
    r"""Return $\sum_j c_j e^{-i\langle\omega, z_j\rangle}$ for integers $\omega$."""
    with _promoting():
        return nufft1(shape, columns, *points.T, iflag=-1, eps=accuracy)


def evaluate(
    coefficients: Complex[Array, "c ..."], points: Float[Array, "m k"], accuracy: float
) -> Complex[Array, "c m"]:
    r"""Return $\sum_\omega F_\omega e^{i\langle\omega, a_i\rangle}$."""
    with _promoting():
        return nufft2(coefficients, *points.T, iflag=1, eps=accuracy)


@contextlib.contextmanager
def _promoting() -> Iterator[None]:
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def _batch(call, args, axes, *, output_shape, nufft_type, **options):
    """Transform a batch: all arguments get the axis of the batch in front."""
    size = next(
        a.shape[axis] for a, axis in zip(args, axes, strict=True) if axis is not None
    )

    def in_front(array, axis):
        if axis is None:
            return jnp.broadcast_to(array[None], (size, *array.shape))
        return jnp.moveaxis(array, axis, 0)

    source, *points = map(in_front, args, axes)
    return call(output_shape, source, *points, **options), 0


def _second_type(output_shape, source, *points, **options):
    return nufft2(source, *points, **options)


if not hasattr(batching, "not_mapped"):
    batching.primitive_batchers[nufft1_p] = partial(_batch, nufft1)
    batching.primitive_batchers[nufft2_p] = partial(_batch, _second_type)
