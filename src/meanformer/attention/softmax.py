"""Row-normalised attention: softmax and L2, tilted means of the context."""

import abc
import math
from dataclasses import replace
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention.abstract import AbstractAttention, GradientForm, checked_range
from meanformer.attention.constants import (
    Constants,
    bias_norm,
    of_shares,
    spectral_norm,
)
from meanformer.attention.exponential import AbstractExponential, linear_energy
from meanformer.errors import InvalidInput, Unsupported, check_choice, is_concrete
from meanformer.measures import AbstractContext, Gaussian
from meanformer.measures.cloud import AbstractCloud
from meanformer.numerics.arrays import matmul
from meanformer.numerics.multiples import multiple_of
from meanformer.numerics.softmax import log_excess
from meanformer.typing import MassAndMean


class View(NamedTuple):
    r"""What the queries see, measured from an origin (`None`: that of the space).

    The tilts may be given as $K^\top q$ for queries $q$ and a key $K$ with few rows.
    """

    context: AbstractContext
    tilts: Float[Array, "m k"]
    origin: Float[Array, " d"] | None
    divisor: AbstractContext | None = None
    key: Float[Array, "k d"] | None = None

    def mass_and_moment(self) -> tuple[Float[Array, " m"] | None, Float[Array, "m d"]]:
        """Return the mass seen by each query (`None`: one) and the first moment.

        The mass is relative to that of the divisor, by default the context itself.
        """
        log_mass, mean = self.log_mass_and_mean()
        if self.origin is not None:
            mean = mean + self.origin[None, :]
        mass = self._relative(log_mass)
        return mass, mean if mass is None else mass[:, None] * mean

    def log_mass_and_mean(self) -> MassAndMean:
        """Return the log-mass seen by each query, and the mean from the origin."""
        return self._seen(self.context)

    def shares(self) -> Float[Array, "m n"]:
        """Return the weight of each token as seen from each query."""
        if not isinstance(self.context, AbstractCloud):
            raise Unsupported("an attention matrix needs a context made of tokens.")
        tilts = self.tilts if self.key is None else matmul(self.tilts, self.key)
        shares = self.context.tilted_shares(tilts)
        mass = self._relative(self.log_mass_and_mean()[0])
        return shares if mass is None else mass[:, None] * shares

    def _seen(self, context: AbstractContext) -> MassAndMean:
        if self.key is None:
            return context.tilted_mass_and_mean(self.tilts)
        return context.tilted_through(self.tilts, self.key)

    def _relative(self, log_mass: Float[Array, " m"]) -> Float[Array, " m"] | None:
        if self.divisor is None:
            return None
        return jnp.exp(log_mass - self._seen(self.divisor)[0])


def view_of(
    gamma: AbstractAttention,
    context: AbstractContext,
    queries: Float[Array, "m k"],
    origin: Float[Array, " d"] | None,
) -> View:
    """Return what queries see; a key with few rows is kept, for it makes cheap sums."""
    if len(gamma.key) < gamma.input_dimension:
        return View(context, checked_range(gamma, queries), origin, key=gamma.key)
    return View(context, gamma.tilts_of(queries), origin)


class AbstractTilting(AbstractAttention):
    r"""An attention that averages the values over a tilt of the context.

    $$\Gamma[\mu](x) = V\,\nabla\Lambda_{\nu}(u(x)) + b_V,$$
    where $\nu$ is the context, perhaps reweighted, and $u(x)$ the gradient of the score
    in the token (`view`).
    """

    @abc.abstractmethod
    def view(self, mu: AbstractContext, x: Float[Array, "m d"]) -> View:
        """Return the context as the queries see it, and their tilts."""

    def attend(
        self, mu: AbstractContext, x: Float[Array, "m d"]
    ) -> Float[Array, "m e"]:
        """Return the averaged values as seen from each query."""
        return self.values(*self.view(mu, x).mass_and_moment())

    def matrix(self, mu: AbstractCloud, x: Float[Array, "m d"]) -> Float[Array, "m n"]:
        """Return the weights of the tokens as seen from each query."""
        return self.view(mu, x).shares()


class Softmax(AbstractTilting, AbstractExponential):
    r"""Softmax attention, the usual one.

    $$\Gamma[\mu](x) = V \int y\, p_x(\mathrm{d}y), \qquad
      p_x(\mathrm{d}y) \propto e^{\beta\langle Qx, Ky\rangle}\mu(\mathrm{d}y).$$

    In terms of the log-Laplace transform of the context it is
    $V\nabla\Lambda_\mu(\beta A x)$, $A = K^\top Q$. Its derivative in the query is
    $\beta V \mathrm{Cov}_{p_x} A$. Cost on a cloud: $O(mnd)$ time.
    """

    is_normalised: ClassVar[bool] = True
    obeys_riccati: ClassVar[bool] = True
    tends_to_hardmax: ClassVar[bool] = True
    has_known_limits: ClassVar[bool] = True

    @property
    def score_shift(self) -> None:
        """None: shares do not see it."""
        return

    def gaussian_form(self, tolerance: float) -> GradientForm:
        r"""Return $A^\top$, as for linear attention, which moves them likewise."""
        return GradientForm(self.score.T, "A^T", may_be_odd=True)

    def gaussian_energy(self, mu: Gaussian) -> Float[Array, ""]:
        """Return the energy of linear attention, at a mean of zero."""
        return linear_energy(self, mu)

    def ball_constants(self, radius: Float[Array, ""], order: float) -> Constants:
        """Return the constants of an average, and the published ones."""
        beta, value = jnp.abs(self.temperature), spectral_norm(self.value)
        twist = beta * spectral_norm(self.score)
        slope = twist * radius + beta * bias_norm(self.query_bias, self.key)
        known = of_shares(self, value, radius, slope, twist, 2 * slope * radius)
        if self.query_bias is not None:
            return known
        strength = twist * radius**2

        def published(count: Array) -> Array:
            return value * jnp.sqrt(3 * (strength**2 * (4 * count + 1) + count))

        loose = value * (1 + 3 * strength) * jnp.exp(2 * strength)
        return replace(known, by_count_published=published, mean_field_published=loose)

    def view(self, mu: AbstractContext, x: Float[Array, "m d"]) -> View:
        r"""Return the context itself, and $\beta K^\top(Qx+b_Q)$."""
        return view_of(self, mu, self.temperature * self.queries(x), None)


class L2(AbstractTilting):
    r"""Attention by distance instead of inner product.

    $$p_x(\mathrm{d}y) \propto e^{-\beta|Qx - Ky|^2}\mu(\mathrm{d}y).$$

    It is softmax attention at $2\beta$ on the context reweighted by
    $e^{-\beta|Ky|^2}$, equal to softmax where all $|Ky|$ agree. With $Q = K = V = I$,
    $\Gamma - x$ is the Gaussian mean shift.

    Args:
        query: as for every attention; likewise `key`, `value`, `beta` and the biases.
        half: use $e^{-\beta|Qx-Ky|^2/2}$ instead, as some papers do.
        value_map: `"kim"` multiplies the mean by $A/\sqrt{k}$ before $V$, the layer of
            Kim, Papamakarios and Mnih [KPM21], which needs $Q = K$.
    """

    is_normalised: ClassVar[bool] = True

    half: bool = eqx.field(default=False, kw_only=True, static=True)
    value_map: str | None = eqx.field(default=None, kw_only=True, static=True)

    def __check_init__(self):
        if self.value_map is not None:
            check_choice("value_map", self.value_map, ("kim",), " or None")
        if self.value_map == "kim" and not _agree(self.query, self.key):
            raise InvalidInput('value_map="kim" needs query equal to key; they differ.')

    @property
    def unusual_option(self) -> str | None:
        """A map of the values."""
        return None if self.value_map is None else "value_map is set"

    def gaussian_form(self, tolerance: float) -> GradientForm | str:
        r"""Return $K^\top K$, if $Q$ is a multiple of $K$."""
        key, query = (np.asarray(x, np.float64) for x in (self.key, self.query))
        if multiple_of(key, query, tolerance) is None:
            return "Q is not a multiple of K"
        return GradientForm(matmul(self.key.T, self.key), "K^T K")

    def gaussian_energy(self, mu: Gaussian) -> Float[Array, ""]:
        r"""Return the energy of distances, for $Q$ a multiple of $K$."""
        key, query = (np.asarray(x, np.float64) for x in (self.key, self.query))
        ratio = multiple_of(key, query, 1e-6)
        assert ratio is not None  # that it is one was checked before
        values = jnp.linalg.svd(matmul(self.key, mu.root()), compute_uv=False) ** 2
        # x - log(1 + x), over the sharpness.
        reach = jnp.sum(log_excess(self.sharpness * values))
        resting = self.sharpness == 0
        reach = jnp.where(resting, 0, reach / jnp.where(resting, 1, self.sharpness))
        return ratio * reach / 2

    def why_global(self, tolerance: float) -> str | None:
        """Return the condition on the matrices under which it is at most linear."""
        key, query = (np.asarray(x, np.float64) for x in (self.key, self.query))
        if float(self.beta) < 0:
            return None
        if np.linalg.matrix_rank(key) == key.shape[1]:
            return "L2: K has full column rank"
        if multiple_of(key, query, tolerance) is not None:
            return "L2: Q is a multiple of K"
        return None

    @property
    def mean_value(self) -> Float[Array, "e d"]:
        r"""The matrix $V$, or $V(A/\sqrt{k})$."""
        if self.value_map is None:
            return self.value
        return matmul(self.value, self.score) / math.sqrt(len(self.key))

    @property
    def sharpness(self) -> Float[Array, ""]:
        r"""Twice the factor of $|Qx-Ky|^2$: $2\beta$, or $\beta$ with `half`."""
        return self.temperature if self.half else 2 * self.temperature

    def ball_constants(self, radius: Float[Array, ""], order: float) -> Constants:
        """Return the constants of an average."""
        value, key = self.mean_value, spectral_norm(self.key)
        sharpness = jnp.abs(self.sharpness)
        reach = (spectral_norm(self.query) + key) * radius + bias_norm(self.query_bias)
        slope, twist = sharpness * key * reach, sharpness * spectral_norm(self.score)
        swing = sharpness * reach**2 / 2
        return of_shares(self, spectral_norm(value), radius, slope, twist, swing)

    def view(self, mu: AbstractContext, x: Float[Array, "m d"]) -> View:
        r"""Return the context times $e^{-\beta|Ky|^2}$, and $2\beta K^\top(Qx+b_Q)$."""
        origin, near = mu.centred()
        precision = matmul(self.sharpness * self.key.T, self.key)
        is_positive = not self.allow_negative_beta
        tilted = near.quadratic_tilt(precision, is_positive=is_positive)[1]
        queries = self.queries(x) if origin is None else self._queries_from(x, origin)
        return view_of(self, tilted, self.sharpness * queries, origin)

    def _queries_from(
        self, x: Float[Array, "m d"], origin: Float[Array, " d"]
    ) -> Float[Array, "m k"]:
        r"""Return $Qx + b_Q - Ko$, by whichever way cancels less.

        Close to the origin it is a small $Q(x - o)$, and $(Q - K)o$ vanishes for
        $Q = K$; but a large $Q$ must not meet the origin at all.
        """
        apart, difference = x - origin[None, :], self.query - self.key
        sizes = (
            matmul(jnp.abs(apart), jnp.abs(self.query).T)
            + matmul(jnp.abs(difference), jnp.abs(origin))[None, :],
            matmul(jnp.abs(x), jnp.abs(self.query).T)
            + matmul(jnp.abs(self.key), jnp.abs(origin))[None, :],
        )
        ways = (
            self.queries(apart) + matmul(difference, origin)[None, :],
            self.queries(x) - matmul(self.key, origin)[None, :],
        )
        return jnp.where(sizes[0] < sizes[1], *ways)


def _agree(first: Array, second: Array) -> bool:
    known = is_concrete(first) and is_concrete(second)
    return not known or np.array_equal(first, second)
