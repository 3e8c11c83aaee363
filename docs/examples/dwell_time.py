"""How long groups wait, which meet next, and whether they sit at a saddle."""

import jax
import jax.numpy as jnp

import meanformer as mf
from meanformer.observables import TwoGroups, plateaus, predicted_staircase, separation

jax.config.update("jax_enable_x64", True)

angles = jnp.array([0.0, 0.05, 1.6, 1.65])
cloud = mf.TokenCloud.from_angles(angles)
attention = mf.identity_attention("softmax", dimension=2, beta=40.0)

report = separation(cloud, 40.0)
groups = TwoGroups(attention, masses=(0.5, 0.5))
log_wait = groups.log_dwell_time(start=1.6, end=1e-9)

flow = mf.Flow(attention, space=mf.Sphere())
depths = jnp.concatenate([jnp.zeros(1), jnp.geomspace(1e-2, 1e10, 45)])
trajectory = mf.solve(flow, cloud, 1e10, save=depths, solver=mf.LongDepth())
steps = plateaus(trajectory)
prediction = predicted_staircase(trajectory)
