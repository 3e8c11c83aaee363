"""Exact softmax velocity against PyTorch's scaled_dot_product_attention, dense JAX."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import meanformer as mf
from benchmarks.dense import dense_velocity
from benchmarks.measure import alternate
from benchmarks.result import Result

COUNT = 8192
TARGETS = {3: 4.0, 64: 1.2}


def results() -> Iterator[Result]:
    for dimension, target in TARGETS.items():
        seconds = alternate(contestants(dimension))
        name = f"velocity, n={COUNT}, d={dimension}"
        ours = seconds["meanformer"]
        yield Result(name, "torch SDPA", ours, seconds["torch"], "s", target)
        yield Result(name, "dense JAX", ours, seconds["dense"], "s", 1.0)
    for precision in (np.float32, np.float64):
        for dimension in TARGETS:
            with jax.enable_x64(precision == np.float64):
                causal = alternate(masked_contestants(dimension, precision))
            yield Result(
                f"causal velocity, n={COUNT}, d={dimension}, {precision.__name__}",
                "unmasked",
                causal["masked"],
                causal["full"],
                "s",
                target=0.55,
                at_least=False,
            )


def tokens(dimension: int) -> np.ndarray:
    """Return points scaled so that scores have unit variance."""
    points = np.random.default_rng(0).standard_normal((COUNT, dimension))
    return (points / dimension**0.25).astype(np.float32)


def contestants(dimension: int) -> dict:
    """Return the same velocity, three ways; PyTorch and JAX use all cores."""
    import torch

    points = tokens(dimension)
    tensor = torch.from_numpy(points)[None, None]
    array = jnp.asarray(points)
    dense = jax.jit(dense_velocity)
    ours = velocity(dimension)

    def attend():
        with torch.no_grad():
            attention = torch.nn.functional.scaled_dot_product_attention
            return attention(tensor, tensor, tensor, scale=1.0)

    np.testing.assert_allclose(ours(array), attend()[0, 0], atol=2e-5)
    return {
        "meanformer": lambda: ours(array).block_until_ready(),
        "torch": attend,
        "dense": lambda: dense(array, array).block_until_ready(),
    }


def masked_contestants(dimension: int, precision: type) -> dict:
    """Return the velocity of half the pairs and that of all."""
    array = jnp.asarray(tokens(dimension).astype(precision))
    masked, full = velocity(dimension, mf.Causal()), velocity(dimension)
    return {
        "masked": lambda: masked(array).block_until_ready(),
        "full": lambda: full(array).block_until_ready(),
    }


def velocity(dimension: int, mask: mf.attention.AbstractMask | None = None):
    """Compile the velocity of a cloud under identity attention, by the public names."""
    attention = mf.identity_attention("softmax", dimension, beta=1.0)
    gamma = attention if mask is None else mf.Masked(attention, mask)

    @jax.jit
    def of_points(points):
        positions = None if mask is None else jnp.linspace(0, 1, len(points))
        cloud = mf.TokenCloud(points, positions=positions)
        return gamma(cloud, points, positions=positions)

    return of_points
