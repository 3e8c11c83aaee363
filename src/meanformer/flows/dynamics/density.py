"""Setting up the flow of a density on the circle, with as many modes as it needs."""

from collections.abc import Mapping
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.errors import (
    InvalidInput,
    Unsupported,
    as_integer,
    as_number,
    check,
    is_concrete,
)
from meanformer.flows.dynamics.density_field import (
    DensityProblem,
    DensityState,
    turns_with_queries,
)
from meanformer.flows.dynamics.density_steps import advance_density, density_snapshot
from meanformer.flows.dynamics.driver import Way, visit_all
from meanformer.flows.dynamics.recorder import AbstractProgress
from meanformer.flows.flow import Flow
from meanformer.flows.inputs import (
    check_dimensions,
    check_tolerances,
    checked_solver,
    saved_depths,
    sorted_stops,
)
from meanformer.flows.solvers import (
    AbstractIntegrator,
    Adaptive,
    FixedStep,
    Stiff,
)
from meanformer.flows.status import Status
from meanformer.geometry import Sphere
from meanformer.measures import FourierDensity

FEWEST_MODES = 64
# Of moments, which are at most one: no step can be judged more finely.
ROUNDINGS = 4
_REASONS = {
    "probes": "the map itself gives velocities anywhere, gamma(density, points)",
    "merge": "a density has no tokens that meet",
    "key": "noise acts on a density as diffusion, without chance",
    "store": "a density's trajectory is small: use trajectory.save(path)",
}


class Spectral(eqx.Module):
    """How the flow of a density is solved: how many modes, and which steps.

    Modes are doubled when the last third of the coefficients exceeds the absolute
    tolerance of the solve, up to `most_modes`; then the solve goes on until it exceeds
    `tail`, where it ends as `unresolved`. Under `jit` the modes are those of the start.

    Args:
        most_modes: how many modes there may be.
        tail: the size of the last third that ends the solve.
        integrator: `Adaptive(…)`, `Stiff(…)` or `FixedStep(…)`; by default explicit
            steps of order 8. Explicit steps take diffusion out exactly.
    """

    most_modes: int = eqx.field(default=1024, static=True)
    tail: float = 1e-6
    integrator: AbstractIntegrator | None = None

    def __check_init__(self):
        as_integer("most_modes", self.most_modes, least=1)
        tail = as_number("tail", self.tail, "a positive number")
        check(tail > 0, f"tail is {tail}; it must be positive.")


def refuse_for_densities(options: Mapping[str, object]) -> None:
    """Raise if an option was given that is for token clouds only."""
    for name, value in options.items():
        if value is not None:
            raise InvalidInput(f"{name} is for token clouds: {_REASONS[name]}.")


def density_set_up(
    flow: Flow, mu: FourierDensity, depth, save, solver, rtol, atol, stop
) -> tuple[DensityProblem, DensityState, Float[Array, " t"], Spectral]:
    """Return problem, first state, depths and choice of modes of a solve, or raise."""
    check_circle_flow(flow)
    check_tolerances(rtol, atol)
    dtype = mu.moments.dtype
    depths = saved_depths(depth, save, dtype, flow.velocity.jumps)
    if flow.noise is not None and is_concrete(depths):
        check(
            bool(depths[-1] > depths[0]),
            "diffusion cannot run backward; give a positive depth.",
        )
    spectral = solver if isinstance(solver, Spectral) else Spectral(integrator=solver)
    budget, stops = sorted_stops(stop, dtype)
    rtol, atol, tail = (jnp.asarray(one, dtype) for one in (rtol, atol, spectral.tail))
    atol = jnp.maximum(atol, ROUNDINGS * jnp.finfo(dtype).eps)
    problem = DensityProblem(
        flow,
        _integrator(spectral).prepared(dtype),
        (*stops, *flow.velocity.stops),
        rtol,
        atol,
        tail,
        budget.count,
        turns_with_queries(flow.velocity),
    )
    none = jnp.zeros((), jnp.result_type(int))
    state = DensityState(depths[0], mu.moments, Status.reached, none, none)
    return problem, state, depths, spectral


def visit_densities(
    problem: DensityProblem,
    state: DensityState,
    depths: Float[Array, " t"],
    spectral: Spectral,
    progress: AbstractProgress,
) -> tuple[DensityState, Float[Array, "s k 2"]]:
    """Visit the depths one by one, with more modes where they are needed.

    Those after an early end are left out.
    """
    if not all(map(is_concrete, jax.tree.leaves((state, depths)))):
        return visit_all(DENSITIES, problem, state, depths)
    state = _padded(state, min(FEWEST_MODES, spectral.most_modes))
    state = _resolved(problem, state, spectral)
    states = [state]
    with progress:
        for index in range(1, len(depths)):
            if not bool(state.status == Status.reached):
                break
            state = _advance(problem, state, depths[index], spectral)
            states.append(state)
            progress.update(index, len(depths) - 1)
    states = [_padded(one, len(state.moments)) for one in states]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    return _snapshots(problem, stacked)


def _advance(
    problem: DensityProblem, state: DensityState, target: Array, spectral: Spectral
) -> DensityState:
    """Advance to a depth; with twice the modes as often as they do not suffice."""
    while True:
        moved = _stretch(_limited(problem, state, spectral), state, target)
        can_grow = len(state.moments) < spectral.most_modes
        if not (can_grow and bool(moved.status == Status.unresolved)):
            return moved
        going_on = eqx.tree_at(lambda s: s.status, moved, Status.reached)
        state = _padded(going_on, min(2 * len(state.moments), spectral.most_modes))


def _resolved(
    problem: DensityProblem, state: DensityState, spectral: Spectral
) -> DensityState:
    """Return the first state with modes to spare, if there may be more."""
    tail = float(FourierDensity(state.moments).tail())
    if tail <= float(_smallest_tail(problem)):
        return state
    return _padded(state, min(2 * len(state.moments), spectral.most_modes))


def _limited(
    problem: DensityProblem, state: DensityState, spectral: Spectral
) -> DensityProblem:
    """Return the problem that ends where more modes are needed, if there may be."""
    if len(state.moments) >= spectral.most_modes:
        return problem
    tail = _smallest_tail(problem)
    return eqx.tree_at(lambda p: p.largest_tail, problem, tail)


def _smallest_tail(problem: DensityProblem) -> Float[Array, ""]:
    """Return the tail at which modes are added: the tolerance, or rounding."""
    # The rounding of the last modes grows with their number, and along depth.
    rounding = 4096 * jnp.finfo(problem.atol.dtype).eps
    return jnp.minimum(jnp.maximum(problem.atol, rounding), problem.largest_tail)


def _padded(state: DensityState, modes: int) -> DensityState:
    added = max(modes - len(state.moments), 0)
    moments = jnp.pad(state.moments, ((0, added), (0, 0)))
    return eqx.tree_at(lambda s: s.moments, state, moments)


@eqx.filter_jit
def _stretch(problem, state, target):
    return advance_density(problem, state, target)


@eqx.filter_jit
def _snapshots(problem, states):
    return jax.lax.map(lambda state: density_snapshot(problem, state), states)


def _resumed(state: DensityState) -> DensityState:
    return state


DENSITIES = Way(advance_density, density_snapshot, _resumed)


def check_circle_flow(flow: Any) -> None:
    """Raise unless this is a flow on the circle."""
    check(
        isinstance(flow, Flow),
        f"flow is {type(flow).__name__}; it must be Flow(velocity).",
    )
    if not isinstance(flow.space, Sphere):
        raise Unsupported(
            "a FourierDensity lives on the circle: give the flow space=Sphere()."
        )
    check_dimensions(flow, 2)


def _integrator(spectral: Spectral) -> AbstractIntegrator:
    if spectral.integrator is None:
        return Adaptive(diffrax.Dopri8())
    integrator = checked_solver(spectral.integrator)
    if not isinstance(integrator, Adaptive | Stiff | FixedStep):
        raise Unsupported(
            f"{type(integrator).__name__}() is for tokens; a density takes Adaptive(), "
            "Stiff(), FixedStep(h), or Spectral(…) with one of them."
        )
    return integrator
