"""A phase of exponentially long depth, in the tokens' own clock."""

from typing import NamedTuple, cast

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from meanformer.attention.log_domain import (
    ScaledVelocity,
    check_resting,
    scaled_field,
    scaled_velocity,
)
from meanformer.errors import Unsupported
from meanformer.flows.bounds.rates import internal_rate, largest_rate
from meanformer.flows.dynamics.derivatives import Mode
from meanformer.flows.dynamics.driver import State, choose
from meanformer.flows.dynamics.merging import Gap, grown
from meanformer.flows.dynamics.stretch import (
    Stretch,
    in_clock,
    integrate,
    largest_error,
)
from meanformer.flows.dynamics.tokens import Points, Retracted, Tokens
from meanformer.flows.flow import Flow
from meanformer.flows.inputs import Settings
from meanformer.flows.schedule import Constant
from meanformer.flows.solvers import ROUNDINGS, RescaledErrors, StepSettings, gap_error
from meanformer.flows.status import Snapshot, Status, snapshot_of
from meanformer.flows.trajectories.atoms import Atoms
from meanformer.geometry import Sphere
from meanformer.measures import TokenCloud

POWER = 4
FIRST_STEP = 0.02
SMALLEST_STEP = 1e-12


class InClock(NamedTuple):
    """The unknowns in the clock: tokens, logarithm of depth in its unit, arc length."""

    points: Float[Array, "n d"]
    log_depth: Float[Array, ""]
    arc_length: Float[Array, ""]


class ClockVelocity(NamedTuple):
    """Velocities per unit of the clock, and the clock's rate in depth."""

    velocities: Float[Array, "n d"]
    log_rate: Float[Array, ""]
    rests: Bool[Array, ""]


class Clock(eqx.Module):
    r"""The clock of a phase: a flow with fixed atoms, from one depth on.

    Depth is $t = t_0 + \Lambda_0^{-1}(e^u - 1)$ with the rate $\Lambda_0$ of the clock
    at the start, so that $u$ and $\Lambda/\Lambda_0$ are numbers of ordinary size.
    """

    flow: Flow
    cloud: TokenCloud
    counts: Float[Array, " n"]
    are_several: Bool[Array, " n"]
    start: Float[Array, ""]
    target: Float[Array, ""]
    log_unit: Float[Array, ""]

    def pulls(self, points: Float[Array, "n d"]) -> ScaledVelocity:
        """Return the velocities with their scale."""
        schedule = cast(Constant, self.flow.velocity)
        unit = self.flow.space.retract(points)
        return scaled_velocity(schedule.gamma, unit, self.cloud.weights)

    def velocity(self, points: Float[Array, "n d"]) -> ClockVelocity:
        """Return the velocities in the clock, whose rate is the attention to others."""
        pull = self.pulls(points)
        rests = jnp.all(pull.velocities == 0)
        safe = jnp.where(rests, 1, _clock_rate(pull.attention))
        log_rate = pull.log_scale + jnp.log(safe)
        return ClockVelocity(pull.velocities / safe, log_rate, rests)

    def field(self, s: Float[Array, ""], unknown: InClock) -> InClock:
        """Return the change of all unknowns with the clock."""
        found = self.velocity(unknown.points)
        log_depth = jnp.exp(-self.log_unit - found.log_rate - unknown.log_depth)
        speeds = jnp.sum(found.velocities**2, axis=1)
        return InClock(found.velocities, log_depth, jnp.sqrt(self.counts @ speeds))

    def depth(self, unknown: InClock) -> Float[Array, ""]:
        """Return the depth that the unknowns stand for."""
        return self.start + jnp.exp(
            self.log_unit + jnp.log(jnp.expm1(unknown.log_depth))
        )

    def missing(self, unknown: InClock) -> Float[Array, ""]:
        """Return the share of the way to the target that is left; zero at the end."""
        ratio = jnp.exp(jnp.log(self.target - self.start) - self.log_unit)
        whole = jnp.maximum(jnp.log1p(ratio), jnp.finfo(ratio.dtype).tiny)
        share = 1 - unknown.log_depth / whole
        near = jnp.abs(share) < 64 * jnp.finfo(share.dtype).eps
        return jnp.where(near, 0, share)

    def snapshot(self, depth: Float[Array, ""], unknown: InClock) -> Snapshot:
        """Return what stop conditions may look at."""

        def velocity():
            pull = self.pulls(unknown.points)
            return jnp.exp(pull.log_scale) * pull.velocities

        return snapshot_of(depth, self.cloud.moved(unknown.points), velocity)

    def rate(
        self, s: Float[Array, ""], points: Float[Array, "n d"]
    ) -> Float[Array, ""]:
        """Return the largest rate of growth of a perturbation, in the clock."""
        rate = _clock_rate(self.pulls(points).attention)
        growth = largest_rate(
            lambda tokens: self.pulls(tokens).velocities,
            self.cloud.moved(points),
            self.flow.space,
        )
        growth = jnp.maximum(growth, self.internal_rate(points))
        return growth / jnp.where(rate > 0, rate, 1)

    def internal_rate(self, points: Float[Array, "n d"]) -> Float[Array, ""]:
        """Return the rate inside of atoms, in the unit of the velocities."""
        gamma, weights = cast(Constant, self.flow.velocity).gamma, self.cloud.weights
        return internal_rate(
            lambda queries: scaled_field(gamma, points, weights, queries),
            points,
            self.are_several,
            self.flow.space,
        )


def check_long_depth(flow: Flow, has_probes: bool) -> None:
    """Raise unless `LongDepth` can follow this flow, with the reason."""
    if not isinstance(flow.velocity, Constant):
        raise Unsupported(
            "the solver LongDepth needs the same map at every depth; take an adaptive "
            "one for a schedule."
        )
    if not isinstance(flow.space, Sphere):
        raise Unsupported(
            "the solver LongDepth is for the sphere, where a lone token rests; "
            "elsewhere take an adaptive or a stiff one."
        )
    if has_probes:
        raise Unsupported(
            "probes move even where the tokens rest, so LongDepth() cannot carry "
            "them; leave out probes, or use Adaptive()."
        )
    check_resting(flow.velocity.gamma)


class LongDepthUntilMeeting(eqx.Module):
    """A phase of `LongDepth()`: a flow with fixed atoms, until two of them meet.

    Attributes:
        tokens: the tokens, with the masses of the atoms.
        gap: the gap that is watched.
        counts: how many tokens each atom is made of.
        settings: those of the solve.
    """

    tokens: Tokens
    gap: Gap
    counts: Float[Array, " n"]
    settings: Settings

    def advance(self, state: State, target: Float[Array, ""]) -> State:
        """Go to the target, or to the next meeting if that comes first."""
        clock = self._clock(state, target)
        rests = state.is_running & clock.velocity(state.moving.tokens).rests
        moved = integrate(self, state, target)
        return choose(rests, _resting(clock, state), moved)

    def stretch(self, state: State, end: Float[Array, ""], mode: Mode) -> Stretch:
        """Return what to integrate, in the clock."""
        clock, atoms = self._clock(state, end), state.record
        log_rate = clock.velocity(state.moving.tokens).log_rate
        clock = eqx.tree_at(lambda c: c.log_unit, clock, -log_rate)

        def meeting_or_target(depth, unknown: InClock):
            gap = self.gap.log_excess(clock.cloud.moved(unknown.points))
            return jnp.minimum(gap, clock.missing(unknown))

        def retract(unknown: InClock) -> InClock:
            return unknown._replace(points=clock.flow.space.retract(unknown.points))

        def read(unknown: InClock, met):
            arrived = clock.missing(unknown) <= 0
            depth = jnp.where(arrived, clock.target, clock.depth(unknown))
            return depth, Points(unknown.points, None)

        def record(unknown: InClock, *path) -> Atoms:
            joined = grown(atoms, clock.rate, *path)
            return eqx.tree_at(lambda a: a.arc_length, joined, unknown.arc_length)

        integrator = self.settings.integrator
        stretch = in_clock(
            clock.field,
            InClock(state.moving.tokens, jnp.zeros_like(end), atoms.arc_length),
            FIRST_STEP,
            Retracted(integrator.method_for(False), retract),
            self._controller(clock.cloud),
            [
                (meeting_or_target, None),
                (
                    lambda depth, unknown: clock.velocity(unknown.points).rests,
                    Status.steady,
                ),
                *self.settings.conditions(clock.snapshot),
            ],
            lambda unknown: (clock.depth(unknown), unknown),
            read,
        )
        path = None if atoms.log_bound is None else lambda unknown: unknown.points
        return stretch._replace(path=path, record=record)

    def _clock(self, state: State, target: Float[Array, ""]) -> Clock:
        """Return the clock that begins at a state, in units of depth."""
        several, zero = state.record.are_several(), jnp.zeros_like(state.depth)
        cloud = self.tokens.cloud.moved(state.moving.tokens)
        times = (state.depth, target, zero)
        return Clock(self.tokens.flow, cloud, self.counts, several, *times)

    def _controller(self, cloud: TokenCloud) -> RescaledErrors:
        dtype = cloud.points.dtype
        zero, one = jnp.zeros((), dtype), jnp.ones((), dtype)
        # The errors are rescaled by the tolerances already.
        steps = StepSettings(zero, one, SMALLEST_STEP * one, largest_error, None)
        # What is smaller than rounding cannot be asked for.
        rtol = self.settings.rtol + ROUNDINGS * jnp.finfo(dtype).eps

        def rescale(end: InClock, error: InClock) -> InClock:
            # One number for all tokens: what counts is what an error does to the gaps.
            gaps = gap_error(cloud.moved(end.points), error.points, self.settings.rtol)
            return InClock(
                jnp.maximum(jnp.abs(error.points) / rtol, gaps),
                error.log_depth / (rtol * (1 + end.log_depth)),
                error.arc_length / (rtol * (1 + end.arc_length)),
            )

        return RescaledErrors(self.settings.integrator.controller(steps), rescale)


def long_velocity(tokens: Tokens, state: State) -> Float[Array, "n d"]:
    """Return the velocities at a state, zero where they are below all numbers."""
    points = tokens.flow.space.retract(state.moving.tokens)
    weights = state.record.weights(tokens.cloud)
    gamma = cast(Constant, tokens.flow.velocity).gamma
    pull = scaled_velocity(gamma, points, weights)
    velocities = jnp.exp(pull.log_scale) * pull.velocities
    return velocities[state.record.leaders]


def _resting(clock: Clock, state: State) -> State:
    """Return where tokens that rest end: a lone atom at the target, others here."""
    alone = jnp.sum(clock.cloud.weights > 0) == 1
    return eqx.tree_at(
        lambda s: (s.depth, s.status, s.stretch, s.record),
        state,
        (
            jnp.where(alone, clock.target, state.depth),
            Status.where(alone, Status.reached, Status.steady),
            state.stretch + 1,
            _grown_alone(clock, state, alone),
        ),
    )


def _grown_alone(clock: Clock, state: State, alone: Bool[Array, ""]) -> Atoms:
    """Return the atoms of a lone one that rests, where its own tokens may part."""
    atoms = state.record
    if atoms.log_bound is None:
        return atoms
    # The atom itself is free to turn: its rate is zero. The unit of a lone atom is one.
    rate = jnp.maximum(clock.internal_rate(state.moving.tokens), 0)
    growth = jnp.where(rate > 0, rate * (clock.target - state.depth), 0)
    grows = alone & (atoms.jumps > 0)
    bound = atoms.log_bound + jnp.where(grows, growth, 0)
    return eqx.tree_at(lambda a: a.log_bound, atoms, bound)


def _clock_rate(attention: Float[Array, "n n"]) -> Float[Array, ""]:
    r"""Return $(\sum_{i \ne j} p_{ij}^4)^{1/4}$, a smooth largest attention."""
    largest = jnp.max(attention)
    shares = attention / jnp.where(largest > 0, largest, 1)
    return largest * jnp.sum(shares**POWER) ** (1 / POWER)
