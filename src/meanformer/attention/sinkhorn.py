"""Sinkhorn attention: the doubly stochastic one, entropic transport onto itself."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.attention.abstract import (
    AbstractAttention,
    parameter,
)
from meanformer.attention.softmax import View
from meanformer.errors import (
    InvalidInput,
    Unsupported,
    check,
    check_finite,
    check_shape,
)
from meanformer.measures import (
    AbstractContext,
    AbstractMeasure,
    TiltedCloud,
    TokenCloud,
)
from meanformer.measures.cloud import AbstractCloud, gaussian_log_factor
from meanformer.numerics.self_transport import SelfTransport
from meanformer.numerics.sinkhorn import EntropicPotentials, alternate, balance


class Sinkhorn(AbstractAttention):
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

    Args:
        query: as for every attention; likewise `key`, `value`, `beta` and the biases.
        half: use $e^{-\beta|Qx-Ky|^2/2}$ instead, so that $B = \beta K^\top Q$.
        kernel: the start, `"l2"` or `"dot"` for $e^{\beta\langle Qx,Ky\rangle}$, which
            has $B = \beta K^\top Q$.
        half_steps: stop after so many half-steps instead of at the limit, and
            differentiate through them.
        end_on: `"row"` (an average of the values) or `"column"`, for `half_steps`.
        tolerance: largest error of a column sum; by default near rounding.
        max_steps: most steps of the solver; `potentials(mu)` reports the error left.
        start: potential at the tokens to start from, a warm start.
    """

    half: bool = eqx.field(default=False, kw_only=True, static=True)
    kernel: str = eqx.field(default="l2", kw_only=True, static=True)
    half_steps: int | None = eqx.field(default=None, kw_only=True, static=True)
    end_on: str = eqx.field(default="row", kw_only=True, static=True)
    tolerance: float | None = eqx.field(default=None, kw_only=True, static=True)
    max_steps: int = eqx.field(default=200, kw_only=True, static=True)
    start: Float[Array, " _n"] | None = parameter("start", default=None, kw_only=True)

    def __check_init__(self):
        check(
            self.kernel in ("l2", "dot"),
            f'kernel is {self.kernel!r}; it must be "l2" or "dot".',
        )
        check(
            self.end_on in ("row", "column"),
            f'end_on is {self.end_on!r}; it must be "row" or "column".',
        )
        parity = 1 if self.end_on == "row" else 0
        check(
            self.half_steps is None or self.half_steps % 2 == parity,
            f"half_steps is {self.half_steps}; to end on a {self.end_on} step it must "
            f"be {'odd' if parity else 'even'}.",
        )
        check(
            self.half_steps is None or self.half_steps > 0,
            f"half_steps is {self.half_steps}; it must be positive.",
        )
        check(
            self.tolerance is None or self.tolerance > 0,
            f"tolerance is {self.tolerance}; it must be positive.",
        )
        check(
            self.max_steps > 0, f"max_steps is {self.max_steps}; it must be positive."
        )
        if self.start is not None:
            check_finite("start", self.start)
        check(
            self.end_on == "row" or self.half_steps is not None,
            'end_on="column" needs half_steps; at the limit rows and columns agree.',
        )

    @property
    def sharpness(self) -> Float[Array, ""]:
        r"""The factor of $\langle Qx, Ky\rangle$ in the score."""
        single = self.half or self.kernel == "dot"
        return self.temperature if single else 2 * self.temperature

    @property
    def form(self) -> Float[Array, "d d"]:
        r"""The matrix $B$ of the score $y^\top B x$."""
        return self.sharpness * self.score

    def attend(
        self, mu: AbstractContext, x: Float[Array, "m d"]
    ) -> Float[Array, "m e"]:
        """Return the mean value under the plan, conditioned on each query."""
        if self.end_on == "column" and isinstance(mu, TokenCloud):
            return self._ended_on_columns(mu, x)
        context, tilts, origin = self.view(mu, x)
        mean = context.tilted_mean(tilts)
        return self.values(None, mean if origin is None else mean + origin[None, :])

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
        origin, near = mu.centred()
        context = near.entropic_tilt(
            self.form, lambda cloud: self._potentials(cloud, origin, None).g
        )
        return View(context, self._slopes(x, origin), origin)

    def potentials(
        self, mu: TokenCloud, start: Float[Array, " n"] | None = None
    ) -> EntropicPotentials:
        """Return the potentials on a cloud, with the marginal error reached.

        Args:
            mu: the tokens.
            start: token potential to start from; that of the layer by default.
        """
        origin, near = mu.centred()
        found = self._potentials(near, origin, start)
        f_slope, g_slope = self.form.T @ origin, self.form @ origin
        half = origin @ g_slope / 2
        return dataclasses.replace(
            found,
            f=found.f - near.points @ f_slope - half,
            g=found.g - near.points @ g_slope - half,
            previous=found.previous - near.points @ g_slope - half,
        )

    def matrix(self, mu: AbstractCloud, x: Float[Array, "m d"]) -> Float[Array, "m n"]:
        """Return the plan's conditional weights of the tokens given each query."""
        if self.end_on == "column":
            raise InvalidInput('attention_matrix needs end_on="row".')
        return self.view(mu, x).shares()

    def _slopes(
        self, x: Float[Array, "m d"], origin: Float[Array, " d"] | None
    ) -> Float[Array, "m d"]:
        return (x if origin is None else x - origin[None, :]) @ self.form.T

    def _potentials(
        self,
        near: TokenCloud,
        origin: Float[Array, " d"],
        start: Float[Array, " n"] | None,
    ) -> EntropicPotentials:
        r"""Return the potentials for the score $(y-o)^\top B(x-o)$, cloud moved."""
        problem = SelfTransport(near.points, near.weights, self.form, near.sums)
        start = self.start if start is None else start
        if start is not None:
            check_shape("start", start, (near.count,))
            start = start + near.points @ (self.form @ origin)
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
        bias = (self.query if is_dot else self.query - self.key) @ origin
        if self.query_bias is not None:
            bias = bias + self.query_bias
        first = self.sharpness * near.points @ (self.key.T @ bias)
        if is_dot:
            return first
        precision = self.sharpness * self.key.T @ self.key
        return first + gaussian_log_factor(near.points, precision)

    def _ended_on_columns(
        self, mu: TokenCloud, x: Float[Array, "m d"]
    ) -> Float[Array, "m e"]:
        origin, near = mu.centred()
        potentials, tilts = (
            self._potentials(near, origin, None),
            self._slopes(x, origin),
        )
        log_mass, mean = TiltedCloud(near, potentials.g).tilted_mass_and_mean(tilts)
        before = TiltedCloud(near, potentials.previous).log_laplace(tilts)
        mass = jnp.exp(log_mass - before)
        return self.values(mass, mass[:, None] * (mean + origin[None, :]))
