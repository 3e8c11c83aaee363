"""Sinkhorn attention: the doubly stochastic one, entropic transport onto itself."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from meanformer.attention.abstract import GradientForm, checked_range, parameter
from meanformer.attention.constants import Constants, bias_norm, spectral_norm
from meanformer.attention.exponential import tokens_of
from meanformer.attention.softmax import AbstractTilting, View
from meanformer.errors import (
    PrecisionWarning,
    StoppedEarly,
    Unsupported,
    as_integer,
    as_number,
    check,
    check_choice,
    check_shape,
    is_concrete,
    warn,
)
from meanformer.measures import (
    AbstractContext,
    AbstractMeasure,
    Gaussian,
    TiltedCloud,
    TokenCloud,
)
from meanformer.measures.cloud import check_cloud, gaussian_log_factor
from meanformer.measures.gaussian import entropic_reward
from meanformer.measures.masked import NO_PLAN
from meanformer.numerics.arrays import cast, matmul, widened
from meanformer.numerics.sinkhorn.algorithm import (
    EntropicPotentials,
    alternate,
    balance,
    check_half_steps,
    default_tolerance,
    entropic_energy,
)
from meanformer.numerics.sinkhorn.contraction import half_steps_to_reach, round_ratio
from meanformer.numerics.sinkhorn.limit import LARGE_OSCILLATION
from meanformer.numerics.sinkhorn.self_transport import (
    SelfTransport,
    oscillation,
    oscillation_bound,
)


def _optional(convert: Callable, name: str):
    """Return a static module field that is converted unless it is left out."""
    return eqx.field(
        default=None,
        converter=lambda value: None if value is None else convert(name, value),
        kw_only=True,
        static=True,
    )


class Sinkhorn(AbstractTilting):
    r"""Attention whose matrix is normalised in rows and columns, the Sinkformer.

    $$\Gamma[\mu](x) = V \int y\, e^{y^\top B x + f(x) + g(y)}\,\mathrm{d}\mu(y),
      \qquad B = 2\beta K^\top Q,$$
    where the exponential is the density of the entropic transport plan of $\mu$ onto
    itself. It is softmax attention at $2\beta$ on the context reweighted by $e^{g}$.
    The mean obeys $\int\Gamma\,\mathrm{d}\mu = V\int y\,\mathrm{d}\mu$ for every
    $\mu$, and shifting all tokens by $c$ shifts the output by $Vc$.

    The start $e^{-\beta|Qx-Ky|^2}$ matters only for a fixed number of half-steps; one
    half-step is `L2`. On a cloud the limit is found to a tolerance on the column sums,
    by the averaged iteration where $B$ is symmetric and positive, otherwise by
    alternation and Newton's method, and differentiated implicitly. On a `Gaussian` it
    has a closed form.

    A limit that was not reached warns (`StoppedEarly`), and so does a score that
    oscillates by more than 200 (`PrecisionWarning`), where few digits may be left. Both
    warn outside of compiled code only: inside a flow or under `jit` nothing is said,
    and `potentials(mu)` tells the error left on any cloud of the way.

    Args:
        query: as for every attention; likewise `key`, `value`, `beta` and the biases.
        half: use $e^{-\beta|Qx-Ky|^2/2}$ instead, so that $B = \beta K^\top Q$.
        kernel: the start, `"l2"` or `"dot"` for $e^{\beta\langle Qx,Ky\rangle}$, which
            has $B = \beta K^\top Q$.
        half_steps: stop after so many half-steps instead of at the limit, and
            differentiate through them.
        end_on: `"row"` (an average of the values) or `"column"`, for `half_steps`.
        tolerance: largest error of a column sum; by default 1e-10 in double, 5e-6 in
            single precision, which rounding allows for all but very large scores.
        max_steps: most steps of the solver; `potentials(mu)` reports the error left.
            With 0 the start is taken for the limit, see `settled`.
        start: potential at the tokens to start from, a warm start.
    """

    refuses_masks: ClassVar[str | None] = NO_PLAN
    grows_linearly: ClassVar[bool] = True
    energy_sees_mean: ClassVar[bool] = True

    half: bool = eqx.field(default=False, kw_only=True, static=True)
    kernel: str = eqx.field(default="l2", kw_only=True, static=True)
    half_steps: int | None = _optional(partial(as_integer, least=1), "half_steps")
    end_on: str = eqx.field(default="row", kw_only=True, static=True)
    tolerance: float | None = _optional(as_number, "tolerance")
    max_steps: int = eqx.field(
        default=200,
        converter=lambda value: as_integer("max_steps", value, least=0),
        kw_only=True,
        static=True,
    )
    start: Float[Array, " _n"] | None = parameter("start", default=None, kw_only=True)

    def __check_init__(self):
        check_choice("kernel", self.kernel, ("l2", "dot"))
        check_half_steps(self.half_steps, self.end_on)
        check(
            self.tolerance is None or self.tolerance > 0,
            f"tolerance is {self.tolerance}; it must be positive.",
        )
        check(
            self.max_steps > 0 or self.start is not None,
            "max_steps is 0; it must be 1 or more, unless start is the limit.",
        )
        check(
            self.end_on == "row" or self.half_steps is not None,
            'end_on="column" needs half_steps; at the limit rows and columns agree.',
        )

    @property
    def unusual_option(self) -> str | None:
        """A number of half-steps."""
        if self.half_steps is None:
            return None
        return "half_steps is set, which is short of the limit"

    def gradient_form(self) -> GradientForm | str:
        r"""Return $B$; the limit does not see a bias of the queries."""
        if self.half_steps is not None:
            return "half_steps is set, and only the limit is a gradient"
        return GradientForm(self.form, "B", share=0.5, sees_query_bias=False)

    def why_global(self, tolerance: float) -> str:
        """Return the bound of the covariance."""
        return "Sinkhorn: the covariance grows at most like exp(2 |V| t)"

    def ball_constants(self, radius: Float[Array, ""], order: float) -> Constants:
        """Return what rows that sum to one give; none is known in the measure."""
        if self.end_on == "column":
            raise Unsupported(
                'no a priori bound is known for Sinkhorn with end_on="column".'
            )
        value = spectral_norm(self.value)
        speed = value * radius + bias_norm(self.value_bias)
        in_query = value * spectral_norm(self.form) * radius**2
        return Constants(speed, in_query, lower=None if self.half_steps else value)

    def energy(self, mu: AbstractMeasure) -> Float[Array, ""]:
        """Return the reward of the entropic transport onto itself."""
        check(self.half_steps is None, "the energy of Sinkhorn needs half_steps=None.")
        cloud = tokens_of(mu)
        return entropic_energy(cloud.weights, self.potentials(cloud))

    def gaussian_energy(self, mu: Gaussian) -> Float[Array, ""]:
        """Return the same at a Gaussian, in closed form."""
        return entropic_reward(mu, self.form)

    @property
    def sharpness(self) -> Float[Array, ""]:
        r"""The factor of $\langle Qx, Ky\rangle$ in the score."""
        single = self.half or self.kernel == "dot"
        return self.temperature if single else 2 * self.temperature

    @property
    def form(self) -> Float[Array, "d d"]:
        r"""The matrix $B$ of the score $y^\top B x$."""
        return self.sharpness * self.score

    def view(self, mu: AbstractContext, x: Float[Array, "m d"]) -> View:
        r"""Return the context times $e^{g}$, and $Bx$."""
        is_measure = isinstance(mu, AbstractMeasure)
        if (
            self.half_steps is not None
            and is_measure
            and not isinstance(mu, TokenCloud)
        ):
            raise Unsupported(
                f"half_steps is {self.half_steps}; on {type(mu).__name__} only the "
                "limit has a closed form: leave half_steps out, or use quadrature."
            )
        origin, near = self._centred(mu)
        slopes = self._slopes(x, origin)
        if self.end_on == "column" and isinstance(near, TokenCloud):
            found = self._potentials(near, origin, None)
            previous = TiltedCloud(near, found.previous)
            return View(TiltedCloud(near, found.g), slopes, origin, previous)
        context = near.entropic_tilt(
            self.form, lambda cloud: self._settled(cloud, origin).g
        )
        return View(context, slopes, origin)

    def potentials(
        self, mu: TokenCloud, start: Float[Array, " n"] | None = None
    ) -> EntropicPotentials:
        """Return the potentials on a cloud, with the marginal error reached.

        Args:
            mu: the tokens.
            start: token potential to start from; that of the layer by default.
        """
        check_cloud("mu", mu)
        wide, cloud, start = widened((self, mu, start))
        origin, near = wide._centred(cloud)
        found = wide._potentials(near, origin, start)
        from_queries, from_tokens = (
            matmul(near.points, matmul(form, origin))
            for form in (wide.form.T, wide.form)
        )
        half = matmul(origin, matmul(wide.form, origin)) / 2
        found = dataclasses.replace(
            found,
            f=found.f - from_queries - half,
            g=found.g - from_tokens - half,
            previous=found.previous - from_tokens - half,
        )
        return cast(found, mu.points.dtype)

    def settled(self, mu: TokenCloud) -> "Sinkhorn":
        """Return the attention that has its limit on a cloud, and solves for no other.

        Its values and first derivatives at that cloud are those of the attention; what
        differentiates compiles faster without the solver.
        """
        if self.half_steps is not None:
            return self
        start = self.potentials(mu).g
        return dataclasses.replace(self, start=start, max_steps=0)

    def oscillation(self, mu: TokenCloud) -> Float[Array, ""]:
        r"""Return $\eta$, the largest oscillation of the score over a cloud.

        $$\eta = \max_{x, x', y, y'} (y - y')^\top B (x - x'),$$
        over tokens that are present. Cost: $O(n^3)$ time, $O(nd)$ memory.
        """
        check_cloud("mu", mu)
        wide, cloud = widened((self, mu))
        return oscillation(wide._problem(wide._centred(cloud)[1])).astype(
            mu.points.dtype
        )

    def contraction_ratio(self, mu: TokenCloud) -> Float[Array, ""]:
        r"""Return $\tanh(\eta/4)$, by which each half-step contracts at least.

        It is Birkhoff's ratio for Hilbert's distance, the oscillation of the error of a
        potential: guaranteed from any start, where `round_ratio` is what two half-steps
        come to close to the limit.
        """
        return jnp.tanh(self.oscillation(mu) / 4)

    def round_ratio(self, mu: TokenCloud) -> Float[Array, ""]:
        r"""Return $\rho$, by which a round of alternation shrinks the error in the end.

        It is what one would observe in a row step and a column step close to the limit,
        whichever way the limit was found: close to one, alternation alone stalls.
        """
        check_cloud("mu", mu)
        wide, cloud = widened((self, mu))
        origin, near = wide._centred(cloud)
        found = balance(wide._problem(near), max_steps=self.max_steps)
        return round_ratio(wide._problem(near), found).astype(mu.points.dtype)

    def predicted_half_steps(
        self, mu: TokenCloud, error: float = 1e-10
    ) -> Float[Array, ""]:
        r"""Return how many half-steps of alternation a marginal error takes, about.

        $2\log(1/e)/\log(1/\rho)$ with the ratio $\rho$ of a round.

        Args:
            mu: the tokens.
            error: the error $e$, between 0 and 1.
        """
        error = as_number("error", error, "between 0 and 1", above=0, below=1)
        return half_steps_to_reach(self.round_ratio(mu), error)

    def _centred(
        self, mu: AbstractContext
    ) -> tuple[Float[Array, " d"] | None, AbstractContext]:
        """Return an origin amid the context, and the context as seen from there."""
        if self.half_steps is not None or not isinstance(mu, TokenCloud):
            return mu.centred()
        origin, near = mu.centred()
        # From the mean, the way to the limit does not know where the cloud lies.
        way = lax.stop_gradient(near.mean())
        return origin + way, near.moved(near.points - way[None, :])

    def _slopes(
        self, x: Float[Array, "m d"], origin: Float[Array, " d"] | None
    ) -> Float[Array, "m d"]:
        moved = x if origin is None else x - origin[None, :]
        return checked_range(self, matmul(moved, self.form.T))

    def _settled(
        self, near: TokenCloud, origin: Float[Array, " d"]
    ) -> EntropicPotentials:
        """Return the potentials, with a warning if they are known to be poor."""
        found = self._potentials(near, origin, None)
        if self.half_steps is not None or not is_concrete(found.converged):
            return found
        error = float(found.marginal_error)
        if not bool(found.converged):
            tolerance = self.tolerance or default_tolerance(near.points.dtype)
            warn(
                f"Sinkhorn attention has not converged: after {int(found.iterations)} "
                f"steps a column sum is off by {error:.2g}, with tolerance "
                f"{tolerance:.2g} and max_steps {self.max_steps}; lower "
                "beta, raise max_steps or tolerance, or use 64-bit numbers.",
                StoppedEarly,
            )
            return found
        eta = oscillation_bound(lax.stop_gradient(self._problem(near)))
        if is_concrete(eta) and float(eta) > LARGE_OSCILLATION:
            warn(
                "the score of Sinkhorn attention oscillates by up to "
                f"{float(eta):.3g}, more than {LARGE_OSCILLATION:.0f}: digits are "
                f"lost, and the largest error of a column sum is {error:.2g}; lower "
                "beta or use 64-bit numbers.",
                PrecisionWarning,
            )
        return found

    def _problem(self, near: TokenCloud) -> SelfTransport:
        return SelfTransport(near.points, near.weights, self.form, near.sums)

    def _potentials(
        self,
        near: TokenCloud,
        origin: Float[Array, " d"],
        start: Float[Array, " n"] | None,
    ) -> EntropicPotentials:
        r"""Return the potentials for the score $(y-o)^\top B(x-o)$, cloud moved."""
        problem = self._problem(near)
        start = self.start if start is None else start
        if start is not None:
            check_shape("start", start, (near.count,))
            start = start + matmul(near.points, matmul(self.form, origin))
        if self.half_steps is None:
            return balance(
                problem, start=start, tolerance=self.tolerance, max_steps=self.max_steps
            )
        first = self._first_potential(near, origin) if start is None else start
        return alternate(problem, first, half_steps=self.half_steps, end_on=self.end_on)

    def _first_potential(
        self, near: TokenCloud, origin: Float[Array, " d"]
    ) -> Float[Array, " n"]:
        # A bias of the queries, like the way from the origin, adds a function of the
        # token to the score: the limit absorbs it, the first potential carries it.
        is_dot = self.kernel == "dot"
        bias = matmul(self.query if is_dot else self.query - self.key, origin)
        if self.query_bias is not None:
            bias = bias + self.query_bias
        first = matmul(self.sharpness * near.points, matmul(self.key.T, bias))
        if is_dot:
            return first
        precision = matmul(self.sharpness * self.key.T, self.key)
        return first + gaussian_log_factor(near.points, precision)
