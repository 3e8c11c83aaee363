"""Compiled programs can be kept between runs: JAX keeps none that calls back."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import meanformer as mf

GAUSSIAN = mf.Gaussian(np.array([0.3, -0.1]), np.array([[1.0, 0.2], [0.2, 0.7]]))
TOKENS = mf.TokenCloud(np.random.default_rng(0).standard_normal((5, 2)))


@pytest.mark.parametrize(
    ("kind", "measure"),
    [
        ("l2", GAUSSIAN),
        ("softmax", GAUSSIAN),
        ("sinkhorn", GAUSSIAN),
        ("l2", TOKENS),
        ("softmax", TOKENS),
        ("sinkhorn", TOKENS),
    ],
)
def test_a_solve_and_layers_call_nothing_outside_of_the_compiled_program(kind, measure):
    def run(attention, measure):
        flow = mf.Flow(attention)
        solved = mf.solve(flow, measure, 0.5, save=2)
        return solved.status, mf.run_layers(flow, measure, 2).status

    attention = mf.identity_attention(kind, 2, 1.5)
    program = eqx.filter_make_jaxpr(run)(attention, measure)[0]
    assert "while" in str(program)
    assert "callback" not in str(program)


def test_a_temperature_that_cannot_be_is_refused_in_a_compiled_program_too():
    def velocity(beta):
        attention = mf.identity_attention("l2", 2, beta)
        return attention(GAUSSIAN, jnp.ones((1, 2)))

    compiled = eqx.filter_jit(velocity)
    np.testing.assert_allclose(
        compiled(jnp.asarray(0.7)), velocity(jnp.asarray(0.7)), rtol=1e-12
    )
    with pytest.raises(eqx.EquinoxRuntimeError, match="beta"):
        compiled(jnp.asarray(-2.0))
