"""Memory of the pair sums, measured in processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

CEILING = 400
SCRIPT = """
import sys
import jax, jax.numpy as jnp
from meanformer.numerics.pair_sums import Blocked
from meanformer.numerics.pairs import Pairs

def loss(points, last):
    weights = jnp.full(len(points), 1 / len(points), points.dtype)
    first = None if last is None else jnp.zeros_like(last)
    pairs = Pairs(points, points, weights, None, first, last)
    log_mass, mean = Blocked().softmax(pairs, points)
    return log_mass.sum() + (mean ** 2).sum()

def peak():
    # Not ru_maxrss, which starts from the memory of the process that started this one.
    lines = open("/proc/self/status").read().splitlines()
    return next(int(l.split()[1]) for l in lines if l.startswith("VmHWM")) / 1024

count = int(sys.argv[3])
points = jax.random.normal(jax.random.key(0), (count, 3))
last = jnp.arange(1, count + 1) if sys.argv[2] == "causal" else None
# What JAX takes to start is not counted; compiling the function is.
before = peak()
function = jax.grad(loss) if sys.argv[1] == "gradient" else loss
jax.block_until_ready(jax.jit(function)(points, last))
sys.stdout.write(str(peak() - before))
"""


def peak_increase(kind, mask, count):
    """Peak resident memory in MiB that one call adds to a fresh process."""
    command = [sys.executable, "-c", SCRIPT, kind, mask, str(count)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(result.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
@pytest.mark.parametrize("kind", ["value", "gradient"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_twenty_thousand_tokens_need_no_square_array(kind, mask):
    # One dense array of scores in single precision has 1526 MiB.
    assert peak_increase(kind, mask, 20_000) < CEILING
