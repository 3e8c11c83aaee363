"""The inner product and the radius of tokens at equal angles, as a small system."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.flows import AbstractScheme

LARGEST_STEPS = 100_000
Scalars = Float[Array, "*s"]


class Reduced(eqx.Module):
    r"""The equations of tokens at equal angles.

    With $\kappa = 1 + (n-1)\rho$ the attention is
    $A_i = (a - q)\theta_i + q\sum_j\theta_j$, so $\langle A,\theta\rangle = a - q +
    q\kappa$ and $|A|^2 = (a-q)^2 + 2(a-q)q\kappa + nq^2\kappa$: sums of terms that are
    not negative. Arrays, so that one compilation serves all numbers.
    """

    count: Float[Array, ""]
    beta: Float[Array, ""]
    gap: Float[Array, ""]
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
        other = jnp.exp(log_other)
        excess = jnp.exp(log_own) * -jnp.expm1(log_other - log_own)
        kappa = jnp.maximum(self.count - (self.count - 1) * gap, 0)
        square = excess**2 + (2 * excess + self.count * other) * other * kappa
        return excess + other * kappa, jnp.sqrt(square), other

    def velocity(self, rho: Scalars, depth: Array, radius: Scalars) -> Scalars:
        """Return the derivative of the inner product."""
        radial, norm, other = self.attention(1 - rho)
        slowness = self.scheme.slowness(depth, radius, radial, norm)
        return 2 * other * (1 - rho) * ((self.count - 1) * rho + 1) / slowness

    def gap_of(self, y: Scalars) -> Scalars:
        """Return the gap at the variable; the gap at the start if nothing moves."""
        if self.rests:
            return self.gap + 0 * y
        return jax.nn.sigmoid(y) * self.count / (self.count - 1)

    @property
    def start(self) -> Float[Array, ""]:
        """The variable at the start; any number if nothing moves."""
        return jnp.zeros_like(self.gap) if self.rests else self.variable(self.gap)

    def variable(self, gap: Scalars) -> Scalars:
        r"""Return $\log\frac{u}{c-u}$ with $c = n/(n-1)$."""
        return jnp.log(gap) - jnp.log(self.count / (self.count - 1) - gap)

    def rates(self, depth: Array, y: Array, radius: Array) -> tuple[Array, Array]:
        """Return the derivatives of the variable and of the radius."""
        radial, norm, other = self.attention(self.gap_of(y))
        slowness = self.scheme.slowness(depth, radius, radial, norm)
        growth = self.scheme.growth(depth, radius, radial, norm)
        turning = -2 * self.count * other / slowness
        return (0 * turning if self.rests else turning), growth


@eqx.filter_jit
def path_of(reduced: Reduced, depths: Float[Array, " t"]):
    """Return gap and radius at increasing depths, from depth zero on."""

    def field(depth, state, args):
        return reduced.rates(depth, *state)

    one = jnp.ones((), depths.dtype)
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Dopri8(),
        0 * one,
        jnp.maximum(depths[-1], jnp.finfo(depths.dtype).eps),
        None,
        (reduced.start, one),
        saveat=diffrax.SaveAt(ts=depths),
        stepsize_controller=_controller(depths.dtype, reduced.scheme.jumps),
        max_steps=LARGEST_STEPS,
    )
    y, radius = solution.ys  # pyright: ignore[reportGeneralTypeIssues]
    return reduced.gap_of(y), radius


@eqx.filter_jit
def depth_of(reduced: Reduced, gap: Float[Array, ""]) -> Float[Array, ""]:
    """Return the depth at which the gap has fallen to a value.

    The variable falls all the time, so depth and radius are solved as functions of it.
    """

    def field(minus_y, state, args):
        depth, radius = state
        turning, growth = reduced.rates(depth, -minus_y, radius)
        return -1 / turning, -growth / turning

    zero = jnp.zeros_like(gap)
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Dopri8(),
        -reduced.start,
        -reduced.variable(gap),
        None,
        (zero, zero + 1),
        stepsize_controller=_controller(gap.dtype, None),
        max_steps=LARGEST_STEPS,
    )
    return solution.ys[0][-1]  # pyright: ignore[reportOptionalSubscript]


def _controller(dtype: jnp.dtype, jumps: Array | None):
    tolerance = max(1e-10, 64 * float(jnp.finfo(dtype).eps))
    controller = diffrax.PIDController(rtol=tolerance, atol=tolerance)
    if jumps is None:
        return controller
    return diffrax.ClipStepSizeController(controller, jump_ts=jumps.astype(dtype))
