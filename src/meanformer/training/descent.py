"""Heads that move in training time: a gradient flow, or steps of an optimiser."""

import abc
import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, PyTree

from meanformer.errors import as_integer, as_number, check, is_concrete
from meanformer.flows import (
    AbstractDynamics,
    AbstractIntegrated,
    Settings,
    State,
    Status,
    in_depth,
    term,
)
from meanformer.flows.dynamics.driver import choose, kept_if_finite
from meanformer.flows.status import Snapshot
from meanformer.numerics.arrays import bytes_of, from_bytes
from meanformer.training.gradients import Gradient, Problem
from meanformer.training.layer import Parameters
from meanformer.training.runs import TrainingRun
from meanformer.typing import Key

# Rises of the risk, one after another, after which plain steps are too large; and how
# many times the first risk, or one if that is more, is too much for all.
MOST_RISES = 3
EXPLODED = 1e6
# Roundings by which a risk that stays may rise.
ROUNDINGS = 64


class Unknowns(NamedTuple):
    """Unknowns of training: particles, risk they gave up, length of their path."""

    parameters: Parameters
    dissipated: Float[Array, ""]
    length: Float[Array, ""]


class AbstractTraining(AbstractDynamics):
    """Base class of heads that move in training time.

    Attributes:
        problem: what is trained.
        speeds: factors of the velocities of queries and keys, and of all the rest.
    """

    problem: eqx.AbstractVar[Problem]
    speeds: eqx.AbstractVar[tuple[float, float]]

    @abc.abstractmethod
    def notes(self) -> PyTree:
        """Return what is noted at the start beside the particles; or `None`."""

    def gradient(self, parameters: Parameters, indices: Any = None) -> Gradient:
        """Return the gradient at some particles, of some of the data."""
        problem, data = self.problem, self.problem.data
        chosen = data if indices is None else data.some(indices)
        moved = problem.model.with_parameters(parameters)
        return eqx.tree_at(
            lambda p: (p.model, p.data), problem, (moved, chosen)
        ).gradient()

    def scaled(self, changes: Parameters) -> Parameters:
        """Return changes times the speeds."""
        of_scores, of_rest = self.speeds
        scaled = jax.tree.map(lambda leaf: of_rest * leaf, changes)
        query, key = (of_scores * leaf for leaf in changes.heads[:2])
        return Parameters(scaled.heads._replace(query=query, key=key), scaled.neurons)

    def snapshot(self, time: Float[Array, ""], moving: Unknowns) -> Snapshot:
        """Return what stop conditions may look at: the heads as a measure."""
        model = self.problem.model
        leaves = jax.tree.leaves(moving.parameters)

        def radius():
            return jnp.max(jnp.stack([jnp.abs(leaf).max() for leaf in leaves]))

        def speed():
            moved = self.scaled(self.gradient(moving.parameters).parameters)
            return jnp.sqrt(model.product(moved, moved))

        measure = model.with_parameters(moving.parameters).measure()
        return Snapshot(time, measure, radius, speed)

    def task(self) -> dict[str, Any]:
        """Return what tells one training from another, by the words for it."""
        return {
            "transformer": self.problem.model,
            "data": self.problem.data,
            "loss": self.problem.loss,
            "decay": self.problem.decay,
            "speeds": self.speeds,
        }

    def first(self, time: Float[Array, ""]) -> State:
        """Return the state at the start."""
        zero = jnp.zeros((), time.dtype)
        moving = Unknowns(self.problem.model.parameters, zero, zero)
        return State.first(time, moving, self.notes())

    def rates(self, state: State) -> tuple[Array, Array, Array]:
        """Return the risk, the squared norm of its gradient, and its profile."""
        found = self.gradient(state.moving.parameters)
        return found.risk, found.squared_norm, found.profile

    def trajectory(self, states: State, rates: tuple) -> TrainingRun:
        """Return the particles along training time."""
        return TrainingRun(
            states.depth,
            *states.moving,
            *rates,
            states.accepted_steps,
            states.rejected_steps,
            None if states.record is None else bytes_of(states.record),
            states.status,
            self.problem.model,
        )

    def resumed(self, run: TrainingRun) -> State:
        """Return the state at the last saved time."""
        moving = Unknowns(run.parameters, run.dissipated, run.lengths)
        state = State.at_end_of(run, moving)
        if run.notes is None:
            return state
        notes = from_bytes(run.notes[-1], jax.eval_shape(self.notes))
        return dataclasses.replace(state, record=notes)


class GradientFlow(AbstractIntegrated, AbstractTraining):
    r"""Heads that follow $\dot\theta = -G_s(\theta)$, each at its depth.

    Attributes:
        settings: steps, tolerances, conditions that end it.
    """

    problem: Problem
    speeds: tuple[float, float] = eqx.field(static=True)
    settings: Settings

    def notes(self) -> None:
        """Return nothing."""

    def field(self, time: Float[Array, ""], moving: Unknowns) -> Unknowns:
        """Return how particles move, and what they give up on their way."""
        product = self.problem.model.product
        found = self.gradient(moving.parameters)
        moved = self.scaled(found.parameters)
        # A risk that is no number is noticed, though it may have a gradient.
        given_up = product(found.parameters, moved) + 0 * found.risk
        speed = jnp.sqrt(product(moved, moved))
        return Unknowns(jax.tree.map(jnp.negative, moved), given_up, speed)

    def stretch(self, state: State, end: Float[Array, ""], mode):
        """Return what to integrate between two saved times."""
        equation = term(self.field, state, end)
        conditions = self.settings.conditions(self.snapshot)
        return in_depth(state, end, equation, self.settings, mode, conditions)

    def request(self, start: State) -> dict[str, Any]:
        """Return what tells one training from another."""
        return self.task() | self.settings.request()


class GradientDescent(eqx.Module):
    r"""Steps $\theta \leftarrow \theta - \eta\,G(\theta)$ in mean-field units.

    The step does not depend on layers and heads: a learning rate for derivatives in
    single heads would be $\eta LM$.

    Args:
        step: the step $\eta$, which is also the time that it counts for.
        batch: how many contexts make up the gradient of a step, drawn anew each time;
            all by default.
        optimiser: a transformation of optax that is given $G$ and returns the change;
            then `step` is only the time that a step counts for.
    """

    step: float | Float[Array, ""]
    batch: int | None = eqx.field(static=True, default=None)
    optimiser: Any = None

    def __check_init__(self):
        if is_concrete(self.step):
            step = as_number("step", self.step)
            check(step > 0, f"step is {self.step}; it must be positive.")
        if self.batch is not None:
            as_integer("batch", self.batch, least=1)
        check(
            self.optimiser is None
            or (hasattr(self.optimiser, "init") and hasattr(self.optimiser, "update")),
            f"optimiser is {self.optimiser!r}; it must be a transformation of optax, "
            "such as optax.adam(1e-2).",
        )

    def memory(self, parameters: Parameters) -> PyTree:
        """Return what the optimiser remembers at the start."""
        return () if self.optimiser is None else self.optimiser.init(parameters)

    def change(
        self, gradient: Parameters, memory: PyTree, at: Parameters
    ) -> tuple[Parameters, PyTree]:
        """Return the change of the particles, and what is remembered then."""
        if self.optimiser is None:
            return jax.tree.map(lambda leaf: -self.step * leaf, gradient), memory
        return self.optimiser.update(gradient, memory, at)


class Notes(NamedTuple):
    """The optimiser's memory, the first and last risk, how often it rose in turn."""

    memory: PyTree
    first: Float[Array, ""]
    risk: Float[Array, ""]
    rises: Int[Array, ""]


class Descent(AbstractTraining):
    """Heads that an optimiser moves step by step.

    Attributes:
        rule: the steps.
        settings: conditions that end it.
        key: the key of the batches; or `None`.
    """

    problem: Problem
    speeds: tuple[float, float] = eqx.field(static=True)
    rule: GradientDescent
    settings: Settings
    key: Key | None

    def notes(self) -> Notes:
        """Return a new memory, and no risk yet."""
        memory = self.rule.memory(self.problem.model.parameters)
        risk = jnp.full((), jnp.inf, self.problem.data.tokens.dtype)
        return Notes(memory, risk, risk, jnp.zeros((), jnp.result_type(int)))

    def advance(self, state: State, target: Float[Array, ""]) -> State:
        """Make the steps up to the target, unless it has stopped already."""
        start = state.depth
        count = jnp.round((target - start) / self.rule.step).astype(int)
        done = state.accepted_steps

        def goes_on(carry):
            state, _ = carry
            return state.is_running & (state.accepted_steps - done < count)

        def one(carry):
            state, good = carry
            made = state.accepted_steps - done + 1
            passed = made.astype(start.dtype) * self.rule.step
            time = jnp.where(made == count, target, start + passed)
            moved = kept_if_finite(self._moved(state, time), state, state.is_running)
            good = choose(moved.record.rises > 0, good, state)
            return self._checked(moved, good), good

        return jax.lax.while_loop(goes_on, one, (state, state))[0]

    def request(self, start: State) -> dict[str, Any]:
        """Return what tells one training from another."""
        return {
            **self.task(),
            "solver": self.rule,
            "stop conditions": self.settings.stops,
            "key": self.key,
        }

    def _moved(self, state: State, time: Float[Array, ""]) -> State:
        """Return the state after one step."""
        moving, (memory, first, risk, rises) = state.moving, state.record
        indices = None
        if self.rule.batch is not None:
            key = jr.fold_in(self.key, state.accepted_steps)
            count = len(self.problem.data)
            indices = jr.choice(key, count, (self.rule.batch,), replace=False)
        found = self.gradient(moving.parameters, indices)
        change, memory = self.rule.change(
            self.scaled(found.parameters), memory, moving.parameters
        )
        product = self.problem.model.product
        given_up = product(found.parameters, change) + 0 * found.risk
        length = jnp.sqrt(product(change, change))
        rounding = ROUNDINGS * jnp.finfo(risk.dtype).eps
        slack = rounding * (risk + jnp.abs(moving.dissipated))
        rises = jnp.where(found.risk > risk + slack, rises + 1, 0)
        first = jnp.where(jnp.isinf(first), found.risk, first)
        return dataclasses.replace(
            state,
            depth=time,
            moving=Unknowns(
                jax.tree.map(jnp.add, moving.parameters, change),
                moving.dissipated - given_up,
                moving.length + length,
            ),
            accepted_steps=state.accepted_steps + 1,
            stretch=state.stretch + 1,
            record=Notes(memory, first, found.risk, rises),
        )

    def _checked(self, state: State, good: State) -> State:
        """End the state where a condition is met; go back where it diverges."""
        status, (_, first, risk, rises) = state.status, state.record
        snapshot = self.snapshot(state.depth, state.moving)
        for stop in self.settings.stops:
            is_met = stop(snapshot) & (status == Status.reached)
            status = Status.where(is_met, stop.status, status)
        state = dataclasses.replace(state, status=status)
        is_too_large = risk > EXPLODED * jnp.maximum(first, 1)
        # Other steps may rise on their way.
        if self.rule.batch is None and self.rule.optimiser is None:
            is_too_large |= rises >= MOST_RISES
        has_escaped = (status == Status.escaped) | (status == Status.not_finite)
        is_rising = (status == Status.reached) & is_too_large
        ended = dataclasses.replace(good, status=Status.diverging)
        return choose(is_rising | (has_escaped & (rises > 0)), ended, state)
