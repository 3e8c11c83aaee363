"""Convolutions with a Gaussian, or with its like on the circle, at scattered points."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, ScalarLike

from meanformer.numerics.arrays import matmul, padded
from meanformer.numerics.fourier import nufft
from meanformer.numerics.fourier.levels import CIRCLE, Level

# Found by timing: more modes, or more points than the cache holds, are faster by
# nonuniform transforms.
DIRECT_MODES, DIRECT_POINTS = 32, 200_000


def gaussian_convolution(
    queries: Float[Array, "m k"],
    tokens: Float[Array, "n k"],
    columns: Float[Array, "c n"],
    spans: Float[Array, " k"],
    level: Level,
) -> Float[Array, "c m"]:
    r"""Return $\sum_j c_j e^{-|a_i - z_j|^2/2}$ for each column $c$.

    The Gaussian is replaced by its periodic sum, whose Fourier series is short. The
    period leaves as much room beyond the widest difference as the series reaches in
    frequency, so that both errors are equal; together they are below an eighth of the
    level's accuracy along each axis if its modes are at least `gaussian_modes`.

    Args:
        queries: the points $a_i$.
        tokens: the points $z_j$.
        columns: the numbers $c_j$, one row per sum.
        spans: largest $|a_i - z_j|$ along each axis.
        level: modes and accuracy of the transforms.

    Returns:
        The sums, in time $O((m + n) \log^k(1/\varepsilon) + N^k \log N)$.
    """
    periods = (spans + jnp.sqrt(spans**2 + 4 * math.pi * level.modes)) / 2
    steps = 2 * math.pi / periods
    order = jnp.arange(level.modes, dtype=steps.dtype) - level.modes // 2
    frequencies = steps[:, None] * order[None, :]
    factors = steps[:, None] / math.sqrt(2 * math.pi) * jnp.exp(-(frequencies**2) / 2)
    return convolution(
        queries * steps[None, :], tokens * steps[None, :], columns, factors, level
    )


def gaussian_modes(spans: Float[Array, " k"], accuracy: ScalarLike) -> Float[Array, ""]:
    """Return how many modes per axis cut off less than an eighth of an accuracy."""
    tail = jnp.sqrt(2 * jnp.log(16 / accuracy))
    return tail * (jnp.max(spans) + tail) / math.pi + 1


def circle_convolution(
    queries: Float[Array, "m 1"],
    tokens: Float[Array, "n 1"],
    columns: Float[Array, "c n"],
    concentration: Float[Array, ""],
    level: Level,
) -> Float[Array, "c m"]:
    r"""Return $\sum_j c_j e^{\rho(\cos(a_i - z_j) - 1)}$ for each column $c$.

    The kernel's Fourier coefficients are the scaled Bessel functions
    $e^{-\rho} I_k(\rho)$; they come from its values on a grid, to the last digit of the
    largest, which is all that a sum needs.
    """
    count = 2 * level.modes
    angles = 2 * math.pi / count * jnp.arange(count, dtype=concentration.dtype)
    # cos(a) - 1 without cancellation.
    kernel = jnp.exp(-2 * concentration * jnp.sin(angles / 2) ** 2)
    bessel = jnp.fft.fft(kernel).real / count
    factors = jnp.roll(bessel, level.modes // 2)[: level.modes]
    return convolution(queries, tokens, columns, factors[None, :], level)


def circle_modes(
    concentration: Float[Array, ""], accuracy: ScalarLike
) -> Float[Array, ""]:
    r"""Return how many modes are enough: twice $\sqrt{2\rho L} + L/3 + 2$.

    $L$ is minus the logarithm of an eighth of the accuracy. The coefficients fall like
    $e^{-k^2/2\rho}$ up to $k = \rho$ and faster than geometrically beyond.
    """
    digits = -jnp.log(accuracy / 8)
    return 2 * (jnp.sqrt(2 * digits * concentration) + digits / 3 + 2)


def convolution(
    queries: Float[Array, "m k"],
    tokens: Float[Array, "n k"],
    columns: Float[Array, "c n"],
    factors: Float[Array, "k modes"],
    level: Level,
) -> Float[Array, "c m"]:
    """Transform the tokens, multiply by the kernel's coefficients, and evaluate.

    Several devices transform their own tokens, add up the coefficients, and evaluate
    their own queries.
    """
    arrays = queries, tokens, columns.T
    if level.devices is None:
        return on_device(level, None, factors, *arrays).T
    mesh, axis, _ = level.devices
    along = PartitionSpec(axis)
    shared = jax.shard_map(
        partial(on_device, level, axis, factors),
        mesh=mesh,
        in_specs=along,
        out_specs=along,
        check_vma=False,
    )
    return shared(*padded(arrays, mesh.shape[axis]))[: len(queries)].T


def is_direct(modes: int, points: int) -> bool:
    """Whether a series on the circle is summed as it stands."""
    return modes <= DIRECT_MODES and points <= DIRECT_POINTS


def on_device(
    level: Level,
    axis: str | None,
    factors: Float[Array, "k modes"],
    queries: Float[Array, "m k"],
    tokens: Float[Array, "n k"],
    columns: Float[Array, "n c"],
) -> Float[Array, "m c"]:
    """Convolve as one device does, or as the only one.

    Everything is real, so that two columns make one complex transform.
    """
    if level.kind == CIRCLE and is_direct(level.modes, len(queries) + len(tokens)):
        return few_terms(factors[0], queries, tokens, columns, axis)
    dimension, count = queries.shape[1], columns.shape[1]
    shape, accuracy = (level.modes,) * dimension, level.accuracy
    coefficients = nufft.transform(shape, paired(columns.T), tokens, accuracy)
    if axis is not None:
        coefficients = lax.psum(coefficients, axis)
    for place, along_axis in enumerate(factors):
        around = [1] * (dimension + 1)
        around[place + 1] = level.modes
        factor = along_axis.reshape(around).astype(coefficients.dtype)
        coefficients = coefficients * factor
    values = nufft.evaluate(coefficients, queries, accuracy)
    return unpaired(values)[:count].T


def paired(columns: Float[Array, "c n"]) -> Array:
    """Join neighbouring columns as real and imaginary parts."""
    even = jnp.pad(columns, ((0, len(columns) % 2), (0, 0)))
    return lax.complex(even[0::2], even[1::2])


def unpaired(values: Array) -> Float[Array, "c m"]:
    """Take real and imaginary parts apart again."""
    both = jnp.stack([values.real, values.imag], axis=1)
    return both.reshape(-1, values.shape[1])


# Cosine and sine of a multiple of each angle.
Wave = Float[Array, "2 n"]


def few_terms(
    factors: Float[Array, " modes"],
    queries: Float[Array, "m 1"],
    tokens: Float[Array, "n 1"],
    columns: Float[Array, "n c"],
    axis: str | None,
) -> Float[Array, "m c"]:
    r"""Return $\sum_j \sum_k f_k \cos(k(a_i - z_j))\, c_j$ by a recurrence in $k$.

    Args:
        factors: the even coefficients $f_k$, from $-N/2$ on.
        queries: the angles $a_i$.
        tokens: the angles $z_j$.
        columns: the numbers $c_j$, one column per sum.
        axis: the axis of devices that share the tokens, if they do.
    """
    half = factors[len(factors) // 2 :]
    # Terms at k and -k are equal.
    half = jnp.concatenate([half[:1], 2 * half[1:]])
    turn, query_turn = wave(tokens[:, 0]), wave(queries[:, 0])

    def transform(current: Wave, _):
        return rotated(current, turn), matmul(current, columns)

    def evaluate(carry, term):
        current, total = carry
        factor, coefficients = term
        total = total + factor * matmul(current.T, coefficients)
        return (rotated(current, query_turn), total), None

    _, sums = lax.scan(transform, standing(turn), None, length=len(half))
    if axis is not None:
        sums = lax.psum(sums, axis)
    nothing = jnp.zeros((len(queries), columns.shape[1]), columns.dtype)
    return lax.scan(evaluate, (standing(query_turn), nothing), (half, sums))[0][1]


def wave(angles: Float[Array, " n"]) -> Wave:
    """Return cosine and sine of each angle."""
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def standing(turn: Wave) -> Wave:
    """Return cosine and sine of zero for each angle."""
    return jnp.stack([jnp.ones_like(turn[0]), jnp.zeros_like(turn[1])])


def rotated(current: Wave, turn: Wave) -> Wave:
    """Turn each wave by its angle."""
    cosine, sine = current
    return jnp.stack(
        [cosine * turn[0] - sine * turn[1], cosine * turn[1] + sine * turn[0]]
    )
