"""Finitely many residual layers: the network itself, exactly."""

from collections.abc import Callable
from typing import Any, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention.abstract import stack_maps
from meanformer.errors import as_float_array, check, check_shape, is_concrete
from meanformer.flows.dynamics.driver import AbstractDynamics, State, kept_if_finite
from meanformer.flows.dynamics.gaussian import (
    NOT_FOR_GAUSSIANS,
    GaussianFlow,
    check_gaussian_flow,
    first_carried,
)
from meanformer.flows.dynamics.gaussian_errors import Carried
from meanformer.flows.dynamics.tokens import Points, TokenRates, Tokens, finite
from meanformer.flows.flow import Flow
from meanformer.flows.inputs import (
    Settings,
    check_flow,
    checked_probes,
    followed,
    layer_depths,
    refuse,
)
from meanformer.flows.solvers import FixedStep
from meanformer.flows.status import Status, snapshot_of
from meanformer.flows.trajectories.abstract import cut_off
from meanformer.flows.trajectories.gaussian import GaussianTrajectory
from meanformer.flows.trajectories.tokens import Trajectory
from meanformer.measures import Gaussian, TokenCloud
from meanformer.numerics.arrays import matmul
from meanformer.typing import ArrayLike

# Layers are not solved: they have no steps to choose, and no tolerances.
NO_SETTINGS = Settings(FixedStep(1.0))


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
        refuse({"probes": probes}, NOT_FOR_GAUSSIANS)
        check_gaussian_flow(flow, mu)
        size = checked_step(step, count, mu.mean().dtype)
        depths = layer_depths(flow, count, size)
        gaussian = GaussianFlow(flow, mu, mu.root(), depths[0], NO_SETTINGS)
        first = State.first(depths[0], first_carried(mu))
        return _trajectory(gaussian, _affine_layer, first, size, depths)
    check_flow(flow, mu)
    check(flow.noise is None, "layers have no noise; use solve with FixedStep(h).")
    size = checked_step(step, count, mu.points.dtype)
    passive, places = checked_probes(flow, mu, probes)
    depths = layer_depths(flow, count, size)
    tokens = Tokens(flow, mu, places, NO_SETTINGS)
    first = State.first(depths[0], Points(mu.points, passive))
    return _trajectory(tokens, _layer, first, size, depths)


def checked_step(step, count: int, dtype: jnp.dtype) -> Float[Array, ""]:
    """Return the step, one over the count unless given, or raise."""
    size = as_float_array("step", 1 / count if step is None else step).astype(dtype)
    check_shape("step", size, ())
    if is_concrete(size):
        check(bool(np.isfinite(size)), f"step is {step}; it must be finite.")
    return size


def _trajectory(dynamics, layer: Callable, first: State, size, depths) -> Any:
    return cut_off(dynamics.trajectory(*_run(dynamics, layer, first, size, depths)))


@eqx.filter_jit
def _run(
    dynamics: AbstractDynamics,
    layer: Callable,
    first: State,
    size: Float[Array, ""],
    depths: Float[Array, " t"],
):
    """Return states before and after all layers, with their rates, stacked."""
    dynamics = stack_maps(dynamics)

    def one(state: State, following: tuple[Array, Array]):
        depth, is_left = following
        # Depths are labels: their differences are not the step, but for rounding.
        step = jnp.where(is_left, size, 0)
        state, moving, rates, is_finite = layer(dynamics, state, step, is_left)
        moved = State(
            depth,
            moving,
            state.status,
            state.accepted_steps + 1,
            state.rejected_steps,
            state.stretch + 1,
        )
        moved = kept_if_finite(moved, state, state.is_running, is_finite)
        return moved, (state, jax.tree.map(finite, rates))

    return jax.lax.scan(eqx.filter_checkpoint(one), first, followed(depths))[1]


def _layer(tokens: Tokens, state: State, size: Float[Array, ""], is_left: Array):
    """Return a state, stopped where it has to, and its tokens after one layer."""
    velocity = tokens.velocity(tokens.flow.velocity, state.depth, state.moving)
    state = _stopped(tokens, state, velocity.tokens, is_left)
    retract = tokens.flow.space.retract
    moving = jax.tree.map(lambda x, v: retract(x + size * v), state.moving, velocity)
    return state, moving, TokenRates(velocity.tokens, None), True


def _stopped(tokens: Tokens, state: State, velocity, is_left: Array) -> State:
    """Return the state, stopped where the velocity has no meaning and is needed."""
    cloud, status = tokens.cloud.moved(state.moving.tokens), state.status
    for stop in tokens.flow.velocity.stops:
        is_met = stop(snapshot_of(state.depth, cloud, lambda: velocity))
        is_met &= is_left & state.is_running
        status = Status.where(is_met, stop.status, status)
    return eqx.tree_at(lambda s: s.status, state, status)


def _affine_layer(
    gaussian: GaussianFlow, state: State, size: Float[Array, ""], is_left: Array
):
    r"""Return a Gaussian after one layer: $m + hu$ and $(I + hL)\Phi$, exactly."""
    found = gaussian.velocity(gaussian.flow.velocity, state.depth, state.moving)
    mean, linear, log_volume = state.moving
    layer = jnp.eye(len(mean), dtype=mean.dtype) + size * found.slope
    moving = Carried(
        mean + size * found.drift,
        linear + size * matmul(found.slope, linear),
        log_volume + jnp.linalg.slogdet(layer)[1],
    )
    # The covariance is the square of what was moved, so it overflows first.
    is_finite = jnp.isfinite(gaussian.gaussian(moving).covariance()).all()
    return state, moving, found, is_finite
