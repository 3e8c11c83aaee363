r"""How the moments of a density on the circle change along a flow.

$$\partial_t\varrho + \partial_\theta(\varrho v) = \tfrac{\sigma^2}{2}
  \partial_\theta^2\varrho \quad\Longleftrightarrow\quad
  \dot c_k = -ik\,(\varrho v)_k - \tfrac{\sigma^2}{2}k^2 c_k.$$
The product is formed at three nodes for each mode, so that its own modes do not fold
back on those that are kept (the two-thirds rule). Mass is $c_0$, which does not change.
"""

from typing import cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention import (
    AbstractExponential,
    AbstractInContextMap,
    MultiHead,
    Perceptron,
    Sum,
)
from meanformer.attention.abstract import maps_in
from meanformer.errors import is_concrete
from meanformer.flows.schedule import AbstractSchedule, Constant
from meanformer.measures import FourierDensity, RingOfTilts
from meanformer.numerics.multiples import agree
from meanformer.numerics.special.trigonometric import from_grid, grid_angles, moments_of


def transport(
    schedule: AbstractSchedule,
    depth: Float[Array, ""],
    moments: Float[Array, "k 2"],
    *,
    is_round: bool,
) -> Float[Array, "k 2"]:
    """Return how fast the velocity alone changes the moments.

    Args:
        schedule: the velocity.
        depth: the depth.
        moments: those of the density.
        is_round: whether tilts of queries around the circle have one length.
    """
    count = node_count(len(moments))
    density = FourierDensity(moments)
    context = RingOfTilts(density, count) if is_round else density
    angles = grid_angles(count, moments.dtype)
    cosines, sines = jnp.cos(angles), jnp.sin(angles)
    nodes = jnp.stack([cosines, sines], axis=1)
    vectors = schedule.velocity(depth, context, nodes, None)
    speeds = cosines * vectors[:, 1] - sines * vectors[:, 0]
    flux = from_grid(density.on_grid(count) * speeds, len(moments))[1:]
    degrees = jnp.arange(1, len(moments) + 1, dtype=moments.dtype)
    return degrees[:, None] * moments_of(-1j * flux)


def diffusion(
    noise: float | Float[Array, ""], modes: int, dtype: jnp.dtype
) -> Float[Array, "k 2"]:
    """Return the rates at which noise alone lets the moments decay."""
    strength = jnp.asarray(noise, dtype) ** 2 / 2
    degrees = jnp.arange(1, modes + 1, dtype=dtype)
    return jnp.stack([strength * degrees**2] * 2, axis=1)


def node_count(modes: int) -> int:
    """Return how many nodes products need, a number that transforms fast."""
    from scipy.fft import next_fast_len

    return cast(int, next_fast_len(3 * modes + 3, real=True))


def turns_with_queries(schedule: AbstractSchedule) -> bool:
    """Whether equispaced queries of the circle are known to have equispaced tilts."""
    is_steady = isinstance(schedule, Constant)
    return is_steady and all(map(_is_round, maps_in(schedule.gamma)))


def _is_round(gamma: AbstractInContextMap) -> bool:
    # Sums and heads are as round as what they hold.
    if isinstance(gamma, Perceptron | Sum | MultiHead):
        return True
    if not isinstance(gamma, AbstractExponential) or gamma.query_bias is not None:
        return False
    if not is_concrete(gamma.score):
        return False
    score = np.asarray(gamma.score, np.float64)
    # A rotation of the plane times a number: no reflection, which runs backward.
    turned = np.array([[score[1, 1], -score[1, 0]], [-score[0, 1], score[0, 0]]])
    return agree(score, turned, 8 * float(jnp.finfo(gamma.score.dtype).eps))
