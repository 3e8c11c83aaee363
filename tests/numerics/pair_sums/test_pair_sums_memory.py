"""Memory of the pair sums and of their gradient."""

import pytest

from memory_use import needs_linux, peak_increase

CEILING = 400
BEFORE = """
import jax, jax.numpy as jnp
from meanformer.numerics.pair_sums.sums import Blocked
from meanformer.numerics.pair_sums.pairs import Pairs

def loss(points, last):
    weights = jnp.full(len(points), 1 / len(points), points.dtype)
    first = None if last is None else jnp.zeros_like(last)
    pairs = Pairs(points, points, weights, None, first, last)
    log_mass, mean = Blocked().softmax(pairs, points)
    return log_mass.sum() + (mean ** 2).sum()

points = jax.random.normal(jax.random.key(0), (20_000, 3))
last = jnp.arange(1, 20_001) if sys.argv[2] == "causal" else None
function = jax.grad(loss) if sys.argv[1] == "gradient" else loss
"""
CALL = "jax.block_until_ready(jax.jit(function)(points, last))"


@pytest.mark.slow
@needs_linux
@pytest.mark.parametrize("kind", ["value", "gradient"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_twenty_thousand_tokens_need_no_square_array(kind, mask):
    # One dense array of scores in single precision has 1526 MiB.
    assert peak_increase(BEFORE, CALL, kind, mask) < CEILING
