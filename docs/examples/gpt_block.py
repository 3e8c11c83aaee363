"""A GPT-like network: causal heads and a perceptron behind norms, weights by layer."""

import jax.numpy as jnp
import jax.random as jr

import meanformer as mf

COUNT, WIDTH, HEADS, LAYERS = 16, 12, 3, 4


def drawn(key, *shape):
    """Return random weights."""
    return jr.normal(key, shape) / shape[-1] ** 0.5


def layer(key):
    """Return the attention and the perceptron of one layer, each behind its norm."""
    first, second, third, fourth = jr.split(key, 4)
    size = WIDTH // HEADS
    heads = [
        mf.Softmax(query, key, value, beta=mf.standard_beta(query))
        for query, key, value in drawn(first, HEADS, 3, size, WIDTH)
    ]
    attention = mf.MultiHead(heads, outputs=drawn(second, HEADS, WIDTH, size))
    perceptron = mf.Perceptron(
        drawn(third, 4 * WIDTH, WIDTH),
        jnp.zeros(4 * WIDTH),
        drawn(fourth, WIDTH, 4 * WIDTH),
    )
    return mf.Masked(attention) @ mf.LayerNorm(), perceptron @ mf.LayerNorm()


tokens = jr.normal(jr.key(0), (COUNT, WIDTH))
cloud = mf.in_order(mf.TokenCloud(tokens))
layers = [layer(key) for key in jr.split(jr.key(1), LAYERS)]

# Sequential: the perceptron sees what the attention has done. One block, and all:
block = mf.Residual(layers[0][1]) @ mf.Residual(layers[0][0])
steps = mf.Schedule([part for layer in layers for part in layer], range(2 * LAYERS))
sequential = mf.run_layers(mf.Flow(steps), cloud, 2 * LAYERS, step=1.0)

# Parallel: both see the same tokens.
parallel_block = mf.Residual(layers[0][0] + layers[0][1])
sums = [attention + perceptron for attention, perceptron in layers]
blocks = mf.Schedule(sums, range(LAYERS))
parallel = mf.run_layers(mf.Flow(blocks), cloud, LAYERS, step=1.0)

# The limit of both for small steps is one flow; weights are held for a depth of one.
trajectory = mf.solve(mf.Flow(blocks), cloud, depth=float(LAYERS), save=LAYERS + 1)
