"""An attention of one's own with an exponential kernel, and what comes with it."""

from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

import meanformer as mf
from meanformer.attention import AbstractExponential


class Halved(AbstractExponential):
    """Attention that pays half the exponential of each score."""

    is_normalised: ClassVar[bool] = False

    @property
    def score_shift(self) -> Float[Array, ""]:
        """The logarithm of two."""
        return jnp.log(jnp.asarray(2.0))

    def attend(self, mu, x: Float[Array, "m d"]) -> Float[Array, "m e"]:
        """Return the weighted sum of the values as seen from each query."""
        log_mass, mean = mu.tilted_mass_and_mean(self.tilts(x))
        mass = jnp.exp(self.shifted(log_mass))
        return self.values(mass, mass[:, None] * mean)

    def matrix(self, mu, x: Float[Array, "m d"]) -> Float[Array, "m n"]:
        """Return the weight of each token as seen from each query."""
        mass = jnp.exp(self.log_kernel_mass(mu, x))
        return mass[:, None] * mu.tilted_shares(self.tilts(x))


attention = Halved(jnp.eye(2), jnp.eye(2), jnp.eye(2), beta=2.0)
cloud = mf.TokenCloud([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
is_gradient = bool(mf.observables.is_gradient_flow(attention))
energy = mf.observables.energy(attention, cloud)
rates = mf.mean_field.growth_rates(attention, [1, 2])
flow = mf.Flow(attention, space=mf.Sphere())
late = mf.solve(flow, cloud, 1e6, solver=mf.LongDepth(), save=2)
