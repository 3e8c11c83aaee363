"""A density on the circle: three clusters form out of an almost uniform one."""

import jax
import jax.numpy as jnp

import meanformer as mf

jax.config.update("jax_enable_x64", True)

start = mf.FourierDensity.from_function(
    lambda angle: (1 + 0.1 * jnp.cos(3 * angle)) / (2 * jnp.pi)
)
flow = mf.Flow(mf.identity_attention("softmax", 2, beta=5.0), space=mf.Sphere())
path = mf.solve(flow, start, 3.0, rtol=1e-10, atol=1e-12)

print(path.moments[-1, 2, 0])  # 0.36605806: the integral of cos 3 theta
print(mf.mean_field.growth_rates(flow.velocity.gamma, range(1, 6)))

later = mf.mean_field.evolve(flow, start, 12.0)  # tokens take over from the density
# Modes, since a few light tokens are still on their way between the clusters.
found = mf.observables.count_modes(later.measure(-1), 5.0, space=mf.Sphere())
print(later.hand_over, found.count)
