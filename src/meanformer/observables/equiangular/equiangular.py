"""Tokens at equal angles: one number instead of all tokens, and times as integrals."""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import (
    InvalidInput,
    Overflow,
    Unsupported,
    as_float_array,
    as_integer,
    as_number,
    check,
    check_choice,
    check_finite,
    is_concrete,
)
from meanformer.flows import (
    NGPT,
    AbstractScheme,
    MixNorm,
    PeriNorm,
    PostNorm,
    PreNorm,
    SqrtScaling,
)
from meanformer.observables.equiangular.reduced import Reduced, depth_of, path_of
from meanformer.observables.equiangular.times import (
    Interval,
    LogTime,
    interval_between,
    log_clustering_time,
    log_growing_time,
)
from meanformer.typing import ArrayLike

KINDS = ("softmax", "unnormalised")
ON_SPHERE = PostNorm()


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
    scheme: AbstractScheme
    start: float = eqx.field(static=True)

    def __init__(
        self,
        count: int,
        beta: float,
        *,
        kind: str = "softmax",
        scheme: AbstractScheme = ON_SPHERE,
        start: float = 0.0,
    ):
        self.count = as_integer("count", count, least=2)
        self.beta = checked_beta(beta)
        self.kind = checked_kind(kind)
        self.start = checked_start(self.count, start)
        if not isinstance(scheme, AbstractScheme):
            raise InvalidInput(
                f"scheme is {scheme!r}; it must be a normalisation scheme such as "
                "PreNorm()."
            )
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
        rho, depth, radius = (
            jnp.asarray(value, dtype) for value in (rho, depth, radius)
        )
        velocity = self._reduced(dtype).velocity(
            rho, depth, jnp.broadcast_to(radius, rho.shape)
        )
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
        level = checked_level(level, self.start)
        if self.rests:
            raise InvalidInput(
                f"start is {self.start}, where nothing moves; no level is reached."
            )
        match self.scheme:
            case PostNorm():
                return float(self._integral(level).log_time)
            case NGPT(alpha=alpha):
                return float(self._integral(level, True).log_time - np.log(alpha))
            case PreNorm() | PeriNorm():
                by_length = isinstance(self.scheme, PeriNorm)
                return self._growing(self._interval(level), by_length)
            case SqrtScaling():
                # The clock 2 (sqrt(1 + t) - 1) runs through the time of the sphere.
                half = self._integral(level).log_time - np.log(2)
                return float(
                    half + np.log(2 + np.exp(half)) if half < 300 else 2 * half
                )
            case MixNorm(switch=switch):
                return self._mixed_log_time(level, switch)
        dtype = jnp.result_type(float)
        length = jnp.asarray(self._interval(level).length, dtype)
        depth = self._solved(depth_of, self._reduced(dtype), length)
        return float(np.log(depth))

    def _mixed_log_time(self, level: float, switch: float) -> float:
        early = float(self._integral(level).log_time)
        if early <= np.log(switch):
            return early
        gap = float(self.gap([switch])[0])
        rise, room = gap - (1 - level), self.count / (self.count - 1) - gap
        if rise <= 0:
            return early
        later = self._growing(Interval(self.count, 1 - gap, gap, room, rise), False)
        return float(np.logaddexp(np.log(switch), later))

    def _integral(self, level: float, by_length: bool = False) -> LogTime:
        return log_clustering_time(
            self._interval(level),
            np.array(self.beta),
            is_softmax=self.is_softmax,
            by_length=by_length,
        )

    def _growing(self, interval: Interval, by_length: bool) -> float:
        log_time = log_growing_time(
            interval, self.beta, is_softmax=self.is_softmax, by_length=by_length
        )
        if not np.isfinite(log_time):
            raise Overflow(
                f"even the logarithm of the depth is beyond all numbers, of the order "
                f"of exp(beta) with beta = {self.beta}; lower beta."
            )
        return log_time

    def _interval(self, level: float) -> Interval:
        return interval_between(self.count, self.start, level)

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
            case PreNorm() | PeriNorm() | MixNorm():
                law = LongTimeLaw("power", 2.0)
            case PostNorm():
                law = LongTimeLaw("exponential", 2 * speed)
            case NGPT(alpha=alpha):
                law = LongTimeLaw("exponential", 2 * alpha)
            case SqrtScaling():
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
        array = _checked_depths(depths)
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

    def _reduced(self, dtype: jnp.dtype) -> Reduced:
        interval = self._interval(1.0)
        numbers = (self.count, self.beta, interval.gap, interval.room)
        arrays = (jnp.asarray(number, dtype) for number in numbers)
        return Reduced(*arrays, self.scheme, self.is_softmax, self.rests)


def checked_beta(beta: float) -> float:
    """Return the inverse temperature, or raise."""
    value = as_number("beta", beta)
    check(
        np.isfinite(value) and value >= 0,
        f"beta is {beta}; it must be finite and not negative.",
    )
    return value


def checked_kind(kind: str) -> str:
    """Return the kind of attention, or raise."""
    check_choice("kind", kind, KINDS)
    return kind


def checked_start(count: int, start: float) -> float:
    """Return the inner product at the start, the simplex exactly, or raise."""
    value = as_number("start", start)
    lowest = -1 / (count - 1)
    if abs(1 + (count - 1) * value) <= 4 * np.finfo(float).eps:
        return lowest
    check(
        lowest <= value <= 1,
        f"start is {start}; {count} unit vectors can have one inner product from "
        f"-1/(n-1) = {lowest:.6g} to 1.",
    )
    return value


def checked_level(level: float, start: float) -> float:
    """Return the level to reach, or raise."""
    value = as_number("level", level)
    check(value < 1, f"level is {level}; it must lie below 1.")
    check(start < value, f"level is {level}; it must lie above the start, {start}.")
    return value


def _checked_depths(depths: ArrayLike) -> Float[Array, " t"]:
    array = jnp.atleast_1d(as_float_array("depths", depths))
    check(array.ndim == 1, f"depths has shape {array.shape}; it must be a list.")
    check_finite("depths", array)
    if is_concrete(array):
        increases = bool((np.diff(array) > 0).all()) and bool(array[0] >= 0)
        check(increases, "depths must increase, from 0 or later.")
    return array
