"""Attention without a row normalisation: linear, unnormalised, sigmoid; and hardmax."""

import math
from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention.abstract import (
    AbstractAttention,
    GradientForm,
    check_function,
    number,
    parameter,
)
from meanformer.attention.constants import (
    Constants,
    bias_norm,
    of_kernel,
    spectral_norm,
)
from meanformer.attention.exponential import (
    AbstractExponential,
    check_no_bias,
    interaction,
    linear_energy,
    tokens_of,
)
from meanformer.attention.softmax import view_of
from meanformer.errors import Overflow, Unsupported, check, is_concrete
from meanformer.measures import AbstractContext, AbstractMeasure
from meanformer.measures.abstract import FeatureMap
from meanformer.measures.cloud import AbstractCloud
from meanformer.numerics.arrays import matmul
from meanformer.numerics.pair_sums.dense import hardmax_shares
from meanformer.numerics.pair_sums.kernel import identity


class Linear(AbstractAttention):
    r"""Linear attention: the score itself is the weight.

    $$\Gamma[\mu](x) = \beta \int \langle \varphi(Qx), \varphi(Ky)\rangle\,Vy\,
      \mathrm{d}\mu(y),$$
    with $\varphi$ the identity by default; then it is $\beta V M_2 A x$ and sees only
    the second moment $M_2$ of the context. Not bounded by the context's radius: flows
    can blow up in finite depth. Cost on a cloud: $O((m+n)kd)$, no pair is formed.

    Args:
        query: as for every attention; likewise `key`, `value`, `beta` and the biases.
        feature_map: $\varphi$, applied to each row of $Qx + b_Q$ and $Ky$.
        normalized: divide by the total weight, which may vanish: then it raises, and
            under `jit` the query gets a mean of zero.
        tolerance: smallest total weight accepted when normalising.
    """

    obeys_riccati: ClassVar[bool] = True
    sees_second_moment: ClassVar[bool] = True

    feature_map: FeatureMap | None = eqx.field(default=None, kw_only=True, static=True)
    normalized: bool = eqx.field(default=False, kw_only=True, static=True)
    tolerance: float = number("tolerance", default=1e-12, kw_only=True)

    def __check_init__(self):
        if self.feature_map is not None:
            check_function("feature_map", self.feature_map)

    @property
    def unusual_option(self) -> str | None:
        """Features, or a normalisation."""
        if self.feature_map is None and not self.normalized:
            return None
        return "the layer has a feature map or is normalised"

    def gradient_form(self) -> GradientForm | str:
        r"""Return $A^\top$, which may be antisymmetric."""
        return self.unusual_option or GradientForm(self.score.T, "A^T", may_be_odd=True)

    def energy(self, mu: AbstractMeasure) -> Float[Array, ""]:
        r"""Return $\frac{\beta}{4}\iint (y^\top A x)^2$, from the second moment."""
        check(
            self.unusual_option is None,
            "the energy of Linear needs no feature_map and normalized=False.",
        )
        check_no_bias(self)
        return linear_energy(self, mu)

    def ball_constants(self, radius: Float[Array, ""], order: float) -> Constants:
        """Return the constants of a kernel that is the score."""
        if self.unusual_option is not None:
            raise Unsupported(
                "no a priori bound is known for Linear with a feature map or "
                "normalised."
            )
        return of_kernel(self, radius, lambda score: (score, 1.0))

    def attend(
        self, mu: AbstractContext, x: Float[Array, "m d"]
    ) -> Float[Array, "m e"]:
        """Return the linearly weighted values as seen from each query."""
        mass, moment = mu.linear_mean(self._slopes(x), self._token_features)
        if self.normalized:
            mass, moment = None, self._divided(moment, mass, mu)
        return self.values(mass, moment)

    def matrix(self, mu: AbstractCloud, x: Float[Array, "m d"]) -> Float[Array, "m n"]:
        """Return weight times score for each pair, normalised if asked for."""
        features = self._token_features or identity
        shares = mu.kernel_shares(self._slopes(x), identity, features(mu.points))
        if self.normalized:
            return self._divided(shares, shares.sum(1), mu)
        return shares

    def _slopes(self, x: Float[Array, "m d"]) -> Float[Array, "m k"]:
        if self.feature_map is None:
            return self.tilts(x)
        return self.temperature * self.feature_map(self.queries(x))

    @property
    def _token_features(self) -> FeatureMap | None:
        feature_map = self.feature_map
        if feature_map is None:
            return None
        return lambda points: feature_map(matmul(points, self.key.T))

    def _divided(
        self, sums: Float[Array, "m c"], mass: Float[Array, " m"], mu: AbstractContext
    ) -> Float[Array, "m c"]:
        """Divide by the mass; zero for a query that sees nothing."""
        mass = jnp.where(mu.seen_by(len(mass)), mass, 1)
        if is_concrete(mass):
            row = int(np.abs(mass).argmin())
            check(
                abs(float(mass[row])) >= self.tolerance,
                f"the total weight seen by query {row} is {float(mass[row])}; "
                f"normalising needs at least {self.tolerance} in absolute value; use a "
                "positive feature_map.",
            )
        is_enough = jnp.abs(mass) >= self.tolerance
        safe_mass = jnp.where(is_enough, mass, 1)
        return jnp.where(is_enough[:, None], sums / safe_mass[:, None], 0)


class Unnormalised(AbstractExponential):
    r"""Softmax attention without its denominator.

    $$\Gamma[\mu](x) = \int e^{\beta\langle Qx,Ky\rangle - s}\,Vy\,\mathrm{d}\mu(y)
      = e^{\Lambda_\mu(u) - s}\,V\nabla\Lambda_\mu(u), \quad u = \beta A x.$$

    For $A$ symmetric and $V = \beta A$ its flow is the Wasserstein gradient ascent of
    $\tfrac12\iint e^{\beta y^\top A x - s}$. Values too large for the floating-point
    type raise `Overflow` with the row; under `jit` they saturate, and a flow stops with
    the status of a suspected blow-up.

    A shift $s$ takes the factor $e^s$ out of the velocity, so that a flow runs on the
    clock $e^{s}t$: with `shift=beta` on the unit sphere, where scores are at most
    $\beta$, nothing overflows at any $\beta$, and a depth of 1 stands for
    $e^{-\beta}$ of the unshifted flow.

    Args:
        query: as for every attention; likewise `key`, `value`, `beta` and the biases.
        shift: the number $s$ taken off every score; none by default, that is zero.
    """

    bends_gaussians: ClassVar[str | None] = (
        "the velocity grows like x exp(c x^2), so that mass is lost at infinity at once"
    )

    # Without a value, not zero: runs from before there was a choice keep their names.
    shift: Float[Array, ""] | None = parameter(
        "shift", is_scalar=True, default=None, kw_only=True
    )

    @property
    def score_shift(self) -> Float[Array, ""] | None:
        """The number taken off every score; `None` for zero."""
        return self.shift

    def ball_constants(self, radius: Float[Array, ""], order: float) -> Constants:
        """Return the constants of an exponential kernel."""

        def largest(score):
            kernel = jnp.exp(self.shifted(score))
            return kernel, kernel

        return of_kernel(self, radius, largest)

    def attend(
        self, mu: AbstractContext, x: Float[Array, "m d"]
    ) -> Float[Array, "m e"]:
        """Return the exponentially weighted values as seen from each query."""
        queries = self.temperature * self.queries(x)
        log_mass, mean = view_of(self, mu, queries, None).log_mass_and_mean()
        mass = _bounded_exp(self.shifted(log_mass))
        return self.values(mass, mass[:, None] * mean)

    def matrix(self, mu: AbstractCloud, x: Float[Array, "m d"]) -> Float[Array, "m n"]:
        """Return weight times exponential of the score for each pair."""
        tilts = self.tilts(x)
        mass = _bounded_exp(self.shifted(mu.log_laplace(tilts)))
        return mass[:, None] * mu.tilted_shares(tilts)


class Shifted(eqx.Module):
    """A function of the score plus a bias; all biases are one compiled function."""

    function: Callable[[Array], Array] = eqx.field(static=True)
    bias: Float[Array, ""]

    def __call__(self, score: Array) -> Array:
        """Return the function of the shifted score."""
        return self.function(score + self.bias.astype(score.dtype))


class Sigmoid(AbstractAttention):
    r"""Sigmoid attention: every token is weighted on its own.

    $$\Gamma[\mu](x) = \int \sigma(\beta\langle Qx,Ky\rangle + b)\,Vy\,
      \mathrm{d}\mu(y), \qquad \sigma(z) = 1/(1+e^{-z}).$$

    Args:
        query: as for every attention; likewise `key`, `value`, `beta` and the biases.
        bias: the scalar $b$; use 0 because the masses $1/n$ are inside $\mu$ (the
            common $-\log n$ belongs to plain sums over tokens).
    """

    bends_gaussians: ClassVar[str | None] = (
        "its velocity stays bounded far out, which that of an affine map does not"
    )

    bias: Float[Array, ""] = parameter(
        "bias", is_scalar=True, default=0.0, kw_only=True
    )

    def gradient_form(self) -> GradientForm | str:
        r"""Return the score, whose multiples $V = cA$ make a gradient flow."""
        if is_concrete(self.beta) and float(self.beta) == 0:
            return "beta is 0, where the energy is not defined"
        return GradientForm(self.score, "A")

    def energy(self, mu: AbstractMeasure) -> Float[Array, ""]:
        r"""Return $\frac{1}{2\beta}\iint \log(1 + e^{\beta y^\top A x + b})$."""
        cloud, profile = tokens_of(mu), Shifted(jax.nn.softplus, self.bias)
        return interaction(
            self, cloud, cloud.kernel_mean(self.tilts(cloud.points), profile)[0]
        )

    def ball_constants(self, radius: Float[Array, ""], order: float) -> Constants:
        """Return the constants of a kernel between 0 and 1."""
        return of_kernel(self, radius, lambda score: (1.0, 0.25))

    def attend(
        self, mu: AbstractContext, x: Float[Array, "m d"]
    ) -> Float[Array, "m e"]:
        """Return the values gated by the sigmoid of each score."""
        return self.values(
            *mu.kernel_mean(self.tilts(x), Shifted(jax.nn.sigmoid, self.bias))
        )

    def matrix(self, mu: AbstractCloud, x: Float[Array, "m d"]) -> Float[Array, "m n"]:
        """Return weight times sigmoid of the score for each pair."""
        profile = Shifted(jax.nn.sigmoid, self.bias)
        return mu.kernel_shares(self.tilts(x), profile)


class Hardmax(AbstractAttention):
    r"""The limit of softmax at infinite $\beta$: only the largest score counts.

    Tokens that tie (within `tolerance`) are averaged with their weights. The map is
    discontinuous in the query; derivatives hold the chosen tokens fixed.

    Args:
        query: as for every attention; likewise `key`, `value`, `beta` and the biases.
        tolerance: largest difference of scores that still counts as a tie.
    """

    bends_gaussians: ClassVar[str | None] = "no point of its support scores highest"
    is_normalised: ClassVar[bool] = True
    is_continuous: ClassVar[bool] = False
    tends_to_hardmax: ClassVar[bool] = True

    tolerance: float = number("tolerance", least=0, default=0.0, kw_only=True)

    def ball_constants(self, radius: Float[Array, ""], order: float) -> Constants:
        """Return the speed alone: it is not continuous."""
        return Constants(
            spectral_norm(self.value) * radius + bias_norm(self.value_bias)
        )

    def attend(
        self, mu: AbstractContext, x: Float[Array, "m d"]
    ) -> Float[Array, "m e"]:
        """Return the value of the tokens with the largest score."""
        return self.values(None, mu.maximal_mean(self.tilts(x), self.tolerance))

    def matrix(self, mu: AbstractCloud, x: Float[Array, "m d"]) -> Float[Array, "m n"]:
        """Return the share of each token among those with the largest score."""
        pairs = mu.kernel_pairs(self.tilts(x), mu.points)
        return hardmax_shares(pairs, self.tolerance)


def _bounded_exp(log_mass: Float[Array, " m"]) -> Float[Array, " m"]:
    # Nine tenths of the range leave room for the product with the mean.
    ceiling = 0.9 * math.log(float(jnp.finfo(log_mass.dtype).max))
    if is_concrete(log_mass) and float(np.max(log_mass)) > ceiling:
        row = int(np.argmax(log_mass))
        raise Overflow(
            f"unnormalised attention overflows {log_mass.dtype} at query {row}: its "
            f"log-mass is {float(log_mass[row]):.6g}; lower beta, use Softmax, or take "
            "a factor out of time with shift (on the unit sphere shift=beta)."
        )
    return jnp.exp(jnp.minimum(log_mass, ceiling))
