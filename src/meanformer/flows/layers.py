"""Finitely many residual layers: the network itself, exactly."""

from typing import overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.errors import as_float_array, check, check_shape, is_concrete
from meanformer.flows.dynamics.gaussian import gaussian_layers, refuse_for_gaussians
from meanformer.flows.dynamics.state import State, initial_state, kept_if_finite
from meanformer.flows.dynamics.tokens import Problem
from meanformer.flows.flow import Flow
from meanformer.flows.inputs import (
    check_flow,
    checked_probes,
    followed,
    layer_depths,
)
from meanformer.flows.schedule import stack_flows
from meanformer.flows.solvers import FixedStep
from meanformer.flows.status import Status, moment_of
from meanformer.flows.trajectories.gaussian import (
    GaussianTrajectory,
    as_gaussian_trajectory,
)
from meanformer.flows.trajectories.tokens import Trajectory, as_trajectory
from meanformer.measures import Gaussian, TokenCloud
from meanformer.typing import ArrayLike


@overload
def run_layers(
    flow: Flow,
    mu: TokenCloud,
    count: int,
    *,
    step: float | Float[Array, ""] | None = ...,
    probes: ArrayLike | TokenCloud | None = ...,
) -> Trajectory: ...


@overload
def run_layers(
    flow: Flow,
    mu: Gaussian,
    count: int,
    *,
    step: float | Float[Array, ""] | None = ...,
) -> GaussianTrajectory: ...


def run_layers(
    flow: Flow,
    mu: TokenCloud | Gaussian,
    count: int,
    *,
    step: float | Float[Array, ""] | None = None,
    probes: ArrayLike | TokenCloud | None = None,
) -> Trajectory | GaussianTrajectory:
    r"""Run a residual network layer by layer.

    $$x_i \leftarrow R\bigl(x_i + h\,P_{x_i}\Gamma_{t_k}[\mu](x_i)\bigr), \qquad
      t_k = kh, \quad k = 0, \dots, T-1,$$
    with $R$ the retraction of the flow's space. As $T \to \infty$ with $h = 1/T$ it
    tends to the flow at depth 1, with an error $O(1/T)$. A Gaussian goes through the
    layers exactly, where they are affine on it: $m \leftarrow m + hu$ and
    $S \leftarrow (I + hL)S(I + hL)^\top$ for the velocity $u + L(x - m)$.

    Args:
        flow: the velocity and the space; noise is not allowed.
        mu: the tokens that enter, or a Gaussian.
        count: the number $T$ of layers.
        step: the step $h$; $1/T$ by default, 1 for the usual network.
        probes: points carried along without being part of the measure.

    Returns:
        The tokens before the first layer and after each one.
    """
    is_count = isinstance(count, int) and count > 0
    check(is_count, f"count is {count}; it must be an integer >= 1.")
    if isinstance(mu, Gaussian):
        refuse_for_gaussians({"probes": probes})
        size = checked_step(step, count, mu.mean().dtype)
        return as_gaussian_trajectory(*gaussian_layers(flow, mu, count, size))
    check_flow(flow, mu)
    check(flow.noise is None, "layers have no noise; use solve with FixedStep(h).")
    size = checked_step(step, count, mu.points.dtype)
    passive, places = checked_probes(flow, mu, probes)
    problem = Problem(flow, mu, places, FixedStep(1.0), (), 1.0, 1.0, 1)
    depths = layer_depths(flow, count, size)
    first = initial_state(depths[0], mu.points, passive)
    return as_trajectory(flow, mu, *_run(problem, first, size, depths))


def checked_step(step, count: int, dtype: jnp.dtype) -> Float[Array, ""]:
    """Return the step, one over the count unless given, or raise."""
    size = as_float_array("step", 1 / count if step is None else step).astype(dtype)
    check_shape("step", size, ())
    if is_concrete(size):
        check(bool(np.isfinite(size)), f"step is {step}; it must be finite.")
    return size


@eqx.filter_jit
def _run(
    problem: Problem, first: State, size: Float[Array, ""], depths: Float[Array, " t"]
):
    problem = stack_flows(problem)

    def layer(state: State, following: tuple[Array, Array]):
        depth, is_left = following
        velocity = problem.velocity(problem.flow.velocity, state.depth, state.moving)
        state = _stopped(problem, state, velocity, is_left)
        # Depths are labels: their differences are not the step, but for rounding.
        step = jnp.where(is_left, size, 0)
        moved = _step(problem, state, velocity, depth, step)
        return moved, (state, velocity[0])

    _, (states, velocities) = jax.lax.scan(
        eqx.filter_checkpoint(layer), first, followed(depths)
    )
    return states, jnp.where(jnp.isfinite(velocities), velocities, 0)


def _stopped(problem: Problem, state: State, velocity, is_left: Array) -> State:
    """Return the state, stopped where the velocity has no meaning and is needed."""
    cloud, status = problem.cloud.moved(state.points), state.status
    for stop in problem.flow.velocity.stops:
        is_met = stop(moment_of(state.depth, cloud, lambda: velocity[0]))
        is_met &= is_left & (state.status == Status.reached)
        status = Status.where(is_met, stop.status, status)
    return eqx.tree_at(lambda s: s.status, state, status)


def _step(problem: Problem, state: State, velocity, depth, size) -> State:
    retract = problem.flow.space.retract
    points, probes = jax.tree.map(
        lambda x, v: retract(x + size * v), state.moving, velocity
    )
    moved = State(
        depth,
        points,
        probes,
        state.status,
        state.accepted_steps + 1,
        state.rejected_steps,
        state.stretch + 1,
    )
    return kept_if_finite(moved, state, state.status == Status.reached)
