"""Two heads with weights of one's own, and a causal mask."""

import jax.numpy as jnp
import jax.random as jr

import meanformer as mf

tokens = jr.normal(jr.key(0), (50, 2))
cloud = mf.TokenCloud(tokens, positions=jnp.linspace(0, 1, 50))
turn = jnp.array([[0.0, -1.0], [1.0, 0.0]])
first = mf.Softmax(query=jnp.eye(2), key=jnp.eye(2), value=0.5 * turn, beta=2.0)
second = mf.Softmax(query=jnp.eye(2), key=turn, value=-0.1 * jnp.eye(2))
attention = mf.Masked(mf.MultiHead([first, second]), mask=mf.Causal())
trajectory = mf.solve(mf.Flow(attention), cloud, depth=1.0)
