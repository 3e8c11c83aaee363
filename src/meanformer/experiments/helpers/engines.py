"""A gradient engine with a known error, to compare the exact ones with."""

import diffrax
import jax
import jax.numpy as jnp

from meanformer.errors import Unsupported
from meanformer.training.gradients import AbstractEngine


class Continuous(AbstractEngine):
    r"""The adjoint equation, discretised by Euler steps at the right end point.

    It optimises first and discretises then, so that its error is of first order in the
    length of layers.
    """

    def pull(self, sweep, points, terminal):
        """Go back with the points after each layer in place of those before it."""
        if not isinstance(sweep.method, diffrax.Euler):
            raise Unsupported("Continuous() is for Euler steps; use another engine.")
        states = sweep.forward(points)
        risk, adjoint = jax.value_and_grad(terminal)(states[-1])
        shifted = jnp.concatenate([states[1:], states[-1:]])
        adjoints, found = sweep.back_all(shifted, adjoint)
        return risk, found, (states, adjoints)
