"""A toy that keeps JAX busy for minutes, for tests that interrupt it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from meanformer.experiments import Claim, Experiment, Outcome, setting, theory


@dataclass(frozen=True)
class Parameters:
    rounds: int = setting(1_000_000, help="how often it multiplies")


FINITE = Claim("finite", "A contraction stays finite.", "observation")


def run(parameters, *, progress):
    matrix = jnp.eye(512) / 2

    def contract(_, state):
        return jnp.tanh(matrix @ state)

    state = jax.jit(lambda s: jax.lax.fori_loop(0, parameters.rounds, contract, s))(
        jnp.ones((512, 512))
    )
    return Outcome([FINITE.at_most(abs(state).max(), 1.0, source=theory())])


experiment = Experiment(
    "toy-computes", "A long computation", "numerics", Parameters, run
)
