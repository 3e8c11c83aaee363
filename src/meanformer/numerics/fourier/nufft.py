"""Nonuniform fast Fourier transforms: those of jax-finufft, under all of JAX's rules.

The rule for `vmap` that jax-finufft 1.3 brings asks JAX for a name that JAX 0.10 no
longer has; the one below takes its place. And its derivatives promote ranks and types,
which JAX may be set to refuse.
"""

import contextlib
import math
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax.interpreters import batching
from jax_finufft import nufft1, nufft2
from jax_finufft.ops import nufft1_p, nufft2_p
from jax_finufft.options import Opts
from jaxtyping import Array, Complex, Float

# Found by timing: up to so many nodes a finer grid is faster than wider kernels.
NODES_PER_POINT = 64


def transform(
    shape: tuple[int, ...],
    columns: Complex[Array, "c n"],
    points: Float[Array, "n k"],
    accuracy: float,
) -> Complex[Array, "c ..."]:
    r"""Return $\sum_j c_j e^{-i\langle\omega, z_j\rangle}$ for integers $\omega$."""
    options = _options(shape, len(points))
    with _promoting():
        return nufft1(shape, columns, *points.T, iflag=-1, eps=accuracy, opts=options)


def evaluate(
    coefficients: Complex[Array, "c ..."], points: Float[Array, "m k"], accuracy: float
) -> Complex[Array, "c m"]:
    r"""Return $\sum_\omega F_\omega e^{i\langle\omega, a_i\rangle}$."""
    options = _options(coefficients.shape[1:], len(points))
    with _promoting():
        return nufft2(coefficients, *points.T, iflag=1, eps=accuracy, opts=options)


def _options(shape: tuple[int, ...], count: int) -> Opts:
    """Choose a grid twice as fine as the modes, unless that is where the time would go.

    What the library itself would choose, above an accuracy of 1e-9, is a coarser grid
    with wider kernels, two to three times slower for many points.
    """
    nodes = math.prod(2 * modes for modes in shape)
    return Opts(upsampfac=2.0 if nodes <= NODES_PER_POINT * count else 0.0)


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
