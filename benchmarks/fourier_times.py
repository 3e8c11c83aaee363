"""Times of fast and exact sums in double precision, as JSON, in a process of its own.

The other benchmarks run in single precision, which JAX fixes for a whole process.
"""

import json
import math
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import meanformer as mf
from benchmarks.gradient import energy
from benchmarks.measure import alternate, peak, run
from meanformer.numerics.pair_sums.sums import AbstractPairSums

CHECKED = 64


def measured(task: Callable, *arguments: float | list) -> dict[str, float]:
    """Run one of the tasks below in a fresh process with 64 bits."""
    words = [task.__name__, *map(json.dumps, arguments)]
    printed = run([sys.executable, "-m", __spec__.name, *words])
    # Libraries may have printed something before.
    return json.loads(printed.splitlines()[-1])


def against_exact(
    count: int, dimension: int, tolerance: float, queries: int, *betas: float
) -> dict[str, float]:
    """Time fast sums for each beta next to the exact sums of some of the queries.

    The time of exact sums is proportional to the number of queries.
    """
    points = sphere(count, dimension)
    some = points[:queries]
    fast = velocity(mf.Fourier(tolerance), dimension)
    exact = velocity(mf.Blocked(), dimension)
    seconds = alternate(
        {"exact": lambda: exact(points, some, betas[0]).block_until_ready()}
        | {
            f"{beta:g}": lambda beta=beta: fast(
                points, points, beta
            ).block_until_ready()
            for beta in betas
        },
        rounds=rounds_for(count),
    )
    seconds["exact"] *= count / queries
    errors = [error(fast(points, points, beta), points, beta) for beta in betas]
    return seconds | {"error": max(errors)}


def exponent(
    fewer: int, more: int, dimension: int, beta: float, tolerance: float
) -> dict[str, float]:
    """Return the power of the number of tokens that the time grows with."""
    fast = at_own_tokens(mf.Fourier(tolerance), dimension, beta)

    def call(count: int) -> Callable:
        points = sphere(count, dimension)
        return lambda: fast(points).block_until_ready()

    seconds = alternate({"fewer": call(fewer), "more": call(more)}, rounds_for(more))
    growth = seconds["more"] / seconds["fewer"]
    return {"exponent": math.log(growth) / math.log(more / fewer)}


def gradient(count: int, dimension: int, beta: float, tolerance: float) -> dict:
    """Time the velocity and the gradient of its energy through fast sums."""
    points = sphere(count, dimension)
    field = at_own_tokens(mf.Fourier(tolerance), dimension, beta)
    slope = jax.jit(jax.grad(energy(field)))
    return alternate(
        {
            "value": lambda: field(points).block_until_ready(),
            "gradient": lambda: slope(points).block_until_ready(),
        },
        rounds=rounds_for(count),
    )


def gradient_memory(count: int, dimension: int, beta: float, tolerance: float) -> dict:
    """Return by how many MiB the gradient raises the peak, compilation included."""
    points = sphere(count, dimension)
    before = peak()
    field = at_own_tokens(mf.Fourier(tolerance), dimension, beta)
    jax.jit(jax.grad(energy(field)))(points).block_until_ready()
    return {"extra": peak() - before}


def against_torch(count: int, dimension: int, beta: float, tolerance: float) -> dict:
    """Time the velocity next to that of PyTorch in single precision, on all cores."""
    import torch

    points = sphere(count, dimension)
    fast = at_own_tokens(mf.Fourier(tolerance), dimension, beta)
    tensor = torch.from_numpy(np.array(points, np.float32))[None, None]

    def attend():
        with torch.no_grad():
            attention = torch.nn.functional.scaled_dot_product_attention
            return attention(tensor, tensor, tensor, scale=beta)

    np.testing.assert_allclose(fast(points), attend()[0, 0], atol=2e-5)
    return alternate(
        {"fast": lambda: fast(points).block_until_ready(), "torch": attend}, rounds=5
    )


def against_keops(
    count: int, dimension: int, beta: float, tolerance: float, queries: int
) -> dict[str, float]:
    """Time both our sums next to KeOps, which like the exact one gets some queries."""
    from pykeops.numpy import LazyTensor

    points = sphere(count, dimension)
    some = points[:queries]
    fast = at_own_tokens(mf.Fourier(tolerance), dimension, beta)
    exact = velocity(mf.Blocked(), dimension)
    rows, columns = np.array(some), np.array(points)

    def attend():
        tokens = LazyTensor(columns[None, :, :])
        scores = LazyTensor(beta * rows[:, None, :]) | tokens
        return scores.sumsoftmaxweight(tokens, axis=1)

    np.testing.assert_allclose(exact(points, some, beta), attend(), atol=1e-12)
    seconds = alternate(
        {
            "fast": lambda: fast(points).block_until_ready(),
            "exact": lambda: exact(points, some, beta).block_until_ready(),
            "keops": attend,
        },
        rounds=2,
    )
    share = count / queries
    return seconds | {name: seconds[name] * share for name in ("exact", "keops")}


def growth(count: int, *series: list) -> dict[str, float]:
    """Time velocities at a cloud's own tokens, each by its sums, taking turns.

    Args:
        count: how many tokens.
        *series: name, kind of sums, dimension, beta and tolerance of each.
    """
    kinds = {"exact": mf.Blocked, "fourier": mf.Fourier, "auto": mf.Auto}

    def call(kind, dimension, beta, *tolerance):
        field = at_own_tokens(kinds[kind](*tolerance), dimension, beta)
        points = sphere(count, dimension)
        return lambda: field(points).block_until_ready()

    calls = {name: call(*problem) for name, *problem in series}
    return alternate(calls, rounds_for(count))


def sphere(count: int, dimension: int) -> jax.Array:
    """Return random points of the unit sphere in double precision."""
    points = np.random.default_rng(0).standard_normal((count, dimension))
    return jnp.asarray(points / np.linalg.norm(points, axis=1, keepdims=True))


def velocity(sums: AbstractPairSums, dimension: int) -> Callable:
    """Compile the velocity under identity attention for all values of beta."""

    @jax.jit
    def of_queries(points, queries, beta):
        attention = mf.identity_attention("softmax", dimension, beta=beta)
        return attention(mf.TokenCloud(points, sums=sums), queries)

    return of_queries


def at_own_tokens(sums: AbstractPairSums, dimension: int, beta: float) -> Callable:
    """Compile the velocity of a cloud's own tokens."""
    of_queries = velocity(sums, dimension)
    return lambda points: of_queries(points, points, beta)


def error(found: jax.Array, points: jax.Array, beta: float) -> float:
    """Return the largest error on some queries, relative to the width of the sphere."""
    array = np.array(points)
    index = np.random.default_rng(1).integers(len(array), size=CHECKED)
    masses = np.exp(beta * (array[index] @ array.T - 1))
    exact = masses @ array / masses.sum(axis=1, keepdims=True)
    return float(np.abs(np.array(found)[index] - exact).max() / 2)


def rounds_for(count: int) -> int:
    """Return how often to repeat a call, which longer calls need less."""
    return 8 if count <= 200_000 else 3


TASKS = {
    task.__name__: task
    for task in (
        against_exact,
        exponent,
        gradient,
        gradient_memory,
        against_torch,
        against_keops,
        growth,
    )
}

if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    name, *words = sys.argv[1:]
    found = TASKS[name](*map(json.loads, words))
    sys.stdout.write("\n" + json.dumps(found))
