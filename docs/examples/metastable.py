"""Two groups of tokens that stay apart for a depth of 1e15, and then meet."""

import jax
import jax.numpy as jnp

import meanformer as mf

jax.config.update("jax_enable_x64", True)

angles = jnp.array([0.0, 0.1, 1.6, 1.7])
cloud = mf.TokenCloud.from_angles(angles)
attention = mf.identity_attention("softmax", dimension=2, beta=40.0)
flow = mf.Flow(attention, space=mf.Sphere())

depths = jnp.concatenate([jnp.zeros(1), jnp.geomspace(1e-2, 1e20, 45)])
trajectory = mf.solve(flow, cloud, 1e20, save=depths, solver=mf.LongDepth())
meetings = trajectory.merges.depths
steps = int(trajectory.accepted_steps[-1])
