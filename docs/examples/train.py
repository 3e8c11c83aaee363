"""Train a network of averaged heads, knowing beforehand whether it can fit its data."""

import jax
import jax.numpy as jnp
import jax.random as jr

from meanformer import training

jax.config.update("jax_enable_x64", True)

contexts = jr.normal(jr.key(0), (4, 5, 2))
queries = jnp.tile(jnp.array([1.0, 0.5]), (4, 1))
targets = queries + 0.1 * jr.normal(jr.key(1), (4, 2))
data = training.Dataset(contexts, queries, targets)
report = training.injectivity_report(data)
print(report)

model = training.MeanFieldTransformer.draw(4, 16, 2, key=jr.key(2), style="antithetic")
largest = training.spectrum(model, data).largest
step = len(data) / largest  # half of the largest stable one
descent = training.GradientDescent(step)
run = training.train(model, data, 250 * step, solver=descent)
judged = training.certificate(run, data)
print(judged)
