"""Peak memory of a velocity and its gradient against what dense JAX would allocate."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks.dense import dense_velocity
from benchmarks.gradient import energy
from benchmarks.measure import python
from benchmarks.result import Result

ALLOWED = 300.0
MEBIBYTE = 2**20
FEWER = 10_000
# What JAX takes to start is not counted; compiling the function is.
SCRIPT = """
import resource, sys
import jax
from benchmarks.gradient import energy
from benchmarks.velocity import velocity

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

points = jax.random.normal(jax.random.key(0), (int(sys.argv[2]), 3))
before = peak()
field = velocity(3)
function = jax.grad(energy(field)) if sys.argv[1] == "gradient" else field
jax.block_until_ready(jax.jit(function)(points))
sys.stdout.write(str(peak() - before))
"""


def results() -> Iterator[Result]:
    for kind, count in (("velocity", 100_000), ("gradient", 20_000)):
        ours = float(python(SCRIPT, kind, str(count)))
        name = f"memory, {kind}, n={count}"
        yield Result(name, "300 MiB allowed", ours, ALLOWED, "MiB", 1.0)
        yield Result(name, "dense JAX", ours, planned(kind, count), "MiB")


def planned(kind: str, count: int) -> float:
    """Return what the dense formula would allocate while it runs, in MiB.

    The compiler says so for fewer tokens; the square array grows with their square.
    """

    def dense(points):
        return dense_velocity(points, points)

    function = jax.grad(energy(dense)) if kind == "gradient" else dense
    points = jax.ShapeDtypeStruct((FEWER, 3), jnp.float32)
    analysis = jax.jit(function).lower(points).compile().memory_analysis()
    size = float("nan") if analysis is None else analysis.temp_size_in_bytes
    return size / MEBIBYTE * (count / FEWER) ** 2
