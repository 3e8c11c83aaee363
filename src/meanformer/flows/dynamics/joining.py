"""Tokens that are joined where they meet: phase by phase, each with fixed atoms."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from meanformer.flows.bounds.rates import internal_rate, largest_rate
from meanformer.flows.dynamics.clock import LongDepthUntilMeeting, long_velocity
from meanformer.flows.dynamics.derivatives import Mode
from meanformer.flows.dynamics.driver import AbstractDynamics, State
from meanformer.flows.dynamics.merging import Gap, Merge, grown, join
from meanformer.flows.dynamics.stretch import Stretch, in_wide, integrate
from meanformer.flows.dynamics.tokens import TokenRates, Tokens, finite
from meanformer.flows.inputs import Settings
from meanformer.flows.solvers import LongDepth
from meanformer.flows.status import Status
from meanformer.flows.trajectories.tokens import Trajectory
from meanformer.measures import TokenCloud
from meanformer.typing import Key

NO_DERIVATIVE = (
    "a solve with merge has no derivative: the joins jump; leave merge out to "
    "differentiate."
)


class MergingTokens(AbstractDynamics):
    """Tokens that become one atom where they meet.

    Attributes:
        tokens: the tokens, with their own masses.
        merge: when they join.
    """

    tokens: Tokens
    merge: Merge

    def of(self, cloud: TokenCloud, key: Key | None) -> "MergingTokens":
        """Return the same for another cloud; there is no noise."""
        return MergingTokens(self.tokens.of(cloud, key), self.merge)

    def advance(self, state: State, target: Float[Array, ""]) -> State:
        """Go to the target, phase by phase."""
        return in_wide(_advance_by_phases, NO_DERIVATIVE, self, state, target)

    def rates(self, state: State) -> TokenRates:
        """Return the velocities of the atoms, for each of their tokens."""
        if isinstance(self.tokens.settings.integrator, LongDepth):
            return TokenRates(finite(long_velocity(self.tokens, state)), None)
        return seen_at(self.tokens, state).rates(state)

    def trajectory(self, states: State, rates: TokenRates) -> Trajectory:
        """Return tokens and joins along depth."""
        return self.tokens.trajectory(states, rates)

    def resumed(self, trajectory: Trajectory) -> State:
        """Return tokens and joins at the last depth."""
        return self.tokens.resumed(trajectory)

    def request(self, start: State) -> dict[str, Any]:
        """Return what was asked for, with the distance."""
        return self.tokens.request(start) | {"merging": self.merge}

    @property
    def gap(self) -> Gap:
        """The gap between tokens that is watched."""
        return Gap(self.merge, self.tokens.flow.space)


def seen_at(tokens: Tokens, state: State) -> Tokens:
    """Return tokens with the masses that the atoms of a state have."""
    weights = state.record.weights(tokens.cloud)
    return eqx.tree_at(lambda t: t.cloud.weights, tokens, weights)


def _advance_by_phases(
    dynamics: MergingTokens, start: State, target: Float[Array, ""]
) -> State:
    def is_unfinished(state: State) -> Bool[Array, ""]:
        # Every phase but the last joins two atoms at least.
        is_possible = state.stretch - start.stretch <= len(state.moving.tokens)
        return is_possible & state.is_running & (state.depth < target)

    def advance(state: State) -> State:
        return _advance_one_phase(dynamics, _joined(dynamics, state), target)

    end = jax.lax.while_loop(is_unfinished, advance, start)
    unfinished = end.is_running & (end.depth < target)
    status = Status.where(unfinished, Status.solver_failed, end.status)
    return eqx.tree_at(
        lambda s: (s.status, s.stretch), end, (status, start.stretch + 1)
    )


def _advance_one_phase(
    dynamics: MergingTokens, state: State, target: Float[Array, ""]
) -> State:
    tokens, gap = seen_at(dynamics.tokens, state), dynamics.gap
    if isinstance(tokens.settings.integrator, LongDepth):
        counts = state.record.counts(dynamics.tokens.cloud)
        phase = LongDepthUntilMeeting(tokens, gap, counts, tokens.settings)
        moved = phase.advance(state, target)
    else:
        moved = integrate(UntilMeeting(tokens, gap, tokens.settings), state, target)
    # Joined tokens stand where their leader does, not where rounding took them.
    places = moved.moving.tokens[moved.record.leaders]
    return eqx.tree_at(lambda s: s.moving.tokens, moved, places)


def _joined(dynamics: MergingTokens, state: State) -> State:
    """Join what is close, again and again: a new atom may be close to a third token."""

    def once(carry: tuple[State, Array]) -> tuple[State, Array]:
        state, before = carry[0], carry[0].record
        cloud = dynamics.tokens.cloud.moved(state.moving.tokens)
        points, atoms = join(dynamics.gap, cloud, state.depth, before)
        has_joined = jnp.any(atoms.leaders != before.leaders)
        joined = eqx.tree_at(
            lambda s: (s.moving.tokens, s.record), state, (points, atoms)
        )
        return joined, has_joined

    return jax.lax.while_loop(lambda carry: carry[1], once, (state, jnp.array(True)))[0]


class UntilMeeting(eqx.Module):
    """A flow with fixed atoms, until two of them meet.

    Attributes:
        tokens: the tokens, with the masses of the atoms.
        gap: the gap that is watched.
        settings: those of the solve.
    """

    tokens: Tokens
    gap: Gap
    settings: Settings

    def stretch(self, state: State, end: Float[Array, ""], mode: Mode) -> Stretch:
        """Return what to integrate, which ends at the next meeting."""
        tokens = dataclasses.replace(self.tokens, settings=self.settings)
        cloud, atoms = tokens.cloud, state.record
        usual = tokens.stretch(state, end, mode)

        def meeting(t, y, args, **kwargs):
            return self.gap.log_excess(cloud.moved(y.tokens))

        controller = self.settings.integrator.watching_gaps(
            usual.controller,
            tokens.step_settings(state.depth, end),
            lambda y: cloud.moved(y.tokens),
        )
        return usual._replace(
            controller=controller,
            # The meeting comes first: a stop that fires in the same step can wait.
            events=[(meeting, None), *usual.events],
            path=None if atoms.log_bound is None else lambda y: y.tokens,
            record=lambda last, *path: grown(atoms, self._rate(state), *path),
        )

    def _rate(self, state: State):
        """Return the rate of growth of an error, a function of depth and points."""
        flow, are_several = self.tokens.flow, state.record.are_several()

        def rate(depth, points):
            cloud = self.tokens.cloud.moved(points)

            def own_field(tokens):
                return flow.field(depth, cloud.moved(tokens), tokens)

            def field(queries):
                return flow.field(depth, cloud, queries)

            return jnp.maximum(
                largest_rate(own_field, cloud, flow.space),
                internal_rate(field, points, are_several, flow.space),
            )

        return rate
