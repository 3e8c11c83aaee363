"""Nonuniform fast Fourier transforms: those of jax-finufft, under all of JAX's rules.

The rule for `vmap` that jax-finufft 1.3 brings asks JAX for a name that JAX 0.10 no
longer has; the one below takes its place. And its derivatives promote ranks and types,
which JAX may be set to refuse.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from types import ModuleType

import jax
import jax.numpy as jnp
from jax.interpreters import batching
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
    options = dict(iflag=-1, eps=accuracy, opts=_options(shape, len(points)))
    with _promoting():
        return _library().nufft1(shape, columns, *points.T, **options)


def evaluate(
    coefficients: Complex[Array, "c ..."], points: Float[Array, "m k"], accuracy: float
) -> Complex[Array, "c m"]:
    r"""Return $\sum_\omega F_\omega e^{i\langle\omega, a_i\rangle}$."""
    shape = coefficients.shape[1:]
    options = dict(iflag=1, eps=accuracy, opts=_options(shape, len(points)))
    with _promoting():
        return _library().nufft2(coefficients, *points.T, **options)


def _options(shape: tuple[int, ...], count: int):
    """Choose a grid twice as fine as the modes, unless that is where the time would go.

    What the library itself would choose, above an accuracy of 1e-9, is a coarser grid
    with wider kernels, two to three times slower for many points.
    """
    from jax_finufft.options import Opts

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


@functools.cache
def _library() -> ModuleType:
    """Import jax-finufft, and give it the missing rule."""
    import jax_finufft
    from jax_finufft.ops import nufft1_p, nufft2_p

    def second_type(output_shape, source, *points, **options):
        return jax_finufft.nufft2(source, *points, **options)

    if not hasattr(batching, "not_mapped"):
        rules = batching.primitive_batchers
        rules[nufft1_p] = functools.partial(_batch, jax_finufft.nufft1)
        rules[nufft2_p] = functools.partial(_batch, second_type)
    return jax_finufft
