"""Peak memory of a velocity and its gradient against dense JAX."""

from collections.abc import Iterator

from benchmarks.measure import python
from benchmarks.result import Result

ALLOWED = 300.0
FEWER = 10_000
# What JAX takes to start is not counted; compiling the function is.
SCRIPT = """
import sys
import jax
from benchmarks.dense import dense_velocity
from benchmarks.gradient import energy
from benchmarks.measure import peak
from benchmarks.velocity import velocity

who, kind, count = sys.argv[1:]
points = jax.random.normal(jax.random.key(0), (int(count), 3))
before = peak()
field = (lambda x: dense_velocity(x, x)) if who == "dense" else velocity(3)
function = jax.grad(energy(field)) if kind == "gradient" else field
jax.block_until_ready(jax.jit(function)(points))
sys.stdout.write(str(peak() - before))
"""


def results() -> Iterator[Result]:
    for kind, count in (("velocity", 100_000), ("gradient", 20_000)):
        ours = extra("meanformer", kind, count)
        # Dense arrays of the full size would not fit; they grow with the square.
        dense = extra("dense", kind, FEWER) * (count / FEWER) ** 2
        name = f"memory, {kind}, n={count}"
        yield Result(name, "300 MiB allowed", ours, ALLOWED, "MiB", 1.0)
        yield Result(name, "dense JAX (extrapolated)", ours, dense, "MiB")


def extra(who: str, kind: str, count: int) -> float:
    """Return by how many MiB one call raises the peak of a fresh process (Linux)."""
    return float(python(SCRIPT, who, kind, str(count)))
