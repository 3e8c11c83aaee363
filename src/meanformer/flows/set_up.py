"""From what `solve` is given to what moves: dynamics, first state and depths."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import diffrax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.attention.affine import check_affine
from meanformer.errors import InvalidInput, Unsupported, as_key, check, is_concrete
from meanformer.flows.dynamics.abstract import State
from meanformer.flows.dynamics.clock import check_long_depth
from meanformer.flows.dynamics.density import DensityFlow
from meanformer.flows.dynamics.density_field import turns_with_queries
from meanformer.flows.dynamics.gaussian import GaussianFlow, first_carried
from meanformer.flows.dynamics.joining import MergingTokens
from meanformer.flows.dynamics.merging import as_merge, check_mergeable, initial_atoms
from meanformer.flows.dynamics.stretch import Settings
from meanformer.flows.dynamics.tokens import Points, Tokens
from meanformer.flows.flow import Flow
from meanformer.flows.inputs import (
    check_attainable,
    check_dimensions,
    check_flow,
    check_tolerances,
    checked_probes,
    checked_solver,
    saved_depths,
    sorted_stops,
)
from meanformer.flows.schedule import Constant
from meanformer.flows.solvers import (
    AbstractAdaptive,
    AbstractIntegrator,
    Adaptive,
    FixedStep,
    LongDepth,
    Spectral,
    Stiff,
    Switching,
)
from meanformer.flows.status import AbstractStop
from meanformer.geometry import Euclidean, Sphere
from meanformer.measures import FourierDensity, Gaussian, TokenCloud

# Of moments, which are at most one: no step can be judged more finely.
ROUNDINGS = 4
_NOT_FOR_GAUSSIANS = {
    "probes": "carry points along by the trajectory's transport(depth) instead",
    "merge": "a Gaussian has no tokens that meet",
    "key": "a Gaussian has no noise",
}
_NOT_FOR_DENSITIES = {
    "probes": "the map itself gives velocities anywhere, gamma(density, points)",
    "merge": "a density has no tokens that meet",
    "key": "noise acts on a density as diffusion, without chance",
}

SetUp = tuple[Any, State, Float[Array, " t"]]


class Options(NamedTuple):
    """The options of `solve` that every measure has."""

    depth: Any
    save: Any
    solver: Any
    rtol: Any
    atol: Any
    stop: Any

    def settings(
        self,
        integrator: AbstractIntegrator,
        dtype: jnp.dtype,
        stops: tuple[AbstractStop, ...] = (),
        power: float = 0.25,
    ) -> Settings:
        """Return them as a solve uses them, its own stop condition first.

        Args:
            integrator: how steps are taken.
            dtype: the type of what moves.
            stops: the conditions of the velocity itself, which come last.
            power: the power of the largest number of the type that nothing may exceed.
        """
        budget, given = sorted_stops(self.stop, dtype, power)
        rtol, atol = (jnp.asarray(tol, dtype) for tol in (self.rtol, self.atol))
        steps, all_stops = integrator.prepared(dtype), (*given, *stops)
        return Settings(steps, all_stops, rtol, atol, budget.count)

    def depths(self, flow: Flow, dtype: jnp.dtype) -> Float[Array, " t"]:
        """Return the depths to save, or raise; also for tolerances that are none."""
        check_tolerances(self.rtol, self.atol)
        return saved_depths(self.depth, self.save, dtype, flow.velocity.jumps)


def tokens_set_up(
    flow: Flow, mu: TokenCloud, options: Options, *, probes, merge, key
) -> SetUp:
    """Return tokens, their first state and the depths of a solve, or raise."""
    check_flow(flow, mu)
    dtype = mu.points.dtype
    depths = options.depths(flow, dtype)
    solver = options.solver
    integrator = Adaptive() if solver is None else checked_solver(solver)
    if isinstance(integrator, AbstractAdaptive) and merge is None:
        check_attainable(options.rtol, dtype)
    if (flow.noise is None) != (key is None):
        raise InvalidInput(
            "a flow with noise needs key=jax.random.key(seed)."
            if key is None
            else "key is given but the flow has no noise; leave it out."
        )
    check(
        flow.noise is None or _is_forward(depths),
        f"depth is {options.depth}; a flow with noise has no way back: run it forward.",
    )
    key = None if key is None else as_key(key)
    passive, places = checked_probes(flow, mu, probes)
    is_long = isinstance(integrator, LongDepth)
    if is_long:
        check_long_depth(flow, passive is not None)
    settings = options.settings(integrator, dtype, flow.velocity.stops)
    tokens = Tokens(flow, mu, places, settings, key)
    points = Points(mu.points, passive)
    if merge is None and not is_long:
        return tokens, State.first(depths[0], points), depths
    merging = as_merge(merge, dtype)
    check_mergeable(mu, flow.noise is not None, _is_forward(depths))
    atoms = initial_atoms(depths[0], mu.points, is_long)
    state = State.first(depths[0], points, atoms)
    return MergingTokens(tokens, merging), state, depths


def gaussian_set_up(flow: Flow, mu: Gaussian, options: Options, **others) -> SetUp:
    """Return a Gaussian that moves, its first state and the depths, or raise."""
    refuse_for_gaussians(others)
    check_gaussian_flow(flow, mu)
    dtype = mu.mean().dtype
    depths = options.depths(flow, dtype)
    solver = options.solver
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
    settings = options.settings(integrator, dtype, power=1 / 8)
    moved = GaussianFlow(flow, mu, mu.root(), depths[0], settings)
    return moved, State.first(depths[0], first_carried(mu)), depths


def density_set_up(flow: Flow, mu: FourierDensity, options: Options, **others) -> SetUp:
    """Return a density that moves, its first state and the depths, or raise."""
    _refuse(others, _NOT_FOR_DENSITIES)
    check_circle_flow(flow)
    dtype = mu.moments.dtype
    depths = options.depths(flow, dtype)
    check(
        flow.noise is None or _is_forward(depths),
        "diffusion cannot run backward; give a positive depth.",
    )
    solver = options.solver
    spectral = solver if isinstance(solver, Spectral) else Spectral(integrator=solver)
    atol = jnp.maximum(
        jnp.asarray(options.atol, dtype), ROUNDINGS * jnp.finfo(dtype).eps
    )
    settings = options._replace(atol=atol).settings(
        _for_density(spectral), dtype, flow.velocity.stops
    )
    moved = DensityFlow(
        flow,
        mu,
        settings,
        jnp.asarray(spectral.tail, dtype),
        spectral.most_modes,
        is_concrete(mu.moments) and is_concrete(depths),
        turns_with_queries(flow.velocity),
    )
    return moved, moved.first_state(depths[0]), depths


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
    for gamma in flow.velocity.kinds():
        check_affine(gamma, mu)


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


def refuse_for_gaussians(options: Mapping[str, object]) -> None:
    """Raise if an option was given that is for token clouds only."""
    _refuse(options, _NOT_FOR_GAUSSIANS)


def _refuse(options: Mapping[str, object], reasons: Mapping[str, str]) -> None:
    for name, value in options.items():
        if value is not None:
            raise InvalidInput(f"{name} is for token clouds: {reasons[name]}.")


def _for_density(spectral: Spectral) -> AbstractIntegrator:
    if spectral.integrator is None:
        return Adaptive(diffrax.Dopri8())
    integrator = checked_solver(spectral.integrator)
    if not isinstance(integrator, Adaptive | Stiff | FixedStep):
        raise Unsupported(
            f"{type(integrator).__name__}() is for tokens; a density takes Adaptive(), "
            "Stiff(), FixedStep(h), or Spectral(…) with one of them."
        )
    return integrator


def _is_forward(depths: Float[Array, " t"]) -> bool:
    return not is_concrete(depths) or bool(depths[-1] > depths[0])
