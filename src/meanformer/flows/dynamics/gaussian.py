"""Setting up the flow of a Gaussian, and its finitely many layers."""

from collections.abc import Mapping

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.errors import InvalidInput, Unsupported, check
from meanformer.flows.dynamics.driver import Way
from meanformer.flows.dynamics.gaussian_state import (
    Carried,
    GaussianProblem,
    GaussianState,
    check_closed,
    first_state,
)
from meanformer.flows.dynamics.gaussian_steps import advance_gaussian
from meanformer.flows.dynamics.state import kept_if_finite
from meanformer.flows.flow import Flow
from meanformer.flows.inputs import (
    check_dimensions,
    check_tolerances,
    checked_solver,
    followed,
    layer_depths,
    saved_depths,
    sorted_stops,
)
from meanformer.flows.schedule import Constant, stack_flows
from meanformer.flows.solvers import Adaptive, FixedStep, LongDepth, Switching
from meanformer.flows.status import Status
from meanformer.geometry import Euclidean
from meanformer.measures import Gaussian
from meanformer.numerics.matrices import matmul

_REASONS = {
    "probes": "carry points along by the trajectory's transport(depth) instead",
    "merge": "a Gaussian has no tokens that meet",
    "key": "a Gaussian has no noise",
    "store": "a Gaussian's trajectory is small: use trajectory.save(path)",
}


def refuse_for_gaussians(options: Mapping[str, object]) -> None:
    """Raise if an option was given that is for token clouds only."""
    for name, value in options.items():
        if value is not None:
            raise InvalidInput(f"{name} is for token clouds: {_REASONS[name]}.")


def check_gaussian_flow(flow: Flow, mu: Gaussian) -> None:
    """Raise unless this is a flow that keeps the Gaussian one."""
    check(
        isinstance(flow, Flow),
        f"flow is {type(flow).__name__}; it must be Flow(velocity).",
    )
    if not isinstance(flow.space, Euclidean):
        raise Unsupported(
            f"a Gaussian does not live on {type(flow.space).__name__}(); use "
            "Euclidean(), or a TokenCloud."
        )
    if flow.noise is not None:
        raise Unsupported("a Gaussian flows without noise; use a TokenCloud.")
    check_dimensions(flow, mu.dimension)
    check_closed(flow, mu)


def gaussian_set_up(flow, mu: Gaussian, depth, save, solver, rtol, atol, stop):
    """Return problem, first state and depths of a solve, or raise."""
    check_gaussian_flow(flow, mu)
    check_tolerances(rtol, atol)
    dtype = mu.mean().dtype
    depths = saved_depths(depth, save, dtype, flow.velocity.jumps)
    integrator = (
        Adaptive(diffrax.Dopri8()) if solver is None else checked_solver(solver)
    )
    if isinstance(integrator, LongDepth) and not isinstance(flow.velocity, Constant):
        raise Unsupported(
            "LongDepth() needs the same map at every depth; use Adaptive() for a "
            "schedule."
        )
    if isinstance(integrator, Switching):
        raise Unsupported(
            "Switching() is for tokens; a Gaussian takes Adaptive(), Stiff() or "
            "LongDepth()."
        )
    # Squares of covariances are formed: they must not overflow.
    budget, stops = sorted_stops(stop, dtype, power=1 / 8)
    tolerances = (jnp.asarray(tolerance, dtype) for tolerance in (rtol, atol))
    problem = GaussianProblem(
        flow,
        mu.root(),
        depths[0],
        _radius(mu),
        integrator.prepared(dtype),
        stops,
        *tolerances,
        budget.count,
    )
    return problem, first_state(depths[0], mu), depths


def _radius(mu: Gaussian) -> Float[Array, ""]:
    return jnp.sqrt(jnp.sum(mu.mean() ** 2) + jnp.trace(mu.covariance()))


def _snapshot(problem: GaussianProblem, state: GaussianState):
    found = problem.slope_and_drift(problem.flow.velocity, state.depth, state.carried)
    return state, _finite(found)


def _finite(found: tuple[Array, Array]) -> tuple[Array, Array]:
    return jax.tree.map(lambda leaf: jnp.where(jnp.isfinite(leaf), leaf, 0), found)


def _resumed(state: GaussianState) -> GaussianState:
    return state


GAUSSIANS = Way(advance_gaussian, _snapshot, _resumed)


def gaussian_layers(flow: Flow, mu: Gaussian, count: int, size: Float[Array, ""]):
    r"""Run residual layers: $m \leftarrow m + hu$, $\Phi \leftarrow (I + hL)\Phi$.

    This is exact, covariance $(I + hL)S(I + hL)^\top$ included. Returned are the
    problem, and the states with slopes and drifts, all stacked.
    """
    check_gaussian_flow(flow, mu)
    depths = layer_depths(flow, count, size)
    problem = GaussianProblem(
        flow, mu.root(), depths[0], _radius(mu), FixedStep(1.0), (), 1.0, 1.0, 1
    )
    return problem, _run(problem, first_state(depths[0], mu), size, depths)


@eqx.filter_jit
def _run(
    problem: GaussianProblem,
    first: GaussianState,
    size: Float[Array, ""],
    depths: Float[Array, " t"],
):
    problem = stack_flows(problem)

    def layer(state: GaussianState, following: tuple[Array, Array]):
        depth, is_left = following
        found = problem.slope_and_drift(
            problem.flow.velocity, state.depth, state.carried
        )
        step = jnp.where(is_left, size, 0)
        return _step(problem, state, *found, depth, step), (state, _finite(found))

    return jax.lax.scan(eqx.filter_checkpoint(layer), first, followed(depths))[1]


def _step(
    problem: GaussianProblem,
    state: GaussianState,
    slope: Float[Array, "d d"],
    drift: Float[Array, " d"],
    depth: Float[Array, ""],
    size: Float[Array, ""],
) -> GaussianState:
    mean, linear, log_volume = state.carried
    layer = jnp.eye(len(slope), dtype=slope.dtype) + size * slope
    log_volume = log_volume + jnp.linalg.slogdet(layer)[1]
    linear = linear + size * matmul(slope, linear)
    carried = Carried(mean + size * drift, linear, log_volume)
    moved = GaussianState(
        depth,
        carried,
        state.status,
        state.accepted_steps + 1,
        state.rejected_steps,
    )
    # The covariance is the square of what was moved, so it overflows first.
    is_finite = jnp.isfinite(problem.gaussian(carried).covariance()).all()
    return kept_if_finite(moved, state, state.status == Status.reached, is_finite)
