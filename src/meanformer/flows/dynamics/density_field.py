r"""How the moments of a density on the circle change along a flow.

$$\partial_t\varrho + \partial_\theta(\varrho v) = \tfrac{\sigma^2}{2}
  \partial_\theta^2\varrho \quad\Longleftrightarrow\quad
  \dot c_k = -ik\,(\varrho v)_k - \tfrac{\sigma^2}{2}k^2 c_k.$$
The product is formed at three nodes for each mode, so that its own modes do not fold
back on those that are kept (the two-thirds rule). Mass is $c_0$, which does not change.
"""

from typing import cast

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from meanformer.attention import (
    AbstractExponential,
    AbstractInContextMap,
    MultiHead,
    Perceptron,
    Sum,
)
from meanformer.errors import is_concrete
from meanformer.flows.dynamics.state import all_finite
from meanformer.flows.flow import Flow
from meanformer.flows.schedule import AbstractSchedule, Constant
from meanformer.flows.solvers import AbstractIntegrator
from meanformer.flows.status import AbstractStop
from meanformer.measures import FourierDensity, RingOfTilts
from meanformer.numerics.multiples import agree
from meanformer.numerics.special.trigonometric import from_grid, grid_angles, moments_of


class DensityState(eqx.Module):
    """Everything that changes along depth; a solve can restart from it alone."""

    depth: Float[Array, ""]
    moments: Float[Array, "k 2"]
    status: PyTree
    accepted_steps: Int[Array, ""]
    rejected_steps: Int[Array, ""]

    def is_finite(self) -> Bool[Array, ""]:
        """Return whether every number is finite."""
        return all_finite((self.depth, self.moments))


class DensityProblem(eqx.Module):
    """Everything that stays the same along depth.

    Attributes:
        flow: the velocity, and perhaps noise.
        integrator: how steps are taken.
        stops: conditions that end the solve.
        rtol: relative tolerance.
        atol: absolute tolerance.
        largest_tail: the coefficients in the last third that end the solve.
        max_steps: most steps between two saved depths.
        is_round: whether tilts of queries around the circle have one length.
    """

    flow: Flow
    integrator: AbstractIntegrator
    stops: tuple[AbstractStop, ...]
    rtol: Float[Array, ""]
    atol: Float[Array, ""]
    largest_tail: Float[Array, ""]
    max_steps: int = eqx.field(static=True)
    is_round: bool = eqx.field(static=True)

    def rates(
        self, depth: Float[Array, ""], moments: Float[Array, "k 2"]
    ) -> Float[Array, "k 2"]:
        """Return how fast the moments change."""
        rates = self.transport(depth, moments)
        decay = self.decay(len(moments))
        return rates if decay is None else rates - decay * moments

    def decay(self, modes: int) -> Float[Array, "k 2"] | None:
        """Return the rates at which noise alone lets the moments decay."""
        if self.flow.noise is None:
            return None
        strength = jnp.asarray(self.flow.noise, self.rtol.dtype) ** 2 / 2
        degrees = jnp.arange(1, modes + 1, dtype=strength.dtype)
        return jnp.stack([strength * degrees**2] * 2, axis=1)

    def transport(
        self, depth: Float[Array, ""], moments: Float[Array, "k 2"]
    ) -> Float[Array, "k 2"]:
        """Return how fast the velocity alone changes the moments."""
        count = node_count(len(moments))
        density = FourierDensity(moments)
        context = RingOfTilts(density, count) if self.is_round else density
        angles = grid_angles(count, moments.dtype)
        cosines, sines = jnp.cos(angles), jnp.sin(angles)
        nodes = jnp.stack([cosines, sines], axis=1)
        vectors = self.flow.velocity.velocity(depth, context, nodes, None)
        speeds = cosines * vectors[:, 1] - sines * vectors[:, 0]
        flux = from_grid(density.on_grid(count) * speeds, len(moments))[1:]
        degrees = jnp.arange(1, len(moments) + 1, dtype=moments.dtype)
        return degrees[:, None] * moments_of(-1j * flux)


def node_count(modes: int) -> int:
    """Return how many nodes products need, a number that transforms fast."""
    from scipy.fft import next_fast_len

    return cast(int, next_fast_len(3 * modes + 3, real=True))


def turns_with_queries(schedule: AbstractSchedule) -> bool:
    """Whether equispaced queries of the circle are known to have equispaced tilts."""
    return isinstance(schedule, Constant) and _is_round(schedule.gamma)


def _is_round(gamma: AbstractInContextMap) -> bool:
    if isinstance(gamma, Perceptron):
        return True
    if isinstance(gamma, Sum):
        return all(map(_is_round, gamma.maps))
    if isinstance(gamma, MultiHead):
        return all(map(_is_round, gamma.heads))
    if not isinstance(gamma, AbstractExponential) or gamma.query_bias is not None:
        return False
    if not is_concrete(gamma.score):
        return False
    score = np.asarray(gamma.score, np.float64)
    # A rotation of the plane times a number: no reflection, which runs backward.
    turned = np.array([[score[1, 1], -score[1, 0]], [-score[0, 1], score[0, 0]]])
    return agree(score, turned, 8 * float(jnp.finfo(gamma.score.dtype).eps))
