"""A Gaussian that blows up, one that loses rank, and how that is known beforehand."""

import jax
import jax.numpy as jnp

import meanformer as mf

jax.config.update("jax_enable_x64", True)

identity = jnp.eye(2)
start = mf.Gaussian(jnp.zeros(2), jnp.array([[1.0, 0.3], [0.3, 0.6]]))

expanding = mf.Softmax(jnp.array([[1.0, 0.3], [0.0, -0.5]]), identity, identity)
path = mf.solve(mf.Flow(expanding), start, 0.4)
blow_up = mf.gaussian.blowup_time(expanding, start)

row = jnp.array([[1.0, 2.0]]) / jnp.sqrt(5.0)
flattening = mf.Softmax(row, -row, identity)
outcome = mf.gaussian.classify(flattening, start)
