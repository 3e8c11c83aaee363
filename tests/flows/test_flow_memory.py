"""Memory of a solve and of the gradient through it, in processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

CEILING = 600
SCRIPT = """
import sys
import jax, jax.numpy as jnp
import meanformer as mf

def loss(points):
    flow = mf.Flow(mf.identity_attention("softmax", 3))
    path = mf.solve(flow, mf.TokenCloud(points), 0.5, save=2, solver=mf.FixedStep(0.25))
    return (path.points[-1] ** 2).sum()

def peak():
    # Not ru_maxrss, which starts from the memory of the process that started this one.
    lines = open("/proc/self/status").read().splitlines()
    return next(int(l.split()[1]) for l in lines if l.startswith("VmHWM")) / 1024

points = jax.random.normal(jax.random.key(0), (20_000, 3))
before = peak()
function = jax.grad(loss) if sys.argv[1] == "gradient" else loss
jax.block_until_ready(jax.jit(function)(points))
sys.stdout.write(str(peak() - before))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
@pytest.mark.parametrize("kind", ["value", "gradient"])
def test_solving_for_twenty_thousand_tokens_needs_no_square_array(kind):
    # One dense array of scores in single precision has 1526 MiB.
    command = [sys.executable, "-c", SCRIPT, kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) < CEILING
