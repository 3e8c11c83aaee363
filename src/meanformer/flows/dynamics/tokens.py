"""Tokens, and probes among them, moved by a flow."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax
from jaxtyping import Array, Float

from meanformer.errors import is_concrete
from meanformer.flows.dynamics.derivatives import Mode
from meanformer.flows.dynamics.driver import State
from meanformer.flows.dynamics.stretch import (
    OVERFLOWN,
    AbstractIntegrated,
    Stretch,
    in_depth,
    term,
)
from meanformer.flows.flow import Flow
from meanformer.flows.geodesic import GeodesicStep, check_geodesic
from meanformer.flows.inputs import Settings
from meanformer.flows.schedule import AbstractSchedule
from meanformer.flows.solvers import Splitting, StepSettings
from meanformer.flows.status import Snapshot, snapshot_of
from meanformer.flows.trajectories.tokens import Trajectory
from meanformer.geometry import Euclidean
from meanformer.measures import TokenCloud
from meanformer.numerics.fourier.report import SumSummary, summary_of
from meanformer.numerics.fourier.sums import ReportedSums
from meanformer.typing import Key

# Places on a path of noise, in steps, that differ by rounding only.
ALIKE = 1e-3


class Retracted(diffrax.AbstractWrappedSolver):
    """A solver that wraps another one and puts each of its results on the space.

    The field must not change along the normals of the space, so that a velocity
    computed before the retraction is still right after it.
    """

    solver: diffrax.AbstractSolver
    retract: Callable

    @property
    def term_structure(self):
        """That of the wrapped solver."""
        return self.solver.term_structure

    @property
    def interpolation_cls(self):
        """That of the wrapped solver."""
        return self.solver.interpolation_cls

    @property
    def term_compatible_contr_kwargs(self):
        """That of the wrapped solver."""
        return self.solver.term_compatible_contr_kwargs

    @property
    def scan_kind(self):
        """That of the wrapped solver, where it is of the kind of Runge and Kutta."""
        return cast(diffrax.AbstractRungeKutta, self.solver).scan_kind

    @property
    def root_finder(self):
        """That of the wrapped solver, where it is implicit."""
        return cast(diffrax.AbstractImplicitSolver, self.solver).root_finder

    def order(self, terms):
        """Return the order of the wrapped solver."""
        return self.solver.order(terms)

    def strong_order(self, terms):
        """Return the strong order of the wrapped solver."""
        return self.solver.strong_order(terms)

    def error_order(self, terms):
        """Return the order of the wrapped solver's error estimate."""
        return self.solver.error_order(terms)

    def init(self, terms, t0, t1, y0, args):
        """Return the state of the wrapped solver."""
        return self.solver.init(terms, t0, t1, y0, args)

    def step(self, terms, t0, t1, y0, args, solver_state, made_jump):
        """Make a step of the wrapped solver and retract its result."""
        y1, *rest = self.solver.step(terms, t0, t1, y0, args, solver_state, made_jump)
        return self.retract(y1), *rest

    def func(self, terms, t0, y0, args):
        """Return the velocity."""
        return self.solver.func(terms, t0, y0, args)


class Points(NamedTuple):
    """Tokens, and passive points among them or `None`."""

    tokens: Float[Array, "n d"]
    probes: Float[Array, "p d"] | None


class TokenRates(NamedTuple):
    """The velocities of tokens, and how accurate the fast sums in them are."""

    velocities: Float[Array, "n d"]
    sums: SumSummary | None


class Tokens(AbstractIntegrated):
    """Tokens that a flow moves.

    Attributes:
        flow: the flow.
        cloud: the tokens at the start, with their weights.
        probe_positions: the places of the probes in the sequence; or `None`.
        settings: steps, tolerances, conditions that end it.
        key: the key of the noise; or `None`.
    """

    flow: Flow
    cloud: TokenCloud
    probe_positions: Float[Array, " p"] | None
    settings: Settings
    key: Key | None = None

    def of(self, cloud: TokenCloud, key: Key | None) -> "Tokens":
        """Return the same for another cloud and another noise."""
        return dataclasses.replace(self, cloud=cloud, key=key)

    def velocity(
        self, schedule: AbstractSchedule, depth: Float[Array, ""], points: Points
    ) -> Points:
        """Return the velocity of tokens and probes in the tokens' measure."""
        tokens, probes = points
        cloud = self.cloud.moved(tokens)
        queries, places = tokens, cloud.positions
        if probes is not None:
            queries = jnp.concatenate([tokens, probes])
            if places is not None:
                places = jnp.concatenate([places, self.probe_positions])
        field = schedule.field(self.flow.space, depth, cloud, queries, places)
        count = len(tokens)
        return Points(field[:count], None if probes is None else field[count:])

    def stretch(self, state: State, end: Float[Array, ""], mode: Mode) -> Stretch:
        """Return what to integrate, kept in the space by retractions."""
        flow, integrator = self.flow, self.settings.integrator
        method = mode.method(integrator.method_for(flow.noise is not None))
        if isinstance(method, GeodesicStep):
            check_geodesic(flow.space, flow.noise is not None)
        if not isinstance(flow.space, Euclidean):
            method = Retracted(method, lambda y: jax.tree.map(flow.space.retract, y))
        return in_depth(
            state,
            end,
            self._terms(state, end),
            self.settings,
            mode,
            self.settings.conditions(self._snapshot),
            method=method,
            controller=integrator.controller(self.step_settings(state.depth, end)),
        )

    def step_settings(
        self, start: Float[Array, ""], end: Float[Array, ""]
    ) -> StepSettings:
        """Return what an adaptive choice of steps goes by."""
        largest = jnp.maximum(jnp.abs(start), jnp.abs(end))
        return StepSettings(
            self.settings.rtol,
            self.settings.atol,
            16 * jnp.finfo(largest.dtype).eps * largest,
            self._error_norm,
            self.flow.velocity.jumps,
        )

    def rates(self, state: State) -> TokenRates:
        """Return the velocities, and what is known of the sums in them."""
        reported = ReportedSums(self.cloud.sums)
        seen = eqx.tree_at(lambda tokens: tokens.cloud.sums, self, reported)
        found, _ = seen.velocity(seen.flow.velocity, state.depth, state.moving)
        sums = summary_of(reported.reports) if reported.reports else None
        return TokenRates(finite(found), sums)

    def trajectory(self, states: State, rates: TokenRates) -> Trajectory:
        """Return the tokens along depth."""
        return Trajectory(
            states.depth,
            states.moving.tokens,
            rates.velocities,
            self.cloud.weights,
            self.cloud.positions,
            states.moving.probes,
            states.status,
            states.accepted_steps,
            states.rejected_steps,
            states.record,
            rates.sums,
            self.flow if is_concrete(states.depth) else None,
        )

    def resumed(self, trajectory: Trajectory) -> State:
        """Return tokens, probes and joins at the last depth."""
        points = Points(trajectory.points, trajectory.probes)
        return State.at_end_of(trajectory, points, trajectory.atoms)

    def request(self, start: State) -> dict[str, Any]:
        """Return what a run of tokens was asked for."""
        cloud, settings = self.cloud, self.settings
        return {
            "flow": self.flow,
            "tokens": (cloud.points, cloud.positions, cloud.sums),
            "weights": cloud.weights,
            "probes": (start.moving.probes, self.probe_positions),
            "key": self.key,
            **settings.request(),
        }

    def _snapshot(self, depth: Float[Array, ""], points: Points) -> Snapshot:
        schedule, cloud = self.flow.velocity, self.cloud.moved(points.tokens)
        return snapshot_of(
            depth, cloud, lambda: self.velocity(schedule, depth, points).tokens
        )

    def _error_norm(self, errors: Points) -> Float[Array, ""]:
        """Return the largest error, leaving out tokens of weight zero."""
        tokens, probes = errors
        absent = (self.cloud.weights == 0)[:, None]
        largest = jnp.max(jnp.where(absent, 0, jnp.abs(tokens)))
        if probes is not None and probes.size > 0:
            largest = jnp.maximum(largest, jnp.max(jnp.abs(probes)))
        return jnp.where(jnp.isfinite(largest), largest, OVERFLOWN)

    def _terms(self, state: State, end: Float[Array, ""]):
        def part(schedule: AbstractSchedule) -> diffrax.ODETerm:
            def field(depth, points):
                return self.velocity(schedule, depth, points)

            return term(field, state, end)

        schedule = self.flow.velocity
        if isinstance(self.settings.integrator, Splitting):
            return diffrax.MultiTerm(*[part(one) for one in schedule.terms()])
        if self.flow.noise is None:
            return part(schedule)
        return diffrax.MultiTerm(part(schedule), self._noise(state, end))

    def _noise(self, state: State, end: Float[Array, ""]) -> diffrax.ControlTerm:
        """Return independent Brownian motions, numbered by the stretch of depth.

        They are paths over the number of steps, scaled to the step: a depth that is off
        by rounding sees the same path, and a longer stretch the same one, stretched.
        """
        moving = jax.eval_shape(lambda: state.moving)
        integrator = self.settings.integrator
        step = cast(Array, integrator.first_step(state.depth, end))
        step = eqx.error_if(step, step < 0, "a flow with noise must be run forward.")
        start, size = jax.lax.stop_gradient((state.depth, step))
        count = jnp.maximum(jnp.round((jax.lax.stop_gradient(end) - start) / size), 1)
        path = diffrax.VirtualBrownianTree(
            jnp.zeros_like(count),
            count,
            tol=0.25,
            shape=moving,
            key=jr.fold_in(self.key, state.stretch),
        )

        def place(depth):
            passed = (jax.lax.stop_gradient(depth) - start) / size
            whole = jnp.round(passed)
            passed = jnp.where(jnp.abs(passed - whole) < ALIKE, whole, passed)
            return jnp.clip(passed, 0, count)

        def increment(before, after):
            drawn = path.evaluate(place(before), place(after))
            return jax.tree.map(lambda dw: jnp.sqrt(step) * dw, drawn)

        def diffusion(depth, points, args):
            def push(increment):
                strength = jnp.asarray(self.flow.noise, points.tokens.dtype)
                project = self.flow.space.project
                return jax.tree.map(
                    lambda x, dw: strength * project(x, dw), points, increment
                )

            return lineax.FunctionLinearOperator(push, moving)

        return diffrax.ControlTerm(diffusion, increment)


def finite(array: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return an array with zero in place of what is not finite."""
    return jnp.where(jnp.isfinite(array), array, 0)
