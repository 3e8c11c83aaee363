"""How fast neighbouring flows part along a path that has been computed."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanformer.attention.jacobian import (
    ScaledJacobian,
    Search,
    check_continuous,
    norm_roots,
    warn_if_unfinished,
)
from meanformer.errors import check
from meanformer.flows.bounds.rates import normal_penalty, symmetric_part
from meanformer.flows.flow import Flow
from meanformer.flows.trajectories.tokens import Trajectory
from meanformer.measures import TokenCloud, conditional_wasserstein, wasserstein


class Growth(eqx.Module):
    r"""The growth of small perturbations along a path, and what was observed.

    Attributes:
        depths: where the rate was computed.
        rates: $\lambda_{\max}$ there, in the direction of the solve.
        log_factors: its integral from the first depth on.
        observed: ratio of the distance of two flows to that at the start, at the saved
            depths; `None` without a second flow.
    """

    depths: Float[Array, " t"]
    rates: Float[Array, " t"]
    log_factors: Float[Array, " t"]
    observed: Float[Array, " s"] | None

    @property
    def factor(self) -> Float[Array, ""]:
        """The growth factor over the whole path."""
        return jnp.exp(self.log_factors[-1])


def growth_factor(
    flow: Flow,
    trajectory: Trajectory,
    other: Trajectory | None = None,
    *,
    refine: int = 4,
    between: int = 5,
) -> Growth:
    r"""Growth factor of perturbations along a computed path, an a posteriori bound.

    $$\exp \int_0^t \lambda_{\max}\Bigl(\tfrac12\bigl(\tilde J + \tilde J^\top\bigr)
      \Bigr)\,\mathrm{d}s, \qquad \tilde J = D^{1/2} J D^{-1/2},$$
    with $J$ the derivative of all velocities in all tokens and $D$ their masses. It
    bounds the growth of infinitesimal perturbations in
    $(\sum_i w_i|v_i|^2)^{1/2}$. For a second flow at a finite distance the rate is
    maximised over clouds on the straight lines between tokens of the same row; if
    the rows are optimally paired at the start the factor bounds the growth of $W_2$.

    The integral is a trapezoidal sum, the path between saved depths an interpolation:
    refine, or save more depths, until the factor settles.

    Args:
        flow: the flow, without noise.
        trajectory: its solution.
        other: a second solution with the same depths and masses.
        refine: how many stretches each pair of saved depths is divided into.
        between: how many clouds are visited between the two flows, ends included.

    Returns:
        Rates and factors. Cost: one largest eigenvalue per depth and cloud.
    """
    check_continuous(flow)
    check(flow.noise is None, "growth_factor needs a flow without noise.")
    check(refine >= 1, f"refine is {refine}; it must be positive.")
    check(between >= 2, f"between is {between}; both ends are visited: 2 or more.")
    depths = _refined(trajectory.depths, refine)
    paths = _points_at(trajectory, depths)[:, None]
    observed = None
    if other is not None:
        observed = observed_growth(trajectory, other)
        paths = _lines(paths, _points_at(other, depths)[:, None], between)
    forward = bool(trajectory.depths[-1] >= trajectory.depths[0])
    direction = 1.0 if forward else -1.0
    rates, converged = _rates(flow, trajectory.cloud(0), depths, paths, direction)
    warn_if_unfinished(converged, "the rate of growth")
    steps = jnp.abs(jnp.diff(depths)) * (rates[1:] + rates[:-1]) / 2
    log_factors = jnp.concatenate([jnp.zeros_like(steps[:1]), jnp.cumsum(steps)])
    return Growth(depths, rates, log_factors, observed)


def observed_growth(
    trajectory: Trajectory, other: Trajectory, *, order: float = 2.0
) -> Float[Array, " t"]:
    r"""Ratio of the Wasserstein distance of two flows to that at the start.

    Clouds with positions are compared by `conditional_wasserstein`.

    Args:
        trajectory: one solution.
        other: another one with the same saved depths.
        order: the order of the distance.
    """
    same = trajectory.points.shape == other.points.shape and all(
        np.array_equal(getattr(trajectory, name), getattr(other, name))
        for name in ("depths", "weights")
    )
    check(same, "the two flows must have the same saved depths, tokens and weights.")
    is_placed = trajectory.positions is not None
    distance = conditional_wasserstein if is_placed else wasserstein
    clouds = [(trajectory.cloud(i), other.cloud(i)) for i in range(len(trajectory))]
    distances = jnp.stack([distance(*pair, order=order) for pair in clouds])
    check(float(distances[0]) > 0, "the two flows start from the same measure.")
    return distances / distances[0]


def lipschitz_profile(
    flow: Flow, trajectory: Trajectory, *, norm: str = "weighted"
) -> Float[Array, " t"]:
    """Local Lipschitz constant of the velocity at each saved depth of a path.

    Args:
        flow: the flow.
        trajectory: its solution, by `solve` or `run_layers`.
        norm: see `local_lipschitz`.
    """
    check_continuous(flow)
    constants, converged = _profile(flow, trajectory, norm)
    warn_if_unfinished(converged, "the Lipschitz constant")
    return constants


@eqx.filter_jit
def _points_at(
    trajectory: Trajectory, depths: Float[Array, " r"]
) -> Float[Array, "r n d"]:
    return jax.vmap(lambda depth: trajectory.at(depth).points)(depths)


@eqx.filter_jit
def _profile(flow, trajectory, norm):
    cloud = trajectory.cloud(0)

    def constant(place):
        depth, points = place
        jacobian = _jacobian(flow, depth, cloud, points, norm)
        found = Search().top(jacobian.normal, points)
        return jnp.sqrt(jnp.maximum(found.values[0], 0)), found.converged

    return jax.lax.map(constant, (trajectory.depths, trajectory.points))


@eqx.filter_jit
def _rates(flow, cloud: TokenCloud, depths, paths, direction: float):
    """Return the largest rate on tangent vectors over the clouds at each depth."""

    def rate(place):
        depth, clouds = place

        def rate_at(points):
            jacobian = _jacobian(flow, depth, cloud, points, "weighted", direction)
            penalty = normal_penalty(jacobian, points, flow.space)
            operator = symmetric_part(jacobian, points, flow.space, penalty)
            found = Search().top(operator, points)
            return found.values[0], found.converged

        rates, converged = jax.lax.map(rate_at, clouds)
        return rates.max(), converged.all()

    return jax.lax.map(rate, (depths, paths))


def _jacobian(flow, depth, cloud, points, norm, direction=1.0) -> ScaledJacobian:
    def field(tokens):
        velocity = flow.field(depth, cloud.moved(tokens), tokens, cloud.positions)
        return direction * velocity

    return ScaledJacobian(field, points, norm_roots(cloud, norm))


def _refined(depths: Float[Array, " t"], refine: int) -> Float[Array, " r"]:
    shares = jnp.arange(refine, dtype=depths.dtype) / refine
    inner = depths[:-1, None] + shares[None, :] * jnp.diff(depths)[:, None]
    return jnp.concatenate([inner.reshape(-1), depths[-1:]])


def _lines(first, last, count: int) -> Float[Array, "t s n d"]:
    shares = jnp.linspace(0, 1, count, dtype=first.dtype)[None, :, None, None]
    return (1 - shares) * first + shares * last
