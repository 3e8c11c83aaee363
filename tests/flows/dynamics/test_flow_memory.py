"""Memory of a solve and of the gradient through it."""

import pytest

from memory_use import needs_linux, peak_increase

CEILING = 600
BEFORE = """
import jax
import meanformer as mf

def loss(points):
    flow = mf.Flow(mf.identity_attention("softmax", 3))
    path = mf.solve(flow, mf.TokenCloud(points), 0.5, save=2, solver=mf.FixedStep(0.25))
    return (path.points[-1] ** 2).sum()

points = jax.random.normal(jax.random.key(0), (20_000, 3))
function = jax.grad(loss) if sys.argv[1] == "gradient" else loss
"""
CALL = "jax.block_until_ready(jax.jit(function)(points))"


@pytest.mark.slow
@needs_linux
@pytest.mark.parametrize("kind", ["value", "gradient"])
def test_solving_for_twenty_thousand_tokens_needs_no_square_array(kind):
    # One dense array of scores in single precision has 1526 MiB.
    assert peak_increase(BEFORE, CALL, kind) < CEILING
