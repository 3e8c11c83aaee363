"""Two hundred tokens on the sphere, carried by softmax attention."""

import jax.random as jr

import meanformer as mf

cloud = mf.TokenCloud(mf.UniformSphere(3).sample(200, key=jr.key(0)))
attention = mf.identity_attention("softmax", dimension=3, beta=4.0)
flow = mf.Flow(attention, space=mf.Sphere())
trajectory = mf.solve(flow, cloud, depth=10.0)
final = trajectory.at(10.0)
