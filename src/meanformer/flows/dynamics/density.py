"""A density on the circle along depth, with as many modes as it needs."""

import dataclasses
from typing import Any, cast

import diffrax
import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanformer.errors import Unsupported, check, check_kind, is_concrete
from meanformer.flows.dynamics.density_field import (
    diffusion,
    transport,
    turns_with_queries,
)
from meanformer.flows.dynamics.derivatives import Mode
from meanformer.flows.dynamics.driver import State
from meanformer.flows.dynamics.stretch import (
    AbstractIntegrated,
    Stretch,
    in_depth,
    largest_error,
    term,
)
from meanformer.flows.dynamics.tokens import finite
from meanformer.flows.flow import Flow
from meanformer.flows.inputs import (
    Options,
    Settings,
    check_dimensions,
    checked_solver,
    is_forward,
    refuse,
)
from meanformer.flows.methods import Lawson
from meanformer.flows.solvers import (
    AbstractAdaptive,
    AbstractIntegrator,
    Adaptive,
    FixedStep,
    Spectral,
    StepSettings,
    Stiff,
)
from meanformer.flows.status import Snapshot, Status
from meanformer.flows.trajectories.density import DensityTrajectory
from meanformer.geometry import Sphere
from meanformer.measures import FourierDensity
from meanformer.numerics.special.trigonometric import on_grid

FEWEST_MODES = 64
# How far below zero a density may fall, in units of its largest value.
NEGATIVE = 1e-4


# Of moments, which are at most one: no step can be judged more finely.
ROUNDINGS = 4
NOT_FOR_DENSITIES = {
    "probes": "the map itself gives velocities anywhere, gamma(density, points)",
    "merge": "a density has no tokens that meet",
    "key": "noise acts on a density as diffusion, without chance",
}


class DensityFlow(AbstractIntegrated):
    """A density on the circle that a flow moves, by its moments.

    Attributes:
        flow: the velocity, and perhaps noise.
        start: the density at the start.
        settings: steps, tolerances, conditions that end it.
        tail: the coefficients in the last third that end the solve.
        most_modes: how many modes there may be.
        grows: whether modes are added where they are needed.
        is_round: whether tilts of queries around the circle have one length.
    """

    flow: Flow
    start: FourierDensity
    settings: Settings
    tail: Float[Array, ""]
    most_modes: int = eqx.field(static=True)
    grows: bool = eqx.field(static=True)
    is_round: bool = eqx.field(static=True)

    def first_state(self, depth: Float[Array, ""]) -> State:
        """Return the state at the first depth, with modes to spare if there may be."""
        state = State.first(depth, self.start.moments)
        if not self.grows:
            return state
        state = self._padded(state, min(FEWEST_MODES, self.most_modes))
        if float(FourierDensity(state.moving).tail()) <= float(self._smallest_tail()):
            return state
        return self._padded(state, min(2 * len(state.moving), self.most_modes))

    def refined(self, state: State) -> State | None:
        """Return a state that ended for want of modes with twice as many, if it may."""
        modes = len(state.moving)
        if modes >= self.most_modes or not bool(state.status == Status.unresolved):
            return None
        going_on = dataclasses.replace(state, status=Status.reached)
        return self._padded(going_on, min(2 * modes, self.most_modes))

    def stretch(self, state: State, end: Float[Array, ""], mode: Mode) -> Stretch:
        """Return what to integrate; explicit steps take diffusion out exactly."""
        integrator, schedule = self.settings.integrator, self.flow.velocity
        method, decay = mode.method(integrator.method_for(False)), self._decay(state)
        # Diffusion is stiff, and known: explicit adaptive steps do without it.
        is_apart = (
            decay is not None
            and isinstance(integrator, AbstractAdaptive)
            and isinstance(method, diffrax.AbstractERK)
        )
        left = None if is_apart else decay

        def field(depth, moments):
            return self._change(depth, moments, left)

        settings, zero = self.settings, jnp.zeros_like(end)
        steps = (settings.rtol, settings.atol, zero, largest_error, schedule.jumps)
        largest_tail = self._largest_tail(len(state.moving))

        def is_sharp(depth, moments):
            return FourierDensity(moments).tail() > largest_tail

        def is_negative(depth, moments):
            values = on_grid(moments, 2 * len(moments) + 2)
            return jnp.min(values) < -NEGATIVE * jnp.max(values)

        return in_depth(
            state,
            end,
            term(field, state, end),
            settings,
            mode,
            [
                (is_sharp, Status.unresolved),
                (is_negative, Status.negative),
                *settings.conditions(self._snapshot),
            ],
            method=Lawson(method, decay) if is_apart else method,
            controller=integrator.controller(StepSettings(*steps)),
        )

    def rates(self, state: State) -> Float[Array, "k 2"]:
        """Return how fast the moments change."""
        return finite(self._change(state.depth, state.moving, self._decay(state)))

    def trajectory(
        self, states: State, rates: Float[Array, "t k 2"]
    ) -> DensityTrajectory:
        """Return the densities along depth, with room for all modes there may be."""
        count, modes = rates.shape[:2]
        room = max(self.most_modes, modes) if self.grows else modes
        moments, rates = (
            jnp.pad(rows, ((0, 0), (0, room - modes), (0, 0)))
            for rows in (states.moving, rates)
        )
        return DensityTrajectory(
            states.depth,
            moments,
            rates,
            states.status,
            states.accepted_steps,
            states.rejected_steps,
            jnp.full((count,), modes),
        )

    def resumed(self, trajectory: DensityTrajectory) -> State:
        """Return the moments at the last depth, as many as there were."""
        modes = int(cast(Array, trajectory.modes)[-1])
        return State.at_end_of(trajectory, trajectory.moments[:, :modes])

    def request(self, start: State) -> dict[str, Any]:
        """Return what a run of a density was asked for."""
        return {
            "flow": self.flow,
            "density": self.start.moments,
            "modes": (self.most_modes, self.tail),
            **self.settings.request(),
        }

    def _change(self, depth, moments, decay) -> Float[Array, "k 2"]:
        schedule = self.flow.velocity
        rates = transport(schedule, depth, moments, is_round=self.is_round)
        return rates if decay is None else rates - decay * moments

    def _decay(self, state: State) -> Float[Array, "k 2"] | None:
        if self.flow.noise is None:
            return None
        return diffusion(self.flow.noise, len(state.moving), state.moving.dtype)

    def _snapshot(
        self, depth: Float[Array, ""], moments: Float[Array, "k 2"]
    ) -> Snapshot:
        def radius() -> Float[Array, ""]:
            return jnp.ones_like(depth)

        def speed() -> Float[Array, ""]:
            rates = self.rates(State.first(depth, moments))
            degrees = jnp.arange(1, len(moments) + 1, dtype=moments.dtype)
            return jnp.max(jnp.hypot(rates[:, 0], rates[:, 1]) / degrees)

        return Snapshot(depth, FourierDensity(moments), radius, speed)

    def _largest_tail(self, modes: int) -> Float[Array, ""]:
        """Return the tail that ends a stretch: a smaller one if modes can be added."""
        can_grow = self.grows and modes < self.most_modes
        return self._smallest_tail() if can_grow else self.tail

    def _smallest_tail(self) -> Float[Array, ""]:
        """Return the tail at which modes are added: the tolerance, or rounding."""
        # The rounding of the last modes grows with their number, and along depth.
        rounding = 4096 * jnp.finfo(self.tail.dtype).eps
        return jnp.minimum(jnp.maximum(self.settings.atol, rounding), self.tail)

    def _padded(self, state: State, modes: int) -> State:
        added = max(modes - len(state.moving), 0)
        moments = jnp.pad(state.moving, ((0, added), (0, 0)))
        return dataclasses.replace(state, moving=moments)


def set_up(
    flow: Flow, mu: FourierDensity, options: Options, **others
) -> tuple[DensityFlow, State, Float[Array, " t"]]:
    """Return a density that moves, its first state and the depths, or raise."""
    refuse(others, NOT_FOR_DENSITIES)
    check_circle_flow(flow)
    dtype = mu.moments.dtype
    depths = options.depths(flow, dtype)
    check(
        flow.noise is None or is_forward(depths),
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


def check_circle_flow(flow: Any) -> None:
    """Raise unless this is a flow on the circle."""
    check_kind("flow", flow, Flow, "Flow(velocity)")
    if not isinstance(flow.space, Sphere):
        raise Unsupported(
            "a FourierDensity lives on the circle: give the flow space=Sphere()."
        )
    check_dimensions(flow, 2)


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
