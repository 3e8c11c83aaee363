"""Write an in-context map as a transformer: explicit weights, with a certificate."""

import jax
import jax.numpy as jnp
import jax.random as jr

import meanformer as mf
from meanformer import expressivity
from meanformer.expressivity import block, coordinate

jax.config.update("jax_enable_x64", True)

# The query times the square of the mean of its context.
mean = block(1, value=[1.0])
gamma = coordinate(1, 0) * mean * mean

network = expressivity.compile_transformer(gamma, accuracy=1e-3, radius=1.0)
print(network.certificate)

cloud = mf.TokenCloud([[0.2], [0.4], [0.9]])
query = jnp.array([[0.5]])
exact, found = gamma(cloud, query), network(cloud, query)
trajectory = network.run(cloud, query)  # layer by layer
checked = expressivity.verify(network, key=jr.key(0))
