"""Attention with exponential kernels, and energies that are integrals over pairs."""

import abc

import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.attention.abstract import (
    AbstractAttention,
    AbstractInContextMap,
    GradientForm,
)
from meanformer.errors import Overflow, Unsupported, check, is_concrete
from meanformer.measures import AbstractMeasure, FourierDensity, TokenCloud, quadrature
from meanformer.numerics.multiples import multiple_of_identity


class AbstractExponential(AbstractAttention):
    r"""An attention whose kernel is the exponential of the score.

    A query pays the tokens $e^{\beta\langle Qx + b_Q, Ky\rangle - s}$, or the shares
    that these are of their total. What is known of exponential kernels (energies, slow
    phases, growth of modes on the sphere) is asked of maps of this kind.
    """

    @property
    @abc.abstractmethod
    def score_shift(self) -> Float[Array, ""] | None:
        """The number $s$ taken off every score; `None` for zero."""

    def gradient_form(self) -> GradientForm | str:
        r"""Return the score, whose multiples $V = cA$ make a gradient flow."""
        if is_concrete(self.beta) and float(self.beta) == 0:
            return "beta is 0, where the energy is not defined"
        return GradientForm(self.score, "A", divides_by_mass=self.is_normalised)

    def energy(self, mu: AbstractMeasure) -> Float[Array, ""]:
        r"""Return $\frac{1}{2\beta}\iint e^{\beta y^\top A x - s}$."""
        is_density = isinstance(mu, FourierDensity)
        nodes = quadrature(mu, 4 * mu.modes) if is_density else tokens_of(mu)
        log_mass = self.log_kernel_mass(mu, nodes.points)
        top = jnp.max(jnp.where(nodes.weights > 0, log_mass, -jnp.inf))
        if is_concrete(top) and float(top) > float(jnp.log(jnp.finfo(top.dtype).max)):
            raise Overflow(
                f"the energy overflows {top.dtype}: its logarithm is about "
                f"{float(top):.6g}; lower beta, or look at Unnormalised with a shift."
            )
        # An absent token may see more than all others: its value must stay finite.
        return interaction(self, nodes, jnp.exp(jnp.minimum(log_mass, top)))

    def log_kernel_mass(
        self, mu: AbstractMeasure, x: Float[Array, "m d"]
    ) -> Float[Array, " m"]:
        r"""Return $\log\int e^{\beta y^\top Ax - s}\mathrm{d}\mu(y)$ at each point."""
        return self.shifted(mu.log_laplace(self.tilts(x)))

    @property
    def shift_number(self) -> float:
        """The shift as a number of Python."""
        return 0.0 if self.score_shift is None else float(self.score_shift)

    def shifted(self, log_mass: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return logarithms of masses, or scores, less the shift."""
        if self.score_shift is None:
            return log_mass
        return log_mass - self.score_shift.astype(log_mass.dtype)


def interaction(
    layer: AbstractAttention, mu: TokenCloud, potential: Float[Array, " n"]
) -> Float[Array, ""]:
    r"""Return $\frac{1}{2\beta}\int p\,\mathrm{d}\mu$ of a potential at the tokens."""
    beta = layer.temperature
    if is_concrete(beta):
        check(float(beta) != 0, "beta is 0; the energy needs beta different from 0.")
    check_no_bias(layer)
    return jnp.dot(mu.weights, jnp.where(mu.weights > 0, potential, 0)) / (2 * beta)


def linear_energy(layer: AbstractAttention, mu: AbstractMeasure) -> Float[Array, ""]:
    r"""Return $\frac{\beta}{4}\iint (y^\top A x)^2$, from the second moment."""
    score, moment = layer.score, mu.second_moment()
    return layer.temperature / 4 * jnp.trace(score @ moment @ score.T @ moment)


def check_no_bias(layer: AbstractAttention) -> None:
    """Raise if the queries have a bias."""
    check(layer.query_bias is None, "a layer with query_bias has no known energy.")


def tokens_of(mu: AbstractMeasure) -> TokenCloud:
    """Return the measure, or raise unless it is a token cloud."""
    if not isinstance(mu, TokenCloud):
        raise Unsupported(
            f"the energy of {type(mu).__name__} has no closed form here; use "
            "quadrature(mu, order)."
        )
    return mu


def isotropic_factors(
    layer: AbstractInContextMap,
    topic: str,
    *,
    is_attracting: bool = False,
    with_flat: bool = False,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    r"""Return $b$ and $c$ of scores $b\langle x,y\rangle$ and values $cy$.

    Softmax and unnormalised attention have them if $\beta A = bI$, $V = cI$ and there
    are no biases; on the sphere their flows commute with rotations.

    Args:
        layer: the attention; anything else is refused. Traced matrices are trusted.
        topic: what needs it, in the plural, for the message: "growth rates".
        is_attracting: require both numbers to be positive.
        with_flat: allow $b = 0$ all the same.
    """
    if not isinstance(layer, AbstractExponential):
        raise Unsupported(
            f"layer is {type(layer).__name__}; {topic} are for Softmax and "
            "Unnormalised attention."
        )
    if layer.query_bias is not None or layer.value_bias is not None:
        raise Unsupported(f"{topic} are for attention without biases; leave them out.")
    scores = layer.temperature * layer.score
    score = _factor("beta times the score", scores, topic, is_attracting, with_flat)
    if is_concrete(score) and not bool(jnp.isfinite(score**2)):
        raise Overflow(
            f"beta times the score is {float(score):.6g}, whose square is not a "
            f"number; {topic} need a smaller one."
        )
    return score, _factor("value", layer.value, topic, is_attracting)


def _factor(
    name: str,
    matrix: Float[Array, "e d"],
    topic: str,
    is_attracting: bool,
    with_flat: bool = False,
) -> Float[Array, ""]:
    is_known = is_concrete(matrix)
    factor = multiple_of_identity(matrix) if is_known else 1.0
    if (
        matrix.shape[0] != matrix.shape[1]
        or factor is None
        or (is_attracting and not (factor > 0 or (with_flat and factor == 0)))
    ):
        which = "positive multiple" if is_attracting else "multiple"
        raise Unsupported(
            f"{name} is not a {which} of the identity; {topic} are for scores b <x, y> "
            f"and values c x{' with b, c > 0' if is_attracting else ''}: solve the "
            "flow instead."
        )
    return jnp.trace(matrix) / len(matrix)
