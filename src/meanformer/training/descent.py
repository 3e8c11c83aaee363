"""Heads that move in training time: a gradient flow, or steps of an optimiser."""

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
from meanformer.training.data import Dataset, Loss
from meanformer.training.gradients import AbstractEngine, Gradient, gradient_of
from meanformer.training.layer import Parameters
from meanformer.training.runs import TrainingRun
from meanformer.training.transformer import MeanFieldTransformer
from meanformer.typing import Key

# Rises of the risk, one after another, after which steps are too large.
MOST_RISES = 3
# Roundings by which a risk that stays may rise.
ROUNDINGS = 64


class Problem(eqx.Module):
    """What is trained, and on what.

    Attributes:
        model: the transformer at the start.
        data: contexts, queries and targets.
        loss: the loss.
        decay: the factor of the penalty.
        engine: the way to the gradient.
        speeds: factors of the velocities of queries and keys, and of all the rest.
    """

    model: MeanFieldTransformer
    data: Dataset
    loss: Loss
    decay: Float[Array, ""]
    engine: AbstractEngine
    speeds: tuple[float, float] = eqx.field(static=True)

    def gradient(self, parameters: Parameters, indices: Any = None) -> Gradient:
        """Return the gradient at some particles, of some of the data."""
        data = self.data if indices is None else self.data.some(indices)
        model = self.model.with_parameters(parameters)
        return gradient_of(model, data, self.loss, self.decay, self.engine)

    def scaled(self, changes: Parameters) -> Parameters:
        """Return changes times the speeds."""
        of_scores, of_rest = self.speeds
        scaled = jax.tree.map(lambda leaf: of_rest * leaf, changes)
        heads = changes.heads
        slow = scaled.heads._replace(
            query=of_scores * heads.query, key=of_scores * heads.key
        )
        return dataclasses.replace(scaled, heads=slow)

    def product(self, first: Parameters, second: Parameters) -> Float[Array, ""]:
        """Return the inner product of changes: the mean over particles and depth."""
        shares = self.model.shares

        def of_leaf(a, b):
            sums = jnp.sum(a * b, axis=tuple(range(1, a.ndim)))
            return shares @ sums / a.shape[1]

        leaves = jax.tree.leaves(jax.tree.map(of_leaf, first, second))
        return jnp.sum(jnp.stack(leaves))

    def snapshot(self, time: Float[Array, ""], parameters: Parameters) -> Snapshot:
        """Return what stop conditions may look at: the heads as a measure."""
        model = self.model.with_parameters(parameters)

        def radius():
            leaves = jax.tree.leaves(parameters)
            return jnp.max(jnp.stack([jnp.abs(leaf).max() for leaf in leaves]))

        def speed():
            moved = self.scaled(self.gradient(parameters).parameters)
            return jnp.sqrt(self.product(moved, moved))

        return Snapshot(time, model.measure(), radius, speed)

    def request(self) -> dict[str, Any]:
        """Return what tells one training from another, by the words for it."""
        return {
            "transformer": self.model,
            "data": self.data,
            "loss": (self.loss, self.decay),
            "speeds": self.speeds,
        }


class Moving(NamedTuple):
    """Particles, the risk that they have given up, and the way that they went."""

    parameters: Parameters
    dissipated: Float[Array, ""]
    length: Float[Array, ""]


class GradientFlow(AbstractIntegrated):
    r"""Heads that follow $\dot\theta = -G_s(\theta)$, each at its depth.

    Attributes:
        problem: what is trained.
        settings: steps, tolerances, conditions that end it.
    """

    problem: Problem
    settings: Settings

    def field(self, time: Float[Array, ""], moving: Moving) -> Moving:
        """Return how particles move, and what they give up on their way."""
        found = self.problem.gradient(moving.parameters).parameters
        moved = self.problem.scaled(found)
        given_up = self.problem.product(found, moved)
        speed = jnp.sqrt(self.problem.product(moved, moved))
        return Moving(jax.tree.map(jnp.negative, moved), given_up, speed)

    def stretch(self, state: State, end: Float[Array, ""], mode):
        """Return what to integrate between two saved times."""
        equation = term(self.field, state, end)

        def snapshot(time, moving: Moving):
            return self.problem.snapshot(time, moving.parameters)

        conditions = self.settings.conditions(snapshot)
        return in_depth(state, end, equation, self.settings, mode, conditions)

    def rates(self, state: State) -> Gradient:
        """Return the gradient."""
        return self.problem.gradient(state.moving.parameters)

    def trajectory(self, states: State, rates: Gradient) -> TrainingRun:
        """Return the particles along training time."""
        return run_of(self.problem, states, states.moving, rates)

    def resumed(self, run: TrainingRun) -> State:
        """Return the particles at the last saved time."""
        moving = Moving(run.parameters, run.dissipated, run.lengths)
        return State.at_end_of(run, moving)

    def request(self, start: State) -> dict[str, Any]:
        """Return what tells one training from another."""
        return self.problem.request() | self.settings.request()


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
        self, problem: Problem, gradient: Parameters, memory: PyTree, at: Parameters
    ) -> tuple[Parameters, PyTree]:
        """Return the change of the particles, and what is remembered then."""
        scaled = problem.scaled(gradient)
        if self.optimiser is None:
            return jax.tree.map(lambda leaf: -self.step * leaf, scaled), memory
        return self.optimiser.update(scaled, memory, at)


class Walk(NamedTuple):
    """What steps change: the particles, the optimiser's memory, rises of the risk."""

    moving: Moving
    memory: PyTree
    risk: Float[Array, ""]
    rises: Int[Array, ""]


class Descent(AbstractDynamics):
    """Heads that an optimiser moves step by step.

    Attributes:
        problem: what is trained.
        rule: the steps.
        settings: conditions that end it.
        key: the key of the batches; or `None`.
    """

    problem: Problem
    rule: GradientDescent
    settings: Settings
    key: Key | None

    def first(self) -> Walk:
        """Return where the walk begins."""
        parameters = self.problem.model.parameters
        zero = jnp.zeros((), self.problem.data.tokens.dtype)
        moving = Moving(parameters, zero, zero)
        none = jnp.zeros((), jnp.result_type(int))
        return Walk(moving, self.rule.memory(parameters), zero + jnp.inf, none)

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
            has_risen = moved.moving.rises > 0
            good = choose(has_risen, good, state)
            return self._checked(moved, good), good

        return jax.lax.while_loop(goes_on, one, (state, state))[0]

    def rates(self, state: State) -> Gradient:
        """Return the gradient of the whole risk."""
        return self.problem.gradient(state.moving.moving.parameters)

    def trajectory(self, states: State, rates: Gradient) -> TrainingRun:
        """Return the particles along training time."""
        walk = states.moving
        memory = rows_of(walk.memory, walk.risk)
        noted = (memory, walk.risk, walk.rises)
        return run_of(self.problem, states, walk.moving, rates, *noted)

    def resumed(self, run: TrainingRun) -> State:
        """Return particles and memory at the last saved time."""
        kinds = jax.eval_shape(self.rule.memory, self.problem.model.parameters)
        memory = from_rows(run.memory, kinds)
        moving = Moving(run.parameters, run.dissipated, run.lengths)
        walk = Walk(moving, memory, run.last_risks, run.rises)
        return State.at_end_of(run, walk)

    def request(self, start: State) -> dict[str, Any]:
        """Return what tells one training from another."""
        return {
            **self.problem.request(),
            "solver": self.rule,
            "stop conditions": self.settings.stops,
            "key": self.key,
        }

    def _moved(self, state: State, time: Float[Array, ""]) -> State:
        """Return the state after one step."""
        moving, memory, risk, rises = state.moving
        indices = None
        if self.rule.batch is not None:
            key = jr.fold_in(self.key, state.accepted_steps)
            count = len(self.problem.data)
            indices = jr.choice(key, count, (self.rule.batch,), replace=False)
        found = self.problem.gradient(moving.parameters, indices)
        change, memory = self.rule.change(
            self.problem, found.parameters, memory, moving.parameters
        )
        given_up = self.problem.product(found.parameters, change)
        length = jnp.sqrt(self.problem.product(change, change))
        rounding = ROUNDINGS * jnp.finfo(risk.dtype).eps
        slack = rounding * (risk + jnp.abs(moving.dissipated))
        rises = jnp.where(found.risk > risk + slack, rises + 1, 0)
        moving = Moving(
            jax.tree.map(jnp.add, moving.parameters, change),
            moving.dissipated - given_up,
            moving.length + length,
        )
        return State(
            time,
            Walk(moving, memory, found.risk, rises),
            state.status,
            state.accepted_steps + 1,
            state.rejected_steps,
            state.stretch + 1,
        )

    def _checked(self, state: State, good: State) -> State:
        """End the state where a condition is met; go back where it diverges."""
        status, rises = state.status, state.moving.rises
        snapshot = self.problem.snapshot(state.depth, state.moving.moving.parameters)
        for stop in self.settings.stops:
            is_met = stop(snapshot) & (status == Status.reached)
            status = Status.where(is_met, stop.status, status)
        state = eqx.tree_at(lambda s: s.status, state, status)
        # Other steps may rise on their way.
        if self.rule.batch is not None or self.rule.optimiser is not None:
            return state
        has_escaped = (status == Status.escaped) | (status == Status.not_finite)
        too_often = (status == Status.reached) & (rises >= MOST_RISES)
        ended = eqx.tree_at(lambda s: s.status, good, Status.diverging)
        return choose(too_often | (has_escaped & (rises > 0)), ended, state)


def run_of(
    problem: Problem,
    states: State,
    moving: Moving,
    gradient: Gradient,
    memory=None,
    last_risks=None,
    rises=None,
) -> TrainingRun:
    """Return what was saved as a run."""
    return TrainingRun(
        states.depth,
        *moving,
        gradient.risk,
        gradient.squared_norm,
        gradient.profile,
        states.status,
        states.accepted_steps,
        states.rejected_steps,
        memory,
        last_risks,
        rises,
        problem.model,
    )


def rows_of(tree: PyTree, risks: Float[Array, " t"]) -> Float[Array, "t e"]:
    """Return the numbers of a tree as one row for each time, in one type."""
    count = len(risks)
    rows = [
        leaf.reshape(count, -1).astype(risks.dtype) for leaf in jax.tree.leaves(tree)
    ]
    return jnp.concatenate([jnp.zeros((count, 0), risks.dtype), *rows], axis=1)


def from_rows(rows: Float[Array, "t e"], kinds: PyTree) -> PyTree:
    """Return the tree that rows stand for, with leaves of these shapes and types."""
    leaves, start = [], 0
    for kind in jax.tree.leaves(kinds):
        part = rows[:, start : start + kind.size]
        leaves.append(part.reshape(len(rows), *kind.shape).astype(kind.dtype))
        start += kind.size
    return jax.tree.unflatten(jax.tree.structure(kinds), leaves)
