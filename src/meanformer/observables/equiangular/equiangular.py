"""Tokens at equal angles: one number instead of all tokens, and times as integrals."""

from typing import Any, NamedTuple

import diffrax
import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer import flows
from meanformer.errors import (
    Overflow,
    Unsupported,
    as_finite_array,
    as_float_array,
    as_integer,
    as_number,
    check,
    check_kind,
    is_concrete,
)
from meanformer.observables.equiangular import times
from meanformer.typing import ArrayLike

ON_SPHERE = flows.PostNorm()
LARGEST_STEPS = 100_000
Scalars = Float[Array, "*s"]


class LongTimeLaw(NamedTuple):
    r"""How the gap $1 - \rho$ vanishes in the end.

    Attributes:
        form: `"exponential"` for $e^{-kt}$, `"power"` for $t^{-k}$, `"stretched"` for
            $e^{-k\sqrt t}$.
        exponent: the $k$.
    """

    form: str
    exponent: float


class Equiangular(eqx.Module):
    r"""Tokens of equal weight with one inner product between any two.

    If $\langle x_i, x_j\rangle = \rho$ for all $i \ne j$ at the start, this stays so
    under attention with $Q = K = V = I$, and with $r$ the common radius
    $$\dot\rho = \frac{2}{s}\,q\,(1-\rho)\bigl((n-1)\rho + 1\bigr), \qquad
      \dot r = g,$$
    where $s$ and $g$ are those of the normalisation scheme at
    $\langle A,\theta\rangle = a + (n-1)q\rho$ and $|A|$, $a$ is the attention of a
    token to itself and $q$ that to each other one: for softmax
    $q = 1/(e^{\beta(1-\rho)} + n - 1)$ and $a = e^{\beta(1-\rho)}q$, for unnormalised
    attention $q = e^{\beta\rho}/n$ and $a = e^\beta/n$ [GLPR23, Rig25]. Independent
    uniform tokens in high dimension are nearly so, with $\rho = 0$. The reduction is
    exact; only equal weights have it.

    What is integrated is $z$, the decrease of $\log\frac{1-\rho}{1/(n-1)+\rho}$ from
    its start, with $\dot z = 2nq/s$: the gap $1 - \rho$ is accurate relatively, however
    small.

    Args:
        count: the number $n \ge 2$ of tokens.
        beta: inverse temperature $\beta \ge 0$.
        kind: `"softmax"` or `"unnormalised"`.
        scheme: where the layer normalises; `PostNorm()`, the flow on the sphere, by
            default.
        start: the inner product at depth zero, from $-1/(n-1)$, the simplex, which
            is at rest, to 1.
    """

    count: int = eqx.field(static=True)
    beta: float = eqx.field(static=True)
    kind: str = eqx.field(static=True)
    scheme: flows.AbstractScheme
    start: float = eqx.field(static=True)

    def __init__(
        self,
        count: int,
        beta: float,
        *,
        kind: str = "softmax",
        scheme: flows.AbstractScheme = ON_SPHERE,
        start: float = 0.0,
    ):
        self.count = as_integer("count", count, least=2)
        allowed = "finite and not negative"
        self.beta = as_number("beta", beta, allowed, least=0, below=np.inf)
        self.kind = times.checked_kind(kind)
        self.start = times.checked_start(self.count, start)
        allowed = "a normalisation scheme such as PreNorm()"
        check_kind("scheme", scheme, flows.AbstractScheme, allowed)
        self.scheme = scheme
        is_simplex = 1 + (self.count - 1) * self.start <= 0
        check(
            not (is_simplex and self.beta == 0 and scheme.divides_by_attention),
            "start is that of a simplex and beta is 0, so the attention is zero and "
            f"{type(scheme).__name__} has no meaning: raise start or beta.",
        )

    @property
    def rests(self) -> bool:
        """Whether nothing moves: one cluster, or a perfect simplex."""
        return self.start == 1 or 1 + (self.count - 1) * self.start <= 0

    @property
    def is_softmax(self) -> bool:
        """Whether attention is divided by its mass."""
        return self.kind == "softmax"

    def velocity(
        self,
        rho: ArrayLike | Float[Array, "*s"],
        *,
        depth: ArrayLike | Float[Array, ""] = 0.0,
        radius: ArrayLike | Float[Array, "*s"] = 1.0,
    ) -> Float[Array, "*s"]:
        r"""Return $\dot\rho$ at an inner product, a depth and a radius.

        Args:
            rho: the inner product.
            depth: the depth, for schemes that look at it.
            radius: the common radius $r$.
        """
        dtype = jnp.result_type(float)
        rho, depth, radius = (jnp.asarray(x, dtype) for x in (rho, depth, radius))
        radius = jnp.broadcast_to(radius, rho.shape)
        velocity = self._reduced(dtype).velocity(rho, depth, radius)
        if is_concrete(velocity) and not np.isfinite(velocity).all():
            raise Overflow(
                f"the attention at beta = {self.beta} is beyond all numbers; lower "
                "beta, or use softmax attention."
            )
        return velocity

    def solve(self, depths: ArrayLike) -> Float[Array, " t"]:
        r"""Return $\rho$ at increasing depths, from 0 on.

        By an explicit method of order 8 at the relative tolerance $10^{-10}$ (what
        rounding allows in single precision).
        """
        return 1 - self.gap(depths)

    def gap(self, depths: ArrayLike) -> Float[Array, " t"]:
        r"""Return $1 - \rho$ at increasing depths, accurate relatively."""
        return self._path(depths)[0]

    def radius(self, depths: ArrayLike) -> Float[Array, " t"]:
        """Return the common radius at increasing depths; it is 1 at depth 0."""
        return self._path(depths)[1]

    def time_to(self, level: float = 0.999) -> float:
        r"""Return the depth at which $\rho$ reaches a level.

        An integral, by Gauss rules in the variable $z$, to a relative $10^{-12}$: with
        the gap $u(z)$ it is
        $$T = \frac{1}{2n}\int \bigl(n - 1 + e^{\beta u(z)}\bigr)\,\mathrm{d}z$$
        for softmax and $\frac12\int e^{-\beta(1-u(z))}\,\mathrm{d}z$ for unnormalised
        attention after the residual; for `PreNorm` and `PeriNorm` the radius is an
        integral too. `MixNorm` after its change, and schemes of your own, need an
        ordinary differential equation, at the relative tolerance $10^{-10}$.

        Args:
            level: the inner product to reach, below 1; one that does not lie above the
                start is reached at depth 0.
        """
        if as_number("level", level) <= self.start:
            return 0.0
        log_time = self.log_time_to(level)
        if log_time > np.log(np.finfo(float).max):
            raise Overflow(
                f"the depth is exp({log_time:.6g}), beyond all numbers; use "
                "log_time_to."
            )
        return float(np.exp(log_time))

    def log_time_to(self, level: float = 0.999) -> float:
        r"""Return the logarithm of the depth at which a level is reached.

        For `PreNorm` and `PeriNorm` it grows like $e^\beta$, for others like $\beta$.

        Args:
            level: the inner product to reach, above the start and below 1.
        """
        level = times.checked_level(level, self.start)
        check(
            not self.rests,
            f"start is {self.start}, where nothing moves; no level is reached.",
        )
        match self.scheme:
            case flows.PostNorm():
                return self._integral(level)
            case flows.NGPT(alpha=alpha):
                return float(self._integral(level, True) - np.log(alpha))
            case flows.PreNorm() | flows.PeriNorm():
                by_length = isinstance(self.scheme, flows.PeriNorm)
                return self._growing(self._interval(level), by_length)
            case flows.SqrtScaling():
                # The clock 2 (sqrt(1 + t) - 1) runs through the time of the sphere.
                half = self._integral(level) - np.log(2)
                return float(half + np.logaddexp(np.log(2), half))
            case flows.MixNorm(switch=switch):
                return self._mixed_log_time(level, switch)
        dtype = jnp.result_type(float)
        length = jnp.asarray(self._interval(level).length, dtype)
        depth = self._solved(depth_of, self._reduced(dtype), length)
        return float(np.log(depth))

    def _mixed_log_time(self, level: float, switch: float) -> float:
        early = self._integral(level)
        if early <= np.log(switch):
            return early
        gap = float(self.gap([switch])[0])
        rise, room = gap - (1 - level), self.count / (self.count - 1) - gap
        if rise <= 0:
            return early
        numbers = self.count, 1 - gap, gap, room, rise
        later = self._growing(times.Interval(*numbers, self.is_softmax), False)
        return float(np.logaddexp(np.log(switch), later))

    def _integral(self, level: float, by_length: bool = False) -> float:
        interval, beta = self._interval(level), np.array(self.beta)
        return float(times.log_clustering_time(interval, beta, by_length=by_length)[0])

    def _growing(self, interval: times.Interval, by_length: bool) -> float:
        log_time = times.log_growing_time(interval, self.beta, by_length=by_length)
        if not np.isfinite(log_time):
            raise Overflow(
                f"even the logarithm of the depth is beyond all numbers, of the order "
                f"of exp(beta) with beta = {self.beta}; lower beta."
            )
        return log_time

    def _interval(self, level: float) -> times.Interval:
        return times.Interval.between(self.count, self.start, level, self.is_softmax)

    @property
    def law(self) -> LongTimeLaw:
        r"""How the gap $1 - \rho$ vanishes in the end, in closed form.

        With $\kappa = 1$ for softmax and $e^\beta$ for unnormalised attention:
        $e^{-2\kappa t}$ for `PostNorm`, $e^{-2\alpha t}$ for `NGPT`, $t^{-2}$ for
        `PreNorm`, `PeriNorm` and `MixNorm`, $e^{-4\kappa\sqrt t}$ for `SqrtScaling`.
        """
        with np.errstate(over="ignore"):
            speed = 1.0 if self.is_softmax else float(np.exp(self.beta))
        match self.scheme:
            case flows.PreNorm() | flows.PeriNorm() | flows.MixNorm():
                law = LongTimeLaw("power", 2.0)
            case flows.PostNorm():
                law = LongTimeLaw("exponential", 2 * speed)
            case flows.NGPT(alpha=alpha):
                law = LongTimeLaw("exponential", 2 * alpha)
            case flows.SqrtScaling():
                law = LongTimeLaw("stretched", 4 * speed)
            case scheme:
                name = type(scheme).__name__
                raise Unsupported(f"no law is known for {name}; fit one to gap().")
        if not np.isfinite(law.exponent):
            raise Overflow(
                f"the rate is a multiple of exp(beta) with beta = {self.beta}, beyond "
                "all numbers; lower beta."
            )
        return law

    def _path(self, depths: ArrayLike) -> tuple[Float[Array, " t"], Float[Array, " t"]]:
        array = jnp.atleast_1d(as_float_array("depths", depths))
        array = as_finite_array("depths", array, (None,))
        if is_concrete(array):
            increases = bool((np.diff(array) > 0).all()) and bool(array[0] >= 0)
            check(increases, "depths must increase, from 0 or later.")
        return self._solved(path_of, self._reduced(array.dtype), array)

    def _solved(self, solver, *inputs):
        """Return what a solver of the equation returns, or raise with advice."""
        try:
            return solver(*inputs)
        except eqx.EquinoxRuntimeError:
            raise Overflow(
                f"the equation at beta = {self.beta} takes too many steps, or numbers "
                "too large, to be solved; lower beta, or go less deep."
            ) from None

    def _reduced(self, dtype: jnp.dtype) -> "Reduced":
        interval = self._interval(1.0)
        numbers = (self.count, self.beta, interval.gap, interval.room)
        arrays = (jnp.asarray(number, dtype) for number in numbers)
        return Reduced(*arrays, self.scheme, self.is_softmax, self.rests)


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
    scheme: flows.AbstractScheme
    is_softmax: bool = eqx.field(static=True)
    rests: bool = eqx.field(static=True)

    def attention(self, gap: Scalars) -> tuple[Scalars, Scalars, Scalars]:
        """Return its radial part, its length, and the share of another token."""
        score = self.beta * gap
        if self.is_softmax:
            log_own = score - jnp.logaddexp(score, jnp.log(self.count - 1))
        else:
            log_own = self.beta - jnp.log(self.count) + 0 * gap
        kappa = jnp.maximum(self.count - (self.count - 1) * gap, 0)
        radial, length = times.relative_attention(self.count, kappa, score)
        own = jnp.exp(log_own)
        return own * radial, own * length, jnp.exp(log_own - score)

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
    z, radius = _integrated(field, last, (0 * one, one), saved, jumps)
    return reduced.gap_of(z), radius


@eqx.filter_jit
def depth_of(reduced: Reduced, length: Float[Array, ""]) -> Float[Array, ""]:
    """Return the depth at which the variable has grown to a length."""

    # It grows all the time: depth, over the length, and radius are functions of it.
    def field(share, state, args):
        depth, radius = length * state[0], state[1]
        turning, growth = reduced.rates(depth, length * share, radius)
        return 1 / turning, length * growth / turning

    zero = jnp.zeros_like(length)
    depths, _ = _integrated(field, zero + 1, (zero, zero + 1), diffrax.SaveAt(t1=True))
    return length * depths[-1]


def _integrated(field, last: Array, start, saved: diffrax.SaveAt, jumps=None):
    """Return the solution from zero on, by steps of order 8."""
    tolerance = max(1e-10, 64 * float(jnp.finfo(last.dtype).eps))
    controller = diffrax.PIDController(rtol=tolerance, atol=tolerance)
    if jumps is not None:
        jumps = jumps.astype(last.dtype)
        controller = diffrax.ClipStepSizeController(controller, jump_ts=jumps)
    term, solver, first = diffrax.ODETerm(field), diffrax.Dopri8(), 0 * last
    options = {"stepsize_controller": controller, "max_steps": LARGEST_STEPS}
    solution: Any = diffrax.diffeqsolve(
        term, solver, first, last, None, start, saveat=saved, **options
    )
    return solution.ys
