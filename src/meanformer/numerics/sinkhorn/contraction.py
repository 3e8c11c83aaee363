"""How fast alternating Sinkhorn steps converge, seen at the limit."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.numerics.eigen import largest_eigenpairs, random_block
from meanformer.numerics.sinkhorn.algorithm import EntropicPotentials
from meanformer.numerics.sinkhorn.averaging import RoundAverage
from meanformer.numerics.sinkhorn.self_transport import SelfTransport

VECTORS = 3
MAX_STEPS = 200


@eqx.filter_jit
def round_ratio(
    problem: SelfTransport, potentials: EntropicPotentials
) -> Float[Array, ""]:
    r"""Return the factor by which a round of steps shrinks the error near the limit.

    It is the largest eigenvalue of the derivative of a round, the row average followed
    by the column average, on functions of mean zero; at most $\tanh^2(\eta/4)$ with
    the oscillation $\eta$ of the score.

    Args:
        problem: the cloud and the score.
        potentials: what `balance` returned for it.

    Returns:
        A number between 0 and 1. Cost: two pair sums per step of a power iteration.
    """
    masses = problem.weights
    average = RoundAverage(problem, potentials.f, potentials.g, masses)
    roots = jnp.sqrt(jnp.where(masses > 0, masses, 0))
    inverse = jnp.where(masses > 0, 1 / jnp.where(masses > 0, roots, 1), 0)
    constant = roots / jnp.linalg.norm(roots)

    def operator(z: Float[Array, " n"]) -> Float[Array, " n"]:
        return roots * average.average(inverse * z) - constant * jnp.dot(constant, z)

    start = random_block(len(masses), VECTORS, masses.dtype)
    found = largest_eigenpairs(operator, start, tolerance=1e-6, max_steps=MAX_STEPS)
    return jnp.clip(found.values[0], 0, 1)


def half_steps_to_reach(
    ratio: Float[Array, ""], error: float | Float[Array, ""]
) -> Float[Array, ""]:
    r"""Return $2\log(1/e)/\log(1/\rho)$, the half-steps to an error, about.

    Args:
        ratio: what a round multiplies the error by, $\rho$.
        error: the error $e$ to reach, below one.
    """
    safe = jnp.clip(ratio, jnp.finfo(ratio.dtype).tiny, 1 - jnp.finfo(ratio.dtype).eps)
    return 2 * jnp.log(error) / jnp.log(safe)
