"""Dual potentials of entropic transport: Sinkhorn rounds, then Newton's method."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from meanformer.measures.transport.extras import import_extra
from meanformer.measures.transport.newton import maximise
from meanformer.measures.transport.problem import Problem

ROUNDS_BEFORE_NEWTON = 100
BATCH = 1024


class Potential(NamedTuple):
    """A function on the target, and whether its plan has the right marginals."""

    values: Float[Array, " m"]
    has_converged: Bool[Array, ""]


@eqx.filter_jit
def self_potential(problem: Problem, rounds: int) -> Potential:
    r"""Solve the transport of a cloud to itself by averaged rounds.

    $f \leftarrow (f + Tf)/2$ contracts by one half where plain alternation stalls
    because the plan is close to the identity [FSVATP19].
    """
    averaging = _ott("solvers.linear.acceleration").Momentum(start=0, value=0.5)
    options = {"momentum": averaging, "parallel_dual_updates": True}
    return _rounds(problem, None, rounds, options)


@eqx.filter_jit
def cross_potential(
    problem: Problem,
    start: tuple[Potential, Potential],
    scale: Float[Array, ""],
    rounds: int,
) -> Potential:
    """Solve the transport between two clouds, starting from their own potentials.

    Alternating rounds first; if they stall and all pairs fit in memory, Newton's
    method finishes.
    """
    if not problem.is_dense:
        return _rounds(problem, start, rounds, {})
    potential = _rounds(problem, start, min(rounds, ROUNDS_BEFORE_NEWTON), {})
    values, error = maximise(problem, potential.values, scale)
    return Potential(values, error <= problem.tolerance)


def _rounds(
    problem: Problem,
    start: tuple[Potential, Potential] | None,
    count: int,
    options: dict[str, Any],
) -> Potential:
    """Run Sinkhorn's algorithm of ott-jax, whose potentials include the masses."""
    source, target, epsilon, tolerance = problem
    solver = _ott("solvers.linear.sinkhorn").Sinkhorn(
        threshold=tolerance, max_iterations=count, **options
    )
    masses = source.masses, target.masses
    batch = None if problem.is_dense else BATCH
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        pairs = _ott("geometry.pointcloud").PointCloud(
            source.points, target.points, epsilon=epsilon, batch_size=batch
        )
        programme = _ott("problems.linear.linear_problem").LinearProblem(pairs, *masses)
        shifted = start and tuple(
            potential.values + epsilon * jnp.log(mass)
            for potential, mass in zip(start, masses, strict=True)
        )
        output = solver(programme, init=shifted)
    is_present = (target.masses > 0) & jnp.isfinite(output.g)
    logarithm = jnp.log(jnp.where(is_present, target.masses, 1))
    values = jnp.where(is_present, output.g - epsilon * logarithm, 0)
    return Potential(values, output.converged)


def _ott(module: str) -> Any:
    return import_extra("ott." + module, "entropic transport needs ott-jax")
