"""The inner product and the radius of tokens at equal angles, as a small system."""

from typing import Any

import diffrax
import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.flows import AbstractScheme
from meanformer.observables.equiangular.times import relative_attention

LARGEST_STEPS = 100_000
Scalars = Float[Array, "*s"]


class Reduced(eqx.Module):
    r"""The equations of tokens at equal angles.

    The attention is $A_i = (a - q)\theta_i + q\sum_j\theta_j$. What is solved is the
    variable $z = \log\frac{u_0}{w_0} - \log\frac uw$, with the gap $u = 1 - \rho$ and
    the room $w = \rho + 1/(n-1)$ above the simplex. Arrays, so that one compilation
    serves all numbers.
    """

    count: Float[Array, ""]
    beta: Float[Array, ""]
    gap: Float[Array, ""]
    room: Float[Array, ""]
    scheme: AbstractScheme
    is_softmax: bool = eqx.field(static=True)
    rests: bool = eqx.field(static=True)

    def log_shares(self, gap: Scalars) -> tuple[Scalars, Scalars]:
        """Return the logarithms of the attention to itself and to another one."""
        if self.is_softmax:
            log_total = jnp.logaddexp(self.beta * gap, jnp.log(self.count - 1))
            return self.beta * gap - log_total, -log_total
        log_own = self.beta - jnp.log(self.count) + 0 * gap
        return log_own, log_own - self.beta * gap

    def attention(self, gap: Scalars) -> tuple[Scalars, Scalars, Scalars]:
        """Return its radial part, its length, and the share of another token."""
        log_own, log_other = self.log_shares(gap)
        kappa = jnp.maximum(self.count - (self.count - 1) * gap, 0)
        score = self.beta * gap
        radial, length = relative_attention(
            self.count, kappa, jnp.exp(-score), -jnp.expm1(-score)
        )
        own = jnp.exp(log_own)
        return own * radial, own * length, jnp.exp(log_other)

    def velocity(self, rho: Scalars, depth: Array, radius: Scalars) -> Scalars:
        """Return the derivative of the inner product."""
        radial, norm, other = self.attention(1 - rho)
        slowness = self.scheme.slowness(depth, radius, radial, norm)
        return 2 * other * (1 - rho) * ((self.count - 1) * rho + 1) / slowness

    def gap_of(self, z: Scalars) -> Scalars:
        """Return the gap at the variable."""
        fallen = self.gap * jnp.exp(-z)
        return (self.gap + self.room) * fallen / (self.room + fallen)

    def rates(self, depth: Array, z: Array, radius: Array) -> tuple[Array, Array]:
        """Return the derivatives of the variable and of the radius."""
        radial, norm, other = self.attention(self.gap_of(z))
        slowness = self.scheme.slowness(depth, radius, radial, norm)
        growth = self.scheme.growth(depth, radius, radial, norm)
        turning = 2 * self.count * other / slowness
        return (0 * turning if self.rests else turning), growth


@eqx.filter_jit
def path_of(reduced: Reduced, depths: Float[Array, " t"]):
    """Return gap and radius at increasing depths, from depth zero on."""

    def field(depth, state, args):
        return reduced.rates(depth, *state)

    one = jnp.ones((), depths.dtype)
    last = jnp.maximum(depths[-1], jnp.finfo(depths.dtype).eps)
    saved, jumps = diffrax.SaveAt(ts=depths), reduced.scheme.jumps
    z, radius = _solved(field, last, (0 * one, one), saved, jumps)
    return reduced.gap_of(z), radius


@eqx.filter_jit
def depth_of(reduced: Reduced, length: Float[Array, ""]) -> Float[Array, ""]:
    """Return the depth at which the variable has grown to a length.

    It grows all the time, so depth, over the length, and radius are solved as functions
    of the share of it that lies behind.
    """

    def field(share, state, args):
        depth, radius = length * state[0], state[1]
        turning, growth = reduced.rates(depth, length * share, radius)
        return 1 / turning, length * growth / turning

    zero = jnp.zeros_like(length)
    depths, _ = _solved(field, zero + 1, (zero, zero + 1), diffrax.SaveAt(t1=True))
    return length * depths[-1]


def _solved(field, last: Array, start, saved: diffrax.SaveAt, jumps=None):
    """Return the solution from zero on, by steps of order 8."""
    tolerance = max(1e-10, 64 * float(jnp.finfo(last.dtype).eps))
    controller = diffrax.PIDController(rtol=tolerance, atol=tolerance)
    if jumps is not None:
        jumps = jumps.astype(last.dtype)
        controller = diffrax.ClipStepSizeController(controller, jump_ts=jumps)
    solution: Any = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Dopri8(),
        0 * last,
        last,
        None,
        start,
        saveat=saved,
        stepsize_controller=controller,
        max_steps=LARGEST_STEPS,
    )
    return solution.ys
