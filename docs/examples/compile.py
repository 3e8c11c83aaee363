"""Write an in-context map as a transformer: explicit weights, with a certificate."""

import jax
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
exact, found = gamma(cloud, [[0.5]]), network(cloud, [[0.5]])
trajectory = network.run(cloud, [[0.5]])  # layer by layer
checked = expressivity.verify(network, key=jr.key(0))
