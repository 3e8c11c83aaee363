"""Gradient of a softmax velocity against jax.grad of the dense formula; our value."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.dense import dense_velocity
from benchmarks.measure import alternate
from benchmarks.result import Result
from benchmarks.velocity import velocity

COUNT = 4096


def results() -> Iterator[Result]:
    for dimension in (3, 64):
        seconds = alternate(contestants(dimension))
        name = f"gradient, n={COUNT}, d={dimension}"
        ours = seconds["gradient"]
        yield Result(name, "dense JAX", ours, seconds["dense"], "s", 1.0)
        yield Result(
            name, "its value", ours, seconds["value"], "s", 6.0, at_least=False
        )


def contestants(dimension: int) -> dict:
    """Return the gradient of half the square of a velocity, two ways, and the value."""
    points = np.random.default_rng(0).standard_normal((COUNT, dimension))
    points = jnp.asarray(points / dimension**0.25, jnp.float32)
    gradient = jax.jit(jax.grad(energy(velocity(dimension))))
    dense = jax.jit(jax.grad(energy(lambda points: dense_velocity(points, points))))
    value = velocity(dimension)
    scale = float(jnp.abs(dense(points)).max())
    np.testing.assert_allclose(gradient(points), dense(points), atol=1e-5 * scale)
    return {
        "gradient": lambda: gradient(points).block_until_ready(),
        "dense": lambda: dense(points).block_until_ready(),
        "value": lambda: value(points).block_until_ready(),
    }


def energy(field):
    """Half the sum of squares of a velocity, to be differentiated."""
    return lambda points: 0.5 * jnp.sum(field(points) ** 2)
