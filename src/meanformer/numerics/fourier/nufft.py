"""Nonuniform fast Fourier transforms: those of jax-finufft, ready for `vmap`.

The rule for `vmap` that jax-finufft 1.3 brings asks JAX for a name that JAX 0.10 no
longer has. The rule below takes its place.
"""

from functools import partial

import jax.numpy as jnp
from jax.interpreters import batching
from jax_finufft import nufft1, nufft2
from jax_finufft.ops import nufft1_p, nufft2_p

__all__ = ["nufft1", "nufft2"]


def batch_transform(transform, args, axes, *, output_shape, nufft_type, **options):
    """Transform a batch: all arguments get the axis of the batch in front."""
    size = next(
        a.shape[axis] for a, axis in zip(args, axes, strict=True) if axis is not None
    )

    def in_front(array, axis):
        if axis is None:
            return jnp.broadcast_to(array[None], (size, *array.shape))
        return jnp.moveaxis(array, axis, 0)

    source, *points = map(in_front, args, axes)
    return transform(output_shape, source, *points, **options), 0


def evaluate(output_shape, source, *points, **options):
    """Evaluate a series; the shape of the result is that of the points."""
    return nufft2(source, *points, **options)


if not hasattr(batching, "not_mapped"):
    batching.primitive_batchers[nufft1_p] = partial(batch_transform, nufft1)
    batching.primitive_batchers[nufft2_p] = partial(batch_transform, evaluate)
