"""Mixtures of measures."""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from meanformer.errors import (
    InvalidInput,
    as_finite_array,
    as_integer,
    as_key,
    check,
    check_kind,
)
from meanformer.measures.abstract import AbstractMeasure
from meanformer.measures.checks import checked_weights
from meanformer.numerics.arrays import matmul
from meanformer.numerics.softmax import weighted_logsumexp
from meanformer.typing import ArrayLike, Key, MassAndMean


class Mixture(AbstractMeasure):
    r"""A convex combination of measures: $\mu = \sum_k c_k \mu_k$.

    Args:
        weights: coefficients $c_k \ge 0$ of total 1; zero leaves a component out.
        components: the measures $\mu_k$, of one dimension.
    """

    weights: Float[Array, " k"]
    components: tuple[AbstractMeasure, ...]

    def __init__(self, weights: ArrayLike, components: Sequence[AbstractMeasure]):
        check_measures("components", components)
        self.components = tuple(components)
        one_each = jnp.stack([component.mean() for component in self.components])
        self.weights = checked_weights(one_each, weights, normalize=False)

    @property
    def dimension(self) -> int:
        """Dimension of the space."""
        return self.components[0].dimension

    def mean(self) -> Float[Array, " d"]:
        """Return the mean."""
        return matmul(self.weights, self._means())

    def covariance(self) -> Float[Array, "d d"]:
        """Return the covariance: that within components plus that between them."""
        within = jnp.stack([component.covariance() for component in self.components])
        deviations = self._means() - self.mean()[None, :]
        between = matmul((self.weights[:, None] * deviations).T, deviations)
        return jnp.sum(self.weights[:, None, None] * within, axis=0) + between

    def tilted_mass_and_mean(self, u: Float[Array, "m d"]) -> MassAndMean:
        """Return the log-Laplace transform and the tilted mean together."""
        u = as_finite_array("u", u, (None, self.dimension))
        parts = [component.tilted_mass_and_mean(u) for component in self.components]
        log_masses, means = (
            jnp.stack(part, axis=1) for part in zip(*parts, strict=True)
        )
        log_mass, shares = weighted_logsumexp(log_masses, self.weights)
        return log_mass, jnp.sum(shares[:, :, None] * means, axis=1)

    def sample(self, count: int, *, key: Key) -> Float[Array, "count d"]:
        """Draw a component for each point, then the point."""
        count, key = as_integer("count", count, least=0), as_key(key)
        key_choice, *keys = jr.split(key, 1 + len(self.components))
        parts = zip(self.components, keys, strict=True)
        draws = jnp.stack([one.sample(count, key=own) for one, own in parts])
        choice = jr.choice(key_choice, len(keys), (count,), p=self.weights)
        return draws[choice, jnp.arange(count)]

    def quadratic_tilt(
        self, precision: Float[Array, "d d"], *, is_positive: bool = False
    ) -> tuple[Float[Array, ""], "Mixture"]:
        """Multiply each component by the factor and share the mass anew."""
        parts = [
            component.quadratic_tilt(precision, is_positive=is_positive)
            for component in self.components
        ]
        log_masses, rests = zip(*parts, strict=True)
        log_masses = jnp.stack(log_masses)[None, :]
        log_mass, shares = weighted_logsumexp(log_masses, self.weights)
        return log_mass[0], eqx.tree_at(
            lambda mixture: (mixture.weights, mixture.components),
            self,
            (shares[0], rests),
        )

    def kernel_mean(self, u, profile):
        """Return the profile's mass and first moment, summed over components."""
        parts = [component.kernel_mean(u, profile) for component in self.components]
        masses, moments = (jnp.stack(part) for part in zip(*parts, strict=True))
        moments = jnp.sum(self.weights[:, None, None] * moments, axis=0)
        return jnp.sum(self.weights[:, None] * masses, axis=0), moments

    def _means(self) -> Float[Array, "k d"]:
        return jnp.stack([component.mean() for component in self.components])


def check_measures(name: str, measures: Sequence[AbstractMeasure]) -> None:
    """Raise unless there are measures, at least one, and all of one dimension."""
    check_kind(name, measures, Sequence, "a list of measures")
    check(len(measures) > 0, f"{name} is empty; it must hold at least one measure.")
    for measure in measures:
        if not isinstance(measure, AbstractMeasure):
            raise InvalidInput(
                f"{name} holds a {type(measure).__name__}; it must hold measures, such "
                "as TokenCloud(points)."
            )
    dimensions = [measure.dimension for measure in measures]
    check(
        len(set(dimensions)) == 1,
        f"{name} have dimensions {dimensions}; they must agree.",
    )
